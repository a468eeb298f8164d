"""What the bytes of an epoch mean: names and paths, the tree, records, grids, checksums, foreign file formats.

Promises: pure functions and frozen values; no policy, and no I/O but the reading of files that are handed in. Whatever
is parsed here may be damaged or hostile, and every error says where it lies.
"""

from epochckpt.format.grid import ArrayItem, Box, Grid, Leaf, NodeCells, PartCells
from epochckpt.format.items import ItemKind, ItemRecord
from epochckpt.format.nodes import Nodes
from epochckpt.format.records import DataFile, EpochRecord, NodeEntry, NodeRecord, RunEntry
from epochckpt.format.tree import KeyPath

__all__ = [
    "ArrayItem",
    "Box",
    "DataFile",
    "EpochRecord",
    "Grid",
    "ItemKind",
    "ItemRecord",
    "KeyPath",
    "Leaf",
    "NodeCells",
    "NodeEntry",
    "NodeRecord",
    "Nodes",
    "PartCells",
    "RunEntry",
]
