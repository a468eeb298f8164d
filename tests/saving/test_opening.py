"""A look at a directory that is opened: whether it is made, and what is said where it is not."""

from __future__ import annotations

import pathlib

import orbax.checkpoint as ocp
import pytest

from epochckpt.saving.opening import looked_at
from epochckpt.storage import open_store


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
