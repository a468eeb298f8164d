"""Training loops in Flax NNX and Linen, the same for both managers; runs under `tests.support.worker`.

Where stock Orbax is the manager, epochckpt cannot be imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState
from orbax.checkpoint import v1 as orbax_v1
from orbax.checkpoint.utils import to_shape_dtype_struct

from tests.support.stock_states import sharding

EPOCHS = 6


def batches(epoch: int) -> list[tuple[jax.Array, jax.Array]]:
    """The data of one epoch: a noisy linear map."""
    rng = np.random.default_rng(epoch)
    x = rng.normal(size=(4, 8, 6)).astype(np.float32)
    y = x @ np.arange(12.0, dtype=np.float32).reshape(6, 2) + rng.normal(size=(4, 8, 2)).astype(np.float32)
    return [(jnp.asarray(a), jnp.asarray(b)) for a, b in zip(x, y, strict=True)]


class LinenLoop:
    """A TrainState with optax state, its kernels sharded."""

    def __init__(self) -> None:
        net = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(2)])
        optimizer = optax.adamw(optax.cosine_decay_schedule(0.1, 24))
        params = net.init(jax.random.key(0), jnp.ones((1, 6)))["params"]
        state = TrainState.create(apply_fn=net.apply, params=params, tx=optimizer)
        place = lambda x: jax.device_put(x, sharding(None, "y") if jnp.ndim(x) == 2 else sharding())  # noqa: E731
        self.state = jax.tree.map(place, state)

    def train(self, epoch: int) -> None:
        @jax.jit
        def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
            def loss(params: Any) -> jax.Array:
                return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

            return state.apply_gradients(grads=jax.grad(loss)(state.params))

        for x, y in batches(epoch):
            self.state = step(self.state, x, y)

    def get(self) -> Any:
        return self.state

    def set(self, state: Any) -> None:
        self.state = state


class Net(nnx.Module):
    """Two layers with dropout between them: its random streams are part of the state."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(nnx.relu(self.first(x))))


class NnxLoop:
    """A module and its optimizer."""

    def __init__(self) -> None:
        self.net = Net(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.net, optax.adam(0.03), wrt=nnx.Param)

    def train(self, epoch: int) -> None:
        @nnx.jit
        def step(net: Net, optimizer: Any, x: jax.Array, y: jax.Array) -> None:
            optimizer.update(net, nnx.grad(lambda n: jnp.mean((n(x) - y) ** 2))(net))

        for x, y in batches(epoch):
            step(self.net, self.optimizer, x, y)

    def get(self) -> Any:
        return {"net": nnx.state(self.net), "optimizer": nnx.state(self.optimizer, nnx.optimizer.OptState)}

    def set(self, state: Any) -> None:
        nnx.update(self.net, state["net"])
        nnx.update(self.optimizer, state["optimizer"])


LOOPS: dict[str, Any] = {"linen": LinenLoop, "nnx": NnxLoop}


def run(directory: str, flavour: str, manager: str, until: int) -> dict[str, Any]:
    """Trains from the latest epoch on; returns where it began and a digest of all that was trained.

    Args:
        directory: of checkpoints; shared by both managers.
        flavour: a key of LOOPS.
        manager: `ours` or `stock`.
        until: how many epochs there are to be in the end.
    """
    if manager == "ours":
        import epochckpt

        manager_class: Any = epochckpt.CheckpointManager
    else:
        assert "epochckpt" not in sys.modules
        sys.modules["epochckpt"] = None  # type: ignore[assignment]  # an import of it now fails
        manager_class = ocp.CheckpointManager
    loop = LOOPS[flavour]()
    with manager_class(directory, options=ocp.CheckpointManagerOptions(max_to_keep=3)) as m:
        latest = m.latest_step()
        if latest is not None:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, loop.get())
            loop.set(m.restore(latest, args=ocp.args.StandardRestore(target)))
        start = 0 if latest is None else latest + 1
        for epoch in range(start, until):
            loop.train(epoch)
            m.save(epoch, args=ocp.args.StandardSave(loop.get()))
        m.wait_until_finished()
        steps = list(m.all_steps())
    return {"start": start, "steps": steps, "digest": digest_of(loop.get())}


def digest_of(state: Any) -> str:
    """A digest of names and bytes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        raw = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(raw).tobytes())
    return digest.hexdigest()


def run_v1(directory: str, style: str, until: int, victim: int = -1) -> dict[str, Any]:
    """The loop in NNX in Orbax's v1 style: one import says whose it is. Returns what `run` does.

    Args:
        directory: of checkpoints.
        style: the module, `epochckpt.v1` or `orbax.checkpoint.v1`.
        until: how many epochs there are to be in the end.
        victim: the epoch whose save is in flight when the process is killed.
    """
    ocp = orbax_v1 if style == "orbax.checkpoint.v1" else importlib.import_module(style)
    loop = NnxLoop()
    policies = ocp.training.save_decision_policies, ocp.training.preservation_policies
    every, newest = policies[0].FixedIntervalPolicy(1), policies[1].LatestN(3)
    with contextlib.ExitStack() as stack:
        if victim >= 0:
            stack.enter_context(importlib.import_module("epochckpt.testing").Faults().everywhere())
        checkpointer = stack.enter_context(
            ocp.training.Checkpointer(directory, save_decision_policy=every, preservation_policy=newest)
        )
        latest = checkpointer.latest
        if latest is not None:
            target = jax.tree.map(to_shape_dtype_struct, loop.get())
            loop.set(checkpointer.load(latest, target))
        start = 0 if latest is None else latest.step + 1
        for epoch in range(start, until):
            loop.train(epoch)
            if epoch == victim:
                checkpointer.wait()
                print("ready", [c.step for c in checkpointer.checkpoints], flush=True)
                importlib.import_module("tests.support.taps").hold_commits(checkpointer.manager)
                checkpointer.save_async(epoch, loop.get())
                print("in flight", flush=True)
                checkpointer.wait()
            checkpointer.save_async(epoch, loop.get(), metrics={"epoch": epoch})
        checkpointer.wait()
        steps = [c.step for c in checkpointer.checkpoints]
    return {"start": start, "steps": steps, "digest": digest_of(loop.get())}
