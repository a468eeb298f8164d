"""Restores an item: what is wanted (targets), what to read for it (node_reader), and how it goes onto devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import SingleDeviceSharding

from epochckpt import _text, _units
from epochckpt._text import readable, shown
from epochckpt.arrays import plan as plan_lib
from epochckpt.arrays.reader import Request
from epochckpt.arrays.renaming import Sources
from epochckpt.arrays.targets import LeafRequest, Matcher, Shardings, describe_leaf, key_dims, without_target
from epochckpt.errors import FormatError, InvalidArgumentError, Mismatch, MismatchError, UnknownNameError
from epochckpt.format import ArrayItem, Box, EpochRecord, Leaf
from epochckpt.format import tree as tree_lib
from epochckpt.format.grid import whole

_NAMED = 5
_ALIGNMENT = 64  # jax takes a NumPy buffer over without copying when it is aligned to this
_ALIGN_FROM = 64 * 1024


@dataclasses.dataclass(frozen=True)
class TreeRequest:
    """What to restore of an array item.

    Attributes:
        target: pytree of what is expected, or None for the tree as it was saved.
        restore_args: pytree of `ocp.RestoreArgs` over the target (or alone), or None.
        partial: see `Matcher.match`.
        fallback_sharding: for arrays whose saved sharding does not exist here.
        layouts: arrays get the device-local layout that the target's leaves ask for.
        resize: arrays of another shape are cut, or padded with zeros, to the target's.
        sources: says which recorded leaf each leaf of the target is restored from; None: the one of its name.
    """

    target: Any = None
    restore_args: Any = None
    partial: bool = False
    fallback_sharding: Any = None
    layouts: bool = False
    resize: bool = False
    sources: Sources | None = None


class ArraySource(Protocol):
    """What a restore reads from: `EpochReader` for epochs of ours."""

    folder: str

    @property
    def record(self) -> EpochRecord:
        """The epoch's record, which describes at least the item that is restored."""
        ...

    def read(self, requests: Sequence[Request]) -> None:
        """See `EpochReader.read`."""
        ...

    def check_files(self, item: str, leaf: int, box: Box) -> None:
        """See `EpochReader.check_files`."""
        ...


def restore_tree(reader: ArraySource, name: str, request: TreeRequest, shardings: Shardings | None = None) -> Any:
    """Restores one array item; `shardings` are those that it was saved with, if its record does not have them.

    Raises:
        MismatchError: the target does not fit; lists every leaf that does not.
        DamagedError: bytes differ from what was written.
    """
    item = reader.record.items[name].arrays
    assert item is not None, "callers choose array items"
    shardings = shardings or Shardings(item, request.fallback_sharding)
    treedef = None
    if request.target is None and request.restore_args is None:
        wants = without_target(item, shardings)
    else:
        wants, treedef = match(reader.record.epoch, name, item, request, shardings)
    leaves = _Assembly(reader, name, item).run(wants)
    if treedef is not None:
        tree = tree_lib.unflatten(treedef, leaves)
        return jax.tree.map(laid_out, tree, request.target) if request.layouts else tree
    where = f"{reader.folder}/epoch.json"
    return tree_lib.nest([(leaf.path, value) for leaf, value in zip(item.leaves, leaves, strict=True)], where)


def laid_out(leaf: Any, target: Any) -> Any:
    """An array in the device-local layout that its target asks for, if it asks for one."""
    wanted = getattr(target, "format", None)
    asks = isinstance(leaf, jax.Array) and getattr(wanted, "layout", None) is not None
    return jax.device_put(leaf, wanted) if asks else leaf


def match(
    epoch: int, name: str, item: ArrayItem, request: TreeRequest, shardings: Shardings
) -> tuple[list[LeafRequest], Any]:
    """What each leaf of the target wants, and the treedef that puts them together; MismatchError if it does not fit."""
    matcher = Matcher(item, shardings, request.resize)
    pairs, treedef = tree_lib.flatten(request.target if request.target is not None else request.restore_args)
    given = None if request.target is None else _restore_args(name, request.restore_args)
    sources = None if request.sources is None else request.sources(item.leaves, [path for path, _ in pairs])
    wants = matcher.match(pairs, request.partial, given, sources)
    if matcher.rows:
        raise MismatchError(name, epoch, matcher.rows)
    if matcher.absent and sources is None:
        _tell_absent(f"epoch {epoch}, item {name}", matcher.absent, item.public_names)
    for leaf, shape in matcher.resized.items():
        saved = describe_leaf(item.leaves[leaf])
        message = "epoch %d, item %s: leaf %s, %s, is cut or padded with zeros to %s, as strict=False asks"
        logging.warning(message, epoch, name, item.leaves[leaf].name, saved, list(shape))
    return wants, treedef


