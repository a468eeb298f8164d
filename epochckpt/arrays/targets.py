"""Matches a target pytree with the recorded tree, in one pass: the form in which each leaf is restored.

Every difference is collected, so that a target that does not fit is refused with one table of all of them. Where names
have changed since the save, `Sources` find the recorded leaves. For them a leaf's name is its keys joined by `/`, such
as `layers/0/kernel`, whatever the type of the key 0 is.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from epochckpt import _text
from epochckpt._renaming import Rename, new_names
from epochckpt._text import near, readable
from epochckpt.errors import FormatError, InvalidArgumentError, Mismatch, UnsupportedError
from epochckpt.format import ArrayItem, KeyPath, Leaf
from epochckpt.format import tree as tree_lib
from epochckpt.format.tree import ARRAY_KINDS, EMPTY_KINDS

Sources = Callable[[Sequence[Leaf], Sequence[KeyPath]], Mapping[str, int]]
"""Maps an epoch's leaves and a target's paths to leaf numbers by name of the target's leaf; a new leaf has none."""

_ARRAYS = jax.ShapeDtypeStruct, jax.Array  # a tuple: `|` would make a union at each call
_TEXT_KINDS = frozenset({"str", "bytes", "longstr", "longbytes"})


class LeafRequest(NamedTuple):
    """The form in which one leaf is restored."""

    leaf: int  # its number in the epoch; -1 for a value that is not restored
    form: str  # jax, numpy, scalar (a NumPy scalar), python (a Python value), keep (`value`)
    dtype: Any = None  # to cast to; None for the stored one
    sharding: Sharding | None = None
    kind: type | None = None  # Python type to convert to
    value: Any = None
    shape: tuple[int, ...] | None = None  # to cut or pad the array to; None for the stored one


class Shardings:
    """The recorded shardings of an item, as far as their devices exist in this job."""

    def __init__(self, item: ArrayItem, fallback: Sharding | None = None):
        self._item = item
        self._fallback = fallback
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
        devices = [self._devices[mesh["platform"], d] for d in mesh["devices"]]
        if len(set(devices)) != len(devices):
            raise ValueError("a mesh with one device in two places")
        types = tuple(AxisType[t] for t in mesh["axis_types"])
        return Mesh(np.array(devices).reshape(mesh["shape"]), tuple(mesh["axes"]), axis_types=types)


def as_saved(number: int, leaf: Leaf, shardings: Shardings) -> LeafRequest:
    """A leaf as it was saved; a jax array as NumPy if its devices do not exist here, or jax cannot hold its dtype."""
    if leaf.kind in ("jax", "prng"):
        sharding = shardings.of(leaf)
        if leaf.kind == "prng" or (sharding is not None and _canonical(leaf.dtype)):
            return LeafRequest(number, "jax", None, sharding)
        return LeafRequest(number, "numpy")
    return LeafRequest(number, leaf.kind if leaf.kind in ("numpy", "scalar") else "python")


def _canonical(dtype: Any) -> bool:
    """Whether jax can hold this dtype now (64-bit types need jax_enable_x64)."""
    return np.dtype(dtype).kind not in "mM" and jax.dtypes.canonicalize_dtype(dtype) == dtype


