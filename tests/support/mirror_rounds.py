"""Random rounds of a run that has a mirror, against a small model: what must be where, and what may be.

A round is a world: one mirror, and the disks of hosts that have used it. One life of a run after the other opens a
disk: that of the last host, an empty one of a host that replaces it, that of a host that was replaced before, or a copy
of a disk. It saves, replaces, deletes and rolls back, while the mirror is away or back, and is killed at a random step,
or closed.

The model has two parts.
- `Disk`: what a host was told: epochs that must be listed, epochs that may be, and saves that must never come back.
- `Timeline`: all that the owner of the mirror may have put there. The mirror belongs to one timeline; after a kill
  nobody knows which of two. A mirror that fits none of those is a mixture.

A host whose claim on the mirror has been replaced finds the mirror's timeline when it opens its disk, and not its own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import itertools
import pathlib
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable

import obstore
import orbax.checkpoint as ocp

import epochckpt as ec
from epochckpt.errors import EpochCheckpointError, EpochNotFoundError, NotACheckpointDirectoryError, say
from epochckpt.inspection.gc import collect
from epochckpt.storage.object_client import Client
from tests.support import lives
from tests.support.lives import Killed, Life
from tests.support.rounds import READER, RETRIES, Found, Tags, Wrong, heard, run_command, saved_as

# -- the model


@dataclasses.dataclass
class Timeline:
    """What one history may have in the mirror.

    Attributes:
        may: the tags that the mirror may have now, by epoch.
        ever: all tags that this history has had.
        dead: those that were deleted, rolled back or replaced by calls that have returned.
    """

    may: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    ever: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    dead: set[int] = dataclasses.field(default_factory=set)

    def add(self, epoch: int, tag: int) -> None:
        self.may.setdefault(epoch, set()).add(tag)
        self.ever.setdefault(epoch, set()).add(tag)

    def fits(self, found: Found) -> bool:
        return all(tag in self.may.get(epoch, ()) for epoch, tag in found.items())

    def settle(self, listed: Found) -> None:
        """The mirror has heard of everything. Only what is listed may be there: a deletion makes older ones due."""
        self.may = {epoch: {tag} for epoch, tag in listed.items()}

    def had(self, epoch: int, tag: int) -> bool:
        return tag in self.ever.get(epoch, ()) and tag not in self.dead


@dataclasses.dataclass
class Disk:
    """A host's directory.

    Attributes:
        here: the tags that were saved here, and that retention leaves.
        saved: what was saved here and acknowledged, and has not been given up.
        must: of each of these epochs one of these tags must be listed.
        may: what is uncertain: a save or a deletion that has not returned.
        retired: what retention may have removed, and may be listed.
        together: later epochs of a rollback that was killed: what is gone of them are the newest ones.
        claims: the claims of the mirror that this directory may take for its own.
        is_copy: `cp -r` made it.
        left: what the mirror had when a run of this directory last ended, or another one took over.
        former: what it was before it began to go on from the mirror's history; None once that has surely happened.
    """

    path: pathlib.Path
    timeline: Timeline
    here: set[int] = dataclasses.field(default_factory=set)
    saved: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    must: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    may: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    retired: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    together: tuple[int, ...] = ()
    claims: set[int] = dataclasses.field(default_factory=set)
    is_copy: bool = False
    left: Found = dataclasses.field(default_factory=dict)
    former: Disk | None = None
    unsure: bool = False  # whether the mirror's history is its own: it was about to go on from that, or has lost it

    def retire(self, epoch: int, tags: set[int]) -> None:
        """Retention may remove these."""
        self.retired.setdefault(epoch, set()).update(tags)
        self.here -= tags

    def go_back(self) -> None:
        """It is what it was before."""
        former = self.former
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(former, field.name))

    def problem(self, listed: Found, mirror: Found) -> Wrong | None:
        """Why the disk's own history, which is this mirror's, cannot be listed so."""
        for epoch, tags in self.must.items():
            if listed.get(epoch) not in tags:
                return Wrong("an acknowledged epoch is lost", f"{epoch} is {listed.get(epoch)}, not {tags}")
        for epoch, tag in listed.items():
            if tag in self.timeline.dead:
                return Wrong("what was deleted, rolled back or replaced came back", f"{epoch}: {tag}")
            here = any(tag in known.get(epoch, ()) for known in (self.must, self.may, self.saved, self.retired))
            if not here and tag not in self.timeline.may.get(epoch, ()):
                return Wrong("an epoch is listed that is none of this history", f"{epoch}: {tag}")
        for epoch, tag in mirror.items():
            uncertain = len(self.must.get(epoch, ())) > 1 or epoch in self.may
            if tag not in self.timeline.dead and epoch not in listed and not uncertain:
                return Wrong("an epoch of the mirror is not listed", f"{epoch}: {tag}")
        gone = [epoch for epoch in self.together if epoch not in listed]
        if gone and any(epoch in listed for epoch in self.together if epoch > gone[0]):
            return Wrong("a rollback was done in part", f"of {self.together} are gone {gone}")
        return None


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a world's runs."""

    keep: int | None
    every: int
    mirror_keep: int | None
    backlog: int


