"""Pytrees in the format: key paths, names and kinds of leaves, dtypes, and the values of Python leaves.

A key path is a tuple of `(type, key)` pairs. Types: `k` dict key, `s` sequence index, `a` attribute (NamedTuple,
dataclass), `f` flattened index (a custom node without keys). A leaf's *name* is its path as text. Reserved characters
are percent-escaped, so that `{"a/b": x}` and `{"a": {"b": x}}`, and the keys `1` and `"1"`, have different names.
"""

from __future__ import annotations

import collections
import functools
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

from epochckpt._lazy import jax, jnp, np
from epochckpt.errors import FormatError, InvalidArgumentError
from epochckpt.format.json_kinds import is_list
from epochckpt.storage.mmap import Assembled

KeyPath = tuple[tuple[str, Any], ...]

# Kinds of leaves. Only those of the first group have bytes in a data file.
ARRAY_KINDS = frozenset({"jax", "prng", "numpy", "scalar", "longstr", "longbytes"})
VALUE_KINDS = frozenset({"bool", "int", "float", "complex", "str", "bytes"})
EMPTY_KINDS = frozenset({"none", "dict", "list", "tuple", "node"})

INLINE_BYTES = 4096  # longer strings and bytes go to the data file
_SAFE = "".join(chr(c) for c in range(0x21, 0x7F) if chr(c) not in '%/[]"\\')
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # JSON joins two adjacent ones to one character
_INT_LIKE = re.compile(r"-?\d+\Z")
MAX_DEPTH = 256
TIME_UNIT = r"(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?\Z"
"""The unit in the name of a datetime type. NumPy accepts a multiplier of 0, too, and then divides by it."""
_TIME = re.compile(f"<[mM]8{TIME_UNIT}")

_NUMPY_TYPES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


@functools.cache
def dtypes() -> Mapping[str, np.dtype[Any]]:
    """The dtypes of numbers that arrays may have, by the names that the format has for them."""
    import ml_dtypes

    found = {np.dtype(each).name: np.dtype(each) for each in _NUMPY_TYPES}
    for name in dir(ml_dtypes):
        kind: Any = getattr(ml_dtypes, name)
        if isinstance(kind, type) and issubclass(kind, np.generic):
            found[name] = np.dtype(cast(Any, kind))
    return found


