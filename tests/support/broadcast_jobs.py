"""What each process of a job does in `tests/multiprocess/test_broadcast.py`; runs under `tests.support.worker`."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt.arrays import broadcast
from tests.support.jobs import global_mesh, place
from tests.support.processes import RESULT_PREFIX
from tests.support.taps import store_of

P = PartitionSpec
DTYPES = (
    *("bool", "int8", "uint32", "float16", "float32", "complex64", "bfloat16"),
    *("int4", "uint4", "float8_e4m3fn", "float8_e5m2"),
)
STORAGE = ec.StorageOptions(
    broadcast_restore=True, save_timeout_secs=30, open_timeout_secs=30, restore_timeout_secs=60, block_bytes=4096
)


def options(storage: ec.StorageOptions = STORAGE, **changes: Any) -> ec.StorageOptions:
    """The options that these jobs share, with changes."""
    return dataclasses.replace(storage, **changes)


def values() -> dict[str, np.ndarray]:
    """Arrays of all types, of several sizes, one of them empty."""
    rng = np.random.default_rng(3)
    found = {}
    for number, name in enumerate(DTYPES):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        bits = rng.integers(0, 2 if dtype.kind == "b" else 8, size=(8 * (number + 1), 12))
        found[name] = bits.astype(dtype)
    found["empty"] = np.zeros((0, 4), np.float32)
    found["scalar"] = np.float32(1.5).reshape(())
    found["large"] = rng.normal(size=(512, 256)).astype(np.float32)
    found["cut"] = rng.normal(size=(64, 96)).astype(np.float32)
    return found


def shardings(replicas: int) -> dict[str, NamedSharding]:
    """Replicated over all devices, or over `replicas` of groups of them, each of which has all parts between them."""
    mesh = global_mesh((replicas, jax.device_count() // replicas))
    specs = {"cut": P(None, "y"), "large": P("y") if replicas < jax.device_count() else P()}
    return {name: NamedSharding(mesh, specs.get(name, P())) for name in values()}


def tree(replicas: int) -> dict[str, Any]:
    """The state."""
    places = shardings(replicas)
    seeds = jax.jit(lambda: jax.random.split(jax.random.key(5), 4), out_shardings=places["scalar"])
    return {
        "arrays": {name: place(value, places[name]) for name, value in values().items()},
        "keys": seeds(),
        "numpy": np.arange(33.0),
        "step": 7,
    }


def save(directory: str, epochs: list[int]) -> None:
    """Saves the state."""
    with ec.CheckpointManager(directory, storage=STORAGE) as manager:
        for epoch in epochs:
            manager.save(epoch, args=ocp.args.StandardSave(tree(1)))


class Count:
    """Bytes of arrays that a manager reads."""

    def __init__(self, manager: ec.CheckpointManager):
        self.nbytes = 0
        store, count = store_of(manager), self
        opened = store.open_reader

        def open_reader(path: str, *args: Any) -> Any:
            reader = opened(path, *args)
            if path.endswith(".json"):
                return reader
            read_parts = reader.read_parts

            def counted(start: int, parts: Sequence[memoryview]) -> None:
                count.nbytes += sum(part.nbytes for part in parts)
                read_parts(start, parts)

            reader.read_parts = counted
            return reader

        store.open_reader = open_reader


def wrong(found: Any, replicas: int) -> list[str]:
    """What differs from what was saved."""
    places, expected = shardings(replicas), tree(1)
    bad = []
    for name, data in values().items():
        array = found["arrays"][name]
        if array.sharding != places[name] or array.dtype != data.dtype:
            bad.append(f"{name}: {array.dtype} {array.sharding}")
        for shard in array.addressable_shards:
            if np.asarray(shard.data).tobytes() != data[shard.index].tobytes():
                bad.append(f"{name} differs on {shard.device}")
    for shard in jax.random.key_data(found["keys"]).addressable_shards:
        if not np.array_equal(shard.data, jax.random.key_data(expected["keys"]).addressable_data(0)):
            bad.append("keys")
    if not np.array_equal(found["numpy"], expected["numpy"]) or found["step"] != 7:
        bad.append("plain")
    return bad


def restore(directory: str, replicas: int, newest: bool, limit: int | None) -> list[Any]:
    """Restores with and without; what was wrong, the bytes that this process read each time, and whether with fewer."""
    out: list[Any] = []
    for share in (True, False):
        storage = options(broadcast_restore=share, restore_memory_limit_bytes=limit)
        with ec.CheckpointManager(directory, storage=storage) as manager:
            target, count = tree(replicas), Count(manager)
            found = manager.restore(None if newest else 0, args=ocp.args.StandardRestore(target))
            out += [wrong(found, replicas), count.nbytes]
    return out


def failures(directory: str) -> dict[str, Any]:
    """What this process gets of restores that fail in one way after the other, and of those between them."""
    me, count = jax.process_index(), jax.process_count()
    hint = ocp.CheckpointManagerOptions(single_host_load_and_broadcast=True)
    out: dict[str, Any] = {}
    with ec.CheckpointManager(directory, options=hint, storage=options(broadcast_restore=None)) as manager:
        for epoch in (0, 1):
            manager.save(epoch, args=ocp.args.StandardSave(tree(1)))
        manager.wait_until_finished()
        target, reads = tree(count), Count(manager)

        def attempt(name: str, step: int | None, target: Any = target) -> None:
            began = time.monotonic()
            try:
                found = manager.restore(step, args=ocp.args.StandardRestore(target))
                out[name] = wrong(found, count)
            except ec.errors.EpochCheckpointError as error:
                out[name] = [type(error).__name__, str(error)]
            out["secs"] = max(out.get("secs", 0.0), time.monotonic() - began)

        attempt("before", 1)
        out["read"] = reads.nbytes
        attempt("other targets", 1, target if me else {**target, "numpy": ...})
        attempt("no target", 1, target if me else {**target, "more": np.zeros(3)})
        attempt("between", 1)
        # One process cannot open files.
        store = store_of(manager)
        opened = store.open_reader

        def refuse(path: str, *args: Any) -> Any:
            raise PermissionError(13, "made up", path)

        store.open_reader = refuse if me == count - 1 else opened
        attempt("unreadable", 0)
        attempt("unreadable, newest", None)
        store.open_reader = opened
        attempt("readable again", 0)
        # One block of an epoch is damaged: the process that reads it knows, and the others hear of it.
        multihost_utils.sync_global_devices("before the damage")
        if me == 0:
            path = manager.node_path("process_0", 1) / "default.safetensors"
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        multihost_utils.sync_global_devices("after the damage")
        attempt("damaged", 1)
        attempt("newest", None)
        out["left"] = list(manager.all_steps())
        # In the background; the newest epoch is read ahead, where the processes do not share reads, and is damaged.
        wanted = ocp.args.StandardRestore(target)
        out["named, in the background"] = wrong(manager.restore_async(0, args=wanted).result(), count)
    for share in (True, False):
        with ec.CheckpointManager(directory, storage=options(broadcast_restore=share)) as manager:
            listed, response = list(manager.all_steps()), manager.restore_async(None, args=wanted)
            out[f"newest, in the background, {share}"] = [listed, wrong(response.result(), count), manager.all_steps()]
    return out


def die(directory: str) -> list[Any]:
    """The last process dies when all have read; what the others get, and how long it took."""
    spread = broadcast._gathered

    def gathered(*args: Any) -> Any:
        if jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return spread(*args)

    manager = ec.CheckpointManager(directory, storage=STORAGE)
    target = tree(1)
    multihost_utils.sync_global_devices("connected")  # gloo waits longer for connections that it does not have yet
    broadcast._gathered = gathered
    began = time.monotonic()
    try:
        manager.restore(0, args=ocp.args.StandardRestore(target))
        found = ["nothing"]
    except ec.errors.CoordinationError as error:
        found = [type(error).__name__, str(error)]
    print(RESULT_PREFIX + json.dumps([*found, time.monotonic() - began]), flush=True)
    os._exit(0)  # jax's own exit would wait for the dead process