class World:
    """One mirror, and the disks that have used it.

    Args:
        root: an empty folder.
        mirror: the URL of a place that nothing has used, or a path.
        rng: what decides.
    """

    def __init__(self, root: pathlib.Path, mirror: str, rng: random.Random):
        self.root, self.mirror, self.rng = root, mirror, rng
        self.options = Options(
            keep=rng.choice([None, 1, 2, 3]),
            every=rng.choice([1, 1, 1, 2, 3]),
            mirror_keep=rng.choice([None, None, 1, 2, 3]),
            backlog=rng.choice([1, 2, 4]),
        )
        self.events: list[str] = [f"{self.options}, mirror {mirror}"]
        self.kills = 0
        self._tags, self._next_tag = Tags(), itertools.count(1)
        self._next_claim, self._next_disk = itertools.count(1), itertools.count()
        self.owners: dict[int, Timeline] = {0: Timeline()}  # by the claims that the mirror may have
        self.seen: Found = {}
        self.disks = [self._new_disk()]
        self.disks[0].claims, self.disks[0].timeline = {0}, self.owners[0]

    def _new_disk(self) -> Disk:
        return Disk(self.root / f"host-{next(self._next_disk)}" / "run", Timeline())

    # -- a round

    def play(self, rounds: int) -> None:
        """Lives, one after the other; the last of them ends well."""
        try:
            Visit(self, self.disks[0]).play(first=True)
            for _ in range(rounds):
                self._between()
                disk = self._choose()
                if self.rng.random() < 0.12:
                    self._overlap(disk)
                else:
                    Visit(self, disk).play()
            lives.set_away(self.mirror, False)
            Visit(self, self.disks[-1]).play(last=True)
        finally:
            lives.set_away(self.mirror, False)

    def note(self, text: str) -> None:
        self.events.append(text)

    def _choose(self) -> Disk:
        """The disk of the next life; the current one is the last of the list."""
        drawn = self.rng.random()
        if drawn < 0.13:
            self.disks.append(self._new_disk())
            self.note(f"a host is replaced: {self.disks[-1].path.parent.name}")
        elif drawn < 0.32 and len(self.disks) > 1:
            returned = self.disks.pop(self.rng.randrange(len(self.disks) - 1))
            self.disks.append(returned)
            self.note(f"{returned.path.parent.name} comes back{' (a copy)' if returned.is_copy else ''}")
        return self.disks[-1]

    def look(self, *, beside: bool = False) -> Found:
        """What the mirror has; whose it can be is then known better. `beside`: a run may be changing it."""
        for left in range(20 if beside else 0, -1, -1):
            try:
                found = self._look()
                break
            except Wrong:
                if not left:
                    raise
        fitting = {claim: timeline for claim, timeline in self.owners.items() if timeline.fits(found)}
        if not fitting:
            may = [timeline.may for timeline in self.owners.values()]
            kind = "the mirror is a mixture" if len(self.owners) > 1 or len(self.disks) > 1 else "the mirror is wrong"
            raise Wrong(kind, f"it has {found}, may have {may}")
        if fitting.keys() != self.owners.keys():
            self.owners = fitting
        self.seen = found
        return found

    def _look(self) -> Found:
        if not self.mirror.startswith("/") or pathlib.Path(self.mirror).exists():
            storage = ec.StorageOptions(store=RETRIES)
            try:
                with ec.CheckpointManager(self.mirror, options=READER, storage=storage) as manager:
                    return self._tags.of(manager, manager.all_steps())
            except EpochCheckpointError as error:
                raise Wrong("the mirror does not open", say(error)) from error
        return {}

    def open(self, disk: Disk, *, mirrored: bool = True) -> ec.CheckpointManager:
        options = self.options
        storage = ec.StorageOptions(
            mirror=self.mirror if mirrored else None,
            mirror_every=options.every,
            mirror_keep=options.mirror_keep,
            mirror_backlog=options.backlog,
            io_threads=1,
            orbax_view=False,
            save_timeout_secs=30,
            store=RETRIES,
        )
        return ec.CheckpointManager(
            disk.path, options=ocp.CheckpointManagerOptions(max_to_keep=options.keep), storage=storage
        )

    def listed_alone(self, disk: Disk) -> list[int]:
        """The epochs of a directory without its mirror."""
        with ec.CheckpointManager(disk.path, options=READER) as manager:
            return list(manager.all_steps())

    def bytes_of_mirror(self) -> dict[str, bytes]:
        """All that lies in the mirror."""
        if self.mirror.startswith("/"):
            files = [path for path in pathlib.Path(self.mirror).rglob("*") if path.is_file()]
            return {str(path.relative_to(self.mirror)): path.read_bytes() for path in files}
        client, found = Client(self.mirror), dict[str, bytes]()
        for page in obstore.list(client.kv, client.below("")):
            for meta in page:
                found[meta["path"]] = bytes(obstore.get(client.kv, meta["path"]).bytes())
        return found

    # -- between two lives

    def _between(self) -> None:
        """What people do while no run is alive."""
        drawn = self.rng.random()
        if drawn < 0.10:
            self._copy_disk(used=True)
        elif drawn < 0.15:
            self._copy_disk(used=False)
        elif drawn < 0.22:
            self._collect(self.rng.choice([str(self.disks[-1].path), self.mirror]))
        elif drawn < 0.26 and self.seen:
            self._command("verify", self.mirror, expected=(0,))
        elif drawn < 0.30 and self.seen:
            self._copy_mirror()

    def _command(self, *args: str, expected: tuple[int, ...] | None = None) -> None:
        self.note(f"epochckpt {' '.join(args)}: {run_command(*args, expected=expected)}")

    def _collect(self, directory: str) -> None:
        if directory.startswith("/") and not pathlib.Path(directory).exists():
            return
        self.note(f"gc of {directory}")
        with contextlib.suppress(NotACheckpointDirectoryError):  # all epochs are deleted
            collect(directory, delete=True, clock=lambda: time.time() + 1e7)
        self.look()

    def _copy_mirror(self) -> None:
        destination = f"memory://{uuid.uuid4().hex}"
        before = self.look()
        self._command("cp", self.mirror, destination, "--yes", expected=(0,))
        with ec.CheckpointManager(destination, options=READER) as manager:
            found = self._tags.of(manager, manager.all_steps())
        if found != before:
            raise Wrong("a copy differs", f"{found} of {before}")

    def _copy_disk(self, *, used: bool) -> None:
        """`cp -r`; the copy is used without the mirror's name, or kept to be opened later, with it."""
        disk = self.rng.choice(self.disks)
        if not disk.path.exists():
            return
        made = self._new_disk()
        made.path.parent.mkdir(parents=True)
        shutil.copytree(disk.path, made.path, symlinks=True)
        if not used:
            fields = ("here", "saved", "must", "may", "retired", "together", "claims", "timeline")
            for field in fields:
                setattr(made, field, copy.deepcopy(getattr(disk, field)))
            made.is_copy = True
            self.disks.insert(self.rng.randrange(len(self.disks)), made)
            self.note(f"cp -r {disk.path.parent.name} {made.path.parent.name}")
            return
        before = self.bytes_of_mirror()
        self.note(f"cp -r {disk.path.parent.name} {made.path.parent.name}, and used")
        known = sorted({*disk.saved, *self.seen})
        for _ in range(self.rng.randrange(1, 4)):
            epoch, drawn = self.rng.choice(known or [0]), self.rng.random()
            if drawn < 0.35:
                self._command("rm", str(made.path), str(epoch), "--yes", "--take-over")
            elif drawn < 0.55:
                self._command("rollback", str(made.path), str(epoch), "--yes", "--take-over")
            else:
                self._use_copy(made, drawn < 0.75)
        if self.bytes_of_mirror() != before:
            raise Wrong("a copy of a directory changed the mirror", f"before {self.seen}, after {self._look()}")
        shutil.rmtree(made.path)

    def _use_copy(self, disk: Disk, saves: bool) -> None:
        with contextlib.suppress(EpochCheckpointError), self.open(disk, mirrored=False) as manager:
            listed = list(manager.all_steps())
            if saves or not listed:
                self.note("  saved in the copy")
                manager.save(max(listed, default=-1) + 1, args=saved_as(next(self._next_tag)), force=True)
                manager.wait_until_finished()
            elif self.rng.random() < 0.5:
                self.note("  deleted in the copy")
                manager.delete(self.rng.choice(listed))
            else:
                self.note("  rolled back in the copy")
                manager.rollback_to(self.rng.choice(listed))

    # -- two lives at once

    def _overlap(self, disk: Disk) -> None:
        """A run is held at a step in the mirror, or idle; another one, here or on an empty disk, goes on and closes."""
        at = self.rng.randrange(25)
        older = Visit(self, disk, Life(at, self.mirror, hold=True))
        older.begin(ends=self.rng.random() < 0.5)
        if not older.stands():
            older.finish()
            self.look()
            return
        self.note(f"  {older.life.held_at or 'idle'}")
        newer = disk
        if self.rng.random() < 0.6:
            newer = self._new_disk()
            self.disks.append(newer)
        self.note(f"  meanwhile {newer.path.parent.name}")
        visit = Visit(self, newer)
        visit.beside = disk
        visit.may_lose = newer is not disk
        disk.left = self.look(beside=True)
        complete = visit.play(last=True)
        older.fenced = newer is disk and visit.has_claimed
        older.finish()
        after = self.look()
        if complete is not None and after != complete:
            raise Wrong("a run that lost the mirror changed it", f"{complete} became {after}")

    def tag(self) -> int:
        return next(self._next_tag)

    def claim(self) -> int:
        return next(self._next_claim)

    def tags_of(self, manager: ec.CheckpointManager, epochs: Iterable[int]) -> Found:
        return self._tags.of(manager, epochs)


