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
import numpy as np
import orbax.checkpoint as ocp
import transformer
from absl import app, flags

TOKENS = flags.DEFINE_integer("tokens", 64, "Length of the sequence that the step trains on.")
LAYERS = flags.DEFINE_integer("layers", 12, "Layers that the step uses; the state has 12.")
WIDTH = flags.DEFINE_integer("width", 576, "Width of the transformer, which has 50 million parameters then.")


def main(_: list[str]) -> None:
    common.warm_up()
    jax.config.update("jax_enable_compilation_cache", False)
    state = common.state_of("adam401", WIDTH.value)
    nbytes = common.nbytes_of(state)
    before, args = float(state["step"][0]), common.target_of(state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    tokens = jax.device_put(np.arange(TOKENS.value, dtype=np.int32) % transformer.WORDS)

    def compiled() -> Any:
        return transformer.compiled(shapes, TOKENS.value, WIDTH.value, LAYERS.value)

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
