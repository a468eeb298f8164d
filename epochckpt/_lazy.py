"""jax and Orbax as names that import them when something of them is used; and packages that import what is asked for.

They take seconds to import, and a look at a directory (`epochckpt ls`) needs neither. Modules on its way take them from
here, and evaluate no annotation (`from __future__ import annotations`).
"""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Lazy(ModuleType):
    """A module that is imported when something of it is used."""

    _imported: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if self._imported is None:
            self._imported = importlib.import_module(self.__name__)
        return getattr(self._imported, name)


if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp
else:
    jax = _Lazy("jax")
    jnp = _Lazy("jax.numpy")
    ocp = _Lazy("orbax.checkpoint")

__all__ = ["jax", "jnp", "names_of", "ocp"]


def names_of(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names, the keys, lie in `modules` of it, or are such modules (empty)."""

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        found = importlib.import_module(f"{package}.{module or name}")
        return getattr(found, name) if module else found

    return find