def _tell_absent(where: str, absent: Sequence[str], known: Sequence[str]) -> None:
    """Names the leaves that a partial restore leaves as they are: one of them may be misspelt."""
    said = []
    for name in map(readable, absent[:_NAMED]):
        close = _text.near_names(name, known)
        said.append(f"{shown(name)!r}" + (f" (near: {', '.join(repr(shown(n)) for n in close[:3])})" if close else ""))
    more = [f"… {len(absent) - _NAMED} more"] if len(absent) > _NAMED else []
    what = _units.several(len(absent), "leaf", "leaves")
    logging.warning("%s: %s of the target not in it, left as given: %s", where, what, ", ".join([*said, *more]))


def _restore_args(item: str, tree: Any) -> dict[str, ocp.RestoreArgs]:
    """The `ocp.RestoreArgs` of each leaf by name: None, or an empty container, stands for the defaults."""
    found = {}
    for path, args in tree_lib.flatten(tree)[0] if tree is not None else ():
        where = tree_lib.leaf_name(path)
        if tree_lib.leaf_kind(args) in tree_lib.EMPTY_KINDS:
            args = ocp.RestoreArgs()
        if not isinstance(args, ocp.RestoreArgs):
            problem = f"restore_args has a {type(args).__name__} at {where!r}; expected ocp.RestoreArgs"
            raise InvalidArgumentError(f"item {item!r}: {problem}")
        found[where] = args
    return found


