"""Python's garbage collector, kept out of short stretches of work that make very many objects."""

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def paused() -> Generator[None]:
    """Pauses the cyclic garbage collector, in all threads.

    Ten thousand new objects that stay, such as the leaves of a record, make it look at every object of the program,
    with the interpreter locked: measured were 50 to 100 ms each time, several times in one restore. What is paused must
    be short, and neither read nor write files. It may be nested, and overlap in several threads.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
