"""Restores an item: matches the target (`targets`), reads the bytes (`reader`), and places arrays on devices."""

import dataclasses
import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from epochckpt import _collector, _progress, _text, _units
from epochckpt._text import readable, shown
from epochckpt.arrays import mismatches
from epochckpt.arrays import plan as plan_lib
from epochckpt.arrays.broadcast import Sharing, Source
from epochckpt.arrays.node_files import Pack
from epochckpt.arrays.reader import EpochReader, Request, read_together
from epochckpt.arrays.renames import Sources
from epochckpt.arrays.shardings import Shardings, key_dims
from epochckpt.arrays.targets import LeafRequest, Matcher, RestoredForm, as_saved, describe_leaf
from epochckpt.errors import FormatError, InvalidArgumentError, Mismatch, MismatchError, UnknownNameError
from epochckpt.format import ArrayItem, Box, EpochRecord, Leaf
from epochckpt.format import tree as tree_lib
from epochckpt.format.grid import box_shape, whole
from epochckpt.storage.mmap import JAX_ALIGNMENT, aligned, fresh

T = TypeVar("T")
Reads = tuple[Sequence[Request], Sequence[Pack]]
"""What is to be read of one reader."""

_NAMED = 5
_ALIGN_FROM = 64 * 1024
_MAP_FROM = 2**20
_PACKED_BELOW = 16 * 2**20
_PACK_BYTES = 32 * 2**20  # of whole leaves that share memory; an array on a CPU may keep all of it


@dataclasses.dataclass(frozen=True)
class TreeRequest:
    """What to restore of an array item."""

    target: Any = None  # pytree of expected leaves; None for the tree as it was saved
    restore_args: Any = None  # pytree of `ocp.RestoreArgs` like the target, or in its place
    partial: bool = False  # see `Matcher`
    needs_values: bool = False  # the same
    fallback_sharding: Any = None  # for arrays whose saved sharding does not exist here
    layouts: bool = False  # arrays get the device-local layout of the target's leaves
    resize: bool = False  # arrays of another shape are cut, or padded with zeros, to the target's shape
    sources: Sources | None = None  # gives the recorded leaf for each leaf of the target; None: the one of its name
    sharing: Sharing | None = None  # where the processes of the job share what they read
    memory_limit_bytes: int | None = None  # see `StorageOptions.restore_memory_limit_bytes`


class ArraySource(Protocol):
    """What a restore reads from: an `EpochReader`, which says what the methods do, or a step of stock Orbax."""

    folder: str

    @property
    def record(self) -> EpochRecord: ...  # it describes at least the item that is restored

    def read(self, requests: Sequence[Request], packs: Sequence[Pack] = ()) -> None: ...

    def check_files(self, item: str, leaf: int, box: Box) -> None: ...


def restore_tree(reader: ArraySource, name: str, request: TreeRequest, shardings: Shardings | None = None) -> Any:
    """Restores one array item; `shardings` are the saved ones, if the epoch's record lacks them."""
    return _read_alone(reader, _restoring(reader, name, request, shardings))


def restore_trees(readers: Sequence[EpochReader], name: str, requests: Sequence[TreeRequest]) -> list[Any]:
    """Restores the array item of each reader; all are read at the same time, but where memory is bounded."""
    if any(request.memory_limit_bytes is not None for request in requests):
        return [restore_tree(reader, name, request) for reader, request in zip(readers, requests, strict=True)]
    pairs = enumerate(zip(readers, requests, strict=True))
    restoring = {number: _restoring(reader, name, request) for number, (reader, request) in pairs}
    trees: list[Any] = [None] * len(readers)
    while restoring:
        asked = []
        for number, steps in [*restoring.items()]:
            try:
                asked.append((readers[number], *next(steps)))
            except StopIteration as end:
                trees[number] = end.value
                del restoring[number]
        if asked:
            read_together(asked)
    return trees


def _read_alone(reader: ArraySource, steps: Generator[Reads, None, T]) -> T:
    """Reads what each step asks for; returns the result of the last one."""
    while True:
        try:
            requests, packs = next(steps)
        except StopIteration as end:
            return end.value
        reader.read(requests, packs)
        del requests, packs  # they hold buffers, which the next step lets go of


