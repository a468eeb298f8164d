"""Random rounds of runs on one directory, against a small model: what must be listed, what may be, and what may not.

A round is a directory. One job after the other opens it, in one process or in several, saves, replaces, deletes, rolls
back and has metrics attached, and is killed at a random step, or closed. A job may also be stopped at a random step
while another one takes over. Between two jobs people collect garbage, copy the directory and verify it, and a request
of a job that was killed may arrive late in a bucket.

The model knows, for each epoch, the saves that may be there: what was acknowledged, exactly; of what was not, the old
one, the new one, or none, where that is legal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import obstore
import orbax.checkpoint as ocp

import epochckpt as ec
from epochckpt.directory.epoch_directory import parse_rollback
from epochckpt.errors import EpochCheckpointError, EpochNotFoundError, NotACheckpointDirectoryError, say
from epochckpt.format import paths
from epochckpt.inspection.gc import collect
from epochckpt.orbax import object_view
from epochckpt.storage.object_client import Client
from tests.support import lives
from tests.support.disk_walk import Killed
from tests.support.lives import Job
from tests.support.rounds import READER, RETRIES, Found, Tags, Wrong, run_command

FUTURE_SECS = 1e7
ATTACHED = "accuracy"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call of a run.

    Attributes:
        does: makes it, on every process, or on the primary.
        epoch: the epoch that it names.
        tag: of what it saves.
        told: how a round is told.
    """

    does: Callable[[ec.CheckpointManager, int], object]
    epoch: int
    told: str
    tag: int = 0
    replaces: bool = False
    gives_up: tuple[int, ...] = ()
    value: float | None = None
    everywhere: bool = True


@dataclasses.dataclass
class Model:
    """What the directory must have, and may have.

    Attributes:
        keep: `max_to_keep`.
        best: whether the best epoch is kept, too; the tag decides, by `score`.
        must: of each of these epochs one of these tags must be listed.
        may: what is uncertain, and may be listed: a save or a deletion that has not returned.
        retired: what retention may have removed.
        dead: the tags that were deleted, rolled back or replaced by calls that have returned.
        together: later epochs of a rollback that was killed: what is gone of them are the newest ones.
        attached: the values that an epoch may have attached, by tag.
    """

    keep: int | None
    best: bool
    must: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    may: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    retired: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    dead: set[int] = dataclasses.field(default_factory=set)
    together: tuple[int, ...] = ()
    attached: dict[int, set[float | None]] = dataclasses.field(default_factory=dict)

    def staying(self, listed: Mapping[int, int]) -> set[int]:
        """The epochs of these that retention leaves."""
        if self.keep is None or not listed:
            return {*listed}
        if self.best:
            return {max(listed), max(listed, key=lambda epoch: score(listed[epoch]))}
        return {*sorted(listed)[-self.keep :]}

    def problem(self, listed: Found) -> Wrong | None:
        for epoch, tags in self.must.items():
            if listed.get(epoch) not in tags:
                return Wrong("an acknowledged epoch is lost", f"{epoch} is {listed.get(epoch)}, not {tags}")
        for epoch, tag in listed.items():
            if tag in self.dead:
                return Wrong("what was deleted, rolled back or replaced came back", f"{epoch}: {tag}")
            if not any(tag in known.get(epoch, ()) for known in (self.must, self.may, self.retired)):
                return Wrong("an epoch is listed that nobody has saved", f"{epoch}: {tag}")
        gone = [epoch for epoch in self.together if epoch not in listed]
        if gone and any(epoch in listed for epoch in self.together if epoch > gone[0]):
            return Wrong("a rollback was done in part", f"of {self.together} are gone {gone}")
        return None

    def resolve(self, listed: Found) -> None:
        """What was uncertain is known now."""
        for tags in (*self.may.values(), *self.must.values(), *self.retired.values()):
            self.dead |= tags - {*listed.values()}
        certain = {e: {t} for e, t in listed.items() if t in self.must.get(e, ()) or t in self.may.get(e, ())}
        self.retired = {epoch: {tag} for epoch, tag in listed.items() if epoch not in certain}
        self.must, self.may, self.together = certain, {}, ()
        self.bound(listed)

    def bound(self, listed: Found) -> None:
        """Retention may go on to remove what it does not keep."""
        for epoch in {*self.must} - self.staying(listed):
            self.retired.setdefault(epoch, set()).update(self.must.pop(epoch))

    def begin(self, operation: Operation, known: Found) -> None:
        """Before the call: what it changes is uncertain."""
        epoch, tag = operation.epoch, operation.tag
        if operation.value is not None:
            self.attached.setdefault(known[epoch], {None}).add(operation.value)
        if tag:
            listed = {**known, epoch: tag}
            for leaving in {*self.must} - self.staying(listed) - {epoch}:
                self.retired.setdefault(leaving, set()).update(self.must.pop(leaving))
            if epoch in self.must:
                self.must[epoch] = self.must[epoch] | {tag}
            else:
                self.may.setdefault(epoch, set()).add(tag)
        self.together = tuple(e for e in sorted(operation.gives_up) if e in self.must)
        for gone in operation.gives_up:
            self.may.setdefault(gone, set()).update(self.must.pop(gone, set()) | {known[gone]})

    def end(self, operation: Operation, known: Found) -> Found:
        """After the call has returned; what is listed then, before retention."""
        epoch, tag = operation.epoch, operation.tag
        if operation.value is not None:
            self.attached[known[epoch]] = {operation.value}
        if tag:
            if operation.replaces:
                self.dead.add(known[epoch])
            self.may.pop(epoch, None)
            known = {**known, epoch: tag}
            self.must[epoch] = {tag}
            self.bound(known)
        for gone in operation.gives_up:
            self.dead |= self.may.pop(gone, set()) | self.retired.pop(gone, set())
        self.together = ()
        return {epoch: tag for epoch, tag in known.items() if epoch not in operation.gives_up}


