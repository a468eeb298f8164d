"""The runner on `epochckpt.CheckpointManager`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from epochckpt import args as own_args
from epochckpt.errors import EpochExistsError, SaveError, UnsupportedError
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs.backends.base import NOTES, Names, Restored
from epochckpt.jobs.backends.items import BARE, ItemBackend, Values, of_this_node, resharded
from epochckpt.jobs.exchange import Exchange
from epochckpt.jobs.session import Session
from epochckpt.jobs.workspace import Workspace
from epochckpt.manager import CheckpointManager, SaveResult


class NativeBackend(ItemBackend):
    """Blobs as items: arrays once, everything else per node."""

    handler_calls = frozenset({"set_params", "write", "checkpoint_save"})

    def __init__(self, manager: CheckpointManager):
        super().__init__(manager)
        self.handler = manager.metadata_handler

    def nodes(self, wanted: Sequence[str], session: Session) -> Sequence[str]:
        """See CheckpointBackend."""
        if wanted:
            self._manager.set_nodes(wanted)
        return self._manager.node_names

    def open(self, session: Session, exchange: Exchange, beside: bool = False) -> None:
        """See CheckpointBackend.

        Raises:
            UnsupportedError: other processes save with the manager than run the job.
        """
        processes = self._manager.processes
        if processes not in (None, session.coordinator.ids):
            raise UnsupportedError(
                f"the manager of {self.directory} has multiprocessing_options of its own: processes {list(processes)} "
                "save together; JobRunner needs all of the job's, with process 0 as the primary"
            )
        super().open(session, exchange, beside)
        self._manager.introduce_handler()

    def handler_nodes(self, session: Session) -> list[str]:
        """See CheckpointBackend."""
        del session
        return list(self._manager.node_names)

    def _spaces(self) -> dict[str, Workspace]:
        return {n: ws for n, ws in self._session.workspaces().items() if n in self._manager.node_names}

    def damaged(self) -> list[int]:
        """See CheckpointBackend."""
        return self._manager.damaged_epochs()

    def foreign(self) -> Mapping[int, str]:
        """See CheckpointBackend."""
        return self._manager.foreign_folders()

    def claim(self) -> None:
        """See CheckpointBackend."""
        self._manager.claim()

    def fenced_off(self) -> str:
        """See CheckpointBackend."""
        return self._manager.fenced_off

    def _taken_names(self) -> Sequence[str]:
        return self._manager.node_names

    def restore(self, epoch: int | None) -> Restored:
        """See CheckpointBackend."""
        if epoch is None:
            newest, found = self._manager.restore_newest(self._read, self.resumable())
            return self._restored(newest, *found)
        self._require(epoch)
        return self._restored(epoch, *self._read(epoch))

    def _item_names(self, epoch: int) -> Sequence[str]:
        return list(self._manager.item_kinds(epoch))

    def _stored_epochs(self) -> Sequence[int]:
        return self._manager.all_steps(read=True)

    def _read(self, epoch: int, only: Mapping[str, set[str]] | None = None) -> tuple[Mapping[str, Any], Values]:
        manager, spaces = self._manager, self._spaces()
        notes, kinds = self.notes(epoch), manager.item_kinds(epoch)
        first = next(iter(spaces.values()))
        blob_of, forms = dict(notes.get("blobs") or {}), dict(notes.get("forms") or {})  # forms: as with stock Orbax
        count, now = max(len(manager.nodes(epoch)), 1), len(manager.node_names)
        asked: dict[str, Any] = {}
        for item, kind in kinds.items():
            blob = blob_of.get(item, item)
            base = item.removesuffix(blob_lib.OWN_SUFFIX)
            beside = base != item and kinds.get(base) == "arrays"
            blob = blob_of.get(base, base) if beside else blob
            if only is not None and blob not in only:
                continue
            target = first.targets.get(blob)
            reshard = target.reshard if target is not None else None
            if kind == "node":
                trees = {} if beside else {n: blob_lib.target_of(ws, blob) for n, ws in spaces.items()}
                trees = {n: t for n, t in trees.items() if t is not None}
                asked[item] = own_args.NodeRestore(trees or None, reshard if count != now else None, by_node=True)
            elif kind == "arrays":
                remade = reshard is not None and count == 1 != now
                wanted = None if remade else blob_lib.target_of(first, blob)
                bare = forms.get(item) == "bare" and wanted is not None
                asked[item] = ocp.args.StandardRestore({BARE: wanted} if bare else wanted)
            else:
                asked[item] = None
        got = manager.restore(epoch, args=ocp.args.Composite(**asked)) if asked else {}
        values: dict[str, dict[str, Any]] = {}
        for item, kind in kinds.items():
            base = item.removesuffix(blob_lib.OWN_SUFFIX)
            if item not in asked or (base != item and kinds.get(base) == "arrays"):
                continue
            blob = blob_of.get(item, item)
            values[blob] = self._by_node(item, blob, kind, got, count)
            if forms.get(item) == "bare":
                values[blob] = {node: value[BARE] for node, value in values[blob].items()}
            elif forms.get(item) == "json":
                everyone = self._manager.node_names
                values[blob] = {n: of_this_node(blob, v, everyone, spaces[n]) for n, v in values[blob].items()}
            made = {n: blob_lib.as_saved(spaces[n], blob, v, notes.get("types")) for n, v in values[blob].items()}
            values[blob] = made
        return notes, values

    def _by_node(self, item: str, blob: str, kind: str, got: Any, count: int) -> dict[str, Any]:
        hosted, everyone = list(self._spaces()), self._manager.node_names
        if kind == "node":
            return dict(got[item])
        target = self._session.workspace(hosted[0]).targets.get(blob)
        if target is not None and target.reshard is not None and count == 1 != len(everyone):
            new = resharded(blob, [got[item]], len(everyone), target.reshard)
            return {node: new[everyone.index(node)] for node in hosted}
        own = got.get(item + blob_lib.OWN_SUFFIX) if item + blob_lib.OWN_SUFFIX in got.keys() else None  # noqa: SIM118
        whole = {node: blob_lib.join(got[item], own[node]) for node in hosted if own and node in own}
        first, *others = hosted
        copies = {node: jax.tree.map(_copied, got[item]) for node in others}
        return {first: got[item], **copies, **whole}

    def prepare(self, epoch: int, names: Names) -> Any:
        """See CheckpointBackend."""
        states, several = self._states(self._spaces(), names), len(self._manager.node_names) > 1
        items: dict[str, Any] = {}
        for blob, item in self._items.items():
            trees = {node: tree for (node, name), tree in states.items() if name == blob}
            stateful = self._kinds[blob] == blob_lib.STATEFUL
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
        return items, self._blob_notes(states)

    def save(self, epoch: int, prepared: Any, metrics: Any, notes: Mapping[str, Any], force: bool) -> bool:
        """See CheckpointBackend. The policies do not count epochs after this one: they are not of this run."""
        if not (force or self._manager.should_save(epoch, ignore_later=True)):
            return False
        items, blob_notes = prepared
        save = functools.partial(
            self._manager.save,
            epoch,
            args=ocp.args.Composite(**items),
            metrics=metrics or None,
            force=True,
            custom_metadata={NOTES: {**notes, **blob_notes}},
        )
        try:
            return save()
        except EpochExistsError:  # a task has saved it with the manager itself just now
            self._manager.allow_overwrite(epoch)
            return save()

    def outcomes(self) -> list[SaveResult]:
        """See CheckpointBackend."""
        return self._manager.pop_save_results()

    def drain(self) -> None:
        """See CheckpointBackend."""
        with contextlib.suppress(SaveError):  # it is an outcome, too
            self._manager.wait_until_finished()

    def roll_back(self, epoch: int) -> None:
        """See CheckpointBackend."""
        if self._require(epoch)[-1] != epoch:
            self._manager.rollback_to(epoch)

    def allow_overwrite(self, epoch: int) -> None:
        """See CheckpointBackend."""
        self._manager.allow_overwrite(epoch)


def _copied(leaf: Any) -> Any:
    """What can be changed in place is each node's own."""
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
