"""The runner on `epochckpt.CheckpointManager`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from epochckpt import args as own_args
from epochckpt.errors import EpochExistsError, EpochNotFoundError, SaveError, UnsupportedError
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs.backends.base import (
    BARE,
    NOTES,
    CheckpointBackend,
    Names,
    Restored,
    copies,
    of_this_node,
    present,
    require,
    resharded,
    wanted_blobs,
)
from epochckpt.jobs.exchange import Exchange
from epochckpt.jobs.session import Session
from epochckpt.jobs.workspace import Workspace
from epochckpt.manager import CheckpointManager, SaveResult


class NativeBackend(CheckpointBackend):
    """Blobs as items: arrays once, everything else per node."""

    handler_calls = frozenset({"set_params", "write", "checkpoint_save"})

    def __init__(self, manager: CheckpointManager):
        super().__init__()
        self._manager = manager
        self.handler, self.directory = manager.metadata_handler, str(manager.directory)
        self._kinds: Mapping[str, str] = {}
        self._items: dict[str, str] = {}

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
        """The workspaces of this process whose nodes are checkpointed."""
        return {n: ws for n, ws in self._session.workspaces().items() if n in self._manager.node_names}

    def epochs(self) -> list[int]:
        """See CheckpointBackend."""
        return list(self._manager.all_steps())

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

    def take_names(self, kinds: Mapping[str, str]) -> None:
        """See CheckpointBackend."""
        self._kinds = kinds
        self._items = blob_lib.item_names(kinds, self._manager.node_names)

    def restore(self, epoch: int | None) -> Restored:
        """See CheckpointBackend."""
        if epoch is None:
            epoch, found = self._manager.restore_newest(self._read, self.resumable())
        else:
            require(self.epochs(), epoch, self.directory)
            found = self._read(epoch)
        notes, values = found
        spaces = self._spaces()
        names: dict[str, list[str]] = {node: [] for node in spaces}
        for blob, by_node in values.items():  # all are as they are to be before any of them is put back
            for node, value in by_node.items():
                blob_lib.put_back(spaces[node], blob, value)
                names[node].append(blob)
        return Restored(epoch, notes, names)

    def notes(self, epoch: int) -> Mapping[str, Any]:
        """See CheckpointBackend."""
        found = self._manager.metadata(epoch).custom_metadata or {}
        notes = found.get(NOTES)
        return notes if isinstance(notes, dict) else {}

    def _read(self, epoch: int, only: Mapping[str, set[str]] | None = None) -> tuple[Mapping[str, Any], Any]:
        """The notes of an epoch and, by blob and node of this process, its blobs (`only`: those to these nodes)."""
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
        return {**copies(got[item], hosted), **whole}

    def prepare(self, epoch: int, names: Names) -> Any:
        """See CheckpointBackend."""
        spaces = self._spaces()
        several = len(self._manager.node_names) > 1
        items: dict[str, Any] = {}
        states: dict[tuple[str, str], Any] = {}
        for blob, item in self._items.items():
            values = {node: present(spaces[node], blob) for node, blobs in names.items() if blob in blobs}
            trees = {node: blob_lib.state_of(value) for node, value in values.items()}
            states |= {(node, blob): tree for node, tree in trees.items()}
            if several and any(map(blob_lib.holds_spread, values.values())):  # then one node is here
                ((node, value),) = values.items()
                tree, own = blob_lib.split(value)
                items[item] = ocp.args.StandardSave(tree)
                if own:
                    items[item + blob_lib.OWN_SUFFIX] = own_args.NodeSave({node: own}, by_node=True)
            elif several or self._kinds[blob] == blob_lib.STATEFUL:
                items[item] = own_args.NodeSave(trees, by_node=True)
            else:
                items[item] = ocp.args.StandardSave(next(iter(values.values())))
        return items, self.types(states)

    def save(self, epoch: int, prepared: Any, metrics: Any, notes: Mapping[str, Any], force: bool) -> bool:
        """See CheckpointBackend. The policies do not count epochs after this one: they are not of this run."""
        if not (force or self._manager.should_save(epoch, ignore_later=True)):
            return False
        items, types = prepared
        renamed = {item: blob for blob, item in self._items.items() if item != blob}
        save = functools.partial(
            self._manager.save,
            epoch,
            args=ocp.args.Composite(**items),
            metrics=metrics or None,
            force=True,
            custom_metadata={NOTES: {**notes, "blobs": renamed, "types": types}},
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
        require(self.epochs(), epoch, self.directory)
        if self.epochs()[-1] != epoch:
            self._manager.rollback_to(epoch)

    def allow_overwrite(self, epoch: int) -> None:
        """See CheckpointBackend."""
        self._manager.allow_overwrite(epoch)

    def load_blobs(self, names: Sequence[str], epoch: int) -> bool:
        """See CheckpointBackend."""
        if epoch not in self._manager.all_steps(read=True):
            return False
        try:
            kinds, blob_of = self._manager.item_kinds(epoch), dict(self.notes(epoch).get("blobs") or {})
            available = {blob_of.get(item, item): item for item in kinds}
            wanted = wanted_blobs(names, available, list(self._spaces()))
            _, values = self._read(epoch, wanted)
        except EpochNotFoundError:  # deleted just now
            return False
        spaces = self._spaces()
        for blob, nodes in wanted.items():
            for node in nodes & values.get(blob, {}).keys():
                blob_lib.put_back(spaces[node], blob, values[blob][node])
        return True
