"""The mirror of a directory: its committed epochs, copied to another directory (a bucket), in the background.

Guarantees:
- nothing here runs on the training thread, and no commit waits for the mirror;
- the mirror belongs to one directory at a time. A run claims it by replacing exactly the claim that it has seen (see
  `directory.lineage`); who finds another claim there writes nothing (see `standing`);
- an epoch appears in the mirror whole, by a commit there. Its record names the save that it is a copy of, and what the
  mirror really has is compared with that, not with a plan of this directory;
- an epoch that was deleted or rolled back leaves the mirror only when it is out of sight here, and never comes back;
- a mirror that does not answer is asked again, for as long as the manager is open. A bounded number of epochs waits.

`Mirror` is what a manager knows of its mirror, on each process. The primary's work in the background is done by
`worker.Worker`, the other processes' by `copying.MirrorFollower`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _threads
from epochckpt.agreement import Coordinator
from epochckpt.directory import EpochDirectory, attached_metrics, directory_of
from epochckpt.directory.epoch_directory import Rollback, Stager, Writer
from epochckpt.directory.lineage import Lineage
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
    NotACheckpointDirectoryError,
    UnsupportedError,
    say,
    unreadable,
)
from epochckpt.format import paths
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames
from epochckpt.saving.survey import Survey
from epochckpt.storage import Store, open_store
from epochckpt.tiers import ledger as ledgers
from epochckpt.tiers.backlog import Backlog, MirrorEpochs
from epochckpt.tiers.copying import MirrorFollower, MirrorJob, publish_end
from epochckpt.tiers.ledger import Adoption, Copy, Identity, Ledger, LedgerFile, save_id, seen_id
from epochckpt.tiers.standing import ForeignReader, Owner, Standing, Stranger, Successor, Unanswered, assess, claim_of
from epochckpt.tiers.worker import Worker

_MARGIN_SECS = 60.0  # by how much the other processes wait longer for the end than the primary
_NO_ANSWER = (DamagedError, FormatError, FormatVersionError, NotACheckpointDirectoryError, OSError)


@dataclasses.dataclass(frozen=True)
class _Look:
    """What a look at the mirror has found."""

    standing: Standing
    ledger: Ledger | None = None  # of this directory
    copies: Mapping[int, Copy] = dataclasses.field(default_factory=dict)  # of the ledger here, even if copied along
    # The save ids of epochs here that are no part of the mirror's history, as of the last look that has told.
    diverged: Mapping[int, str | None] = dataclasses.field(default_factory=dict)


class Mirror:
    """The mirror of one manager's directory, on one process."""

    def __init__(
        self,
        url: str,
        options: StorageOptions,
        policies: ocp.CheckpointManagerOptions,
        names: StepNames | None = None,
    ):
        """`names` is the format of the epochs' folders; None: the format of the `policies`."""
        store = open_store(url, settings=options.store)
        names = names or StepNames.of(policies)
        self.url = store.root
        self._there = directory_of(store, names)  # to read
        self._copies = directory_of(store, names)  # to write, in the background
        self._options = options
        self._policies = policies
        self._hosted: Sequence[str] = ()  # the names of this process's nodes
        self._seen = _Look(Unanswered(UnsupportedError("nobody has looked")))
        self._epochs = MirrorEpochs()
        self._local: EpochDirectory | None = None  # once the directory is claimed
        self._ledger: LedgerFile | None = None  # the same
        self._writer: Writer | None = None  # of the directory, where this process has claimed it
        self._worker: Worker | None = None  # on the primary, where this run writes to the mirror
        self._follower: MirrorFollower | None = None  # on the other processes
        self._work: _threads.Future[None] | None = None

    def take_nodes(self, hosted: Sequence[str]) -> None:
        """Says which nodes this process hosts, once that is known, and when they are renamed."""
        self._hosted = hosted

    def hosted(self) -> Sequence[str]:
        """The names of this process's nodes."""
        return self._hosted

    # -- looking -------------------------------------------------------------------------------------------------

    def complete(self, local: EpochDirectory, survey: Survey, disk_ledgers: Sequence[str] | None = None) -> Survey:
        """On the primary: a survey of the directory, with what the mirror has; see `survey.Completing`.

        Raises:
            StorageError, DamagedError, …: the mirror cannot be looked at, and there is nothing here to go on with.
            InvalidArgumentError: the mirror has the epochs of another directory.
        """
        gone: tuple[int, ...] = ()
        if self._local is None:
            self._look(local, [*survey.epochs, *survey.damaged], disk_ledgers)
            gone = self._seen.standing.diverged if isinstance(self._seen.standing, Successor) else ()
        damaged = dict(survey.damaged)
        if not isinstance(self._seen.standing, Unanswered):
            for epoch in self._epochs.readable.keys() & damaged.keys():
                if self._is_of_save(local, epoch, self._epochs.ids, self._seen.copies):
                    text = "%s: checkpoint %d is read from its mirror %s"
                    logging.warning(text, local.store.root, epoch, self.url)
                    del damaged[epoch]
                else:
                    _threads.start(functools.partial(self._epochs.disown, [epoch])).result()
        readable = self._epochs.readable
        if isinstance(self._seen.standing, Unanswered) and disk_ledgers is not None:
            readable = {}  # the parts that are here cannot be completed
        here = [epoch for epoch in survey.epochs if epoch not in gone]
        remote = sorted(readable.keys() - {*here} - damaged.keys())
        attached = survey.attached
        if remote and attached_metrics.are_needed(self._policies):
            attached = attached | attached_metrics.of_epochs(self._there, remote, self._there.read_save_id)
        return dataclasses.replace(
            survey,
            epochs=sorted({*here, *remote}),
            damaged={epoch: found for epoch, found in damaged.items() if epoch not in gone},
            attached=attached,
            remote=tuple(remote),
            copies={epoch: readable[epoch] for epoch in remote},
            diverged=gone,
        )

    def _check_apart(self, local: Store) -> None:
        """Refuses a directory that cannot have this mirror."""
        if not local.atomic_folder_rename:
            problem = f"only a directory on a file system has a mirror, not {local.root}"
            raise UnsupportedError(f"mirror={self.url}: {problem}")
        there = self._there.store
        same = there.root.rstrip("/") == local.root.rstrip("/")
        if not same:
            with contextlib.suppress(OSError):  # not to be looked at: a write there will fail
                same = there.root_id() == local.root_id() != ()
        if same:
            raise InvalidArgumentError(f"mirror={self.url} is the directory itself ({local.root}); choose another")

    def look(self, local: EpochDirectory) -> Mapping[int, str]:
        """Looks which epochs of the directory's history the mirror has, in any process; returns their ids.

        Raises:
            StorageError, DamagedError, …: the mirror cannot be looked at.
            InvalidArgumentError: it has the epochs of another directory, or is the directory itself.
        """
        self._look(local, local.list_epochs(), None)
        if isinstance(self._seen.standing, Unanswered):
            raise self._seen.standing.error
        return self._epochs.readable

    def readable(self) -> Mapping[int, str]:
        """The ids of those of its epochs that are part of the directory's history, as of the last look."""
        return self._epochs.readable

    @property
    def there(self) -> EpochDirectory:
        """The mirror, to read."""
        return self._there

    def is_copy(self, local: EpochDirectory, epoch: int) -> bool:
        """Whether the mirror's epoch of a number was a copy of the one here at the last look."""
        return epoch in self._epochs.readable and self._is_of_save(local, epoch, self._epochs.ids, self._seen.copies)

    def _look(self, local: EpochDirectory, epochs: Sequence[int], disk_ledgers: Sequence[str] | None) -> None:
        """Asks the mirror which epochs it has, before this manager writes.

        `disk_ledgers` are the ledgers on the disks of the hosts, as texts; None where all hosts share one directory.
        """
        self._check_apart(local.store)
        root = local.store.root
        shared = disk_ledgers is None
        recorded = ledgers.usable_ledger(local.store) if shared else ledgers.newest(disk_ledgers, root)
        ledger = None if recorded is None else recorded.at(self.url)
        if recorded is not None and recorded.url != self.url:
            logging.warning("%s: its mirror was %s, and is %s from now on", root, recorded.url, self.url)
        copies: Mapping[int, Copy] = {} if ledger is None else ledger.copies
        own = ledger
        if ledger is not None and shared and not ledger.identity.is_of(local.store):
            own = None  # of the directory that this one is a copy of
        here = sorted(epochs)
        try:
            lineage, ids = self._lineage_and_epochs()
            if recorded is not None and self.url in recorded.former and ids:
                raise InvalidArgumentError(
                    f"mirror={self.url} was the mirror of {root} before, and has missed what was deleted and rolled "
                    "back here since. Choose an empty mirror, or remove the epochs of that one"
                )
            standing = assess(own, here, lineage, ids, lambda epoch: self._is_of_save(local, epoch, ids, copies))
        except _NO_ANSWER as error:
            if not here:
                raise self._refusal(error) from error
            text = "%s: its mirror %s does not answer, so that epochs which only the mirror has cannot be read: %s"
            logging.warning(text, root, self.url, say(error))
            standing = Unanswered(error)
            ids = {epoch: copy.mirror_id for epoch, copy in copies.items()}
        diverged = self._seen.diverged  # an earlier look has hidden them, and they stay so
        if isinstance(standing, Successor):
            diverged = {epoch: save_id(local, epoch) for epoch in standing.diverged}
        seen = _Look(standing=standing, ledger=own, copies=copies, diverged=diverged)
        readable = self._history(seen, local, ids, ledger if isinstance(standing, ForeignReader) else own)
        self._seen = seen
        self._epochs.look_was(ids, readable)
        self._say(root, known_url="" if recorded is None else recorded.url)

    def _refusal(self, error: Exception) -> Exception:
        """The error for a mirror that cannot be looked at, where there is nothing else to go on with."""
        if isinstance(error, EpochCheckpointError):
            return error
        return unreadable(self.url, error) if isinstance(error, OSError) else error

    def _lineage_and_epochs(self) -> tuple[Lineage | None, dict[int, str]]:
        """The lineage of the mirror, and the ids of its epochs, as they are now."""
        lineage = self._there.lineage()
        while True:
            epochs = self._there.list_epochs()
            found = {epoch: seen_id(self._there, epoch) for epoch in epochs}
            now = self._there.lineage()
            if now == lineage:
                return lineage, found
            lineage = now  # it was claimed meanwhile, and may have other epochs

    def _history(
        self, seen: _Look, local: EpochDirectory, ids: Mapping[int, str], ledger: Ledger | None
    ) -> dict[int, str]:
        """Those of the mirror's epochs, which have these `ids`, that are part of this directory's history."""
        match seen.standing:
            case Owner() | Unanswered():
                hidden = frozenset[int]() if ledger is None else self._withdrawn(ledger, local)
            case Successor() as standing:
                unchanged = ledger is not None and _is_unchanged(standing, ledger, ids)
                hidden = self._withdrawn(ledger, local) if ledger is not None and unchanged else frozenset()
            case ForeignReader(common=common):
                # A copy of a directory has brought a ledger along. The epochs that it knows are of a common history.
                known = {epoch for epoch in ids if _is_listed(epoch, ids, seen.copies) and epoch <= common}
                hidden = frozenset(ids.keys() - known) | (frozenset() if ledger is None else ledger.hidden)
            case Stranger():
                hidden = frozenset(ids)
        return {epoch: mirror_id for epoch, mirror_id in ids.items() if epoch not in hidden}

    def _withdrawn(self, ledger: Ledger, local: EpochDirectory) -> frozenset[int]:
        return dataclasses.replace(ledger, withdrawals=ledgers.settled_withdrawals(ledger, local)).hidden

    def _say(self, root: str, known_url: str) -> None:
        """Says what the standing means for this directory; raises InvalidArgumentError for a stranger's mirror."""
        match self._seen.standing:
            case Stranger():
                there = self._epochs.ids
                problem = (
                    f"mirror={self.url} holds {len(there)} epochs, the newest is {max(there, default=None)}, and none "
                    f"of them is one of the epochs in {root}. Choose an empty mirror for this directory, or open an "
                    "empty directory to go on from the mirror"
                )
                if known_url != self.url:
                    raise InvalidArgumentError(problem)
                logging.error("%s. Nothing is read from it or written to it", problem)
            case ForeignReader(common=common):
                text = (
                    "%s: its mirror %s belongs to another directory. Epochs up to %d, which both have, are read from "
                    "there, and nothing is written to it. A copy of a directory needs a mirror of its own; an empty "
                    "directory goes on from a mirror"
                )
                logging.warning(text, root, self.url, common)
            case Successor(diverged=gone) if gone:
                text = (
                    "%s: another directory has gone on in its mirror %s since this one wrote there. The run goes on "
                    "from the mirror; checkpoint %s of this directory is no part of that history, and is not used"
                )
                logging.warning(text, root, self.url, ", ".join(map(str, gone)))
            case _:
                pass

    def _is_of_save(
        self, local: EpochDirectory, epoch: int, ids: Mapping[int, str], copies: Mapping[int, Copy]
    ) -> bool:
        """Whether the mirror's epoch of a number is of the same save as the one here, as far as that can be read.

        The mirror has these `ids`, and the ledger here these `copies`.
        """
        copied = copies[epoch].save_id if _is_listed(epoch, ids, copies) else ""
        here = save_id(local, epoch)
        if here is None:
            return bool(copied)
        return here == (copied or save_id(self._there, epoch))

    # -- reading -------------------------------------------------------------------------------------------------

    def learn(self, copies: Mapping[int, str]) -> None:
        """On the other processes: the ids of the copies that stand for epochs which are not here."""
        if self._worker is None:
            self._epochs.learn(copies)

    def copy_of(self, epoch: int, epoch_directory: EpochDirectory) -> EpochDirectory | None:
        """See `readers.MirrorCopies`. Any process may ask, at any time; storage is looked at."""
        try:
            mirror_id = self._there.read_save_id(epoch)
        except (FormatVersionError, OSError) as error:
            if epoch in self._epochs.readable and epoch not in epoch_directory.list_epochs():
                raise  # nothing but the mirror has it
            logging.warning("%s: whether it has checkpoint %d cannot be seen: %s", self.url, epoch, say(error))
            return None
        if mirror_id is None:
            return None
        here = save_id(epoch_directory, epoch) if epoch in epoch_directory.list_epochs() else None
        if here is not None:
            return self._there if save_id(self._there, epoch) == here else None
        known = self._epochs.readable.get(epoch) == mirror_id or self._was_copied(epoch, mirror_id)
        return self._there if known else None

    def _was_copied(self, epoch: int, mirror_id: str) -> bool:
        """On the other processes: whether the primary's ledger has a copy that was made since this manager looked."""
        if self._follower is None or self._ledger is None or (ledger := self._ledger.read()) is None:
            return False
        copy = ledger.copying.get(epoch) or ledger.copies.get(epoch)
        return epoch not in ledger.hidden and copy is not None and copy.mirror_id == mirror_id

    def newest(self, texts: Sequence[str]) -> str:
        """See `survey.Completing`."""
        found = ledgers.newest(texts, self.url)
        return "" if found is None else found.to_bytes().decode()

    def text(self) -> str:
        """See `survey.Completing`."""
        return "" if self._ledger is None else self._ledger.text()

    def adopt(self, text: str) -> None:
        """See `survey.Completing`."""
        if self._local is None or self._writer is None:
            return
        found = ledgers.newest([text], self.url)
        own = ledgers.usable_ledger(self._local.store)
        if found is not None and (own is None or found.serial > own.serial):
            self._writer.overwrite(paths.MIRROR_RECORD, text.encode())

    def origin_of(self, epoch: int) -> str | None:
        """See `survey.Completing`."""
        there = self._epochs.ids.get(epoch)
        known = self._seen.copies.get(epoch)
        if known is not None and known.save_id and there in (None, known.mirror_id):
            return known.save_id
        return None if there is None else save_id(self._there, epoch)

    # -- what the manager tells ----------------------------------------------------------------------------------

    def claimed(
        self,
        local: EpochDirectory,
        stager: Stager,
        ledger: LedgerFile,
        coordinator: Coordinator,
        prefix: str,
        epochs: Sequence[int],
    ) -> None:
        """On every process, when the directory is claimed and has these epochs: begins to work."""
        self._local = local
        self._ledger = ledger
        self._writer = stager if isinstance(stager, Writer) else None
        if not ledger.on_each_disk:  # else `DirectoryPerHost` does so on each disk
            self._set_aside(local)
        job = MirrorJob(
            url=self.url,
            local=local,
            copies=self._copies,
            coordinator=coordinator,
            prefix=f"{prefix}/mirror",
            options=self._options,
            hosted=self.hosted,
        )
        if not coordinator.primary:
            self._follower = MirrorFollower(job=job, adopt=self.adopt)
            self._begin(self._follower.run)
            return
        if isinstance(self._seen.standing, ForeignReader | Stranger):  # it has said so
            if (found := ledger.read()) is not None:
                self._disown(self._outdated(local, found, epochs))
            if coordinator.processes > 1:
                self._begin(lambda: publish_end(job))
            return
        begun = ledger.write(self._first_ledger(local, ledger))
        outdated = self._outdated(local, begun, epochs)
        self._epochs.disown(outdated)
        backlog = Backlog(url=self.url, options=self._options)
        backlog.begin(epochs, {*self._epochs.readable, *outdated}, outdated)
        self._worker = Worker(job=job, ledger=ledger, epochs=self._epochs, backlog=backlog)
        self._begin(self._worker.run)

    def _first_ledger(self, local: EpochDirectory, file: LedgerFile) -> Ledger:
        """The ledger with which this run begins."""
        found = file.read()  # of a run that was alive until now, perhaps
        if found is not None and not file.on_each_disk and not found.identity.is_of(local.store):
            logging.info("%s is a copy of another directory, and gets an id of its own", local.store.root)
            found = None
        identity = Identity.of(local.store, paths.new_id() if found is None else found.identity.directory)
        ledger = found or Ledger(url=self.url, identity=identity)
        ledger = dataclasses.replace(ledger, identity=identity, withdrawals=ledgers.settled_withdrawals(ledger, local))
        ledger = ledger.at(self.url)
        match self._seen.standing:
            case Owner(lineage=None):
                return dataclasses.replace(ledger, adopted=None, copies={}, copying={})
            case Successor(lineage=seen) as standing:
                there = self._epochs.ids
                if found is not None and not self._is_as_seen(found):
                    return ledger  # another run of this directory has taken the mirror over meanwhile
                return dataclasses.replace(
                    ledger,
                    adopted=Adoption(claim=claim_of(seen), epochs=there),
                    copies={e: copy for e, copy in ledger.copies.items() if there.get(e) == copy.mirror_id},
                    copying={},
                    withdrawals=ledger.withdrawals if _is_unchanged(standing, ledger, there) else (),
                )
            case _:
                return ledger

    def _is_as_seen(self, ledger: Ledger) -> bool:
        seen = self._seen.ledger
        return seen is not None and (ledger.claims, ledger.adopted) == (seen.claims, seen.adopted)

    def _outdated(self, local: EpochDirectory, ledger: Ledger, epochs: Sequence[int]) -> set[int]:
        """The epochs here that the mirror has, or may have, from another save, as far as the ledger tells.

        The mirror is not asked: no save waits for it. The worker compares the epochs when it has claimed the mirror.
        """
        adopted = {} if ledger.adopted is None else ledger.adopted.epochs
        there = {*self._epochs.ids, *ledger.copying, *adopted}
        listed = {epoch for epoch in there if _is_listed(epoch, self._epochs.ids, self._seen.copies)}
        known = listed & ledger.copies.keys()
        same = {epoch for epoch in known if save_id(local, epoch) in (None, ledger.copies[epoch].save_id)}
        return {epoch for epoch in epochs if epoch in there and epoch not in same}

    def _set_aside(self, local: EpochDirectory) -> None:
        """Moves the epochs that are no part of the mirror's history out of sight."""
        local.ignored = frozenset()
        if self._writer is None or not self._seen.diverged:
            return
        diverged = self._seen.diverged
        listed = diverged.keys() & set(local.list_epochs())
        # Another run may have saved one of them since.
        gone = tuple(epoch for epoch in diverged if epoch in listed and save_id(local, epoch) == diverged[epoch])
        if not gone:
            return
        id = paths.new_id()
        folder = f"{paths.DIVERGED_PREFIX}{id}"
        # All at once: some of them alone would be a history that never was.
        self._writer.roll_back(Rollback(to=None, epochs=gone, id=id, kept=folder))
        logging.warning("%s: checkpoint %s was moved to %s", local.store.root, ", ".join(map(str, gone)), folder)

    def _begin(self, work: Callable[[], None]) -> None:
        try:
            self._work = _threads.start_thread(work)
        except RuntimeError as error:
            logging.error("%s: nothing is mirrored, there is no thread for it: %s", self.url, error)
            self._worker = None

    def committed(self, epoch: int) -> None:
        """On the primary: an epoch was committed here."""
        if self._worker is None:
            self._disown([epoch])
        else:
            self._worker.committed(epoch)

    def _disown(self, epochs: Collection[int]) -> None:
        """Without a worker: what the mirror has of these epochs is no copy any more, and must not come back as one."""
        self._epochs.disown(epochs)
        if self._ledger is not None:
            self._ledger.disown(epochs, self._epochs.ids)

    def withdrawn(self, epochs: Sequence[int]) -> None:
        """On the primary: epochs were deleted here, or rolled back, and the ledger says so."""
        worker = self._worker
        if worker is None:
            self._epochs.disown(epochs)
        else:  # it takes locks, and a signal handler may save meanwhile
            _threads.start(lambda: worker.withdrawn(epochs)).result()

    def pin(self, epoch: int | None) -> bool:
        """On the primary: has one epoch, to which the run goes back, stay in the mirror; False if it is not there."""
        return self._epochs.pin(epoch)

    def waiting(self) -> frozenset[int]:
        """See `saving.retention.Mirrored`."""
        return frozenset() if self._worker is None else self._worker.waiting()

    def has(self, epoch: int) -> bool:
        """See `saving.retention.Mirrored`."""
        return epoch in self._epochs.readable

    def pop_removed(self) -> list[int]:
        """See `saving.retention.Mirrored`."""
        return self._epochs.pop_removed()

    def stop(self, timeout_secs: float) -> None:
        """Ends the work in the background, and waits for the step that is being done, at most so long."""
        if self._worker is not None:
            self._worker.stop()
        if self._follower is not None:
            self._follower.end()
        if self._work is not None:
            self._work.wait(timeout_secs)

    def close(self, timeout_secs: float) -> None:
        """Waits until the newest epoch is mirrored, at most so long, and logs what is not."""
        if self._work is None:
            return
        if self._worker is not None:
            self._worker.close()
        wait = timeout_secs if self._follower is None else timeout_secs + _MARGIN_SECS
        if not self._work.wait(wait):
            logging.warning("%s: the mirror is not done within %g s, which nothing waits for", self.url, timeout_secs)
        if self._follower is not None:
            self._follower.end()
        worker = self._worker
        if worker is None:
            return
        # The directory itself may be away by now, and the manager closes all the same.
        what = f"{self.url}: what is not mirrored cannot be seen"
        left = _threads.logged(what, lambda: _threads.start(worker.end).result())
        if left:
            text = "%s: not mirrored: checkpoint %s. The next run that saves goes on with that"
            logging.warning(text, self.url, ", ".join(map(str, left)))


def viewed(url: str, local: EpochDirectory) -> Mirror:
    """The mirror that a caller names for a directory, looked at and never written to; raises as `Mirror.look` does."""
    mirror = Mirror(url, StorageOptions(), ocp.CheckpointManagerOptions(), names=local.names)
    mirror.look(local)
    return mirror


def _is_listed(epoch: int, ids: Mapping[int, str], copies: Mapping[int, Copy]) -> bool:
    """Whether a ledger with these `copies` lists the mirror's epoch, by the `ids` that the mirror has."""
    copy = copies.get(epoch)
    return copy is not None and copy.mirror_id == ids.get(epoch)


def _is_unchanged(standing: Successor, ledger: Ledger, ids: Mapping[int, str]) -> bool:
    """Whether the mirror, which has these `ids`, has exactly the copies that the ledger lists, and nothing diverged.

    If something has, the mirror's history counts, and nothing that was withdrawn here.
    """
    return not standing.diverged and {epoch: copy.mirror_id for epoch, copy in ledger.copies.items()} == ids
