"""What is saved into the directories of `tests/compat/data/epochckpt-1`; each function runs in every process of a job.

`tests.compat.make_golden` runs them. `tests/compat/test_golden.py` has the values once more, written independently.
"""

from __future__ import annotations

import functools
import os
import pathlib
import uuid
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt.storage import PosixStore, open_store
from tests.support.jobs import global_mesh, place
from tests.support.taps import eventually

Composite, Save, JsonSave = ocp.args.Composite, ocp.args.StandardSave, ocp.args.JsonSave
Options = ocp.CheckpointManagerOptions
STORAGE = ec.StorageOptions(save_timeout_secs=60, open_timeout_secs=60)


# -- several processes -------------------------------------------------------------------------------------------------


def sharded_state(epoch: int) -> dict[str, Any]:
    """Arrays of three processes with two devices each; several nodes hold most of their cells."""
    mesh = global_mesh((3, 2))

    def put(values: np.ndarray, *spec: Any) -> jax.Array:
        return place(values, NamedSharding(mesh, PartitionSpec(*spec)))

    grid = np.arange(24, dtype=np.float32).reshape(6, 4) + epoch
    return {
        "params": {
            "both": put(grid, "x", "y"),
            "joined": put(grid * 2, ("x", "y")),
            "columns": put(grid.astype(ml_dtypes.bfloat16), None, "y"),  # three nodes hold each of the two cells
            "replicated": [put(np.arange(5, dtype=np.float32) + 10 * i + epoch) for i in range(4)],
            "narrow": put(np.arange(6, dtype=np.int32) + epoch, "y"),
        },
        "count": put(np.array(epoch, np.int32)),
        "numpy": np.arange(4, dtype=np.int64) * epoch,
        "step": epoch,
        "rate": 0.5,
        "name": f"epoch {epoch}",
    }


def items(manager: ec.CheckpointManager, epoch: int) -> Composite:
    """A state, a file of a handler, and a value of each node's own."""
    number = jax.process_index()
    own = {"seed": 100 * epoch + number, "queue": [np.arange(number + 1), f"node {number}"]}
    return Composite(state=Save(sharded_state(epoch)), config=JsonSave({"epoch": epoch}), own=ec.args.NodeSave(own))


def history(directory: str) -> None:
    """Epochs 0, 2, 3 and 6, with all that may become of epochs.

    0 has attached metrics, 1 was deleted, 3 was overwritten, 4 and 5 were rolled back. A second run saved 6.
    """
    with ec.CheckpointManager(directory, storage=STORAGE) as manager:
        for epoch in range(6):
            metrics = {"loss": 1 / (epoch + 1), "parts": {"a": float("nan")}}
            manager.save(epoch, args=items(manager, epoch), metrics=metrics, custom_metadata={"note": ["x", epoch]})
            manager.wait_until_finished()
        manager.delete(1)
        manager.wait_until_finished()
        if jax.process_index() == 0:
            ec.attach_metrics(directory, 0, {"accuracy": 0.25}, "evaluator")
        manager.rollback_to(3)
        manager.allow_overwrite(3)
        manager.save(3, args=items(manager, 33), metrics={"loss": 0.125}, force=True)
        manager.wait_until_finished()
    with ec.CheckpointManager(directory, storage=STORAGE) as manager:
        manager.save(6, args=items(manager, 6))


def hosts(directory: str) -> None:
    """A directory on a disk of each process's own, and a mirror."""
    here, mirror = f"{directory}/disk-{jax.process_index()}", f"{directory}/mirror"
    storage = ec.StorageOptions(local_disks=True, mirror=mirror, save_timeout_secs=60, open_timeout_secs=60)
    with ec.CheckpointManager(here, storage=storage) as manager:
        for epoch in range(2):
            manager.save(epoch, args=items(manager, epoch), metrics={"loss": 1 / (epoch + 1)})
            manager.wait_until_finished()


# -- one process -------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


def of_every_dtype() -> dict[str, Any]:
    """An array of each type that JAX has; those of 64 bits are NumPy arrays, see `jax_enable_x64`."""
    signed = ["int2", "int4", "int8", "int16", "int32"]
    unsigned = ["uint2", "uint4", "uint8", "uint16", "uint32"]
    floats = [name for name in sorted(dir(ml_dtypes)) if name.startswith(("float4", "float6", "float8", "bfloat16"))]
    found: dict[str, Any] = {name: jnp.asarray(np.array([-1, 0, 1, 1]).astype(name)) for name in signed}
    found |= {name: jnp.asarray(np.array([3, 0, 1, 2]).astype(name)) for name in unsigned}
    for name in [*floats, "float16", "float32"]:
        values = np.array([1, 2, 0.5, 4], np.float32).astype(name)
        is_of_jax = name not in ("float6_e2m3fn", "float6_e3m2fn")
        found[name] = jnp.asarray(values) if is_of_jax else values
    found["bool"] = jnp.asarray(np.array([True, False, True]))
    found["complex64"] = jnp.asarray(np.array([1 + 2j, -0.5j], np.complex64))
    for name in ("int64", "uint64", "float64", "complex128"):
        found[name] = np.array([1, 2, 3], name)
    found["datetime64"] = np.array(["2026-11-24", "NaT"], "M8[D]")
    found["timedelta64"] = np.array([5, -5], "m8[25us]")
    return found


