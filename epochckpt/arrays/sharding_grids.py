"""The regular grids in which shardings of jax cut arrays: which cell, and so which box, each device holds."""

import math
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding

from epochckpt.format import Box
from epochckpt.format.grid import cell_box


class ShardingGrid(NamedTuple):
    """The regular grid of a sharding."""

    counts: tuple[int, ...]  # cells per dimension
    devices: np.ndarray  # of one mesh always the same object
    cells: np.ndarray  # the cell of each device; int64, flat


def grid_of(sharding: Any, shape: tuple[int, ...]) -> ShardingGrid:
    """The grid in which a sharding cuts an array of this shape."""
    if isinstance(sharding, NamedSharding):  # arithmetic over the mesh: JAX's map of devices to indices is slower
        mesh: Any = sharding.mesh
        sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        where = dict(zip(mesh.axis_names, np.indices(mesh.devices.shape), strict=True))
        spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        counts = []
        cell = np.zeros(mesh.devices.shape, dtype=np.int64)
        for entry in spec:
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            for axis in axes:
                cell = cell * sizes[axis] + where[axis]
            counts.append(math.prod(sizes[axis] for axis in axes))
        return ShardingGrid(tuple(counts), mesh.devices, cell.ravel())
    piece = sharding.shard_shape(shape)
    counts = tuple(d // p if p else 1 for d, p in zip(shape, piece, strict=True))
    cells = {}
    for device, index in sharding.devices_indices_map(shape).items():
        at = [s.indices(d)[0] // p if p else 0 for s, d, p in zip(index, shape, piece, strict=True)]
        cells[device] = int(np.ravel_multi_index(at, counts)) if shape else 0
    return ShardingGrid(counts, np.array([*cells], dtype=object), np.array([*cells.values()], np.int64))


def device_cells(sharding: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], dict[Any, int]]:
    """The regular grid of a sharding: cells per dimension, and the cell that each device holds."""
    counts, devices, cells = grid_of(sharding, shape)
    return counts, dict(zip(devices.flat, cells.tolist(), strict=True))


def boxes_of_devices(sharding: Any, shape: tuple[int, ...]) -> dict[Any, Box]:
    """The box that each addressable device holds, for an array of this shape and sharding."""
    counts, cells = device_cells(sharding, shape)
    piece = [d // c for d, c in zip(shape, counts, strict=True)]
    return {device: cell_box(cells[device], counts, piece) for device in sharding.addressable_devices}
