"""Matches a target pytree with the recorded tree, in one pass: the form in which each leaf is restored.

Every difference is collected, so that a target that does not fit is refused with one table of all of them. Where names
have changed since the save, `renames` says which recorded leaf a leaf of the target is.
"""

import contextlib
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from epochckpt._text import readable
from epochckpt.arrays.shardings import (
    UNCOMMITTED,
    Shardings,
    Uncommitted,
    abstract_key,
    divides,
    logical_shape,
    of_keys,
)
from epochckpt.errors import Mismatch
from epochckpt.format import ArrayItem, Leaf
from epochckpt.format import tree as tree_lib
from epochckpt.format.tree import ARRAY_KINDS, EMPTY_KINDS

_ARRAYS = jax.ShapeDtypeStruct, jax.Array  # a tuple: `|` would make a union at each call
_TEXT_KINDS = frozenset({"str", "bytes", "longstr", "longbytes"})


class RestoredAs(enum.Enum):
    """What a leaf is restored as."""

    JAX = "jax"
    NUMPY = "numpy"
    SCALAR = "scalar"  # a NumPy scalar
    PYTHON = "python"  # a Python value


class RestoredLeaf(NamedTuple):
    """How one leaf of the epoch is restored."""

    leaf: int  # its number in the epoch
    restored_as: RestoredAs
    dtype: Any = None  # to cast to; None for the stored one
    sharding: Sharding | None = None  # None for a jax array: it is not committed to a device
    python_type: type | None = None  # to convert to
    new_shape: tuple[int, ...] | None = None  # to cut or pad the array to; None for the stored one

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of the result; `leaf` is the leaf of this number."""
        return leaf.shape if self.new_shape is None else self.new_shape


class Kept(NamedTuple):
    """A value that the caller has given and that stays, instead of a leaf of the epoch."""

    value: Any


LeafRequest = RestoredLeaf | Kept


def as_saved(number: int, leaf: Leaf, shardings: Shardings) -> LeafRequest:
    """A leaf as it was saved; a jax array as NumPy if its devices do not exist here, or jax cannot hold its dtype."""
    if leaf.is_jax:
        place = shardings.place_of(leaf)
        if leaf.kind == "prng" or (place is not None and _canonical(leaf.dtype)):
            return RestoredLeaf(number, RestoredAs.JAX, sharding=_sharding_at(place))
        return RestoredLeaf(number, RestoredAs.NUMPY)
    return RestoredLeaf(number, RestoredAs(leaf.kind) if leaf.kind in ("numpy", "scalar") else RestoredAs.PYTHON)


def _sharding_at(place: Sharding | Uncommitted | None) -> Sharding | None:
    """The sharding of `RestoredLeaf` for a jax array at a place."""
    return place if isinstance(place, Sharding) else None


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
        self._fitting: dict[Any, RestoredLeaf] = {}  # requests of other leaves, by `_request_key`
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
        requests: list[LeafRequest] = []
        used: set[int] = set()
        exact = frozenset(names)
        for target, name in zip(targets, names, strict=True):
            number = numbers.get(name)
            # Most arrays of a tree differ in their number only.
            key = None if number is None else self._request_key(self.item.leaves[number], target, given.get(name))
            alike = self._fitting.get(key)
            if number is not None and alike is not None:
                used.add(number)
                requests.append(alike._replace(leaf=number))
                continue
            if number is None and sources is None:
                number = self._number_by_either_name(name, exact)
            if number is not None:
                used.add(number)
            request = self._request(name, number, target, given)
            requests.append(request)
            if key is not None and not self.rows and isinstance(request, RestoredLeaf):
                self._fitting[key] = request
        if not self.partial:
            for number, leaf in enumerate(self.item.leaves):
                if number not in used and leaf.kind not in EMPTY_KINDS:
                    self._row(leaf.name, "unexpected", describe_leaf(leaf), "-")
        return requests

    def _number_by_either_name(self, name: str, exact: Collection[str]) -> int | None:
        """The leaf whose name reads the same, as the keys 0 and "0" do; None if the target names that leaf itself."""
        number = self.item.by_either_name.get(readable(name))
        return None if number is not None and self.item.leaves[number].name in exact else number

    def _request(self, name: str, number: int | None, target: Any, given: Mapping[str, Any]) -> LeafRequest:
        """The request of one leaf of the target; notes what forbids it."""
        has_data = target is not ... and not _is_empty(target)
        if number is None:
            if has_data:
                self._lacks(name, target)
            return Kept(target)
        if target is ... or target is None or (self.partial and not has_data):
            return Kept(target)
        leaf = self.item.leaves[number]
        if leaf.name != name and readable(leaf.name) != readable(name):
            leaf = leaf._replace(name=f"{name} (from {leaf.name})")
        if name in given and has_data:
            return self.with_restore_args(number, leaf, given[name], target)
        return self._leaf(number, leaf, target)

    def _lacks(self, name: str, target: Any) -> None:
        """Notes that the epoch lacks a leaf of the target."""
        if not self.partial:
            self._row(name, "missing", "-", describe(target))
            return
        self.absent.append(name)
        if self.needs_values and not _is_value(target):
            self._row(name, "no value", "-", describe(target))

    def _request_key(self, leaf: Leaf, target: Any, args: Any) -> Any:
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
        at = self._id(getattr(target, "sharding", None)), getattr(target, "committed", True)
        return leaf.dtype, leaf.shape, leaf.sharding, target.dtype, target.shape, at, asked

    def _id(self, sharding: Any) -> int:
        """A number that equal shardings share."""
        known = self._alike.get(id(sharding))
        if known is not None:
            return known[1]
        number = id(sharding)
        if isinstance(sharding, Sharding):
            number = self._distinct.setdefault(sharding, number)
        self._alike[id(sharding)] = sharding, number  # with the sharding, whose id stays unique
        return number

    def _row(self, leaf: str, problem: str, found: str, expected: str) -> LeafRequest:
        """Notes a difference. With any, nothing is restored: the request that is returned is never used."""
        self.rows.append(Mismatch(leaf, problem, found, expected))
        return Kept(None)

    def _differs(self, problem: str, leaf: Leaf, target: Any) -> LeafRequest:
        return self._row(leaf.name, problem, describe_leaf(leaf), describe(target))

    def _leaf(self, number: int, leaf: Leaf, target: Any) -> LeafRequest:
        if isinstance(target, ocp.RestoreArgs):
            return self.with_restore_args(number, leaf, target)
        if leaf.kind in EMPTY_KINDS or _is_empty(target):
            if leaf.kind not in EMPTY_KINDS or not _is_empty(target):
                self._differs("type", leaf, target)
            return Kept(target)
        if leaf.kind in tree_lib.VALUE_KINDS and isinstance(target, ocp.metadata.ScalarMetadata):
            return RestoredLeaf(number, RestoredAs.PYTHON)
        if isinstance(target, ocp.metadata.StringMetadata | str | bytes):
            fits = ["bytes"] if isinstance(target, bytes) else ["str"] if isinstance(target, str) else ["str", "bytes"]
            if leaf.kind.removeprefix("long") not in fits:
                return self._row(leaf.name, "type", describe_leaf(leaf), fits[0])
            return RestoredLeaf(number, RestoredAs.PYTHON)
        if getattr(target, "shape", None) is not None and getattr(target, "dtype", None) is not None:
            return self._array(number, leaf, target, self.resize)
        if not isinstance(target, bool | int | float | complex) or leaf.kind in _TEXT_KINDS:
            return self._differs("type", leaf, target)
        if leaf.kind in ARRAY_KINDS and (leaf.shape != () or leaf.kind == "prng"):
            return self._differs("shape", leaf, target)
        return RestoredLeaf(number, RestoredAs.PYTHON, python_type=type(target))

    def _array(self, number: int, leaf: Leaf, target: Any, resize: bool) -> LeafRequest:
        shape = tuple(target.shape)
        dtype = target.dtype
        typed = tree_lib.is_prng_dtype(dtype)
        described = isinstance(target, ocp.metadata.ArrayMetadata | jax.ShapeDtypeStruct)
        describes = described or hasattr(target, "sharding_metadata")  # of Orbax's v1, and ours
        if leaf.kind == "prng" and describes and shape == leaf.shape and dtype == leaf.dtype:
            # item_metadata, and Orbax's utils.to_shape_dtype_struct, describe the keys' data
            sharding = of_keys(_sharding_at(self._place(target, leaf)), leaf)
            return RestoredLeaf(number, RestoredAs.JAX, sharding=sharding)
        if typed or leaf.kind == "prng":
            logical = logical_shape(leaf)
            if not typed or leaf.kind != "prng" or dtype != abstract_key(leaf).dtype:
                return self._differs("type", leaf, target)
            if shape != logical:
                return self._row(leaf.name, "shape", str(list(logical)), str(list(shape)))
            return RestoredLeaf(number, RestoredAs.JAX, sharding=_sharding_at(self._place(target, leaf)))
        if leaf.kind in _TEXT_KINDS:
            return self._differs("type", leaf, target)
        resized = None
        if shape != leaf.shape:
            if not resize or len(shape) != len(leaf.shape):
                return self._differs("shape", leaf, target)
            resized = shape
        if isinstance(target, np.ndarray | np.generic):
            restored_as = RestoredAs.NUMPY if isinstance(target, np.ndarray) else RestoredAs.SCALAR
            return RestoredLeaf(number, restored_as, dtype=np.dtype(dtype), new_shape=resized)
        place = self._place(target, leaf, resized)
        if place is None:
            return RestoredLeaf(number, RestoredAs.NUMPY, dtype=np.dtype(dtype), new_shape=resized)
        if not _canonical(dtype):
            expected = f"{dtype}, which jax holds only with jax_enable_x64"
            return self._row(leaf.name, "dtype", describe_leaf(leaf), expected)
        sharding = _sharding_at(place)
        if sharding is not None and not divides(sharding, shape):
            return self._row(leaf.name, "sharding", describe_leaf(leaf), f"does not divide evenly by {sharding}")
        return RestoredLeaf(number, RestoredAs.JAX, dtype=np.dtype(dtype), sharding=sharding, new_shape=resized)

    def _place(self, target: Any, leaf: Leaf, resized: tuple[int, ...] | None = None) -> Sharding | Uncommitted | None:
        """Where a target wants an array, else where it was saved; None where these devices do not exist here.

        A description that names the device on which an uncommitted array was saved gets it uncommitted: descriptions
        of arrays do not say whether they are.
        """
        if isinstance(target, jax.Array) and not target.committed:
            return UNCOMMITTED
        with contextlib.suppress(ValueError):  # Orbax's metadata of a sharding whose devices do not exist here
            sharding = _jax_sharding(getattr(target, "sharding", None))
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
                return self._on_devices(leaf, sharding)
            if isinstance(sharding, Sharding):
                is_placed = isinstance(target, jax.Array) or not self.shardings.would_lie_at(leaf, sharding)
                return sharding if is_placed else UNCOMMITTED
        found = self.shardings.place_of(leaf)
        return found if resized is None or not isinstance(found, Sharding) or divides(found, resized) else None

    def _on_devices(self, leaf: Leaf, abstract: NamedSharding) -> Sharding | None:
        """A sharding without devices, as `jax.eval_shape` gives it, on the mesh that is set, or else on the leaf's.

        Notes a difference, and returns None, where neither has such axes.
        """
        axes = abstract.mesh
        mesh = jax.sharding.get_mesh()
        if not {*axes.axis_names} <= {*mesh.axis_names}:  # none is set, or another one
            saved = self.shardings.of(leaf)
            if not isinstance(saved, NamedSharding) or saved.mesh.shape_tuple != axes.shape_tuple:
                asked = f"{abstract.spec} on {axes.shape_tuple}, without devices: restore under `jax.set_mesh(mesh)`"
                self._row(leaf.name, "sharding", describe_leaf(leaf), asked)
                return None
            mesh = saved.mesh
        return NamedSharding(mesh, abstract.spec, memory_kind=abstract.memory_kind)

    def with_restore_args(self, number: int, leaf: Leaf, args: Any, target: Any = None) -> LeafRequest:
        """A leaf with explicit `ocp.RestoreArgs`: they decide its type, and the target's value is a placeholder.

        As in Orbax, the shape of a target array with dimensions must be the stored one unless the arguments name
        another, and `ArrayRestoreArgs` without a dtype take the target's.
        """
        given = _GivenArgs.of(args, target)
        if leaf.kind in EMPTY_KINDS or leaf.kind in _TEXT_KINDS:
            return self._leaf(number, leaf, "") if args.restore_type is str else as_saved(number, leaf, self.shardings)
        if mismatch := self._other_shape(leaf, given):
            return mismatch
        if given.of_array or given.typed:
            return self._array_as_given(number, leaf, given)
        kind = args.restore_type
        if kind in (str, int, float, bool, complex):
            return self._leaf(number, leaf, kind())
        if kind is np.ndarray or (kind is None and given.dtype is not None):
            dtype = None if given.dtype is None else np.dtype(given.dtype)
            return RestoredLeaf(number, RestoredAs.NUMPY, dtype=dtype)
        return as_saved(number, leaf, self.shardings)

    def _other_shape(self, leaf: Leaf, given: "_GivenArgs") -> LeafRequest | None:
        """Notes a shape that the leaf cannot get; None if each that is named is the leaf's, or one to resize it to."""
        for shape in given.shapes:
            if shape in (leaf.shape, logical_shape(leaf)):
                continue
            if given.strict or leaf.kind == "prng" or len(shape) != len(leaf.shape):
                return self._row(leaf.name, "shape", describe_leaf(leaf), str(list(shape)))
        return None

    def _array_as_given(self, number: int, leaf: Leaf, given: "_GivenArgs") -> LeafRequest:
        """A jax array with the dtype, the sharding and the shape that arguments name, or with the leaf's own."""
        dtype = given.dtype
        if dtype is None:
            number_type = {"bool": bool, "int": int, "float": float}.get(leaf.kind, complex)
            dtype = leaf.dtype if leaf.dtype is not None else jax.dtypes.canonicalize_dtype(number_type)
        own = logical_shape(leaf) if given.typed else leaf.shape
        resized = [shape for shape in given.shapes if shape not in (leaf.shape, logical_shape(leaf))]
        abstract = jax.ShapeDtypeStruct(resized[-1] if resized else own, dtype, sharding=given.sharding)
        return self._array(number, leaf, abstract, self.resize or not given.strict)


