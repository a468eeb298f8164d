"""File systems that refuse what others allow."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall


@contextlib.contextmanager
def immovable(directory: pathlib.Path) -> Iterator[None]:
    """Stores that are opened in the block cannot rename any folder that is there now, as on overlayfs."""
    folders = [os.path.join(d, name) for d, names, _ in os.walk(directory) for name in names]
    held = [os.open(folder, os.O_RDONLY) for folder in folders if not os.path.islink(folder)]  # no inode is used again
    there = {os.fstat(fd).st_ino for fd in held}

    def refuse(call: StoreCall) -> None:
        for path in (os.path.join(call.store.root, name) for name in call.paths):
            if os.path.isdir(path) and os.lstat(path).st_ino in there:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)

    try:
        with Faults().everywhere() as faults:
            faults.before(Store.rename, refuse)
            faults.before(Store.exchange, refuse)
            yield
    finally:
        for fd in held:
            os.close(fd)
