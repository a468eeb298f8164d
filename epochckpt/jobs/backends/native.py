"""The runner on `epochckpt.CheckpointManager`."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from epochckpt import args as own_args
from epochckpt.arrays import Shardings
from epochckpt.errors import (
    DamagedError,
    EpochExistsError,
    FormatError,
    MismatchError,
    NodeCountError,
    RemovalError,
    SaveError,
    UnsupportedError,
    advice_for,
)
from epochckpt.format import ItemKind
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs.backends.base import (
    BARE,
    ItemBackend,
    Names,
    Prepared,
    ReadEpoch,
    Restored,
    Resume,
    lacks_reshard,
    resharded,
)
from epochckpt.jobs.blobs import BlobKind
from epochckpt.jobs.notes import Form, RunNotes
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.session import Session
from epochckpt.jobs.workspace import Reshard, Workspace
from epochckpt.manager import CheckpointManager, HandlerNotifier, SaveResult
from epochckpt.manager.notifier import Action, ManagersCalls, Verb
from epochckpt.manager.saves import Saves


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SavedItems:
    """The items of an epoch that are blobs, as they were saved."""

    blobs: Mapping[str, str]  # the blob of each item
    kinds: Mapping[str, ItemKind]  # of all items, also of those that hold the nodes' own values of a blob
    forms: Mapping[str, Form | None]  # of items that the runner saved with stock Orbax
    nodes: int  # how many nodes saved the epoch


@dataclasses.dataclass(frozen=True)
class _ItemsRequest:
    """What a restore asks the manager for."""

    items: Mapping[str, Any]  # the argument of each item
    to_reshard: Mapping[str, Reshard]  # of items whose state one node saved for all


class NativeBackend(ItemBackend[ocp.args.CheckpointArgs]):
    """Blobs as items: arrays once, everything else per node."""

    handler_calls = ManagersCalls(
        verbs=frozenset({Verb.SET_PARAMS, Verb.WRITE}),
        actions=frozenset({Action.SAVE}),
    )

    def __init__(self, manager: CheckpointManager):
        super().__init__(manager)
        self.handler = manager.metadata_handler
        self.directory = manager.root
        self.address = manager.address

    def nodes(self, wanted: Sequence[str], session: Session) -> Sequence[str]:
        if wanted:
            self._manager.set_nodes(wanted)
        return self._manager.node_names

    def open(self, session: Session, calls: RunCalls, out_of_band: bool = False) -> None:
        """See CheckpointBackend. UnsupportedError: other processes save with the manager than run the job."""
        processes = self._manager.processes
        if processes not in (None, session.coordinator.ids):
            raise UnsupportedError(
                f"the manager of {self.directory} has multiprocessing_options of its own: processes {list(processes)} "
                "save together; JobRunner needs all of the job's, with process 0 as the primary"
            )
        super().open(session, calls, out_of_band)
        self.handler_nodes = self.taken_names = self._manager.node_names
        self._manager.introduce_handler()

    def _spaces(self) -> dict[str, Workspace]:
        return {n: ws for n, ws in self._session.workspaces().items() if n in self._manager.node_names}

    def fenced_off(self) -> str | None:
        return self._manager.fenced_off or None

    def read_ahead(self, named: int | None) -> None:
        self._manager.read_ahead(named)

    def resume(self, named: int | None, resume: Resume, handler: HandlerNotifier) -> Restored | None:
        self._manager.claim()
        return super().resume(named, resume, handler)

    def _check_free(self) -> None:
        if damaged := self._manager.damaged_epochs():
            raise DamagedError(
                self.directory,
                f"it has the checkpoints {', '.join(map(str, damaged[-20:]))}, and none of them can be used (the log "
                "says why). Nothing is started over there: move them away, or take another directory",
            )
        if foreign := list(self._manager.foreign_folders().values()):
            raise FormatError(
                self.directory,
                f"it has no epoch, but something under the name of one: {foreign[-1]}. Nothing is started over there",
            )

    def _roll_back(self, epoch: int) -> None:
        self._manager.rollback_to(epoch)

    def _read_newest(self, epochs: Sequence[int]) -> ReadEpoch:
        return self._manager.restore_newest(self._read, epochs)[1]

    def _read_named(self, epoch: int, only: Mapping[str, set[str]]) -> ReadEpoch:
        return self._manager.restore_newest(lambda named: self._read(named, only), [epoch])[1]

    def _item_names(self, epoch: int) -> Sequence[str]:
        return _blob_items(self._item_kinds(epoch))

    def _item_kinds(self, epoch: int) -> dict[str, ItemKind]:
        """What each item of an epoch is."""
        return {name: ItemKind(kind) for name, kind in self._manager.item_kinds(epoch).items()}

    def _read(self, epoch: int, only: Mapping[str, set[str]] | None = None) -> ReadEpoch:
        notes = self.notes(epoch)
        kinds = self._item_kinds(epoch)
        saved = _SavedItems(
            blobs=self._blobs_of(_blob_items(kinds), notes, only),
            kinds=kinds,
            forms=notes.forms,
            nodes=max(len(self._manager.nodes(epoch)), 1),
        )
        request = self._request(saved)
        restored = self._restore_items(epoch, request.items, saved.blobs)
        values = dict[str, dict[str, Any]]()
        for item, blob in saved.blobs.items():
            form = None if item in request.to_reshard else saved.forms.get(item)
            by_node = self._by_node(item, restored, saved, request.to_reshard.get(item))
            values[blob] = self._as_saved(blob, by_node, form, self._manager.node_names, notes)
        if only is None:
            self._warn_of_numpy(epoch, [item for item in saved.blobs if kinds[item] is ItemKind.ARRAYS], saved.blobs)
        return ReadEpoch(epoch=epoch, notes=notes, values=values)

    def _request(self, saved: _SavedItems) -> _ItemsRequest:
        """What each item is restored as. A state that one node saved for all is resharded once it is read."""
        spaces = self._spaces()
        first = next(iter(spaces.values()))
        other_count = saved.nodes != len(self._manager.node_names)
        items = dict[str, Any]()
        to_reshard = dict[str, Reshard]()
        for item, blob in saved.blobs.items():
            target = first.targets.get(blob)
            own = item + blob_lib.OWN_SUFFIX
            kind = saved.kinds[item]
            form = saved.forms.get(item)
            reshard = target.reshard if target is not None and other_count else None
            make = None if reshard is None else functools.partial(_made_by, reshard, blob)
            rename = blob_lib.rename_of(first, blob)
            if kind is ItemKind.NODE:
                targets = {n: t for n, ws in spaces.items() if (t := blob_lib.target_of(ws, blob)) is not None}
                items[item] = own_args.NodeRestore(targets or None, make, by_node=True, rename=rename)
            elif reshard is not None and saved.nodes == 1 and form is not Form.JSON:
                items[item] = self._argument(None, None) if kind is ItemKind.ARRAYS else None
                to_reshard[item] = reshard
            elif kind is ItemKind.ARRAYS:
                items[item] = self._argument(blob_lib.target_of(first, blob), form, rename)
                if saved.kinds.get(own) is ItemKind.NODE:
                    items[own] = own_args.NodeRestore(None, make, by_node=True)
            else:
                items[item] = None
        return _ItemsRequest(items, to_reshard)

    def _restore_items(self, epoch: int, requested: Mapping[str, Any], blobs: Mapping[str, str]) -> Mapping[str, Any]:
        """The items as the manager restores them; its errors name the blob, and what the user can do."""
        if not requested:
            return {}
        try:
            with advice_for(blob_lib.REMEDIES):
                return self._manager.restore(epoch, args=ocp.args.Composite(**requested))
        except NodeCountError as error:
            blob = blobs.get(error.item, blobs.get(error.item.removesuffix(blob_lib.OWN_SUFFIX), error.item))
            raise lacks_reshard(blob, error.saved_by, error.nodes) from error
        except MismatchError as error:
            blob = blobs.get(error.item, error.item)
            error.add_note(f"the target of blob {blob!r} is ws.target({blob!r}, …), or else what @job.setup has made")
            raise

    def _by_node(
        self, item: str, restored: Mapping[str, Any], saved: _SavedItems, reshard: Reshard | None
    ) -> Mapping[str, Any]:
        """What was restored of one item, for each node of this process."""
        value = restored[item]
        blob = saved.blobs[item]
        if saved.kinds[item] is ItemKind.NODE:
            return value
        spaces = self._spaces()
        hosted = list(spaces)
        if reshard is not None:
            everyone = self._manager.node_names
            state = value[BARE] if saved.forms.get(item) is Form.BARE else value
            states = resharded(blob, [state], len(everyone), reshard)
            return {node: states[everyone.index(node)] for node in hosted}
        own = restored.get(item + blob_lib.OWN_SUFFIX) or {}
        rename = blob_lib.rename_of(spaces[hosted[0]], blob)
        by_node = {hosted[0]: value}
        by_node |= {node: jax.tree.map(_copied, value) for node in hosted[1:]}
        by_node |= {node: blob_lib.join(value, own[node], rename) for node in hosted if node in own}
        return by_node

    def _warn_of_numpy(self, epoch: int, items: Sequence[str], blobs: Mapping[str, str]) -> None:
        """Names the blobs that came back as NumPy arrays because the devices that they were saved on are not here."""
        reader, _ = self._manager.source(epoch)
        if reader is None:  # stock Orbax wrote it
            return
        for item in items:
            arrays = reader.record.items[item].arrays
            if arrays is None or any(blob_lib.target_of(ws, blobs[item]) is not None for ws in self._spaces().values()):
                continue
            shardings = Shardings(arrays, mesh=jax.sharding.get_mesh())
            if any(leaf.kind == "jax" and shardings.place_of(leaf) is None for leaf in arrays.leaves):
                problem = f"blob {blobs[item]!r} comes back as NumPy: this job lacks the devices that it was saved on"
                logging.warning("%s; %s", problem, blob_lib.how_to_place(blobs[item]))

    def prepare(self, epoch: int, names: Names) -> Prepared[ocp.args.CheckpointArgs]:
        states = self._states(names)
        several = len(self._manager.node_names) > 1
        items: dict[str, ocp.args.CheckpointArgs] = {}
        for blob, item in self._items.items():
            trees = {node: tree for (node, name), tree in states.items() if name == blob}
            stateful = self._kinds[blob] is BlobKind.STATEFUL
            if several and not stateful and any(map(blob_lib.holds_global, trees.values())):  # then one node is here
                ((node, value),) = trees.items()
                tree, own = blob_lib.split(value)
                items[item] = ocp.args.StandardSave(tree)
                if own:
                    items[item + blob_lib.OWN_SUFFIX] = own_args.NodeSave({node: own}, by_node=True)
            elif several or stateful:
                items[item] = own_args.NodeSave(trees, by_node=True)
            else:
                items[item] = ocp.args.StandardSave(next(iter(trees.values())))
        return self._prepared(items, states)

    def save(
        self,
        epoch: int,
        prepared: Prepared[ocp.args.CheckpointArgs],
        metrics: Mapping[str, Any],
        notes: RunNotes,
        force: bool,
    ) -> bool:
        """See CheckpointBackend. The policies do not count epochs after this one: they are not of this run.

        Raises:
            EpochExistsError: the epoch is wanted, and a foreign folder lies in its place.
        """
        # With a foreign folder in the epoch's place the manager says that nothing is wanted, so its options are asked.
        saves: Saves = self._manager.components.saves
        is_blocked = saves.is_blocked(epoch)
        wanted = saves.is_wanted if is_blocked else self._manager.should_save
        if not (force or wanted(epoch, ignore_later=True)):
            return False
        if is_blocked:
            raise EpochExistsError(saves.how_to_unblock(epoch))

        notes = notes.with_blobs(prepared.names, prepared.types)
        begun = False
        with contextlib.suppress(EpochExistsError):
            begun = self._begin(epoch, prepared.items, metrics, notes)
        read_only = self._manager.processes is None
        if begun or read_only:
            return begun

        # A task has saved the epoch with the manager itself, after the primary had looked whether the epoch exists.
        self._manager.allow_overwrite(epoch)
        return self._begin(epoch, prepared.items, metrics, notes)

    def outcomes(self) -> list[SaveResult]:
        return self._manager.pop_save_results()

    def drain(self) -> None:
        with contextlib.suppress(SaveError, RemovalError):  # the one is an outcome, too, the other harms no run
            self._manager.wait_until_finished()

    def allow_overwrite(self, epoch: int) -> None:
        self._manager.allow_overwrite(epoch)


def _blob_items(kinds: Mapping[str, ItemKind]) -> list[str]:
    """The items that are blobs. The second item of a blob, with each node's own values, is left out."""
    own = {item + blob_lib.OWN_SUFFIX for item, kind in kinds.items() if kind is ItemKind.ARRAYS}
    return [item for item, kind in kinds.items() if kind is not ItemKind.NODE or item not in own]


def _made_by(reshard: Reshard, blob: str, states: Sequence[Any], saved_by: int, nodes: int) -> list[Any]:
    """New states of a blob, made by a user's `reshard`; errors name the blob."""
    del saved_by  # as many as there are states
    return resharded(blob, states, nodes, reshard)


def _copied(leaf: Any) -> Any:
    """What can be changed in place is each node's own."""
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
