"""An item of an epoch as an export writes it: the leaves that were selected, cast, by their new names."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from epochckpt import _text
from epochckpt._units import several
from epochckpt.arrays import Pack, Request
from epochckpt.arrays.reader import ArraySource
from epochckpt.convert.selection import Selection
from epochckpt.format import Box, Grid, Leaf
from epochckpt.format import tree as tree_lib


class SelectedArrays:
    """An item of arrays as it leaves: the chosen leaves, cast, each whole and of one node. An `ArraySource`."""

    def __init__(self, source: ArraySource, item: str, selection: Selection):
        entry = source.record.items[item]
        assert entry.arrays is not None, "callers choose array items"
        self.source = source
        self.folder = source.folder
        self.name = item
        self._stored = entry.arrays.leaves
        chosen = selection.paths(self.where, [leaf.path for leaf in self._stored])
        self._numbers = list(chosen)
        self.cast: dict[str, str] = {}  # the dtypes that leaves had, by their new names
        leaves = []
        for number, path in chosen.items():
            leaf = self._stored[number]
            name = leaf.name if path == leaf.path else tree_lib.leaf_name(path)
            dtype = selection.cast_to(leaf.dtype)
            grid = -1 if leaf.dtype is None else 0
            if leaf.dtype is not None and dtype != leaf.dtype:
                self.cast[_text.readable(name)] = leaf.dtype.name
            # a step of stock Orbax has no table of them, and Orbax restores no jax array without
            sharding = leaf.sharding if leaf.sharding < len(entry.arrays.shardings) else -1
            kind = "numpy" if leaf.kind == "jax" and sharding < 0 else leaf.kind
            leaves.append(Leaf(path, name, kind, dtype, leaf.shape, grid, 0, sharding, leaf.impl))
        self.arrays = dataclasses.replace(entry.arrays, name=item, leaves=tuple(leaves), grids=(Grid((), ((0,),)),))
        python = {new for new, leaf in enumerate(leaves) if leaf.kind in tree_lib.VALUE_KINDS}
        values = {new: entry.values[old] for new, old in enumerate(self._numbers) if new in python}
        recorded = dataclasses.replace(entry, arrays=self.arrays, values=values)
        self.record = dataclasses.replace(source.record, items={item: recorded}, nodes=(), objects=False)

    @property
    def where(self) -> str:
        """The item, as errors name it."""
        return f"checkpoint {self.source.record.epoch}, item {self.name!r}"

    def read(self, requests: Sequence[Request], packs: Sequence[Pack] = ()) -> None:
        """See `EpochReader.read`; leaves that are cast are also held in their stored form."""
        assert not packs, "no restore reads from here"
        wanted = list[Request]()
        cast = list[tuple[np.ndarray, np.ndarray]]()
        for item, leaf, box, out in requests:
            number = self._numbers[leaf]
            if (dtype := self._stored[number].dtype) != out.dtype:
                stored = np.empty(out.shape, dtype)
                cast.append((out, stored))
                out = stored
            wanted.append(Request(item, number, box, out))
        self.source.read(wanted)
        with np.errstate(all="ignore"):  # what does not fit becomes infinite, as in JAX
            for out, stored in cast:
                np.copyto(out, stored, casting="unsafe")

    def check_files(self, item: str, leaf: int, box: Box) -> None:
        """See `EpochReader.check_files`."""
        self.source.check_files(item, self._numbers[leaf], box)


def say_cast(cast: Mapping[str, str], dtype: object) -> str:
    """Which leaves were cast: `3 leaves of float32 and 1 leaf of float64 cast to bfloat16`."""
    counts = collections.Counter(cast.values())
    parts = [f"{several(count, 'leaf', 'leaves')} of {before}" for before, count in sorted(counts.items())]
    return f"{' and '.join(parts)} cast to {dtype}" if parts else ""
