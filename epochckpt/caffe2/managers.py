"""Caffe2's checkpoint managers, for one node and for many, and their names on storage; see `epochckpt.caffe2`."""

from __future__ import annotations

import abc
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from epochckpt.caffe2.epochs import NodeEpochs
from epochckpt.errors import FormatError, InvalidArgumentError, SaveError, advice_for
from epochckpt.format import paths
from epochckpt.jobs import Node, Task, TaskGroup, Workspace, blobs, containers
from epochckpt.jobs.notes import NodeNotes
from epochckpt.jobs.session import Session
from epochckpt.manager import CheckpointReader
from epochckpt.manager.metadata_handlers import AbstractMetadataHandler, answered_epoch, check_handler
from epochckpt.manager.numbers import epoch_number
from epochckpt.storage import expanded

DB_TYPE = "epochckpt"
"""The only `db_type` there is."""

PathLike = str | os.PathLike[str]


def get_ckpt_filename(node_name: str, epoch: int) -> str:
    """Where a node's epoch lies below the prefix: `<epoch>/<node>`, with the name of the node's folder."""
    return paths.join(str(epoch_number(epoch)), paths.folder_name(paths.check_node_name(str(node_name))))


def db_name(epoch: int, node_name: str, db_prefix: PathLike, path_prefix: PathLike | None = None) -> str:
    """The full path of a node's epoch in the directory `db_prefix`.

    A `path_prefix`, in place of the directory, is put before `<epoch>/<node>` as it stands, not joined to it.
    """
    name = get_ckpt_filename(node_name, epoch)
    return expanded(f"{os.fspath(path_prefix)}{name}" if path_prefix else os.path.join(os.fspath(db_prefix), name))


def _check_type(name: str, value: str | None) -> None:
    """Refuses an unknown kind of storage."""
    if value != DB_TYPE:
        raise InvalidArgumentError(f"{name} {value!r} is not known; expected {DB_TYPE!r}, the only kind of storage")


def _blob_names(names: Iterable[str]) -> list[str]:
    if isinstance(names, str):  # iterating it would give its letters
        raise InvalidArgumentError(f"blob_names is a list of names, got the string {names!r}")
    return [str(name) for name in names]


def _node_names(nodes: Iterable[Any]) -> list[str]:
    """Names of nodes, each given as its name or as a `Node`, no name twice."""
    names = [paths.check_node_name(str(node)) for node in ([nodes] if isinstance(nodes, str | Node) else nodes)]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(f"node {name!r} is named twice")
    return names


