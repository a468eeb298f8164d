"""What the processes of a job do together where each has the directory on a disk of its own.

See `StorageOptions.local_disks`, and `disks` for which epochs count. Guarantees:
- the primary decides, as it does for a directory that all processes see, and every process acts on its own disk;
- the run's incarnation is one: a process that has not claimed its own disk under it takes part in no save;
- a save is committed in two phases. Once all nodes have written, the primary offers the commit record, every process
  puts its part in place, and the verdict is that all have. A save that fails after that is taken back everywhere, on
  the primary before its verdict;
- that is: the primary says `record/<save>/0` before the verdict, or in its place where the save has failed by
  then, and the others tell below `placed/<save>`. No process waits for these answers while it trains, so this is
  no collective call: its halves `tell` and `collect` are made where the save has got to;
- what is left of a commit that a kill has interrupted is on some of the disks only. The next claim moves it aside.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from absl import logging

from epochckpt import errors
from epochckpt.agreement import CollectiveCalls, Coordinator, collective
from epochckpt.agreement.collective import Timeouts
from epochckpt.agreement.coordination import RecentKeys
from epochckpt.directory import EpochDirectory
from epochckpt.directory.epoch_directory import ReplaceCondition, Staging, Writer
from epochckpt.format import paths
from epochckpt.saving import Save, opening
from epochckpt.saving.job_directory import JobDirectory, Place
from epochckpt.saving.survey import Survey
from epochckpt.tiers import disks, host_record
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.ledger_kinds import ONE_PER_DISK
from epochckpt.tiers.mirror import Mirror

T = TypeVar("T")

_PLACING_SECS = 30.0  # what other processes get at least to put their part of a save in place
_KEPT = 64  # keys in the coordination service


@dataclasses.dataclass(frozen=True)
class _Offer:
    """The primary has told the others to put the record of a save in place, or has tried to."""

    save: str  # its name
    is_made: bool  # else the others may hear of it, or not


class DirectoryPerHost(JobDirectory):
    """A directory on a disk of each process; see `JobDirectory`."""

    first_word = "record"
    tells_commits = False  # the own disk does not tell of the others

    def __init__(self, place: Place, coordinator: Coordinator, mirror: Mirror):
        super().__init__(place, coordinator)
        self._mirror = mirror
        self.is_partial = True
        self._keys = RecentKeys(_KEPT)
        self._offer: _Offer | None = None  # on the primary: its last one

    @property
    def acts(self) -> bool:
        return True

    # -- which epochs there are ----------------------------------------------------------------------------------

    def introduce(self, node: str) -> dict[str, Any]:
        epoch_directory = self.place.epoch_directory()
        if not epoch_directory.store.atomic_folder_rename:
            raise errors.UnsupportedError(f"local_disks: {epoch_directory.store.root} is on no disk; leave it out")
        url = self._mirror.url
        made = opening.looked_at(
            epoch_directory.store, self.place.options, lambda: host_record.introduce(epoch_directory, node, url)
        )
        self._record = made
        return self._look_at_disk(epoch_directory)

    def _look_at_disk(self, epoch_directory: EpochDirectory) -> dict[str, Any]:
        """This process's look at its disk, as JSON."""
        me = self.coordinator.process
        return disks.look(
            epoch_directory.store, epoch_directory.names, self._record, me, self.coordinator.processes
        ).to_wire()

    def check(self, epoch_directory: EpochDirectory, told: Sequence[Any]) -> None:
        if any(one is None for one in told):
            root = epoch_directory.store.root
            raise errors.InvalidArgumentError(f"{root}: StorageOptions.local_disks differs between the processes")

    def survey(
        self, epoch_directory: EpochDirectory, told: Sequence[Any], known: Mapping[int, ReplaceCondition]
    ) -> Survey:
        return disks.survey_of_disks(
            epoch_directory=epoch_directory,
            told=told,
            options=self.place.options,
            known=known,
            mirror=self._mirror,
            coordinator=self.coordinator,
        )

    def address(self, resolved: str) -> None:
        del resolved  # each process opens its own

    def look(self, calls: CollectiveCalls, known: Mapping[int, ReplaceCondition]) -> Survey:
        def act() -> dict[str, Any]:
            return self._look_at_disk(self.epoch_directory)

        def decide(told: list[Any]) -> dict[str, Any]:
            return self.survey(self.epoch_directory, told, known).to_wire()

        found = Survey.from_wire(calls.collective("reload()", act, decide, 2 * self._wait_secs))
        self._ignore(found)
        return found

    def _ignore(self, survey: Survey) -> Sequence[int]:
        """Ignores what this disk has of epochs that the job does not have, until a claim moves it aside."""
        aside = survey.aside.get(self.coordinator.process, ())
        self.epoch_directory.ignore(aside)
        return aside

    # -- the claim -----------------------------------------------------------------------------------------------

    def claimed(self, writer: Writer, write: Callable[[Writer], None]) -> dict[str, Any]:
        del write  # each process writes to its own directory when it joins
        self._stager = writer
        return {"incarnation": writer.incarnation}

    def join(self, claim: Mapping[str, Any], write: Callable[[Writer], None], wait_secs: float) -> Sequence[int]:
        """Claims this disk for the incarnation of the primary, which has claimed its own.

        What is left of interrupted commits is moved aside.
        """
        epoch_directory = self.epoch_directory
        incarnation = claim["incarnation"]
        key = f"{self.prefix}/host/claim/{incarnation}"

        def claimed() -> dict[str, Any]:
            if self.incarnation != incarnation:  # the primary has claimed its own
                self._stager = epoch_directory.claim_as(incarnation)
            return self._look_at_disk(epoch_directory)

        def decide(told: list[dict[str, Any]]) -> dict[str, Any]:
            ids = [disk["directory"] for disk in told]
            mirror = self._mirror.newest([disk["mirror"] for disk in told])
            return {"survey": self.survey(self.epoch_directory, told, {}).to_wire(), "disks": ids, "mirror": mirror}

        agreed = self._meet(f"{key}/disk", claimed, decide, wait_secs)
        survey = Survey.from_wire(agreed["survey"])

        def moved() -> None:
            self._move_aside(self._ignore(survey))
            if agreed["mirror"]:
                ledger = LedgerFile(epoch_directory, ONE_PER_DISK)
                ledger.claimed(self.writer)
                ledger.adopt(agreed["mirror"])
            write(self.writer)

        def recorded() -> None:
            node = self.nodes.names[self.coordinator.process]
            record = dataclasses.replace(self._record, node=node, disks=tuple(agreed["disks"]), claim=incarnation)
            self.writer.overwrite(paths.HOST_RECORD, record.to_bytes())
            self._record = record

        # A disk whose record names this claim proves that no disk has anything that is left of earlier runs. Where a
        # record cannot be written, no process has joined: all of them take part in the next claim.
        self._meet(f"{key}/moved", moved, lambda _: None, wait_secs)
        self._meet(f"{key}/recorded", recorded, lambda _: None, wait_secs)
        self._keys.add(self.coordinator, key)
        return survey.epochs

    def _move_aside(self, epochs: Iterable[int]) -> None:
        store = self.epoch_directory.store
        folder = f"{paths.PARTIAL_PREFIX}{paths.new_id()}"
        for epoch in sorted(epochs):
            if store.exists(self.epoch_directory.folder(epoch)):
                self.writer.unlist(epoch, folder)
                logging.warning("%s/%s: what this disk has of checkpoint %d was moved there", store.root, folder, epoch)
        self.epoch_directory.ignore(())

    def _meet(self, key: str, act: Callable[[], Any], decide: Callable[[list[Any]], T], wait_secs: float) -> T:
        """A collective call of the hosts; the primary waits for the others for `wait_secs`."""
        patience = Timeouts(collect_secs=wait_secs, hear_secs=2 * wait_secs)
        return collective.collective(self.coordinator, key, act, decide, patience)

    # -- a save --------------------------------------------------------------------------------------------------

    def commit(
        self,
        save: Save,
        staging: Staging,
        record: bytes,
        check: Callable[[], None],
        key: Callable[[str, Save], str],
    ) -> None:
        """Has all processes put their part of a save in place, and waits until they have.

        SaveError says that a process has not.
        """
        check()
        text = base64.b64encode(zlib.compress(record, 1)).decode()
        self._keys.add(self.coordinator, key("record", save), key("placed", save))
        self._offer = _Offer(save=save.name, is_made=False)
        self.coordinator.put(f"{key('record', save)}/0", {"record": text})
        self._offer = _Offer(save=save.name, is_made=True)
        self.writer.publish(staging, record, lambda: None, save.request.replaces)
        patience = Timeouts(collect_secs=max(save.deadline.left(), _PLACING_SECS), hear_secs=0.0)
        try:
            collective.collect(self.coordinator, key("placed", save), patience)
        except errors.CoordinationTimeoutError as error:
            raise errors.SaveError(save.epoch, f"its commit is not on all disks: {error}") from error

    def verdict_keys(self, save: Save) -> Sequence[str]:
        if self._offer is None or self._offer.save != save.name:
            return [self.first_word]
        if self._offer.is_made:
            return ["verdict"]
        return [self.first_word, "verdict"]  # the first is taken if the offer has arrived after all

    def verdict(
        self,
        save: Save,
        save_id: str,
        hear: Callable[[str], Mapping[str, Any]],
        key: Callable[[str, Save], str],
    ) -> Mapping[str, Any]:
        first = hear("record")
        if not _is_offer(first):
            return first
        self._put_in_place(first["record"], key("placed", save), save, save_id)
        return hear("verdict")

    def late_verdict(self, peek: Callable[[str], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        verdict = peek("verdict")
        if verdict is not None:
            return verdict
        first = peek("record")
        return None if first is None or _is_offer(first) else first

    def _put_in_place(self, offered: str, key: str, save: Save, save_id: str) -> None:
        """Puts this process's part in place, and tells the primary."""

        def placed() -> None:
            record = zlib.decompress(base64.b64decode(offered))
            here = save.request.replaces
            if here is not None:  # it was found damaged together, and here it may be another save
                here = ReplaceCondition(self.epoch_directory.read_save_id(save.epoch), here.damage)
            self.writer.publish(self.stager.staging(save.epoch, save_id), record, lambda: None, here)

        failure = collective.tell(self.coordinator, key, placed)
        if failure is not None:
            raise failure

    def take_back(self, save: Save, save_id: str, failure: BaseException) -> BaseException:
        """Takes this process's part of a failed save out of sight, if it is in place, and removes it."""
        if self.coordinator.primary and self._offer != _Offer(save=save.name, is_made=True):
            return failure
        try:
            if self.incarnation and self.epoch_directory.read_save_id(save.epoch) == save_id:
                self.writer.unlist(save.epoch)()
        except Exception as problem:
            reason = f"{errors.say(failure)}; and it could not be taken out of sight here ({errors.say(problem)})"
            return errors.UncertainError(save.epoch, reason)
        return failure

    def here(self, epochs: Sequence[int]) -> Sequence[int]:
        found = set(self.epoch_directory.list_epochs()) if epochs else set()
        return [epoch for epoch in epochs if epoch in found]

    def unlisted_elsewhere(self, epochs: Sequence[int]) -> Sequence[int]:
        return epochs

    # -- deleting and going back ---------------------------------------------------------------------------------

    def agree_on_claim(self, claim: Callable[[], None]) -> None:
        claim()  # the primary decides when all have claimed their disks

    def order(self) -> dict[str, Any]:
        return {"id": paths.new_id(), "mirror": self._mirror.text()}

    def follow(self, order: Mapping[str, Any], act: Callable[[], None]) -> None:
        key = f"{self.prefix}/host/done/{order['id']}"

        def follow() -> None:
            if not self.coordinator.primary:
                self._mirror.adopt(order["mirror"])
                act()

        self._meet(key, follow, lambda _: None, self._wait_secs)
        if self.coordinator.primary:
            self._keys.add(self.coordinator, key)

    def check_replaceable(self, epoch: int) -> None:
        raise errors.UnsupportedError(f"allow_overwrite: not on all disks in one step; delete({epoch}) makes room")


def _is_offer(first: Mapping[str, Any]) -> bool:
    """Whether what the primary says first of a save offers its commit; else it is its verdict, a failure."""
    return "record" in first
