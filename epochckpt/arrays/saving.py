"""From the arguments of `save()` to what the background needs: plan, snapshot, records of the items."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epochckpt.arrays import plan as plan_lib
from epochckpt.arrays import snapshot
from epochckpt.arrays.items import SaveItem, by_number
from epochckpt.arrays.snapshot import Buffer
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import ItemRecord, Nodes, checksums, records
from epochckpt.format import tree as tree_lib
from epochckpt.options import StorageOptions
from epochckpt.orbax import Content, HandlerSave

_PLANS = 256  # how many are kept; a job has as many as it has items, or twice that


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The plans of a save; nothing has been copied or run yet. `digest` is computed when it is first called.

    Attributes:
        plans: one per pytree.
        places: for each of them the number of the node that writes it.
    """

    plans: list[plan_lib.ItemPlan]
    places: list[int]
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
        own: the items that differ per node, as each of this process's nodes records them, by node number.
        files: what handlers write on this node.
    """

    buffers: list[list[Buffer]]
    items: dict[str, ItemRecord]
    own: dict[int, dict[str, ItemRecord]]
    files: list[Content | HandlerSave]


class Planner:
    """Plans saves of one manager, and keeps the plans.

    Args:
        nodes: of the job.
        options: sizes.
        part_bytes: bound on one data file, or None.
    """

    def __init__(self, nodes: Nodes, options: StorageOptions, part_bytes: int | None):
        self._nodes, self._options, self._part_bytes = nodes, options, part_bytes
        self._plans: collections.OrderedDict[Any, plan_lib.ItemPlan] = collections.OrderedDict()
        self._digests: collections.OrderedDict[Any, Callable[[], str]] = collections.OrderedDict()

    def prepare(self, items: Sequence[SaveItem]) -> Prepared:
        """Plans a save.

        Raises:
            InvalidArgumentError: something in it cannot be saved.
        """
        plans, places, leaves = [], [], []
        keys: list[Any] = []
        for item in items:
            if item.kind != "arrays":
                keys.append((item.name, item.kind, item.handler))
            for number, tree in self._trees(item):
                try:
                    flat, treedef = tree_lib.flatten_leaves(tree)
                except (ValueError, TypeError) as error:
                    problem = f"item {item.name!r} is not a pytree that can be saved: {error}"
                    raise InvalidArgumentError(problem) from error
                try:
                    key = (item.name, item.kind, plan_lib.key(flat, treedef))
                except AttributeError:  # a traced array has no sharding
                    plan_lib.refuse_traced(item.name, tree)
                    raise
                plan = self._plans.pop(key, None) or self._plan(item, tree)
                self._keep(self._plans, key, plan)
                plans.append(plan)
                places.append(number)
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
        return Prepared(plans, places, leaves, items, digest, copied, self._nodes.process == 0)

    def _trees(self, item: SaveItem) -> list[tuple[int, Any]]:
        """(node number, tree) of every pytree of an item that this process saves."""
        nodes = self._nodes
        if item.kind == "files":
            return []
        if item.kind == "node" and item.by_node:
            return list(by_number(item.name, item.tree, nodes).items())
        if item.kind == "node" and len(nodes.hosted) > 1:
            raise InvalidArgumentError(
                f"item {item.name!r}: this process hosts {len(nodes.hosted)} nodes ({', '.join(nodes.hosted_names)}); "
                "pass NodeSave({node name: pytree}, by_node=True)"
            )
        return [(nodes.hosted[0], item.tree)]

    def _plan(self, item: SaveItem, tree: Any) -> plan_lib.ItemPlan:
        pairs, _ = tree_lib.flatten(tree)
        per_node = item.kind == "node"
        return plan_lib.plan_item(
            item.name,
            pairs,
            node=0 if per_node else self._nodes.hosted[0],
            node_of_process={self._nodes.id_of(self._nodes.process): 0} if per_node else self._nodes.writers,
            replica_split_bytes=self._options.replica_split_bytes,
            part_bytes=self._part_bytes,
            per_node=per_node,
        )

    def _digest(self, plans: Sequence[plan_lib.ItemPlan], others: Sequence[Any]) -> str:
        what: dict[str, Any] = {"nodes": self._nodes.rows, "others": list(others)}
        what["items"] = {p.item.name: records.array_item_json(p.item) for p in plans}
        return checksums.digest(json.dumps(what, separators=(",", ":")).encode())

    @staticmethod
    def _keep(cache: collections.OrderedDict[Any, Any], key: Any, value: Any) -> None:
        cache[key] = value
        while len(cache) > _PLANS:
            cache.popitem(last=False)


def take(prepared: Prepared) -> Snapshot:
    """The snapshot of a planned save. Handlers that are not ours run their blocking part here."""
    pairs = list(zip(prepared.plans, prepared.leaves, strict=True))
    wanted = {item.name: item for item in prepared.wanted}
    items = {item.name: ItemRecord(item.kind, item.handler) for item in prepared.wanted}
    own: dict[int, dict[str, ItemRecord]] = {}
    for (plan, values), number in zip(pairs, prepared.places, strict=True):
        item = wanted[plan.item.name]
        tree = ItemRecord("arrays", "", plan.item, snapshot.values(plan, values), item.custom_metadata)
        if item.kind == "node":
            own.setdefault(number, {})[item.name] = tree
        else:
            items[item.name] = dataclasses.replace(tree, handler=item.handler)
    files: list[Content | HandlerSave] = []
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
    return checksums.unpack_json(checksums.pack_json(value, where))


def root_metadata(metadata: Mapping[str, Any]) -> bytes:
    """Content of the file in which Orbax, too, keeps a manager's own metadata."""
    data = {"internal_metadata": {}, "custom_metadata": checksums.pack_json(dict(metadata), "metadata")}
    return json.dumps(data).encode()
