"""`tests.support.prepared`: a process that was forked from a prepared one is as one that was started anew."""

import os
import select
import signal
import subprocess
import sys

import pytest

from tests.support import prepared
from tests.support.processes import ROOT, parse_result, run_worker, start_processes

pytestmark = pytest.mark.skipif(not prepared.POSSIBLE, reason="needs os.pidfd_open")

_MODULE = "tests.support.prepared_jobs"


@pytest.mark.slow
def test_it_is_in_its_own_session_and_environment() -> None:
    """It leads a session, sees no other variables and arguments than its own, and has no file of its server open."""
    (found,) = run_worker(f"{_MODULE}:describe", {"variable": "OF_THIS_TEST"}, 1, env={"OF_THIS_TEST": "1"})
    assert found["session"] == found["pid"] == found["group"]
    assert found["variable"] == "1"
    assert found["files"] == [0, 1, 2]
    assert found["main"] == "tests.support.worker"
    (found,) = run_worker(f"{_MODULE}:describe", {"variable": "OF_THIS_TEST"}, 1)
    assert found["variable"] is None


@pytest.mark.slow
def test_variables_that_jax_reads_as_it_is_imported_count() -> None:
    """They need a server of their own, and get it."""
    (found,) = run_worker(f"{_MODULE}:bits_of_a_float", {}, 1, env={"JAX_ENABLE_X64": "1"})
    assert found == 64
    (found,) = run_worker(f"{_MODULE}:bits_of_a_float", {}, 1)
    assert found == 32


@pytest.mark.slow
def test_neighbours_in_a_job_hash_differently() -> None:
    """Or nothing would show that depends on the order of a set."""
    first, second = run_worker(f"{_MODULE}:hash_of", {"text": "epoch"}, 2)
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "returncode"),
    [(["return"], 0), (["exit"], 3), (["raise"], 1), (["kill"], -signal.SIGKILL), (["interrupt"], -signal.SIGINT)],
)
def test_it_ends_as_any_process(words: list[str], returncode: int) -> None:
    """Its exit status is its own, and its exit handlers run wherever Python itself ends it."""
    with start_processes(["-m", _MODULE, *words], 1) as job:
        (outcome,) = job.wait(60)
    assert outcome.returncode == returncode
    assert ("the exit handler" in outcome.stdout) == (words != ["kill"])


def test_it_ends_with_whoever_asked_for_it() -> None:
    """A run of tests that is killed leaves no process behind."""
    program = f"""
import os, signal
from tests.support.processes import start_processes
job = start_processes(["-m", "{_MODULE}", "wait"], 1)
job[0].wait_for_output("waits", 60)
print("RESULT", job[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    pid = parse_result(killed.stdout)
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([ended], [], [], 60)
    finally:
        os.close(ended)
    assert readable
