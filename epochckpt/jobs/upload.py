"""`CopyUpload`: the last epoch of a run, copied to another directory.

An upload is a commit in the other directory (see `commit.protocol`): it claims that directory, stages the copy, and
publishes it. Only the bytes and the attempt are not new: they are those of the epoch. No reader sees a copy before it
is published, and the next claim of the directory sweeps what a killed upload leaves.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Generator
from typing import Any

from absl import logging

from epochckpt import _threads
from epochckpt.arrays import EpochReader, NodeFile
from epochckpt.commit import Commits, commits_of, coordination
from epochckpt.commit.protocol import ReplaceCondition
from epochckpt.commit.rename import RenameCommits
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    EpochExistsError,
    FormatError,
    InvalidArgumentError,
    SaveError,
    UncertainError,
    UnsupportedError,
    UploadError,
    say,
    unreadable,
)
from epochckpt.format import EpochRecord, NodeEntry, checksums, paths
from epochckpt.jobs.caffe2_epochs import NodeCommits, NodeEpochs
from epochckpt.jobs.caffe2_managers import Manager
from epochckpt.jobs.exchange import Exchange
from epochckpt.jobs.job import Task, TaskGroup
from epochckpt.jobs.runner import UploadTaskGroupBuilder
from epochckpt.jobs.workspace import Workspace
from epochckpt.manager import CheckpointManager
from epochckpt.manager.reader import epoch_number
from epochckpt.storage import Store, open_store

_THREADS = 2


class CopyUpload(UploadTaskGroupBuilder):
    """Copies an epoch to another directory, which is a checkpoint directory like any other then.

    Every node copies its own folder; when all have, the primary adds what belongs to the epoch as a whole and makes the
    copy visible, atomically and durably. Its folder has the same name as at home, and on a file system stock Orbax
    reads it, too. All nodes must see the destination under the same name.

    Every byte of the epoch is compared on its way with the checksums that it was saved with. Before the copy becomes
    visible, all its files are there in their length. What has been written is not read back: `verify` of a manager of
    the destination does that.

    A second upload of the same epoch only looks whether the copy is whole, and makes it anew if a file is missing or
    short. An upload that has something to copy writes to the destination as a run does: it takes over from the run that
    wrote there before, and removes what a killed upload left.

    Memory is bounded by blocks; on stores without rename, which take a file whole, by the largest file of a node (see
    `StorageOptions.part_bytes`).

    Works with `epochckpt.CheckpointManager`, and with the managers of `epochckpt.caffe2`, where each node's copy
    appears by itself, as `<epoch>/<node>`, and the destination is a `db_prefix` then. A step that stock Orbax wrote is
    refused with UnsupportedError.

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
        timeout_secs: how long the nodes wait for the slowest of them to copy its folder.
    """

    def __init__(self, destination: str | os.PathLike[str], *, replace: bool = False, timeout_secs: float = 3600.0):
        if isinstance(timeout_secs, bool) or not isinstance(timeout_secs, int | float) or not timeout_secs > 0:
            raise InvalidArgumentError(f"timeout_secs is a number of seconds, got {timeout_secs!r}")
        try:
            self.destination = open_store(destination).root
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"destination {destination!r}: {error}") from error
        self.replace, self.timeout_secs = bool(replace), timeout_secs

    def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
        """The task group that uploads an epoch of a manager; call it on every process.

        When the group runs it raises, on every process alike: EpochExistsError (the destination has another epoch of
        this number, or something that cannot be read), UploadError (the destination refused, is out of reach of a node,
        or was claimed by another run meanwhile), DamagedError (bytes differ from what was saved) or
        CoordinationTimeoutError (a node did not finish in time).

        Raises:
            InvalidArgumentError: no epoch of this manager can be copied, or the destination lies in its directory.
        """
        epoch = epoch_number(epoch)
        upload = _node_upload if isinstance(checkpoint_manager, Manager) else _epoch_upload
        with TaskGroup("upload") as group:
            Task(upload(epoch, checkpoint_manager, self), name="upload")
        return group


class _Copy:
    """One copy of an epoch in the making: the files that its records list, compared with their checksums on the way.

    The Orbax view is built anew, because it is made of links that only some copies keep.
    """

    def __init__(self, reader: EpochReader, commits: Commits):
        self._reader = EpochReader(reader.store, reader.folder, reader.record, _threads.Pool(_THREADS), verify=True)
        self.commits, self._epoch, self._attempt = commits, reader.record.epoch, reader.record.attempt
        self._replaces: ReplaceCondition | None = None
        self._may_be_visible = False

    def begin(self, replace: bool) -> bool:
        """On the primary: claims the destination and makes room; False if the destination has this epoch, whole.

        Another epoch of this number gives way with `replace`, and is an EpochExistsError without.
        """
        epoch, commits = self._epoch, self.commits
        # A run that saves there is fenced off only for a copy that is to be made.
        if self._is_there(replace):
            return False
        commits.claim(epoch, continues=self._attempt)
        with self.giving_up():
            commits.begin(epoch, self._attempt)
            if self._is_there(replace):  # since that look
                commits.release()
                return False
            if not commits.store.renames:  # the copy's objects have the names of those that an earlier upload has left
                if self._replaces is not None and self._replaces.attempt == self._attempt:
                    commits.hide(epoch)()
                    self._replaces = None
                commits.discard(epoch, self._attempt)
        return True

    def _is_there(self, replace: bool) -> bool:
        """Whether the destination has this epoch, whole; if not, `_replaces` is set to what gives way."""
        self._replaces, store, folder = None, self.commits.store, self.commits.folder(self._epoch)
        if not store.exists(folder if store.renames else paths.join(folder, paths.EPOCH_RECORD)):
            return False
        try:
            record = self.commits.read_in(folder, self._epoch)
        except (DamagedError, FormatError) as error:
            raise self._in_the_way(f"not readable: {error}") from error
        if record is None:
            raise self._in_the_way("no epoch")
        self._replaces = ReplaceCondition(record.attempt)
        if record.attempt != self._attempt:
            if not replace:
                raise self._in_the_way(f"another one (attempt {record.attempt})")
            return False
        try:
            self._check(folder, record)
        except DamagedError as error:
            text = "%s: the copy of epoch %d is made anew, it is not whole: %s"
            logging.warning(text, store.root, self._epoch, error)
            return False
        logging.info("epoch %d is in %s already", self._epoch, paths.join(store.root, folder))
        return True

    def _in_the_way(self, found: str) -> EpochExistsError:
        """The error for what lies where the epoch is to go."""
        return EpochExistsError(
            f"{self.commits.store.root} has {self.commits.folder(self._epoch)} already, which is {found}. Nothing "
            f"there was changed: delete it or move it away, upload epoch {self._epoch} to another destination, or "
            "replace epochs with CopyUpload(…, replace=True)"
        )

    def _check(self, folder: str, record: EpochRecord) -> None:
        """Raises DamagedError unless all files are there: every one in its length, nodes' records byte for byte."""
        for number, entry in enumerate(record.nodes):
            self.commits.check_node(folder, record, number)
            path = paths.join(folder, record.node_folder(number), paths.NODE_RECORD)
            try:
                data = self.commits.store.read(path, limit_bytes=entry.record_size)
            except OSError as error:
                raise unreadable(path, error) from error
            if checksums.digest(data) != entry.record_digest:
                raise DamagedError(path, "is not the record that the epoch was committed with")

    @functools.cached_property
    def _record(self) -> EpochRecord:
        """The commit record of the copy: stores without rename have the attempt in their paths, and no Orbax view."""
        record, renames = self._reader.record, self.commits.store.renames
        unsupported = record.orbax_unsupported if renames else None
        if renames and record.objects:  # a view could not be made where it was saved
            unsupported = {}
        return dataclasses.replace(record, objects=not renames, orbax_unsupported=unsupported, orbax_view=None)

    def copy_nodes(self, names: Collection[str]) -> None:
        """Copies the folders of these nodes."""
        for number, entry in enumerate(self._reader.record.nodes):
            if entry.name in names:
                self._copy_node(number, entry)

    def _copy_node(self, number: int, entry: NodeEntry) -> None:
        reader, commits, target = self._reader, self.commits, self.commits.store
        base = commits.make_node_folder(self._epoch, self._attempt, entry.name)
        recorded = reader.node_record(number)
        of_handlers = [f for f in recorded.files if f.name]
        inner = sorted({name for f in of_handlers for name in paths.parents(f.path)})  # parents first
        for name in inner:
            target.make_folder(paths.join(base, name))
        for item in dict.fromkeys(f.item for f in recorded.files if not f.name):
            own = item in recorded.items
            part = reader.of_node(number, item) if own else reader
            for file in part.files(item, 0 if own else number):
                file.copy(target, paths.join(base, file.name))
        for file in of_handlers:
            NodeFile(reader, number, file).copy(target, paths.join(base, file.path))
        # The record of the node is last.
        path = reader.path(number, paths.NODE_RECORD)
        data = reader.guard(path, lambda: reader.store.read(path, limit_bytes=entry.record_size))
        view = self._record.orbax_unsupported is not None
        commits.seal_node(self._epoch, self._attempt, entry.name, inner[::-1], data, view)

    def publish(self, copied: Collection[str] = ()) -> None:
        """On the primary: copies what is not `copied`, by node, makes the copy visible, and leaves the destination."""
        reader, commits, epoch, record = self._reader, self.commits, self._epoch, self._record
        self.copy_nodes({entry.name for entry in record.nodes} - set(copied))
        if record.orbax_unsupported is not None:
            record = commits.write_view(record, reader.pool.run)
        staged = commits.names.build(epoch)
        if isinstance(commits, RenameCommits):
            staged = commits.make_staging(epoch, self._attempt)
        root, still_there = commits.store.root, functools.partial(reader.check_present, "it was being uploaded")
        try:
            self._check(staged, record)
        except DamagedError as error:  # on stores without rename a manager that is opened there clears up, too
            raise UploadError(epoch, root, f"the copy is not whole: {error}") from error
        try:
            remove = commits.publish(epoch, self._attempt, record.to_bytes(), still_there, self._replaces)
        except UncertainError:
            self._may_be_visible = True
            raise
        self._may_be_visible = True
        if remove is not None:
            _threads.logged(f"{root}: an epoch that was replaced", remove)
        _threads.logged(f"{root}: the staging of an upload", commits.release)
        logging.info("epoch %d was uploaded to %s", epoch, paths.join(root, commits.folder(epoch)))

    @contextlib.contextmanager
    def giving_up(self) -> Generator[None]:
        """On the primary: removes, after an error, what there is of the copy, as long as no reader can see it."""
        try:
            yield
        except Exception as error:
            what = f"{self.commits.store.root}: what a failed upload left"
            if not self._may_be_visible and not isinstance(error, EpochExistsError):
                _threads.logged(what, self._discard)
            _threads.logged(what, self.commits.release)
            raise

    def _discard(self) -> None:
        """Removes what is staged. Another upload of the epoch has the same names: its objects are left alone."""
        epoch, commits = self._epoch, self.commits
        if not commits.store.renames:
            commits.begin(epoch, self._attempt)  # raises if a newer run has claimed the destination
            if commits.read_attempt(epoch) == self._attempt:
                return
        commits.discard(epoch, self._attempt)