class Follows(enum.Enum):
    """Whose history a run goes on with."""

    OWN = enum.auto()  # the disk's, which is the mirror's, too
    MIRROR = enum.auto()  # the mirror's, which is not the disk's
    NOTHING = enum.auto()  # the disk's, and the mirror is another's


class Visit:
    """One life of a run on a disk."""

    def __init__(self, world: World, disk: Disk, life: Life | None = None):
        self.world, self.disk = world, disk
        self._killable = life is None
        self.life = life or Life()
        self._known: Found = {}  # what this manager lists
        self._unread: set[int] = set()  # what is listed, and only the mirror can have, which is away
        self._follows = Follows.OWN
        self._claimed = self._wrote = False  # the former: perhaps
        self._reached = True  # whether the mirror has answered when it was opened
        self._was_away = False
        self._gone: Found = {}  # what was acknowledged here, and is not of the mirror's history
        self._warned: list[str] = []
        self.beside: Disk | None = None  # that of another run, which is alive
        self.may_lose = False  # the other run writes to the mirror for another directory
        self._certain = True  # whose the mirror is
        self.fenced = False  # a newer run has claimed the directory
        self._saved, self._go_on = threading.Event(), threading.Event()
        self._errors: list[BaseException] = []

    # -- the whole

    def play(self, *, first: bool = False, last: bool = False) -> Found | None:
        """Opens, does some operations, and is killed or closed; returns what the mirror has after a good end."""
        world, rng = self.world, self.world.rng
        calm = first or last
        if self._killable and not calm and rng.random() < 0.55:
            place = rng.choice(["", world.mirror, str(self.disk.path)])
            self.life = Life(int(2 ** rng.uniform(0, 7.3)) - 1, place)
        lives.set_away(world.mirror, not calm and rng.random() < 0.15)
        world.note(f"{self.disk.path.parent.name} opens{' while the mirror is away' if self._is_away() else ''}")
        manager: ec.CheckpointManager | None = None
        try:
            with heard() as self._warned:
                manager = self.life.run(self._open)
                if manager is not None:
                    self._operate(manager, rng.randrange(1, 4) if calm else rng.randrange(1, 6), calm)
                    return self._end(manager, calm)
        except Killed:
            world.note(f"  {self.life.steps[-1]}")
            world.kills += 1
        finally:
            self.life.end()
            if self.beside is None:
                self.disk.left = world.look()  # which it is not away from: only runs are
        return None

    # -- a run beside which another one goes on

    def begin(self, *, ends: bool) -> None:
        """Opens and saves in a thread. With `ends` it closes; else it waits for `finish`, and then saves once more."""
        self.world.note(f"{self.disk.path.parent.name} opens")
        lives.set_away(self.world.mirror, False)
        rng = random.Random(self.world.rng.random())

        def call() -> None:
            try:
                manager = self._open()
                if manager is None:
                    return
                self._operate(manager, 2, True)
                self._saved.set()
                if not ends:
                    assert self._go_on.wait(lives.WAIT_SECS)
                    if rng.random() < 0.7:
                        self._save_anyway(manager)
                manager.close()
            except BaseException as error:
                self._errors.append(error)

        self._thread = self.life.start(call)
        self._ends = ends

    def _save_anyway(self, manager: ec.CheckpointManager) -> None:
        """The run does not know of the other one."""
        if not self.fenced:
            self._save(manager, max(self._known, default=-1) + 1)
            return
        epoch, tag = max(self._known, default=-1) + 1, self.world.tag()
        self.world.note(f"  the older run saves {epoch} as {tag}")
        try:
            manager.save(epoch, args=saved_as(tag), force=True)
            manager.wait_until_finished()
        except EpochCheckpointError:
            return
        raise Wrong("a run that was fenced off could save", f"{epoch}: {tag}")

    def stands(self) -> bool:
        """Whether the run is held, or idle, when its saves are done; False if it has ended, or waits in a save."""
        while not self.life.held.wait(0.002):
            if not self._thread.is_alive():
                return False
            if self._saved.is_set() and not self._ends:
                self.life.held.wait(0.02)
                return True
        if self._saved.wait(2):
            return True
        self.life.end()
        return False

    def finish(self) -> None:
        """The run goes on, and comes to its end."""
        self.life.let_go()
        self._go_on.set()
        self._thread.join(lives.WAIT_SECS)
        if self._thread.is_alive():
            raise Wrong("a run does not come to an end")
        self.life.end()
        for error in self._errors:
            if isinstance(error, Wrong):
                raise error
            if not isinstance(error, EpochCheckpointError | Killed):
                raise Wrong("a run raises what is no error of ours", repr(error))

    @property
    def has_claimed(self) -> bool:
        return self._wrote

    def _is_away(self) -> bool:
        return lives.is_away(self.world.mirror)

    # -- opening

    def _open(self) -> ec.CheckpointManager | None:
        """Opens the disk, and compares what is listed with what must be."""
        world, disk = self.world, self.disk
        self._reached = not self._is_away()
        mirror = dict(world.look() if self._reached and self.beside is None else world.seen)
        self._was_away = not self._reached
        empty = not disk.must  # of epochs that are certain to be here
        bare = disk.is_copy and not world.listed_alone(disk)
        try:
            manager = world.open(disk)
        except (EpochCheckpointError, OSError) as error:
            if empty and not self._reached:
                world.note(f"  refused: {type(error).__name__}")
                return None
            if disk.is_copy:  # it may be told from the directory whose copy it is, or not
                world.note(f"  refused: {say(error)[:200]}")
                return None
            how = "" if self._reached else " while its mirror is away"
            raise Wrong(f"a directory does not open{how}", say(error)) from error
        if empty and not disk.claims and not self._reached:
            raise Wrong("an empty disk begins from scratch beside a mirror that does not answer")
        if not self._reached:
            listed = self._listed_alone(manager)
        elif self.beside is not None:
            listed = self._listed_beside(manager)
        else:
            listed = world.tags_of(manager, manager.all_steps())
        if self.beside is not None:  # another run may have changed it just now
            mirror = {epoch: tag for epoch, tag in world.look(beside=True).items() if mirror.get(epoch) == tag}
        world.note(f"  lists {listed}, mirror {mirror}{'' if self._reached else ' (away)'}")
        self._judge(listed, mirror, bare)
        return manager

    def _listed_alone(self, manager: ec.CheckpointManager) -> Found:
        """What is listed without the mirror: what only the mirror has is not restored."""
        listed = {}
        for epoch in manager.all_steps():
            try:
                listed |= self.world.tags_of(manager, [epoch])
            except Wrong:
                known = self.disk.timeline.may.get(epoch, set()) - self.disk.timeline.dead
                if epoch in self.disk.must:
                    raise
                if not known:  # the mirror has given it up, perhaps, and this run cannot know
                    self._unread.add(epoch)
                    continue
                there = self.world.seen.get(epoch)  # as it was after the last life, and nobody has reached it since
                listed[epoch] = there if there in known else max(known)
        return listed

    def _listed_beside(self, manager: ec.CheckpointManager) -> Found:
        """What is listed while another run may remove epochs from the mirror."""
        listed = {}
        for epoch in manager.all_steps():
            try:
                listed |= self.world.tags_of(manager, [epoch])
            except Wrong:
                assert self.beside is not None
                given_up = self.world.seen.get(epoch) in self.beside.timeline.dead  # the mirror hears of it later
                leaves = given_up or self.world.options.mirror_keep is not None
                if epoch in self.disk.must or not leaves:
                    raise
                self._unread.add(epoch)
        return listed

    def _judge(self, listed: Found, mirror: Found, bare: bool) -> None:
        """Finds out whether the disk's own history goes on, or the mirror's; raises if it is neither.

        `bare`: it is a copy that has no epochs.
        """
        world, disk = self.world, self.disk
        # A mirror that is as it was left goes on, too, whoever has claimed it meanwhile.
        unchanged = self._reached and bool(mirror) and mirror == disk.left
        possible = unchanged or bool(disk.claims & world.owners.keys())
        certain = world.owners.keys() <= disk.claims and not disk.unsure
        self._certain = certain
        to_list = mirror if self._reached and possible and not disk.is_copy else {}
        if world.options.mirror_keep is not None:  # the others may be about to leave it
            to_list = {epoch: tag for epoch, tag in to_list.items() if epoch == max(mirror)}
        own = disk.problem(listed, to_list)
        former = disk.former
        fits = former is not None and not self._reached and not former.problem(listed, {})
        if fits and (own is not None or not world.seen.items() <= listed.items()):
            disk.go_back()  # it was killed before it went on from the mirror, and the mirror is not there
            own = None
        foreign = self._problem_of_adopting(listed, mirror) if self._reached else own
        if disk.is_copy:
            self._judge_copy(bare, own, foreign)
        elif own is None and (possible or not self._reached):
            self._follows = Follows.OWN if possible else Follows.NOTHING
        elif foreign is None and not certain:
            self._follows = Follows.MIRROR
        else:
            problem = own if certain or foreign is None else foreign
            assert problem is not None
            raise problem
        self._known = listed
        self._resolve(listed)

    def _judge_copy(self, bare: bool, own: Wrong | None, foreign: Wrong | None) -> None:
        """A copy of a directory has its own history, and never the mirror; but an empty one goes on from there."""
        disk = self.disk
        if own is None and not (bare and self._reached):
            self._follows = Follows.NOTHING
        elif foreign is None and bare and self._reached and not disk.must:
            self._follows, disk.is_copy, disk.claims = Follows.MIRROR, False, set()
        else:
            raise own or foreign or AssertionError

    def _problem_of_adopting(self, listed: Found, mirror: Found) -> Wrong | None:
        """Why this is no listing of a host that goes on from a mirror of another history."""
        for epoch, tag in mirror.items():
            if listed.get(epoch) != tag:
                return Wrong(
                    "a host does not go on from the mirror's history", f"{epoch}: {listed.get(epoch)}, not {tag}"
                )
        for epoch, tag in listed.items():
            if epoch not in mirror and not any(owner.had(epoch, tag) for owner in self.world.owners.values()):
                kind = "a returned host mixes its own history with the mirror's"
                return Wrong(kind, f"{epoch}: {tag} is none of {[owner.ever for owner in self.world.owners.values()]}")
        return None

    def _resolve(self, listed: Found) -> None:
        """What was uncertain is known now."""
        disk = self.disk
        kept = {epoch: {tag} for epoch, tag in listed.items() if tag in disk.here}
        if self._follows is Follows.MIRROR:
            for epoch, tags in disk.must.items():
                if len(tags) == 1 and listed.get(epoch) not in tags:
                    self._gone[epoch] = next(iter(tags))
            ever: dict[int, set[int]] = {}
            owners = list(self.world.owners.values())
            for owner in owners:
                for epoch, tags in owner.ever.items():
                    ever.setdefault(epoch, set()).update(tags)
            dead = set.intersection(*(owner.dead for owner in owners)) - {*listed.values()}
            self._timeline = Timeline({epoch: {tag} for epoch, tag in listed.items()}, ever, dead)
            return
        unseen = set[int]() if self._reached else {*self.world.seen.values()}  # only the mirror has it, perhaps
        for tags in (*disk.may.values(), *disk.must.values()):
            disk.timeline.dead |= tags - {*listed.values()} - unseen
        for epoch in kept:  # a save of this disk has replaced what the mirror has brought
            disk.timeline.dead |= disk.retired.get(epoch, set()) - kept[epoch]
        uncertain = {epoch: (tags & unseen) - {*listed.values()} for epoch, tags in disk.may.items()}
        disk.saved, disk.may, disk.together = kept, {epoch: tags for epoch, tags in uncertain.items() if tags}, ()
        for epoch in listed.keys() - kept.keys():
            disk.retired.setdefault(epoch, set()).add(listed[epoch])
        self._bound()

    def _bound(self) -> None:
        """What must be listed: of what was saved here, the newest ones."""
        disk, keep = self.disk, self.world.options.keep
        newest = sorted(self._known)[-keep:] if keep else sorted(self._known)
        for epoch in {*disk.saved} - {*newest}:
            disk.retire(epoch, disk.saved.pop(epoch))
        disk.must = {epoch: set(disk.saved[epoch]) for epoch in newest if epoch in disk.saved}
        for epoch in disk.must:
            disk.may.pop(epoch, None)

    # -- operations

    def _claim(self) -> None:
        """Before the first change: from here on the disk's claim is, or may be, another one."""
        world, disk = self.world, self.disk
        if self._claimed:
            return
        self._claimed = True
        claim = world.claim()
        if self._follows is Follows.MIRROR:
            disk.former = dataclasses.replace(disk, former=None)
            disk.timeline, disk.claims = self._timeline, {*world.owners}
            disk.here, disk.saved, disk.may, disk.together = set(), {}, {}, ()
            disk.retired = {epoch: {tag} for epoch, tag in self._known.items()}
            self._follows, disk.unsure = Follows.OWN, True
            self._bound()
        if self._follows is Follows.OWN:
            disk.claims = disk.claims | {claim}
            world.owners = world.owners | {claim: disk.timeline}
        self._number = claim

    def _operate(self, manager: ec.CheckpointManager, count: int, calm: bool) -> None:
        world, rng = self.world, self.world.rng
        for _ in range(count):
            drawn, known = rng.random(), sorted(self._known)
            if not calm and drawn < 0.10:
                lives.set_away(world.mirror, not self._is_away())
                self._was_away |= self._is_away()
                world.note(f"  the mirror is {'away' if self._is_away() else 'back'}")
            elif drawn < 0.62 or not known:
                self._save(manager, max([*known, *self._unread], default=-1) + rng.choice([1, 1, 1, 2]))
            elif drawn < 0.76:
                self._save(manager, rng.choice(known), replace=True)
            elif drawn < 0.88:
                self._delete(manager, rng.choice(known))
            else:
                self._roll_back(manager, rng.choice(known))

    def _change(self, call: Callable[[], object], *, exists: bool) -> bool:
        """Makes a change; False if it has failed, as it may while the mirror is away, or if the epoch has just gone."""
        try:
            self.life.run(call)
        except (EpochCheckpointError, OSError) as error:
            passed = isinstance(error, EpochNotFoundError) and not exists
            if passed or self._was_away or not self._killable:
                self.world.note(f"  failed: {say(error)[:300]}")
                return False
            raise Wrong(f"a call fails ({type(error).__name__})", say(error)) from error
        return True

    def _take_known(self, manager: ec.CheckpointManager) -> None:
        """After a call that has returned: what is listed now."""
        listed = list(manager.all_steps())
        strangers = [epoch for epoch in listed if epoch not in self._known and epoch not in self._unread]
        if self.beside is not None:  # its claim has looked at the mirror once more, and the other run had gone on there
            self._unread.update(strangers)
        elif strangers:
            raise Wrong("a running manager lists an epoch that it did not", f"{strangers}")
        self._known = {epoch: self._known[epoch] for epoch in listed if epoch in self._known}
        lost = [epoch for epoch in self.disk.must if epoch not in self._known]
        if lost:
            raise Wrong("a running manager lists an acknowledged epoch no more", f"{lost}")

    def _save(self, manager: ec.CheckpointManager, epoch: int, *, replace: bool = False) -> None:
        world, disk, tag = self.world, self.disk, self.world.tag()
        world.note(f"  {'replace' if replace else 'save'} {epoch} as {tag}")
        self._claim()
        disk.timeline.add(epoch, tag)
        disk.here.add(tag)
        old = {self._known[epoch]} if replace else set()
        keep = world.options.keep
        staying = sorted({*self._known, epoch})[-keep:] if keep else sorted({*self._known, epoch})
        for leaving in [e for e in disk.must if e not in staying]:
            disk.retire(leaving, disk.must.pop(leaving))
            disk.saved.pop(leaving, None)
        if epoch in disk.must:
            disk.must[epoch] = disk.must[epoch] | {tag}
        else:
            disk.may.setdefault(epoch, set()).add(tag)
            disk.retired.setdefault(epoch, set()).update(old)

        def save() -> None:
            if replace:
                manager.allow_overwrite(epoch)
            assert manager.save(epoch, args=saved_as(tag), force=True, custom_metadata={"tag": f"tag-{tag}-"})
            manager.wait_until_finished()

        if not self._change(save, exists=epoch in disk.must):
            return
        self._wrote, disk.unsure, disk.former = True, False, None
        disk.saved[epoch] = {tag}
        disk.timeline.dead |= old
        disk.may.pop(epoch, None)
        self._known[epoch] = tag
        if epoch in staying:
            disk.must[epoch] = {tag}
        self._take_known(manager)
        self._bound()

    def _delete(self, manager: ec.CheckpointManager, epoch: int) -> None:
        self.world.note(f"  delete {epoch}")
        self._give_up(epoch, [epoch], lambda: manager.delete(epoch), manager)

    def _roll_back(self, manager: ec.CheckpointManager, epoch: int) -> None:
        self.world.note(f"  roll back to {epoch}")
        later = [e for e in sorted(self._known) if e > epoch]
        stays = self.world.seen if self.world.options.mirror_keep is None else {}
        whole = [e for e in later if e in self.disk.must or stays.get(e) == self._known[e]]
        self.disk.together = tuple(whole)
        self._give_up(epoch, later, lambda: manager.rollback_to(epoch), manager)
        if not self.life.dead:
            self.disk.together = ()

    def _give_up(self, at: int, epochs: list[int], call: Callable[[], object], manager: ec.CheckpointManager) -> None:
        """`at`: the epoch that the call names."""
        disk = self.disk
        exists = at in disk.must
        self._claim()
        for epoch in epochs:
            disk.must.pop(epoch, None)
            disk.may.setdefault(epoch, set()).add(self._known[epoch])
        if not self._change(call, exists=exists):
            return
        if epochs:
            self._wrote, disk.unsure, disk.former = True, False, None
        for epoch in epochs:
            disk.timeline.dead.add(self._known[epoch])
            disk.timeline.dead |= disk.may.pop(epoch, set())
            disk.saved.pop(epoch, None)
        if still := {*epochs} & {*manager.all_steps()}:
            raise Wrong("a running manager lists what it has deleted", f"{still}")
        self._known = {epoch: tag for epoch, tag in self._known.items() if epoch not in epochs}
        self._take_known(manager)
        self._bound()

    # -- the end

    def _end(self, manager: ec.CheckpointManager, calm: bool) -> Found | None:
        world = self.world
        if not calm and world.rng.random() < 0.2:
            self.life.end()
            world.note("  killed at its end")
            world.kills += 1
            return None
        if calm or world.rng.random() < 0.7:
            lives.set_away(world.mirror, False)
        reachable = not self._is_away()
        world.note(f"  close{'' if reachable else ' while the mirror is away'}")
        try:
            self.life.run(manager.close)
        except EpochCheckpointError as error:
            raise Wrong(f"close() fails ({type(error).__name__})", say(error)) from error
        self._check_aside()
        if not (reachable and self._wrote and self._follows is Follows.OWN):
            return None
        if not (self._reached or self._certain):  # another directory has claimed the mirror, perhaps
            return None
        if self.may_lose and any("nothing more is mirrored" in text for text in self._warned):
            self.disk.unsure = True  # the mirror's history is the other one, perhaps
            return None
        self.life.end()
        return self._check_mirror()

    def _check_mirror(self) -> Found:
        """The run has ended well, and the mirror was there: it has heard of everything."""
        world, disk = self.world, self.disk
        found = world._look()
        newest = max(self._known, default=None)
        warned = f"warned: {self._warned[-3:]}"
        for epoch, tag in found.items():
            if tag in disk.timeline.dead:
                kind = "the mirror has what was deleted, rolled back or replaced, after a good end"
                raise Wrong(kind, f"{epoch}: {tag}; {warned}")
            # Until it has claimed the mirror, a run does not know what it has, or what another run still copies.
            unseen = (self.beside is not None or not self._reached) and tag in disk.timeline.may.get(epoch, ())
            if self._known.get(epoch) != tag and not unseen:
                details = f"{found}, {self._known}; {warned}"
                raise Wrong("the mirror differs from the directory, after a good end", details)
        if newest is not None and found.get(newest) != self._known[newest]:
            raise Wrong("the newest epoch is not mirrored, after a good end", f"{found}, {self._known}; {warned}")
        if world.options.mirror_keep is not None and len(found) > world.options.mirror_keep:
            raise Wrong("the mirror keeps more than mirror_keep", f"{found} with {world.options.mirror_keep}")
        disk.timeline.settle(self._known | found)
        world.owners, disk.claims, world.seen = {self._number: disk.timeline}, {self._number}, found
        return found

    def _check_aside(self) -> None:
        """What a returned host had saved by itself is kept, and was spoken of."""
        if not self._gone or not self._wrote:
            return
        texts = [path.read_text(errors="replace") for path in self.disk.path.rglob("epoch.json")]
        for epoch, tag in self._gone.items():
            if not any(f"tag-{tag}-" in text for text in texts):
                raise Wrong("a returned host's own epoch is not kept", f"{epoch}: {tag}")
        if not self._warned:
            raise Wrong("a returned host is not told that its epochs were set aside")
