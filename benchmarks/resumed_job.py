"""A training program that is started again, as `first_step.py` starts it: it resumes, and tells when it got how far.

It imports what such a program imports, one thing after the other, and compiles with JAX's cache on disk. `contestant`
is `epochckpt` (the restore runs while the step is compiled), `in turn` (epochckpt, one after the other), `orbax`, or
`no restore`, which compiles and runs no step.
"""

import json
import sys
import time
from typing import Any

started = time.monotonic()  # the clock of the whole machine


def main(job: dict[str, str | int | float]) -> None:
    parts = {"interpreter": started - float(job["began"])}
    last = started

    def took(part: str) -> None:
        nonlocal last
        now = time.monotonic()
        parts[part] = now - last
        last = now

    import jax

    jax.config.update("jax_compilation_cache_dir", str(job["cache"]))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    took("jax")
    import orbax.checkpoint as ocp

    took("orbax")
    contestant = str(job["contestant"])
    ours = contestant in ("epochckpt", "in turn")
    if ours:
        import epochckpt as ec

        make = ec.CheckpointManager
        took("epochckpt")
    else:
        make = ocp.CheckpointManager
    import numpy as np
    import transformer

    size = int(job["tokens"]), int(job["width"]), int(job["layers"])
    shapes = transformer.shapes(size[1])
    if contestant == "no restore":
        transformer.compiled(shapes, *size)
        took("compile")
    else:
        args = ocp.args.PyTreeRestore(shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes))
        manager: Any = make(str(job["folder"]))
        newest = manager.latest_step()
        assert newest is not None
        took("open")
        if contestant == "epochckpt":
            restoring = manager.restore_async(newest, args=args)
            step = transformer.compiled(shapes, *size)
            took("compile")
            state = jax.block_until_ready(restoring.result())
            took("restore")
        else:
            state = jax.block_until_ready(manager.restore(newest, args=args))
            took("restore")
            step = transformer.compiled(shapes, *size)
            took("compile")
        jax.block_until_ready(step(state, np.arange(size[0], dtype=np.int32) % transformer.WORDS))
        took("step")
        parts["before the step"] = last - float(job["began"]) - parts["step"]
        manager.close()
    parts.setdefault("before the step", last - float(job["began"]))
    print(json.dumps(parts), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
