"""What each process of a job does in `tests/multiprocess/test_topologies.py`; runs under `tests.support.worker`."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec

ROWS, COLUMNS = 24, 48  # divisible by every number of devices used here
TOKENS = 24
STORAGE = ec.StorageOptions(
    save_timeout_secs=30,
    open_timeout_secs=30,
    restore_timeout_secs=30,
    block_bytes=4096,
    replica_split_bytes=2048,
    part_bytes=16384,
)

P = PartitionSpec
SPECS: dict[str, tuple[str, PartitionSpec]] = {
    "rows": ("flat", P("x")),
    "columns": ("flat", P(None, "y")),
    "square": ("square", P("x", "y")),
    "swapped": ("square", P("y", "x")),
    "folded": ("square", P(None, ("y", "x"))),
    "partly": ("square", P("x")),
    "partly_columns": ("reversed", P(None, "y")),
    "everywhere": ("reversed", P()),
    "large": ("square", P()),
    "large_partly": ("square", P("y")),
    "ends": ("ends", P("x")),
    "ends_replicated": ("ends", P()),
    "bfloat16": ("reversed", P("y", "x")),
    "int8": ("tall", P(("x", "y"))),
    "scalar": ("square", P()),
    "empty": ("square", P("x")),
}
MOVED = dict(zip(SPECS, [*list(SPECS.values())[5:], *list(SPECS.values())[:5]], strict=True))
_LOW_RANK = {"scalar": 0}


def meshes() -> dict[str, Mesh]:
    """Meshes over all devices of the job in several shapes and orders, and one over its first and last device."""
    devices = np.array(jax.devices())
    half = len(devices) // 2
    return {
        "flat": Mesh(devices.reshape(len(devices), 1), ("x", "y")),
        "square": Mesh(devices.reshape(half, 2), ("x", "y")),
        "reversed": Mesh(devices[::-1].reshape(2, half), ("x", "y")),
        "tall": Mesh(devices.reshape(2, half).T, ("x", "y")),
        "ends": Mesh(devices[[0, -1]].reshape(2, 1), ("x", "y")),
    }


def values() -> dict[str, np.ndarray]:
    """What each array holds: random bits, the same in every process of every job."""
    rng = np.random.default_rng(7)
    out: dict[str, np.ndarray] = {}
    for name in SPECS:
        dtype: Any = {"bfloat16": ml_dtypes.bfloat16, "int8": np.int8, "scalar": np.int32}.get(name, np.float32)
        shape = {"scalar": (), "empty": (0, COLUMNS)}.get(name, (ROWS, COLUMNS))
        if name.startswith("large"):
            shape = (4 * ROWS, 4 * COLUMNS)
        raw = rng.integers(0, 256, size=(*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
        out[name] = raw.reshape(-1).view(dtype).reshape(shape)
    return out


def shardings(specs: dict[str, tuple[str, PartitionSpec]]) -> dict[str, NamedSharding]:
    """The sharding of each array, on this job's devices."""
    known = meshes()
    out = {}
    for name, (mesh, spec) in specs.items():
        out[name] = NamedSharding(known[mesh], P() if _LOW_RANK.get(name) == 0 else spec)
    return out


