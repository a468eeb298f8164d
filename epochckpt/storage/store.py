"""The interface `Store`, and what every store guarantees.

- A file is written once. `create` and `open_writer` never replace an existing file; of many callers that `create` one
  name exactly one succeeds.
- When `create` or `Writer.finish` returns, the content is durable. The *name* is durable after `sync_folder` of its
  folder (on object stores at once).
- A failed flush is reported and never repeated: the second one would report success although data are lost
  (https://wiki.postgresql.org/wiki/Fsync_Errors).
- A read that storage does not answer (`errors.is_passing`) is repeated for about a second, and then ends in an error
  that says nothing about the data. A write is never repeated, except after a signal: the caller decides.
- Every path is checked before it is used, and no read leaves the root through a symlink.

Stores differ, and each difference has a name of its own among the attributes of `Store`. A store with
`atomic_folder_rename` has folders that exist on their own: `make_folder` and `rename` fail where a parent is missing,
which is what fences off an older run. On other stores a folder exists while a file lies below it.
"""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from absl import logging

from epochckpt import _patience, _threads
from epochckpt._lazy import np
from epochckpt.errors import StorageError, is_passing
from epochckpt.options import BucketSettings

T = TypeVar("T")

_PIECE_BYTES = 4 * 2**20
_MAX_PUT_BYTES = 256 * 2**20  # of a file that `put` replaces
_ROUNDS_LIMIT_SECS = 120.0  # after which no further try of it begins
_PROBE = "epochckpt-is-reachable"  # a name that nothing has
_SPAN_BYTES = 16 << 20
_GAP_PART = 16  # this part of a call may be unwanted bytes, where they save another call
_NO_NAMES = frozenset(("", ".", ".."))  # what no component of a path may be


@dataclass(frozen=True)
class Entry:
    """One name in a folder."""

    name: str  # last component of the path
    is_folder: bool  # a real folder, not a symlink to one


@dataclass(frozen=True)
class File:
    """One file below a folder."""

    path: str  # relative to the folder
    size: int  # bytes
    written_ns: int  # since 1970, by the store's clock


