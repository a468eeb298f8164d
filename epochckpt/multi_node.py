"""Caffe2's `MultiNodeCheckpointManager`; see `epochckpt.caffe2`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import logging

from epochckpt.db_names import db_name, name_list, node_names
from epochckpt.errors import InvalidArgumentError
from epochckpt.metadata_protocol import AbstractMetadataHandler
from epochckpt.session import Session
from epochckpt.single_node import CheckpointManager, Manager
from epochckpt.tasks import Task, TaskGroup, joining


class MultiNodeCheckpointManager(Manager):
    """Saves and loads the workspaces of many nodes, each into its own folder of the epoch.

    Args:
        db_prefix: the directory; must exist when it is used.
        db_type: `"epochckpt"`.
        metadata_handler: see `epochckpt.metadata`.

    Raises:
        InvalidArgumentError: a `db_type` that is not ours.
    """

    def __init__(
        self, db_prefix: str | os.PathLike[str], db_type: str, metadata_handler: AbstractMetadataHandler | None = None
    ):
        super().__init__(db_prefix, db_type, metadata_handler)
        self._managers: dict[str, CheckpointManager] = {}

    @property
    def node_managers(self) -> list[tuple[str, CheckpointManager]]:
        """(node, its manager), in the order in which the nodes were given; empty before they are."""
        return list(self._managers.items())

    def get_ckpt_db_name(self, node_name: str, epoch: int) -> str:
        """The full path of a node's epoch.

        Raises:
            InvalidArgumentError: this manager does not have that node.
        """
        self._of([str(node_name)])
        return db_name(epoch, node_name, self._db_prefix)

    def init(
        self,
        nodes: Iterable[Any],
        retrieve_from_epoch: int | None = None,
        path_prefix: str | os.PathLike[str] | None = None,
        path_type: str | None = None,
    ) -> TaskGroup:
        """Tasks that determine which blobs are checkpointed, on each node; see `CheckpointManager.init`.

        Raises:
            InvalidArgumentError: it was given other nodes before.
        """
        names = self.take_nodes(nodes)
        return self._group("init", lambda m, n: m.init([n], retrieve_from_epoch, path_prefix, path_type), names)

    def load(
        self, epoch: int, path_prefix: str | os.PathLike[str] | None = None, path_type: str | None = None
    ) -> TaskGroup:
        """Tasks that put the blobs back, on each node; see `CheckpointManager.load`."""
        return self._group("load", lambda m, _: m.load(epoch, path_prefix, path_type))

    def load_blobs_from_checkpoint(self, blob_names: Iterable[str], epoch: int) -> TaskGroup:
        """Tasks that load just these blobs, on each node that has them."""
        names = name_list(blob_names)
        return self._group("load blobs", lambda m, _: m.load_blobs_from_checkpoint(names, epoch))

    def load_blobs_locally(self, nodes: Iterable[Any], blob_names: Iterable[str], epoch: int, session: Session) -> bool:
        """Loads just these blobs from the nodes' folders into their workspaces; works without `init`.

        Args:
            nodes: the nodes.
            blob_names: names that any of the nodes may have, or `node/name`; what an epoch lacks is left out.
            epoch: the epoch.
            session: whose workspaces are meant; of the nodes, those that it runs in this process.

        Returns:
            False if any of the nodes lacks that epoch; nothing is loaded then.
        """
        wanted, given = name_list(blob_names), node_names(nodes)
        names = list(self._of(given)) if self._managers else self.take_nodes(given)
        missing = [name for name, manager in self._of(names).items() if not manager.has_epoch(epoch)]
        if missing:
            logging.info("%s: epoch %d is not there for %s", self._db_prefix, epoch, ", ".join(missing))
            return False
        session.run(self._group("load blobs", lambda m, _: m.load_blobs_from_checkpoint(wanted, epoch), names))
        return True

    def check_db_exists(self, epoch: int) -> TaskGroup:
        """Tasks whose outputs are whether each node has committed that epoch."""
        return self._group("look", lambda m, _: m.check_db_exists(epoch))

    def save(self, epoch: int) -> TaskGroup:
        """Tasks that save the blobs, on each node; see `CheckpointManager.save`."""

        def saving(manager: CheckpointManager, _: str) -> Task:
            manager.notes = self.notes
            return manager.save(epoch)

        return self._group("save", saving)

    def collect_checkpoint_stats(self, stats: dict[str, float]) -> None:
        """Adds the seconds that the last save or load took on each node of this process, by db name."""
        for manager in self._managers.values():
            manager.collect_checkpoint_stats(stats)

    def read_notes(self, epoch: int) -> dict[str, Any] | None:
        """The `notes` of the first node that has an epoch; None if none has it (not in Caffe2)."""
        found = (manager.read_notes(epoch) for manager in self._of(self._given()).values())
        return next((notes for notes in found if notes is not None), None)

    def take_nodes(self, nodes: Iterable[Any] | None) -> list[str]:
        """The nodes' names, once it is known that they suit this manager; the first ones stay."""
        names = node_names(nodes or ())
        if not names:
            raise InvalidArgumentError(
                "MultiNodeCheckpointManager needs the nodes' names, got none; a job without any has session.nodes"
            )
        if self._managers and sorted(names) != sorted(self._managers):
            raise InvalidArgumentError(
                f"this manager has the nodes {', '.join(self._managers)}, and was now given {', '.join(names)}; make "
                "another manager for other nodes"
            )
        if not self._managers:
            self._managers = {name: CheckpointManager(self._db_prefix, name, self._db_type) for name in names}
        return names

    def _given(self) -> list[str]:
        if not self._managers:
            raise InvalidArgumentError("this manager knows no nodes yet; first: set_params(nodes), or init(nodes)")
        return list(self._managers)

    def _of(self, names: Sequence[str]) -> dict[str, CheckpointManager]:
        known = self._given()
        unknown = [name for name in names if name not in known]
        if unknown:
            raise InvalidArgumentError(f"this manager has no node {unknown[0]!r}; it has: {', '.join(known)}")
        return {name: self._managers[name] for name in names}

    def _group(
        self, name: str, task: Callable[[CheckpointManager, str], Task], nodes: Sequence[str] | None = None
    ) -> TaskGroup:
        with joining(group := TaskGroup(f"checkpoint {name}")):
            for node, manager in self._of(self._given() if nodes is None else nodes).items():
                manager.take_nodes([node])
                task(manager, node)
        return group