def score(tag: int) -> float:
    """How good a save is: no two are equally good."""
    return tag * 7919 % 10007


class World:
    """One directory.

    Args:
        root: an empty folder.
        url: the directory.
        rng: what decides.
        processes: of a job.
    """

    def __init__(self, root: pathlib.Path, url: str, rng: random.Random, processes: int = 1):
        self.root, self.url, self.rng, self.processes = root, url, rng, processes
        self.kills = 0
        keep = rng.choice([None, None, 1, 2, 3])
        self.model = Model(keep, keep is not None and rng.random() < 0.4)
        self.events = [f"{url}, {processes} processes, keep {keep}{' and the best' if self.model.best else ''}"]
        self.late: list[Callable[[], object]] = []
        self._next_tag = itertools.count(1)
        self.tags = [Tags(functools.partial(self._read, number)) for number in range(processes)]

    def play(self, lives: int) -> None:
        """Jobs, one after the other; the last ones only look, and one claims: it ends what others have begun."""
        Session(self, calm=True).play()
        for _ in range(lives):
            self._between()
            if self.processes == 1 and self.rng.random() < 0.2:
                self._overlap()
            else:
                Session(self).play()
        self.arrive()
        Session(self, calm=True).play()
        with self.open() as manager:
            manager.claim()
        self._collect(everything=self.rng.random() < 0.5, claimed=True)
        Session(self, calm=True).play()

    def note(self, text: str) -> None:
        self.events.append(text)

    def tag(self) -> int:
        return next(self._next_tag)

    def saved_as(self, tag: int, number: int) -> Any:
        state = {"w": np.full(5, tag, np.int32), "tag": tag, "node": number}
        return ocp.args.StandardSave(state) if self.processes == 1 else ec.args.NodeSave(state)

    def _read(self, number: int, manager: ec.CheckpointManager, epoch: int) -> int:
        tree = manager.restore(epoch, args=None if self.processes == 1 else ec.args.NodeRestore())
        if {*tree["w"].tolist()} != {tree["tag"]} or tree["node"] != number:
            raise Wrong("a restored epoch is a mixture", str(tree))
        return int(tree["tag"])

    def open(self) -> ec.CheckpointManager:
        model = self.model
        best = {"best_fn": lambda metrics: metrics["score"], "best_mode": "max"} if model.best else {}
        options = ocp.CheckpointManagerOptions(max_to_keep=model.keep, **best)
        storage = ec.StorageOptions(
            io_threads=1, save_timeout_secs=60, open_timeout_secs=60, restore_timeout_secs=60, store=RETRIES
        )
        return ec.CheckpointManager(self.url, options=options, storage=storage)

    def arrive(self) -> None:
        """Requests of jobs that were killed reach the store now."""
        while self.late:
            with contextlib.suppress(obstore.exceptions.BaseError, FileNotFoundError):
                self.late.pop()()
                self.note("  a late request arrives")

    # -- between two jobs

    def _between(self) -> None:
        """What people do while no run is alive."""
        drawn = self.rng.random()
        if self.rng.random() < 0.5:
            self.arrive()
        if drawn < 0.12:
            self._collect(everything=False, claimed=False)
        elif drawn < 0.18 and self.model.must:
            self._verify()
        elif drawn < 0.26 and self.model.must:
            self._copy()

    def _verify(self) -> None:
        """Every epoch is whole, and so is its view. In a bucket a kill may leave the newest view unfinished."""
        self.note("verify")
        in_bucket = "://" in self.url
        if run_command("verify", self.url, expected=(0, 5) if in_bucket else (0,)) == 0:
            return
        committed_ns = {row.epoch: row.committed_ns or 0 for row in ec.inspect(self.url).overview().epochs}
        with ec.CheckpointManager(self.url, options=READER) as manager:
            newest = max(manager.all_steps(), key=lambda epoch: committed_ns[epoch])
            for epoch in manager.all_steps():
                found = manager.verify(epoch)
                if not found.ok or (found.view_damage and epoch != newest):
                    raise Wrong("epochckpt verify finds damage", f"{epoch}: {found}")

    def _listed(self, url: str) -> list[int]:
        with ec.CheckpointManager(url, options=READER) as manager:
            return list(manager.all_steps())

    def _copy(self) -> None:
        self.note("cp")
        destination = f"memory://{uuid.uuid4().hex}"
        run_command("cp", self.url, destination, "--yes", expected=(0,))
        if (found := self._listed(destination)) != (epochs := self._listed(self.url)):
            raise Wrong("a copy has other epochs", f"{found}, not {epochs}")
        run_command("verify", destination, expected=(0,))
        if self.processes > 1:  # another number of them cannot restore what each has of its own
            return
        with (
            ec.CheckpointManager(destination, options=READER) as copy,
            ec.CheckpointManager(self.url, options=READER) as manager,
        ):
            if self.tags[0].of(copy, epochs) != self.tags[0].of(manager, epochs):
                raise Wrong("a copy differs", f"of {epochs}")

    def _collect(self, *, everything: bool, claimed: bool) -> None:
        """What is dead goes, and nothing is left that nobody accounts for.

        A roll back that a kill has interrupted waits for the next run that claims the directory.
        """
        self.note(f"gc{' of what was rolled back, too' if everything else ''}")
        with contextlib.suppress(NotACheckpointDirectoryError):  # it holds no epoch
            for _ in range(2):  # what came late to a deleted epoch's folder is known when the rest of that is gone
                collect(self.url, delete=True, epochs_too=everything, clock=lambda: time.time() + FUTURE_SECS)
            left = collect(self.url, epochs_too=everything, clock=lambda: time.time() + FUTURE_SECS).rows
            if left:
                raise Wrong("gc leaves what it could remove", f"{left}"[:500])
            with ec.CheckpointManager(self.url, options=READER) as manager:
                saves = {epoch: manager.save_id(epoch) for epoch in manager.all_steps()}
            if everything or self.url.startswith("/"):  # in a bucket, rolled-back epochs stay where they were
                self._check_remains(saves, everything, set() if claimed else self._waiting())

    def _waiting(self) -> set[str]:
        """The record of a roll back that was interrupted, and the folders of the epochs that it names."""
        record = pathlib.Path(self.url, paths.ROLLBACK_RECORD)
        if not record.exists():
            return set()
        rollback = parse_rollback(str(record), record.read_bytes())
        return {paths.ROLLBACK_RECORD, *(str(epoch) for epoch in rollback.epochs)}

    def _check_remains(self, saves: dict[int, str], everything: bool, waiting: set[str]) -> None:
        strays = list[str]()
        for key in self._files():
            folder, _, rest = key.partition("/")
            if folder == "_epochckpt" or folder in waiting or (folder.startswith("rolled-back-") and not everything):
                continue
            if folder.startswith("incarnation-") and self.url.startswith("/"):
                continue  # of the last run
            save_id = paths.save_id_in(rest)
            stray = int(folder) not in saves if folder.isdigit() else True
            if folder.isdigit() and save_id is not None:
                stray |= save_id != saves.get(int(folder))
            elif not self.url.startswith("/") and object_view.is_small(rest):
                continue  # what comes late of a view has no mark, and stays
            if stray:
                strays.append(key)
        if strays:
            raise Wrong("something remains for ever", f"{strays[:5]} beside {saves}")

    def _files(self) -> list[str]:
        if self.url.startswith("/"):
            return [os.path.relpath(path, self.url) for path in pathlib.Path(self.url).rglob("*") if not path.is_dir()]
        client = Client(self.url)
        start = client.below("")
        return [meta["path"][len(start) :] for page in obstore.list(client.kv, start) for meta in page]

    # -- two jobs at once

    def _overlap(self) -> None:
        """A job is stopped at a step; another one takes over and ends; then the first one goes on."""
        older = Session(self, stops=True)
        older.begin()
        if not older.stands():
            older.finish(None)
            return
        self.note("meanwhile another run takes over")
        newer = Session(self, calm=True, claims=True)
        newer.play()
        self.note("the older run goes on")
        older.finish(newer)


