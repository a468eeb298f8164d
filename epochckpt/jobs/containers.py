"""The containers of a pytree, such as tuples, named tuples and dataclasses: recorded, and made again.

A restore without a target gives dicts and lists. The record (JSON) names the original containers.
Classes are looked up only in modules that the program has imported already: a recorded name imports nothing. A class is
used only if JAX knows it as a container with the same fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax

from epochckpt.errors import EpochCheckpointError, InvalidArgumentError, say
from epochckpt.format import tree as tree_lib

_DEFINITION: Any = jax.tree_util.PyTreeDef
_make_definition = getattr(_DEFINITION, "from_node_data_and_children", None) or (
    _DEFINITION.make_from_node_data_and_children  # its name up to jax 0.8
)
_LEAF = jax.tree.structure(0)
_FORM = "the record of a blob's types has an unexpected form"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Container:
    """A container, and those in it. `from_json` fills `inner` when it has made the container; nothing else does."""

    cls: type
    static: Any = None  # what JAX keeps of it beside its children, such as the static fields of a dataclass
    # Of its children, in JAX's order; of a dict, list or tuple only those in `inner`, and keys that are no strings.
    keys: tree_lib.KeyPath = ()
    inner: dict[int, Container] = dataclasses.field(default_factory=dict)  # by the place of the child in `keys`
    hollow: bool = False  # no leaf is in it, so that an epoch may have nothing of it

    @property
    def name(self) -> str:
        """The class, for people."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def loses(self) -> str:
        """What a record cannot hold of this container or of one in it; empty: nothing."""
        try:
            _static_to_json(self.static)
            _find(self.cls.__module__, self.cls.__qualname__)
        except InvalidArgumentError as error:
            fields = [f.name for f in dataclasses.fields(self.cls)] if dataclasses.is_dataclass(self.cls) else []
            static = ", ".join(name for name in fields if name not in {key for _, key in self.keys})
            return f"{self.name}: {error}{f' (the static fields {static})' if static else ''}"
        return next(filter(None, (inner.loses() for inner in self.inner.values())), "")


def of(tree: Any) -> Container | None:
    """The containers of a pytree; None if it is made of dicts with strings as keys, and lists, alone."""
    if tree is None:
        return None
    keys, children, definition = _flatten_one(tree)
    data = definition.node_data()
    if data is None:
        return None
    cls, static = data
    inner = {number: nested for number, child in enumerate(children) if (nested := of(child)) is not None}
    hollow = len(inner) == len(children) and all(child.hollow for child in inner.values())
    if cls not in (dict, list, tuple):
        return Container(cls=cls, static=static, keys=keys, inner=inner, hollow=hollow)
    kept = [n for n, (kind, key) in enumerate(keys) if n in inner or (kind == "k" and type(key) is not str)]
    if cls is not tuple and not kept:
        return None
    inner = {place: inner[n] for place, n in enumerate(kept) if n in inner}
    return Container(cls=cls, keys=tuple(keys[n] for n in kept), inner=inner, hollow=hollow)


def _flatten_one(tree: Any) -> tuple[tree_lib.KeyPath, list[Any], Any]:
    """The keys and the children of one container, and its definition."""
    pairs, definition = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return tuple(tree_lib.key_path(path)[0] for path, _ in pairs if path), [child for _, child in pairs], definition


# -- making again ------------------------------------------------------------------------------------------------


def rebuild(plain: Any, container: Container, where: tree_lib.KeyPath = ()) -> Any:
    """Puts what a restore gave as dicts and lists, at this path of a blob, into containers of the right classes."""
    with contextlib.suppress(Exception):  # static fields may be anything, and so may their comparison raise anything
        if not where and of(plain) == container:  # as a user's `reshard` gave it
            return plain
    rebuilt = _children(plain, container, where)
    made = {}
    for number, (kind, key) in enumerate(container.keys):
        name = str(key) if key not in rebuilt and str(key) in rebuilt else key  # stock Orbax turns keys into strings
        inner = container.inner.get(number)
        if name not in rebuilt and (inner is None or not inner.hollow):
            raise InvalidArgumentError(f"{_at(where)}: {container.name} lacks {key!r}; found {_shown(rebuilt)}")
        child = rebuilt.pop(name, None)
        made[key] = child if inner is None else rebuild(child, inner, (*where, (kind, key)))
    if container.cls is dict:
        return {**rebuilt, **made}
    if container.cls in (list, tuple):
        return container.cls(child for _, child in sorted({**rebuilt, **made}.items()))
    if rebuilt:
        raise InvalidArgumentError(f"{_at(where)}: {container.name} has no {_shown(rebuilt)}")
    return _unflatten(container, list(made.values()), where)


