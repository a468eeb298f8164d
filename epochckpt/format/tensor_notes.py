"""What a safetensors file cannot say by itself: key paths, Python values, PRNG keys; kept in its `__metadata__`.

`export` writes it under the key `epochckpt`, `import_` reads it; everybody else ignores it. It is JSON: `tensors` are
[path, kind] or [path, kind, PRNG implementation] by name, for those whose name and bytes alone do not say it; `values`
are [path, kind, value] of the leaves that are no tensors. Paths, kinds and values are written as in `epoch.json`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from epochckpt.errors import FormatError
from epochckpt.format import tree as tree_lib
from epochckpt.format.tree import KeyPath

KEY = "epochckpt"
_EMPTY: dict[str, Any] = {"none": None, "dict": {}, "list": [], "tuple": (), "node": {}}


@dataclasses.dataclass
class Notes:
    """The notes of one export.

    Attributes:
        separator: what stands between the keys in names.
        tensors: (path, kind, PRNG implementation or None) by name of the tensor.
        values: (path, kind, value as JSON) of the other leaves.
    """

    separator: str
    tensors: dict[str, tuple[KeyPath, str, str | None]] = dataclasses.field(default_factory=dict)
    values: list[tuple[KeyPath, str, Any]] = dataclasses.field(default_factory=list)

    def add(self, name: str, path: KeyPath, kind: str, impl: str | None) -> None:
        """Notes a tensor, if its name and bytes do not say it all."""
        if split(name, self.separator) != path or kind not in ("jax", "numpy"):
            self.tensors[name] = path, kind, impl

    def only(self, names: Mapping[str, Any], *, values: bool) -> Notes:
        """Those for one of several files."""
        tensors = {name: note for name, note in self.tensors.items() if name in names}
        return Notes(self.separator, tensors, self.values if values else [])

    def to_text(self) -> str:
        """As JSON."""
        rows = {n: [tree_lib.path_to_json(p), k, *([i] if i else [])] for n, (p, k, i) in self.tensors.items()}
        values = [[tree_lib.path_to_json(p), k, v] for p, k, v in self.values]
        note = {"version": 1, "separator": self.separator, "tensors": rows, "values": values}
        return json.dumps(note, separators=(",", ":"))


def split(name: str, separator: str | None) -> KeyPath:
    """The key path of nested dicts that a name stands for; None: one dict."""
    return tuple(("k", key) for key in (name.split(separator) if separator is not None else [name]))


def read(path: str, text: str) -> Notes:
    """Parses what `Notes.to_text` made.

    Raises:
        FormatError: it is something else.
    """
    problem = FormatError(path, f"its __metadata__ {KEY!r} is not what epochckpt's export writes")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise problem from None
    if not isinstance(data, dict) or data.get("version") != 1:
        raise problem
    separator, tensors, values = data.get("separator"), data.get("tensors"), data.get("values")
    if not isinstance(separator, str) or not separator or not isinstance(tensors, dict) or not isinstance(values, list):
        raise problem
    rows = [*tensors.values(), *values]
    if not all(isinstance(row, list) and len(row) in (2, 3) and isinstance(row[1], str) for row in rows):
        raise problem
    notes = Notes(separator)
    for name, row in tensors.items():
        impl = row[2] if len(row) == 3 else None
        if row[1] not in tree_lib.ARRAY_KINDS or isinstance(impl, str) != (row[1] == "prng"):
            raise problem
        notes.tensors[name] = tree_lib.path_from_json(path, row[0]), row[1], impl
    for row in values:
        if len(row) != 3 or row[1] not in tree_lib.VALUE_KINDS | tree_lib.EMPTY_KINDS:
            raise problem
        notes.values.append((tree_lib.path_from_json(path, row[0]), row[1], row[2]))
    return notes


def value_of(path: str, kind: str, data: Any) -> Any:
    """A leaf that is no tensor."""
    return _EMPTY[kind] if kind in _EMPTY else tree_lib.value_from_json(path, kind, data)


def array_of(path: str, array: np.ndarray, kind: str, impl: str | None) -> Any:
    """A leaf from the bytes of its tensor.

    Raises:
        FormatError: they cannot be that.
    """
    try:
        if kind == "prng":
            return jax.random.wrap_key_data(jnp.array(array), impl=impl)
        if kind == "scalar" and not array.ndim:
            return np.array(array)[()]
        if kind == "longbytes":
            return array.tobytes()
        if kind == "longstr":
            return array.tobytes().decode("utf-8", "surrogatepass")
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(path, f"a tensor is noted as {kind} and is none: {error}") from None
    return array
