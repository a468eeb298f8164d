"""A transformer of one head, of any width, that the benchmarks train: 401 arrays with Adam's state. Needs jax only."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

WORDS = 4000  # of the vocabulary


def sizes(width: int, layers: int = 12) -> Mapping[str, Sequence[int]]:
    """How many float32 each parameter has, by layer; 50 million in all for a width of 576."""
    layer = [width * width] * 4 + [4 * width * width] * 2 + [width] * 5
    return {f"layer_{number:02d}": layer for number in range(layers)} | {"embedding": [WORDS * width]}


def shapes(width: int) -> Any:
    """The state of training, as shapes on the first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def shape(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)

    state: dict[str, Any] = {
        part: {name: [shape(size) for size in row] for name, row in sizes(width).items()}
        for part in ("params", "mu", "nu")
    }
    return state | {"count": shape(1), "step": shape(1)}


def loss(params: Any, tokens: jax.Array, width: int, layers: int) -> jax.Array:
    """That of a causal transformer with one head, on the next token."""
    embedding = params["embedding"][0].reshape(WORDS, width)
    x = embedding[tokens]
    mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
    for number in range(layers):
        q, k, v, out, up, down, *scales = params[f"layer_{number:02d}"]
        normal = jax.nn.standardize(x) * scales[0] + scales[1]
        q, k, v = (normal @ w.reshape(width, width) for w in (q, k, v))
        attention = jax.nn.softmax(jnp.where(mask, q @ k.T / width**0.5, -1e9))
        x += (attention @ v) @ out.reshape(width, width) + scales[2]
        hidden = jax.nn.gelu((jax.nn.standardize(x) * scales[3]) @ up.reshape(width, 4 * width))
        x += hidden @ down.reshape(4 * width, width) + scales[4]
    scores = jax.nn.log_softmax(x[:-1] @ embedding.T)
    return -jnp.take_along_axis(scores, tokens[1:, None], axis=1).mean()


def train_step(state: Any, tokens: jax.Array, width: int, layers: int) -> Any:
    """Adam."""
    gradients = jax.grad(loss)(state["params"], tokens, width, layers)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
    nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, state["nu"], gradients)
    params = jax.tree.map(lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu)
    return {"params": params, "mu": mu, "nu": nu, "count": state["count"] + 1, "step": state["step"] + 1}


def compiled(state: Any, tokens: int, width: int, layers: int) -> Any:
    """The step, compiled for a state of these shapes and so many tokens; its own function for each call."""
    words = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def step(state: Any, tokens: jax.Array) -> Any:
        return train_step(state, tokens, width, layers)

    return jax.jit(step, donate_argnums=0).lower(state, words).compile()