class Manager(abc.ABC):
    """What both managers share: the metadata handler, and the notes.

    Attributes:
        db_prefix: the directory.
        metadata_handler: the handler that it was given, or None.
        notes: JSON that is written with each save (not in Caffe2); `read_notes` gives it back.
    """

    several = False  # whether it saves many nodes

    def __init__(self, db_prefix: PathLike, db_type: str, metadata_handler: AbstractMetadataHandler | None):
        _check_type("db_type", db_type)
        self.db_prefix = expanded(os.fspath(db_prefix))
        self.metadata_handler = None if metadata_handler is None else check_handler(metadata_handler)
        self.notes: dict[str, Any] = {}
        self.introduced = False  # whether `set_params` was called
        self._path_prefix: str | None = None  # as `set_params` was last given them
        self._path_type: str | None = None

    @abc.abstractmethod
    def take_nodes(self, nodes: Iterable[Any] | None) -> list[str]:
        """The names of the nodes that a caller gave, once they are known to suit this manager (not in Caffe2)."""

    @abc.abstractmethod
    def managers(self, nodes: Iterable[str] | None = None) -> dict[str, CheckpointManager]:
        """The managers of those nodes that are checkpointed, by node; None: of all that there are (not in Caffe2)."""

    def collect_checkpoint_stats(self, stats: dict[str, float]) -> None:
        """Adds the seconds that the last save or load took on each node of this process, by db name."""
        stats.update(one.last for one in self.managers().values() if one.last is not None)

    def set_params(
        self, nodes: Iterable[Any] | None, path_prefix: PathLike | None = None, path_type: str | None = None
    ) -> None:
        """Tells the metadata handler, if there is one, of the nodes; the first call of a job.

        Only the handler uses `path_prefix` and `path_type`. A call without them, such as a runner's, repeats the values
        of the call before.
        """
        names = self.take_nodes(nodes)
        _check_type("path_type", DB_TYPE if path_type is None else path_type)
        self._path_prefix = os.fspath(path_prefix) if path_prefix else self._path_prefix
        self._path_type = path_type or self._path_type
        if self._handler is not None:
            self._handler.set_params(
                db_prefix=self.db_prefix,
                db_type=DB_TYPE,
                node_names=names,
                path_prefix=self._path_prefix,
                path_type=self._path_type,
            )
        self.introduced = True

    def get_resume_from_epoch_id(self, user_epoch: int | None = None) -> int | None:
        """The epoch to resume from; None: from scratch. The metadata handler may override the `user_epoch`."""
        if self._handler is not None:
            return answered_epoch(self._handler.last_epoch(user_epoch=user_epoch), self._handler)
        return None if user_epoch is None else epoch_number(user_epoch)

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether the metadata handler says that storage can be reached; True without one."""
        return self._handler is None or self._handler.cp_accessible(epoch)

    def write_checkpoint_metadata(self, epoch: int) -> None:
        """Tells the metadata handler that an epoch was saved."""
        if self._handler is not None:
            self._handler.write(epoch=epoch)

    def report_checkpoint_stats(self, action_name: str) -> None:
        """Reports the stats of the last operation to the metadata handler, all nodes together.

        Actions are `checkpoint_save`, `checkpoint_load` and `checkpoint_partial_load`.
        """
        stats: dict[str, float] = {}
        self.collect_checkpoint_stats(stats)
        self.report(action_name, stats)

    def report(self, action_name: str, stats: dict[str, float]) -> None:
        """Reports seconds by db name, also of nodes of other processes, to the metadata handler (not in Caffe2)."""
        if stats:
            slowest = max(stats, key=lambda name: stats[name])
            logging.info("%s: %d nodes, slowest %s with %.2f s", action_name, len(stats), slowest, stats[slowest])
        if self._handler is not None:
            self._handler.report(action_name, stats)

    @property
    def _handler(self) -> AbstractMetadataHandler | None:
        """The metadata handler on the primary, which speaks for all processes."""
        return self.metadata_handler if jax.process_index() == 0 else None


class CheckpointManager(Manager):
    """Saves and loads the workspace of one node.

    Args:
        db_prefix: the directory; must exist when it is used.
        node_name: names the node's folder. In a job of several nodes each has a manager, and a name, of its own.
        db_type: `"epochckpt"`.
        metadata_handler: see `epochckpt.metadata`.

    Raises:
        InvalidArgumentError: a `db_type` that is not ours, or a name that cannot be one of a folder.
    """

    def __init__(
        self, db_prefix: PathLike, node_name: str, db_type: str, metadata_handler: AbstractMetadataHandler | None = None
    ):
        super().__init__(db_prefix, db_type, metadata_handler)
        self.node_name = paths.check_node_name(str(node_name))
        self._epochs = NodeEpochs(self.db_prefix, self.node_name)
        self._node: str | None = None  # whose workspace it is, if a caller has named the node
        self._ran_on: str | None = None
        self._initialised = False  # `init` was called; once its task has run, there are names
        self._blob_names: list[str] | None = None
        self.last: tuple[str, float] | None = None  # db name and seconds of the last save or load (not in Caffe2)
        self._recorder = containers.Recorder()

    def init(
        self,
        nodes: Iterable[Any] | None = None,
        retrieve_from_epoch: int | None = None,
        path_prefix: PathLike | None = None,
        path_type: str | None = None,
    ) -> Task:
        """A task that fixes which blobs are checkpointed.

        By default it takes all blobs that exist when it runs; later blobs are not checkpointed.

        Args:
            nodes: the one node of the workspace; by default the node of the running task.
            retrieve_from_epoch: take the names from this epoch instead.
            path_prefix: see `db_name`; for that epoch only.
            path_type: as `db_type`, for that epoch only.
        """
        self.take_nodes(nodes)
        _check_type("path_type", DB_TYPE if path_type is None else path_type)
        epoch = None if retrieve_from_epoch is None else epoch_number(retrieve_from_epoch)
        self._initialised = True
        return self._task("init", lambda ws: self._init(ws, epoch, path_prefix))

    def blob_list(self) -> list[str]:
        """The names of the blobs that are checkpointed; InvalidArgumentError if `init` has not run."""
        self._require_init("blob_list", self._blob_names is not None)
        return list(self._blob_names or ())

    def load(self, epoch: int, path_prefix: PathLike | None = None, path_type: str | None = None) -> Task:
        """A task that puts the blobs of `blob_list` back into the workspace.

        Each comes back as its `ws.target`. Either all blobs are loaded, or, after an error in one of them, none.
        """
        self._require_init("load", self._initialised)
        _check_type("path_type", DB_TYPE if path_type is None else path_type)
        number = epoch_number(epoch)
        return self._task(f"load checkpoint {number}", lambda ws: self._load(ws, number, None, path_prefix))

    def load_blobs_from_checkpoint(self, blob_names: Iterable[str], epoch: int) -> Task:
        """A task that loads just these blobs (`name` or `node/name`), reading just their bytes; works without `init`.

        Blobs that the epoch lacks are left out.
        """
        wanted = _blob_names(blob_names)
        number = epoch_number(epoch)
        return self._task(f"load blobs of checkpoint {number}", lambda ws: self._load(ws, number, wanted, None))

    def check_db_exists(self, epoch: int) -> Task:
        """A task whose output is whether this node has committed that epoch; works without `init`."""
        number = epoch_number(epoch)
        return self._task(f"look for checkpoint {number}", lambda _: self.has_epoch(number))

    def save(self, epoch: int) -> Task:
        """A task that saves the blobs of `blob_list`, and replaces the node's epoch of this number if there is one.

        Running it raises a SaveError, or an OSError for a directory that cannot be reached, if it was not committed.
        """
        self._require_init("save", self._initialised)
        number = epoch_number(epoch)
        return self._task(f"save checkpoint {number}", lambda ws: self._save(ws, number))

    def has_epoch(self, epoch: int) -> bool:
        """Whether this node has committed an epoch (not in Caffe2)."""
        return self._epochs.epoch_directory.is_committed(epoch_number(epoch))

    def read_notes(self, epoch: int) -> dict[str, Any] | None:
        """The `notes` of an epoch; None if this node has none of this number (not in Caffe2)."""
        if not self.has_epoch(epoch):
            return None
        reader = self._epochs.reader(epoch)
        notes = _notes_in(reader).notes
        if not isinstance(notes, dict):
            raise _foreign(reader, "was not written by a manager of epochckpt.caffe2: custom_metadata has no 'notes'")
        return notes

    def take_nodes(self, nodes: Iterable[Any] | None) -> list[str]:
        """See Manager. Returns the name of the node's folder."""
        names = _node_names(nodes or ())
        if len(names) > 1:
            raise InvalidArgumentError(
                f"CheckpointManager saves one node, got {len(names)}: {', '.join(names)}; "
                "MultiNodeCheckpointManager saves several"
            )
        for name in names:
            if self._node not in (None, name):
                raise InvalidArgumentError(
                    f"this CheckpointManager was given node {self._node!r} and now {name!r}; make another one"
                )
            self._node = name
        return [self.node_name]

    def managers(self, nodes: Iterable[str] | None = None) -> dict[str, CheckpointManager]:
        chosen = [self._node or self.node_name] if nodes is None else nodes
        return {node: self for node in chosen if self._node in (None, node)}

    def _task(self, name: str, fn: Callable[[Workspace], Any]) -> Task:
        def run(ws: Workspace) -> Any:
            if self._ran_on not in (None, ws.node):
                raise InvalidArgumentError(
                    f"the checkpoint manager of node {self.node_name!r} ran on node {self._ran_on!r} and now on "
                    f"{ws.node!r}; pass init(nodes=[…]), or use MultiNodeCheckpointManager"
                )
            self._ran_on = ws.node
            return fn(ws)

        return Task(run, node=self._node, name=f"checkpoint: {name}")

    def _init(self, ws: Workspace, epoch: int | None, path_prefix: PathLike | None) -> list[str]:
        if epoch is None:
            blobs.refuse_global(self.node_name, dict(ws))
            self._blob_names = list(ws)
        else:
            self._blob_names = list(_items_by_blob(self._epochs_at(path_prefix).reader(epoch)))
        try:
            self._epochs.claim()
        except OSError as error:  # a job trains to its end without its directory; every save will say it again
            logging.warning("nothing can be saved for node %s: %s", self.node_name, error)
        return list(self._blob_names)

    def _save(self, ws: Workspace, epoch: int) -> None:
        names = self.blob_list()
        missing = [name for name in names if name not in ws]
        if missing:
            raise SaveError(
                epoch,
                f"node {self.node_name}: {', '.join(map(repr, missing))} existed when init ran, and does not now; "
                f"found: {', '.join(ws) or 'no blob'}. Keep what is checkpointed, or make it after init",
            )
        with self._timed(epoch, None):
            states = {name: blobs.state_of(ws[name]) for name in names}
            for name in names:
                blobs.kind_of(self.node_name, name, states[name])  # raises where one cannot be saved
            blobs.refuse_global(self.node_name, states)
            items = blobs.item_names(names)
            recorded = {name: self._recorder.record(name, states[name]) for name in names}
            types = {name: one for name, one in recorded.items() if one is not None}
            args = ocp.args.Composite(**{items[n]: ocp.args.StandardSave(states[n]) for n in names})
            noted = NodeNotes(blobs={items[name]: name for name in names}, types=types, notes=self.notes)
            self._epochs.save(epoch, args, noted.to_json())

    def _load(self, ws: Workspace, epoch: int, wanted: Sequence[str] | None, path_prefix: PathLike | None) -> list[str]:
        """Loads the wanted blobs that the epoch has, or all of `blob_list`; returns their names."""
        needed = self.blob_list() if wanted is None else []
        with self._timed(epoch, path_prefix):
            reader = self._epochs_at(path_prefix).reader(epoch)
            items = _items_by_blob(reader)
            missing = [name for name in needed if name not in items]
            if missing:
                raise InvalidArgumentError(
                    f"{reader.folder} lacks {', '.join(map(repr, missing))}, which init determined to checkpoint; it "
                    f"has: {', '.join(items) or 'no blob'}. Pass init(retrieve_from_epoch={epoch})"
                )
            if wanted is not None:
                saved_names = (n if n in items else n.removeprefix(f"{self.node_name}/") for n in wanted)
                needed = list(dict.fromkeys(name for name in saved_names if name in items))
            targets = {items[n]: blobs.argument(blobs.target_of(ws, n), blobs.rename_of(ws, n)) for n in needed}
            with advice_for(blobs.REMEDIES):
                values = reader.restore(ocp.args.Composite(**targets))
            types = _notes_in(reader).types
            made = {name: blobs.as_saved(ws, name, values[items[name]], types) for name in needed}
            for name, value in made.items():
                blobs.put_back(ws, name, value)
        return needed

    def _epochs_at(self, path_prefix: PathLike | None) -> NodeEpochs:
        if not path_prefix:
            return self._epochs
        directory, lead = os.path.split(os.fspath(path_prefix))
        return NodeEpochs(directory or os.curdir, self.node_name, lead=lead)

    @contextlib.contextmanager
    def _timed(self, epoch: int, path_prefix: PathLike | None) -> Iterator[None]:
        self.last = None
        began = time.monotonic()
        yield
        self.last = db_name(epoch, self.node_name, self.db_prefix, path_prefix), time.monotonic() - began

    def _require_init(self, verb: str, done: bool) -> None:
        if not done:
            raise InvalidArgumentError(
                f"{verb} of node {self.node_name!r} needs to know the blobs; first: session.run(manager.init(…))"
            )


