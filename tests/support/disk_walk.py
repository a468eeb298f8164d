"""A job whose processes have a disk each, in threads over a coordinator in memory, and which is killed at any step.

A step is a change on a disk or in the mirror, each file of a tree that is removed, or a value that a process publishes.
`Disks.run` lets all processes do a
list of operations and kills one of them, or all, just before a given step; `Disks.check` then opens the disks as the
next job does and notes what is wrong:
- an epoch that was acknowledged and is not there, or one that is there and should not be;
- one that is listed and does not restore on every process, or of which they restore different saves;
- a number that cannot be saved any more.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import pathlib
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import _threads
from epochckpt.agreement import coordination
from epochckpt.errors import CoordinationError, CoordinationTimeoutError, EpochNotFoundError, say
from epochckpt.storage import Store, opening_through
from epochckpt.testing import Faults, FaultyStore, StoreCall

WAIT_SECS = 60.0
CHANGES = {
    method.__qualname__
    for method in (
        Store.create,
        Store.rename,
        Store.exchange,
        Store.make_folder,
        Store.remove,
        Store.remove_tree,
        Store.open_writer,
    )
}

T = TypeVar("T")
Kill = tuple[int, int | str]  # a process, and the number of its step, or a pattern of the first such step
Operation = tuple[str, int, int]  # what, epoch, and the tag that tells saves of one epoch apart
_here: contextvars.ContextVar[tuple[Run, int] | None] = contextvars.ContextVar("process", default=None)


class Killed(BaseException):
    """The process is dead: nothing that it does has an effect any more."""


class Run:
    """One job: its processes, what they have published, and which of them are dead, or do not answer any more."""

    lost_answers: frozenset[str] = frozenset()  # ends of keys whose values arrive, and whose writer hears of no answer

    def __init__(self, processes: int, kill: Kill | None = None, together: bool = False):
        self.processes, self._kill, self._together = processes, kill, together
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.steps = [list[str]() for _ in range(processes)]
        self.dead: set[int] = set()
        self.gone: set[int] = set()
        self._under_way = 0

    def step(self, process: int, what: str) -> None:
        """Before each step of a process."""
        with self.changed:
            if process not in self.dead and self._is_due(process, what):
                self.kill(range(self.processes) if self._together else [process])
            if process in self.dead:
                raise Killed
            self.steps[process].append(what)

    def _is_due(self, process: int, what: str) -> bool:
        if self._kill is None or self._kill[0] != process:
            return False
        before = self._kill[1]
        return before == len(self.steps[process]) if isinstance(before, int) else re.search(before, what) is not None

    def kill(self, processes: Sequence[int]) -> None:
        with self.changed:
            self.dead |= {*processes}
            self.changed.notify_all()

    @contextlib.contextmanager
    def change(self, process: int, what: str) -> Iterator[None]:
        """Around each change of storage."""
        with self.changed:
            self.step(process, what)
            self._under_way += 1
        try:
            yield
        finally:
            with self.changed:
                self._under_way -= 1
                self.changed.notify_all()

    def end(self) -> None:
        """Kills all, and waits until the changes that are under way are made: a kill would have come after them."""
        with self.changed:
            self.kill(range(self.processes))
            assert self.changed.wait_for(lambda: not self._under_way, WAIT_SECS), "a change does not end"

    def leave(self, process: int) -> None:
        """A process does nothing more by itself."""
        with self.changed:
            self.gone.add(process)
            self.changed.notify_all()

    @property
    def silent(self) -> set[int]:
        return self.dead | self.gone


class InMemory(coordination.Coordinator):
    """One process's view of its run. A process that is silent is late at once, and the values went with process 0."""

    def __init__(self, run: Run, process: int):
        self._run, self.process, self.ids, self.opened = run, process, tuple(range(run.processes)), 0

    def put(self, key: str, value: Any, again: bool = False) -> None:
        self._run.step(self.process, f"put {key}")
        with self._run.changed:
            if key in self._run.values and not again:
                raise CoordinationError(f"ALREADY_EXISTS: {key}")
            self._run.values[key] = json.dumps(value)
            self._run.changed.notify_all()
        if any(key.endswith(end) for end in self._run.lost_answers):
            raise CoordinationError(f"DEADLINE_EXCEEDED: {key}")

    def get(self, key: str, timeout_secs: float) -> Any:
        with self._run.changed:
            self._run.changed.wait_for(lambda: key in self._run.values or 0 in self._run.silent, timeout_secs)
            if self.process in self._run.dead:
                raise Killed
            if key not in self._run.values and 0 in self._run.silent:
                raise CoordinationError("UNAVAILABLE: process 0, which had the values, is gone")
            if key not in self._run.values:
                raise CoordinationTimeoutError(f"no answer under {key}")
            return json.loads(self._run.values[key])

    def get_all(self, prefix: str) -> Mapping[str, Any]:
        with self._run.changed:
            found = {k: v for k, v in self._run.values.items() if k.startswith(f"{prefix}/")}
        return {key.rpartition("/")[2]: json.loads(value) for key, value in found.items()}

    def gather(self, prefix: str, missing: set[int], deadline: _threads.Deadline) -> tuple[dict[int, Any], set[int]]:
        def found() -> dict[int, Any]:
            return {int(k): v for k, v in self.get_all(prefix).items() if int(k) in missing}

        def enough() -> bool:
            values = found()
            return missing - values.keys() <= self._run.silent or any("error" in v for v in values.values())

        with self._run.changed:
            self._run.changed.wait_for(enough, deadline.left())
            if self.process in self._run.dead:
                raise Killed
            values = found()
        return values, missing - values.keys()

    def next_opening(self, prefix: str) -> int:
        self.opened += 1
        return self.opened

    def forget(self, prefix: str) -> None:
        with self._run.changed:
            for key in [k for k in self._run.values if k == prefix or k.startswith(f"{prefix}/")]:
                del self._run.values[key]


