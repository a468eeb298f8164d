"""From the arguments of `save()` to its plan: the `Planner` of a manager, which makes each plan once.

A plan is made on the training thread by the first save of a tree. A tree that was restored into a target will be saved
later: it is planned in the background after the restore, and its first save finds the plan.
"""

import collections
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from epochckpt import _collector, _threads
from epochckpt._threads import Deadline, Future
from epochckpt.arrays import plan as plan_lib
from epochckpt.arrays.node_values import values_by_hosted_node
from epochckpt.arrays.plan import Forms, ItemPlan, PlanDigest
from epochckpt.arrays.save_items import NodeItem, SaveItem, TreeItem
from epochckpt.arrays.snapshot import PlannedTree, SavePlan
from epochckpt.arrays.transfers import TransferSettings
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import KeyPath, Nodes
from epochckpt.format import tree as tree_lib
from epochckpt.options import StorageOptions

_PLANS = 256  # kept plans; a job has as many as it has items, or twice that
_AHEAD = 16  # plans that were made, or are being made, before they are asked for
_PATIENCE_SECS = 1.0  # then a save makes the plan itself; one takes some hundredths of that


class Key(NamedTuple):
    """What decides a plan, besides the nodes and the options of a manager."""

    item: str  # the item's name
    per_node: bool  # whether each node has its own tree
    treedef: Any  # the structure of the tree
    leaves: list[Any]  # `plan.leaf_keys` of its leaves


class _Planned:
    """What a plan was made for."""

    def __init__(self, key: Key):
        self._key = key
        self._types = tree_lib.key_types(key.treedef)

    def is_of(self, key: Key) -> bool:
        return self._key == key and (not self._types or self._types == tree_lib.key_types(key.treedef))


