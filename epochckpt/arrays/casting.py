"""Casts of arrays: before a save, as Orbax's `SaveArgs(dtype=…)` ask, and whether a cast keeps the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from epochckpt.errors import InvalidArgumentError
from epochckpt.format import tree as tree_lib


def apply(item: str, tree: Any, save_args: Any) -> Any:
    """The tree with its arrays cast as `save_args`, a pytree of `ocp.SaveArgs` of the same structure, asks.

    A cast changes the precision of floating and complex arrays, or the width of integers. Python numbers, and arrays
    whose kind would change (integers to floats), are saved as they are, with a warning.
    """
    if save_args is None:
        return tree
    wanted: dict[str, Any] = {}
    for path, args in jax.tree_util.tree_leaves_with_path(save_args):
        where = tree_lib.leaf_name(tree_lib.key_path(path))
        if not isinstance(args, ocp.SaveArgs):
            raise InvalidArgumentError(
                f"item {item!r}: save_args has a {type(args).__name__} at {where!r}, no SaveArgs"
            )
        if args.aggregate or args.chunk_byte_size or getattr(args, "shard_axes", ()):
            logging.log_first_n(logging.INFO, "SaveArgs: fields about Orbax's own files (chunks, …) have no effect", 1)
        wanted[where] = args.dtype
    if all(dtype is None for dtype in wanted.values()):
        return tree
    pairs, treedef = tree_lib.flatten(tree)
    names = [tree_lib.leaf_name(path) for path, _ in pairs]
    unknown = sorted(wanted.keys() - set(names))
    if unknown:
        raise InvalidArgumentError(f"item {item!r}: save_args has {unknown[0]!r}, which the item lacks")
    leaves = [_cast(name, leaf, wanted.get(name)) for name, (_, leaf) in zip(names, pairs, strict=True)]
    return tree_lib.unflatten(treedef, leaves)


def _cast(name: str, leaf: Any, dtype: Any) -> Any:
    if dtype is None or getattr(leaf, "dtype", dtype) == dtype:
        return leaf
    kinds = np.floating, np.complexfloating, np.integer
    if isinstance(leaf, jax.Array | np.ndarray | np.generic) and keeps_kind(leaf.dtype, np.dtype(dtype), kinds):
        out = leaf.astype(dtype)
        if tree_lib.issubdtype(leaf.dtype, np.integer) and not _fits(leaf, out):
            raise InvalidArgumentError(
                f"leaf {name!r}: not every value of its {leaf.dtype} fits into {np.dtype(dtype)}"
            )
        return out
    kind = getattr(leaf, "dtype", type(leaf).__name__)
    logging.log_first_n(
        logging.WARNING, "leaf %s is saved as %s, not as %s: the cast would not keep its values", 3, name, kind, dtype
    )
    return leaf


def _fits(before: Any, after: Any) -> bool:
    """Whether a cast of integers kept the values that this process holds."""
    if np.can_cast(before.dtype, after.dtype, "safe"):
        return True
    if isinstance(before, jax.Array):
        shards = zip(before.addressable_shards, after.addressable_shards, strict=True)
        return all(_fits(np.asarray(a.data), np.asarray(b.data)) for a, b in shards)
    return bool(np.array_equal(before, after.astype(before.dtype)) and np.array_equal(before < 0, after < 0))


def keeps_kind(before: Any, after: Any, kinds: Sequence[type]) -> bool:
    """Whether two dtypes are of the same one of these kinds of numbers."""
    return any(tree_lib.issubdtype(before, kind) and tree_lib.issubdtype(after, kind) for kind in kinds)


def cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A cast; complex to real keeps the real part without NumPy's warning, because `survives` compares the rest."""
    if tree_lib.issubdtype(array.dtype, np.complexfloating) and not tree_lib.issubdtype(dtype, np.complexfloating):
        array = np.real(array)
    return array.astype(dtype)


def survives(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether a cast kept every value exactly."""
    back = cast(after, before.dtype)
    same = (back == before) | ((back != back) & (before != before))
    wide = [a.astype(np.float64) if a.dtype.itemsize < 4 else a for a in (before, after)]
    equal = (wide[0] == wide[1]) | ((wide[0] != wide[0]) & (wide[1] != wide[1]))
    return bool(np.all(same & equal))