def is_prng_dtype(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return issubdtype(dtype, jax.dtypes.prng_key)


def issubdtype(dtype: Any, kind: Any) -> bool:
    """`np.issubdtype`, also for the types that JAX adds."""
    return bool(jnp.issubdtype(dtype, kind))


def dtype_name(dtype: np.dtype[Any], where: str) -> str:
    """The format's name of a NumPy dtype; InvalidArgumentError, which says `where` the leaf is, if it has none."""
    name = _dtype_name(dtype)
    if name is None:
        raise InvalidArgumentError(
            f"{where}: arrays of dtype {dtype} cannot be saved; expected a number type of JAX or NumPy, or datetime64"
        )
    return name


@functools.lru_cache(maxsize=256)
def _dtype_name(dtype: np.dtype[Any]) -> str | None:
    if dtype.name in dtypes():  # the name of no dtype says its order of bytes
        return dtype.name
    name = dtype.newbyteorder("<").str if dtype.kind in "mM" else ""
    return name if _TIME.match(name) else None  # a unit that `parse_dtype` would refuse is not written


def fits(shape: Sequence[int], dtype: np.dtype[Any]) -> bool:
    """Whether NumPy can have such an array; it multiplies all dimensions but zeros."""
    return math.prod(d for d in shape if d) * dtype.itemsize < 2**63


def parse_dtype(path: str, name: object) -> np.dtype[Any]:
    """The NumPy dtype for a name that `dtype_name` made; FormatError naming `path` otherwise."""
    if isinstance(name, str):
        if name in dtypes():
            return dtypes()[name]
        if _TIME.match(name):
            return np.dtype(name)
    raise FormatError(path, f"unknown dtype {str(name)[:40]!r}")


@functools.cache  # it is asked for with each leaf
def _tree_util() -> Any:
    """JAX's module of this name; the types of its functions are partly unknown."""
    return jax.tree_util


def _is_empty(node: Any) -> bool:
    """None and empty containers are kept as leaves."""
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def flatten(tree: Any) -> tuple[list[tuple[KeyPath, Any]], Any]:
    """(path, leaf) pairs of a pytree in JAX's order, and its treedef; None and empty containers are leaves."""
    pairs, treedef = _tree_util().tree_flatten_with_path(tree, is_leaf=_is_empty)
    return [(key_path(path), leaf) for path, leaf in pairs], treedef


def flatten_leaves(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of `flatten` and the treedef, without paths: cheap enough for the training thread."""
    return _tree_util().tree_flatten(tree, is_leaf=_is_empty)


def key_types(treedef: Any) -> list[type]:
    """The types of dict keys that are no str, in their order: equal treedefs may differ in them, since `1 == True`."""
    types = list[type]()
    left = [treedef]
    while left:
        node = left.pop()
        if (data := node.node_data()) is not None:
            if issubclass(data[0], dict):
                keys = data[1][1] if issubclass(data[0], collections.defaultdict) else data[1]
                types += [type(key) for key in keys if type(key) is not str]
            left += node.children()
    return types


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    """The inverse of `flatten`."""
    return _tree_util().tree_unflatten(treedef, leaves)


def key_path(path: Sequence[Any]) -> KeyPath:
    """A key path of JAX in our form; InvalidArgumentError for a dict key that cannot be saved."""
    out: list[tuple[str, Any]] = []
    tree_util = _tree_util()
    dict_key = tree_util.DictKey
    for entry in path:
        if type(entry) is dict_key and type(key := entry.key) is str:  # most keys
            out.append(("k", key))
        elif isinstance(entry, dict_key):
            key: Any = entry.key
            if isinstance(key, np.generic):
                key = entry.key.item()
            if not (key is None or type(key) in (str, int, float, bool) or isinstance(key, str | int)):
                raise InvalidArgumentError(
                    f"dict key {key!r} under {leaf_name(tuple(out))!r} cannot be saved; "
                    "expected str, int, float, bool or None"
                )
            out.append(("k", str(key) if isinstance(key, str) else key))
        elif isinstance(entry, tree_util.SequenceKey):
            out.append(("s", entry.idx))
        elif isinstance(entry, tree_util.GetAttrKey):
            out.append(("a", str(entry.name)))
        elif isinstance(entry, tree_util.FlattenedIndexKey):
            out.append(("f", entry.key))
        else:
            out.append(("a", str(entry)))
    if len(out) > MAX_DEPTH:
        raise InvalidArgumentError(f"leaf {leaf_name(tuple(out))[:200]!r}… is nested deeper than {MAX_DEPTH}")
    return tuple(out)


def _segment(kind: str, key: Any) -> str:
    if isinstance(key, str):
        text = quote(key, safe=_SAFE, errors="surrogatepass") or "%"
        if kind == "k" and _INT_LIKE.match(text):
            return f"%{ord(text[0]):02X}{text[1:]}"
        return text
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    return f"%{type(key).__name__}:{quote(repr(key), safe=_SAFE)}"


def leaf_name(path: KeyPath) -> str:
    """A leaf's name: its path as text, unique in its tree. A tree of a single leaf has the name `value`."""
    if not path:
        return "value"
    name = "/".join([k if type(k) is str and k.isascii() and k.isidentifier() else _segment(of, k) for of, k in path])
    return "%5F" + name[1:] if name == "__metadata__" else name  # safetensors reserves that name


def path_to_json(path: KeyPath) -> list[Any]:
    """`["a", ["s", 0], …]`: plain strings are dict keys, the rest are (type, key) pairs."""
    out: list[Any] = []
    for kind, key in path:
        if kind == "k" and isinstance(key, str):
            out.append(["u", _surrogates_to_hex(key)] if not key.isascii() and _SURROGATE.search(key) else key)
        elif isinstance(key, float):
            out.append(["x", key.hex()])
        else:
            out.append([kind, key])
    return out


def path_from_json(where: str, data: object) -> KeyPath:
    """The inverse of `path_to_json`; FormatError naming `where` for anything else."""
    if not is_list(data) or len(data) > MAX_DEPTH:
        raise FormatError(where, "a key path is not a list of at most 256 entries")
    out: list[tuple[str, Any]] = []
    for entry in data:
        if isinstance(entry, str):
            out.append(("k", entry))
            continue
        if not is_list(entry) or len(entry) != 2:
            raise FormatError(where, f"a key path has the entry {str(entry)[:80]!r}")
        kind, key = entry
        if kind == "x" and isinstance(key, str):
            try:
                out.append(("k", float.fromhex(key)))
            except (ValueError, OverflowError):
                raise FormatError(where, f"a key path has the float key {key[:40]!r}") from None
        elif kind == "u" and isinstance(key, str):
            out.append(("k", value_from_json(where, "str", [key])))
        elif (kind == "k" and (key is None or isinstance(key, bool | int))) or (
            (kind in ("s", "f") and type(key) is int and key >= 0) or (kind == "a" and isinstance(key, str))
        ):
            out.append((kind, key))
        else:
            raise FormatError(where, f"a key path has the entry {str(entry)[:80]!r}")
    return tuple(out)


def nest(pairs: Sequence[tuple[KeyPath, Any]], where: str) -> Any:
    """Builds dicts and lists from (path, value) pairs; custom nodes become dicts or lists, as in Orbax."""
    if len(pairs) == 1 and not pairs[0][0]:
        return pairs[0][1]
    root: dict[Any, Any] = {}
    sequences: dict[int, dict[Any, Any]] = {}
    for path, value in pairs:
        node = root
        for depth, (kind, key) in enumerate(path):
            if kind in ("s", "f"):
                sequences[id(node)] = node
            if depth == len(path) - 1:
                if key in node:
                    raise FormatError(where, f"two leaves are named {leaf_name(path)!r}")
                node[key] = value
            else:
                child = node.setdefault(key, _Branch())
                if not isinstance(child, _Branch):
                    raise FormatError(where, f"{leaf_name(path[: depth + 1])!r} is a leaf and a folder at once")
                node = child
    return _collapse(root, sequences)


class _Branch(dict[Any, Any]):
    """A dict that `nest` made; a leaf may be a dict, too."""


def _collapse(node: dict[Any, Any], sequences: dict[int, dict[Any, Any]]) -> Any:
    done = {k: _collapse(v, sequences) if isinstance(v, _Branch) else v for k, v in node.items()}
    if id(node) in sequences and set(done) == set(range(len(done))):
        return [done[i] for i in range(len(done))]
    return done


def leaf_kind(leaf: Any) -> str | None:
    """The kind of a leaf; None for one that cannot be saved."""
    if isinstance(leaf, jax.Array):
        return "prng" if is_prng_dtype(leaf.dtype) else "jax"
    if isinstance(leaf, np.ndarray):
        return None if isinstance(leaf, np.ma.MaskedArray) else "numpy"  # a mask would be lost
    if isinstance(leaf, Assembled):
        return "numpy"
    if isinstance(leaf, bool):
        return "bool"
    if isinstance(leaf, str):  # also NumPy's
        return "str" if len(leaf) <= INLINE_BYTES // 4 else "longstr"
    if isinstance(leaf, bytes):
        return "bytes" if len(leaf) <= INLINE_BYTES else "longbytes"
    if isinstance(leaf, np.generic):
        return "scalar"
    if isinstance(leaf, int | float | complex):
        return type(leaf).__name__ if type(leaf) in (int, float, complex) else "int" if isinstance(leaf, int) else None
    if leaf is None:
        return "none"
    if _is_empty(leaf):
        return type(leaf).__name__ if type(leaf) in (dict, list, tuple) else "node"
    return None


def empty_value(kind: str) -> Any:
    """The value of a leaf of an empty kind without a target: an empty container or None."""
    return {"dict": dict[str, Any](), "list": list[Any](), "tuple": ()}.get(kind)


def value_to_json(value: Any) -> Any:
    """A Python scalar, string or bytes as JSON, without loss: large ints, NaN, -0.0, surrogates."""
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, int):
        return hex(value)
    if isinstance(value, float):
        return struct.pack("<d", value).hex()
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag).hex()
    if isinstance(value, bytes):
        return value.hex()
    return [_surrogates_to_hex(value)] if not value.isascii() and _SURROGATE.search(value) else str(value)


def _surrogates_to_hex(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").hex()


def value_from_json(where: str, kind: str, data: object) -> Any:
    """The inverse of `value_to_json` for a leaf of `kind`; FormatError naming `where` for anything else."""
    try:
        if kind == "bool" and isinstance(data, bool):
            return data
        if isinstance(data, str):
            if kind == "int":
                return int(data, 16)
            if kind == "float":
                return struct.unpack("<d", bytes.fromhex(data))[0]
            if kind == "complex":
                return complex(*struct.unpack("<dd", bytes.fromhex(data)))
            if kind == "bytes":
                return bytes.fromhex(data)
            if kind == "str":
                return data
        if kind == "str" and is_list(data) and len(data) == 1 and isinstance(data[0], str):
            return bytes.fromhex(data[0]).decode("utf-8", "surrogatepass")
    except (ValueError, struct.error):
        pass
    raise FormatError(where, f"a {kind} value is recorded as {str(data)[:80]!r}")
