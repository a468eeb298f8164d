"""A job that saves small epochs without end, deletes old ones, and is killed at a chosen moment.

Every process appends to one log outside the directory what it asked for and what it saw committed. Each start first
checks what the kill before it left behind, against that log.

The kill is a real one: the victim sends SIGKILL to the other processes of the job and then to itself, at the n-th
mutating system call below the directory (before it, after it, or in the middle of a write), or when a timer fires.
"""

import json
import os
import pathlib
import re
import signal
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt import _threads
from epochckpt.directory import posix
from tests.support.watching import Op, Watcher, watch

KEEP = 3
BLOCK_BYTES = 4096

BEFORE = "before the first write"
WRITING = "between the first write and the rename"
RENAMED = "after the rename, before it is announced"
DELETING = "inside a delete"
OPENING = "elsewhere: opening, and cleaning up"
ELSEWHERE = "elsewhere"
PLACES = (BEFORE, WRITING, RENAMED, DELETING, OPENING, ELSEWHERE)
AIMED = {"write": WRITING, "delete": DELETING, "renamed": RENAMED}

_STAGING = re.compile(r"incarnation-[^/]+/(\d+-\d+)(?:/|\Z)")
_DELETED = re.compile(r"incarnation-[^/]+/(removed-[0-9a-f]{16}-[^/]+)(/|\Z)")
_FINAL = re.compile(r"(\d+)(?:/|\Z)")


# -- what an epoch holds ---------------------------------------------------------------------------------------------


def content(epoch: int) -> dict[str, np.ndarray]:
    """The arrays of an epoch: a function of its number."""
    rng = np.random.default_rng(epoch)
    return {
        "sharded": rng.normal(size=(8, 512)).astype(np.float32),
        "replicated": rng.integers(0, 2**31, size=(5,), dtype=np.int32),
    }


def state(epoch: int) -> dict[str, Any]:
    """The same on the devices of the job."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    specs = {"sharded": PartitionSpec("x"), "replicated": PartitionSpec()}

    def place(values: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])

    arrays = {name: place(values, specs[name]) for name, values in content(epoch).items()}
    return {**arrays, "epoch": epoch}


def save_args(epoch: int) -> Any:
    """Arrays and JSON, so that a node writes more than one file."""
    return ocp.args.Composite(state=ocp.args.StandardSave(state(epoch)), note=ocp.args.JsonSave({"epoch": epoch}))


def wrong_content(manager: ec.CheckpointManager, step: int | None, expected: int) -> str:
    """What is wrong with an epoch, restored; empty if nothing is."""
    args = ocp.args.Composite(state=ocp.args.StandardRestore(state(0)), note=ocp.args.JsonRestore())
    got = manager.restore(step, args=args)
    for name, values in content(expected).items():
        for shard in got.state[name].addressable_shards:
            if np.asarray(shard.data).tobytes() != np.ascontiguousarray(values[shard.index]).tobytes():
                return f"epoch {expected} restores with other bytes in {name!r}"
    if got.state["epoch"] != expected or got.note != {"epoch": expected}:
        return f"epoch {expected} restores as {got.state['epoch']!r} with the note {got.note!r}"
    return ""


# -- the outside log -------------------------------------------------------------------------------------------------


class Log:
    """Lines of JSON in one file that all processes of all runs append to; what is written survives a kill."""

    def __init__(self, outside: str, run: int):
        self._path = pathlib.Path(outside) / "log"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._stamp = {"run": run, "process": jax.process_index()}

    def write(self, event: str, **fields: Any) -> None:
        os.write(self._fd, (json.dumps({**self._stamp, "event": event, **fields}) + "\n").encode())


def read_log(outside: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All that was logged so far."""
    path = pathlib.Path(outside) / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def epochs_in(events: list[dict[str, Any]], event: str) -> set[int]:
    """The epochs that events of one kind name."""
    return {e["epoch"] for e in events if e["event"] == event}


# -- the kill --------------------------------------------------------------------------------------------------------


