"""Saves and restores beside a thread that runs Python all the time, such as one that prepares batches.

Of the threads of a process one at a time runs Python. Any other one waits up to 5 ms for its turn, each time that it
comes back from a call of the system. "alone" is a save or a restore without such a thread, and "beside Python" one
beside it. A save counts until it is durable. Each is not the first of its manager.

    python benchmarks/beside_python.py --state=adam401
"""

import functools
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import common
import jax
import orbax.checkpoint as ocp
from absl import app, flags

STATE = flags.DEFINE_string("state", "adam401", "The state, as in save_restore.py.")


class PythonLoop:
    """Runs Python in a thread of its own, within the block."""

    def __init__(self) -> None:
        self._stop = False
        self._thread = threading.Thread(target=self._count)

    def _count(self) -> None:
        counted = 0
        while not self._stop:
            counted += 1

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


def timed(call: Callable[[], object]) -> common.Times:
    """A call alone and beside the loop."""
    call()
    began = time.perf_counter()
    call()
    alone = time.perf_counter() - began
    with PythonLoop():
        began = time.perf_counter()
        call()
        beside = time.perf_counter() - began
    return {"alone": alone, "beside Python": beside}


def saves(manager: Any, state: Any) -> common.Times:
    """Of one manager."""

    def save() -> None:
        latest = manager.latest_step()
        manager.save(0 if latest is None else latest + 1, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()

    return timed(save)


def restores(manager: Any, state: Any) -> common.Times:
    """Of one manager."""
    manager.save(0, args=ocp.args.PyTreeSave(state))
    manager.wait_until_finished()
    args = common.target_of(state)
    return timed(lambda: jax.block_until_ready(manager.restore(0, args=args)))


def one_round(name: str, measure: Callable[[Any, Any], common.Times], state: Any, folder: pathlib.Path) -> common.Times:
    """What one contestant takes, in a directory of its own."""
    manager = common.managers()[name](folder)
    times = measure(manager, state)
    manager.close()
    return times


def main(_: list[str]) -> None:
    common.warm_up()
    results: dict[str, Any] = {}
    with common.scratch() as base:
        state = common.state_of(STATE.value)
        for work, measure in (("save", saves), ("restore", restores)):
            rounds = {name: functools.partial(one_round, name, measure, state) for name in common.managers()}
            results[work] = common.alternate(rounds, base)
            common.show(f"a {work} of {STATE.value}", results[work])
    common.finish(results)


if __name__ == "__main__":
    app.run(main)