def place(data: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array, also where this process has none of its devices."""
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index], dtype=data.dtype)


def keys(impl: str, sharding: NamedSharding) -> jax.Array:
    """A global batch of typed PRNG keys."""
    seeds = jax.jit(lambda: jax.random.split(jax.random.key(3, impl=impl), TOKENS), out_shardings=sharding)
    return seeds()


def key_data(impl: str) -> np.ndarray:
    """The bits of `keys`."""
    return np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3, impl=impl), TOKENS)))


def plain() -> dict[str, Any]:
    """Leaves that are no jax arrays."""
    return {
        "numpy": np.arange(35, dtype=np.float64).reshape(5, 7) / 3,
        "when": np.array(["2026-01-02", "NaT"], dtype="datetime64[s]"),
        "big": 2**80 + 1,
        "rate": -0.0,
        "name": "épocha",
        "none": None,
        "nothing": {},
    }


def tree() -> dict[str, Any]:
    """The state that is saved."""
    places, data = shardings(SPECS), values()
    mesh = meshes()["square"]
    return {
        "arrays": {name: place(data[name], places[name]) for name in SPECS},
        "keys": {
            "sharded": keys("threefry2x32", NamedSharding(mesh, P("x"))),
            "both": keys("rbg", NamedSharding(mesh, P(("x", "y")))),
            "replicated": keys("threefry2x32", NamedSharding(mesh, P())),
        },
        "plain": plain(),
    }


def save(directory: str) -> dict[str, Any]:
    """Saves two epochs and says what this process then sees."""
    me = jax.process_index()
    with ec.CheckpointManager(directory, storage=STORAGE, node=f"worker-{me}") as m:
        state = tree()
        for epoch in (3, 8):
            m.save(epoch, args=ocp.args.StandardSave(state), metrics={"loss": 1 / (epoch + 1)})
        m.wait_until_finished()
        folders = [m.node_path(name, 8) for name in m.nodes(8)]
        return {
            "steps": list(m.all_steps()),
            "latest": m.latest_step(),
            "metrics": [m.metrics(e) for e in (3, 8)],
            "nodes": m.nodes(8),
            "folders": [str(f.relative_to(m.directory)) for f in folders],
            "own": sorted(p.name for p in m.node_path(f"worker-{me}", 8).iterdir()),
            "bytes": [n.nbytes for n in m.status(8).nodes],
            "verified": m.verify(8).ok,
        }


def restore(directories: dict[str, str]) -> dict[str, dict[str, list[str]]]:
    """Restores every directory in every way; returns what was wrong, by directory and way."""
    return {source: _restore(directory) for source, directory in directories.items()}


def _restore(directory: str) -> dict[str, list[str]]:
    same, moved, data = shardings(SPECS), shardings(MOVED), values()
    ways: dict[str, list[str]] = {}
    with ec.CheckpointManager(directory, storage=STORAGE, options=ocp.CheckpointManagerOptions(read_only=True)) as m:
        target = tree()
        got = m.restore(8, args=ocp.args.StandardRestore(target))
        ways["same"] = differences(got, same, data, P("x"))

        def abstract(name: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(data[name].shape, data[name].dtype, sharding=moved[name])

        mesh = meshes()["reversed"]

        def abstract_keys(impl: str) -> jax.ShapeDtypeStruct:
            dtype = jax.random.key(0, impl=impl).dtype
            return jax.ShapeDtypeStruct((TOKENS,), dtype, sharding=NamedSharding(mesh, P("y")))

        impls = {"sharded": "threefry2x32", "both": "rbg", "replicated": "threefry2x32"}
        target = {
            "arrays": {name: abstract(name) for name in SPECS},
            "keys": {name: abstract_keys(impl) for name, impl in impls.items()},
            "plain": plain(),
        }
        ways["moved"] = differences(m.restore(8, args=ocp.args.StandardRestore(target)), moved, data, P("y"))
        target = {
            "arrays": {name: np.zeros_like(data[name]) for name in SPECS},
            "keys": dict.fromkeys(impls, ...),
            "plain": plain(),
        }
        ways["numpy"] = differences(m.restore(8, args=ocp.args.StandardRestore(target)), None, data, None)
        ways["without target"] = differences(m.restore(8), None, data, None)
    return ways


def differences(
    got: Any, places: dict[str, NamedSharding] | None, data: dict[str, np.ndarray], key_spec: PartitionSpec | None
) -> list[str]:
    """What is not, bit for bit, what was saved."""
    wrong = []
    for name, expected in data.items():
        value = got["arrays"][name]
        if value.dtype != expected.dtype or value.shape != expected.shape:
            wrong.append(f"{name}: {value.dtype}{value.shape}")
        if places is not None and value.sharding != places[name]:
            wrong.append(f"{name}: lies as {value.sharding}")
        wrong += [f"{name}: {at}" for at in _different(value, expected)]
    for name, impl in {"sharded": "threefry2x32", "both": "rbg", "replicated": "threefry2x32"}.items():
        value = got["keys"][name]
        if value is ...:
            continue
        if str(jax.random.key_impl(value)) != impl:
            wrong.append(f"keys/{name}: {jax.random.key_impl(value)}")
        if key_spec is not None and name == "sharded" and value.sharding.spec != key_spec:
            wrong.append(f"keys/{name}: lies as {value.sharding}")
        wrong += [f"keys/{name}: {at}" for at in _different(jax.random.key_data(value), key_data(impl))]
    for name, expected in plain().items():
        value = got["plain"][name]
        if type(value) is not type(expected) or repr(value) != repr(expected):
            wrong.append(f"{name}: {value!r}")
    return wrong


def _different(value: Any, expected: np.ndarray) -> list[str]:
    if not isinstance(value, jax.Array):
        return [] if value.tobytes() == expected.tobytes() else ["differs"]
    return [
        f"differs on {shard.device}"
        for shard in value.addressable_shards
        if np.asarray(shard.data).tobytes() != expected[shard.index].tobytes()
    ]
