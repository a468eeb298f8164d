"""Where epochs lie: one small interface over POSIX folders and object stores, and the choice between them.

Guarantees that the floors above build on, the same for every store:

- A file is written once. `create` and `open_writer` never replace an existing file; `create` of one name by
  many callers has exactly one winner.
- When `create` or `Writer.finish` returns, the content is durable. The *name* is after `sync_folder` of the
  folder that holds it (on object stores at once).
- A flush that failed is reported and never tried again: the second try would lie
  (https://wiki.postgresql.org/wiki/Fsync_Errors).
- A read that storage does not answer (`errors.is_passing`) is asked again a few times, for about a second, and then
  ends in an error that says nothing about the data. Nothing that changes something is tried again, except what a
  signal interrupted: whoever calls decides.
- Every path is checked before it is used, and no read leaves the root through a symlink.

Only stores with `renames` have folders that exist on their own: there `make_folder` and `rename` fail where a
parent is gone, which is what fences off an older run. Elsewhere a folder exists while a file lies below it.
"""

from __future__ import annotations

import functools
import io
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from absl import logging

from epochckpt import _threads
from epochckpt.errors import StorageError, is_passing

T = TypeVar("T")

_THREADS = 16  # of object stores
_PIECE_BYTES = 4 * 2**20
_MAX_PUT_BYTES = 256 * 2**20  # of a file that `put` replaces
_PAUSES_SECS = (0.05, 0.2, 0.75)  # before storage is asked again


@dataclass(frozen=True)
class Entry:
    """One name in a folder.

    Attributes:
        name: last component, not a path.
        is_folder: a real folder; a symlink is none, wherever it points.
    """

    name: str
    is_folder: bool


class Reader(ABC):
    """One file, open for reading by any number of threads. A context manager."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Length of the file in bytes. An object store finds it out on first use, in a few requests."""

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills the whole buffer with the bytes from `offset` on. Any thread.

        Args:
            offset: byte position in the file, ≥ 0.
            buffer: writable and C-contiguous, of any format.

        Raises:
            EOFError: the file ends before the buffer is full.
            OSError: storage refused.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends reading; calling it again is fine, and so is a read still running in another thread."""

    def pieces(self) -> Iterator[memoryview]:
        """The whole content in order, in pieces of a few megabytes. Raises what `read_into` raises."""
        for offset in range(0, self.size, _PIECE_BYTES):
            piece = memoryview(bytearray(min(_PIECE_BYTES, self.size - offset)))
            self.read_into(offset, piece)
            yield piece

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Writer(ABC):
    """One new file of known size, written in pieces by any number of threads."""

    @abstractmethod
    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Writes all of `data` at `offset`. Any thread; pieces must not overlap.

        Args:
            offset: byte position in the file, ≥ 0.
            data: C-contiguous, of any format.

        Raises:
            OSError: storage refused (`ENOSPC`, `EIO`, …).
            ValueError: the piece reaches beyond the declared size, or the writer is closed.
        """

    @abstractmethod
    def finish(self) -> None:
        """Makes the content durable and closes. Once, after every `write` has returned.

        Raises:
            OSError: the file is not durable and must not be used. Trying again cannot help: write a new file.
            FileExistsError: another writer finished this file first (object stores).
            ValueError: bytes are missing, a write is still running, or the writer is closed.
        """

    @abstractmethod
    def abort(self) -> None:
        """Closes without finishing; never raises, at any time, from any thread. `remove_tree` cleans up."""


