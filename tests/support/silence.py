"""Storage that does not answer: chosen reads of this process fail, as they do on a network file system or a bad disk.

It wraps the functions of `os` that read names and bytes, so that what the kernel would say is what our code hears.
"""

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

PASSING = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EAGAIN,
    errno.EREMOTEIO,
    errno.ENOMEM,
)
"""What says nothing about the data."""


class Silence:
    """Fails the reads of some files.

    Args:
        patch: takes it back at the end of the test.
        directory: only what lies in it.
        fails: asked with the number of each read, from 0 on, and its path relative to the directory; the errno that it
            is to fail with, or 0.
    """

    def __init__(self, patch: pytest.MonkeyPatch, directory: Any, fails: Callable[[int, str], int]):
        self.reads, self.hits = 0, 0
        self._root, self._fails = os.path.realpath(directory), fails
        for name in ("open", "stat", "lstat", "scandir", "readlink"):
            patch.setattr(os, name, self._wrap(getattr(os, name), lambda path: path))
        patch.setattr(os, "preadv", self._wrap(os.preadv, lambda fd: os.readlink(f"/proc/self/fd/{fd}")))

    def _wrap(self, original: Callable[..., Any], path_of: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(what: Any, *args: Any, **kwargs: Any) -> Any:
            writes = original.__name__ == "open" and args and args[0] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY)
            path = path_of(what)
            if isinstance(path, str | bytes | os.PathLike) and not writes:
                self._read(os.fsdecode(path))
            return original(what, *args, **kwargs)

        return call

    def _read(self, path: str) -> None:
        if path != self._root and not path.startswith(f"{self._root}/"):
            return
        number, self.reads = self.reads, self.reads + 1
        code = self._fails(number, path[len(self._root) + 1 :])
        if code:
            self.hits += 1
            raise OSError(code, os.strerror(code), path)
