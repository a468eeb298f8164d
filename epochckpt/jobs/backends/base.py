"""How the runner uses checkpoint managers: one interface, and what all managers of Orbax's interface share."""

import abc
import base64
import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _text
from epochckpt._renaming import Rename
from epochckpt.errors import DamagedError, EpochNotFoundError, FormatError, FormatVersionError, InvalidArgumentError
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs import containers
from epochckpt.jobs.blobs import BlobKind
from epochckpt.jobs.notes import NOTES, Form, RunNotes
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.session import Session
from epochckpt.jobs.workspace import Workspace
from epochckpt.manager import HandlerNotifier, SaveResult
from epochckpt.manager.notifier import NO_CALLS, ManagersCalls


class Resume(enum.Enum):
    """Whether a run goes on from an epoch on storage. The values are those of `JobRunner(resume=…)`."""

    AUTO = "auto"
    NEVER = "never"
    MUST = "must"


BARE = "value"  # with stock Orbax: key of an array that is a blob by itself, which StandardSave does not take
BYTES = "base64"  # with stock Orbax: key of bytes in JSON

P = TypeVar("P")
Item = TypeVar("Item")

Names = Mapping[str, Sequence[str]]  # the blobs that are checkpointed, by node of this process
Values = Mapping[str, Mapping[str, Any]]  # restored blobs, by name and by node of this process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a restore found; the blobs are in the workspaces."""

    epoch: int
    notes: RunNotes  # what the runner wrote with the epoch
    names: Names  # the blobs that came back
    named: bool = False  # the user has named it, and the run trains on from it


