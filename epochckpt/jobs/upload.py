"""`CopyUpload`: the last epoch of a run, copied to another directory.

`tiers.epoch_copy` makes the copy; here the processes of the job do it together.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Generator
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
from epochckpt.format import NodeEntry
from epochckpt.jobs.job import Task, TaskGroup
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.runner import UploadTaskGroupBuilder
from epochckpt.jobs.workspace import Workspace
from epochckpt.manager import CheckpointManager
from epochckpt.manager.numbers import epoch_number
from epochckpt.saving.reports import NodeReport
from epochckpt.storage import open_store, plain
from epochckpt.tiers import EpochCopy, check_place


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


@upload_task.register(CheckpointManager)
def _epoch_upload(manager: CheckpointManager, epoch: int, requested: CopyUpload) -> Callable[[Workspace], None]:
    """A task that copies an epoch of our manager, once for all nodes of this process."""
    coordinator = coordination.connect(False)
    nodes = manager.node_names
    ran = set[str]()
    here = nodes if coordinator.processes == 1 else [nodes[coordinator.process]]
    option = "CopyUpload(timeout_secs=…)"
    calls = RunCalls(coordinator, nodes, requested.timeout_secs, option=option, signs=False)
    guarded = uploading(epoch, requested.destination)

    @guarded
    def open_copy(progress: Callable[[int], None]) -> EpochCopy:
        reader, names = manager.source(epoch)
        if reader is None:
            raise UnsupportedError(
                f"{manager.directory}: checkpoint {epoch} was written by stock Orbax, whose steps CopyUpload does not "
                "copy; copy its folder, or save it with epochckpt.CheckpointManager"
            )
        target = open_store(requested.address)
        check_place(reader.store, target)
        return EpochCopy(reader, directory_of(target, names), progress=progress)

    def publish(copy: EpochCopy, copied: list[NodeEntry]) -> None:
        copy.publish(copied)
        copy.leave()

    def upload_once() -> None:
        with _progress.work(f"uploading checkpoint {epoch}") as work:
            upload_now(work)

    def upload_now(work: _progress.Work) -> None:
        copy = calls.together("opening of the upload", lambda: open_copy(work.advance))

        @guarded
        def begin() -> str | None:
            return copy.writer.incarnation if copy.begin(requested.replace) else None

        # The primary looks at the destination and makes room, every process copies, and the primary publishes.
        incarnation = calls.broadcast("beginning of the upload", begin)
        if incarnation is not None:
            if not calls.primary:
                copy.join(copy.epoch_directory.join(incarnation))
            copied: list[NodeEntry] = []  # on the primary, of all processes

            def copy_own() -> list[dict[str, Any]]:
                return [NodeReport(entry, {}).to_wire() for entry in copy.copy_nodes(here)]

            def collect(reports: list[Any]) -> None:
                copied.extend(NodeReport.from_wire(wire).entry for report in reports for wire in report)

            with copy.giving_up() if calls.primary else contextlib.nullcontext():
                calls.collective("upload of the nodes' folders", guarded(copy_own), collect)
                calls.broadcast("end of the upload", guarded(lambda: publish(copy, copied)))

    def upload(workspace: Workspace) -> None:
        if workspace.node in ran:  # the group runs again
            ran.clear()
        if not ran:
            upload_once()
        ran.add(workspace.node)

    return upload
