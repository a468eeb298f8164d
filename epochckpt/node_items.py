"""Restores what differs per node (`NodeSave`): which old node's value goes to which node of this job.

As many nodes as before: each takes the place of one of them. Another number: `reshard` makes new values of the old
ones; without it, what was the same on every node goes to every node, and what was not is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from epochckpt.args import NodeRestore
from epochckpt.errors import InvalidArgumentError
from epochckpt.handlers import Handlers
from epochckpt.hosting import Nodes
from epochckpt.node_reader import EpochReader
from epochckpt.restoring import TreeRequest, restore_tree
from epochckpt.tree_metadata import plain_target


class Nothing:
    """In place of a value: the nodes of this process have none."""


@dataclasses.dataclass(frozen=True)
class Here:
    """Who restores: needed for values that differ per node.

    Attributes:
        handlers: of the manager.
        nodes: of the job, and which of them this process hosts.
    """

    handlers: Handlers
    nodes: Nodes = dataclasses.field(default_factory=Nodes)

    def successor_of(self, number: int, names: Sequence[str]) -> int:
        """The number of the old node, of as many as there are now, whose place a node of this job takes.

        A node goes on where the one of its name was; the others take the places that are left, in order.
        """
        left = [n for n, name in enumerate(names) if name not in self.nodes.names]
        new = [name for name in self.nodes.names if name not in names]
        name = self.nodes.names[number]
        return list(names).index(name) if name in names else left[new.index(name)]


def restore_node(reader: EpochReader, name: str, args: NodeRestore | None, here: Here) -> Any:
    """Restores an item of kind `node`; without args for the process's node, or by node if it hosts several.

    Returns:
        The value, or values by node name; without args `Nothing` where there is none.

    Raises:
        InvalidArgumentError: it cannot be said what this process's nodes are to get; says what to pass.
    """
    nodes = here.nodes
    asked = NodeRestore(by_node=len(nodes.hosted) > 1) if args is None else args
    if not asked.by_node and len(nodes.hosted) > 1:
        raise InvalidArgumentError(
            f"item {name!r}: this process hosts {len(nodes.hosted)} nodes ({', '.join(nodes.hosted_names)}); pass "
            "NodeRestore(by_node=True), with targets by node name"
        )
    targets = _targets(name, asked, nodes)
    states = _states(reader, name, asked, here, targets)
    if asked.by_node:
        return {nodes.names[number]: state for number, state in states.items()}
    if states:
        return states[nodes.hosted[0]]
    if args is None:
        return Nothing()
    raise InvalidArgumentError(
        f"item {name!r} of epoch {reader.record.epoch}: the node whose place {nodes.hosted_names[0]} takes saved "
        "none; leave the item out, or pass NodeRestore(by_node=True), which leaves out the node"
    )


def _targets(name: str, args: NodeRestore, nodes: Nodes) -> dict[int, Any]:
    """Targets by node number."""
    if not args.by_node:
        return {nodes.hosted[0]: plain_target(args.item)}
    if args.item is None:
        return {}
    return {number: plain_target(target) for number, target in by_number(name, args.item, nodes).items()}


def by_number(name: str, values: Any, nodes: Nodes) -> dict[int, Any]:
    """What was passed by node name, by node number, in node order.

    Raises:
        InvalidArgumentError: no mapping, or one that names a node that this process does not host.
    """
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(
            f"item {name!r}: by_node=True expects a dict of pytrees by node name, got a {type(values).__name__}"
        )
    unknown = [node for node in values if node not in nodes.hosted_names]
    if unknown:
        raise InvalidArgumentError(
            f"item {name!r}: by_node=True names {', '.join(map(repr, unknown))}; this process hosts "
            f"{', '.join(nodes.hosted_names)}"
        )
    return {number: values[nodes.names[number]] for number in nodes.hosted if nodes.names[number] in values}


def _states(
    reader: EpochReader, name: str, args: NodeRestore, here: Here, targets: Mapping[int, Any]
) -> dict[int, Any]:
    """What each node of this process gets, by node number; a node that gets nothing is left out."""
    record, nodes = reader.record, here.nodes
    count, now = len(record.nodes), len(nodes)
    if count == now:
        names = [n.name for n in record.nodes]
        sources = {number: here.successor_of(number, names) for number in nodes.hosted}
    elif args.reshard is not None:
        return _resharded(reader, name, args, nodes)
    elif record.items[name].same:
        sources = {number: number % count for number in nodes.hosted}
    else:
        raise InvalidArgumentError(
            f"item {name!r} of epoch {record.epoch} differs per node and was saved by {count} nodes; here are "
            f"{now}: pass NodeRestore(reshard=…), which makes new states of the old ones"
        )
    return {
        number: restore_tree(reader.of_node(old, name), name, TreeRequest(targets.get(number)))
        for number, old in sources.items()
        if reader.has(old, name)
    }


def _resharded(reader: EpochReader, name: str, args: NodeRestore, nodes: Nodes) -> dict[int, Any]:
    count, now = len(reader.record.nodes), len(nodes)
    assert args.reshard is not None, "callers look at it"
    old = [
        restore_tree(reader.of_node(n, name), name, TreeRequest()) if reader.has(n, name) else None
        for n in range(count)
    ]
    new = list(args.reshard(old, count, now))
    if len(new) != now:
        raise InvalidArgumentError(f"item {name!r}: reshard returned {len(new)} states for {now} nodes")
    return {number: new[number] for number in nodes.hosted}
