"""Copies to a mirror: who copies what.

Each process copies the folders of its own nodes. The primary (`MirrorTasks`) publishes each copy as a task, under
`task/<number>`, for all processes. They (`MirrorFollower`) answer under `report/<number>/<process>`, and the primary
commits when all have answered. The other processes do the newest task; the last task says that no further one comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from epochckpt import _threads
from epochckpt._threads import Deadline
from epochckpt.agreement import Coordinator
from epochckpt.agreement.coordination import RecentKeys
from epochckpt.arrays import EpochReader
from epochckpt.directory import EpochDirectory
from epochckpt.errors import CoordinationError, CoordinationTimeoutError, LateNodesError, kept
from epochckpt.format import NodeEntry
from epochckpt.options import StorageOptions
from epochckpt.saving.reports import NodeReport, ProcessReport
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.life import WorkLife, WorkPhase
from epochckpt.tiers.node_copies import NodeCopies
from epochckpt.tiers.tasks import CopyTask, EndOfTasks, Task, task_from_wire

_LISTEN_SECS = 60.0  # one question of another process for the next task
_KEPT_TASKS = 8  # in the coordination service


@dataclasses.dataclass(frozen=True)
class MirrorJob:
    """What both the primary and the other processes need to copy the nodes of this process.

    Attributes:
        url: of the mirror.
        local: the directory.
        copies: the mirror, to write.
        coordinator: the processes.
        prefix: of the keys of this manager's mirror.
        options: how it is mirrored.
        hosted: gives the names of this process's nodes.
    """

    url: str
    local: EpochDirectory
    copies: EpochDirectory
    coordinator: Coordinator
    prefix: str
    options: StorageOptions
    hosted: Callable[[], Sequence[str]]

    def reader(self, epoch: int) -> EpochReader:
        """Reads an epoch that is to be copied."""
        record = self.local.read_record(epoch)
        return EpochReader(self.local.store, self.local.folder(epoch), record, _threads.Pool(1))


class MirrorTasks:
    """The primary's tasks for all processes."""

    def __init__(self, job: MirrorJob, ledger: LedgerFile):
        self._job = job
        self._ledger = ledger
        self._keys = RecentKeys(_KEPT_TASKS)
        self._count = 0

    def copy(self, copy: NodeCopies, epoch: int, mirror_id: str, incarnation: str) -> list[NodeEntry]:
        """Has every process copy its nodes, as a part of the run that has claimed the mirror under this incarnation.

        Returns the entries of the copies. Raises LateNodesError if a process does not answer, or its error.
        """
        job = self._job
        coordinator = job.coordinator
        if coordinator.processes == 1:
            return copy.copy_nodes(job.hosted())
        told = self._ledger.told()
        number = self._publish(CopyTask(epoch=epoch, mirror_id=mirror_id, incarnation=incarnation, ledger=told))
        deadline = Deadline(job.options.save_timeout_secs)
        others = set(range(1, coordinator.processes))
        error: Exception | None = None
        entries: list[NodeEntry] = []
        try:
            entries = copy.copy_nodes(job.hosted())
        except Exception as caught:
            error = caught
        found, missing = coordinator.gather(f"{job.prefix}/report/{number}", others, deadline)
        reports = [ProcessReport.from_wire(wire) for _, wire in sorted(found.items())]
        failures = [*filter(None, [error, *(report.error for report in reports)])]
        if missing:
            late = coordinator.named(missing).split(", ")
            raise LateNodesError(epoch, late, deadline.secs) from next(iter(failures), None)
        for failure in failures:
            raise failure
        return [*entries, *(node.entry for report in reports for node in report.nodes)]

    def end(self) -> None:
        """Tells the other processes that no further task comes; if the ledger cannot be read, without it."""
        if self._job.coordinator.processes > 1:
            url = self._job.url
            told = _threads.logged(f"{url}: the other disks' ledgers of it may be old", self._ledger.told) or ""
            _threads.logged(_unheard(url), lambda: self._publish(EndOfTasks(ledger=told)))

    def _publish(self, task: Task) -> int:
        """Publishes a task for the other processes; returns its number."""
        self._count += 1
        task_key = f"{self._job.prefix}/task/{self._count}"
        report_key = f"{self._job.prefix}/report/{self._count}"
        self._job.coordinator.put(task_key, task.to_wire())
        self._keys.add(self._job.coordinator, task_key, report_key)
        return self._count


def publish_end(job: MirrorJob) -> None:
    """On the primary: tells the other processes that there is nothing to mirror."""
    _threads.logged(_unheard(job.url), lambda: job.coordinator.put(f"{job.prefix}/task/1", EndOfTasks().to_wire()))


def _unheard(url: str) -> str:
    return f"{url}: the other processes do not hear of its end"


class MirrorFollower:
    """The work of the other processes: the tasks of the primary, until it says that there are no more."""

    def __init__(self, job: MirrorJob, adopt: Callable[[str], None]):
        """`adopt` takes the primary's ledger, where each process has a copy of it."""
        self._job = job
        self._adopt = adopt
        self._life = WorkLife()

    def end(self) -> None:
        """Ends the work after the task that is being done."""
        self._life.advance(WorkPhase.ENDED)

    def run(self) -> None:
        """Does the tasks of the primary, one after the other."""
        done = 0
        job = self._job
        while self._life.phase is not WorkPhase.ENDED:
            try:
                task, done = self._newest_task(done)
            except CoordinationTimeoutError:
                continue
            except CoordinationError as error:
                logging.warning("%s: this process takes no more part in mirroring: %s", job.url, error)
                return
            self._take_ledger(task.ledger)
            match task:
                case CopyTask():
                    self._answer(done, task)
                case EndOfTasks():
                    return

    def _take_ledger(self, text: str) -> None:
        if not text:
            return
        what = f"{self._job.url}: this disk's ledger of it is old"
        _threads.logged(what, lambda: self._adopt(text))

    def _answer(self, number: int, task: CopyTask) -> None:
        coordinator = self._job.coordinator
        key = f"{self._job.prefix}/report/{number}/{coordinator.process}"
        report = self._report_of(task)
        what = f"{self._job.url}: the primary may not hear of this node"
        _threads.logged(what, lambda: coordinator.put(key, report.to_wire()))

    def _newest_task(self, done: int) -> tuple[Task, int]:
        """The newest task after those that are done, and its number."""
        found: dict[int, Any] = {}
        coordinator = self._job.coordinator
        with contextlib.suppress(CoordinationTimeoutError):
            found[done + 1] = coordinator.get(f"{self._job.prefix}/task/{done + 1}", _LISTEN_SECS)
        found |= {int(number): task for number, task in coordinator.get_all(f"{self._job.prefix}/task").items()}
        newest = max(found, default=0)
        if newest <= done:
            raise CoordinationTimeoutError(f"there is no task after {done}")
        return task_from_wire(found[newest]), newest

    def _report_of(self, task: CopyTask) -> ProcessReport:
        """Copies this process's nodes for a task."""
        try:
            stager = self._job.copies.join(task.incarnation)
            copy = NodeCopies(
                reader=self._job.reader(task.epoch),
                epoch_directory=self._job.copies,
                stager=stager,
                save_id=task.mirror_id,
            )
            entries = copy.copy_nodes(self._job.hosted())
            return ProcessReport(nodes=tuple(NodeReport(entry, {}) for entry in entries))
        except Exception as error:
            return ProcessReport(error=kept(error))
