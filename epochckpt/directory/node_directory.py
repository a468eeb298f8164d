"""Epochs of single nodes: independent jobs share one directory, and each job saves only its own nodes.

| on storage | state |
| --- | --- |
| only below `node-<node>-<id>.orbax-checkpoint-tmp/` | uncommitted |
| `<epoch>/<node>/epoch.json`, with the node's files beside it | committed, for this node alone |

An epoch is committed like any other (see `posix`); only the names differ. There is no record of the epoch
as a whole, and nothing here ever touches another node's folders. POSIX only; the directory itself is never created.

If two jobs have the same node, the newer job takes over with its first save: it moves the staging folders that were
there when it joined. From then on every rename out of them fails, and the older job gets FencedError. A job that only
reads takes nothing over.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from epochckpt import _threads
from epochckpt._lazy import ocp
from epochckpt.directory import staging_folder
from epochckpt.directory.lineage import ClaimDirectly, ClaimLineage
from epochckpt.directory.posix import PosixDirectory, PosixStager, PosixStaging, PosixWriter
from epochckpt.errors import (
    AccessError,
    EpochCheckpointError,
    EpochNotFoundError,
    FencedError,
    FormatError,
    NotACheckpointDirectoryError,
    SaveError,
    UnsupportedError,
)
from epochckpt.format import EpochRecord, parsing, paths
from epochckpt.orbax import StepNames
from epochckpt.orbax.step_files import STEP_RECORD

if TYPE_CHECKING:
    from epochckpt.directory.epoch_directory import ReplaceCondition, Staging
    from epochckpt.storage import Store


def node_directory_of(store: Store, node: str, lead: str = "") -> NodeDirectory:
    """The epochs of one node in a directory that need not exist yet. With a `lead`, for reading: in `<lead><epoch>`.

    UnsupportedError: the store has no atomic rename.
    """
    if not PosixDirectory.suits(store):
        raise UnsupportedError(
            f"{store.root}: epochs of single nodes need a file system with an atomic rename; expected the path of "
            "a directory. On object stores use epochckpt.CheckpointManager"
        )
    return NodeDirectory(store, paths.check_node_name(node), lead)


class _NodeNames(StepNames):
    """`<lead><epoch>/<node>`; no folder of the directory itself is an epoch."""

    def __init__(self, node: str, lead: str):
        super().__init__(ocp.path.step.standard_name_format())
        self._lead = lead
        self._folder = paths.folder_name(node)

    def build(self, epoch: int) -> str:
        return paths.join(f"{self._lead}{epoch}", self._folder)

    def parse(self, name: str) -> None:
        del name


class _NodeStaging(PosixStaging):
    """The node's files lie beside the commit record."""

    def node_folder(self, node: str) -> str:
        del node
        return self.folder

    def make_node_folder(self, node: str) -> str:
        self.make()
        return self.node_folder(node)


class NodeDirectory(PosixDirectory):
    """See `node_directory_of`."""

    def __init__(self, store: Store, node: str, lead: str = ""):
        self.node = node
        self._lead = lead
        super().__init__(store, _NodeNames(node, lead))

    # -- reading -------------------------------------------------------------------------------------------------

    def is_committed(self, epoch: int) -> bool:
        """Whether this node has committed an epoch; False where the directory is missing."""
        with self.access():
            return self.store.exists(paths.join(self.folder(epoch), paths.EPOCH_RECORD))

    def list_epochs(self) -> list[int]:
        """See EpochDirectory. Empty where the directory is missing."""
        try:
            with self.access():
                entries = [e for e in self.store.list("") if e.is_folder and e.name.startswith(self._lead)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [e.name.removeprefix(self._lead) for e in entries]
        numbers = sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))
        return [n for n in numbers if self.is_committed(n)]

    def read_in(
        self, folder: str, epoch: int, parse: Callable[[str, bytes], EpochRecord] = parsing.parse_head
    ) -> EpochRecord | None:
        record = super().read_in(folder, epoch, parse)
        if record is not None and not (record.per_node and record.nodes[0].name == self.node):
            raise FormatError(
                paths.join(folder, paths.EPOCH_RECORD),
                f"is the record of checkpoint {record.epoch}, node {record.nodes[0].name!r}; expected checkpoint "
                f"{epoch} of node {self.node!r} by itself",
            )
        return record

    def hidden(self) -> frozenset[int]:
        """See EpochDirectory. Nothing is rolled back here."""
        return frozenset()

    def _is_orbax(self, folder: str) -> bool:
        return False

    def _unknown(self, epoch: int) -> EpochNotFoundError:
        where = f"{self.store.root}{f'/{self._lead}<epoch>' if self._lead else ''}, node {self.node}"
        return EpochNotFoundError(epoch, where, self.list_epochs())

    # -- claiming ------------------------------------------------------------------------------------------------

    def claim(
        self,
        epoch: int = 0,
        check: Callable[[], None] = lambda: None,
        lineage: ClaimLineage | ClaimDirectly = ClaimDirectly(),  # noqa: B008 (a frozen value)
    ) -> NodeWriter:
        """Takes this job's place in the order of jobs for this node; `stage` then takes over from those before it.

        NotACheckpointDirectoryError: the directory is missing. AccessError: it may not be written. UnsupportedError: it
        is another manager's.
        """
        del epoch, lineage
        check()
        incarnation = paths.new_id()
        stager = _NodeStager(self, incarnation)
        try:
            with self.access():
                self.store.make_folder(stager.home)
                # listed after our own was made: of two jobs that join at once, at least one sees the other
                entries = [entry for entry in self.store.list("") if entry.name != stager.home]
                self._refuse_others(stager.home, [entry.name for entry in entries if entry.is_folder])
                names = [entry.name for entry in entries]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.missing() from error
        stager.note_root()
        return NodeWriter(self, stager, [name for name in names if paths.parse_node_staging(name) == self.node])

    def _refuse_others(self, home: str, folders: list[str]) -> None:
        """Refuses a directory in which all nodes commit an epoch together; removes the own staging folder there."""
        for name in (name for name in folders if paths.TMP_SUFFIX not in name):
            for mark in (paths.EPOCH_RECORD, STEP_RECORD):
                if self.store.exists(paths.join(name, mark)):
                    self.store.remove_tree(home)
                    raise UnsupportedError(
                        f"{self.store.root} is the directory of an epochckpt.CheckpointManager, or of Orbax's: "
                        f"{name}/{mark} is a checkpoint of all nodes together. Caffe2's managers save each node by "
                        "itself, and need another directory: take another db_prefix, or epochckpt.CheckpointManager"
                    )

    def missing(self) -> EpochCheckpointError:
        """The error where the directory is not there."""
        state = "is a file" if os.path.lexists(self.store.root) else "does not exist"
        return NotACheckpointDirectoryError(
            f"{self.store.root} {state}; expected a directory, which is never created here: make or mount it"
        )

    @contextlib.contextmanager
    def access(self) -> Generator[None]:
        """Turns a PermissionError into an AccessError that names the user and what access is needed."""
        try:
            yield
        except PermissionError as error:
            needed = f"this user (uid {os.getuid()}) needs read and write access"
            raise AccessError(f"{self.store.root}: {error}; {needed}") from error


