"""Sees every mutating system call of this process below one directory, just before it and just after it.

It wraps the functions of `os`, and the C library's renameat2 where epochckpt calls it, so that it needs neither
strace nor a preloaded library, and knows the paths of each call.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Op(NamedTuple):
    """One mutating call.

    Attributes:
        name: create, pwrite, fsync, mkdir, unlink, rmdir or rename.
        path: what it changes, relative to the watched directory; empty for that directory itself.
        target: the new name of a rename, relative as well.
    """

    name: str
    path: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.path or '.'}" + (f" -> {self.target}" if self.target else "")


class Watcher:
    """What is told of every call; one call is told at a time."""

    def before(self, op: Op) -> None:
        """The call is about to be made."""

    def torn(self, op: Op) -> bool:
        """Asked before a pwrite: whether only its first half shall be written, after which `half` is called."""
        return False

    def half(self, op: Op) -> None:
        """The first half of a pwrite is in the file."""

    def after(self, op: Op) -> None:
        """The call has succeeded."""


def watch(directory: str, watcher: Watcher) -> None:
    """Tells `watcher` of every mutating call below `directory`, from now to the end of the process."""
    root = os.path.realpath(directory)
    lock = threading.RLock()

    def relative(path: str) -> str | None:
        if path == root:
            return ""
        return path[len(root) + 1 :] if path.startswith(root + "/") else None

    def of_fd(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def of_name(path: Any, dir_fd: int | None = None) -> str:
        name = os.fsdecode(path)
        base = os.getcwd() if dir_fd is None else of_fd(dir_fd)
        return os.path.normpath(os.path.join(base, name))

    def around(op: Op, call: Callable[[], Any], done: Callable[[Any], bool] = lambda result: True) -> Any:
        with lock:
            watcher.before(op)
        result = call()
        if done(result):
            with lock:
                watcher.after(op)
        return result

    def wrap(attribute: str, name: str, find: Callable[..., str]) -> None:
        original = getattr(os, attribute)

        def wrapped(first: Any, *rest: Any, **options: Any) -> Any:
            path = relative(find(first, **{k: v for k, v in options.items() if k == "dir_fd"}))
            if path is None:
                return original(first, *rest, **options)
            return around(Op(name, path), lambda: original(first, *rest, **options))

        setattr(os, attribute, wrapped)

    wrap("fsync", "fsync", of_fd)
    wrap("mkdir", "mkdir", of_name)
    wrap("unlink", "unlink", of_name)
    wrap("remove", "unlink", of_name)
    wrap("rmdir", "rmdir", of_name)

    original_open, original_pwrite, original_rename = os.open, os.pwrite, os.rename

    def wrapped_open(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        found = relative(of_name(path, options.get("dir_fd"))) if flags & os.O_CREAT else None
        if found is None:
            return original_open(path, flags, *rest, **options)
        return around(Op("create", found), lambda: original_open(path, flags, *rest, **options))

    def wrapped_pwrite(fd: int, data: Any, offset: int) -> int:
        path = relative(of_fd(fd))
        if path is None:
            return original_pwrite(fd, data, offset)
        op = Op("pwrite", path)
        with lock:
            torn = watcher.torn(op)
        if torn:
            original_pwrite(fd, bytes(data)[: len(data) // 2], offset)
            with lock:
                watcher.half(op)
        return around(op, lambda: original_pwrite(fd, data, offset))

    def wrapped_rename(source: Any, target: Any, **options: Any) -> None:
        old, new = relative(of_name(source)), relative(of_name(target))
        if old is None:
            return original_rename(source, target, **options)
        return around(Op("rename", old, new or ""), lambda: original_rename(source, target, **options))

    os.open, os.pwrite, os.rename = wrapped_open, wrapped_pwrite, wrapped_rename

    def wrap_renameat2(original: Callable[..., int]) -> Callable[..., int]:
        def wrapped(old_fd: int, source: bytes, new_fd: int, target: bytes, flags: int) -> int:
            old, new = relative(of_name(source)), relative(of_name(target))
            if old is None:
                return original(old_fd, source, new_fd, target, flags)
            op = Op("rename", old, new or "")
            return around(op, lambda: original(old_fd, source, new_fd, target, flags), lambda result: not result)

        return wrapped

    for name, module in list(sys.modules.items()):
        if name.startswith("epochckpt") and getattr(module, "_renameat2", None) is not None:
            module._renameat2 = wrap_renameat2(module._renameat2)  # type: ignore[attr-defined]