def _restoring(
    reader: ArraySource, name: str, request: TreeRequest, shardings: Shardings | None = None
) -> Generator[Reads, None, Any]:
    """Restores a tree in steps, so that several trees can be read at the same time (`restore_trees`).

    Each step allocates buffers and yields what is to be read into them. The caller reads it, and only then asks for the
    next step, which builds the leaves of these buffers. There are several steps where memory is bounded. The generator
    returns the tree.
    """
    assembly = _Assembly(reader, name, request.sharing, request.memory_limit_bytes)
    item = assembly.item
    shardings = shardings or Shardings(item, request.fallback_sharding)
    if request.target is None and request.restore_args is None:
        leaves = yield from assembly.run([as_saved(i, leaf, shardings) for i, leaf in enumerate(item.leaves)])
        where = f"{reader.folder}/epoch.json"
        return tree_lib.nest([(leaf.path, value) for leaf, value in zip(item.leaves, leaves, strict=True)], where)

    with _collector.paused():
        requests, treedef = _match(name, item, reader.record.epoch, request, shardings)
    leaves = yield from assembly.run(requests)
    tree = tree_lib.unflatten(treedef, leaves)
    return jax.tree.map(_laid_out, tree, request.target) if request.layouts else tree


def _match(
    name: str, item: ArrayItem, epoch: int, request: TreeRequest, shardings: Shardings
) -> tuple[list[LeafRequest], Any]:
    """Matches every leaf of the target, before anything is read; all differences are reported together."""
    pairs, treedef = tree_lib.flatten(request.target if request.target is not None else request.restore_args)
    names = [tree_lib.leaf_name(path) for path, _ in pairs]
    given = {} if request.target is None else _restore_args(name, request.restore_args, names, treedef)
    sources = None if request.sources is None else request.sources(item.leaves, [path for path, _ in pairs])
    matcher = Matcher(item, shardings, request.resize, request.partial, request.needs_values)
    requests = matcher.match(names, [target for _, target in pairs], given, sources)
    if matcher.rows:
        renames = mismatches.suggested(matcher.rows, [leaf.name for leaf in item.leaves], names)
        raise MismatchError(name, epoch, matcher.rows, renames)
    _progress.note("missing", len(matcher.absent))
    if matcher.absent and sources is None:
        _log_absent(f"checkpoint {epoch}, item {name}", matcher.absent, item.public_names)
    for leaf, shape in ((item.leaves[r.leaf], r.shape) for r in requests if r.shape is not None):
        message = "checkpoint %d, item %s: leaf %s, %s, is cut or padded with zeros to %s, as strict=False asks"
        logging.warning(message, epoch, name, leaf.name, describe_leaf(leaf), list(shape))
    return requests, treedef


def _laid_out(leaf: Any, target: Any) -> Any:
    """An array in the device-local layout of its target, if that names one."""
    form = getattr(target, "format", None)
    named = isinstance(leaf, jax.Array) and getattr(form, "layout", None) is not None
    return jax.device_put(leaf, form) if named else leaf


def _log_absent(where: str, absent: Sequence[str], known: Sequence[str]) -> None:
    """Logs the leaves that a partial restore leaves as they are: a name may be misspelt."""
    names = []
    for name in map(readable, absent[:_NAMED]):
        close = ", ".join(repr(shown(near)) for near in _text.near_names(name, known)[:3])
        names.append(f"{shown(name)!r}" + (f" (near: {close})" if close else ""))
    names += [f"… {len(absent) - _NAMED} more"] if len(absent) > _NAMED else []
    what = _units.several(len(absent), "leaf", "leaves")
    logging.warning("%s: %s of the target not in it, left as given: %s", where, what, ", ".join(names))


def _restore_args(item: str, tree: Any, names: Sequence[str], treedef: Any) -> dict[str, ocp.RestoreArgs]:
    """The `ocp.RestoreArgs` of each leaf by name: None, or an empty container, stands for the defaults.

    The target has this structure, and leaves with these names; that of the arguments is the same, as a rule.
    """
    if tree is None:
        return {}
    listed, found_treedef = tree_lib.flatten_leaves(tree)
    if found_treedef != treedef:
        names = [tree_lib.leaf_name(path) for path, _ in tree_lib.flatten(tree)[0]]
    found = {}
    for where, args in zip(names, listed, strict=True):
        if not isinstance(args, ocp.RestoreArgs):
            if tree_lib.leaf_kind(args) not in tree_lib.EMPTY_KINDS:
                problem = f"restore_args has a {type(args).__name__} at {where!r}; expected ocp.RestoreArgs"
                raise InvalidArgumentError(f"item {item!r}: {problem}")
            args = ocp.RestoreArgs()
        found[where] = args
    return found


