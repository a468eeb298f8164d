r"""Epochs in an object store, over TensorStore's key-value stores (`gs://`, `s3://`, `memory://`, `file://`).

What TensorStore 0.1.86 does on memory, file and S3:

- *Put-if-absent* is `write(..., if_equal=b"\x02")`, the generation that a read of a missing key reports. `b""` means
  *no condition*. A failed condition is no error: the answer has the generation `b""`.
- *Ranged reads* are `read(..., byte_range=slice(a, b))`. A range beyond the end is `OUT_OF_RANGE`, never a short
  answer; an empty range only asks whether the key exists (a HEAD request on S3).
- No call returns the size of a value. The error of a read far beyond the end names it; two more reads confirm it.
  Where the error does not name it, bisection finds the end.

Folders are prefixes of keys: they exist while a key does, and cannot be renamed. All stores of a process share one
context, and so the content of `memory://`. Symlinks below a `file://` root are followed; a plain path refuses those
that leave the root.
"""

from __future__ import annotations

import bisect
import errno
import functools
import os
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from epochckpt.errors import InvalidArgumentError
from epochckpt.storage.store import Entry, Reader, Store, Writer, check_path, check_piece, too_large

if TYPE_CHECKING:
    import tensorstore as ts

PART_BYTES = 256 << 20  # largest file: a `KvWriter` holds the whole file in memory
_ABSENT = b"\x02"
_CONDITION_FAILED = b""
_FAR = 1 << 50  # beyond the largest object of any store (S3: 5 TiB)
_NAMED_SIZE = re.compile(r"\bsize (\d+)|<ActualObjectSize>(\d+)<")
_ERRNO = re.compile(r"os_error_code='(\d+)'")
_STATUS = {
    "NOT_FOUND": errno.ENOENT,
    "PERMISSION_DENIED": errno.EACCES,
    "UNAUTHENTICATED": errno.EACCES,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
    "RESOURCE_EXHAUSTED": errno.EAGAIN,
    "UNAVAILABLE": errno.EAGAIN,
}
_REMOVE_ROUNDS = 16


@functools.cache
def _context() -> ts.Context:
    """The one context of this process: it holds `memory://` and shares connections."""
    import tensorstore as ts

    return ts.Context()


