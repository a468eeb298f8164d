"""The mirror of a directory: its committed epochs, copied to another directory (a bucket), in the background.

Guarantees:
- nothing here runs on the training thread, and no commit waits for the mirror;
- the mirror belongs to one directory at a time. A run claims it by replacing exactly the claim that it has seen (see
  `directory.lineage`); who finds another claim there writes nothing (see `standing`);
- an epoch appears in the mirror whole, by a commit there. Its record names the save that it is a copy of, and what the
  mirror really has is compared with that, not with a plan of this directory;
- an epoch that was deleted or rolled back leaves the mirror only when it is out of sight here, and never comes back;
- a mirror that does not answer is asked again, for as long as the manager is open. A bounded number of epochs waits.

`Mirror` is what a manager knows of its mirror, on each process. `looking` has what a look there finds, and `mirror_run`
what the run does for it once the directory is claimed. The primary's work in the background is done by `worker.Worker`,
the other processes' by `copying.MirrorFollower`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import orbax.checkpoint as ocp
from absl import logging

from epochckpt.directory import EpochDirectory, attached_metrics, directory_of
from epochckpt.errors import FormatVersionError, say
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames
from epochckpt.saving.survey import Survey
from epochckpt.storage import open_store
from epochckpt.tiers import ledger as ledgers
from epochckpt.tiers.backlog import Backlog, MirrorEpochs
from epochckpt.tiers.copying import MirrorJob
from epochckpt.tiers.job_mirror import NO_MIRROR, JobMirror, MirroredDirectory
from epochckpt.tiers.ledger import save_id
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.ledger_kinds import RecordedLedger
from epochckpt.tiers.looking import NO_LOOK, Looker
from epochckpt.tiers.mirror_run import Idle, MirrorContext, MirrorRun, NotBegun, longest_close_secs
from epochckpt.tiers.standing import Successor, Unanswered


class Mirror(JobMirror):
    """The mirror of one manager's directory, which is another directory."""

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
        self._looker = Looker(url=self.url, there=self._there)
        self._seen = NO_LOOK
        self._epochs = MirrorEpochs()
        self._run: MirrorRun = NotBegun(self._epochs)

    def take_nodes(self, hosted: Sequence[str]) -> None:
        self._hosted = hosted

    def hosted(self) -> Sequence[str]:
        """The names of this process's nodes."""
        return self._hosted

    # -- looking -------------------------------------------------------------------------------------------------

    def complete(self, local: EpochDirectory, survey: Survey, recorded: RecordedLedger) -> Survey:
        gone: tuple[int, ...] = ()
        if isinstance(self._run, NotBegun):
            self._look(local, [*survey.epochs, *survey.damaged], recorded)
            gone = self._seen.standing.diverged if isinstance(self._seen.standing, Successor) else ()
        damaged = dict(survey.damaged)
        are_seen = self._epochs.are_seen  # since the claim the worker may have seen them
        if are_seen:
            for epoch in self._epochs.readable.keys() & damaged.keys():
                if self._looker.is_of_save(local, epoch, self._epochs.ids, self._seen.copies):
                    text = "%s: checkpoint %d is read from its mirror %s"
                    logging.warning(text, local.store.root, epoch, self.url)
                    del damaged[epoch]
                else:  # the mirror has another save of it, which nobody may read as this one
                    self._epochs.disown([epoch])
        readable = self._epochs.readable
        if not are_seen:
            readable = recorded.kind.readable_unanswered(readable)
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

    def look(self, local: EpochDirectory) -> Mapping[int, str]:
        """Looks which epochs of the directory's history the mirror has, in any process; returns their ids.

        Raises:
            StorageError, DamagedError, …: the mirror cannot be looked at.
            InvalidArgumentError: it has the epochs of another directory, or is the directory itself.
        """
        self._look(local, local.list_epochs(), RecordedLedger.in_directory(local))
        if isinstance(self._seen.standing, Unanswered):
            raise self._seen.standing.error
        return self._epochs.readable

    def readable(self) -> Mapping[int, str]:
        return self._epochs.readable

    @property
    def there(self) -> EpochDirectory:
        """The mirror, to read."""
        return self._there

    def is_copy(self, local: EpochDirectory, epoch: int) -> bool:
        """Whether the mirror's epoch of a number was a copy of the one here at the last look."""
        readable = epoch in self._epochs.readable
        return readable and self._looker.is_of_save(local, epoch, self._epochs.ids, self._seen.copies)

    def _look(self, local: EpochDirectory, epochs: Sequence[int], recorded: RecordedLedger) -> None:
        """Asks the mirror which epochs it has, before this manager writes."""
        self._seen = self._looker.look(local, epochs, recorded, self._seen)
        answered = not isinstance(self._seen.standing, Unanswered)
        self._epochs.look_was(self._seen.ids, self._seen.readable, seen=answered)
        self._looker.explain(self._seen, local.store.root)

    # -- reading -------------------------------------------------------------------------------------------------

    def learn(self, copies: Mapping[int, str]) -> None:
        self._run.learn(copies)

    def copy_of(self, epoch: int, epoch_directory: EpochDirectory) -> EpochDirectory | None:
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
        known = self._epochs.readable.get(epoch) == mirror_id or self._run.was_copied(epoch, mirror_id)
        return self._there if known else None

    def newest(self, texts: Sequence[str]) -> str:
        """Of the records of this mirror that several disks have, the newest; empty if none can be used."""
        found = ledgers.newest(texts, self.url)
        return "" if found is None else found.to_bytes().decode()

    def text(self) -> str:
        """The directory's record of this mirror as it is now; empty if there is none."""
        return self._run.text()

    def adopt(self, text: str) -> None:
        """On other processes than the primary: writes a record of the primary's, unless it has a newer one."""
        self._run.adopt(text)

    def origin_of(self, epoch: int) -> str | None:
        """The save here that the mirror's epoch of a number is a copy of, also if that is not here any more."""
        there = self._epochs.ids.get(epoch)
        known = self._seen.copies.get(epoch)
        if known is not None and known.save_id and there in (None, known.mirror_id):
            return known.save_id
        return None if there is None else save_id(self._there, epoch)

    # -- what the manager tells ----------------------------------------------------------------------------------

    def claimed(self, directory: MirroredDirectory) -> None:
        job = MirrorJob(
            url=self.url,
            local=directory.local,
            copies=self._copies,
            coordinator=directory.coordinator,
            prefix=f"{directory.prefix}/mirror",
            options=self._options,
            hosted=self.hosted,
        )
        idle = Idle(MirrorContext(job=job, ledger=directory.ledger, epochs=self._epochs))
        self._run = idle  # also if it cannot begin
        self._run = idle.begin(self._seen, directory.epochs, Backlog(url=self.url, options=self._options))

    def committed(self, epoch: int) -> None:
        self._run.committed(epoch)

    def withdrawn(self, epochs: Sequence[int], ledger: LedgerFile) -> None:
        if (known := ledger.read()) is not None:
            self._run.withdrawn([epoch for epoch in known.hidden if epoch in epochs])

    def pin(self, epoch: int | None) -> bool:
        return self._epochs.pin(epoch)

    def waiting(self) -> frozenset[int]:
        return self._run.waiting()

    def diverged(self) -> Mapping[int, str | None]:
        return self._seen.diverged

    def has(self, epoch: int) -> bool:
        return epoch in self._epochs.readable

    def pop_removed(self) -> list[int]:
        return self._epochs.pop_removed()

    def stop(self, timeout_secs: float) -> None:
        self._run.stop(timeout_secs)

    def close(self, timeout_secs: float) -> None:
        self._run.close(timeout_secs)

    def longest_close_secs(self, timeout_secs: float) -> float:
        return longest_close_secs(timeout_secs)


def named_mirror(url: str | None, local: EpochDirectory) -> JobMirror:
    """The mirror that a caller names for a directory, if any, as `viewed`."""
    return NO_MIRROR if url is None else viewed(url, local)


def viewed(url: str, local: EpochDirectory) -> Mirror:
    """The mirror that a caller names for a directory, looked at and never written to; raises as `Mirror.look` does."""
    mirror = Mirror(url, StorageOptions(), ocp.CheckpointManagerOptions(), names=local.names)
    mirror.look(local)
    return mirror
