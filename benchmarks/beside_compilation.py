"""A restore beside the compilation of the first step: how long until both are there, and the first step can begin.

The step trains a transformer of 12 layers with Adam, whose 401 arrays are restored from the disk. The contestants take
turns:

- "epochckpt" calls `restore_async`, compiles, and then waits for the arrays;
- "in turn" restores with epochckpt and then compiles, "orbax" does so with stock Orbax;
- "compile" and "restore" do only that, the latter with epochckpt. The larger is the limit.

Each compilation is a fresh one: the step is another function for JAX, and there is no cache on disk.

    python benchmarks/beside_compilation.py
"""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags

TOKENS = flags.DEFINE_integer("tokens", 64, "Length of the sequence that the step trains on.")
LAYERS = flags.DEFINE_integer("layers", 12, "Layers that the step uses; the state has 12.")
WIDTH = flags.DEFINE_integer("width", 576, "Width of the transformer, which has 50 million parameters then.")


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """That of a causal transformer with one head, on the next token."""
    width = WIDTH.value
    embedding = params["embedding"][0].reshape(4000, width)
    x, mask = embedding[tokens], jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
    for number in range(LAYERS.value):
        q, k, v, out, up, down, *scales = params[f"layer_{number:02d}"]
        normal = jax.nn.standardize(x) * scales[0] + scales[1]
        q, k, v = (normal @ w.reshape(width, width) for w in (q, k, v))
        attention = jax.nn.softmax(jnp.where(mask, q @ k.T / width**0.5, -1e9))
        x += (attention @ v) @ out.reshape(width, width) + scales[2]
        hidden = jax.nn.gelu((jax.nn.standardize(x) * scales[3]) @ up.reshape(width, 4 * width))
        x += hidden @ down.reshape(4 * width, width) + scales[4]
    scores = jax.nn.log_softmax(x[:-1] @ embedding.T)
    return -jnp.take_along_axis(scores, tokens[1:, None], axis=1).mean()


def train_step(state: Any, tokens: jax.Array) -> Any:
    """Adam."""
    gradients = jax.grad(loss)(state["params"], tokens)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
    nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, state["nu"], gradients)
    params = jax.tree.map(lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu)
    return {"params": params, "mu": mu, "nu": nu, "count": state["count"] + 1, "step": state["step"] + 1}


def main(_: list[str]) -> None:
    common.warm_up()
    jax.config.update("jax_enable_compilation_cache", False)
    state = common.state_of("adam401", WIDTH.value)
    nbytes = common.nbytes_of(state)
    before, args = float(state["step"][0]), common.target_of(state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    tokens = jax.device_put(np.arange(TOKENS.value) % 4000)

    def compiled() -> Any:
        return jax.jit(lambda *given: train_step(*given), donate_argnums=0).lower(shapes, tokens).compile()

    with common.scratch() as base:
        makers = common.managers()
        ours, orbax = (makers[name](base / name) for name in ("epochckpt", "orbax"))
        for manager in (ours, orbax):
            manager.save(0, args=ocp.args.PyTreeSave(state))
            manager.wait_until_finished()
        del state

        def beside() -> Any:
            restoring = ours.restore_async(0, args=args)
            step = compiled()
            return jax.block_until_ready(restoring.result()), step

        def in_turn(manager: Any) -> Any:
            return jax.block_until_ready(manager.restore(0, args=args)), compiled()

        def timed(call: Callable[[], Any]) -> common.Times:
            common.empty_cache(base)
            common.warm_up(4 * nbytes)
            began = time.perf_counter()
            found = call()
            took = time.perf_counter() - began
            if isinstance(found, tuple):
                restored, step = found
                assert float(step(restored, tokens)["step"][0]) > before
            return {"ready": took}

        calls: dict[str, Callable[[], Any]] = {"epochckpt": beside, "in turn": lambda: in_turn(ours)}
        calls |= {"orbax": lambda: in_turn(orbax), "compile": compiled}
        calls["restore"] = lambda: jax.block_until_ready(ours.restore(0, args=args))
        rounds: dict[str, Callable[[pathlib.Path], common.Times]] = {
            name: lambda _, call=call: timed(call) for name, call in calls.items()
        }
        medians = common.alternate(rounds, base)
        for manager in (ours, orbax):
            manager.close()
    medians["limit"] = {"ready": max(medians[name]["ready"] for name in ("compile", "restore"))}
    common.show(f"a restore of 401 arrays, {nbytes / 1e6:.0f} MB, and the compilation of a step", medians)
    common.finish({"first step": medians})


if __name__ == "__main__":
    app.run(main)