def read_leaves(reader: ArraySource, name: str, patterns: str | Sequence[str]) -> dict[str, Any]:
    """Leaves whose names match any of the shell patterns, as NumPy arrays and Python values, by name."""
    names = _Assembly(reader, name).item.public_names
    chosen: set[int] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        numbers = _text.matching(names, pattern)
        if names and not numbers:
            raise UnknownNameError(f"checkpoint {reader.record.epoch}, item {name!r}: {_text.no_match(pattern, names)}")
        chosen.update(numbers)
    values = read_values(reader, name, sorted(chosen))
    return dict(zip((names[i] for i in sorted(chosen)), values, strict=True))


def read_values(reader: ArraySource, name: str, numbers: Sequence[int]) -> list[Any]:
    """The leaves with these numbers, as NumPy arrays and Python values; typed keys as their data."""
    assembly = _Assembly(reader, name)

    requests = [LeafRequest(number, _form_on_host(assembly.item.leaves[number])) for number in numbers]
    return _read_alone(reader, assembly.run(requests))


def _form_on_host(leaf: Leaf) -> RestoredForm:
    is_value = leaf.dtype is None or leaf.kind in ("longstr", "longbytes")
    return RestoredForm.PYTHON if is_value else RestoredForm.NUMPY


class _LeafBoxes(NamedTuple):
    """The boxes of one array that devices of this process need."""

    boxes: list[tuple[Box, None]]  # each with the place of its buffer, which is made for each leaf
    can_be_packed: bool  # all of them are one cell: the leaf is read together with others
    keeps_memory: bool  # the arrays on the devices go on using the host's memory