@contextlib.contextmanager
def _uploading(epoch: int, destination: str) -> Generator[None]:
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


def _epoch_upload(epoch: int, manager: Any, asked: CopyUpload) -> Callable[[Workspace], None]:
    """A task that copies an epoch of our manager, once for all nodes of this process."""
    if not isinstance(manager, CheckpointManager):
        raise InvalidArgumentError(
            "CopyUpload copies epochs of an epochckpt.CheckpointManager or of a manager of epochckpt.caffe2, got "
            f"{type(manager).__module__}.{type(manager).__name__}; for others write an UploadTaskGroupBuilder"
        )
    coordinator, nodes, ran = coordination.connect(False), manager.node_names, set[str]()
    here = nodes if coordinator.processes == 1 else [nodes[coordinator.process]]
    exchange, uploading = Exchange(coordinator, nodes, asked.timeout_secs), _uploading(epoch, asked.destination)

    @uploading
    def open_copy() -> _Copy:
        reader, names = manager.source(epoch)
        if reader is None:
            raise UnsupportedError(
                f"{manager.directory}: epoch {epoch} was written by stock Orbax, whose steps CopyUpload does not copy; "
                "copy its folder, or save the epoch with epochckpt.CheckpointManager"
            )
        target = open_store(asked.destination)
        _check_place(reader.store, target)
        return _Copy(reader, commits_of(target, names))

    def upload_once() -> None:
        copy = exchange.together("opening of the upload", open_copy)

        @uploading
        def begin() -> str | None:
            return copy.commits.incarnation if copy.begin(asked.replace) else None

        # The primary looks at the destination and makes room, every process copies, and the primary publishes.
        incarnation = exchange.broadcast("beginning of the upload", begin)
        if incarnation is not None:
            copy.commits.incarnation = incarnation
            with copy.giving_up() if exchange.primary else contextlib.nullcontext():
                exchange.together("upload of the nodes' folders", uploading(lambda: copy.copy_nodes(here)))
                exchange.broadcast("end of the upload", uploading(lambda: copy.publish(nodes)))

    def upload(workspace: Workspace) -> None:
        if workspace.node in ran:  # the group runs again
            ran.clear()
        if not ran:
            upload_once()
        ran.add(workspace.node)

    return upload