def matching(where: str, leaves: Sequence[Leaf], patterns: str | Sequence[str]) -> list[int]:
    """Numbers of the leaves whose names match any of the shell patterns.

    Args:
        where: the item, for messages.
        leaves: its leaves.
        patterns: one or several.

    Raises:
        UnknownNameError: one of the patterns matches no leaf; names those that are near.
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    names = _text.public(leaf.name for leaf in leaves)
    found: set[int] = set()
    for pattern in wanted:
        numbers = _text.matching(names, pattern)
        if names and not numbers:
            raise UnknownNameError(f"{where}: {_text.no_match(pattern, names)}")
        found.update(numbers)
    return sorted(found)


def read_leaves(reader: ArraySource, name: str, patterns: str | Sequence[str]) -> dict[str, Any]:
    """Leaves whose names match any of the shell patterns, as NumPy arrays and Python values, by name."""
    item = reader.record.items[name].arrays
    assert item is not None, "callers choose array items"
    chosen = matching(f"epoch {reader.record.epoch}, item {name!r}", item.leaves, patterns)
    return dict(zip((item.public_names[i] for i in chosen), read_values(reader, name, chosen), strict=True))


def read_values(reader: ArraySource, name: str, numbers: Sequence[int]) -> list[Any]:
    """The leaves with these numbers, as NumPy arrays and Python values; typed keys as their data."""
    item = reader.record.items[name].arrays
    assert item is not None, "callers choose array items"

    def request(number: int) -> LeafRequest:
        leaf = item.leaves[number]
        if leaf.kind in tree_lib.EMPTY_KINDS:
            return LeafRequest(-1, "keep", value=tree_lib.empty_value(leaf.kind))
        return LeafRequest(number, "python" if leaf.dtype is None or leaf.kind[:4] == "long" else "numpy")

    return _Assembly(reader, name, item).run([request(number) for number in numbers])


class _Assembly:
    """Reads what is wanted and puts it together."""

    def __init__(self, reader: ArraySource, name: str, item: ArrayItem):
        self.reader, self.name, self.item = reader, name, item
        self.requests: list[Request] = []
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []  # of buffers larger than what is read into them
        self.rows: list[Mismatch] = []

    def run(self, wants: Sequence[LeafRequest]) -> list[Any]:
        plans = [self._plan(w) for w in wants]
        self.reader.read(self.requests)
        for place, part in self.parts:
            place[...] = part
        hosts: list[np.ndarray] = []
        places: list[Any] = []
        for want, boxes in zip(wants, plans, strict=True):
            for buffer, devices in boxes if isinstance(boxes, list) else ():
                hosts += [self._cast(self.item.leaves[want.leaf], buffer, want.dtype)] * len(devices)
                places += devices
        self._refuse()
        placed = iter(jax.device_put(hosts, places) if hosts else [])
        out = [self._finish(want, boxes, placed) for want, boxes in zip(wants, plans, strict=True)]
        self._refuse()
        return out

    def _refuse(self) -> None:
        if self.rows:
            raise MismatchError(self.name, self.reader.record.epoch, self.rows)

    def _plan(self, want: LeafRequest) -> Any:
        """Where the bytes of one leaf go: [(buffer, devices), …] for jax, a buffer otherwise, None without bytes."""
        if want.leaf < 0 or self.item.leaves[want.leaf].dtype is None:
            return None
        leaf = self.item.leaves[want.leaf]
        shape = leaf.shape if want.shape is None else want.shape
        if want.form != "jax":
            return self._request(want.leaf, whole(shape))
        inner = key_dims(leaf) if leaf.kind == "prng" else 0
        if want.sharding is None or isinstance(want.sharding, SingleDeviceSharding):
            device = want.sharding if want.sharding is not None else jax.local_devices()[0]
            return [(self._request(want.leaf, whole(shape)), [device])]
        logical = shape[: len(shape) - inner]
        boxes: dict[Box, list[Any]] = {}
        for device, box in plan_lib.boxes_of_devices(want.sharding, logical).items():
            full = box + whole(shape[len(box) :])
            boxes.setdefault(full, []).append(_place(device, want.sharding))
        return [(self._request(want.leaf, box), devices) for box, devices in boxes.items()]

    def _request(self, leaf: int, box: Box) -> np.ndarray:
        """A buffer for a box of a leaf; where the box reaches over the leaf's end, zeros."""
        info = self.item.leaves[leaf]
        assert info.dtype is not None
        inside = tuple((min(a, n), min(b, n)) for (a, b), n in zip(box, info.shape, strict=True))
        read = inside == box or all(a < b for a, b in inside)
        if read:
            self.reader.check_files(self.name, leaf, inside)  # before memory is taken
        out = _empty([b - a for a, b in inside], info.dtype)
        if read:
            self.requests.append(Request(self.name, leaf, inside, out))
        if inside == box:
            return out
        padded = np.zeros([b - a for a, b in box], info.dtype)
        self.parts.append((padded[tuple(slice(0, n) for n in out.shape)], out))
        return padded

    def _finish(self, want: LeafRequest, data: Any, placed: Any) -> Any:
        if want.leaf < 0:
            return want.value
        leaf = self.item.leaves[want.leaf]
        if isinstance(data, list):
            arrays = [next(placed) for _, devices in data for _ in devices]
            return _join(leaf, want, arrays)
        if data is None:
            return self._value(leaf, want)
        if want.form == "python" and leaf.kind in ("longstr", "longbytes"):
            raw = data.tobytes()
            try:
                return raw.decode("utf-8", "surrogatepass") if leaf.kind == "longstr" else raw
            except UnicodeDecodeError as error:
                problem = f"leaf {leaf.name!r} is no text: {error}"
                raise FormatError(f"{self.reader.folder}/epoch.json", problem) from None
        data = self._cast(leaf, data, want.dtype)
        if want.form == "numpy":
            return data
        return self._convert(leaf, data[()], want.kind) if want.form == "python" else data[()]

    def _value(self, leaf: Leaf, want: LeafRequest) -> Any:
        raw = self.reader.record.items[self.name].values[want.leaf]
        value = tree_lib.value_from_json(f"{self.reader.folder}/epoch.json", leaf.kind, raw)
        if want.form == "python":
            return self._convert(leaf, value, want.kind)
        try:
            array = np.asarray(value)
            cast = self._cast(leaf, array, want.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            self.rows.append(Mismatch(leaf.name, "value", f"{leaf.kind} {value!r:.40}", f"{want.dtype} ({error})"))
            return None
        if want.form == "jax" and want.sharding is not None:
            return jax.make_array_from_callback((), want.sharding, lambda index: cast[index], dtype=cast.dtype)
        return cast if want.form == "numpy" else cast[()]

    def _convert(self, leaf: Leaf, value: Any, kind: type | None) -> Any:
        return convert(self.rows, leaf, value, kind)

    def _cast(self, leaf: Leaf, data: np.ndarray, dtype: Any) -> np.ndarray:
        return cast(self.rows, leaf, data, dtype)


def convert(rows: list[Mismatch], leaf: Leaf, value: Any, kind: type | None) -> Any:
    """A scalar as a Python type; adds a row if that cannot hold it exactly."""
    if kind is None or type(value) is kind:
        return value
    plain = value.item() if isinstance(value, np.generic) else value
    try:
        out = kind(plain)
    except (TypeError, ValueError, OverflowError):
        out = None
    nan = plain != plain
    if out is None or (kind not in (float, complex) if nan else out != plain):
        rows.append(Mismatch(leaf.name, "value", f"{plain!r:.40}", f"{kind.__name__}, which cannot hold it exactly"))
    return out


def cast(rows: list[Mismatch], leaf: Leaf, data: np.ndarray, dtype: Any) -> np.ndarray:
    """An array with another dtype; adds a row if more than precision changes and not every value survives."""
    if dtype is None or data.dtype == dtype:
        return data
    with np.errstate(all="ignore"):
        out = _astype(data, dtype)
        if not only_precision(data.dtype, dtype) and not _survives(data, out):
            expected = f"{np.dtype(dtype)}: not every value survives the cast"
            rows.append(Mismatch(leaf.name, "dtype", str(data.dtype), expected))
    return out


def _join(leaf: Leaf, want: LeafRequest, arrays: list[jax.Array]) -> jax.Array:
    """Puts the parts on each device together as one array (typed keys: as keys)."""
    if want.sharding is None or isinstance(want.sharding, SingleDeviceSharding):
        data = arrays[0]
    else:
        sharding = want.sharding
        if leaf.kind == "prng":
            sharding = _with_key_dims(sharding, leaf)
        shape = leaf.shape if want.shape is None else want.shape
        data = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=want.dtype or leaf.dtype)
    return jax.random.wrap_key_data(data, impl=leaf.impl) if leaf.kind == "prng" else data