class _Assembly:
    """Says what is to be read for the requested leaves of one item, and builds their values."""

    def __init__(
        self, reader: ArraySource, name: str, sharing: Sharing | None = None, memory_limit_bytes: int | None = None
    ):
        item = reader.record.items[name].arrays
        assert item is not None, "callers choose array items"
        self.reader = reader
        self.name = name
        self.item = item
        self.sharing = sharing
        self.memory_limit_bytes = memory_limit_bytes
        self.reads: list[Request] = []
        self.boxes: dict[Any, _LeafBoxes] = {}  # by sharding and form: most arrays of a tree share them
        self.whole: dict[int, bool] = {}  # leaves that are read together, see `_packs`: whether their memory is kept
        self.packed: dict[int, np.ndarray] = {}  # these
        self.rows: list[Mismatch] = []

    def run(self, requests: Sequence[LeafRequest]) -> Generator[Reads, None, list[Any]]:
        """See `_restoring`; returns the values."""
        _progress.note("cast", sum(self._casts(request) for request in requests if request.dtype is not None))
        values: list[Any] = []
        for batch in self._batches(requests):
            values += yield from self._run(batch)
        if self.rows:
            raise MismatchError(self.name, self.reader.record.epoch, self.rows)
        return values

    def _casts(self, request: LeafRequest) -> bool:
        dtype = self.item.leaves[request.leaf].dtype if request.leaf >= 0 else None
        return dtype is not None and dtype is not request.dtype and dtype != request.dtype

    def _batches(self, requests: Sequence[LeafRequest]) -> Iterator[Sequence[LeafRequest]]:
        """The requests, where host memory is bounded in as many groups as that takes."""
        if self.memory_limit_bytes is None:
            yield requests
            return
        start = held = 0
        for number, request in enumerate(requests):
            size = self._host_bytes(request)
            if held and held + size > self.memory_limit_bytes:
                yield requests[start:number]
                start = number
                held = 0
            held += size
        yield requests[start:]

    def _host_bytes(self, request: LeafRequest) -> int:
        """Host memory that a leaf needs until it is on its devices; the same on all processes if they share reads."""
        if request.leaf < 0:
            return 0
        leaf = self.item.leaves[request.leaf]
        sharding = request.sharding
        cast = request.dtype is not None and request.dtype != leaf.dtype
        if leaf.dtype is None or (request.form != RestoredForm.JAX and not cast):
            return 0  # what is read is the result
        shape = leaf.shape if request.shape is None else request.shape
        itemsize = leaf.dtype.itemsize + (np.dtype(request.dtype).itemsize if cast else 0)
        if self.sharing is not None:
            return 2 * math.prod(shape) * itemsize  # a share of it is there twice
        if sharding is None or isinstance(sharding, SingleDeviceSharding):
            return math.prod(shape) * itemsize
        logical = shape[: len(shape) - (key_dims(leaf) if leaf.kind == "prng" else 0)]
        boxes = set(plan_lib.boxes_of_devices(sharding, logical).values())
        return sum(math.prod(box_shape(box + whole(shape[len(box) :]))) for box in boxes) * itemsize

    def _run(self, requests: Sequence[LeafRequest]) -> Generator[Reads, None, list[Any]]:
        self.reads = []
        self.whole = {}
        self.packed = {}
        with _collector.paused():
            buffers = [self._plan(request) for request in requests]
            packs = self._packs()
        if self.sharing is None:
            yield self.reads, packs
        else:
            self.sharing.read(Source(self.reader.record, self.name, self.reader.read), requests, self.reads)
        with _collector.paused():
            values = self._place(requests, buffers)
        if self.memory_limit_bytes is not None:
            jax.block_until_ready([value for value in values if isinstance(value, jax.Array)])  # then buffers are free
        return values

    def _place(self, requests: Sequence[LeafRequest], buffers: Sequence[Any]) -> list[Any]:
        """The values of the requests, from the buffers that their bytes were read into."""
        hosts = [*map(self._hosts, requests, buffers)]
        with jax.transfer_guard_host_to_device("allow"):  # a restore is asked for
            return [self._finish(request, host) for request, host in zip(requests, hosts, strict=True)]

    def _hosts(self, request: LeafRequest, boxes: Any) -> Any:
        """The buffers of a jax array by box, cast; the buffer of another kind of leaf unchanged."""
        if not isinstance(boxes, list):
            return boxes
        leaf = self.item.leaves[request.leaf]
        found = [(box, self.packed[request.leaf] if buffer is None else buffer) for box, buffer in boxes]
        return {box: self._cast(leaf, buffer, request.dtype) for box, buffer in found}

    def _plan(self, request: LeafRequest) -> Any:
        """Buffers for one leaf: [(box, buffer), …] for jax, one buffer otherwise, None for a leaf without bytes.

        A leaf that will be packed has None in place of its buffer.
        """
        if request.leaf < 0 or self.item.leaves[request.leaf].dtype is None:
            return None
        leaf = self.item.leaves[request.leaf]
        if request.form != RestoredForm.JAX:
            box = whole(leaf.shape if request.shape is None else request.shape)
            return self._buffer(request.leaf, box)
        form = id(request.sharding), request.shape, leaf[2:]
        needed = self.boxes.get(form)
        if needed is None:
            needed = self.boxes[form] = self._boxes(request, leaf)
        if not needed.can_be_packed:
            return [(box, self._buffer(request.leaf, box)) for box, _ in needed.boxes]
        if leaf.nbytes >= _ALIGN_FROM:
            self.reader.check_files(self.name, request.leaf, needed.boxes[0][0])  # before memory is allocated
        self.whole[request.leaf] = needed.keeps_memory and (request.dtype is None or not self._casts(request))
        return needed.boxes

    def _boxes(self, request: LeafRequest, leaf: Leaf) -> _LeafBoxes:
        shape = leaf.shape if request.shape is None else request.shape
        boxes: dict[Box, None] = {}
        if request.sharding is None or isinstance(request.sharding, SingleDeviceSharding):
            boxes[whole(shape)] = None
        else:
            logical = shape[: len(shape) - (key_dims(leaf) if leaf.kind == "prng" else 0)]
            for box in plan_lib.boxes_of_devices(request.sharding, logical).values():
                boxes[box + whole(shape[len(box) :])] = None
        one_cell = (
            self.sharing is None
            and request.shape is None
            and leaf.grid >= 0
            and len(self.item.grids[leaf.grid].holders) == 1
        )
        devices = jax.local_devices() if request.sharding is None else request.sharding.device_set
        return _LeafBoxes(
            boxes=[*boxes.items()],
            can_be_packed=one_cell and [*boxes] == [whole(shape)] and 0 < leaf.nbytes < _PACKED_BELOW,
            keeps_memory=next(iter(devices)).platform == "cpu",
        )

    def _packs(self) -> list[Pack]:
        """Gives whole leaves their memory, aligned, and in the order of their files, so that most reads need no copy.

        Those whose memory is free once they are on their devices, or cast, are apart.
        """
        groups: dict[tuple[int, bool], list[int]] = {}
        for leaf in self.item.in_file_order(sorted(self.whole)):
            groups.setdefault((self.item.owner(leaf, 0), self.whole[leaf]), []).append(leaf)
        packs = []
        for (node, _), leaves in groups.items():
            sizes = np.array([self.item.leaves[i].nbytes for i in leaves], np.int64)
            ends = np.cumsum(-(-sizes // JAX_ALIGNMENT) * JAX_ALIGNMENT)
            starts = np.concatenate([[0], ends[:-1]])
            first = 0
            while first < len(leaves):
                last = max(int(np.searchsorted(ends, starts[first] + _PACK_BYTES, "right")), first + 1)
                numbers = leaves[first:last]
                at = starts[first:last] - starts[first]
                out = _memory(int(ends[last - 1] - starts[first]))
                packs.append(Pack(self.name, node, np.array(numbers), at, sizes[first:last], out))
                for leaf, start in zip(numbers, at.tolist(), strict=True):
                    info = self.item.leaves[leaf]
                    self.packed[leaf] = np.ndarray(info.shape, info.dtype, out, start)
                first = last
        return packs

    def _buffer(self, leaf: int, box: Box) -> np.ndarray:
        """A buffer that a box of a leaf is read into; zeros where the box reaches beyond the leaf."""
        info = self.item.leaves[leaf]
        assert info.dtype is not None
        inside = tuple([(min(a, n), min(b, n)) for (a, b), n in zip(box, info.shape, strict=True)])
        read = inside == box or all(a < b for a, b in inside)
        if read:
            self.reader.check_files(self.name, leaf, inside)  # before memory is allocated
        if inside == box:
            out = part = _empty(box_shape(box), info.dtype)
        else:
            out = np.zeros(box_shape(box), info.dtype)
            part = out[tuple(slice(0, n) for n in box_shape(inside))]
        if read:
            self.reads.append(Request(self.name, leaf, inside, part))
        return out

    def _finish(self, request: LeafRequest, data: Any) -> Any:
        """The value of a request, from its buffer, or buffers by box."""
        if request.leaf < 0:
            return request.value
        leaf = self.item.leaves[request.leaf]
        if isinstance(data, dict):  # what will be refused reaches no device; the rest of it is only looked through
            return None if self.rows else _on_devices(leaf, request, data)
        if data is None:
            return self._value(leaf, request)
        if request.form == RestoredForm.PYTHON and leaf.kind in ("longstr", "longbytes"):
            raw = data.tobytes()
            try:
                return raw.decode("utf-8", "surrogatepass") if leaf.kind == "longstr" else raw
            except UnicodeDecodeError as error:
                problem = f"leaf {leaf.name!r} is no text: {error}"
                raise FormatError(f"{self.reader.folder}/epoch.json", problem) from None
        data = self._cast(leaf, data, request.dtype)
        if request.form == RestoredForm.NUMPY:
            return data
        return self._convert(leaf, data[()], request.kind) if request.form == RestoredForm.PYTHON else data[()]

    def _value(self, leaf: Leaf, request: LeafRequest) -> Any:
        """A recorded Python value, or an empty container, in the requested form."""
        if leaf.kind in tree_lib.EMPTY_KINDS:
            return tree_lib.empty_value(leaf.kind)
        raw = self.reader.record.items[self.name].values[request.leaf]
        value = tree_lib.value_from_json(f"{self.reader.folder}/epoch.json", leaf.kind, raw)
        if request.form == RestoredForm.PYTHON:
            return self._convert(leaf, value, request.kind)
        try:
            data = self._cast(leaf, np.asarray(value), request.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            self.rows.append(Mismatch(leaf.name, "value", f"{leaf.kind} {value!r:.40}", f"{request.dtype} ({error})"))
            return None
        if request.form == RestoredForm.JAX and request.sharding is not None and not self.rows:
            return jax.make_array_from_callback((), request.sharding, lambda index: data[index], dtype=data.dtype)
        return data if request.form == RestoredForm.NUMPY else data[()]

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
            self.rows.append(Mismatch(leaf.name, "value", f"{plain!r:.40}", expected))
        return out

    def _cast(self, leaf: Leaf, data: np.ndarray, dtype: Any) -> np.ndarray:
        """An array with another dtype; notes a mismatch if the kind changes and not every value survives."""
        if dtype is None or data.dtype == dtype:
            return data
        with np.errstate(all="ignore"):
            out = _converted(data, dtype)
            precision_only = keeps_kind(data.dtype, dtype, (np.complexfloating, np.floating))
            if not precision_only and not _survives(data, out):
                expected = f"{np.dtype(dtype)}: not every value survives the cast"
                self.rows.append(Mismatch(leaf.name, "dtype", str(data.dtype), expected))
        return out


def keeps_kind(before: Any, after: Any, kinds: Sequence[type]) -> bool:
    """Whether two dtypes are of the same one of these kinds of numbers."""
    return any(tree_lib.issubdtype(before, kind) and tree_lib.issubdtype(after, kind) for kind in kinds)


def _converted(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A cast; complex to real keeps the real part without NumPy's warning, because `_survives` compares the rest."""
    if tree_lib.issubdtype(array.dtype, np.complexfloating) and not tree_lib.issubdtype(dtype, np.complexfloating):
        array = np.real(array)
    return array.astype(dtype)


def _survives(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether a cast kept every value exactly."""
    back = _converted(after, before.dtype)
    same = (back == before) | ((back != back) & (before != before))
    wide = [a.astype(np.float64) if a.dtype.itemsize < 4 else a for a in (before, after)]
    equal = (wide[0] == wide[1]) | ((wide[0] != wide[0]) & (wide[1] != wide[1]))
    return bool(np.all(same & equal))


def _on_devices(leaf: Leaf, request: LeafRequest, hosts: dict[Box, np.ndarray]) -> jax.Array:
    """An array on devices, from the host's buffers of the boxes that they hold; typed keys of their data.

    JAX needs half the time for this call that it needs for `device_put` and `make_array_from_single_device_arrays`, and
    a fifth where there are eight devices.
    """
    shape = leaf.shape if request.shape is None else request.shape
    sharding = request.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if leaf.kind == "prng" and isinstance(sharding, NamedSharding):  # the dimensions of key data are not split
        spec = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
    dtype = request.dtype or leaf.dtype
    if not hosts:  # no device of this process has a part; JAX would ask for one of replicated arrays
        data = jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    elif isinstance(sharding, SingleDeviceSharding) and sharding.memory_kind not in (None, "device"):
        (host,) = hosts.values()
        data = jax.device_put(host, sharding)  # whose type, unlike that of the call below, names the memory
    elif len(hosts) == 1:
        (host,) = hosts.values()
        data = jax.make_array_from_callback(shape, sharding, lambda index: host, dtype=dtype)
    else:

        def host_of(index: Any) -> np.ndarray:  # a slice per axis
            return hosts[tuple([cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True)])]

        data = jax.make_array_from_callback(shape, sharding, host_of, dtype=dtype)
    return jax.random.wrap_key_data(data, impl=leaf.impl) if leaf.kind == "prng" else data


def _empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised C-contiguous array, aligned so that jax can use its memory without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _ALIGN_FROM:
        return np.empty(shape, dtype)
    return aligned(nbytes).view(dtype).reshape(shape)


def _memory(nbytes: int) -> np.ndarray:
    """Memory for leaves that are read together.

    In memory of its own an array lies partly beside huge pages: 82,000 small ones were touched when 400 arrays, 600 MB,
    were restored, which took as long as all the rest.
    """
    return fresh(nbytes) if nbytes >= _MAP_FROM else aligned(nbytes)
