"""Files of a directory, as tests compare them, and what the page cache has of them."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import pathlib
from typing import Any


def listing(folder: pathlib.Path) -> dict[str, Any]:
    """Every name under a folder with what it is, its mode and its content."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        status = path.lstat()
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file():
            found[name] = ("file", status.st_mode, hashlib.sha256(path.read_bytes()).hexdigest())
        else:
            found[name] = ("folder", status.st_mode)
    return found


class unchanged:
    """Checks that a block of code leaves a folder exactly as it was."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def __enter__(self) -> None:
        self.before = listing(self.folder)

    def __exit__(self, kind: Any, *rest: object) -> None:
        if kind is None:
            assert listing(self.folder) == self.before


def resident_pages(path: pathlib.Path) -> int:
    """How many pages of a file the page cache holds, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
        view = ctypes.c_char.from_buffer(mapped)
        assert libc.mincore(ctypes.addressof(view), len(mapped), pages) == 0
        del view
    return sum(page & 1 for page in pages.raw)
