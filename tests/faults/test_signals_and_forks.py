"""Ctrl-C, signal handlers, forks and the interpreter's end: a manager keeps its promises at every line of its code."""

from __future__ import annotations

import _thread
import contextlib
import functools
import itertools
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import _threads
from epochckpt.errors import EpochExistsError
from epochckpt.manager import manager, outcomes
from epochckpt.saving import history, in_flight, primary, queue, retention
from epochckpt.saving import save as save_module
from tests.support.interrupting import ctrl_c, interrupt

# What the training thread runs of ours.
MODULES = [save_module, queue, in_flight, primary, manager, outcomes, history, retention, _threads]
EVERY = [pytest.param(False, id="line"), pytest.param(True, id="opcode", marks=pytest.mark.long)]


@pytest.fixture
def m(tmp_path: pathlib.Path, patience: Callable[..., None]) -> Iterator[ec.CheckpointManager]:
    """A manager that gives a save up after a few seconds: nothing here takes that long unless it is lost."""
    patience(verdict_margin_secs=1.0)
    storage = ec.StorageOptions(save_timeout_secs=10, orbax_view=False)
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ec.CheckpointManager(tmp_path / "run", options=options, storage=storage) as opened:
        yield opened


def save(m: ec.CheckpointManager, step: int, *, force: bool = False) -> bool:
    return m.save(step, args=ocp.args.StandardSave({"a": np.full(4, float(step))}), force=force)


def save_now(m: ec.CheckpointManager, step: int) -> None:
    """What a handler of SIGTERM does: the epoch is there when it returns, whoever saves it."""
    with contextlib.suppress(EpochExistsError):  # the code that is interrupted saves it
        save(m, step, force=True)
    m.wait_until_finished()


def test_an_interrupt_that_no_system_call_hears_ends_a_wait() -> None:
    """`interrupt_main` sets what a signal sets, and wakes no lock."""
    future: _threads.Future[None] = _threads.Future()
    training = threading.main_thread().ident or 0

    def interrupt_the_wait() -> None:
        while sys._current_frames()[training].f_code is not _threads.Future.wait.__code__:
            pass
        _thread.interrupt_main()

    beside = threading.Thread(target=interrupt_the_wait)
    beside.start()
    with pytest.raises(KeyboardInterrupt):
        future.result()
    beside.join()


def test_a_burst_of_jobs_starts_one_thread() -> None:
    """Each thread that is started too many costs a save two switches; a job after the thread's end starts the next."""
    started: list[Callable[[], None]] = []
    lane = _threads.Lane(started.append)
    for _ in range(2):
        futures = [lane.submit(functools.partial(int, number)) for number in range(5)]
        assert len(started) == 1
        started.pop()()
        assert [future.result(0) for future in futures] == [*range(5)]


def test_an_interrupt_does_not_wait_for_reads_under_way() -> None:
    """Of the threads of a pool one is the caller's: what a signal's handler raises there is raised at once."""
    begun = threading.Event()
    answer = threading.Event()

    def read() -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            answer.wait()  # a store that does not answer
            return
        begun.wait()
        _thread.interrupt_main()
        threading.Event().wait()

    try:
        with pytest.raises(KeyboardInterrupt):
            _threads.Pool(2).run([read, read])
    finally:
        answer.set()


def test_an_interrupt_is_not_hidden_by_an_error_that_came_before() -> None:
    """It is what the caller's thread heard; the error of another thread is not raised in its place."""
    helpers = list[int]()
    begun = threading.Event()
    caller = threading.Event()

    def is_at_work(thread: int) -> bool:
        frame = sys._current_frames().get(thread)
        while frame is not None and frame.f_code.co_name != "drain":
            frame = frame.f_back
        return frame is not None

    def read() -> None:
        if threading.current_thread() is not threading.main_thread():
            helpers.append(threading.get_ident())
            begun.set()
            caller.wait()
            raise OSError("no answer")
        caller.set()
        begun.wait()
        while is_at_work(helpers[0]):
            pass
        _thread.interrupt_main()
        threading.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        _threads.Pool(2).run([read, read])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("opcodes", EVERY)
def test_ctrl_c_anywhere_in_save_leaves_a_manager_that_saves(m: ec.CheckpointManager, opcodes: bool) -> None:
    """The interrupted epoch is saved, or can be saved again; so can later ones; and nothing is in flight for ever."""

    def call(step: int) -> None:
        save(m, step)
        m.wait_until_finished()

    assert save(m, 0)
    for place in itertools.count(1):
        interrupted = interrupt(MODULES, place, lambda: call(place), ctrl_c, opcodes=opcodes)  # noqa: B023
        save_now(m, place)
        assert place in m.all_steps(), f"interrupted at place {place}"
        assert m.restore(place)["a"].tolist() == [float(place)] * 4
        assert not m.is_saving_in_progress()
        if not interrupted:
            break
    assert place > 100