class Places:
    """Where in the life of an epoch this process is, told by its own calls."""

    def __init__(self) -> None:
        self.opened = False
        self._staged: set[str] = set()
        self._written: set[str] = set()
        self._deleting: set[str] = set()
        self._root = ELSEWHERE  # what a flush of the directory itself belongs to

    def before(self, op: Op) -> str:
        """Where a kill just before the call hits."""
        if found := _STAGING.match(op.path):
            return WRITING if found[1] in self._written else BEFORE
        if _DELETED.match(op.path):
            return DELETING
        if found := _FINAL.match(op.path):  # only with the protection switched off, but for the rename of a delete
            if op.name == "rename":
                return ELSEWHERE
            return DELETING if op.name in ("unlink", "rmdir") else WRITING
        if not op.path and self.opened:
            return self._root
        return ELSEWHERE if self.opened and op.path.count("incarnation-") < 2 else OPENING

    def half(self, op: Op) -> str:
        """Where a kill in the middle of a pwrite hits."""
        return WRITING if _STAGING.match(op.path) or _FINAL.match(op.path) else self.before(op)

    def after(self, op: Op) -> str:
        """Takes note of a call, and says where a kill just after it hits."""
        staging, deleted = _STAGING.match(op.path), _DELETED.match(op.path)
        if staging and op.name == "rename" and _FINAL.match(op.target):
            self._staged.discard(staging[1])
            self._written.discard(staging[1])
            self._root = RENAMED
            return RENAMED
        if staging:
            self._staged.add(staging[1])
            if op.name == "pwrite":
                self._written.add(staging[1])
        elif op.name == "rename" and (into := _DELETED.match(op.target)):
            self._deleting.add(into[1])
            self._root = DELETING
            return DELETING
        elif deleted and op.name == "rmdir" and not deleted[2]:
            self._deleting.discard(deleted[1])
            return ELSEWHERE
        return self.before(op)

    def announced(self) -> None:
        """The last rename has been announced."""
        if self._root == RENAMED:
            self._root = ELSEWHERE

    def now(self) -> str:
        """Where a kill at any moment hits."""
        if self._written:
            return WRITING
        if self._deleting:
            return DELETING
        if self._root == RENAMED:
            return RENAMED
        return BEFORE if self._staged else (ELSEWHERE if self.opened else OPENING)


class Killer(Watcher):
    """Kills the whole job at the n-th call that counts.

    Args:
        log: is told of the kill.
        outside: where the processes of the job have left their pids.
        run: number of this run.
        kind: which calls count: those in the place that AIMED gives, `any` (once opened), `open` (all).
        count: n.
        how: `before`, `after`, or `torn` (in the middle of a pwrite, else before).
    """

    def __init__(self, log: Log, outside: str, run: int, kind: str, count: int, how: str):
        self.places = Places()
        self._log, self._outside, self._run = log, pathlib.Path(outside), run
        self._kind, self._count, self._how = kind, count, how

    def before(self, op: Op) -> None:
        if self._how == "before" or (self._how == "torn" and op.name != "pwrite"):
            self._tick(op, self.places.before(op))

    def torn(self, op: Op) -> bool:
        return self._how == "torn" and self._counts(self.places.half(op)) and self._count == 1

    def half(self, op: Op) -> None:
        self.kill(f"half of {op}", self.places.half(op))

    def after(self, op: Op) -> None:
        place = self.places.after(op)
        if self._how == "after" or (self._how == "torn" and op.name == "pwrite"):
            self._tick(op, place)

    def _counts(self, place: str) -> bool:
        if self._kind == "open":
            return True
        return self.places.opened and (self._kind == "any" or AIMED.get(self._kind) == place)

    def _tick(self, op: Op, place: str) -> None:
        if self._counts(place):
            self._count -= 1
            if not self._count:
                self.kill(f"{'after' if self._how == 'after' else 'before'} {op}", place)

    def kill(self, moment: str, place: str) -> None:
        """SIGKILL for the others, then for this process."""
        self._log.write("kill", place=place, moment=moment)
        for path in self._outside.glob(f"pid-{self._run}-*"):
            pid = int(path.read_text())
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class CommitLogger:
    """An Orbax logger: is told of a commit as soon as the job may see it."""

    def __init__(self, log: Log, places: Places):
        self._log, self._places = log, places
        self.latest_step: Callable[[], int | None] = lambda: None

    def log_entry(self, entry: dict[str, Any]) -> None:
        if entry["event_type"] != "save":
            return
        self._log.write("committed", epoch=entry["step"])
        self._places.announced()
        latest = self.latest_step()
        if latest is None or latest < entry["step"]:
            self._log.write("violation", what=f"latest_step() is {latest} after the commit of {entry['step']}")


# -- the protection, switched off ------------------------------------------------------------------------------------


def write_in_place() -> None:
    """Negative control: an epoch is written straight into its final folder."""

    class InPlace(posix.PosixStaging):
        def __init__(self, stager: posix.PosixStager, epoch: int, save_id: str):
            super().__init__(stager, epoch, save_id)
            self.folder = str(epoch)

    def publish(self: Any, staging: InPlace, record: bytes, check: Any, replace_damaged: bool) -> None:
        check()
        self.store.create(f"{staging.epoch}/epoch.json", record)
        self.directory.note_folder(staging.epoch, str(staging.epoch))

    posix.PosixStager.staging = lambda self, epoch, save_id: InPlace(self, epoch, save_id)  # type: ignore
    posix.PosixWriter.publish = publish  # type: ignore


def delete_in_place() -> None:
    """Negative control: a deleted epoch is not taken out of sight first."""

    def unlist(self: Any, epoch: int, kept_in: str | None = None, *, logged: bool = False) -> Callable[[], None]:
        return lambda: self.store.remove_tree(self.directory.folder(epoch))

    posix.PosixWriter.unlist = unlist  # type: ignore


UNPROTECTED = {"write_in_place": write_in_place, "delete_in_place": delete_in_place}


# -- the job ---------------------------------------------------------------------------------------------------------