class _Steps(Faults):
    """Has the changes of storage that a process makes be steps of its run."""

    def make(self, call: StoreCall, made: Callable[[], T]) -> T:
        found = _here.get()
        if found is None or call.method not in CHANGES:
            return made()
        name = call.method.rpartition(".")[2]
        with found[0].change(found[1], f"{name} {call.store.root.rpartition('/')[2]}/{call.path}"):
            return made()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Every manager that a thread of a `Run` opens in the block is one of that run's, and its changes are steps."""

    def connect(*_: Any) -> coordination.Coordinator:
        found = _here.get()
        assert found is not None, "a thread of no run"
        return _coordinators[found[0]][found[1]]

    def step(call: str, path: Any) -> contextlib.AbstractContextManager[None]:
        if (found := _here.get()) is not None:
            found[0].step(found[1], f"{call} {path}")
        return contextlib.nullcontext()

    with (
        pytest.MonkeyPatch.context() as patch,
        opening_through(functools.partial(FaultyStore, faults=_Steps())),
        coordination.connecting_by(connect),
    ):
        step_in_trees(patch, step)
        forget_at_exit(patch)
        yield


def step_in_trees(
    patch: pytest.MonkeyPatch, step: Callable[[str, Any], contextlib.AbstractContextManager[None]]
) -> None:
    """What the system removes within a tree is removed within `step`, too."""

    def stepping(call: Callable[..., None], path: Any, *, dir_fd: int | None = None) -> None:
        with contextlib.nullcontext() if dir_fd is None else step(call.__name__, path):
            call(path, dir_fd=dir_fd)

    for name in ("unlink", "rmdir"):
        patch.setattr(os, name, functools.partial(stepping, getattr(os, name)))


def forget_at_exit(patch: pytest.MonkeyPatch) -> None:
    """At its end, this process does not wait for managers that are made from now on: some are those of the dead."""
    patch.setattr(_threads, "drain_at_exit", lambda *args, **kwargs: None)


_coordinators: weakref.WeakKeyDictionary[Run, dict[int, InMemory]] = weakref.WeakKeyDictionary()


def in_processes(run: Run, process: Callable[[int], Any]) -> list[Any]:
    """What `process(i)` returns in each process, or the error that it raises; nobody waits for the dead."""
    results: list[Any] = [None] * run.processes

    def thread(number: int) -> None:
        _here.set((run, number))
        try:
            results[number] = process(number)
        except BaseException as error:  # for the caller
            results[number] = error
        finally:
            run.leave(number)

    _coordinators[run] = {number: InMemory(run, number) for number in range(run.processes)}
    threads = [threading.Thread(target=thread, args=(i,), daemon=True) for i in range(run.processes)]
    for each in threads:
        each.start()
    with run.changed:
        ended = run.changed.wait_for(lambda: run.silent == {*range(run.processes)}, 4 * WAIT_SECS)
    assert ended, "a process is stuck"
    return results


