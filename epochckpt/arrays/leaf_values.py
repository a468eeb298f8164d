"""The values of restored leaves: casts, conversions to types of Python, and arrays on devices."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from epochckpt.arrays.casts import converted, keeps_kind, survives
from epochckpt.arrays.targets import RestoredAs, RestoredLeaf
from epochckpt.errors import FormatError, Mismatch
from epochckpt.format import Box, Leaf
from epochckpt.format import tree as tree_lib


class LeafValues:
    """Makes the values of one item's leaves, and notes what the requested types cannot hold.

    Args:
        where: the file that errors name.
        recorded: the JSON forms of the item's Python values, by leaf number.
    """

    def __init__(self, where: str, recorded: Mapping[int, Any]):
        self.mismatches: list[Mismatch] = []
        self._where = where
        self._recorded = recorded

    def of_buffer(self, leaf: Leaf, request: RestoredLeaf, data: np.ndarray) -> Any:
        """The value of a leaf that one buffer holds."""
        if request.restored_as == RestoredAs.PYTHON and leaf.kind in ("longstr", "longbytes"):
            return self._long(leaf, data)
        data = self.cast(leaf, data, request.dtype)
        if request.restored_as == RestoredAs.NUMPY:
            return data
        scalar = data[()]
        return self._convert(leaf, scalar, request.python_type) if request.restored_as == RestoredAs.PYTHON else scalar

    def _long(self, leaf: Leaf, data: np.ndarray) -> str | bytes:
        """A text, or bytes, too long for the record."""
        raw = data.tobytes()
        try:
            return raw.decode("utf-8", "surrogatepass") if leaf.kind == "longstr" else raw
        except UnicodeDecodeError as error:
            raise FormatError(self._where, f"leaf {leaf.name!r} is no text: {error}") from None

    def of_record(self, leaf: Leaf, request: RestoredLeaf) -> Any:
        """A recorded Python value, or an empty container, in the requested form."""
        if leaf.kind in tree_lib.EMPTY_KINDS:
            return tree_lib.empty_value(leaf.kind)
        value = tree_lib.value_from_json(self._where, leaf.kind, self._recorded[request.leaf])
        if request.restored_as == RestoredAs.PYTHON:
            return self._convert(leaf, value, request.python_type)
        try:
            data = self.cast(leaf, np.asarray(value), request.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            self.mismatches.append(
                Mismatch(leaf.name, "value", f"{leaf.kind} {value!r:.40}", f"{request.dtype} ({error})")
            )
            return None
        if request.restored_as == RestoredAs.JAX and not self.mismatches:
            if request.sharding is None:
                return jax.device_put(data)
            return jax.make_array_from_callback((), request.sharding, lambda index: data[index], dtype=data.dtype)
        return data if request.restored_as == RestoredAs.NUMPY else data[()]

    def _convert(self, leaf: Leaf, value: Any, kind: type | None) -> Any:
        """A scalar as a Python type; notes a mismatch if the type cannot hold it exactly."""
        if kind is None or type(value) is kind:
            return value
        plain = value.item() if isinstance(value, np.generic) else value
        try:
            out = kind(plain)
        except (TypeError, ValueError, OverflowError):
            out = None
        nan = plain != plain
        if out is None or (kind not in (float, complex) if nan else out != plain):
            expected = f"{kind.__name__}, which cannot hold it exactly"
            self.mismatches.append(Mismatch(leaf.name, "value", f"{plain!r:.40}", expected))
        return out

    def cast(self, leaf: Leaf, data: np.ndarray, dtype: Any) -> np.ndarray:
        """An array with another dtype; notes a mismatch if the kind changes and not every value survives."""
        if dtype is None or data.dtype == dtype:
            return data
        with np.errstate(all="ignore"):
            out = converted(data, dtype)
            precision_only = keeps_kind(data.dtype, dtype, (np.complexfloating, np.floating))
            if not precision_only and not survives(data, out):
                expected = f"{np.dtype(dtype)}: not every value survives the cast"
                self.mismatches.append(Mismatch(leaf.name, "dtype", str(data.dtype), expected))
        return out


def on_devices(leaf: Leaf, request: RestoredLeaf, host: np.ndarray) -> jax.Array:
    """An array all of whose devices here hold one box, from the host's buffer of that box; typed keys of their data.

    JAX needs half the time for the call with a function that it needs for `device_put` and
    `make_array_from_single_device_arrays`, and a fifth where there are eight devices.
    """
    if request.sharding is None:
        return uncommitted([leaf], [host])[0]
    sharding = _sharding(leaf, request.sharding)
    if _stays_weak(leaf, host):
        if sharding.is_fully_addressable:
            return jax.device_put(host.item(), sharding)
        if isinstance(sharding, NamedSharding) and _is_everywhere(sharding):
            return _weak_scalar(host.item(), sharding)
    if isinstance(sharding, SingleDeviceSharding) and sharding.memory_kind not in (None, "device"):
        data = jax.device_put(host, sharding)  # whose type, unlike that of the call below, names the memory
    else:
        dtype = request.dtype or leaf.dtype
        data = jax.make_array_from_callback(request.shape(leaf), sharding, lambda index: host, dtype=dtype)
    return _typed(leaf, data)


def boxes_on_devices(leaf: Leaf, request: RestoredLeaf, hosts: Mapping[Box, np.ndarray]) -> jax.Array:
    """An array of any boxes on its devices here, from the host's buffers of these boxes; see `on_devices`."""
    if len(hosts) == 1:
        (host,) = hosts.values()
        return on_devices(leaf, request, host)
    shape = request.shape(leaf)
    assert request.sharding is not None, "such an array has one box"
    sharding = _sharding(leaf, request.sharding)
    dtype = request.dtype or leaf.dtype

    def host_of(index: Any) -> np.ndarray:  # a slice per axis
        return hosts[tuple([cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True)])]

    if hosts:
        data = jax.make_array_from_callback(shape, sharding, host_of, dtype=dtype)
    else:  # no device of this process has a part; JAX would ask for one of replicated arrays
        data = jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    return _typed(leaf, data)


