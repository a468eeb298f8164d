"""What processes tell each other of a save comes back from JSON as it was."""

from __future__ import annotations

import json

import pytest

from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.saving.reports import Committed

SUMMARY = EpochSummary("a-7-0", 1, 2, 3, 2, 0.1, 0.2, None)


@pytest.mark.parametrize("attached", [None, {}, {3: {"accuracy": 0.5}}])
def test_a_commit_comes_back(attached: dict[int, dict[str, float]] | None) -> None:
    """Also one whose attached metrics nobody has looked at, which is not that there are none."""
    made = Committed(epoch=7, summary=SUMMARY, deleted=(1, 2), remote=(1,), attached=attached)
    assert Committed.from_wire(7, json.loads(json.dumps(made.to_wire()))) == made
