"""Argument classes of epochckpt's own, beside those of `orbax.checkpoint.args`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp

from epochckpt._renaming import Rename

Reshard = Callable[[Sequence[Any], int, int], Sequence[Any]]


@dataclasses.dataclass
class RenamedRestore(ocp.args.CheckpointArgs):
    """Restores a pytree whose leaves had other names when it was saved, or that has become a part of a larger one.

    The base model's weights of another run, in a state that also has adapters of its own:
    `RenamedRestore(state, {"params": "params/base"}, partial=True)`.

    Attributes:
        item: target pytree, as for `StandardRestore`.
        rename: a mapping of names in the epoch, or of their beginnings up to a `/`, to what takes their place:
            `{"layers/*/attn": "layers/*/attention"}`. `*` stands for any part of a key; the entry with the most keys
            counts; a leaf for which none counts keeps its name. Or a function from name to name. A name is the keys
            joined by `/`, all as text (`layers/0/kernel`). An entry that matches nothing is refused, so is a name that
            two leaves would get. docs/orbax.md has more.
        partial: leaves that only the epoch has are left out. Those that only the target has stay as they are; they must
            be values, not descriptions such as `jax.ShapeDtypeStruct`.
    """

    item: Any
    rename: Rename
    partial: bool = False


@dataclasses.dataclass
class NodeSave(ocp.args.CheckpointArgs):
    """Saves a value that differs per node: a data iterator's position, a random generator of each process.

    Every node saves its own pytree; the trees need not be alike. Arrays must be addressable by the process.

    Examples:
        >>> with ec.CheckpointManager("run") as manager:
        ...     params, position = ocp.args.StandardSave({"w": jnp.ones(3)}), ec.args.NodeSave({"batches_read": 128})
        ...     _ = manager.save(0, args=ocp.args.Composite(params=params, data=position))
        ...     manager.wait_until_finished()
        ...     manager.restore(0, args=ocp.args.Composite(data=ec.args.NodeRestore())).data
        {'batches_read': 128}

    Attributes:
        item: this node's pytree of arrays and Python values; with `by_node`, such pytrees by node name.
        by_node: `item` is a dict `{node name: pytree}` for the nodes that this process hosts. A node that is absent
            from it has no such item.
    """

    item: Any
    by_node: bool = False


@dataclasses.dataclass
class NodeRestore(ocp.args.CheckpointArgs):
    """Restores what nodes saved with `NodeSave`.

    If as many nodes saved the epoch, each node gets the state of the node of its name; nodes with new names get the
    states that are left. If another number of nodes saved it, every node gets the one state if all had saved the same;
    otherwise `reshard` is needed.

    Attributes:
        item: target pytree as for `StandardRestore`; None for what was saved, as dicts and lists. With `by_node`: None,
            or such targets by node name, for the nodes that this process hosts.
        reshard: `reshard(old_states, old_count, new_count)` is called when the epoch was saved by another number of
            nodes. It is given every node's pytree in node order (dicts and lists, whatever `item` says; None for a node
            that saved none) and returns `new_count` of them; every process must compute the same.
        by_node: the result is a dict `{node name: pytree}` for the nodes that this process hosts; a node that gets
            nothing is not in it.
        rename: new names of each node's leaves, as for `RenamedRestore`; needs a target.
    """

    item: Any = None
    reshard: Reshard | None = None
    by_node: bool = False
    rename: Rename | None = None