def _children(plain: Any, container: Container, where: tree_lib.KeyPath) -> dict[Any, Any]:
    """What is in a restored dict or list, by key; nothing in None, as which an empty container comes back."""
    if plain is None:
        return {}
    if isinstance(plain, Mapping):
        return dict(plain)
    if not isinstance(plain, list | tuple):
        raise InvalidArgumentError(f"{_at(where)}: expected {container.name}, found {type(plain).__name__}")
    keys = [key for _, key in container.keys]
    by_place = container.cls in (list, tuple) or len(keys) != len(plain)
    return dict(enumerate(plain)) if by_place else dict(zip(keys, plain, strict=True))


def _unflatten(container: Container, children: list[Any], where: tree_lib.KeyPath) -> Any:
    data = container.cls, container.static
    try:
        definition = _make_definition(jax.tree_util.default_registry, data, [_LEAF] * len(children))
        made = definition.unflatten(children)
        keys, _, _ = _flatten_one(made)
    except Exception as error:  # the class may have changed since, and may raise anything
        problem = f"{container.name} cannot be made of the saved values: {say(error)}"
        raise InvalidArgumentError(f"{_at(where)}: {problem}") from error
    if keys != container.keys:
        now, then = (_shown(key for _, key in path) for path in (keys, container.keys))
        raise InvalidArgumentError(f"{_at(where)}: {container.name} has {now} here, and was saved with {then}")
    return made


def _at(where: tree_lib.KeyPath) -> str:
    return repr(tree_lib.leaf_name(where)) if where else "the blob itself"


def _shown(keys: Any) -> str:
    return ", ".join(map(repr, keys)) or "nothing"


# -- as JSON -----------------------------------------------------------------------------------------------------


class Recorder:
    """Records the containers of blobs, and anew only those that have changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, dict[str, Any] | None]] = {}

    def record(self, name: str, tree: Any) -> dict[str, Any] | None:
        """The containers of a blob as JSON; None if it is made of dicts and lists alone."""
        definition = jax.tree.structure(tree)
        if name not in self._known or self._known[name][0] != definition:
            container = of(tree)
            self._known[name] = definition, None if container is None else to_json(container)
        return self._known[name][1]


def to_json(container: Container) -> dict[str, Any]:
    """A container as JSON; `from_json` refuses one of which JSON cannot hold everything.

    It is flat, because JSON that is nested too deep is refused: `nodes` are [number of the type, parent, place in it].
    """
    types: dict[str, tuple[int, list[Any]]] = {}
    nodes: list[list[int]] = []

    def add(one: Container, parent: int, place: int) -> None:
        keys = [tree_lib.path_to_json((key,))[0] for key in one.keys]
        lost = dataclasses.replace(one, inner={}).loses()
        static = None if lost else _static_to_json(one.static)
        row = [one.cls.__module__, one.cls.__qualname__, keys, static, one.hollow, lost]
        number, _ = types.setdefault(repr(row), (len(types), row))
        me = len(nodes)
        nodes.append([number, parent, place])
        for child, inner in one.inner.items():
            add(inner, me, child)

    add(container, -1, 0)
    return {"types": [row for _, row in types.values()], "nodes": nodes}


def from_json(data: Any) -> Container:
    """The inverse of `to_json`."""
    try:
        types = [_type(row) for row in data["types"]]
        made = [dataclasses.replace(types[number], inner={}) for number, _, _ in data["nodes"]]
        for me, (_, parent, place) in enumerate(data["nodes"][1:], start=1):
            if not (0 <= parent < me and isinstance(place, int)):
                raise ValueError(f"node {me} is said to be in node {parent}, at {place!r}")
            made[parent].inner[place] = made[me]
        return made[0]
    except EpochCheckpointError:
        raise
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        raise InvalidArgumentError(f"{_FORM}: {say(error)}") from error


def _type(row: Any) -> Container:
    module, name, keys, static, hollow, lost = row
    if lost:
        raise InvalidArgumentError(str(lost))
    keys = tuple(tree_lib.path_from_json(_FORM, [key])[0] for key in keys)
    return Container(cls=_find(module, name), static=_static_from_json(static), keys=keys, hollow=bool(hollow))


def _find(module: str, name: str) -> type:
    """A class of this program. Nothing is imported, not by a module's own `__getattr__` either."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    if not isinstance(value, type) or (value.__module__, value.__qualname__) != (module, name):
        raise InvalidArgumentError("the program has no class of this name at the top of a module that it has imported")
    return value


def _static_to_json(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_static_to_json(one) for one in value]}
    if type(value) is dict:
        return {"dict": [[_static_to_json(key), _static_to_json(one)] for key, one in value.items()]}
    raise InvalidArgumentError(f"it has a part that no checkpoint holds, a {type(value).__name__}")


def _static_from_json(data: Any) -> Any:
    if isinstance(data, list):
        return [_static_from_json(one) for one in data]
    if not isinstance(data, dict):
        return data
    ((form, value),) = data.items()
    return {"float": float.fromhex, "tuple": tuple, "list": list, "dict": dict}[form](_static_from_json(value))
