"""File systems that refuse what others allow."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from epochckpt.storage import PosixStore


@contextlib.contextmanager
def immovable(directory: pathlib.Path) -> Iterator[None]:
    """Has no rename move any folder that is there now, as overlayfs."""
    folders = [os.path.join(d, name) for d, names, _ in os.walk(directory) for name in names]
    held = [os.open(folder, os.O_RDONLY) for folder in folders if not os.path.islink(folder)]  # no inode is used again
    there = {os.fstat(fd).st_ino for fd in held}

    def refuse(real: Callable[..., None]) -> Callable[..., None]:
        def moved(self: PosixStore, src: str, dst: str, **options: Any) -> None:
            for path in (os.path.join(self.root, name) for name in (src, dst)):
                if os.path.isdir(path) and os.lstat(path).st_ino in there:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
            real(self, src, dst, **options)

        return moved

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "exchange"):
            patch.setattr(PosixStore, name, refuse(getattr(PosixStore, name)))
        try:
            yield
        finally:
            for fd in held:
                os.close(fd)
