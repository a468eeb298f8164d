"""What the processes of a job do in `tests/arrays/test_nodes.py`; runs under `tests.support.worker`."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt.storage import PosixStore

NAMES = ("trainer_0", "trainer_1", "trainer_2")
STORAGE = ec.StorageOptions(save_timeout_secs=30, open_timeout_secs=30, restore_timeout_secs=30)
Composite, Save, Restore = ocp.args.Composite, ocp.args.StandardSave, ocp.args.StandardRestore


def weights() -> dict[str, jax.Array]:
    """A global array, on any number of processes."""
    mesh, values = Mesh(np.array(jax.devices()), ("x",)), np.arange(24.0, dtype=np.float32)
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    return {"w": jax.make_array_from_callback((24,), sharding, lambda index: values[index])}


def own(number: int) -> dict[str, Any]:
    """A value that differs per node, of a structure of its own."""
    local = jax.device_put(np.full(3 + number, number, np.float32), jax.local_devices()[0])
    return {"seed": 100 + number, "local": local, "queue": [np.arange(number + 1), f"text {number}"]}


def alike() -> dict[str, Any]:
    """A value that is the same on every node."""
    return {"lr": 0.1, "table": np.arange(100), "on device": jax.device_put(np.ones(5, np.float32))}


def same(found: Any, expected: Any) -> bool:
    """Whether two trees are equal, bit for bit."""
    if jax.tree.structure(found) != jax.tree.structure(expected):
        return False
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(a).dtype == np.asarray(b).dtype and np.array_equal(a, b) for a, b in pairs)


def right_weights(found: Any) -> bool:
    """Whether this process's part of `weights` is right."""
    return all(np.array_equal(s.data, np.arange(24.0)[s.index]) for s in found["w"].addressable_shards)


def items(by_node: dict[str, Any]) -> ocp.args.Composite:
    """What is saved: arrays, and two items of the nodes' own, `rare` of the second node only."""
    rare = {name: {"found": name} for name in by_node if name == NAMES[1]}
    return Composite(
        state=Save(weights()),
        config=ocp.args.JsonSave({"a": 1}),
        own=ec.args.NodeSave(by_node, by_node=True),
        alike=ec.args.NodeSave({name: alike() for name in by_node}, by_node=True),
        rare=ec.args.NodeSave(rare, by_node=True),
    )


def save(directory: str) -> list[str]:
    """Saves epoch 3 as one node of three."""
    me = jax.process_index()
    with ec.CheckpointManager(directory, storage=STORAGE) as manager:
        manager.set_nodes(NAMES)
        manager.save(3, args=items({NAMES[me]: own(me)}))
        manager.wait_until_finished()
        return manager.nodes(3)


def restore(directory: str) -> dict[str, Any]:
    """Restores epoch 3 as one node of three: what is right."""
    me, name = jax.process_index(), NAMES[jax.process_index()]
    with ec.CheckpointManager(directory, storage=STORAGE, node=name) as manager:
        plain = Composite(own=ec.args.NodeRestore(own(me)), state=Restore(weights()), config=None)
        by_node = {"own": ec.args.NodeRestore({name: own(me)}, by_node=True)}
        by_node["rare"] = ec.args.NodeRestore(by_node=True)
        one, two, everything = (
            manager.restore(3, args=plain),
            manager.restore(3, args=Composite(**by_node)),
            manager.restore(3),
        )
        try:
            manager.restore(3, args=Composite(rare=ec.args.NodeRestore()))
            refused = ""
        except ec.errors.InvalidArgumentError as error:
            refused = str(error)
        return {
            "own": same(one["own"], own(me)) and same(two["own"], {name: own(me)}) and same(everything["own"], own(me)),
            "state": right_weights(one["state"]) and one["config"] == {"a": 1},
            "rare": [two["rare"], everything.get("rare")],
            "refused": refused,
        }


def save_and_die(directory: str, place: str) -> None:
    """Saves epoch 1 as three hosted nodes, then is killed while it saves epoch 2.

    Args:
        directory: of the epochs.
        place: end of the path of the file that is created just before the kill.
    """
    create = PosixStore.create

    def dying(self: Any, path: str, data: bytes) -> None:
        create(self, path, data)
        if path.endswith(place) and "/2-" in path:
            os.kill(os.getpid(), signal.SIGKILL)

    PosixStore.create = dying  # type: ignore[method-assign]
    with ec.CheckpointManager(directory, node=NAMES) as manager:
        for epoch in (1, 2):
            manager.save(epoch, args=items({name: own(n) for n, name in enumerate(NAMES)}))
            manager.wait_until_finished()