class Store(ABC):
    """A directory of epochs. Paths are relative to its root, separated by `/`; `""` is the root.

    Every method may be called by any thread, and raises ValueError for a malformed path.

    Attributes:
        root: what the user sees: an absolute path or a URL.
        renames: there is an atomic rename of folders (POSIX); otherwise only put-if-absent (object stores).
        preferred_part_bytes: largest file that suits this store; None where there is no limit.
    """

    root: str
    renames: bool
    preferred_part_bytes: int | None

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""

    def size(self, path: str) -> int:
        """Length of a file in bytes.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with self.open_reader(path) as reader:
            return reader.size

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Reads a small file whole.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is larger than `limit_bytes`; not read.
        """
        with self.open_reader(path) as reader:
            size = reader.size
            if size > limit_bytes:
                raise too_large(f"{self.root.rstrip('/')}/{path}", size, limit_bytes)
            data = bytearray(size)
            reader.read_into(0, memoryview(data))
        return bytes(data)

    @abstractmethod
    def open_reader(self, path: str) -> Reader:
        """Opens a file for reading.

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def uncache(self, path: str) -> None:
        """Takes a durable file out of the page cache, where there is one; a hint, which changes nothing else.

        Raises:
            FileNotFoundError: there is no such file, and the store has a page cache.
        """

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Creates a small file, durable on return, if and only if there is none of that name.

        On POSIX a reader may see the file before all of its bytes are in it, and what a crash leaves may be
        short; on an object store never.

        Raises:
            FileExistsError: there is one. On an object store it may be our own, when a first request arrived
                and only its answer was lost: who must know reads the file and compares.
            FileNotFoundError: the folder is missing (POSIX).
            OSError: storage refused; POSIX then takes the unfinished file away again if it can.
        """

    @abstractmethod
    def open_writer(self, path: str, size: int) -> Writer:
        """Opens a new file of exactly `size` bytes for writing.

        Raises:
            FileExistsError: there is one of that name.
            FileNotFoundError: the folder is missing (POSIX).
        """

    @abstractmethod
    def list(self, path: str) -> list[Entry]:
        """What lies directly in a folder, sorted by name.

        An object store answers with an empty list for a folder that does not exist, and reads every name
        *below* the folder to find those *in* it.

        Raises:
            FileNotFoundError: there is no such folder (POSIX).
        """

    def each(self, call: Callable[[T], object], values: Iterable[T]) -> None:
        """Calls with each value, begun in order; side by side where every answer takes long and costs nothing here.

        Raises:
            The first error of a call, when all that had begun have ended.
        """
        _threads.Pool(1 if self.renames else _THREADS).run([functools.partial(call, value) for value in values])

    @abstractmethod
    def find(self, prefix: str, folder: str | None = None) -> list[str]:
        """Paths of the files whose names begin with a prefix, sorted.

        Args:
            prefix: beginning of the last component.
            folder: where to look, not below it; None: in every folder of the root. A missing one has no files.
        """

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Creates one folder, never its parents; nothing to do on object stores.

        Raises:
            FileExistsError: there is something of that name.
            FileNotFoundError: the parent is missing.
        """

    @abstractmethod
    def make_root(self) -> None:
        """Creates the root and its parents durably where they are missing; nothing to do on object stores."""

    def may_write(self) -> bool:
        """Whether this user may make and remove names in the root, as far as can be said without trying."""
        return True

    @abstractmethod
    def link(self, path: str, target: str) -> None:
        """Creates a symlink; its name is durable after `sync_folder`.

        Args:
            path: its own path.
            target: what it says, relative to the folder that it lies in.

        Raises:
            FileExistsError: there is something of that name.
            io.UnsupportedOperation: this store has no symlinks.
        """

    @abstractmethod
    def sync_folder(self, path: str) -> None:
        """Makes the names in a folder durable; nothing to do on object stores.

        Raises:
            OSError: they may not be; do not try again.
        """

    @abstractmethod
    def rename(self, src: str, dst: str, *, replace: bool = False) -> None:
        """Renames a file or folder atomically.

        Where a file system can neither refuse an existing name nor has hard links (exFAT, some FUSE and network file
        systems), a file or an empty folder that comes to be at `dst` within the call is replaced. What must not rely
        on one winner has a `src` that nobody else can have.

        Args:
            src: existing name.
            dst: new name; its folder exists.
            replace: an existing *file* at `dst` may be replaced. A folder with content never is.

        Raises:
            FileExistsError: there is something at `dst`.
            OSError: with EXDEV: no rename moves it, because parts of it lie on another file system, or in a lower layer
                of this one (overlayfs): see `copy_tree`.
            FileNotFoundError: `src` or the folder of `dst` is gone.
            io.UnsupportedOperation: this store cannot rename (see `renames`).
        """

    def copy_tree(self, src: str, dst: str) -> None:
        """Copies a folder with all below it, durably but for its own name; symlinks are copied as they are.

        Args:
            src: existing folder.
            dst: new name.

        Raises:
            FileExistsError: there is something at `dst`.
            FileNotFoundError: `src` or the folder of `dst` is gone.
            io.UnsupportedOperation: this store has no folders (see `renames`).
        """
        raise io.UnsupportedOperation(f"{self.root} cannot copy {src!r} to {dst!r}")

    def exchange(self, one: str, other: str) -> None:
        """Exchanges two files or folders atomically: at any moment both names are there.

        Raises:
            FileNotFoundError: one of them is gone; nothing has changed.
            io.UnsupportedOperation: this store, or its file system, cannot.
        """
        raise io.UnsupportedOperation(f"{self.root} cannot exchange {one!r} and {other!r}")

    def put(self, path: str, data: bytes, *, draft: str, replace: bool = False) -> None:
        """Gives a small file its content, atomically and durably with its name.

        A reader, and what a crash leaves, has all of the old content or all of the new one, unlike after `create`.

        Args:
            path: of the file.
            data: its content.
            draft: path that nothing else uses, on the same file system. With `renames` the content is written there
                first; a crash may leave it.
            replace: an existing file is replaced; of several callers the last one wins.

        Raises:
            FileExistsError: there is a file, and `replace` is False.
            FileNotFoundError: the folder of `path` or of `draft` is missing (POSIX).
            OSError: storage refused; the draft is removed again if possible.
        """
        if self.renames:
            self.create(draft, data)
            try:
                self.rename(draft, path, replace=replace)
            except BaseException:
                with suppress(OSError):  # the error that counts is the one being raised
                    self.remove(draft)
                raise
            self.sync_folder(path.rpartition("/")[0])
            return
        while True:
            try:
                return self.create(path, data)
            except FileExistsError:
                if not replace:
                    raise
            with suppress(FileExistsError, FileNotFoundError):  # somebody else changed it just now
                return self.replace(path, self.read(path, limit_bytes=_MAX_PUT_BYTES), data)

    def replace(self, path: str, old: bytes, new: bytes) -> None:
        """Gives a small file new content, durably and at once, if it still has the old one.

        Raises:
            FileNotFoundError: there is no such file.
            FileExistsError: it has other content by now.
            io.UnsupportedOperation: this store cannot: files of POSIX folders are written once.
        """
        raise io.UnsupportedOperation(f"{self.root} cannot replace the content of {path!r}")

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes one file or symlink; a missing one is fine."""

    @abstractmethod
    def remove_tree(self, path: str) -> None:
        """Removes a folder with everything below it; a missing one is fine, so is a file.

        Symlinks are removed, not followed. Files that appear meanwhile are removed too, up to a bound.

        Raises:
            OSError: something could not be removed, or files kept appearing (`ENOTEMPTY`).
        """