class KvStore(Store):
    """A directory of epochs as keys with a common prefix; its root is a URL, with or without a final `/`.

    InvalidArgumentError: TensorStore knows no such store. OSError: the store cannot be opened.
    """

    renames = False
    preferred_part_bytes = PART_BYTES

    def __init__(self, root: str):
        import tensorstore as ts

        self.root = root
        try:
            spec = dict(ts.KvStore.Spec(root).to_json())
        except ValueError as error:
            raise InvalidArgumentError(f"{root!r} names no store: {error}") from error
        if spec["driver"] == "s3":
            spec.setdefault("use_conditional_write", True)
        if not (path := spec.get("path", "")).endswith("/"):
            spec["path"] = f"{path}/" if path else ""
        with _translated(root):
            self._kv = ts.KvStore.open(spec, context=_context()).result()

    def exists(self, path: str) -> bool:
        return bool(path and self._is_file(path)) or bool(self._below(path))

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Asks for the byte beyond the limit first, so that nothing large is ever transferred."""
        check_path(path, root_allowed=False)
        reader = KvReader(self._kv, path, self._name(path))
        if reader.reaches(limit_bytes):
            raise too_large(self._name(path), reader.size, limit_bytes)
        data = reader.fetch(None)
        if len(data) > limit_bytes:  # replaced just now
            raise too_large(self._name(path), len(data), limit_bytes)
        return data

    def open_reader(self, path: str) -> KvReader:
        """One request, for whether the key exists."""
        check_path(path, root_allowed=False)
        if not self._is_file(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._name(path))
        return KvReader(self._kv, path, self._name(path))

    def create(self, path: str, data: bytes) -> None:
        check_path(path, root_allowed=False)
        put_if_absent(self._kv, path, data, self._name(path))

    def open_writer(self, path: str, size: int) -> KvWriter:
        """Allocates memory for the whole file; nothing is stored before `finish`."""
        check_path(path, root_allowed=False)
        name = self._name(path)
        if size < 0:
            raise ValueError(f"{name}: size {size}; expected at least 0")
        if self._is_file(path):  # an early error; the condition of the write decides
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        return KvWriter(self._kv, path, name, size)

    def list(self, path: str) -> list[Entry]:
        """One listing of everything below, grouped by the first component."""
        found: dict[str, bool] = {}
        for key in self._below(path):
            name, slash, _ = key.decode("utf-8", "surrogateescape").partition("/")
            if name not in ("", ".", ".."):  # what lies below those has no path
                found[name] = found.get(name, False) or bool(slash)
        return [Entry(name, found[name]) for name in sorted(found)]

    def find(self, prefix: str, folder: str | None = None) -> list[str]:
        """One listing, of the keys with the prefix where the folder is given."""
        import tensorstore as ts

        keys, depth = ts.KvStore.KeyRange(), 1
        if folder is not None:
            start = f"{check_path(folder)}/{prefix}" if folder else prefix
            keys, depth = ts.KvStore.KeyRange(start, start[:-1] + chr(ord(start[-1]) + 1)), start.count("/")
        with _translated(self._name(folder or "")):
            found = [key.decode("utf-8", "surrogateescape") for key in self._kv.list(keys).result()]
        return sorted(k for k in found if k.count("/") == depth and k.rpartition("/")[2].startswith(prefix))

    def replace(self, path: str, old: bytes, new: bytes) -> None:
        """One read, and one write on condition that the key has not changed since."""
        check_path(path, root_allowed=False)
        name = self._name(path)
        with _translated(name):
            found = self._kv.read(path).result()
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        changed = found.value != old
        if not changed:
            with _translated(name):
                stamp = self._kv.write(path, new, if_equal=found.stamp.generation).result()
            changed = stamp.generation == _CONDITION_FAILED
        if changed:
            raise FileExistsError(errno.EEXIST, "it has other content by now", name)

    def remove(self, path: str) -> None:
        check_path(path, root_allowed=False)
        with _translated(self._name(path)):
            self._kv.write(path, None).result()

    def remove_tree(self, path: str) -> None:
        """Deletes the key and the range below it until a listing is empty."""
        with suppress(IsADirectoryError):  # file:// has folders
            self.remove(path)
        for _ in range(_REMOVE_ROUNDS):
            with _translated(self._name(path)):
                self._kv.delete_range(_range(path)).result()
            if not self._below(path):
                return
        raise OSError(errno.ENOTEMPTY, f"files kept appearing below it {_REMOVE_ROUNDS} times over", self._name(path))

    def _name(self, path: str) -> str:
        return f"{self.root.rstrip('/') if path else self.root}{'/' if path else ''}{path}"

    def _is_file(self, path: str) -> bool:
        check_path(path, root_allowed=False)
        try:
            with _translated(self._name(path)):
                return self._kv.read(path, byte_range=slice(0, 0)).result().state == "value"
        except EOFError:  # an empty file, where a store counts even the empty range as beyond its end
            return True

    def _below(self, path: str) -> list[bytes]:
        """Keys below a folder, relative to it, in any order."""
        check_path(path)
        with _translated(self._name(path)):
            return self._kv.list(_range(path), strip_prefix_length=len(path.encode()) + 1 if path else 0).result()


class KvReader(Reader):
    """One key, read by ranges."""

    def __init__(self, kv: ts.KvStore, path: str, name: str):
        self._kv, self._path, self._name = kv, path, name
        self._size: int | None = None
        self._closed = False

    @property
    def size(self) -> int:
        if self._size is None:
            self._size = self._find_size()
        return self._size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._closed:
            raise ValueError(f"{self._name} is closed")
        if offset < 0:
            raise ValueError(f"{self._name}: offset {offset}; expected at least 0")
        if buffer.nbytes:
            data = self.fetch(slice(offset, offset + buffer.nbytes))
            if len(data) != buffer.nbytes:
                raise EOFError(f"{self._name}: {len(data)} of {buffer.nbytes} bytes at {offset}")
            buffer.cast("B")[:] = data

    def close(self) -> None:
        self._closed = True

    def fetch(self, byte_range: slice | None) -> bytes:
        """Some bytes, or all; EOFError for a range beyond the end, FileNotFoundError for a missing key."""
        with _translated(self._name):
            found = self._kv.read(self._path, byte_range=byte_range).result()
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._name)
        return found.value

    def reaches(self, position: int) -> bool:
        """Whether there is a byte at a position."""
        try:
            self.fetch(slice(position, position + 1))
        except EOFError:
            return False
        return True

    def _find_size(self) -> int:
        try:
            self.fetch(slice(_FAR, _FAR + 1))
        except EOFError as error:
            named = _NAMED_SIZE.search(str(error))
            # An error text is no interface: the reads that follow confirm it.
            size = int(named[1] or named[2]) if named else -1
            if size >= 0 and (not size or self.reaches(size - 1)) and not self.reaches(size):
                return size
        high = 1
        while self.reaches(high - 1):
            high *= 2
        return bisect.bisect_left(range(high), True, high // 2, key=lambda position: not self.reaches(position))


class KvWriter(Writer):
    """One new key: collected in memory, stored by `finish`."""

    def __init__(self, kv: ts.KvStore, path: str, name: str, size: int):
        self._kv, self._path, self._name, self._size = kv, path, name, size
        self._data: bytearray | None = bytearray(size)
        self._written = 0
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview | bytes) -> None:
        view = memoryview(data)
        check_piece(offset, view.nbytes, self._size, self._name)
        whole = self._data
        if whole is None:
            raise ValueError(f"{self._name} is closed")
        if view.nbytes:
            with memoryview(whole) as target:
                target[offset : offset + view.nbytes] = view.cast("B")
            with self._lock:
                self._written += view.nbytes

    def finish(self) -> None:
        with self._lock:
            data, self._data = self._data, None
        if data is None:
            raise ValueError(f"{self._name} is closed")
        if self._written != self._size:
            raise ValueError(f"{self._name}: {self._written} of {self._size} bytes written; not finished")
        put_if_absent(self._kv, self._path, data, self._name)

    def abort(self) -> None:
        self._data = None


def put_if_absent(kv: ts.KvStore, key: str, data: bytes | bytearray, name: str) -> None:
    """Stores a value under a new key, durable on return; FileExistsError if the key exists."""
    with _translated(name):
        value: Any = data  # TensorStore takes a bytearray without a copy, which its stub does not know
        stamp = kv.write(key, value, if_equal=_ABSENT).result()
    if stamp.generation == _CONDITION_FAILED:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def _range(path: str) -> ts.KvStore.KeyRange:
    """The keys below a folder: from `path/` up to the next character after the slash."""
    import tensorstore as ts

    return ts.KvStore.KeyRange(f"{path}/", f"{path}0") if path else ts.KvStore.KeyRange()


def errno_in(error: BaseException) -> int | None:
    """The operating system's errno in an error of TensorStore's; None without one."""
    code = _ERRNO.search(str(error))
    return int(code[1]) if code else None


@contextmanager
def _translated(name: str) -> Generator[None]:
    """Raises TensorStore's errors, ValueErrors that begin with a status, as OSError or EOFError."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        status, _, text = str(error).partition(":")
        if status == "OUT_OF_RANGE":
            raise EOFError(f"{name}: {text.strip()}") from error
        raise OSError(errno_in(error) or _STATUS.get(status, errno.EIO), str(error), name) from error
