"""A look at a directory that is opened: whether it is made, and what is said where it is not."""

from __future__ import annotations

import pathlib
from typing import Any

import orbax.checkpoint as ocp
import pytest

from epochckpt.saving import opening
from epochckpt.saving.opening import looked_at
from epochckpt.storage import open_store
from tests.support.in_memory import InMemory, Service


@pytest.mark.parametrize(
    ("create", "read_only", "is_there", "is_made", "said"),
    [
        (True, False, False, True, ""),
        (True, False, True, True, ""),
        (False, False, True, True, ""),
        (False, False, False, False, "options.create is False: the first save makes it"),
        (False, True, False, False, "reload() looks again"),
        (True, True, False, False, "reload() looks again"),
        (True, True, True, True, ""),
    ],
)
def test_a_missing_directory_is_made_if_it_may_be_and_else_said_to_be_missing(
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    create: bool,
    read_only: bool,
    is_there: bool,
    is_made: bool,
    said: str,
) -> None:
    root = tmp_path / "run"
    if is_there:
        root.mkdir()
    options = ocp.CheckpointManagerOptions(create=create and not read_only, read_only=read_only)
    assert looked_at(open_store(root), options, lambda: "seen") == "seen"
    assert root.exists() is is_made
    warnings = [record.getMessage() for record in caplog.records if "does not exist" in record.getMessage()]
    assert len(warnings) == bool(said)
    assert all(said in text for text in warnings)


def test_openings_of_a_part_of_the_processes_have_keys_of_their_own() -> None:
    """Processes that open together count their openings, and others do not count these."""
    processes = InMemory(Service(), 0, 2)

    def prefix(**group: Any) -> str:
        requested = ocp.options.MultiprocessingOptions(**group)
        return opening.keys_prefix(processes, ocp.CheckpointManagerOptions(multiprocessing_options=requested))

    first = prefix()
    assert first.rpartition("/")[0] == prefix().rpartition("/")[0]
    others = [prefix(primary_host=1), prefix(active_processes={0, 1}), prefix(barrier_sync_key_prefix="evaluators")]
    folders = [one.rpartition("/")[0] for one in others]
    assert first.rpartition("/")[0] not in folders
    assert folders[0] == folders[1] != folders[2]
    numbers = [int(one.rpartition("/")[2]) for one in others]
    assert numbers[1] == numbers[0] + 1