class Reader(ABC):
    """One file, open for reading by any number of threads. A context manager."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Length of the file in bytes. On an object store the first use takes a few requests."""

    @abstractmethod
    def read_parts(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Fills buffers with the bytes from `offset` on, one after the other; EOFError if the file ends before.

        May be called by any thread. The buffers are writable and C-contiguous, with items of any format.
        """

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills one buffer with the bytes from `offset` on; raises what `read_parts` raises."""
        self.read_parts(offset, [buffer])

    def read(self, offset: int, length: int) -> memoryview:
        """The bytes from `offset` on, in memory of their own; raises what `read_into` raises."""
        buffer = np.empty(length, np.uint8).data
        self.read_into(offset, buffer)
        return buffer

    @abstractmethod
    def close(self) -> None:
        """Ends reading. It may be called again, and while another thread still reads."""

    def pieces(self) -> Iterator[memoryview]:
        """The whole content in order, in pieces of a few megabytes. Raises what `read_into` raises."""
        for offset in range(0, self.size, _PIECE_BYTES):
            piece = memoryview(bytearray(min(_PIECE_BYTES, self.size - offset)))
            self.read_into(offset, piece)
            yield piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Tally:
    """Bytes, to which any thread adds."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()
        self._followers: list[Callable[[int], None]] = []

    def add(self, nbytes: int) -> None:
        """So many more."""
        with self._lock:
            self.nbytes += nbytes
        for tell in self._followers:
            tell(nbytes)

    def follow(self, tell: Callable[[int], None]) -> None:
        """From now on, tells of each piece, from the thread that adds it."""
        self._followers.append(tell)


class Writer(ABC):
    """One new file of known size, written in pieces by any number of threads."""

    @abstractmethod
    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Writes all of `data`, which is C-contiguous with items of any format, at a byte `offset`.

        May be called by any thread. Pieces must not overlap and may come in any order. A store that needs them in order
        may block the call for a piece far ahead, until the earlier ones have come. ValueError if a piece reaches beyond
        the declared size, or if the writer is closed.
        """

    @abstractmethod
    def finish(self) -> None:
        """Makes the content durable and closes. Called once, after every `write` has returned.

        After an OSError the file is not durable, and must not be used: write a new file. FileExistsError if another
        writer finished it first (object stores, for a file of one request: the name of a larger one must be the
        caller's own); ValueError if bytes are missing, or the writer is closed.
        """

    @abstractmethod
    def abort(self) -> None:
        """Closes without finishing. Never raises. May be called at any time, by any thread; the file may stay."""


class Store(ABC):
    """A directory of epochs. Paths are relative to its root, separated by `/`; `""` is the root.

    Every method may be called by any thread, and raises ValueError for a malformed path. `epochckpt.testing` has the
    tests that an implementation must pass.

    Attributes:
        root: the directory as the user sees it: an absolute path or a URL.
        atomic_folder_rename: `rename` moves a folder atomically (POSIX). Other stores need `replace`, which changes a
            small file on condition that nobody else has changed it.
        symlinks: `link` makes symlinks. The Orbax view of an epoch consists of them, and elsewhere of copies.
        sequential_writes: a file is written from its beginning to its end, as one stream. So one thread writes each
            file, and an array that is larger than a part is cut into several files.
        preferred_part_bytes: largest file that suits this store; None for any size.
        max_open_files: how many files a restore has open at the same time; None for any number.
        size_check_from_bytes: for an array of at least this size, a restore checks the sizes of the files before it
            allocates memory. Where each size takes a request, that pays for large arrays only.
        concurrency: how many requests at once suit it.
        endpoint: the server of a bucket, if it is not the cloud's own; else empty.
        settings: how a bucket is reached.
    """

    root: str
    atomic_folder_rename: bool
    symlinks: bool
    sequential_writes: bool
    preferred_part_bytes: int | None
    max_open_files: int | None = None
    size_check_from_bytes: int = 2**30
    concurrency: int = 1
    endpoint: str = ""
    settings: BucketSettings = BucketSettings()

    @functools.cached_property
    def written(self) -> Tally:
        """What its writers have written so far, as far as the store tells."""
        return Tally()

    def span_bytes(self, size: int) -> int:
        """Up to which size neighbouring blocks of a file of `size` bytes are read with one call; 0: each by itself."""
        del size
        return _SPAN_BYTES

    def gap_bytes(self, size: int) -> int:
        """How many unwanted bytes between two blocks of a file of `size` bytes are read, to save another call."""
        return self.span_bytes(size) // _GAP_PART

    @property
    def local_path(self) -> str | None:
        """The path of the root, by which any program on this host reaches the same files; None in a bucket."""
        return None

    @property
    def address(self) -> str:
        """What opens this directory again in any process: the root, and the settings by which a bucket is reached."""
        return self.root

    def address_of(self, folder: str) -> str:
        """What opens a folder in this directory, with the same settings."""
        return f"{self.root.rstrip('/')}/{folder}{self.address.removeprefix(self.root)}"

    @property
    def advice(self) -> str:
        """What whoever saves here had better know; empty if there is nothing."""
        return ""

    def is_same(self, other: Store) -> bool:
        """Whether the other one is the same directory, whatever the settings."""
        return (self.root.rstrip("/"), self.endpoint) == (other.root.rstrip("/"), other.endpoint)

    def lies_in(self, other: Store) -> bool:
        """Whether the root is the other one's or a folder below it, with symlinks followed; False in a bucket."""
        if self.local_path is None or other.local_path is None:
            return False
        above = os.path.realpath(other.local_path)
        return os.path.commonpath([above, os.path.realpath(self.local_path)]) == above

    def has_beside(self, names: Iterable[str]) -> bool:
        """Whether the folder that the root lies in has one of these names; False in a bucket, which is not asked."""
        if self.local_path is None:
            return False
        above = os.path.dirname(self.local_path)
        return any(os.path.exists(os.path.join(above, name)) for name in names)

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of this name."""

    def existing(self, paths: Iterable[str]) -> set[str]:
        """The paths at which a file or folder exists. If looks fail, the error of the first failed path is raised."""
        return {path for path in paths if self.exists(path)}

    def size(self, path: str) -> int:
        """Length of a file in bytes; FileNotFoundError if it does not exist."""
        with self.open_reader(path) as reader:
            return reader.size

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Reads a whole small file; FileNotFoundError if it does not exist, ValueError if it is too large."""
        with self.open_reader(path) as reader:
            size = reader.size
            if size > limit_bytes:
                raise too_large(f"{self.root.rstrip('/')}/{path}", size, limit_bytes)
            data = bytearray(size)
            reader.read_into(0, memoryview(data))
        return bytes(data)

    @abstractmethod
    def open_reader(self, path: str, size: int | None = None) -> Reader:
        """Opens a file for reading; FileNotFoundError if there is none.

        `size` is the length that it has by what the caller knows: an object store need not ask for it then. There a
        file that is missing, or has another length, is an error of the first read (EOFError for the length).
        """

    def uncache(self, path: str, start: int = 0, nbytes: int | None = None) -> None:
        """Drops a durable file from the page cache, if the store has one; changes nothing else.

        It drops so many bytes from `start` on, as far as they are whole pages; None: all that follow.
        """
        check_path(path, root_allowed=False)
        del start, nbytes

    def read_ahead(self, path: str) -> None:
        """Asks the system to read a file into the page cache, if the store has one, and waits for no byte of it.

        Raises FileNotFoundError if there is no such file.
        """
        check_path(path, root_allowed=False)

    @property
    def leaves_files_cached(self) -> bool:
        """Whether large files that are written here are in the page cache of this host afterwards."""
        return False

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Creates a small file, durable on return.

        On POSIX a reader may see the file while it is being written, and a crash may leave it short; `put` avoids both.
        FileNotFoundError if the folder is missing (POSIX). FileExistsError if the file exists; on an object store it
        may be the caller's own, if the answer to a first request was lost: compare the content where that matters.
        """

    @abstractmethod
    def open_writer(self, path: str, size: int) -> Writer:
        """Opens a new file of exactly `size` bytes; FileNotFoundError as `create`.

        FileExistsError if there is one; object stores may notice that at `Writer.finish`.
        """

    @abstractmethod
    def list(self, path: str) -> list[Entry]:
        """The entries of a folder, sorted by name.

        A missing folder raises FileNotFoundError (POSIX). On an object store it is empty, and every name *below* the
        folder is read to find those *in* it.
        """

    def each(self, call: Callable[[T], object], values: Iterable[T]) -> None:
        """Calls `call` with each value: one after the other on POSIX, in parallel where each answer takes long.

        The first error of a call is raised when all calls that had begun have ended.
        """
        _threads.Pool(self.concurrency).run([functools.partial(call, value) for value in values])

    @abstractmethod
    def find(self, prefix: str, folder: str | None = None) -> list[str]:
        """Paths of the files whose last component begins with a prefix, sorted.

        They lie in `folder`, not below; None stands for every folder of the root. A missing folder has no files.
        """

    def files(self, path: str, limit: int | None = None) -> list[File]:
        """All files below a folder, or some `limit` of them; io.UnsupportedOperation on POSIX."""
        raise io.UnsupportedOperation(f"{self.root} cannot list all files below {path!r} (limit {limit})")

    def remove_all(self, paths: Iterable[str]) -> None:
        """Removes files, those that exist."""
        self.each(self.remove, paths)

    def check_conditions(self, path: str) -> None:
        """Checks with a file of its own, which it leaves, that no write succeeds whose condition does not hold.

        It asks once in a process. Raises AccessError if the store does not enforce conditions: of several runs, all
        would take themselves for the only one there.
        """
        del path

    def confirming_damage(self, read: Callable[[], T]) -> T:
        """Returns the result of `read`, a function that reads and verifies.

        An answer of an object store may be damaged on its way. On an object store `read` is therefore called a second
        time if it raises a ValueError (such as DamagedError or FormatError) or an EOFError; the second error is raised.
        On POSIX the disk holds the damage, and one call is enough.
        """
        return read()

    def make_folder(self, path: str) -> None:
        """Creates one folder, never its parents; nothing to do on object stores.

        FileExistsError if there is something of that name, FileNotFoundError if the parent is missing.
        """
        check_path(path)

    def check_root(self) -> bool:
        """Whether the root exists; a bucket needs no folder, and is not asked.

        NotACheckpointDirectoryError if there is something of that name, and no directory.
        """
        return True

    def is_reachable(self) -> bool:
        """Whether the root is a directory. A bucket has no folders: OSError if it does not answer."""
        self.exists(_PROBE)
        return True

    def make_root(self) -> None:
        """Creates the root and its missing parents durably; nothing to do on object stores."""
        return

    def root_id(self) -> tuple[int, ...]:
        """What tells the root from another folder that has its path later; empty if there is no root, or no folders."""
        return ()

    def may_write(self) -> bool:
        """Whether this user may create and remove names in the root, as far as is known without trying."""
        return True

    def link(self, path: str, target: str) -> None:
        """Creates a symlink to a target that is relative to the link's folder; durable after `sync_folder`.

        FileExistsError if there is something of that name, io.UnsupportedOperation without `symlinks`.
        """
        raise io.UnsupportedOperation(f"{self.root}: an object store has no symlinks")

    def sync_folder(self, path: str) -> None:
        """Makes the names in a folder durable. After an OSError they may not be; do not try again."""
        check_path(path)

    def rename(self, src: str, dst: str, *, replace: bool = False) -> None:
        """Renames a file or folder atomically; with `replace` a file also onto a file, which is replaced.

        A folder with content is never replaced.

        Some file systems (exFAT, some FUSE and network file systems) can neither refuse an existing name nor have hard
        links. There a file or an empty folder that appears at `dst` during the call is replaced. A caller that must
        not rely on one winner uses a `src` that no other caller can have.

        Raises:
            FileExistsError: there is something at `dst`.
            FileNotFoundError: `src` or the folder of `dst` is missing.
            OSError: with EXDEV, no rename can move it, because parts of it lie on another file system or in a lower
                layer of this one (overlayfs); `copy_tree` can.
            io.UnsupportedOperation: this store cannot rename (see `atomic_folder_rename`).
        """
        check_path(src, root_allowed=False)
        check_path(dst, root_allowed=False)
        raise io.UnsupportedOperation(
            f"{self.root} cannot rename {src!r} to {dst!r}: an object store has no atomic rename"
        )

    def copy(self, src: str, dst: str, *, replace: bool = True) -> None:
        """Copies a file within the store, which does so by itself. FileNotFoundError.

        What is at `dst` is replaced, or FileExistsError: that may be the caller's own copy, if the answer to a first
        request was lost. io.UnsupportedOperation if the store cannot (POSIX), or (S3) without `replace`.
        """
        raise io.UnsupportedOperation(f"{self.root} cannot copy {src!r} to {dst!r} by itself")

    def copy_tree(self, src: str, dst: str) -> None:
        """Copies a folder, durably but for its own name; symlinks stay symlinks. Raises what `rename` raises."""
        raise io.UnsupportedOperation(f"{self.root} cannot copy {src!r} to {dst!r}")

    def exchange(self, one: str, other: str) -> None:
        """Exchanges two files or folders atomically.

        FileNotFoundError if one is missing, io.UnsupportedOperation if the file system cannot.
        """
        raise io.UnsupportedOperation(f"{self.root} cannot exchange {one!r} and {other!r}")

    def put(self, path: str, data: bytes, *, draft: str, replace: bool = False) -> None:
        """Gives a small file its content, atomically and durably with its name.

        A reader, and what a crash leaves, has all of the old content or all of the new one, unlike after `create`.
        With `replace` an existing file is replaced, and of several callers the last one wins; else it raises
        FileExistsError. With `atomic_folder_rename` the content is first written to `draft`, a path that nothing else
        uses on the same file system; a crash may leave it. StorageError: on an object store others were faster at
        every try.
        """
        if self.atomic_folder_rename:
            self.create(draft, data)
            try:
                self.rename(draft, path, replace=replace)
            except BaseException:
                with suppress(OSError):  # the error that counts is the one being raised
                    self.remove(draft)
                raise
            self.sync_folder(path.rpartition("/")[0])
            return
        seen = Conflicts()
        for _ in rounds():
            try:
                return self.create(path, data)
            except FileExistsError:
                if not replace:
                    raise
            with suppress(FileNotFoundError):  # it was removed just now
                old = self.read(path, limit_bytes=_MAX_PUT_BYTES)
                try:
                    return self.replace(path, old, data)
                except FileExistsError:  # somebody else changed it just now
                    seen.note(old)
        raise seen.error(f"{self.root.rstrip('/')}/{path}")

    def append_line(self, path: str, line: bytes, *, limit_bytes: int) -> bool:
        """Appends a line to a file, or creates the file. A line that a crash has torn stays a line of its own.

        It is not flushed: a power cut may lose it. Nothing is written, and False returned, where the file has so many
        bytes already. io.UnsupportedOperation if the store cannot append (object stores).
        """
        raise io.UnsupportedOperation(f"{self.root} cannot append to {path!r}")

    def replace(self, path: str, old: bytes, new: bytes, *, patient: bool = True) -> None:
        """Replaces the content of a small file, durably and atomically, if it still has the old content.

        Unless it is `patient`, the write is not repeated where the store refuses it for the moment.
        FileExistsError if its content is not `old`, io.UnsupportedOperation if the store cannot (POSIX). StorageError
        whose `errno` is `EBUSY`: the store takes no more writes of this file at the moment.
        """
        del old, new, patient
        raise io.UnsupportedOperation(f"{self.root} cannot replace the content of {path!r}")

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes one file or symlink, if it exists."""

    @abstractmethod
    def remove_tree(self, path: str) -> None:
        """Removes a folder with everything below it, or a file, if it exists.

        Symlinks are removed, not followed. Files that appear during the call are removed too, up to a bound
        (`ENOTEMPTY`).
        """


def read_json(store: Store, path: str, *, limit_bytes: int) -> Any:
    """The JSON value in a small file.

    Raises ValueError or RecursionError for a file that is no JSON, and the errors of `Store.read`.
    """
    return store.confirming_damage(lambda: json.loads(store.read(path, limit_bytes=limit_bytes)))


def patiently(name: str, read: Callable[[], T]) -> T:
    """Calls `read`, and again after a pause as long as storage does not answer, for about a second: then StorageError.

    An error that is storage's answer is raised at once.
    """
    for pause in (*_patience.now().read_pauses_secs, None):
        try:
            return read()
        except OSError as error:
            if not is_passing(error):
                raise
            if pause is None:
                raise StorageError(name, error) from error
            logging.warning("%s: storage does not answer (%s); trying again", name, error)
            threading.Event().wait(pause)
    raise AssertionError  # the last round returns or raises


def rounds(pauses: Iterable[float] = (), limit_secs: float = 0.0) -> Iterator[int]:
    """Numbers of the tries to change a file that others change as well; between them are growing pauses.

    They end after so many tries, or so much time: the defaults are those of a write that somebody waits for.
    """
    end = time.monotonic() + (limit_secs or _ROUNDS_LIMIT_SECS)
    for number, pause in enumerate(pauses or _patience.now().change_pauses_secs):
        if pause:
            threading.Event().wait(pause * random.uniform(0.5, 1.0))  # writers must not come back together
        if number and time.monotonic() > end:
            return
        yield number


class Conflicts:
    """Counts failed conditional writes of a file, and compares what was read before each."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._tries = 0
        self._same = 0
        self._seen: bytes | None = None

    def note(self, seen: bytes) -> None:
        """The content on which a write failed."""
        self._same = self._same + 1 if seen == self._seen else 1
        self._seen = seen
        self._tries += 1

    def error(self, name: str) -> StorageError:
        """The error when no further try is made."""
        tries = f"{self._tries} conditional writes"
        secs = time.monotonic() - self._began
        if self._same > max(2, self._tries // 2):
            problem = (
                f"the last {self._same} of {tries} in {secs:.0f} s were refused because it has changed, yet it reads "
                "the same each time. Reads are out of date: is there a cache in front of the store?"
            )
        else:
            problem = f"{tries} in {secs:.0f} s were refused because others changed it in between"
        return StorageError(name, OSError(errno.EBUSY, problem))


@contextmanager
def writing(store: Store, path: str, size: int) -> Generator[Writer]:
    """Opens a new file of `size` bytes; finishes it at the end of the block, and aborts it if the block raises."""
    writer = store.open_writer(path, size)
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def check_path(path: str, *, root_allowed: bool = True) -> str:
    """Returns a relative, `/`-separated path; ValueError if it is malformed, or the root where that is not allowed."""
    if not path:
        if root_allowed:
            return path
        raise ValueError("path '' is the root itself; expected a name below it")
    if "\0" in path or not _NO_NAMES.isdisjoint(path.split("/")):
        raise ValueError(
            f"malformed path {path!r}: expected a relative one such as 'a/b', "
            "without NUL and without empty, '.' or '..' components"
        )
    return path


def check_piece(offset: int, length: int, size: int, name: str) -> None:
    """Raises ValueError for a piece that does not lie inside a file of `size` bytes."""
    if offset < 0 or offset + length > size:
        raise ValueError(f"{name}: bytes [{offset}, {offset + length}) lie outside of its {size} bytes")


def too_large(name: str, size: int, limit_bytes: int) -> ValueError:
    """The error for a file that is larger than its reader allows."""
    return ValueError(f"{name} has {size} bytes; expected at most {limit_bytes}: not read")