def patiently(name: str, read: Callable[[], T]) -> T:
    """Reads, and reads again after a pause where storage does not answer.

    Args:
        name: what is read, for messages.
        read: does it; may be called several times.

    Raises:
        StorageError: it did not answer in the end either.
        OSError: an answer that is none of the data.
    """
    for pause in (*_PAUSES_SECS, None):
        try:
            return read()
        except OSError as error:
            if not is_passing(error):
                raise
            if pause is None:
                raise StorageError(name, error) from error
            logging.warning("%s: storage does not answer (%s), asking again", name, error)
            threading.Event().wait(pause)
    raise AssertionError  # the last round returns or raises


@contextmanager
def writing(store: Store, path: str, size: int) -> Generator[Writer]:
    """A new file of `size` bytes: finished, and so durable, at the end of the block; given up if the block raises."""
    writer = store.open_writer(path, size)
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def copy_file(source: Store, path: str, target: Store, into: str) -> None:
    """Copies a file in pieces of bounded size, durably but for its name."""
    with source.open_reader(path) as reader, writing(target, into, reader.size) as writer:
        start = 0
        for piece in reader.pieces():
            writer.write(start, piece)
            start += len(piece)


def check_path(path: str, *, root_allowed: bool = True) -> str:
    """Returns the path if it is well formed.

    Args:
        path: relative, `/`-separated.
        root_allowed: `""`, the root itself, will do.

    Raises:
        ValueError: it is absolute, has an empty, `.` or `..` component or a NUL, or is the root and must not
            be.
    """
    if not path:
        if root_allowed:
            return path
        raise ValueError("path '' is the root itself; expected a name below it")
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(
            f"malformed path {path!r}: expected a relative one such as 'a/b', "
            "without NUL and without empty, '.' or '..' components"
        )
    return path


def check_piece(offset: int, length: int, size: int, name: str) -> None:
    """Refuses a piece that does not lie inside a file of `size` bytes.

    Raises:
        ValueError: it does not.
    """
    if offset < 0 or offset + length > size:
        raise ValueError(f"{name}: bytes [{offset}, {offset + length}) lie outside of its {size} bytes")


def too_large(name: str, size: int, limit_bytes: int) -> ValueError:
    """The error for a file that is larger than its reader allows."""
    return ValueError(f"{name} has {size} bytes; expected at most {limit_bytes}: not read")