def run(
    directory: str,
    outside: str,
    run: int,
    kind: str = "none",
    count: int = 0,
    how: str = "before",
    victim: int = 0,
    delay_ms: float = 0.0,
    epochs: int = 60,
    unprotected: str = "",
) -> list[int]:
    """Opens the directory, checks it, and saves until it is killed; returns the epochs if it never was."""
    if unprotected:
        UNPROTECTED[unprotected]()
    log = Log(outside, run)
    me = jax.process_index()
    (pathlib.Path(outside) / f"pid-{run}-{me}").write_text(str(os.getpid()))
    killer = Killer(log, outside, run, kind if me == victim else "none", count, how)
    watch(directory, killer)
    logger = CommitLogger(log, killer.places)
    try:
        manager = open_and_check(directory, outside, log, logger)
    except Exception as error:
        log.write("violation", what=f"the next start failed: {type(error).__name__}: {error}")
        traceback.print_exc()
        raise
    killer.places.opened = True
    if kind == "time" and me == victim:
        signal.signal(signal.SIGALRM, lambda *_: killer.kill("a timer", killer.places.now()))
        signal.setitimer(signal.ITIMER_REAL, delay_ms / 1000)
    latest = manager.latest_step()
    first = 0 if latest is None else latest + 1
    for epoch in range(first, first + epochs):
        log.write("requested", epoch=epoch)
        manager.save(epoch, args=save_args(epoch))
        if epoch % 5 == 4:
            manager.wait_until_finished()
            log.write("committed", epoch=manager.latest_step())
    manager.close()
    return list(manager.all_steps())


def open_and_check(directory: str, outside: str, log: Log, logger: CommitLogger) -> ec.CheckpointManager:
    """Opens a manager, and logs every way in which the directory is not what the log promises.

    Every other start claims the directory at once, and then looks at what is left beside the epochs; the rest leave
    that to the first save.
    """
    events = read_log(outside)  # all who wrote it are dead, or have written no commit yet
    begun: list[Any] = []
    original = _threads.start

    def start(fn: Callable[[], Any], **how: bool) -> Any:
        begun.append(original(fn, **how))
        return begun[-1]

    _threads.start = start
    try:
        manager = ec.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=KEEP),
            storage=ec.StorageOptions(
                block_bytes=BLOCK_BYTES, save_timeout_secs=30, open_timeout_secs=30, restore_timeout_secs=30
            ),
            item_names=("state", "note"),
            logger=logger,
        )
        problems = list(check(manager, events))
        if (manager.latest_step() or 0) % 2 == 0:
            before = list(manager.all_steps())
            manager.claim()
            if list(manager.all_steps()) != before:
                problems.append(f"before the claim there were {before}, after it {manager.all_steps()}")
            for future in begun:
                future.result(30)
            problems += check_swept(manager, directory)
    finally:
        _threads.start = original
    logger.latest_step = manager.latest_step
    for problem in problems:
        log.write("violation", what=problem)
    log.write("checked", epochs=list(manager.all_steps()), problems=len(problems))
    return manager


def check(manager: ec.CheckpointManager, events: list[dict[str, Any]]) -> Any:
    """Yields what is wrong with a directory that has just been opened."""
    steps, latest = list(manager.all_steps()), manager.latest_step()
    committed, requested = epochs_in(events, "committed"), epochs_in(events, "requested")
    if committed and (latest is None or latest < max(committed)):
        yield f"epoch {max(committed)} was seen committed, the latest is {latest}"
    for epoch in sorted(committed - set(steps)):
        newer = [e for e in steps if e > epoch]
        if len(newer) < KEEP:
            yield f"epoch {epoch} was seen committed and is gone, with only {newer} after it"
    if set(steps) - requested:
        yield f"epochs {sorted(set(steps) - requested)} were never asked for"
    for epoch in steps:
        try:
            wrong = wrong_content(manager, epoch, epoch)
            if wrong:
                yield wrong
            if jax.process_index() == 0:
                manager.verify(epoch).raise_if_damaged()
        except Exception as error:
            yield f"epoch {epoch} does not restore and verify: {type(error).__name__}: {error}"
    if latest is not None:
        wrong = wrong_content(manager, None, latest)
        if wrong:
            yield f"the newest restores as something else: {wrong}"


def check_swept(manager: ec.CheckpointManager, directory: str) -> Any:
    """Yields what is left beside the epochs in a directory that has just been claimed and swept."""
    if jax.process_index() == 0:
        left = set(os.listdir(directory)) - {str(e) for e in manager.all_steps()}
        own = [name for name in left if name.startswith("incarnation-")]
        if len(left) != 1 or len(own) != 1:
            yield f"the start left {sorted(left)} beside the epochs"
            return
        found = set(os.listdir(os.path.join(directory, own[0])))
        ahead = {name for name in found if name.endswith("-0") and jax.process_count() > 1}  # another process saves
        if found - ahead != {"owner.json"}:
            yield f"the start left {found} in its own staging"
