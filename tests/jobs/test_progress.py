"""What people see of a run."""

from __future__ import annotations

import fcntl
import os
import pathlib
import pty
import struct
import subprocess
import sys
import termios

import pytest

import epochckpt as ec
from tests.support.processes import ROOT

PROGRAM = """
import epochckpt as ec
job = ec.Job()
job.epoch(lambda ws: {"loss": 1.0 / ws.epoch})
job.stop_when(ec.stop.max_epochs(7))
ec.JobRunner(job).train(ec.LocalSession())
"""


def job() -> ec.Job:
    made = ec.Job()
    made.epoch(lambda ws: {"loss": 1.0 / ws.epoch})
    made.stop_when(ec.stop.max_epochs(4) | ec.stop.nan("loss"))
    return made


def test_no_bar_is_shown_where_output_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """Logs of a cluster are not for bars: they get a line for each epoch, unless that is not wanted either."""
    ec.JobRunner(job()).train()
    assert capfd.readouterr().err.splitlines() == [
        "epoch 1/4: loss=1",
        "epoch 2/4: loss=0.5",
        "epoch 3/4: loss=0.3333",
        "epoch 4/4: loss=0.25",
    ]


def test_a_bar_can_be_asked_for_and_forbidden(capfd: pytest.CaptureFixture[str]) -> None:
    """With the last metrics."""
    ec.JobRunner(job(), progress=True).train(ec.LocalSession())
    shown = capfd.readouterr().err
    assert "4/4" in shown
    assert "loss=0.25" in shown
    ec.JobRunner(job(), progress=False).train(ec.LocalSession())
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_bar_is_shown_in_a_terminal(tmp_path: pathlib.Path) -> None:
    """A real pseudo-terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=theirs,
        stdout=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert child.wait(60) == 0, shown
    assert b"/7" in shown
    assert b"loss=" in shown
