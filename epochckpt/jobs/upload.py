"""`CopyUpload`: the last epoch of a run, copied to another directory.

`tiers.epoch_copy` makes the copy; here the processes of the job do it together.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from epochckpt import _progress
from epochckpt._durations import seconds
from epochckpt.agreement import coordination
from epochckpt.directory import directory_of
from epochckpt.errors import (
    EpochCheckpointError,
    InvalidArgumentError,
    SaveError,
    UnsupportedError,
    UploadError,
    say,
)
from epochckpt.jobs.job import Task, TaskGroup
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.runner import UploadTaskGroupBuilder
from epochckpt.jobs.workspace import Workspace
from epochckpt.manager import CheckpointManager
from epochckpt.manager.numbers import epoch_number
from epochckpt.saving.reports import NodeReport
from epochckpt.storage import open_store, plain
from epochckpt.tiers import CopyCommit, EpochCopy, NodeCopies, check_place


class CopyUpload(UploadTaskGroupBuilder):
    """Copies an epoch to another directory, which is a checkpoint directory like any other then.

    Every node copies its own folder; when all have, the primary adds what belongs to the epoch as a whole and makes the
    copy visible, atomically and durably. Its folder has the same name as at home, and on a file system stock Orbax
    reads it, too. All nodes must see the destination under the same name.

    Every byte of the epoch is compared on its way with the checksums that it was saved with. Before the copy becomes
    visible, all its files are there in their length. What has been written is not read back: `verify` of a manager of
    the destination does that.

    A second upload of the same epoch only looks whether the copy is whole, and makes it anew if a file is missing or
    short. A real upload writes to the destination as a run does: it takes over from the earlier writer, and removes the
    leftovers of a killed upload.

    Memory is bounded by blocks; on stores without rename, which take a file whole, by the largest file of a node (see
    `StorageOptions.part_bytes`).

    Works with `epochckpt.CheckpointManager`, and with the managers of `epochckpt.caffe2`, where each node's copy
    appears by itself, as `<epoch>/<node>`, and the destination is a `db_prefix` then. A step that stock Orbax wrote is
    refused with UnsupportedError.

    Examples:
        >>> job = ec.Job(stop_conditions=[ec.stop.max_epochs(2)])
        >>> _ = job.init(lambda ws: ws.update(total=np.zeros(3)))
        >>> _ = job.epoch(lambda ws: ws.update(total=ws["total"] + 1))
        >>> with ec.CheckpointManager("run") as manager:
        ...     runner = ec.JobRunner(job, manager, upload_task_group_builder=ec.CopyUpload("final"))
        ...     runner.train(ec.LocalSession())
        2
        >>> with ec.CheckpointManager("final") as manager:
        ...     manager.all_steps(), manager.verify(2).ok
        ([2], True)

    Args:
        destination: a path, or the URL of an object store; made if missing.
        replace: another epoch of this number that is there gives way when the copy is complete, and is removed; else it
            is an error.
        timeout_secs: how long the nodes wait for the slowest of them to copy its folder, in seconds or as `"2h"`.
    """

    def __init__(
        self, destination: str | os.PathLike[str], *, replace: bool = False, timeout_secs: float | str = 3600.0
    ):
        self.timeout_secs = seconds("CopyUpload(timeout_secs)", timeout_secs)
        try:
            target = open_store(destination)
        except (TypeError, ValueError) as error:
            shown = plain(destination) if isinstance(destination, str) else destination
            raise InvalidArgumentError(f"destination {shown!r}: {error}") from error
        self.destination = target.root
        self.address = target.address
        self.replace = bool(replace)

    def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
        """The task group that uploads an epoch of a manager; call it on every process.

        When the group runs, every process raises the same error:

        - EpochExistsError: the destination has another epoch of this number, or one that cannot be read.
        - UploadError: the destination refused, is out of reach of a node, or was claimed by another run meanwhile.
        - DamagedError: bytes have changed since they were saved.
        - CoordinationTimeoutError: a node did not finish in time.

        Raises:
            InvalidArgumentError: no epoch of this manager can be copied, or the destination lies in its directory.
        """
        epoch = epoch_number(epoch)
        with TaskGroup("upload") as group:
            Task(upload_task(checkpoint_manager, epoch, self), name="upload")
        return group


@contextlib.contextmanager
def uploading(epoch: int, destination: str) -> Generator[None]:
    """Turns what the destination refuses into an UploadError."""
    try:
        yield
    except SaveError as error:
        raise UploadError(epoch, destination, error.reason) from error
    except EpochCheckpointError:
        raise
    except OSError as error:
        reason = say(error)
        if isinstance(error, FileNotFoundError):
            reason += " (another run has claimed it meanwhile, or not all nodes see the same folder)"
        raise UploadError(epoch, destination, reason) from error


@functools.singledispatch
def upload_task(manager: Any, epoch: int, requested: CopyUpload) -> Callable[[Workspace], None]:
    """The task that copies an epoch of a manager; InvalidArgumentError: its epochs cannot be copied.

    A package with managers of its own registers how their epochs are copied, as `caffe2` does.
    """
    del epoch, requested
    raise InvalidArgumentError(
        "CopyUpload copies epochs of an epochckpt.CheckpointManager or of a manager of epochckpt.caffe2, got "
        f"{type(manager).__module__}.{type(manager).__name__}; for others write an UploadTaskGroupBuilder"
    )


class _EpochUpload:
    """The task that copies an epoch of our manager, once for all nodes of this process."""

    def __init__(self, manager: CheckpointManager, epoch: int, requested: CopyUpload):
        coordinator = coordination.connect(False)
        nodes = manager.node_names
        self._manager = manager
        self._epoch = epoch
        self._requested = requested
        self._here = nodes if coordinator.processes == 1 else [nodes[coordinator.process]]
        option = "CopyUpload(timeout_secs=…)"
        self._calls = RunCalls(coordinator, nodes, requested.timeout_secs, option=option, signs=False)
        self._ran = set[str]()  # the nodes that have run the task since the copy was made

    def __call__(self, workspace: Workspace) -> None:
        if workspace.node in self._ran:  # the group runs again
            self._ran.clear()
        if not self._ran:
            with _progress.work(f"uploading checkpoint {self._epoch}") as work:
                self._upload(work.advance)
        self._ran.add(workspace.node)

    def _upload(self, progress: Callable[[int], None]) -> None:
        """The primary looks at the destination and makes room, every process copies, and the primary publishes."""
        calls = self._calls
        copy = calls.together("opening of the upload", lambda: self._open(progress))
        begun: list[CopyCommit] = []  # on the primary, one if it makes the copy
        incarnation = calls.broadcast("beginning of the upload", lambda: self._begin(copy, begun))
        if incarnation is None:  # the copy is there already
            return
        if not calls.primary:
            self._copy_nodes(lambda: copy.joined(incarnation))
            calls.broadcast("end of the upload", lambda: None)
            return
        (commit,) = begun
        with commit.giving_up():
            reports = self._copy_nodes(lambda: commit)
            calls.broadcast("end of the upload", lambda: self._publish(commit, reports))

    def _copy_nodes(self, copies: Callable[[], NodeCopies]) -> list[Sequence[Mapping[str, Any]]]:
        """Every process copies; the primary gets the reports of all."""
        return self._calls.gather("upload of the nodes' folders", lambda: self._copy_own(copies()))

    def _open(self, progress: Callable[[int], None]) -> EpochCopy:
        with self._uploading():
            reader, names = self._manager.source(self._epoch)
            if reader is None:
                raise UnsupportedError(
                    f"{self._manager.directory}: checkpoint {self._epoch} was written by stock Orbax, whose steps "
                    "CopyUpload does not copy; copy its folder, or save it with epochckpt.CheckpointManager"
                )
            target = open_store(self._requested.address)
            check_place(reader.store, target)
            return EpochCopy(reader, directory_of(target, names), progress=progress)

    def _begin(self, copy: EpochCopy, begun: list[CopyCommit]) -> str | None:
        """On the primary: the incarnation in which the copy is made; None if the copy is there already."""
        with self._uploading():
            commit = copy.begin(self._requested.replace)
        if commit is None:
            return None
        begun.append(commit)
        return commit.incarnation

    def _copy_own(self, copies: NodeCopies) -> list[dict[str, Any]]:
        """Copies the folders of this process's nodes, and reports them."""
        with self._uploading():
            return [NodeReport(entry, {}).to_wire() for entry in copies.copy_nodes(self._here)]

    def _publish(self, commit: CopyCommit, reports: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """On the primary, with the reports of all processes: makes the copy visible."""
        with self._uploading():
            commit.publish([NodeReport.from_wire(wire).entry for report in reports for wire in report])
            commit.leave()

    def _uploading(self) -> contextlib.AbstractContextManager[None]:
        return uploading(self._epoch, self._requested.destination)


upload_task.register(CheckpointManager, _EpochUpload)
