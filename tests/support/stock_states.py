"""States that are saved by us and read by stock Orbax, and the other way round; imports no epochckpt."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
# Orbax's v1: older ones cannot restore typed keys with a target, not even those that they saved.
V1_HAS_KEYS = tuple(int(n) for n in ocp.__version__.split(".")[:2]) >= (0, 12)


def sharding(*spec: Any) -> NamedSharding:
    """On a mesh of two rows over all devices of the job."""
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y")), P(*spec))


def place(data: np.ndarray, *spec: Any) -> jax.Array:
    """A global array."""
    return jax.make_array_from_callback(data.shape, sharding(*spec), lambda index: data[index])


def plain() -> dict[str, Any]:
    """Sharded, partly and fully replicated arrays, keys, Python values, NumPy, empty containers."""
    rng = np.random.default_rng(5)
    keys = jax.jit(lambda: jax.random.split(jax.random.key(3), 8), out_shardings=sharding("x"))()
    return {
        "params": {
            "both": place(rng.normal(size=(16, 24)).astype(np.float32), "x", "y"),
            "swapped": place(rng.normal(size=(16, 24)).astype(np.float32), "y", "x"),
            "folded": place(rng.normal(size=(3, 16)).astype(np.float32), None, ("y", "x")),
            "partly": place(rng.normal(size=(8, 2)).astype(jnp.bfloat16), "x"),
            "everywhere": place(rng.integers(0, 9, size=(5, 7)).astype(np.int32)),
            "scalar": place(np.array(-3, np.int8)),
        },
        "keys": keys,
        "list": [place(np.arange(4.0, dtype=np.float32), "y"), {"deep": place(np.ones((2, 2), bool), "x")}],
        "numpy": np.arange(6, dtype=np.float64).reshape(2, 3),
        "step": 7,
        "rate": -0.25,
        "flag": True,
        "none": None,
        "empty": {"dict": {}, "list": []},
    }


class Net(nn.Module):
    """A small Linen network."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4)(nn.LayerNorm()(nn.Dense(8)(x)))


def linen(step: int = 1) -> TrainState:
    """A Linen TrainState with optax state after some steps, its kernels sharded."""
    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    params = jax.tree.map(lambda x: jax.device_put(x, sharding(*([None] * (x.ndim - 1)), "y")), params)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optimizer)
    for _ in range(step):
        state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    return state


class Model(nnx.Module):
    """A small NNX model with dropout, so that it has typed keys."""

    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def nnx_state(step: int = 1) -> Any:
    """The state of an NNX model and its optimizer after some steps."""
    model = Model(0)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for _ in range(step):
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
    return {"model": nnx.state(model), "optimizer": nnx.state(optimizer, nnx.optimizer.OptState)}


STATES = {"plain": plain, "linen": linen, "nnx": nnx_state}


def abstract(tree: Any, reshard: bool = False) -> Any:
    """What to restore as, with the shardings that the arrays have, or with another one."""

    def one(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        place = sharding("y") if x.ndim and not x.shape[0] % sharding().mesh.shape["y"] else sharding()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place if reshard else x.sharding)

    return jax.tree.map(one, tree)


def differences(found: Any, expected: Any) -> list[str]:
    """The leaves that are not the same bit for bit, where this process can see them."""
    a, b = (jax.tree_util.tree_flatten_with_path(t)[0] for t in (found, expected))
    problems = [] if [p for p, _ in a] == [p for p, _ in b] else [f"other paths: {[p for p, _ in a]}"]
    for (path, x), (_, y) in zip(a, b, strict=False):
        if (x_bits := _bits(x)) != (y_bits := _bits(y)):
            problems.append(f"{jax.tree_util.keystr(path)}: {str(x_bits)[:80]} is not {str(y_bits)[:80]}")
    return problems


def _bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        leaf = np.asarray(jax.device_get(leaf) if leaf.is_fully_addressable else _gathered(leaf))
    return (str(leaf.dtype), leaf.shape, leaf.tobytes()) if isinstance(leaf, np.ndarray) else (type(leaf), leaf)


def _gathered(leaf: jax.Array) -> jax.Array:
    gathered = jax.jit(lambda x: x, out_shardings=sharding())(leaf)
    return jax.block_until_ready(gathered).addressable_data(0)  # on all devices: the next one may not begin before