def uncommitted(leaves: Sequence[Leaf], hosts: Sequence[np.ndarray]) -> list[jax.Array]:
    """Arrays that are committed to no device, from the host's buffers; typed keys of their data.

    JAX needs half the time for a list of arrays that it needs for one after the other.
    """
    values = [host.item() if _stays_weak(leaf, host) else host for leaf, host in zip(leaves, hosts, strict=True)]
    arrays = jax.device_put(values)
    return [_typed(leaf, data) for leaf, data in zip(leaves, arrays, strict=True)]


def _stays_weak(leaf: Leaf, host: np.ndarray) -> bool:
    """Whether an array gets a weak dtype back: a scalar, as JAX makes no others of numbers, that was not cast."""
    if not leaf.weak_type or host.shape or host.dtype != leaf.dtype:
        return False
    value = host.item()
    if jax.dtypes.result_type(value) != leaf.dtype:  # jax_enable_x64 has been switched since the save
        return False
    return np.asarray(value, leaf.dtype).tobytes() == host.tobytes()  # there are NaNs that Python has not


def _is_everywhere(sharding: Sharding) -> bool:
    """Whether each process of the job has a device of it, so that all of them can make an array in the same way."""
    return len({device.process_index for device in sharding.device_set}) == jax.process_count()


def _weak_scalar(value: Any, sharding: NamedSharding) -> jax.Array:
    """A Python number on devices of all processes; `device_put` would ask the other processes for theirs."""
    assert isinstance(sharding.mesh, Mesh), "arrays lie on devices"
    with jax.set_mesh(sharding.mesh):  # another one may be set, of more devices
        return jax.jit(_same, out_shardings=sharding)(value)


def _same(value: jax.Array) -> jax.Array:
    return value


def _typed(leaf: Leaf, data: jax.Array) -> jax.Array:
    """The value of a leaf whose data is on its devices: typed keys of their data."""
    return jax.random.wrap_key_data(data, impl=leaf.impl) if leaf.kind == "prng" else data


def _sharding(leaf: Leaf, sharding: Sharding) -> Sharding:
    """The sharding of the data of a leaf."""
    if leaf.kind == "prng" and isinstance(sharding, NamedSharding):  # the dimensions of key data are not split
        spec = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
        return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
    return sharding