def _notes_in(reader: CheckpointReader) -> NodeNotes:
    notes = NodeNotes.read(reader.record.custom_metadata)
    if notes is None:
        problem = "was not written by a manager of epochckpt.caffe2: custom_metadata has no 'blobs'"
        raise _foreign(reader, problem)
    return notes


def _items_by_blob(reader: CheckpointReader) -> dict[str, str]:
    """The item of each blob, in the order in which they were saved."""
    recorded = _notes_in(reader).blobs
    if recorded.keys() != reader.record.items.keys() or len(set(recorded.values())) != len(recorded):
        raise _foreign(reader, "the names of its blobs are not one for each item")
    return {str(blob): item for item, blob in recorded.items()}


def _foreign(reader: CheckpointReader, problem: str) -> FormatError:
    return FormatError(paths.join(reader.folder, paths.EPOCH_RECORD), problem)


class MultiNodeCheckpointManager(Manager):
    """Saves and loads the workspaces of many nodes, each into its own folder of the epoch.

    Examples:
        >>> import pathlib
        >>> pathlib.Path("run").mkdir()
        >>> session = ec.LocalSession()
        >>> for node in ("trainer", "reader"):
        ...     _ = session.run(ec.Task(lambda ws: ws.update(position=7), node=node))
        >>> manager = ec.caffe2.MultiNodeCheckpointManager("run", "epochckpt")
        >>> _ = session.run(manager.init(["trainer", "reader"]))
        >>> _ = session.run(manager.save(0))
        >>> sorted(path.name for path in pathlib.Path("run/0").iterdir())
        ['reader', 'trainer']
        >>> session.workspace("reader")["position"] = 8
        >>> _ = session.run(manager.load(0))
        >>> session.workspace("reader")["position"]
        7

    Args:
        db_prefix: the directory; must exist when it is used.
        db_type: `"epochckpt"`.
        metadata_handler: see `epochckpt.metadata`.

    Raises:
        InvalidArgumentError: a `db_type` that is not ours.
    """

    several = True

    def __init__(self, db_prefix: PathLike, db_type: str, metadata_handler: AbstractMetadataHandler | None = None):
        super().__init__(db_prefix, db_type, metadata_handler)
        self._managers: dict[str, CheckpointManager] = {}

    @property
    def node_managers(self) -> list[tuple[str, CheckpointManager]]:
        """(node, its manager), in the order in which the nodes were given; empty before they are."""
        return list(self._managers.items())

    def get_ckpt_db_name(self, node_name: str, epoch: int) -> str:
        """The full path of a node's epoch; InvalidArgumentError if this manager does not have that node."""
        self._chosen([str(node_name)])
        return db_name(epoch, node_name, self.db_prefix)

    def init(
        self,
        nodes: Iterable[Any],
        retrieve_from_epoch: int | None = None,
        path_prefix: PathLike | None = None,
        path_type: str | None = None,
    ) -> TaskGroup:
        """Tasks that determine which blobs are checkpointed, on each node; see `CheckpointManager.init`."""
        names = self.take_nodes(nodes)
        return self._group("init", lambda m: m.init(None, retrieve_from_epoch, path_prefix, path_type), names)

    def load(self, epoch: int, path_prefix: PathLike | None = None, path_type: str | None = None) -> TaskGroup:
        """Tasks that put the blobs back, on each node; see `CheckpointManager.load`."""
        return self._group("load", lambda m: m.load(epoch, path_prefix, path_type))

    def load_blobs_from_checkpoint(self, blob_names: Iterable[str], epoch: int) -> TaskGroup:
        """Tasks that load just these blobs, on each node. A node leaves out the blobs that its epoch lacks."""
        names = _blob_names(blob_names)
        return self._group("load blobs", lambda m: m.load_blobs_from_checkpoint(names, epoch))

    def load_blobs_locally(self, nodes: Iterable[Any], blob_names: Iterable[str], epoch: int, session: Session) -> bool:
        """Loads just these blobs from the nodes' folders into their workspaces; works without `init`.

        Args:
            nodes: the nodes; those that run in this process load their blobs.
            blob_names: names that any of the nodes may have, or `node/name`; what an epoch lacks is left out.
            epoch: the epoch.
            session: has the workspaces.

        Returns:
            False if any of the nodes lacks that epoch; nothing is loaded then.
        """
        wanted = _blob_names(blob_names)
        names = _node_names(nodes)
        if not self._managers:
            self.take_nodes(names)
        missing = [name for name, manager in self._chosen(names).items() if not manager.has_epoch(epoch)]
        if missing:
            logging.info("%s: checkpoint %d is not there for %s", self.db_prefix, epoch, ", ".join(missing))
            return False
        session.run(self._group("load blobs", lambda m: m.load_blobs_from_checkpoint(wanted, epoch), names))
        return True

    def check_db_exists(self, epoch: int) -> TaskGroup:
        """Tasks whose outputs are whether each node has committed that epoch."""
        return self._group("look", lambda m: m.check_db_exists(epoch))

    def save(self, epoch: int) -> TaskGroup:
        """Tasks that save the blobs, on each node; see `CheckpointManager.save`."""
        for manager in self._managers.values():
            manager.notes = self.notes
        return self._group("save", lambda m: m.save(epoch))

    def read_notes(self, epoch: int) -> dict[str, Any] | None:
        """The `notes` of the first node that has an epoch; None if none has it (not in Caffe2)."""
        of_nodes = (manager.read_notes(epoch) for manager in self._chosen(None).values())
        return next((notes for notes in of_nodes if notes is not None), None)

    def take_nodes(self, nodes: Iterable[Any] | None) -> list[str]:
        """See Manager. The first nodes stay."""
        names = _node_names(nodes or ())
        if not names:
            raise InvalidArgumentError(
                "MultiNodeCheckpointManager needs the nodes' names, got none; a job without any has session.nodes"
            )
        if self._managers and sorted(names) != sorted(self._managers):
            raise InvalidArgumentError(
                f"this manager has the nodes {', '.join(self._managers)}, and was now given {', '.join(names)}; make "
                "another manager for other nodes"
            )
        for name in names if not self._managers else ():
            self._managers[name] = CheckpointManager(self.db_prefix, name, DB_TYPE)
            self._managers[name].take_nodes([name])
        return names

    def managers(self, nodes: Iterable[str] | None = None) -> dict[str, CheckpointManager]:
        chosen = self._managers if nodes is None else nodes
        return {node: self._managers[node] for node in chosen if node in self._managers}

    def _chosen(self, names: Iterable[str] | None) -> dict[str, CheckpointManager]:
        """The managers of the named nodes; None: of all."""
        if not self._managers:
            raise InvalidArgumentError("this manager knows no nodes yet; first: set_params(nodes), or init(nodes)")
        chosen = list(self._managers if names is None else names)
        unknown = [name for name in chosen if name not in self._managers]
        if unknown:
            raise InvalidArgumentError(f"this manager has no node {unknown[0]!r}; it has: {', '.join(self._managers)}")
        return {name: self._managers[name] for name in chosen}

    def _group(
        self, name: str, task: Callable[[CheckpointManager], Task], nodes: Iterable[str] | None = None
    ) -> TaskGroup:
        with TaskGroup(f"checkpoint {name}") as group:
            for manager in self._chosen(nodes).values():
                task(manager)
        return group
