"""Stock Orbax in a bucket, on any number of devices, in a process where epochckpt cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.modules.setdefault("epochckpt", None)  # type: ignore[arg-type]  # an import of it fails, unless the test has done so


def values(epoch: int) -> dict[str, Any]:
    """What an epoch holds, as NumPy arrays and numbers."""
    rng = np.random.default_rng(epoch)
    w = rng.normal(size=(16, 24)).astype(np.float32)
    return {
        "params": {"w": w, "half": w.astype(jnp.bfloat16)[:8], "scalar": np.float32(3)},
        "step": epoch,
    }


def placed(tree: Any) -> Any:
    """The same with arrays over all devices, whose number divides 8."""
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("x", "y"))

    def put(x: Any) -> Any:
        if not isinstance(x, np.ndarray | np.generic):
            return x
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec("x") if x.ndim else PartitionSpec()))

    return jax.tree.map(put, tree)


def save(directory: str, epochs: list[int]) -> None:
    """Stock Orbax saves, with metrics and an item of JSON."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: -metrics["loss"])  # else Orbax writes no metrics
    with ocp.CheckpointManager(directory, options=options) as manager:
        for epoch in epochs:
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(placed(values(epoch))), config=ocp.args.JsonSave({"epoch": epoch})
            )
            manager.save(epoch, args=items, metrics={"loss": 1.0 / epoch})


def abstract(epoch: int) -> Any:
    """What to restore an epoch as."""
    tree = placed(values(epoch))
    return jax.tree.map(lambda x: ocp.utils.to_shape_dtype_struct(x) if isinstance(x, jax.Array) else x, tree)


def equal(found: Any, epoch: int) -> bool:
    """Whether a tree holds what an epoch does."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(values(epoch)), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def read(directory: str, epoch: int, item: str) -> dict[str, Any]:
    """What differs, by reader; and what stock Orbax knows of the directory."""
    target = abstract(epoch)
    path = f"{directory}/{epoch}"
    restore = ocp.args.StandardRestore(target)
    pytree = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    with ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        steps, metrics = list(manager.all_steps()), manager.metrics(epoch)
        composite = manager.restore(epoch, args=ocp.args.Composite(**{item: restore}))[item]
    found = {
        "Composite": composite,
        "StandardCheckpointer": ocp.StandardCheckpointer().restore(f"{path}/{item}", target),
        "PyTreeCheckpointer": ocp.PyTreeCheckpointer().restore(f"{path}/{item}", args=pytree),
        "v1": ocp.v1.load_checkpointables(path, {item: target})[item],
    }
    wrong = [name for name, tree in found.items() if not equal(tree, epoch)]
    return {"wrong": wrong, "steps": steps, "metrics": metrics, "devices": jax.device_count()}


def by_default(directory: str, epochs: list[int]) -> list[list[Any]]:
    """What the v0 manager, and the v1 trainer, make of the unnamed item of each epoch: True, or an error."""
    return [_by_default(directory, epoch) for epoch in epochs]


def _by_default(directory: str, epoch: int) -> list[Any]:
    target = abstract(epoch)

    def tried(load: Callable[[], Any]) -> Any:
        try:
            return equal(load(), epoch)
        except (KeyError, ValueError) as error:
            return str(error).replace("\\'", "'")

    with ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        found = [tried(lambda: manager.restore(epoch, args=ocp.args.StandardRestore(target)))]
    with ocp.v1.training.Checkpointer(directory) as trainer:
        found.append(tried(lambda: trainer.load(epoch, target)))
        found.append(tried(lambda: trainer.load(epoch, target, checkpointable_name="default")))
    return found


def read_all(directory: str, epoch: int) -> dict[str, Any]:
    """An epoch of several items, of which stock Orbax is told nothing."""
    with ocp.CheckpointManager(directory) as manager:
        found = manager.restore(epoch)
        metadata = manager.metadata(epoch)
    keys = {name: np.asarray(jax.random.key_data(found[name])).tolist() for name in ("key",)}
    state = [np.asarray(x).tolist() for x in jax.tree.leaves(found["state"])]
    expected = [np.asarray(x).tolist() for x in jax.tree.leaves(values(epoch))]
    return {
        "items": sorted(found.keys()),
        "state": state == expected,
        "config": found["config"],
        **keys,
        "metrics": metadata.metrics,
        "custom": metadata.custom_metadata,
    }


def clean_up(directory: str) -> list[int]:
    """Opens a directory with a manager that removes what stock Orbax takes for unfinished; returns its steps."""
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with ocp.CheckpointManager(directory, options=options) as manager:
        return list(manager.all_steps())
