"""One process of a job that `tests.support.processes` started.

    python -m tests.support.worker module:function '{"name": "value"}'

Joins the job, imports the function, calls it with the arguments and prints `RESULT <json>` as the last line.
"""

import faulthandler
import importlib
import json
import os
import sys
import traceback

import jax

from tests.support.processes import RESULT_PREFIX


def main(fn_path: str, json_args: str) -> None:
    faulthandler.enable(all_threads=True)
    num_processes = int(os.environ["EPOCHCKPT_TEST_NUM_PROCESSES"])
    try:
        if num_processes > 1:
            jax.distributed.initialize(
                os.environ["EPOCHCKPT_TEST_COORDINATOR"],
                num_processes,
                int(os.environ["EPOCHCKPT_TEST_PROCESS_ID"]),
                initialization_timeout=150,
            )
        module, _, function = fn_path.partition(":")
        result = getattr(importlib.import_module(module), function)(**json.loads(json_args))
        line = RESULT_PREFIX + json.dumps(result)
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: jax's exit handler would wait minutes for peers that wait for this process.
        os._exit(1)
    # stdout and stderr are one pipe: a single write keeps another thread's log out of the line.
    sys.stdout.flush()
    os.write(1, f"\n{line}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