def of_every_kind() -> dict[str, Any]:
    """Every kind of leaf, key and container, and arrays that are cut in several ways."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))

    def put(values: Any, *spec: Any) -> jax.Array:
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "dtypes": of_every_dtype(),
        "python": [True, -7, 2**70, 1.5, -0.0, float("nan"), 2 + 3j, "größe", "\ud800", b"\x00\xff", None],
        "empty": [{}, [], (), np.zeros((0, 3), np.float32)],
        "long": ["long " * 1000, b"\x01\x02" * 3000],
        "scalar": np.int16(-5),
        "pair": Pair(np.arange(3), {"left": 1}),
        "keys": {"a/b": 1, "a": {"b": 2}, "7": 3, "%": 4},
        "ints": {7: np.float32(0.5), -1: "minus"},
        "floats": {2.5: 1},
        "prng": [jax.random.key(7), jax.random.wrap_key_data(np.arange(8, dtype=np.uint32).reshape(2, 4), impl="rbg")],
        "cut": [
            put(np.arange(16.0).reshape(4, 4).astype(np.float32), "x", "y"),
            put(np.arange(8, dtype=np.int32), ("x", "y")),
        ],
        "copies": put(np.arange(6, dtype=np.uint8).reshape(2, 3)),
    }


def kinds(directory: str) -> None:
    """Two unnamed items: one of every kind of leaf, and a single array."""
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(part_bytes=4096)) as manager:
        manager.save(0, args=Save(of_every_kind()))
        manager.save(1, args=Save(jnp.asarray(np.arange(3, dtype=np.float32))), metrics=0.5)


def in_memory(directory: str) -> None:
    """An object store of this process, as `dump` writes it: epochs, attached metrics, a deletion and a rollback."""
    url = f"memory://{uuid.uuid4().hex}/run"
    with ec.CheckpointManager(url) as manager:
        for epoch in range(4):
            manager.save(epoch, args=Save({"w": np.arange(3) + epoch}), metrics={"loss": 1 / (epoch + 1)})
        manager.wait_until_finished()
        ec.attach_metrics(url, 2, {"accuracy": 0.5}, "evaluator")
        manager.delete(0)
        manager.rollback_to(2)
    dump(url, pathlib.Path(directory))


def dump(url: str, folder: pathlib.Path) -> None:
    """Writes the objects of a directory in a bucket as files."""
    store = open_store(url)
    for file in store.files(""):
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.read(file.path, limit_bytes=file.size))


def rolling_back(directory: str) -> None:
    """A rollback to 0, killed when it was recorded and nothing had been moved."""
    with ec.CheckpointManager(directory) as manager:
        for epoch in range(3):
            manager.save(epoch, args=Save({"w": jnp.full(3, epoch)}))
        manager.wait_until_finished()
        rename = PosixStore.rename

        def die(store: PosixStore, src: str, dst: str, **how: Any) -> None:
            if "rolled-back" in dst or "moving-" in dst:
                os._exit(KILLED)
            rename(store, src, dst, **how)

        PosixStore.rename = die
        manager.rollback_to(0)


KILLED = 77


def mirrored(directory: str) -> None:
    """A directory that keeps two epochs, and a mirror that has them all."""
    storage = ec.StorageOptions(mirror=f"{directory}/mirror")
    options = Options(max_to_keep=2)
    with ec.CheckpointManager(f"{directory}/run", options=options, storage=storage) as manager:
        for epoch in range(4):
            manager.save(epoch, args=Save({"w": jnp.full(3, epoch)}), metrics={"loss": float(epoch)})
            manager.wait_until_finished()
            # What the mirror lacks stays, beyond two epochs as well.
            assert eventually(functools.partial(os.path.exists, f"{directory}/mirror/{epoch}/epoch.json"))


def steps(directory: str) -> dict[str, Any]:
    """A job that counts steps, ten for an epoch."""
    job = ec.Job(unit="step", steps_per_epoch=10)
    job.init(lambda ws: ws.update(total=0, w=jnp.zeros(2)))

    @job.epoch
    def train(ws: ec.Workspace) -> dict[str, float]:
        for step in ws.steps:
            ws["total"] += step
        ws["w"] = jnp.full(2, float(ws["total"]))
        return {"loss": 1 / (1 + ws["total"])}

    job.stop_when(ec.stop.max_steps(30))
    with ec.CheckpointManager(directory) as manager:
        ec.JobRunner(job, manager).train(session := ec.LocalSession())
    return {"total": session.workspace()["total"], "w": np.asarray(session.workspace()["w"]).tolist()}


def of_single_nodes(directory: str) -> None:
    """Epochs that each node saved by itself, two of each of two nodes."""
    pathlib.Path(directory).mkdir()
    for number in range(2):
        manager, session = ec.caffe2.CheckpointManager(directory, f"trainer:{number}", "epochckpt"), ec.LocalSession()
        session.workspace().update(w=jnp.arange(3.0) + number, step=0)
        session.run(manager.init())
        for epoch in range(2):
            session.workspace()["step"] = epoch
            session.run(manager.save(epoch))
