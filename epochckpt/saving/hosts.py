"""What the processes of a job do together where each has the directory on a disk of its own.

See `StorageOptions.local_disks`, and `disks` for which epochs count. Guarantees:
- the primary decides, as it does for a directory that all processes see, and every process acts on its own disk;
- the run's incarnation is one: a process that has not claimed its own disk under it takes part in no save;
- a save is committed in two phases. Once all nodes have written, the primary offers the commit record, every process
  puts its part in place, and the verdict is that all have. A save that fails after that is taken back everywhere, on
  the primary before its verdict;
- that is: the primary says `record/<attempt>/0` before the verdict, or in its place where the attempt has failed by
  then, and the others tell below `placed/<attempt>`. No process waits for these answers while it trains, so this is
  no collective call: its halves `tell` and `collect` are made where the save has got to;
- what is left of a commit that a kill has interrupted is on some of the disks only. The next claim moves it aside.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import errors
from epochckpt.agreement import collective
from epochckpt.agreement.collective import Timeouts
from epochckpt.agreement.coordination import RecentKeys
from epochckpt.directory.protocol import ReplaceCondition, Staging, Writer
from epochckpt.directory.rename import PosixWriter, RenameCommits
from epochckpt.format import paths
from epochckpt.saving import disks, opening
from epochckpt.saving.opening import Opened, Survey
from epochckpt.saving.save import Save

T = TypeVar("T")

_PLACING_SECS = 30.0  # what other processes get at least to put their part of a save in place
_KEPT = 64  # keys in the coordination service


class Hosts:
    """The processes of a job with a disk each, for one manager, as one of them sees it."""

    def __init__(
        self, opened: Opened, policies: ocp.CheckpointManagerOptions, mirror: opening.Completing, wait_secs: float
    ):
        assert opened.host is not None, "the directory was opened as one of several"
        assert isinstance(opened.commits, RenameCommits), "only stores with rename have mirrors"
        self._coordinator, self._commits, self._nodes = opened.coordinator, opened.commits, opened.nodes
        self._record, self._policies, self._mirror = opened.host, policies, mirror
        self._prefix, self.wait_secs = f"{opened.prefix}/host", wait_secs
        self.writer: PosixWriter | None = None  # of this process's disk, once it is claimed
        self._keys = RecentKeys(_KEPT)

    @classmethod
    def of(
        cls,
        opened: Opened,
        policies: ocp.CheckpointManagerOptions,
        mirror: opening.Completing | None,
        wait_secs: float,
    ) -> Hosts | None:
        """The hosts of an open directory; None if it is one for all processes."""
        return None if opened.host is None or mirror is None else cls(opened, policies, mirror, wait_secs)

    # -- which epochs there are ----------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """This process's look at its disk, as JSON."""
        store, names, us = self._commits.store, self._commits.names, self._coordinator
        return disks.look(store, names, self._record, us.process, us.processes).to_wire()

    def survey(self, told: Sequence[Mapping[str, Any]], known: Mapping[int, ReplaceCondition]) -> dict[str, Any]:
        """On the primary: what the disks have together, as JSON; `known` epochs are damaged, see `opening.survey`."""
        us = self._commits, told, self._policies, known, self._mirror, self._coordinator
        return opening.survey_of_disks(*us).to_wire()

    def ignore(self, survey: Survey) -> Sequence[int]:
        """Ignores, until a claim moves them aside, the epochs on this process's disk that are none; returns them."""
        aside = survey.aside.get(self._coordinator.process, ())
        self._commits.ignored = frozenset(aside)
        return aside

    # -- the claim -----------------------------------------------------------------------------------------------

    def join(
        self, incarnation: str, primary: Writer | None, write: Callable[[Writer], None], wait_secs: float
    ) -> list[int]:
        """Claims the disks, of which the primary's is claimed, as one incarnation; returns the epochs of the job.

        What is left of interrupted commits is moved aside. `primary` is the writer of the primary's disk, on the
        primary. `write` writes what every directory has.
        """
        key, me = f"{self._prefix}/claim/{incarnation}", self._coordinator.process

        def claimed() -> dict[str, Any]:
            if isinstance(primary, PosixWriter):
                self.writer = primary
            elif self.writer is None or self.writer.incarnation != incarnation:
                self.writer = self._commits.claim_as(incarnation)
            return self.look()

        def decide(told: list[dict[str, Any]]) -> dict[str, Any]:
            ids, mirror = [disk["directory"] for disk in told], self._mirror.newest([disk["mirror"] for disk in told])
            return {"survey": self.survey(told, {}), "disks": ids, "mirror": mirror}

        agreed = self._meet(f"{key}/disk", claimed, decide, wait_secs)
        survey = Survey.from_wire(agreed["survey"])

        def moved() -> None:
            writer = self._claimed
            self._move_aside(writer, self.ignore(survey))
            if agreed["mirror"]:
                writer.overwrite(paths.MIRROR_RECORD, agreed["mirror"].encode())
            write(writer)

        # A disk whose record names this claim proves that no disk has anything that is left of earlier runs.
        self._meet(f"{key}/moved", moved, lambda _: None, wait_secs)
        node, ids = self._nodes.names[me], tuple(agreed["disks"])
        self._record = dataclasses.replace(self._record, node=node, disks=ids, claim=incarnation)
        self._claimed.overwrite(paths.HOST_RECORD, self._record.to_bytes())
        self._keys.add(self._coordinator, key)
        return survey.epochs

    @property
    def _claimed(self) -> PosixWriter:
        assert self.writer is not None, "this process's disk was not claimed"
        return self.writer

    def _move_aside(self, writer: PosixWriter, epochs: Iterable[int]) -> None:
        store, folder = self._commits.store, f"partial-{paths.new_id()}"
        for epoch in sorted(epochs):
            if store.exists(self._commits.folder(epoch)):
                writer.unlist(epoch, folder)
                logging.warning("%s/%s: what this disk has of checkpoint %d was moved there", store.root, folder, epoch)
        self._commits.ignored = frozenset()

    def _meet(self, key: str, act: Callable[[], Any], decide: Callable[[list[Any]], T], wait_secs: float) -> T:
        """A collective call of the hosts; the primary waits for the others for `wait_secs`."""
        patience = Timeouts(collect_secs=wait_secs, hear_secs=2 * wait_secs)
        return collective.collective(self._coordinator, key, act, decide, patience)

    # -- a save --------------------------------------------------------------------------------------------------

    def commit(
        self,
        save: Save,
        staging: Staging,
        record: bytes,
        check: Callable[[], None],
        key: Callable[[str, Save], str],
    ) -> None:
        """On the primary: has all processes put their part of a save in place, and waits until they have.

        `key` gives the prefixes of a save's keys. SaveError says that a process has not.
        """
        check()
        text = base64.b64encode(zlib.compress(record, 1)).decode()
        self._coordinator.put(f"{key('record', save)}/0", {"record": text})
        save.offered = True
        self._keys.add(self._coordinator, key("record", save), key("placed", save))
        self._claimed.publish(staging, record, lambda: None, save.request.replaces)
        patience = Timeouts(collect_secs=max(save.deadline.left(), _PLACING_SECS), hear_secs=0.0)
        try:
            collective.collect(self._coordinator, key("placed", save), patience)
        except errors.CoordinationTimeoutError as error:
            raise errors.SaveError(save.epoch, f"its commit is not on all disks: {error}") from error

    def place(self, offer: Mapping[str, Any], prefix: str, save: Save, id: str) -> None:
        """On the other processes: puts this process's part in place, and tells the primary."""

        def placed() -> None:
            record, here = zlib.decompress(base64.b64decode(offer["record"])), save.request.replaces
            if here is not None:  # it was found damaged together, and here it may be another attempt
                here = ReplaceCondition(self._commits.read_attempt(save.epoch), here.damage)
            self._claimed.publish(self._claimed.staging(save.epoch, id), record, lambda: None, here)

        failure = collective.tell(self._coordinator, prefix, placed)
        if failure is not None:
            raise failure

    def take_back(self, save: Save, id: str, failure: BaseException) -> BaseException:
        """Takes this process's part of a failed save out of sight, if it is in place, and removes it.

        Returns why the save has failed; an UncertainError if that could not be done.
        """
        if self._coordinator.primary and not save.offered:
            return failure
        try:
            if self.writer is not None and self._commits.read_attempt(save.epoch) == id:
                self.writer.unlist(save.epoch)()
        except Exception as problem:
            reason = f"{errors.say(failure)}; and it could not be taken out of sight here ({errors.say(problem)})"
            return errors.UncertainError(save.epoch, reason)
        return failure

    def here(self, epochs: Sequence[int]) -> list[int]:
        """Those of some epochs that this process's disk has."""
        found = set(self._commits.list_epochs()) if epochs else set()
        return [epoch for epoch in epochs if epoch in found]

    # -- deleting and going back ---------------------------------------------------------------------------------

    def order(self) -> dict[str, str]:
        """On the primary: what `follow` needs, beside the primary's decision."""
        return {"id": paths.new_id(), "mirror": self._mirror.text()}

    def follow(self, order: Mapping[str, str], act: Callable[[], None]) -> None:
        """After the primary has acted on its own disk: the other processes do so on theirs, and all wait for all.

        Raises:
            CoordinationTimeoutError: a process did not say in time that it has. What the primary has done holds, and
                the next run makes that process follow.
        """
        key = f"{self._prefix}/done/{order['id']}"

        def follow() -> None:
            if not self._coordinator.primary:
                self._mirror.adopt(order["mirror"])
                act()

        self._meet(key, follow, lambda _: None, self.wait_secs)
        if self._coordinator.primary:
            self._keys.add(self._coordinator, key)
