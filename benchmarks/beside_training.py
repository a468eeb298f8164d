"""What one save costs training: time lost by a loop beside it, and its worst step.

Two loops: one of pure Python, which never lets go of the interpreter by itself, and one of compiled matrix products,
which use all cores. Steps are counted from before `save()` until the save is durable. "lost" is how much longer they
took, in all, than as many steps before the save (medians); `save()` itself is in it. "worst step" is by how much the
longest step was longer.

    python benchmarks/beside_training.py --case=adam401
"""

import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import app, flags

CASE = flags.DEFINE_string("case", "adam401", "The state, as in save_restore.py.")
STEPS = flags.DEFINE_integer("steps", 200, "Steps before the save; their median counts.")


def python_step() -> None:
    total = 0
    for i in range(20_000):
        total += i


def compute_step() -> Callable[[], None]:
    matrix = jnp.ones((600, 600))
    product = jax.jit(lambda x: x @ x @ x)
    return lambda: jax.block_until_ready(product(matrix))


def one_round(make: Callable[[pathlib.Path], Any], state: Any, step: Callable[[], None], folder: pathlib.Path) -> Any:
    """Seconds that one save costs a loop."""
    manager = make(folder)
    manager.save(0, args=ocp.args.PyTreeSave(state))  # plans, compiles, starts threads
    manager.wait_until_finished()

    def timed() -> float:
        began = time.perf_counter()
        step()
        manager.is_saving_in_progress()
        return time.perf_counter() - began

    usual = statistics.median(timed() for _ in range(STEPS.value))
    began, steps = time.perf_counter(), list[float]()
    manager.save(1, args=ocp.args.PyTreeSave(state))
    while manager.is_saving_in_progress():
        steps.append(timed())
    took = time.perf_counter() - began
    manager.wait_until_finished()
    manager.close()
    return {"lost": took - usual * len(steps), "worst step": max(steps, default=usual) - usual, "save": took}


def main(_: list[str]) -> None:
    common.warm_up()
    results: dict[str, Any] = {}
    with common.scratch() as base:
        state = common.state_of(CASE.value)
        for loop, step in (("Python", python_step), ("compute", compute_step())):
            makers = common.managers()
            rounds = {n: lambda f, make=make, step=step: one_round(make, state, step, f) for n, make in makers.items()}
            results[loop] = common.alternate(rounds, base)
            common.show(f"a {loop} loop beside a save of {CASE.value}", results[loop])
    common.finish(results)


if __name__ == "__main__":
    app.run(main)