class Matcher:
    """Matches target leaves with recorded leaves, and collects the differences; with `resize`, shapes may differ.

    A leaf that the target has as None, or as `...`, stays that. With `partial`, leaves of the epoch that the target
    lacks, or has as an empty container, are left out, and leaves that the epoch lacks stay as the target has them; with
    `needs_values` these must be values, not descriptions such as `jax.ShapeDtypeStruct`.
    """

    def __init__(self, item: ArrayItem, shardings: Shardings, resize: bool, partial: bool, needs_values: bool):
        self.item = item
        self.shardings = shardings
        self.resize = resize
        self.partial = partial
        self.needs_values = needs_values
        self.rows: list[Mismatch] = []  # the differences
        self.absent: list[str] = []  # names of the target's leaves that the epoch lacks, where that is allowed
        self._fitting: dict[Any, Sequence[Any]] = {}  # requests but for the leaf's number, see `_form`
        self._alike: dict[int, tuple[Any, int]] = {}  # by the id of a sharding it, and the id of the first equal one
        self._distinct: dict[Sharding, int] = {}

    def match(
        self, names: Sequence[str], targets: Sequence[Any], given: Mapping[str, Any], sources: Mapping[str, int] | None
    ) -> list[LeafRequest]:
        """One request per leaf of the target.

        `given` has `ocp.RestoreArgs` by leaf name, and `sources` the numbers of recorded leaves by name of the target's
        leaf; without it names must be the same.
        """
        numbers = self.item.by_name if sources is None else sources
        requests = []
        seen: set[int] = set()
        exact = frozenset(names)
        for target, name in zip(targets, names, strict=True):
            number = numbers.get(name)
            form = None if number is None else self._form(self.item.leaves[number], target, given.get(name))
            if number is not None and (known := self._fitting.get(form)) is not None:
                seen.add(number)
                requests.append(LeafRequest._make((number, *known)))
                continue
            if number is None and sources is None:  # keys 0 and "0" read the same
                number = self.item.by_either_name.get(readable(name))
                if number is not None and self.item.leaves[number].name in exact:
                    number = None
            if number is not None:
                seen.add(number)
            wanted = target is not ... and not _is_empty(target)
            if number is None or target is ... or target is None or (self.partial and not wanted):
                if number is None and wanted and self.partial:
                    self.absent.append(name)
                    if self.needs_values and not _is_value(target):
                        self._row(name, "no value", "-", describe(target))
                elif number is None and wanted:
                    self._row(name, "missing", "-", describe(target))
                requests.append(LeafRequest(-1, "keep", value=target))
                continue
            leaf = self.item.leaves[number]
            if leaf.name != name and readable(leaf.name) != readable(name):
                leaf = leaf._replace(name=f"{name} (from {leaf.name})")
            if name in given and wanted:
                requests.append(self.with_restore_args(number, leaf, given[name], target))
            else:
                requests.append(self._leaf(number, leaf, target))
            if form is not None and not self.rows:
                self._fitting[form] = requests[-1][1:]
        if not self.partial:
            for number, leaf in enumerate(self.item.leaves):
                if number not in seen and leaf.kind not in EMPTY_KINDS:
                    self._row(leaf.name, "unexpected", describe_leaf(leaf), "-")
        return requests

    def _form(self, leaf: Leaf, target: Any, args: Any) -> Any:
        """A key of the request of an array, equal for most arrays of a tree; None if the leaf needs its own request."""
        if leaf.kind != "jax" or not isinstance(target, _ARRAYS):
            return None
        asked = None
        if args is not None:
            if type(args) is not ocp.ArrayRestoreArgs or args.mesh is not None:
                return None
            shapes = args.global_shape, args.shape
            if type(shapes[0]) is list or type(shapes[1]) is list:
                return None
            asked = args.restore_type, args.dtype, self._id(args.sharding), shapes, args.strict
        at = self._id(getattr(target, "sharding", None))
        return leaf.dtype, leaf.shape, leaf.sharding, target.dtype, target.shape, at, asked

    def _id(self, sharding: Any) -> int:
        """A number that equal shardings share."""
        if (found := self._alike.get(id(sharding))) is None:
            number = id(sharding)
            if isinstance(sharding, Sharding):
                number = self._distinct.setdefault(sharding, number)
            found = self._alike[id(sharding)] = sharding, number
        return found[1]

    def _row(self, leaf: str, problem: str, found: str, expected: str) -> LeafRequest:
        """Notes a difference. With any, nothing is restored: the request that is returned is never used."""
        self.rows.append(Mismatch(leaf, problem, found, expected))
        return LeafRequest(-1, "keep")

    def _differs(self, problem: str, leaf: Leaf, target: Any) -> LeafRequest:
        return self._row(leaf.name, problem, describe_leaf(leaf), describe(target))

    def _leaf(self, number: int, leaf: Leaf, target: Any) -> LeafRequest:
        if isinstance(target, ocp.RestoreArgs):
            return self.with_restore_args(number, leaf, target)
        if leaf.kind in EMPTY_KINDS or _is_empty(target):
            if leaf.kind not in EMPTY_KINDS or not _is_empty(target):
                self._differs("type", leaf, target)
            return LeafRequest(-1, "keep", value=target)
        if leaf.kind in tree_lib.VALUE_KINDS and isinstance(target, ocp.metadata.ScalarMetadata):
            return LeafRequest(number, "python")
        if isinstance(target, ocp.metadata.StringMetadata | str | bytes):
            fits = ["bytes"] if isinstance(target, bytes) else ["str"] if isinstance(target, str) else ["str", "bytes"]
            if leaf.kind.removeprefix("long") not in fits:
                return self._row(leaf.name, "type", describe_leaf(leaf), fits[0])
            return LeafRequest(number, "python")
        if getattr(target, "shape", None) is not None and getattr(target, "dtype", None) is not None:
            return self._array(number, leaf, target, self.resize)
        if not isinstance(target, bool | int | float | complex) or leaf.kind in _TEXT_KINDS:
            return self._differs("type", leaf, target)
        if leaf.kind in ARRAY_KINDS and (leaf.shape != () or leaf.kind == "prng"):
            return self._differs("shape", leaf, target)
        return LeafRequest(number, "python", kind=type(target))

    def _array(self, number: int, leaf: Leaf, target: Any, resize: bool) -> LeafRequest:
        shape = tuple(target.shape)
        dtype = target.dtype
        typed = tree_lib.is_prng_dtype(dtype)
        described = isinstance(target, ocp.metadata.ArrayMetadata | jax.ShapeDtypeStruct)
        describes = described or hasattr(target, "sharding_metadata")  # of Orbax's v1, and ours
        if leaf.kind == "prng" and describes and shape == leaf.shape and dtype == leaf.dtype:
            # item_metadata, and Orbax's utils.to_shape_dtype_struct, describe the keys' data
            return LeafRequest(number, "jax", None, of_keys(self._sharding(target, leaf), leaf))
        if typed or leaf.kind == "prng":
            logical = logical_shape(leaf)
            if not typed or leaf.kind != "prng" or dtype != _abstract_key(leaf).dtype:
                return self._differs("type", leaf, target)
            if shape != logical:
                return self._row(leaf.name, "shape", str(list(logical)), str(list(shape)))
            return LeafRequest(number, "jax", None, self._sharding(target, leaf))
        if leaf.kind in _TEXT_KINDS:
            return self._differs("type", leaf, target)
        resized = None
        if shape != leaf.shape:
            if not resize or len(shape) != len(leaf.shape):
                return self._differs("shape", leaf, target)
            resized = shape
        if isinstance(target, np.ndarray | np.generic):
            form = "numpy" if isinstance(target, np.ndarray) else "scalar"
            return LeafRequest(number, form, np.dtype(dtype), shape=resized)
        sharding = self._sharding(target, leaf, resized)
        if sharding is None:
            return LeafRequest(number, "numpy", np.dtype(dtype), shape=resized)
        if not _canonical(dtype):
            expected = f"{dtype}, which jax holds only with jax_enable_x64"
            return self._row(leaf.name, "dtype", describe_leaf(leaf), expected)
        if not divides(sharding, shape):
            return self._row(leaf.name, "sharding", describe_leaf(leaf), f"does not divide evenly by {sharding}")
        return LeafRequest(number, "jax", np.dtype(dtype), sharding, shape=resized)

    def _sharding(self, target: Any, leaf: Leaf, resized: tuple[int, ...] | None = None) -> Sharding | None:
        with contextlib.suppress(ValueError):  # Orbax's metadata of a sharding whose devices do not exist here
            sharding = _jax_sharding(getattr(target, "sharding", None))
            if isinstance(sharding, Sharding):
                return sharding
        found = self.shardings.of(leaf)
        return found if found is None or resized is None or divides(found, resized) else None

    def with_restore_args(self, number: int, leaf: Leaf, args: Any, target: Any = None) -> LeafRequest:
        """A leaf with explicit `ocp.RestoreArgs`: they decide its type, and the target's value is a placeholder.

        As in Orbax, the shape of a target array with dimensions must be the stored one unless the arguments name
        another, and `ArrayRestoreArgs` without a dtype take the target's.
        """
        kind = args.restore_type
        dtype = args.dtype
        of_array = isinstance(args, ocp.ArrayRestoreArgs) and kind in (None, jax.Array)
        shapes = [getattr(args, name, None) for name in ("global_shape", "shape")] if of_array else []
        strict = getattr(args, "strict", True)
        is_array = getattr(target, "shape", ()) and hasattr(target, "dtype")
        if strict and is_array and not tree_lib.is_prng_dtype(target.dtype):
            shapes = shapes if any(shape is not None for shape in shapes) else [target.shape]
            dtype = target.dtype if dtype is None and of_array else dtype
        typed = dtype is not None and tree_lib.is_prng_dtype(dtype)
        if leaf.kind in EMPTY_KINDS or leaf.kind in _TEXT_KINDS:
            return self._leaf(number, leaf, "") if kind is str else as_saved(number, leaf, self.shardings)
        shape = logical_shape(leaf) if typed else leaf.shape
        for asked in shapes:
            if asked is not None and tuple(asked) not in (leaf.shape, logical_shape(leaf)):
                if strict or leaf.kind == "prng" or len(asked) != len(leaf.shape):
                    return self._row(leaf.name, "shape", describe_leaf(leaf), str(list(asked)))
                shape = tuple(asked)
        if of_array or typed:
            if dtype is None:
                number_type = {"bool": bool, "int": int, "float": float}.get(leaf.kind, complex)
                dtype = leaf.dtype if leaf.dtype is not None else jax.dtypes.canonicalize_dtype(number_type)
            sharding = _jax_sharding(getattr(args, "sharding", None))
            mesh = getattr(args, "mesh", None)
            if sharding is None and mesh is not None and args.mesh_axes is not None:
                sharding = NamedSharding(mesh, args.mesh_axes)
            abstract = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            return self._array(number, leaf, abstract, self.resize or not strict)
        if kind in (str, int, float, bool, complex):
            return self._leaf(number, leaf, kind())
        if kind is np.ndarray or (kind is None and dtype is not None):
            return LeafRequest(number, "numpy", None if dtype is None else np.dtype(dtype))
        return as_saved(number, leaf, self.shardings)


