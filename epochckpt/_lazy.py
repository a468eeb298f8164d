"""Imports that happen when something is used: jax, Orbax and NumPy, and the public names of our packages (`lookup`).

jax and Orbax take seconds to import and NumPy a tenth of one, and a look at a directory (`epochckpt ls`) needs none.
Modules that such a look imports take them from here, and evaluate no annotation (`from __future__ import annotations`).
"""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Lazy(ModuleType):
    """A module that is imported when something of it is used."""

    _imported: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if self._imported is None:
            self._imported = importlib.import_module(self.__name__)
        return getattr(self._imported, name)


class _LazyConstant(_Lazy):
    """One whose names never change: each is looked up once, because it is used for every leaf."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp
else:
    jax = _Lazy("jax")
    jnp = _Lazy("jax.numpy")
    np = _LazyConstant("numpy")
    ocp = _Lazy("orbax.checkpoint")

__all__ = ["jax", "jnp", "lookup", "np", "ocp"]


def lookup(package: str, modules: Mapping[str, str], name: str) -> Any:
    """What the `__getattr__` of a package returns for one of its public names; imports the module that has it.

    Args:
        package: the full name of the package.
        modules: the module of the package in which each public name lies; empty for a name that is itself a module.
        name: the name that is asked for; AttributeError if `modules` lacks it.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        if not modules[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
    except (AttributeError, ImportError) as error:
        from importlib import metadata  # it takes as long as all of `import epochckpt`

        version = metadata.version("orbax-checkpoint")
        if version.startswith("0."):
            raise
        raise ImportError(
            f"epochckpt needs orbax-checkpoint below 1.0, and {version} is installed, which has other things under the "
            "names that epochckpt uses: pip install 'orbax-checkpoint<1.0'"
        ) from error
