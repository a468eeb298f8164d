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
from epochckpt.handlers import Content, Run
from epochckpt.items import SaveItem
from epochckpt.options import StorageOptions
from epochckpt.records import ItemRecord
from epochckpt.snapshot import Buffer

_PLANS = 16  # how many are kept; a job has one or two


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The plans of a save; nothing has been copied or run yet. `digest` is computed when it is first called."""

    plans: list[plan_lib.ItemPlan]
    leaves: list[list[Any]]
    wanted: Sequence[SaveItem]
    digest: Callable[[], str]
    copied_bytes: int
    primary: bool

    @property
    def runs_handlers(self) -> bool:
        """Whether handlers that are not ours have a part in it."""
        return any(item.run is not None for item in self.wanted)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a save holds when the training thread goes on.

    Attributes:
        buffers: one list per plan.
        items: the items as they will be recorded.
        own: the items that differ per node, as this node records them.
        files: what handlers write on this node.
    """

    buffers: list[list[Buffer]]
    items: dict[str, ItemRecord]
    own: dict[str, ItemRecord]
    files: list[Content | Run]


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
        plans, leaves, keys = [], [], []
        for item in items:
            if item.kind == "files":
                keys.append((item.name, item.handler))
                continue
            try:
                flat, treedef = tree_lib.flatten_leaves(item.tree)
            except (ValueError, TypeError) as error:
                raise InvalidArgumentError(f"item {item.name!r} is not a pytree that can be saved: {error}") from error
            key = (item.name, item.kind, plan_lib.key(flat, treedef))
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
            shared = {item.name for item in items if item.kind == "arrays"}
            alike = [p for p in plans if p.item.name in shared]
            others = sorted((i.name, i.kind, i.handler) for i in items if i.name not in shared)
            digest = functools.cache(functools.partial(self._digest, alike, others))
            self._keep(self._digests, tuple(keys), digest)
        copied = sum(p.copied_bytes for p in plans)
        return Prepared(plans, leaves, items, digest, copied, self._node == 0)

    def _plan(self, item: SaveItem) -> plan_lib.ItemPlan:
        pairs, _ = tree_lib.flatten(item.tree)
        alone = item.kind == "node"
        nodes = {process: i for i, (_, process) in enumerate(self._nodes)}
        return plan_lib.plan_item(
            item.name,
            pairs,
            node=0 if alone else self._node,
            node_of_process={self._nodes[self._node][1]: 0} if alone else nodes,
            split_bytes=self._options.split_bytes,
            part_bytes=self._part_bytes,
        )

    def _digest(self, plans: Sequence[plan_lib.ItemPlan], others: Sequence[Any]) -> str:
        what = {"nodes": list(self._nodes), "others": list(others)}
        what["items"] = {p.item.name: records.array_item_json(p.item) for p in plans}
        return checksum.digest(json.dumps(what, separators=(",", ":")).encode())

    @staticmethod
    def _keep(cache: collections.OrderedDict[Any, Any], key: Any, value: Any) -> None:
        cache[key] = value
        while len(cache) > _PLANS:
            cache.popitem(last=False)


def take(prepared: Prepared) -> Snapshot:
    """The snapshot of a planned save. Handlers that are not ours run their blocking part here."""
    pairs = list(zip(prepared.plans, prepared.leaves, strict=True))
    trees = {plan.item.name: (plan, values) for plan, values in pairs}
    items: dict[str, ItemRecord] = {}
    own: dict[str, ItemRecord] = {}
    for item in prepared.wanted:
        record = ItemRecord(item.kind, item.handler)
        if item.name in trees:
            plan, values = trees[item.name]
            tree = ItemRecord("arrays", "", plan.item, snapshot.values(plan, values), item.custom_metadata)
            if item.kind == "node":
                own[item.name] = tree
            else:
                record = dataclasses.replace(tree, handler=item.handler)
        items[item.name] = record
    files: list[Content | Run] = []
    try:
        for run in (item.run for item in prepared.wanted if item.run is not None):
            files.append(run())  # one by one: what has begun is to be ended when the next one fails
        buffers = [snapshot.take(plan, values) for plan, values in pairs]
    except BaseException:
        for file in files:
            file.discard()
        raise
    files += [item.content for item in prepared.wanted if item.content is not None and prepared.primary]
    return Snapshot(buffers, items, own, files)


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
