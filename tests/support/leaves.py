"""Epochs of ours and of stock Orbax with every kind of leaf, and what is read of them."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.directory import EpochDirectory, directory_of
from epochckpt.format.tree import dtypes
from epochckpt.manager import CheckpointReader
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store
from tests.support import stock_states
from tests.support.stock_steps import CONFIG, LAYOUTS, full, write

SMALL = ec.StorageOptions(block_bytes=4096, part_bytes=16384)


def epoch_directory(directory: Any) -> EpochDirectory:
    return directory_of(open_store(directory), StepNames.of(ocp.CheckpointManagerOptions()))


def bits(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Random bits as a dtype; of narrow types the bits that they have."""
    raw = np.random.default_rng(3).integers(0, 2, size=(*array.shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    return raw.reshape(-1).view(dtype).reshape(array.shape)


def every_type() -> dict[str, Any]:
    """An array of every dtype, NumPy's and, where jax takes it, a jax array cut over devices."""
    out: dict[str, Any] = {}
    for name, dtype in dtypes().items():
        out[name] = bits(np.empty((8, 6)), dtype)
        if name not in ("int64", "uint64", "float64", "complex128"):  # those need jax_enable_x64
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # jax has no such arrays
                out[f"jax_{name}"] = stock_states.place(out[name], "x", "y")
    return out


def state() -> dict[str, Any]:
    """Everything that a tree may hold."""
    return {
        **full(),
        "types": every_type(),
        "shapes": {
            "none": jnp.zeros((0, 3), jnp.bfloat16),
            "scalar": np.float32(2.5),
            "zero": np.array(-7, np.int8),
            "deep": np.arange(2 * 3 * 5 * 7, dtype=np.int16).reshape(2, 3, 5, 7),
            "large": stock_states.place(np.random.default_rng(1).normal(size=(64, 800)).astype(np.float32), None, "y"),
            "when": np.array(["2026-01-02", "NaT"], dtype="datetime64[s]"),
        },
        "raw": b"\0ab",
        "long": "é" * 3000,
        "longraw": bytes(range(256)) * 20,
        "big": -(2**90),
    }


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One epoch of one process, in several small files."""
    path = tmp_path_factory.mktemp("ours") / "run"
    items = {
        "state": ocp.args.StandardSave(state()),
        "config": ocp.args.JsonSave(CONFIG),
        "own": ec.args.NodeSave({"seed": np.arange(5), "name": "first"}),
    }
    with ec.CheckpointManager(path, storage=SMALL) as manager:
        manager.save(3, args=ocp.args.Composite(**items))
    return path


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """One directory of stock Orbax per layout, with step 3."""
    root = tmp_path_factory.mktemp("stock")
    for layout in LAYOUTS:
        write(root / layout, layout, {3: full()})
    return {layout: root / layout for layout in LAYOUTS}


def flat(tree: Any) -> dict[str, Any]:
    """Leaves by name; typed keys as their data."""
    pairs = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is None or (isinstance(x, dict | list) and not x)
    )[0]
    out = {"/".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path): leaf for path, leaf in pairs}
    keys = {n for n, x in out.items() if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}
    return {n: jax.random.key_data(x) if n in keys else x for n, x in out.items()}


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, dict | list) and not node)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, jax.Array | np.ndarray | np.generic):
        wanted = np.asarray(expected)
        return (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    return type(found) is type(expected) and found == expected


def assert_pieces(leaves: CheckpointReader, item: str, name: str, whole: np.ndarray, node: str = "") -> None:
    """Pieces of several sizes are the array, in order, and none is larger than asked for."""
    for most in (1, 7, 10**6) if whole.size < 100 else (whole.size // 3, 10**6):
        parts = list(leaves.pieces(item, name, node, max_elements=most))
        assert all(p.ndim == 1 and 0 < p.size <= most and p.dtype == whole.dtype for p in parts), (name, most)
        assert b"".join(p.tobytes() for p in parts) == whole.tobytes(), (name, most)


def assert_reads(leaves: CheckpointReader, item: str, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        found = leaves.value(item, name)
        assert same(found, value), name
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            assert_pieces(leaves, item, name, found)
