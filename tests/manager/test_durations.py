"""Durations as text, such as `10min`, wherever a caller gives one."""

import dataclasses
import inspect
import pathlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import epochckpt as ec
from epochckpt.errors import InvalidArgumentError

TOLD = {"NodeStatus", "RunResult", "SaveResult"}  # they tell how long something took


def given() -> Iterator[tuple[str, Any]]:
    """Every argument of a public callable that is a number of seconds, and its annotation."""
    for space in (ec, ec.metadata, ec.policy, ec.v1.training):
        for name in set(getattr(space, "__all__", dir(space))) - TOLD:
            made = getattr(space, name)
            is_error = isinstance(made, type) and issubclass(made, BaseException)
            ours = getattr(made, "__module__", "").startswith("epochckpt")
            if ours and callable(made) and not is_error and not name.endswith("Row"):
                for parameter in inspect.signature(made).parameters.values():
                    if parameter.name.endswith("_secs"):
                        yield f"{name}({parameter.name})", parameter.annotation


def test_every_duration_that_a_caller_gives_may_be_text() -> None:
    """The annotations say so; the tests below and those of the runner show it."""
    found = dict(given())
    assert {
        "CopyUpload(timeout_secs)",
        "JobRunner(deadline_secs)",
        "JobRunner(save_every_secs)",
        "JobRunner(exchange_timeout_secs)",
        "SqliteMetadataHandler(timeout_secs)",
        "StorageOptions(max_blocked_secs)",
        "StorageOptions(save_timeout_secs)",
        "StorageOptions(open_timeout_secs)",
        "StorageOptions(restore_timeout_secs)",
        "follow(timeout_secs)",
        "follow(interval_secs)",
    } == found.keys()
    assert [name for name, kind in found.items() if not ("str" in str(kind) or "Duration[" in str(kind))] == []


def test_storage_options_are_read_as_seconds() -> None:
    """Also after a pickle, a replacement and a comparison; the options stay frozen."""
    options = ec.StorageOptions(save_timeout_secs="30min", open_timeout_secs=7, max_blocked_secs="1500ms")
    assert (options.save_timeout_secs, options.open_timeout_secs, options.max_blocked_secs) == (1800.0, 7, 1.5)
    assert options.restore_timeout_secs == ec.StorageOptions().restore_timeout_secs == 600.0
    assert ec.StorageOptions(max_blocked_secs=None).max_blocked_secs is None
    assert pickle.loads(pickle.dumps(options)) == options == ec.StorageOptions(**vars(options))
    assert dataclasses.replace(options, save_timeout_secs="1h").save_timeout_secs == 3600.0
    assert "save_timeout_secs=1800.0" in repr(options)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.save_timeout_secs = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_a_save_waits_for_the_seconds_of_its_text(tmp_path: pathlib.Path) -> None:
    """A manager computes with them."""
    job = ec.Job(stop_conditions=[ec.stop.max_epochs(1)])
    job.init(lambda ws: ws.update(total=0))
    storage = ec.StorageOptions(save_timeout_secs="10min", open_timeout_secs="1min", max_blocked_secs="30s")
    assert ec.run(job, tmp_path / "run", storage=storage).last_committed_epoch == 1
    assert list(ec.follow(tmp_path / "run", timeout_secs="1ms", interval_secs="1ms")) == [0, 1]
    assert list(ec.follow(tmp_path / "run", timeout_secs=np.int64(0), interval_secs=np.float32(0.5))) == [0, 1]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("StorageOptions.save_timeout_secs", lambda secs: ec.StorageOptions(save_timeout_secs=secs)),
        ("StorageOptions.max_blocked_secs", lambda secs: ec.StorageOptions(max_blocked_secs=secs)),
        ("CopyUpload(timeout_secs)", lambda secs: ec.CopyUpload("memory://x/", timeout_secs=secs)),
        ("SqliteMetadataHandler(timeout_secs)", lambda s: ec.metadata.SqliteMetadataHandler("x.db", timeout_secs=s)),
        ("interval_secs", lambda secs: next(ec.follow("nowhere", interval_secs=secs))),
        ("timeout_secs", lambda secs: next(ec.follow("nowhere", timeout_secs=secs))),
    ],
)
@pytest.mark.parametrize("wrong", ["5 minutes", "", "-1s", -1, float("nan"), True, b"1s"])
def test_what_is_no_duration_is_refused(name: str, call: Callable[[Any], Any], wrong: Any) -> None:
    """By the name of the argument, with what it may be and what it was."""
    with pytest.raises(InvalidArgumentError) as caught:
        call(wrong)
    assert f"{name} is a number of seconds" in str(caught.value)
    assert "'90s', '10min' or '1.5h'" in str(caught.value)
    assert f"got {wrong!r}" in str(caught.value)


def test_uploads_and_handlers_take_text() -> None:
    """Kept as seconds; SQLite has a limit."""
    assert ec.CopyUpload("memory://x/", timeout_secs="2h").timeout_secs == 7200.0
    ec.metadata.SqliteMetadataHandler("x.db", timeout_secs="1min")
    with pytest.raises(InvalidArgumentError, match=r"timeout_secs\) is at most .*, got '9000w'"):
        ec.metadata.SqliteMetadataHandler("x.db", timeout_secs="9000w")
