"""A directory that all processes of a job see. The primary claims, commits and deletes; the others only stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt import errors
from epochckpt.agreement import CollectiveCalls, Coordinator
from epochckpt.directory import EpochDirectory
from epochckpt.directory.epoch_directory import ReplaceCondition, Rollback, Staging, Writer
from epochckpt.format import paths
from epochckpt.saving import Save, survey
from epochckpt.saving.job_directory import JobDirectory, Place
from epochckpt.saving.survey import Survey
from epochckpt.tiers.host_record import read_host_record
from epochckpt.tiers.job_mirror import JobMirror
from epochckpt.tiers.ledger import save_id
from epochckpt.tiers.ledger_kinds import RecordedLedger


class SharedDirectory(JobDirectory):
    """One directory for all processes; see `JobDirectory`."""

    first_word = "verdict"
    tells_commits = True

    def __init__(self, place: Place, coordinator: Coordinator, mirror: JobMirror):
        super().__init__(place, coordinator)
        self._mirror = mirror

    @property
    def acts(self) -> bool:
        return self.coordinator.primary

    def introduce(self, node: str) -> None:
        del node

    def check(self, epoch_directory: EpochDirectory, told: Sequence[Any]) -> None:
        root = epoch_directory.store.root
        if any(one is not None for one in told):
            raise errors.InvalidArgumentError(f"{root}: StorageOptions.local_disks differs between the processes")
        if self.place.options.read_only:
            return
        record = read_host_record(epoch_directory.store)
        if record is not None:
            raise errors.InvalidArgumentError(
                f"{root} is on a disk of one host (of node {record.node}), and has only that host's parts of epochs. "
                "Open it with StorageOptions(local_disks=True, mirror=…), or all epochs in its mirror, "
                f"{record.mirror}. options.read_only=True looks at what is here"
            )

    def survey(
        self, epoch_directory: EpochDirectory, told: Sequence[Any], known: Mapping[int, ReplaceCondition]
    ) -> Survey:
        del told
        self.is_partial = epoch_directory.is_of_host()
        here = survey.survey(epoch_directory, self.place.options, known, is_partial=self.is_partial)
        return self._mirror.complete(epoch_directory, here, RecordedLedger.in_directory(epoch_directory))

    def address(self, resolved: str) -> str:
        return resolved

    def look(self, calls: CollectiveCalls, known: Mapping[int, ReplaceCondition]) -> Survey:
        def act() -> dict[str, Any]:
            return self.survey(self.epoch_directory, [], known).to_wire()

        return Survey.from_wire(calls.broadcast("reload()", act, 2 * self._wait_secs))

    def claimed(self, writer: Writer, write: Callable[[Writer], None]) -> dict[str, Any]:
        write(writer)
        self._set_aside(writer, self._mirror.diverged())
        self._stager = writer
        return {"incarnation": writer.incarnation, "epochs": self.epoch_directory.list_epochs()}

    def _set_aside(self, writer: Writer, diverged: Mapping[int, str | None]) -> None:
        """Moves epochs that are no part of the mirror's history out of sight, by their save ids."""
        local = self.epoch_directory
        local.ignore(())
        listed = diverged.keys() & set(local.list_epochs()) if diverged else set[int]()
        # Another run may have saved one of them since.
        gone = tuple(epoch for epoch in diverged if epoch in listed and save_id(local, epoch) == diverged[epoch])
        if not gone:
            return
        id = paths.new_id()
        folder = f"{paths.DIVERGED_PREFIX}{id}"
        # All at once: some of them alone would be a history that never was.
        writer.roll_back(Rollback(to=None, epochs=gone, id=id, kept=folder))
        logging.warning("%s: checkpoint %s was moved to %s", local.store.root, ", ".join(map(str, gone)), folder)

    def join(self, claim: Mapping[str, Any], write: Callable[[Writer], None], wait_secs: float) -> Sequence[int]:
        del write, wait_secs
        if not self.coordinator.primary:
            self._stager = self.epoch_directory.join(claim["incarnation"])
            self.epoch_directory.ignore(())  # the primary has set them aside
        return claim["epochs"]

    def commit(
        self,
        save: Save,
        staging: Staging,
        record: bytes,
        check: Callable[[], None],
        key: Callable[[str, Save], str],
    ) -> Callable[[], None] | None:
        del key
        return self.writer.publish(staging, record, check, save.request.replaces)

    def verdict(
        self,
        save: Save,
        save_id: str,
        hear: Callable[[str], Mapping[str, Any]],
        key: Callable[[str, Save], str],
    ) -> Mapping[str, Any]:
        del save, save_id, key
        return hear("verdict")

    def late_verdict(self, peek: Callable[[str], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        return peek("verdict")

    def here(self, epochs: Sequence[int]) -> Sequence[int]:
        return epochs