def _with_key_dims(sharding: Any, leaf: Leaf) -> Any:
    """The sharding of key data, given that of the keys: more dimensions, not split."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
        return jax.sharding.NamedSharding(
            sharding.mesh, jax.sharding.PartitionSpec(*spec), memory_kind=sharding.memory_kind
        )
    return sharding


def _place(device: Any, sharding: Any) -> Any:
    kind = sharding.memory_kind
    return (
        device
        if kind is None or kind == device.default_memory().kind
        else SingleDeviceSharding(device, memory_kind=kind)
    )


def _empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised C-contiguous array, aligned so that jax can take it over without a copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if nbytes < _ALIGN_FROM:
        return np.empty(shape, dtype)
    raw = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def only_precision(before: Any, after: Any) -> bool:
    """Whether a cast changes the precision only: float to float, or complex to complex."""
    kinds = (np.complexfloating, np.floating)
    return any(tree_lib.issubdtype(before, kind) and tree_lib.issubdtype(after, kind) for kind in kinds)


def _astype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A cast; complex to real keeps the real part, without NumPy's warning: `_survives` looks at the rest."""
    if tree_lib.issubdtype(array.dtype, np.complexfloating) and not tree_lib.issubdtype(dtype, np.complexfloating):
        array = np.real(array)
    return array.astype(dtype)


def _survives(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether a cast kept every value exactly, in both directions."""
    back = _astype(after, before.dtype)
    same = (back == before) | ((back != back) & (before != before))
    wide = [a.astype(np.float64) if a.dtype.itemsize < 4 else a for a in (before, after)]
    equal = (wide[0] == wide[1]) | ((wide[0] != wide[0]) & (wide[1] != wide[1]))
    return bool(np.all(same & equal))