class Session:
    """One job on the directory.

    Args:
        world: where.
        calm: it is not killed.
        claims: it takes the directory over at once.
        stops: it is stopped at a random step in place of being killed.
    """

    def __init__(self, world: World, *, calm: bool = False, claims: bool = False, stops: bool = False):
        self.world, self._calm, self._claims, self._stops = world, calm, claims, stops
        rng = world.rng
        self._at: tuple[int, int] | None = None
        if not calm and (stops or rng.random() < 0.6):
            self._at = rng.randrange(world.processes), int(2 ** rng.uniform(0, 7)) - 1
        self.job = Job(
            world.processes,
            None if stops else self._at,
            hold=stops,
            together=rng.random() < 0.5,
        )
        self._count = rng.randrange(0, 3) if calm else rng.randrange(1, 6)
        self._known: Found = {}
        self.opened: Found = {}  # what it has listed at first
        self._operations: list[Operation] = []
        self._changed = threading.Condition()
        self._ended = False
        self._listed: dict[int, Found] = {}
        self._errors: list[BaseException] = []
        # Of a run that is stopped: it tells the model nothing more, which another run has taken over.
        self._frozen = threading.Lock()
        self._is_frozen = False
        self._late: list[Operation] = []  # what was acknowledged after that
        self._done = threading.Event()

    @property
    def listed(self) -> Found:
        """What it lists now."""
        return self._known

    # -- the whole

    def play(self) -> None:
        world = self.world
        world.note(f"a run opens{f', dies at {self._at}' if self._at else ''}")
        Tags.keep_common(world.tags)
        followers = [
            self.job.lives[number].start(lambda number=number: self._follow(number))
            for number in range(1, world.processes)
        ]
        try:
            self.job.lives[0].run(self._lead)
        except Killed:
            pass
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._note_death()
            if not self.job.dead:
                for thread in followers:
                    thread.join(lives.WAIT_SECS)
            self.job.end()
            for thread in followers:  # what it still reads is known to it before the next job begins
                thread.join(lives.WAIT_SECS)
                assert not thread.is_alive(), "a process that is dead goes on"
        for error in self._errors:
            raise error

    def _note_death(self) -> None:
        for number, life in enumerate(self.job.lives):
            if life.dead and life.held_at:
                self.world.note(f"  process {number} is {life.held_at}")
                self.world.kills += 1
            if life.late is not None:
                self.world.late.append(life.late)

    def _lead(self) -> None:
        """The primary's part."""
        world, model = self.world, self.world.model
        manager = self._open(0)
        if manager is None:
            return
        self.opened = self._known = self._listed[0]
        world.note(f"  lists {self._known}")
        if (problem := model.problem(self._known)) is not None:
            raise problem
        self._check_attached(manager)
        model.resolve(self._known)
        self._compare()
        if self._claims:
            manager.claim()
        if self._stops and self._at is not None:
            manager.claim()
            self.job.lives[0].arm(self._at[1])
        if world.late and world.rng.random() < 0.5 and world.processes == 1:
            manager.claim()  # what came before that would be the older run's good right
            world.arrive()
        for _ in range(self._count):
            if self.job.dead or not self._do(manager, self._draw()):
                return
        if self._stops:
            return
        if self._calm or world.rng.random() < 0.7:
            world.note("  close")
            self._close(manager)
        else:
            world.note("  ends without a close")

    def _close(self, manager: ec.CheckpointManager) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        try:
            manager.close()
        except EpochCheckpointError as error:
            if not self.job.dead:
                raise Wrong(f"close() fails ({type(error).__name__})", say(error)) from error

    def _open(self, number: int) -> ec.CheckpointManager | None:
        """Opens the directory, and reads every epoch."""
        try:
            manager = self.world.open()
            listed = self.world.tags[number].of(manager, manager.all_steps())
        except EpochCheckpointError as error:
            if self.job.dead:
                return None
            raise Wrong("a directory does not open", say(error)) from error
        except Wrong:
            if self.job.dead:
                return None
            raise
        if (latest := manager.latest_step()) != max(listed, default=None):
            raise Wrong("latest_step() is none that is listed", f"{latest} of {listed}")
        with self._changed:
            self._listed[number] = listed
            self._changed.notify_all()
        return manager

    def _check_attached(self, manager: ec.CheckpointManager) -> None:
        for epoch, tag in self._known.items():
            found = (manager.metrics(epoch) or {}).get(ATTACHED)
            possible = self.world.model.attached.get(tag, {None})
            if found not in possible:
                raise Wrong("attached metrics are lost or changed", f"{epoch}: {found}, not {possible}")
            if tag in self.world.model.attached:
                self.world.model.attached[tag] = {found}

    def _compare(self) -> None:
        """All processes have listed the same."""
        while len(self._listed) < self.world.processes and not self.job.dead and not self._errors:
            with self._changed:
                self._changed.wait(0.05)
        if not self.job.dead and any(listed != self.opened for listed in self._listed.values()):
            raise Wrong("processes list different epochs", f"{self._listed}")

    # -- the other processes

    def _follow(self, number: int) -> None:
        """Another process's part: it makes the same calls."""
        try:
            manager = self._open(number)
            if manager is None:
                return
            done = 0
            while (operation := self._next(done)) is not None:
                done += 1
                if operation.everywhere:
                    operation.does(manager, number)
            manager.close()
        except EpochCheckpointError as error:
            if not self.job.dead:
                self._errors.append(Wrong(f"another process fails ({type(error).__name__})", say(error)))
        except (Wrong, AssertionError) as error:
            self._errors.append(error)
        finally:
            self.job.leave(number)

    def _next(self, done: int) -> Operation | None:
        """The primary's call after so many others; None if it makes no more."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._operations) > done or self._ended, lives.WAIT_SECS)
            return self._operations[done] if len(self._operations) > done else None

    # -- operations

    def _draw(self) -> Operation:
        rng, known = self.world.rng, sorted(self._known)
        drawn = rng.random()
        if drawn < 0.55 or not known:
            return self._save(max(known, default=-1) + rng.choice([1, 1, 2]))
        epoch = rng.choice(known)
        if drawn < 0.7:
            return self._save(epoch, replaces=True)
        if drawn < 0.82:
            return Operation(lambda manager, number: manager.delete(epoch), epoch, f"delete {epoch}", gives_up=(epoch,))
        if drawn < 0.92:
            later = tuple(e for e in known if e > epoch)
            told = f"roll back to {epoch}"
            return Operation(lambda manager, number: manager.rollback_to(epoch), epoch, told, gives_up=later)
        value = rng.random()

        def attach(manager: ec.CheckpointManager, number: int) -> None:
            ec.attach_metrics(self.world.url, epoch, {ATTACHED: value}, "evaluator")

        return Operation(attach, epoch, f"attach to {epoch}", value=value, everywhere=False)

    def _save(self, epoch: int, *, replaces: bool = False) -> Operation:
        world, tag = self.world, self.world.tag()

        def save(manager: ec.CheckpointManager, number: int) -> None:
            if replaces:
                manager.allow_overwrite(epoch)
            metrics = {"score": score(tag)}
            assert manager.save(epoch, args=world.saved_as(tag, number), force=True, metrics=metrics)
            manager.wait_until_finished()

        return Operation(save, epoch, f"{'replace' if replaces else 'save'} {epoch} as {tag}", tag, replaces)

    def _do(self, manager: ec.CheckpointManager, operation: Operation) -> bool:
        """Makes a call; False if the job ends with it."""
        world, model = self.world, self.world.model
        with self._frozen:
            required = operation.epoch in model.must
            if not self._is_frozen:
                world.note(f"  {operation.told}")
                model.begin(operation, self._known)
        with self._changed:
            self._operations.append(operation)
            self._changed.notify_all()
        try:
            operation.does(manager, 0)
        except EpochCheckpointError as error:
            passed = isinstance(error, EpochNotFoundError) and not required
            if self._is_frozen or self.job.dead or self._errors:
                world.note(f"  failed: {say(error)[:200]}")
                return False
            if passed:  # retention was quicker
                self._take(manager, self._known)
                return world.processes == 1
            raise Wrong(f"a call fails ({type(error).__name__})", say(error)) from error
        with self._frozen:
            if self._is_frozen:
                self._late.append(operation)
                return False
            self._take(manager, model.end(operation, self._known))
        return True

    def _take(self, manager: ec.CheckpointManager, known: Found) -> None:
        """What the manager lists after a call, of what the model knows."""
        listed = list(manager.all_steps())
        if not {*listed} <= known.keys() or not self.world.model.must.keys() <= {*listed}:
            details = f"{listed}, known {known}, must be {self.world.model.must}"
            raise Wrong("a running manager does not list what is there", details)
        self._known = {epoch: known[epoch] for epoch in listed}

    # -- a run beside which another one takes over

    def begin(self) -> None:
        """Opens and goes on in a thread, until it is stopped or has done all."""
        self.world.note(f"a run opens, stops at {self._at}")

        def call() -> None:
            try:
                self._lead()
            except Killed:
                pass
            except BaseException as error:
                self._errors.append(error)
            finally:
                self._done.set()

        self._thread = self.job.lives[0].start(call)

    def stands(self) -> bool:
        """Whether it was stopped; then the model is the other run's. False if it has done all."""
        held = self.job.lives[0].held
        while not held.wait(0.002):
            if self._done.is_set():
                break
        with self._frozen:
            self._is_frozen = held.is_set()
        if self._is_frozen:
            self.world.note(f"  {self.job.lives[0].held_at}")
        return self._is_frozen

    def finish(self, newer: Session | None) -> None:
        """It goes on, and can do no harm: what it is told must have been there when the newer run came."""
        self.job.lives[0].let_go()
        self._thread.join(lives.WAIT_SECS)
        if self._thread.is_alive():
            raise Wrong("a run does not come to an end")
        self.job.end()
        for error in self._errors:
            raise error
        model = self.world.model
        for operation in self._operations:
            if operation.value is None:
                continue
            # Whoever attaches has claimed nothing, and attaches to the save that is there then.
            for found in (self._known, {} if newer is None else newer.listed):
                if (tag := found.get(operation.epoch)) is not None:
                    model.attached[tag] = model.attached.get(tag, {None}) | {operation.value}
        for operation in self._late:
            assert newer is not None
            lost = operation.tag and newer.opened.get(operation.epoch) != operation.tag
            untouched = {*newer.opened.items()} & {*newer.listed.items()}
            if lost or {*operation.gives_up} & {epoch for epoch, _ in untouched}:
                details = f"{operation.told}, though the newer run found {newer.opened} and left {newer.listed}"
                raise Wrong("a run was told that it did what a newer run did not find", details)
