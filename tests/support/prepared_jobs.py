"""What `tests/repo/test_prepared_processes.py` has processes do."""

import atexit
import os
import signal
import sys
import threading
from typing import Any

import jax.numpy as jnp


def describe(variable: str) -> dict[str, Any]:
    """What a process can see of itself; of its files, those that it has at its start."""
    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "group": os.getpgid(0),
        "variable": os.environ.get(variable),
        "files": _open_files(),
        "main": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
    }


def _open_files() -> list[int]:
    found = []
    for fd in range(256):
        try:
            os.fstat(fd)
        except OSError:
            continue
        found.append(fd)
    return found


def bits_of_a_float() -> int:
    return int(jnp.zeros(1, float).dtype.itemsize) * 8


def hash_of(text: str) -> int:
    return hash(text)


def main(word: str) -> None:
    atexit.register(print, "the exit handler")
    match word:
        case "exit":
            sys.exit(3)
        case "raise":
            raise ValueError("this is printed")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(60)
        case "wait":
            print("waits")
            threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
