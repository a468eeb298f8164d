"""Python's garbage collector, kept out of short stretches of work that make very many objects."""

import contextlib
import gc
import os
from collections.abc import Generator

_under_way: list[object] = []  # pauses that have switched it off


@contextlib.contextmanager
def paused() -> Generator[None]:
    """Pauses the cyclic garbage collector, in all threads.

    After ten thousand new objects that stay, such as the leaves of a record, the collector looks at every object of the
    program and holds the interpreter lock. A look was measured at 50 to 100 ms, several times in one restore. The work
    inside a pause must end soon, and must not wait for storage. Pauses may be nested, and may overlap between threads.
    """
    enabled = gc.isenabled()
    mark = object()
    try:
        if enabled:
            _under_way.append(mark)
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
            _under_way.remove(mark)


def _after_fork() -> None:
    """In a child, where the threads that paused it do not exist."""
    if _under_way:
        _under_way.clear()
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)