class Disks:
    """The disks of a job, and what must be on them, and what may be, by the operations that it has done."""

    def __init__(self, root: pathlib.Path, processes: int = 2, every: int = 1, keep: int | None = 2):
        self.root, self.processes, self._every, self._keep = root, processes, every, keep
        self.must: dict[int, int] = {}  # tags of epochs that are to be listed
        self.may: dict[int, set[int]] = {}  # of others

    def open(self, number: int, save_timeout_secs: float = WAIT_SECS) -> ec.CheckpointManager:
        """The manager of the calling process."""
        storage = ec.StorageOptions(
            mirror=str(self.root / "mirror"),
            mirror_every=self._every,
            local_disks=True,
            save_timeout_secs=save_timeout_secs,
            open_timeout_secs=WAIT_SECS,
            restore_timeout_secs=WAIT_SECS,
        )
        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep)
        return ec.CheckpointManager(self.root / f"disk-{number}", options=options, storage=storage)

    def run(self, operations: Sequence[Operation], kill: Kill | None = None, together: bool = False) -> Run:
        """Does the operations on all processes, until one fails; kills a process, or all, before its given step."""
        run, managers = Run(self.processes, kill, together), list[ec.CheckpointManager]()

        def process(number: int) -> None:
            manager = self.open(number)
            managers.append(manager)
            for operation in operations:
                if number == 0:
                    self._begin(operation)
                self.do(manager, number, operation)
                if number == 0:
                    self._end(operation)
            manager.close()

        for result in in_processes(run, process):
            if kill is None and result is not None:
                raise result
        run.end()
        for manager in managers:
            abandon(manager)
        return run

    def do(self, manager: ec.CheckpointManager, number: int, operation: Operation) -> None:
        what, epoch, tag = operation
        if what == "save":
            state = {"tag": tag, "node": number, "a": np.full(100, tag)}
            assert manager.save(epoch, args=ec.args.NodeSave(state), force=True)
            manager.wait_until_finished()
        else:
            (manager.delete if what == "delete" else manager.rollback_to)(epoch)

    def _leaving(self, operation: Operation) -> list[int]:
        what, epoch, _ = operation
        if what == "rollback":
            return [e for e in self.must if e > epoch]
        if what == "delete":
            return [epoch]
        return sorted({*self.must, epoch})[: -self._keep or None] if self._keep else []

    def _begin(self, operation: Operation) -> None:
        what, epoch, tag = operation
        for leaving in self._leaving(operation):
            if leaving in self.must:
                self.may.setdefault(leaving, set()).add(self.must.pop(leaving))
        if what == "save":
            self.may.setdefault(epoch, set()).add(tag)

    def _end(self, operation: Operation) -> None:
        what, epoch, tag = operation
        if what == "save":
            self.must[epoch] = tag
            self.may.pop(epoch)
        else:
            for gone in [epoch] if what == "delete" else [e for e in self.may if e > epoch]:
                self.may.pop(gone, None)

    def check(self, anew: bool = True) -> list[str]:
        """Opens the disks, as the next job does; returns what is wrong. With `anew` it also saves, and opens again."""
        problems = list[str]()
        run = Run(self.processes)

        def process(number: int) -> tuple[dict[int, int], dict[int, int]]:
            with self.open(number) as manager:
                found = self._read(manager, number)
                if not anew:
                    return found, found
                for epoch in (e for e in range(max(found, default=-1) + 2) if e not in found):
                    self.do(manager, number, ("save", epoch, 1000 + epoch))
                return found, self._read(manager, number)

        results = in_processes(run, process)
        run.end()
        for result in results:
            if isinstance(result, BaseException):
                return [say(result)]
        for result in results[1:]:
            if result != results[0]:
                problems.append(f"processes differ: {results}")
        found, after = results[0]
        for epoch, tag in self.must.items():
            if found.get(epoch) != tag:
                problems.append(f"epoch {epoch}, acknowledged as {tag}, is {found.get(epoch)}")
        for epoch, tag in found.items():
            if epoch not in self.must and tag not in self.may.get(epoch, ()):
                problems.append(f"epoch {epoch} is {tag}, and should not be there: {self.must} or {self.may}")
        if anew and not problems:
            again = Disks(self.root, self.processes, self._every, self._keep)
            again.must = {e: tag for e, tag in after.items() if e in sorted(after)[-1:]}
            again.may = {e: {tag} for e, tag in after.items()}
            problems += [f"when it is opened once more: {problem}" for problem in again.check(anew=False)]
        return problems

    def _read(self, manager: ec.CheckpointManager, number: int) -> dict[int, int]:
        """The tags of all listed epochs, on one process."""
        found = {
            epoch: self._tag(manager.restore(epoch, args=ec.args.NodeRestore()), number)
            for epoch in manager.all_steps()
        }
        try:
            newest = self._tag(manager.restore(None, args=ec.args.NodeRestore()), number)
        except EpochNotFoundError:
            assert not found, "nothing is found, and something is listed"
        else:
            assert newest == found[max(found)], f"restore(None) took {newest} of {found}"
        return found

    def _tag(self, state: Any, number: int) -> int:
        assert state["node"] == number, f"node {number} got the state of {state['node']}"
        assert set(state["a"].tolist()) == {state["tag"]}, "a mixture"
        return int(state["tag"])


def abandon(manager: ec.CheckpointManager) -> None:
    """Ends what a manager whose process is dead does in the background."""
    manager.components.mirror.stop(10.0)