class Planner:
    """Plans saves of one manager, and keeps the plans; `part_bytes` and `cut` are those of `plan_item`.

    `writers` is how many threads write what is planned.
    """

    def __init__(
        self, nodes: Nodes, options: StorageOptions, part_bytes: int | None, *, writers: int, cut: bool = False
    ):
        self._nodes = nodes
        self._options = options
        self._part_bytes = part_bytes
        self._cut = cut
        self._transfer_settings = TransferSettings(options, writers)
        self._plans: list[tuple[_Planned, ItemPlan]] = []  # the newest first; replaced, never changed
        self._ahead = collections.deque[tuple[_Planned, Future[ItemPlan]]](maxlen=_AHEAD)

    def plan(self, items: Sequence[SaveItem]) -> SavePlan:
        """Plans a save; raises InvalidArgumentError for what cannot be saved."""
        trees: list[PlannedTree] = []
        for item in items:
            for node, tree in self._trees_of(item).items():
                try:
                    leaves, treedef = tree_lib.flatten_leaves(tree)
                except (ValueError, TypeError) as error:
                    problem = f"item {item.name!r} is not a pytree that can be saved: {error}"
                    raise InvalidArgumentError(problem) from error
                per_node = isinstance(item, NodeItem)
                trees.append(PlannedTree(self._plan(item.name, per_node, tree, leaves, treedef), node, leaves))
        shared = {item.name for item in items if isinstance(item, TreeItem)}
        digest = PlanDigest(
            nodes=self._nodes.rows,
            items={tree.plan.item.name: tree.plan for tree in trees if tree.plan.item.name in shared},
            others=sorted((item.name, item.kind.value, item.handler) for item in items if item.name not in shared),
        )
        return SavePlan(
            items=items,
            trees=trees,
            digest=digest,
            primary=self._nodes.process == 0,
            transfer_settings=self._transfer_settings,
        )

    def _trees_of(self, item: SaveItem) -> dict[int, Any]:
        """The pytrees of an item that this process writes, by the number of the node that writes each."""
        if isinstance(item, TreeItem):
            return {self._nodes.hosted[0]: item.tree}
        if isinstance(item, NodeItem):
            advice = "NodeSave({node name: pytree}, by_node=True)"
            return values_by_hosted_node(item.name, item.tree, item.by_node, self._nodes, advice)
        return {}

    def plan_ahead(self, trees: Mapping[str, Any]) -> None:
        """Plans, in the background, saves of these trees, by the names of their items; talks to no other process."""
        for name, tree in trees.items():
            with contextlib.suppress(Exception):  # a later save of the tree raises the error
                leaves, treedef = tree_lib.flatten_leaves(tree)
                self._begin(name, tree, leaves, treedef)

    def _begin(self, name: str, tree: Any, leaves: Sequence[Any], treedef: Any) -> None:
        key = Key(item=name, per_node=False, treedef=treedef, leaves=plan_lib.leaf_keys(leaves))
        if any(known.is_of(key) for known, _ in [*self._plans, *self._ahead]):
            return
        # The thread gets no array, because the caller may delete, or donate, what it has restored; and it calls no
        # node of the tree, whose code may be slow. Paths are of the tree itself: a node may name its children by them.
        paths = [path for path, _ in tree_lib.flatten(tree)[0]]
        forms = plan_lib.forms_of(key.leaves, leaves, lambda leaf: (name, tree_lib.leaf_name(paths[leaf])))

        def plan() -> ItemPlan:
            with _collector.paused():
                found = self._new_plan(key, paths, forms)
                found.complete(self._options.block_bytes)
                return found

        _threads.drain_at_exit(self)
        self._ahead.append((_Planned(key), _threads.start(plan)))

    def _drain_at_exit(self) -> Callable[[], None]:
        """See `_threads`: a thread in the middle of jax's calls would abort the interpreter as it ends."""
        deadline = Deadline(_PATIENCE_SECS)
        ahead = [future for _, future in self._ahead]

        def wait() -> None:
            for future in ahead:
                future.wait(deadline.left())

        return wait

    def _after_fork(self) -> None:
        self._ahead.clear()

    def _plan(self, name: str, per_node: bool, tree: Any, leaves: Sequence[Any], treedef: Any) -> ItemPlan:
        """The plan of an item's tree, as a rule that of the save before."""
        try:
            key = Key(item=name, per_node=per_node, treedef=treedef, leaves=plan_lib.leaf_keys(leaves))
        except AttributeError:  # a traced array has no sharding
            plan_lib.refuse_traced(name, tree)
            raise
        plans = self._plans
        try:
            found = next((each for each in plans if each[0].is_of(key)), None)
            made = self._made_ahead(key) if found is None else None
        except ValueError:  # the tree has static data, such as arrays, that cannot be compared
            return self._plan_now(key, tree, leaves)
        if found is None:
            found = _Planned(key), made or self._plan_now(key, tree, leaves)
        if not plans or plans[0] is not found:
            self._plans = [found, *(each for each in plans if each is not found)][:_PLANS]
        return found[1]

    def _made_ahead(self, key: Key) -> ItemPlan | None:
        """The plan that was begun when such a tree was restored, as soon as it is made; None if there is none."""
        future = next((future for known, future in list(self._ahead) if known.is_of(key)), None)
        if future is not None and future.wait(_PATIENCE_SECS):
            with contextlib.suppress(Exception):  # planned now, it is raised with the names of leaves
                return future.result()
        return None

    def _plan_now(self, key: Key, tree: Any, leaves: Sequence[Any]) -> ItemPlan:
        with _collector.paused():
            paths = [path for path, _ in tree_lib.flatten(tree)[0]]
            forms = plan_lib.forms_of(key.leaves, leaves, lambda leaf: (key.item, tree_lib.leaf_name(paths[leaf])))
            return self._new_plan(key, paths, forms)

    def _new_plan(self, key: Key, paths: Sequence[KeyPath], forms: Forms) -> ItemPlan:
        per_node = key.per_node
        return plan_lib.plan_item(
            key.item,
            paths,
            forms,
            node=0 if per_node else self._nodes.hosted[0],
            node_of_process={self._nodes.id_of(self._nodes.process): 0} if per_node else self._nodes.writers,
            replica_split_bytes=self._options.replica_split_bytes,
            part_bytes=self._part_bytes,
            cut=self._cut,
            per_node=per_node,
            local_disks=self._options.local_disks and self._nodes.processes > 1,
        )
