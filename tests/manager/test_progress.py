"""What long work shows while it goes on, and what it leaves in the log."""

from __future__ import annotations

import fcntl
import logging
import os
import pathlib
import re
import struct
import sys
import termios
import threading
import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import _progress
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.taps import eventually, is_record

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore


class Terminal:
    """A pseudo-terminal in place of stderr; `said` is what came there."""

    def __init__(self) -> None:
        self.said = b""
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.file = open(theirs, "w", encoding="utf-8")  # noqa: SIM115
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                found = os.read(self._ours, 1 << 16)
            except OSError:  # the other side is closed
                return
            self.said += found

    def close(self) -> str:
        self.file.close()
        self._reader.join()
        os.close(self._ours)
        return self.said.decode()


def main_waits() -> bool:
    """Whether the main thread waits for its saves."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return any(caller.f_code.co_name == "wait_until_finished" for caller, _ in traceback.walk_stack(frame))


def everything(folder: pathlib.Path, faults: Faults, seen: Callable[[], bool] = main_waits) -> None:
    """Whatever may last long: saves that are waited for, restores, exports, verifications and uploads.

    The save is committed when it is `seen` that it is waited for: nobody sees one that has ended before.
    """
    state = {"w": jnp.arange(50_000.0), "n": 3}
    with ec.CheckpointManager(folder / "run") as manager:
        with faults.before(Store.create, lambda call: eventually(seen), where=lambda call: is_record(call.path)):
            manager.save(1, args=Save(state))
            manager.wait_until_finished()
        manager.restore(1, args=Restore(state))
        manager.restore_newest(lambda epoch: None)
        assert manager.verify(1).ok
        ec.LocalSession().run(ec.CopyUpload(folder / "copy").build(1, manager))
    ec.export(folder / "run", 1, folder / "tensors", "safetensors")


SHOWN = (
    "saving checkpoint 1:",
    "restoring checkpoint 1:",
    "restoring:",
    "verifying checkpoint 1:",
    "uploading checkpoint 1:",
    "exporting:",
)


@pytest.mark.parametrize("where", ["terminal", "dumb", "pipe"])
def test_a_bar_is_shown_on_a_terminal_alone(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: Faults,
    patience: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
    where: str,
) -> None:
    """One for each piece of work, with its bytes, taken away at the end; elsewhere there is nothing, however long."""
    patience(bar_delay_secs=0.0, bar_removal_secs=100.0)
    monkeypatch.setenv("TERM", "dumb" if where == "dumb" else "xterm")
    if where == "pipe":
        everything(tmp_path, faults)
        said = "".join(capfd.readouterr())
        assert not any(text in said for text in SHOWN)
        return
    terminal = Terminal()
    try:
        monkeypatch.setattr(sys, "stderr", terminal.file)
        drawn = SHOWN[0].encode()
        everything(tmp_path, faults, (lambda: drawn in terminal.said) if where == "terminal" else main_waits)
    finally:
        monkeypatch.undo()
        said = terminal.close()
    assert [text for text in SHOWN if text not in said] == ([] if where == "terminal" else list(SHOWN))
    if where == "terminal":
        for text in ("saving checkpoint 1", "verifying checkpoint 1", "uploading checkpoint 1", "exporting"):
            assert re.search(r" 20\dk", said.split(text)[-1])  # bytes, when it was drawn last
        assert said.endswith("\r")


def test_what_ends_soon_shows_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, faults: Faults, patience: Callable[..., None]
) -> None:
    """Not even on a terminal: what is faster than anybody looks."""
    patience(bar_delay_secs=1e6)
    terminal = Terminal()
    try:
        monkeypatch.setattr(sys, "stderr", terminal.file)
        everything(tmp_path, faults)
    finally:
        monkeypatch.undo()
        assert terminal.close() == ""


def test_work_inside_of_work_counts_into_it() -> None:
    """Its parts, as far as they are known; none of it is known to be more than all."""
    with _progress.work("outer") as outer:
        with _progress.work("inner") as inner:
            _progress.follow(lambda: 30, 20)
            _progress.follow(lambda: 1, 20)
            assert inner.figures() == (21, 40)
            inner.advance(5)
            _progress.note("cast", 2)
            assert inner.figures() == (21, None)  # what is written has been read before
        _progress.note("cast", 1)
        assert (dict(inner.notes), dict(outer.notes)) == ({"cast": 2}, {"cast": 1})
        assert outer.figures() == (21, None)
        count = _progress.counting()
        assert count is not None
        count(25)
    assert outer.figures() == (30, None)
    assert _progress.counting() is None
    with _progress.work("whole", 100) as whole:
        _progress.follow(lambda: 30, 30)  # what is inside of work whose size is known is known, too
        whole.advance(40)
        assert whole.figures() == (40, 100)


def test_restores_and_deletions_leave_a_line(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes, seconds, from where, and the leaves that were cast or missing."""
    state = {"a": jnp.ones(1000), "b": jnp.ones(10), "n": np.zeros(4)}
    target = {"a": jax.ShapeDtypeStruct((1000,), jnp.bfloat16), "b": jnp.zeros(10), "c": jnp.zeros(3)}
    run = tmp_path / "run"
    with (
        caplog.at_level(logging.INFO, logger="absl"),
        ec.CheckpointManager(run, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager,
    ):
        for epoch in range(3):
            manager.save(epoch, args=Save(state))
        manager.wait_until_finished()
        manager.restore(2, args=ocp.args.PyTreeRestore(target, partial_restore=True))
        manager.restore(None)
        manager.restore_newest(lambda epoch: manager.restore_leaves(epoch, "a"))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    restored = [line for line in said if " restored from " in line]
    assert len(restored) == 3
    assert all(line.startswith(f"checkpoint 2 restored from {run}: ") and " s" in line for line in restored)
    assert restored[0].endswith(", 1 leaf cast, 1 leaf missing")
    assert "leaf" not in restored[1]
    assert [line.partition(":")[0] for line in said if "is deleted" in line] == [
        f"checkpoint {epoch} of {run} is deleted" for epoch in (0, 1)
    ]