def test_what_a_signal_handler_saves_during_reload_is_known(m: ec.CheckpointManager) -> None:
    assert save(m, 0)
    for place in itertools.count(1):
        if not interrupt([history], place, m.reload, lambda: save_now(m, place)):  # noqa: B023
            break
        assert place in m.all_steps(), f"interrupted at place {place}"
    assert place > 10


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("opcodes", EVERY)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_signal_handler_may_save_and_wait_anywhere(m: ec.CheckpointManager, ahead: int, opcodes: bool) -> None:
    """It waits for nothing that the code holds which it interrupts; no save is reported as failed."""

    def call(step: int) -> None:
        save(m, step)
        m.reload()
        m.all_steps()
        m.status(step)
        m.check_for_errors()
        m.wait_until_finished()
        m.pop_save_results()

    for place in itertools.count(1):
        step = 2 * place
        interrupted = interrupt(MODULES, place, lambda: call(step), lambda: save_now(m, step + ahead), opcodes=opcodes)  # noqa: B023
        m.wait_until_finished()
        m.reload()  # what was committed while storage was looked at is seen by the next look
        if not interrupted:
            break
        assert step + ahead in m.all_steps(), f"interrupted at place {place}"
        assert not m.is_saving_in_progress()
    assert place > 100


FORK = """
import atexit, faulthandler, os, sys
import numpy as np, orbax.checkpoint as ocp, epochckpt as ec
from epochckpt.errors import InvalidArgumentError
from epochckpt.storage import Writer
from epochckpt.testing import Faults

def save(step):
    return m.save(step, args=ocp.args.StandardSave({"a": np.full(4, float(step))}))

faults = Faults()
with faults.everywhere():
    m = ec.CheckpointManager(sys.argv[1])
save(0)
m.wait_until_finished()
m.restore_leaves(0, "*")  # threads that have run and are idle now
hold = faults.hold(Writer.finish)
save(1)
hold.reached.wait()
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(80, exit=True)
    with m:
        assert m.restore_leaves(0, "a")["a"].tolist() == [0.0] * 4
        assert m.restore(0)["a"].tolist() == [0.0] * 4
        assert m.restore(None)["a"].tolist() == [0.0] * 4
        m.reload()
        m.wait_until_finished()
        assert m.all_steps() == [0] and not m.is_saving_in_progress()
        for write in (lambda: save(2), lambda: m.delete(0), lambda: m.rollback_to(0), lambda: m.allow_overwrite(0)):
            try:
                write()
            except InvalidArgumentError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError("a forked child writes")
    m.close()
    atexit._run_exitfuncs()  # the usual end, but for XLA's destructors: they wait for threads that are not here
    os._exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
hold.let_go()
assert code == 7
m.wait_until_finished()
assert m.all_steps() == [0, 1] and m.verify(1).ok
"""


def run_script(code: str, *args: Any) -> subprocess.CompletedProcess[str]:
    """Runs a script in an interpreter of its own."""
    program = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", code, *map(str, args)]
    return subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_a_forked_child_reads_and_leaves_its_parents_saves_alone(tmp_path: pathlib.Path) -> None:
    """It restores, it may not write, and when it ends in the usual way the parent's save in flight is committed."""
    done = run_script(FORK, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["0", "1"]


EXIT = """
import contextlib, sys, threading
import numpy as np, orbax.checkpoint as ocp, epochckpt as ec
from epochckpt import _patience, _threads
from epochckpt.storage import Store
from epochckpt.testing import Faults

def save(m, step):
    return m.save(step, args=ocp.args.StandardSave({"a": np.zeros(4)}))

def no_thread(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")

as_python_3_12 = sys.argv[4] == "True"
if as_python_3_12:
    _threads._refuses_threads_at_exit = True
until_the_exit = contextlib.ExitStack()
until_the_exit.enter_context(_patience.use(verdict_margin_secs=0.3, long_exit_secs=0.3))
places = [f"{sys.argv[1]}/{i}" for i in range(int(sys.argv[2]))]
for place in places:
    with ec.CheckpointManager(place) as m:
        save(m, 2)
faults = Faults()
with faults.everywhere():
    managers = [ec.CheckpointManager(place, storage=ec.StorageOptions(save_timeout_secs=0.7)) for place in places]
for m in managers:
    m.claim()
faults.hold(getattr(Store, sys.argv[3]))
for m in managers:
    save(m, 3)
if as_python_3_12:
    threading.Thread.start = no_thread
print("exits", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "no_threads"), [("rename", False), ("remove_tree", False), ("rename", True)])
def test_a_file_system_that_is_gone_does_not_keep_the_program_from_ending(
    tmp_path: pathlib.Path, method: str, no_threads: bool
) -> None:
    """It ends within the bound of a save, for all managers together, and says what it gave up.

    Python 3.12 gives no threads any more when its exit handlers run.
    """
    done = run_script(EXIT, tmp_path, 2, method, no_threads)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "exits\n"
    given_up = [line for line in done.stderr.splitlines() if "the program exits without" in line]
    assert len(given_up) == 2, done.stderr
    assert all("waits up to" in done.stderr and f"{tmp_path}/{i}" in done.stderr for i in range(2))
    if method != "remove_tree":  # only the clean-up hangs there
        assert all("checkpoint 3" in line for line in given_up)