class _GivenArgs(NamedTuple):
    """What `ocp.RestoreArgs` and the target of a leaf name together."""

    of_array: bool  # they are of a jax array
    dtype: Any
    shapes: tuple[tuple[int, ...], ...]
    strict: bool  # the shape must be the stored one
    args: Any

    @property
    def typed(self) -> bool:
        """Whether they are of typed PRNG keys."""
        return self.dtype is not None and tree_lib.is_prng_dtype(self.dtype)

    @property
    def sharding(self) -> Any:
        """The sharding that the arguments name, or None."""
        sharding = _jax_sharding(getattr(self.args, "sharding", None))
        mesh = getattr(self.args, "mesh", None)
        if sharding is None and mesh is not None and self.args.mesh_axes is not None:
            return NamedSharding(mesh, self.args.mesh_axes)
        return sharding

    @classmethod
    def of(cls, args: Any, target: Any) -> Self:
        """As in Orbax: the arguments come first, and then a target array with dimensions."""
        dtype = args.dtype
        of_array = isinstance(args, ocp.ArrayRestoreArgs) and args.restore_type in (None, jax.Array)
        named = [args.global_shape, args.shape] if of_array else []
        shapes = tuple([tuple(shape) for shape in named if shape is not None])
        strict = getattr(args, "strict", True)
        is_array = getattr(target, "shape", ()) and hasattr(target, "dtype")
        if strict and is_array and not tree_lib.is_prng_dtype(target.dtype):
            shapes = shapes or (tuple(target.shape),)
            dtype = target.dtype if dtype is None and of_array else dtype
        return cls(of_array=of_array, dtype=dtype, shapes=shapes, strict=strict, args=args)


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