def _is_value(target: Any) -> bool:
    """Whether a target leaf is itself something to train with, and does not only describe it."""
    if isinstance(target, jax.Array | np.ndarray | np.generic):
        return True
    return not (hasattr(target, "dtype") or isinstance(target, ocp.metadata.Metadata | ocp.RestoreArgs))


def _is_empty(target: Any) -> bool:
    """Whether a leaf of the target has no data: None or an empty container."""
    return tree_lib.leaf_kind(target) in EMPTY_KINDS


def _jax_sharding(described: Any) -> Any:
    """A sharding of jax, if Orbax's metadata of one is given; else what is given."""
    return described.to_jax_sharding() if hasattr(described, "to_jax_sharding") else described


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
        inner = jax.eval_shape(jax.random.key_data, _abstract_key(leaf))
    except (ValueError, TypeError) as error:
        problem = f"leaf {leaf.name!r}: this jax has no PRNG implementation {leaf.impl!r}"
        raise FormatError("epoch.json", problem) from error
    if inner.dtype != leaf.dtype or leaf.shape[max(0, len(leaf.shape) - inner.ndim) :] != inner.shape:
        problem = f"leaf {leaf.name!r}: {leaf.dtype}{list(leaf.shape)} is no {leaf.impl} key data"
        raise FormatError("epoch.json", problem)
    return inner.ndim


