"""Argument classes of epochckpt's own, beside those of `orbax.checkpoint.args`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

Reshard = Callable[[Sequence[Any], int, int], Sequence[Any]]


@dataclasses.dataclass
class RenamedRestore(ocp.args.CheckpointArgs):
    r"""Restores a pytree whose leaves had other names when it was saved, or that has become a part of a larger one.

    The base model's weights of another run, in a state that also has adapters of its own:
    `RenamedRestore(state, {r"params/(.*)": r"params/base/\1"}, partial=True)`.

    Attributes:
        item: target pytree, as for `StandardRestore`.
        rename: regular expressions over the whole names of the epoch's leaves, and their new names, in which `\1`
            stands for what the first group matched. The first expression that matches counts; a leaf that none matches
            keeps its name. A name is the keys joined by `/`, all as text (`layers/0/kernel`). An expression that
            matches nothing is refused, so is a name that two leaves would get.
        partial: leaves that only the epoch has are left out, and those that only the target has stay as they are.
    """

    item: Any
    rename: Mapping[str, str]
    partial: bool = False


@dataclasses.dataclass
class NodeSave(ocp.args.CheckpointArgs):
    """Saves a value that differs per node: a data iterator's position, a random generator of each process.

    Every node saves its own pytree; the trees need not be alike. Arrays must be addressable by the process.

    Attributes:
        item: this node's pytree of arrays and Python values; by_node: such pytrees by node name.
        by_node: `item` is a dict `{node name: pytree}` for the nodes that this process hosts. A node that is not in it
            has no such item.
    """

    item: Any
    by_node: bool = False


@dataclasses.dataclass
class NodeRestore(ocp.args.CheckpointArgs):
    """Restores what this node saved with `NodeSave`: of as many nodes, the one of its name, else one that has no heir.

    Attributes:
        item: target pytree as for `StandardRestore`; None for what was saved, as dicts and lists. by_node: None, or
            such targets by node name, for the nodes that this process hosts.
        reshard: called when the epoch was saved by another number of nodes, which is refused without it unless all of
            them had saved the same, which every node then gets:
            `reshard(old_states, old_count, new_count)` is given every node's pytree in node order (dicts and lists,
            whatever `item` says; None of a node that saved none) and returns `new_count` of them; every process must
            compute the same.
        by_node: the result is a dict `{node name: pytree}` for the nodes that this process hosts; a node that gets
            nothing is not in it.
    """

    item: Any = None
    reshard: Reshard | None = None
    by_node: bool = False
