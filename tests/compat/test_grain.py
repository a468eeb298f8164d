"""Grain's own `CheckpointSave/Restore`: each process goes on with the next batch of its own part of the data."""

from __future__ import annotations

import pathlib

import pytest

from tests.support.processes import run_worker


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_pipeline_goes_on_where_it_was_saved(tmp_path: pathlib.Path, count: int) -> None:
    """The position at `save()`, not the one the iterator had reached when the background wrote; a file per process."""
    arguments = {"directory": str(tmp_path)}
    saved = run_worker("tests.support.grain_jobs:save", arguments, count, 2)
    restored = run_worker("tests.support.grain_jobs:restore", arguments, count, 2)
    assert [r["after"] for r in restored] == [s["after"] for s in saved]
    seen = [str(batch) for s in saved for batch in s["before"] + s["after"]]
    assert len(set(seen)) == len(seen) == 7 * count
    names = sorted(p.name for p in (tmp_path / "3" / "iter").iterdir())
    assert names == [f"process_{i}-of-{count}.json" for i in range(count)]


@pytest.mark.slow
def test_another_process_count_is_refused_by_grain_itself(tmp_path: pathlib.Path) -> None:
    """Its error names the file that it looked for; it is not mistaken for damage."""
    arguments = {"directory": str(tmp_path)}
    run_worker("tests.support.grain_jobs:save", arguments, 2, 1)
    with pytest.raises(AssertionError, match=r"process_0-of-1\.json does not exist"):
        run_worker("tests.support.grain_jobs:restore", arguments, 1, 2)