def _abstract_key(leaf: Leaf) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=leaf.impl))


def describe(target: Any) -> str:
    """A target leaf for people."""
    if hasattr(target, "shape") and hasattr(target, "dtype"):
        return f"{target.dtype}{list(target.shape)}"
    return "nothing" if target is None else type(target).__name__


def describe_leaf(leaf: Leaf) -> str:
    """A recorded leaf for people."""
    if leaf.kind == "prng":
        return f"key<{leaf.impl}>{list(leaf.shape)}"
    if leaf.kind in ("jax", "numpy", "scalar"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return {"none": "nothing", "longstr": "str", "longbytes": "bytes", "node": "empty node"}.get(leaf.kind, leaf.kind)


def by_rename(where: str, rename: Rename, leaves: Sequence[Leaf], paths: Sequence[KeyPath]) -> dict[str, int]:
    """`Sources`, with the two first arguments given: they rename the leaves of the epoch, see `epochckpt._renaming`."""
    renamed = new_names(where, rename, _text.public([leaf.name for leaf in leaves]))
    numbers = {new: number for number, new in enumerate(renamed)}
    found = dict[str, int]()
    for name in map(tree_lib.leaf_name, paths):
        number = numbers.get(name, numbers.get(readable(name)))
        if number is not None:
            found[name] = number
    return found


def by_transforms(item: str, transforms: Any, default_to_original: bool) -> Sources:
    """Sources for Orbax's `PyTreeRestore(transforms=…)`; only renames are supported.

    The keys of `transforms`, a pytree of `ocp.transform_utils.Transform`, are regular expressions over whole names in
    the target; as in Orbax, the last match in JAX's order of keys counts. With `default_to_original`, a leaf without a
    match comes from the epoch if it is there, and `use_fallback` means the target's value; without it, the other way
    round. Refused are an `original_key` that the epoch lacks, and a transform that computes values.
    """
    patterns: list[tuple[re.Pattern[str], Any]] = []
    for path, transform in tree_lib.flatten(transforms)[0]:
        if tree_lib.leaf_kind(transform) in tree_lib.EMPTY_KINDS:
            continue
        where = _plain(path)
        if not isinstance(transform, ocp.transform_utils.Transform):
            problem = f"a {type(transform).__name__} at {where!r}; expected ocp.transform_utils.Transform"
            raise InvalidArgumentError(f"item {item!r}: transforms has {problem}")
        for name in ("value_fn", "multi_value_fn"):
            if getattr(transform, name) is not None:
                raise UnsupportedError(
                    f"item {item!r}: transforms has a Transform({name}=…) at {where!r}, which is not supported: only "
                    "original_key= and use_fallback= are. Restore the saved tree and compute the rest from it"
                )
        patterns.insert(0, (_compiled(item, "transforms", where), transform))

    def sources(leaves: Sequence[Leaf], paths: Sequence[KeyPath]) -> dict[str, int]:
        numbers = {_plain(leaf.path): number for number, leaf in enumerate(leaves)}
        out: dict[str, int] = {}
        for path in paths:
            name = source = _plain(path)
            from_epoch = default_to_original
            for pattern, transform in patterns:
                found = pattern.fullmatch(name)
                if found is None:
                    continue
                from_epoch = not default_to_original if transform.use_fallback else True
                key = transform.original_key
                if key is not None:
                    source = _expanded(item, "transforms", found, key if isinstance(key, str) else "/".join(key))
                if from_epoch and source not in numbers:
                    problem = f"transforms takes {name!r} from {source!r}, which the epoch lacks"
                    raise InvalidArgumentError(f"item {item!r}: {problem}; {near(source, numbers)}")
                break
            if from_epoch and source in numbers:
                out[tree_lib.leaf_name(path)] = numbers[source]
        return out

    return sources


def _plain(path: KeyPath) -> str:
    return "/".join(str(key) for _, key in path)


def _compiled(item: str, argument: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        problem = f"{argument} has {pattern!r}, which is no regular expression ({error})"
        raise InvalidArgumentError(f"item {item!r}: {problem}") from None


def _expanded(item: str, argument: str, found: re.Match[str], template: str) -> str:
    try:
        return found.expand(template)
    except (re.error, IndexError, TypeError, AttributeError) as error:
        problem = f"{argument} turns {found.re.pattern!r} into {template!r}, which is no new name for it ({error})"
        raise InvalidArgumentError(f"item {item!r}: {problem}") from None


@dataclasses.dataclass(frozen=True)
class _Aside:
    """Something that goes with a tree without being part of its structure: any two are equal."""

    value: Any = dataclasses.field(compare=False)


@jax.tree_util.register_pytree_with_keys_class
class TreeMetadata:
    """A pytree with properties, like Orbax's class of this name (`ocp.StandardCheckpointer().metadata(path)`).

    It may be mapped over, indexed, and passed as a restore target. `tree` is the plain tree: dicts and lists of
    `ocp.metadata.ArrayMetadata` and its kin, in the order of the saved tree. `custom_metadata` is the JSON that was
    saved with the item, or None; `use_zarr3` is always False.
    """

    use_zarr3 = False

    def __init__(self, tree: Any, custom_metadata: Any = None):
        self.tree = tree
        self.custom_metadata = custom_metadata

    def tree_flatten_with_keys(self) -> tuple[Iterable[Any], Any]:
        """The top level of the tree, as JAX wants it."""
        aside = _Aside(self.custom_metadata)
        if isinstance(self.tree, dict):  # JAX would sort the keys, which those of an OrderedDict are not
            return [(jax.tree_util.DictKey(key), child) for key, child in self.tree.items()], (tuple(self.tree), aside)
        found, treedef = jax.tree_util.tree_flatten_with_path(self.tree, is_leaf=lambda node: node is not self.tree)
        children = [(path[0] if path else jax.tree_util.GetAttrKey("tree"), child) for path, child in found]
        return children, (treedef, aside)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Iterable[Any]) -> Self:
        shape, aside = aux
        tree = dict(zip(shape, children, strict=True)) if isinstance(shape, tuple) else shape.unflatten(children)
        return cls(tree, aside.value)

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __contains__(self, key: Any) -> bool:
        return key in self.tree

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TreeMetadata):
            return self.tree == other.tree and self.custom_metadata == other.custom_metadata
        return self.tree == other

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values", "items", "get"):
            return getattr(self.tree, name)
        if name in ("shape", "dtype", "sharding", "name", "directory") and not isinstance(self.tree, dict | list):
            return getattr(self.tree, name)  # a bare array
        raise AttributeError(f"TreeMetadata has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"TreeMetadata(tree={self.tree!r}, custom_metadata={self.custom_metadata!r})"


def plain_target(target: Any) -> Any:
    """A target as a plain tree: `item_metadata` is one, too."""
    return target.tree if isinstance(target, TreeMetadata) else target
