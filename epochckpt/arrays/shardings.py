"""The recorded shardings of an item, built again on the devices of this job."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from epochckpt.errors import FormatError
from epochckpt.format import ArrayItem, Leaf


class Uncommitted:
    """The place of an array that was placed nowhere: the default device, and JAX may use it on any other."""


UNCOMMITTED = Uncommitted()


class Shardings:
    """The recorded shardings of an item, as far as their devices exist in this job.

    Args:
        fallback: for arrays whose devices do not exist here.
        mesh: the mesh that is set. It stands for the recorded one if that has the same axes.
    """

    def __init__(self, item: ArrayItem, fallback: Sharding | None = None, mesh: Mesh | None = None):
        self._item = item
        self._fallback = fallback
        self._mesh = None if mesh is None or mesh.empty else mesh
        self._recorded: dict[int, Sharding | None] = {}  # a cache of a method would be a cycle of references
        self._meshes: dict[int, Mesh] = {}

    def of(self, leaf: Leaf) -> Sharding | None:
        """The sharding that a leaf was saved with, else the fallback, else None."""
        if leaf.sharding < 0:
            return self._fallback
        if leaf.sharding not in self._recorded:
            self._recorded[leaf.sharding] = self._build(leaf.sharding)
        found = self._recorded[leaf.sharding]
        shape = logical_shape(leaf)
        return found if found is not None and divides(found, shape) else self._fallback

    def place_of(self, leaf: Leaf) -> Sharding | Uncommitted | None:
        """Where a leaf was saved: `UNCOMMITTED`, or else what `of` gives."""
        return UNCOMMITTED if self.is_uncommitted(leaf) else self.of(leaf)

    def is_uncommitted(self, leaf: Leaf) -> bool:
        """Whether an array was placed nowhere, so that JAX may use it on any device."""
        return self._item.is_uncommitted(leaf)

    def would_lie_at(self, leaf: Leaf, sharding: Sharding) -> bool:
        """Whether a sharding is where JAX shows an array that was placed nowhere: then it asks for no place.

        It is the device of the save, or the first one if that is not here. In a job of several processes each shows a
        device of its own; an array that is committed to one of them is of no use there.
        """
        if not self.is_uncommitted(leaf) or not isinstance(sharding, SingleDeviceSharding):
            return False
        (device,) = sharding.device_set
        if sharding.memory_kind not in (None, device.default_memory().kind):
            return False
        if jax.process_count() > 1:
            return device.process_index == jax.process_index()
        saved = self.of(leaf)
        (there,) = saved.device_set if isinstance(saved, SingleDeviceSharding) else jax.local_devices()[:1]
        return device == there

    @functools.cached_property
    def _devices(self) -> dict[tuple[str, int], Any]:
        return {(d.platform, d.id): d for d in jax.devices()}

    def _build(self, number: int) -> Sharding | None:
        try:
            row = self._item.shardings[number]
            if "device" not in row:
                spec = PartitionSpec(*[tuple(e) if isinstance(e, list) else e for e in row["spec"]])
                if row["mesh"] not in self._meshes:
                    self._meshes[row["mesh"]] = self._build_mesh(row["mesh"])
                return NamedSharding(self._meshes[row["mesh"]], spec, memory_kind=row["memory"])
            if jax.process_count() > 1:
                return None
            return SingleDeviceSharding(self._devices[row["platform"], row["device"]], memory_kind=row["memory"])
        except Exception:  # jax raises many types, even bad_cast, for a row that it cannot express
            return None

    def _build_mesh(self, number: int) -> Mesh:
        mesh = self._item.meshes[number]
        if self._mesh is not None and [*self._mesh.axis_names] == mesh["axes"] and len(self._item.meshes) == 1:
            return self._mesh
        devices = [self._devices[mesh["platform"], d] for d in mesh["devices"]]
        if len(set(devices)) != len(devices):
            raise ValueError("a mesh with one device in two places")
        types = tuple(AxisType[t] for t in mesh["axis_types"])
        return Mesh(np.array(devices).reshape(mesh["shape"]), tuple(mesh["axes"]), axis_types=types)


def divides(sharding: Sharding, shape: Sequence[int]) -> bool:
    """Whether a sharding divides an array of this shape evenly."""
    try:
        sharding.shard_shape(tuple(shape))
    except (ValueError, IndexError):
        return False
    return True


def logical_shape(leaf: Leaf) -> tuple[int, ...]:
    """Shape of a leaf; of typed keys without the dimensions of their data."""
    return leaf.shape[: len(leaf.shape) - key_dims(leaf)] if leaf.kind == "prng" else leaf.shape


def of_keys(sharding: Sharding | None, leaf: Leaf) -> Sharding | None:
    """The sharding of typed keys, given that of their data, which has the dimensions of a key in addition."""
    rank = len(leaf.shape) - key_dims(leaf)
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= rank:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:rank]), memory_kind=sharding.memory_kind)


def key_dims(leaf: Leaf) -> int:
    """Trailing dimensions of a leaf of typed keys that are the data of one key; FormatError if jax has no such keys."""
    try:
        inner = jax.eval_shape(jax.random.key_data, abstract_key(leaf))
    except (ValueError, TypeError) as error:
        problem = f"leaf {leaf.name!r}: this jax has no PRNG implementation {leaf.impl!r}"
        raise FormatError("epoch.json", problem) from error
    if inner.dtype != leaf.dtype or leaf.shape[max(0, len(leaf.shape) - inner.ndim) :] != inner.shape:
        problem = f"leaf {leaf.name!r}: {leaf.dtype}{list(leaf.shape)} is no {leaf.impl} key data"
        raise FormatError("epoch.json", problem)
    return inner.ndim


def abstract_key(leaf: Leaf) -> Any:
    """A description of one typed key with the implementation of a leaf of keys."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=leaf.impl))
