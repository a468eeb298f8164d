"""From the arguments of `save()` to what the background needs: plan, snapshot, records of the items."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epochckpt import checksum, records, snapshot
from epochckpt import plan as plan_lib
from epochckpt import tree as tree_lib
from epochckpt.errors import InvalidArgumentError
from epochckpt.items import SaveItem
from epochckpt.options import StorageOptions
from epochckpt.records import ItemRecord
from epochckpt.snapshot import Buffer

_PLANS = 16  # how many are kept; a job has one or two


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The plans of a save; nothing has been copied yet. `digest` is computed when it is first called."""

    plans: list[plan_lib.ItemPlan]
    leaves: list[list[Any]]
    files: list[tuple[str, bytes]]
    digest: Callable[[], str]
    copied_bytes: int
    names: tuple[str, ...]


class Planner:
    """Plans saves of one manager, and keeps the plans.

    Args:
        node: number of this node.
        nodes: (name, process) by node number.
        options: sizes.
        part_bytes: bound on one data file, or None.
    """

    def __init__(self, node: int, nodes: Sequence[tuple[str, int]], options: StorageOptions, part_bytes: int | None):
        self._node, self._nodes, self._options, self._part_bytes = node, nodes, options, part_bytes
        self._plans: collections.OrderedDict[Any, plan_lib.ItemPlan] = collections.OrderedDict()
        self._digests: collections.OrderedDict[Any, Callable[[], str]] = collections.OrderedDict()

    def prepare(self, items: Sequence[SaveItem]) -> Prepared:
        """Plans a save.

        Raises:
            InvalidArgumentError: something in it cannot be saved.
        """
        plans, leaves, files, keys = [], [], [], []
        for item in items:
            if item.data is not None:
                files.append((item.name, item.data))
                keys.append(item.name)
                continue
            try:
                flat, treedef = tree_lib.flatten_leaves(item.tree)
            except (ValueError, TypeError) as error:
                raise InvalidArgumentError(f"item {item.name!r} is not a pytree that can be saved: {error}") from error
            key = (item.name, plan_lib.key(flat, treedef))
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plan(item)
                self._keep(self._plans, key, plan)
            else:
                self._plans.move_to_end(key)
            plans.append(plan)
            leaves.append(flat)
            keys.append(key)
        digest = self._digests.get(tuple(keys))
        if digest is None:
            digest = functools.cache(functools.partial(self._digest, plans, [name for name, _ in files]))
            self._keep(self._digests, tuple(keys), digest)
        copied = sum(p.copied_bytes for p in plans)
        mine = files if self._node == 0 else []
        return Prepared(plans, leaves, mine, digest, copied, tuple(item.name for item in items))

    def _plan(self, item: SaveItem) -> plan_lib.ItemPlan:
        pairs, _ = tree_lib.flatten(item.tree)
        return plan_lib.plan_item(
            item.name,
            pairs,
            node=self._node,
            node_of_process={process: i for i, (_, process) in enumerate(self._nodes)},
            split_bytes=self._options.split_bytes,
            part_bytes=self._part_bytes,
        )

    def _digest(self, plans: Sequence[plan_lib.ItemPlan], files: Sequence[str]) -> str:
        what = {"nodes": list(self._nodes), "files": sorted(files)}
        what["items"] = {p.item.name: records.array_item_json(p.item) for p in plans}
        return checksum.digest(json.dumps(what, separators=(",", ":")).encode())

    @staticmethod
    def _keep(cache: collections.OrderedDict[Any, Any], key: Any, value: Any) -> None:
        cache[key] = value
        while len(cache) > _PLANS:
            cache.popitem(last=False)


def take(prepared: Prepared) -> tuple[list[list[Buffer]], dict[str, ItemRecord]]:
    """The snapshot of a planned save, and the items as they will be recorded."""
    buffers = [snapshot.take(p, values) for p, values in zip(prepared.plans, prepared.leaves, strict=True)]
    items: dict[str, ItemRecord] = {}
    for plan, values in zip(prepared.plans, prepared.leaves, strict=True):
        items[plan.item.name] = ItemRecord("arrays", plan.item, snapshot.values(plan, values))
    for name in prepared.names:
        items.setdefault(name, ItemRecord("json"))
    return buffers, items


def checked_json(value: Any, where: str) -> Any:
    """User data as it will come back from JSON.

    Raises:
        InvalidArgumentError: something in it is not JSON.
    """
    return checksum.unpack_json(checksum.pack_json(value, where))


def root_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Content of the file in which Orbax, too, keeps a manager's own metadata."""
    data = {"internal_metadata": {}, "custom_metadata": checksum.pack_json(dict(metadata), "metadata")}
    return json.dumps(data).encode()
