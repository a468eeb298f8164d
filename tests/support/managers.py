"""The two classes that must do the same: a test that carries `both` runs once with each of them.

Its body knows only what Orbax's guides and users write. That it passes with stock Orbax shows that it tells the truth
about Orbax; that it then passes with ours is the promise.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import UnsupportedError

ManagerClass = Callable[..., Any]
MANAGERS: dict[str, ManagerClass] = {"orbax": ocp.CheckpointManager, "epochckpt": ec.CheckpointManager}

# Stock Orbax shows that a test says what is so: its part of such tests is for CI. It alone warns when it is to put an
# array where it was saved, and leaves coroutines behind when it fails.
_MARKS = {
    "orbax": [
        pytest.mark.slow,
        pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
        pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    ]
}

both = pytest.mark.parametrize(
    "manager_class", [pytest.param(c, id=name, marks=_MARKS.get(name, [])) for name, c in MANAGERS.items()]
)


@contextlib.contextmanager
def or_refused(manager_class: ManagerClass, name: str) -> Iterator[None]:
    """For the few forms that docs/orbax.md lists as refused: Orbax does them; ours may say instead what it refuses.

    Args:
        manager_class: the class under test.
        name: what the error has to name.
    """
    try:
        yield
    except UnsupportedError as error:
        if manager_class is ocp.CheckpointManager or name not in str(error):
            raise


def names(folder: str | os.PathLike[str]) -> set[str]:
    """What lies in a folder."""
    return {path.name for path in pathlib.Path(folder).iterdir()}


@contextlib.contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """How many bytes this process has allocated since, while the garbage collector does nothing."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()


def sharding(*spec: str | None) -> jax.sharding.NamedSharding:
    """A sharding over all devices, on the axis `model`."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def abstract(tree: Any) -> Any:
    """The tree with the shape, dtype and sharding of every array in its place."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


def assert_same(found: Any, expected: Any) -> None:
    """Same structure, and same values, shapes and dtypes at every leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        assert np.asarray(a).dtype == np.asarray(b).dtype, where
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=where)
