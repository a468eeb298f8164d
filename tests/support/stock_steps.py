"""Steps that stock Orbax writes, in every layout that it has."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from epochckpt.storage import open_store
from tests.support import stock_states

LAYOUTS = [
    f"{'ocdbt' if ocdbt else 'folders'}-{'zarr3' if zarr3 else 'zarr2'}-{items}"
    for ocdbt, zarr3, items in itertools.product((True, False), (False, True), ("single", "multi"))
]


CONFIG = {"lr": 0.1, "layers": [1, 2], "name": "größer"}


def loss(metrics: Any) -> float:
    return metrics["loss"]


BEST = {"best_fn": loss, "best_mode": "min"}


def full() -> dict[str, Any]:
    """Arrays on a mesh, keys, NumPy, scalars, text, empty containers."""
    return {**stock_states.plain(), "text": "größer", "complex": stock_states.place(np.full(4, 1 - 2j), "x")}


def write(directory: Any, layout: str, steps: dict[int, Any], **options: Any) -> None:
    """Has stock Orbax save steps: item `default`, or `state` and `config`."""
    arrays = ocp.PyTreeCheckpointHandler(use_ocdbt="ocdbt" in layout, use_zarr3="zarr3" in layout)
    single = layout.endswith("single")
    handlers = arrays if single else {"state": arrays, "config": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(
        directory, options=ocp.CheckpointManagerOptions(**BEST, **options), item_handlers=handlers
    ) as manager:
        for step, tree in steps.items():
            one = ocp.args.PyTreeSave(tree)
            args = one if single else ocp.args.Composite(state=one, config=ocp.args.JsonSave(CONFIG))
            manager.save(step, args=args, metrics={"loss": 1.0 / (step + 1)}, custom_metadata={"step": step})


def simple(directory: pathlib.Path, *steps: int, **options: Any) -> None:
    """Steps of a small tree, by stock Orbax."""
    with ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.StandardSave(tree_of(step)), metrics={"loss": abs(step - 3.5)})


def upload(directory: pathlib.Path, url: str, *steps: int) -> None:
    """Copies steps to a bucket, as stock Orbax would have written them there."""
    store = open_store(url)
    for step in steps:
        for file in sorted(path for path in (directory / str(step)).rglob("*") if path.is_file()):
            store.put(str(file.relative_to(directory)), file.read_bytes(), draft="", replace=True)
        store.put(f"{step}/commit_success.txt", b"", draft="", replace=True)


def download(url: str, path: str, directory: pathlib.Path) -> pathlib.Path:
    """Copies a folder of a bucket to a local one; returns that."""
    store = open_store(url)
    for file in store.files(path):
        place = directory / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(store.read(f"{path}/{file.path}", limit_bytes=1 << 24))
    return directory


def tree_of(step: int) -> dict[str, Any]:
    return {"w": jnp.full((4, 3), step, jnp.float32), "n": np.arange(3) + step, "step": step}