class CheckpointBackend(abc.ABC, Generic[P]):
    """A checkpoint manager, as one run or one call of the runner uses it. Every process makes the same calls.

    `P` is the type of what `prepare` takes from the workspaces for `save`.

    The session is the backend's, not the manager's: a run has one backend, and an out-of-band load or save in
    another session has its own.
    """

    asks_jax: ClassVar[bool] = False
    """Whether the manager itself asks JAX for its preemption notice, with its steps. A subclass sets it."""

    per_node: ClassVar[bool] = False
    """Whether an epoch exists per node; then a node that is not checkpointed has no part in it. A subclass sets it."""

    handler: Any = None  # the manager's own metadata handler
    handler_nodes: Sequence[str]  # those that a metadata handler hears of; known once it is open
    handler_calls: ManagersCalls = NO_CALLS  # what the manager does with its handler by itself
    accessible: Callable[[int], bool] | None = None  # asks the manager, on the primary, whether storage can be reached
    discarded: int | None = None  # the epoch that was saved and deleted at once, because the manager's options say so

    def __init__(self, manager: Any, directory: str):
        self._manager = manager
        self.directory = directory
        self.address = directory  # what opens it again
        self._ended: list[SaveResult] = []

    @abc.abstractmethod
    def nodes(self, wanted: Sequence[str], session: Session) -> Sequence[str]:
        """All nodes of the job. `wanted` are those that the job names; refused if the manager has other nodes."""

    def open(self, session: Session, calls: RunCalls, out_of_band: bool = False) -> None:
        """Called once, before anything but `nodes`.

        `out_of_band`: a run uses the manager in another session, or has used it. The manager keeps that run's nodes.
        """
        del out_of_band
        self._session = session
        self._calls = calls
        self.handler_nodes = session.nodes

    def epochs(self) -> list[int]:
        """The committed epochs, ascending; empty where each node has its own."""
        return []

    def fenced_off(self) -> str | None:
        """How this process learned that a newer run has taken over; None as long as it has not."""
        return None

    def read_ahead(self, named: int | None) -> None:
        """Begins to read the epoch that `resume` will restore, as far as the manager can do that; waits for nothing."""
        del named

    @abc.abstractmethod
    def resume(self, named: int | None, resume: Resume, handler: HandlerNotifier) -> Restored | None:
        """Restores the epoch that a run goes on from into the workspaces; None: from scratch.

        The run begins to write: an older one commits nothing from here on. EpochNotFoundError lists the epochs.
        """

    @abc.abstractmethod
    def agree_on_names(self, names: Names) -> None:
        """Looks at the blobs to checkpoint, on all nodes together; InvalidArgumentError: one cannot be checkpointed."""

    @abc.abstractmethod
    def prepare(self, epoch: int, names: Names) -> P:
        """Takes from the workspaces what `save` is to be given; makes no collective call.

        InvalidArgumentError: a blob is missing, or cannot be saved.
        """

    @abc.abstractmethod
    def save(self, epoch: int, prepared: P, metrics: Mapping[str, Any], notes: RunNotes, force: bool) -> bool:
        """Begins a save; returns whether it did."""

    def outcomes(self) -> list[SaveResult]:
        """The saves that have ended since the last call, as this process knows."""
        ended = self._ended
        self._ended = []
        return ended

    def drain(self) -> None:
        """Waits until no save is in flight; failures show in `outcomes`."""
        return  # none is, unless saves go on in the background

    @abc.abstractmethod
    def allow_overwrite(self, epoch: int) -> None:
        """The next save of this epoch, which exists, replaces it."""

    @abc.abstractmethod
    def load_blobs(self, names: Sequence[str], epoch: int) -> bool:
        """Loads single blobs of an epoch into the workspaces; False if the epoch is not there."""

    def _kinds_of(self, names: Names) -> dict[str, BlobKind]:
        """The kind of each blob of this process; InvalidArgumentError if one cannot be checkpointed."""
        return {
            name: blob_lib.kind_of(node, name, self._session.workspace(node)[name])
            for node, blobs in names.items()
            for name in blobs
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadEpoch:
    """What was read of an epoch; nothing is in the workspaces yet."""

    epoch: int
    notes: RunNotes
    values: Values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared(Generic[Item]):
    """What `ItemBackend.prepare` has taken from the workspaces."""

    items: Mapping[str, Item]  # what each item is made of, by its name
    names: Mapping[str, str]  # see `RunNotes.blobs`
    types: Mapping[str, Any]  # see `RunNotes.types`


class ItemBackend(CheckpointBackend[Prepared[Item]]):
    """A manager of Orbax's interface. The runner's notes, with the types of the blobs, are custom metadata.

    `Item` is the type of what an item is made of.
    """

    taken_names: Sequence[str] = ()  # names that no item may have

    def __init__(self, manager: Any):
        super().__init__(manager, str(manager.directory))
        self._kinds: Mapping[str, BlobKind] = {}  # of all nodes' blobs
        self._items: Mapping[str, str] = {}  # by blob
        self._recorder = containers.Recorder()
        # On the primary: the types of blobs of other processes, as `_recorded` gives them.
        self._types_elsewhere: Mapping[str, Any] = {}

    def epochs(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def _require(self, epoch: int) -> list[int]:
        """The committed epochs; EpochNotFoundError, with this list, unless the epoch is among them."""
        epochs = self.epochs()
        if epoch not in epochs:
            raise EpochNotFoundError(epoch, self.directory, epochs)
        return epochs

    def _spaces(self) -> dict[str, Workspace]:
        """The workspaces of this process whose nodes are checkpointed."""
        return dict(self._session.workspaces())

    def notes(self, epoch: int) -> RunNotes:
        """What the runner wrote with an epoch."""
        return RunNotes.read((self._manager.metadata(epoch).custom_metadata or {}).get(NOTES))

    # -- restoring -----------------------------------------------------------------------------------------------

    def resume(self, named: int | None, resume: Resume, handler: HandlerNotifier) -> Restored | None:
        """See CheckpointBackend. A named epoch is a rollback, durable before anything is trained.

        A run that has gone back to it already, and is started again by the same command, goes on from its newest epoch.
        Otherwise it is the newest that every node can read, also where the metadata handler says less: the run may have
        died before it notified the handler. The handler hears of a named epoch; its answer does not count then.
        """
        if named is not None and not self._calls.broadcast("the way back", lambda: self._has_gone_back_to(named)):
            self._calls.broadcast("the handler's answer", lambda: self._tell_named(named, handler))
            latest = self._require(named)[-1]
            if latest != named:
                self._roll_back(named)
            return dataclasses.replace(self._put_back(self._read(named)), named=True)
        self.drain()
        epochs = self._calls.broadcast("the epochs to go on from", lambda: self._candidates(resume, handler))
        if not epochs:
            return None
        return self._put_back(self._read_newest(epochs))

    @staticmethod
    def _tell_named(named: int, handler: HandlerNotifier) -> None:
        """On the primary: tells the handler of a named epoch. Going back is the user's alone to ask for."""
        answer = handler.last_epoch(named)
        if answer not in (None, named):
            said = "the metadata handler answers %d; the run goes back to %d all the same, which was named"
            logging.warning(said, answer, named)

    def _candidates(self, resume: Resume, handler: HandlerNotifier) -> list[int]:
        """On the primary: the epochs that a run may go on from by itself, ascending; none: from scratch."""
        directory = self.directory
        epochs = self.epochs()
        if not epochs:
            self._check_free()
        if resume is Resume.NEVER and epochs:
            problem = f"resume='never', but {directory} has epochs up to {epochs[-1]}"
            raise InvalidArgumentError(f"{problem}; take another directory, delete them, or resume='auto'")
        if resume is Resume.NEVER:
            return []

        # The handler knows of an epoch that is gone: a mistake in the path would train from scratch for days.
        last = handler.last_epoch()
        if not epochs and resume is Resume.MUST:
            raise EpochNotFoundError(None, directory, [])
        if not epochs and last is not None:
            raise EpochNotFoundError(last, f"{directory} (the metadata handler says it was saved there)", [])
        if last is not None and last not in epochs:
            shown = ", ".join(map(str, epochs[-20:]))
            logging.warning("the metadata handler says that checkpoint %d was saved last; on storage: %s", last, shown)

        # What `save_checkpoints` saved out of band is resumed from only if it is named.
        out_of_band = list[int]()
        while epochs and self._is_out_of_band(epochs[-1]):
            out_of_band.append(epochs.pop())
        if out_of_band:
            left = f"which goes on from checkpoint {epochs[-1]}" if epochs else "of which nothing is left to go on from"
            said = f"{directory}: save_checkpoints() saved {out_of_band} in the middle of a run, {left}"
            said += "; to go on from one of them, name it: resume_from_epoch=…"
            if not epochs:
                raise InvalidArgumentError(f"{said}, or delete them to start from scratch")
            logging.warning("%s", said)
        return epochs

    def _has_gone_back_to(self, named: int) -> bool:
        """On the primary: whether the newest epoch is of a run that has gone back to this one."""
        for epoch in reversed(self.epochs()):
            notes = self._readable_notes(epoch)
            if notes and not notes.out_of_band:
                gone_back = epoch > named and notes.went_back_to == named
                if gone_back:
                    logging.warning(
                        "%s: checkpoint %d is of a run that has gone back to %d already, so this one goes on from "
                        "there; resume_from_epoch=%d goes back once. rollback_to(%d) of a manager goes back once more",
                        self.directory,
                        epoch,
                        named,
                        named,
                        named,
                    )
                return gone_back
        return False

    def _is_out_of_band(self, epoch: int) -> bool:
        return self._readable_notes(epoch).out_of_band

    def _readable_notes(self, epoch: int) -> RunNotes:
        try:
            return self.notes(epoch)
        except (DamagedError, FormatError, FormatVersionError, EpochNotFoundError):  # the restore raises it
            return RunNotes()

    def _check_free(self) -> None:
        """Refuses a directory without epochs in which no run may start over."""
        return

    @abc.abstractmethod
    def _roll_back(self, epoch: int) -> None:
        """Makes an epoch that is not the latest the latest, durably; UnsupportedError if the manager cannot do that."""

    @abc.abstractmethod
    def _read_newest(self, epochs: Sequence[int]) -> ReadEpoch:
        """Reads the newest of these epochs that every node can read."""

    @abc.abstractmethod
    def _item_names(self, epoch: int) -> Sequence[str]:
        """The items of an epoch that are blobs."""

    @abc.abstractmethod
    def _read(self, epoch: int, only: Mapping[str, set[str]] | None = None) -> ReadEpoch:
        """Reads the notes of an epoch, and its blobs; `only`: just these blobs, which go to these nodes."""

    def _read_named(self, epoch: int, only: Mapping[str, set[str]]) -> ReadEpoch:
        """Reads an epoch as `_read` does, on all processes or on none; each may want other blobs."""
        return self._read(epoch, only)

    @staticmethod
    def _blobs_of(items: Iterable[str], notes: RunNotes, only: Collection[str] | None = None) -> dict[str, str]:
        """The blobs of an epoch by item; with `only`, just these blobs."""
        blobs = {item: notes.blobs.get(item, item) for item in items}
        return {item: blob for item, blob in blobs.items() if only is None or blob in only}

    @staticmethod
    def _argument(target: Any, form: Form | None, rename: Rename | None = None) -> ocp.args.CheckpointArgs:
        """How an item of arrays is restored as a target; None: as saved."""
        target = {BARE: target} if form is Form.BARE and target is not None else target
        return blob_lib.argument(target, rename)

    def _as_saved(
        self, blob: str, by_node: Mapping[str, Any], form: Form | None, nodes: Sequence[str], notes: RunNotes
    ) -> dict[str, Any]:
        """A blob by node of this process, out of its `form` in an item, in the containers that it was saved in."""
        spaces = self._spaces()
        made = dict[str, Any]()
        for node, value in by_node.items():
            if form is Form.JSON:
                value = _of_this_node(blob, value, nodes, spaces[node])
            elif form is Form.BARE:
                value = value[BARE]
            made[node] = blob_lib.as_saved(spaces[node], blob, value, notes.types)
        return made

    def _put_back(self, read: ReadEpoch) -> Restored:
        """Puts restored values into the workspaces, after all of them have been read."""
        values = read.values
        spaces = self._spaces()
        for blob, by_node in values.items():
            for node, value in by_node.items():
                blob_lib.refuse_unreachable(node, blob, value)
        names: dict[str, list[str]] = {node: [] for node in spaces}
        for blob, by_node in values.items():
            for node, value in by_node.items():
                blob_lib.put_back(spaces[node], blob, value)
                names[node].append(blob)
        return Restored(epoch=read.epoch, notes=read.notes, names=names)

    def load_blobs(self, names: Sequence[str], epoch: int) -> bool:
        self._manager.reload()
        if epoch not in self.epochs():
            return False
        nodes = self._spaces().keys()
        wanted = dict[str, set[str]]()
        try:
            available = set(self._blobs_of(self._item_names(epoch), self.notes(epoch)).values())
            for name in names:  # of all nodes, or `node/blob`
                node, _, blob = name.partition("/")
                if name in available:
                    wanted.setdefault(name, set()).update(nodes)
                elif blob in available and node in nodes:
                    wanted.setdefault(blob, set()).add(node)
                elif blob not in available:
                    logging.warning("checkpoint %d has no blob %r; %s", epoch, name, _text.near(name, available))
            read = self._read_named(epoch, wanted)
        except EpochNotFoundError:  # deleted just now
            return False
        values = {blob: {n: v for n, v in got.items() if n in wanted[blob]} for blob, got in read.values.items()}
        self._put_back(dataclasses.replace(read, values=values))
        return True

    # -- saving --------------------------------------------------------------------------------------------------

    def agree_on_names(self, names: Names) -> None:
        # The primary decides from the reports, and keeps the types of the blobs of other processes.
        def report() -> dict[str, Any]:
            kinds = self._kinds_of(names)
            types = dict[str, Any]()
            if not self._calls.primary:
                per_node = {n: [b for b in blobs if kinds[b] is not BlobKind.GLOBAL] for n, blobs in names.items()}
                types = {key: one for key, one in self._recorded(self._states(per_node)).items() if one is not None}
            return {"kinds": {name: kind.value for name, kind in kinds.items()}, "types": types}

        what = "the blobs to checkpoint"
        reports = self._calls.gather(what, report)
        self._types_elsewhere = {name: one for r in reversed(reports) for name, one in r["types"].items()}
        kinds = self._calls.broadcast(what, lambda: _kinds_of_all([report["kinds"] for report in reports]))
        self._kinds = {name: BlobKind(kind) for name, kind in kinds.items()}
        self._items = blob_lib.item_names(self._kinds, self.taken_names)

    def _states(self, names: Names) -> dict[tuple[str, str], Any]:
        """What blobs are saved as, by node and name; InvalidArgumentError if one is missing."""
        spaces = self._session.workspaces()
        for node, blobs in names.items():
            for missing in (blob for blob in blobs if blob not in spaces[node]):
                raise InvalidArgumentError(
                    f"node {node}: blob {missing!r} is to be checkpointed, and is not in the workspace any more; there "
                    f"are: {', '.join(spaces[node]) or 'none'}"
                )
        return {(node, b): blob_lib.state_of(spaces[node][b]) for node, blobs in names.items() for b in blobs}

    def _recorded(self, states: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
        """The containers of blobs as JSON, by `node/blob`; None for dicts and lists alone."""
        return {f"{n}/{blob}": self._recorder.record(f"{n}/{blob}", tree) for (n, blob), tree in states.items()}

    def _prepared(self, items: Mapping[str, Item], states: Mapping[tuple[str, str], Any]) -> Prepared[Item]:
        """Items with the names of their blobs, and their containers.

        Containers are noted by blob, and by `node/blob` where nodes differ. Containers of other processes are noted
        as they were after init.
        """
        types: dict[str, Any] = {}
        for key, one in [*self._recorded(states).items(), *self._types_elsewhere.items()]:
            if types.setdefault(key.partition("/")[2], one) != one:
                types[key] = one
        types = {key: one for key, one in types.items() if one is not None or "/" in key}
        names = {item: blob for blob, item in self._items.items() if item != blob}
        return Prepared(items=items, names=names, types=types)

    def _begin(
        self, epoch: int, items: Mapping[str, ocp.args.CheckpointArgs], metrics: Mapping[str, Any], notes: RunNotes
    ) -> bool:
        """Begins a save of these items, by their arguments."""
        args = ocp.args.Composite(**items)
        metadata = {NOTES: notes.to_json()}
        return self._manager.save(epoch, args=args, metrics=metrics or None, force=True, custom_metadata=metadata)


def _kinds_of_all(reports: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The kinds of the blobs of all processes, each of which has reported its own. All are values of `BlobKind`.

    InvalidArgumentError: a blob holds arrays of the whole job, and not all processes have it so.
    """
    union: dict[str, str] = {}
    for kinds in reports:
        for name, kind in kinds.items():
            before = union.setdefault(name, kind)
            unlike = before != kind and BlobKind.GLOBAL.value in (before, kind)
            if unlike or (kind == BlobKind.GLOBAL.value and any(name not in other for other in reports)):
                raise InvalidArgumentError(
                    f"blob {name!r} holds arrays of the whole job on one node, and on another it does not, or is not "
                    "checkpointed; make it alike on all nodes, or give it names of their own"
                )
    return union


def lacks_reshard(blob: str, saved_by: int, nodes: int) -> InvalidArgumentError:
    """The error of a blob that another number of nodes saved."""
    return InvalidArgumentError(
        f"blob {blob!r} differs per node and was saved by {saved_by} nodes; here are {nodes}: give "
        f"ws.target({blob!r}, reshard=…) in @job.setup, which makes new states of the old ones"
    )


def resharded(name: str, states: Sequence[Any], count: int, reshard: Callable[..., Any] | None) -> list[Any]:
    """The states of the job's present number of nodes, made from states of another number."""
    if reshard is None:
        raise lacks_reshard(name, len(states), count)
    try:
        new = list(reshard(states, len(states), count))
    except Exception as error:  # a user's own code may raise anything
        error.add_note(f"in ws.target({name!r}, reshard=…), which makes {count} states of {len(states)}")
        raise
    if len(new) != count:
        raise InvalidArgumentError(f"blob {name!r}: reshard returned {len(new)} states for {count} nodes")
    return new


def _of_this_node(name: str, by_node: Mapping[str, Any], nodes: Sequence[str], workspace: Workspace) -> Any:
    """A blob that was saved as JSON with stock Orbax, one value per node, as this node is to have it."""
    decoded = {n: base64.b64decode(data[BYTES]) if isinstance(data, dict) else data[0] for n, data in by_node.items()}
    states = list(decoded.values())
    me = nodes.index(workspace.node)
    if len(states) == len(nodes):
        return decoded.get(workspace.node, states[me])
    target = workspace.targets.get(name)
    if (target is None or target.reshard is None) and all(state == states[0] for state in states):
        return states[0]
    return resharded(name, states, len(nodes), target.reshard if target else None)[me]