def _node_upload(epoch: int, manager: Manager, asked: CopyUpload) -> Callable[[Workspace], None]:
    """A task that copies an epoch of Caffe2's managers, each node's by itself."""
    source, target = open_store(manager.db_prefix), open_store(asked.destination)
    if not (source.renames and target.renames):
        problem = "epochs of single nodes can be copied from a file system only to a directory of one"
        raise UnsupportedError(f"{source.root}: {problem}; the destination is {target.root}")
    _check_place(source, target)

    @_uploading(epoch, target.root)
    def upload(workspace: Workspace) -> None:
        for node in (each.node_name for each in manager.managers([workspace.node]).values()):
            reader = NodeEpochs(manager.db_prefix, node).reader(epoch).native
            assert reader is not None, "epochs of single nodes are ours"
            target.make_root()
            copy = _Copy(reader, NodeCommits(target, node))
            if copy.begin(asked.replace):
                with copy.giving_up():
                    copy.publish()

    return upload


def _check_place(source: Store, target: Store) -> None:
    """Refuses a destination that lies in the source."""
    home, there = source.root, target.root
    if source.renames and target.renames:
        root = os.path.realpath(home)
        if os.path.commonpath([root, os.path.realpath(there)]) == root:
            raise InvalidArgumentError(
                f"destination {there} lies in the checkpoint directory {home}; upload to one outside"
            )
    elif home.rstrip("/") == there.rstrip("/"):
        raise InvalidArgumentError(f"destination {there} is the checkpoint directory itself; choose another")
