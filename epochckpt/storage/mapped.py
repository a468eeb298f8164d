"""Files as read-only NumPy arrays, whose bytes lie in the page cache."""

from __future__ import annotations

import os
from typing import Any, cast

import numpy as np


class Mapped(np.memmap[Any, Any]):
    """A read-only map of a file that does not change while the array is used, so that `save()` need not copy it.

    The type makes that promise. The file behind another `np.memmap` may be changed, or cut short, which kills a process
    that reads the map.
    """


def open_map(file: str | os.PathLike[str]) -> Mapped:
    """A file as a read-only uint8 array, of which slices and views are `Mapped`, too; ValueError if it is empty."""
    return cast(Mapped, Mapped(file, np.uint8, "r"))