class _NodeStager(PosixStager):
    """The staging folder of one job for a node."""

    def __init__(self, directory: NodeDirectory, incarnation: str):
        super().__init__(directory.store, incarnation)
        self.home = paths.node_staging_folder(directory.node, incarnation)
        self._directory = directory

    def staging(self, epoch: int, save_id: str) -> _NodeStaging:
        return _NodeStaging(self, epoch, save_id)

    def lost(self, epoch: int) -> EpochCheckpointError:
        if not os.path.isdir(self.store.root):
            return self._directory.missing()
        if self.store.exists(self.home):
            return SaveError(epoch, f"files of it have disappeared from {self.store.root}")
        if self._root_id != self.store.root_id():
            return SaveError(epoch, self.away())
        return FencedError(
            epoch,
            f"a newer job for node {self._directory.node} has taken over {self.store.root}, or the staging folder of "
            f"this one, {self.home}, was removed; this process can no longer save there",
        )


class NodeWriter(PosixWriter):
    """The right of the newest job for a node to change the node's epochs."""

    def __init__(self, directory: NodeDirectory, stager: _NodeStager, older: list[str]):
        """`older`: the staging folders that this job found when it joined."""
        super().__init__(directory, stager)
        self.directory: NodeDirectory = directory  # pyright: ignore[reportIncompatibleVariableOverride]
        self._older = older
        self._leave = weakref.finalize(self, _leave, self.store, stager.home, os.getpid())

    def stage(self, epoch: int, save_id: str) -> PosixStaging:
        """See Writer. Fences off the jobs that joined earlier, and removes their leftovers."""
        moved = list[str | None]()
        for name in self._older:
            with self._permitted(name):
                moved.append(staging_folder.take_over(self.store, self.home, name))
        if moved and not self.store.exists(self.home):
            raise self.lost(epoch)
        self._older = []
        for path in filter(None, moved):
            _threads.logged("what an earlier job left stays", functools.partial(self.store.remove_tree, path))
        return super().stage(epoch, save_id)

    def publish(
        self, staging: Staging, record: bytes, check: Callable[[], None], replaces: ReplaceCondition | None
    ) -> Callable[[], None] | None:

        epoch = staging.epoch

        def make_room() -> None:
            with contextlib.suppress(FileExistsError):
                self.store.make_folder(str(epoch))
            self._check_place(epoch)
            self.store.sync_folder("")  # also if another node's job made the folder: it may not have got that far
            check()

        return super().publish(staging, record, make_room, replaces)

    def _check_place(self, epoch: int) -> None:
        """Refuses to write into an epoch of another manager, or over a folder that is no epoch of this node."""
        parent = str(epoch)
        final = self.directory.folder(epoch)
        for mark in (paths.EPOCH_RECORD, STEP_RECORD):
            if self.store.exists(paths.join(parent, mark)):
                problem = (
                    f"is an epoch of a CheckpointManager ({mark} lies in it); nodes that save by themselves need a"
                )
                raise SaveError(epoch, f"{self.store.root}/{parent} {problem} directory of their own")
        if self.store.exists(final) and not self.directory.is_committed(epoch):
            problem = f"exists and holds no {paths.EPOCH_RECORD}: not replaced. Move it away"
            raise SaveError(epoch, f"{self.store.root}/{final} {problem}")

    def release(self) -> None:
        """See Writer. Happens by itself when the object goes away."""
        if self._leave.detach():
            staging_folder.leave(self.store, self.home)


def _leave(store: Store, home: str, pid: int) -> None:
    """Removes a job's staging folder at its end."""
    if os.getpid() == pid:  # else a fork of it ends
        with contextlib.suppress(OSError):
            staging_folder.leave(store, home)
