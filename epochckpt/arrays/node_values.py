"""Values that differ per node, as callers pass them: one for the only node of a process, or a dict by node name."""

from collections.abc import Mapping
from typing import Any

from epochckpt.errors import InvalidArgumentError
from epochckpt.format import Nodes


def values_by_hosted_node(name: str, values: Any, by_node: bool, nodes: Nodes, advice: str) -> dict[int, Any]:
    """Values by node number, in that order: the value of the only node of this process, or a dict by node name."""
    if not by_node:
        if len(nodes.hosted) > 1:
            count = len(nodes.hosted)
            hosted = ", ".join(nodes.hosted_names)
            raise InvalidArgumentError(f"item {name!r}: this process hosts {count} nodes ({hosted}); pass {advice}")
        return {nodes.hosted[0]: values}
    if not isinstance(values, Mapping):
        problem = f"by_node=True expects a dict of pytrees by node name, got a {type(values).__name__}"
        raise InvalidArgumentError(f"item {name!r}: {problem}")
    hosted = set(nodes.hosted_names)
    unknown = [node for node in values if node not in hosted]
    if unknown:
        raise InvalidArgumentError(
            f"item {name!r}: by_node=True names {', '.join(map(repr, unknown))}; this process hosts "
            f"{', '.join(nodes.hosted_names)}"
        )
    return {number: values[nodes.names[number]] for number in nodes.hosted if nodes.names[number] in values}
