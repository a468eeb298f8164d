"""The tree of an item that stock Orbax wrote, in our terms: leaves, names and shardings from Orbax's metadata.

Orbax writes every key as text. A key that was a number, as in the states of NNX, gets the name that it has with us;
where there is a target, a leaf has the name that the target has for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from epochckpt import tree as tree_lib
from epochckpt.errors import UnsupportedError
from epochckpt.grid import Leaf


@dataclasses.dataclass(frozen=True)
class StoredTree:
    """The tree of an array item.

    Attributes:
        name: the item.
        treedef: of Orbax's nested dicts and lists; its keys are text.
        leaves: as our records would have them, in the order of `treedef`; `sharding` is the leaf's own number. A key
            that is a number as text is an int in a leaf's path, not so in `treedef`: never build one from the other.
        found: Orbax's metadata of each leaf.
        bare: the tree is a single array.
        values: `found` holds the values themselves: the item is older than Orbax's metadata.
    """

    name: str
    treedef: Any
    leaves: tuple[Leaf, ...]
    found: list[Any]
    bare: bool = False
    values: bool = False

    def nest(self, values: Sequence[Any]) -> Any:
        """The tree with these leaves."""
        return values[0] if self.bare else tree_lib.unflatten(self.treedef, values)

    def named_like(self, target: Any) -> tuple[Leaf, ...]:
        """The leaves under the names that the target has for them: Orbax writes all keys as text."""
        pairs, _ = tree_lib.flatten(target)
        names = {tuple(str(key) for _, key in path): tree_lib.leaf_name(path) for path, _ in pairs}
        return tuple(
            dataclasses.replace(leaf, name=names.get(tuple(str(key) for _, key in leaf.path), leaf.name))
            for leaf in self.leaves
        )


def value_types(tree: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    """What each leaf was when it was saved, by its keys as text; from an item's `_METADATA`."""
    return {
        tuple(str(entry["key"]) for entry in row["key_metadata"]): str(row["value_metadata"]["value_type"])
        for row in tree["tree_metadata"].values()
    }


def leaves_of(
    pairs: Sequence[tuple[tree_lib.KeyPath, Any]], types: Mapping[tuple[str, ...], str], impls: Mapping[str, str]
) -> tuple[Leaf, ...]:
    """The leaves as our records would have them.

    Args:
        pairs: key paths, and Orbax's metadata or the values themselves.
        types: see `value_types`.
        impls: PRNG implementations of typed keys by Orbax's parameter name.
    """
    out = []
    for number, (path, meta) in enumerate(pairs):
        impl = impls.get(getattr(meta, "name", None) or "")
        dtype, shape = getattr(meta, "dtype", None), tuple(getattr(meta, "shape", None) or ())
        kind = tree_lib.leaf_kind(meta)  # of empty nodes, and of values
        if isinstance(meta, ocp.metadata.StringMetadata):
            kind, dtype = "str", None
        elif isinstance(meta, ocp.metadata.ScalarMetadata):
            kind, dtype = _scalar_kind(dtype), None
        elif kind is None and dtype is not None:
            numpy = types.get(tuple(str(key) for _, key in path)) == "np.ndarray"
            kind = "prng" if impl is not None else "numpy" if numpy else "jax"
        elif kind is None:
            raise UnsupportedError(f"leaf {tree_lib.leaf_name(path)!r} is a {type(meta).__name__} of Orbax's")
        path = tuple(("k", int(key)) if k == "k" and _is_int(key) else (k, key) for k, key in path)
        dtype = None if dtype is None else np.dtype(dtype)
        out.append(Leaf(path, tree_lib.leaf_name(path), kind, dtype, shape, sharding=number, impl=impl))
    return tuple(out)


def _is_int(key: Any) -> bool:
    """Whether a key was a number, as in the states of NNX: Orbax writes all keys as text."""
    return isinstance(key, str) and key.isdecimal() and str(int(key)) == key


def _scalar_kind(dtype: Any) -> str:
    return {"b": "bool", "i": "int", "u": "int", "c": "complex"}.get(np.dtype(dtype).kind, "float")
