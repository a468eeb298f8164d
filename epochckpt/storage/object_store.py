"""Epochs in an object store: see `schemes` for the kinds.

Folders are prefixes of keys: they exist while a key does, and cannot be renamed. Large files are streamed in chunks:
`concurrency` of them are in memory at most, of all files together. See `object_client` for what a request promises.
"""

from __future__ import annotations

import errno
import io
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from absl import logging

from epochckpt import _patience, _threads
from epochckpt._lazy import np
from epochckpt.errors import AccessError, InvalidArgumentError, MismatchError, StorageError, say
from epochckpt.storage import mmap
from epochckpt.storage.object_client import Client, existing, missing, wait
from epochckpt.storage.pace import Pace, span_bytes
from epochckpt.storage.store import Entry, File, Reader, Store, Tally, Writer, check_piece

T = TypeVar("T")

PART_BYTES = 64 << 20
"""Largest data file: larger ones are cut, so that several are under way at once."""

_CONCURRENCY = 16  # small requests at once
_PAGE = 1000  # names in the answer to one request
_REMOVE_ROUNDS = 16
_KEPT = 4  # files whose content and version are kept
_KEPT_BYTES = 16 << 20  # the largest of them
_NO_VERSION = '"00000000000000000000000000000000"'
_enforcing: set[tuple[str, str]] = set()  # directories, with their servers, that were seen to check conditions
_EARLY_CHUNKS = 4  # so many bytes are kept of pieces that come before their turn


class ObjectStore(Store):
    """A directory of epochs as keys with a common prefix.

    Args:
        url: its URL, with or without a final `/`; its query gives settings.
        settings: those that the query leaves open, see `epochckpt.options.BucketSettings`.
        chunk_bytes: how much of a large file goes with one request; a file that is not larger is one request. None: 8
            to 64 MiB, as it suits the size of the file and the pace of the store, see `pace`.
        pace: learns how fast the store answers. None: a new one.
        pause: waits for so many seconds before a request is repeated.

    Raises:
        InvalidArgumentError: no such scheme, no bucket, or settings that the client does not take.
    """

    atomic_folder_rename = False
    symlinks = False
    sequential_writes = True
    preferred_part_bytes = PART_BYTES

    def __init__(
        self,
        url: str,
        settings: Mapping[str, Any] | None = None,
        *,
        chunk_bytes: int | None = None,
        pace: Pace | None = None,
        pause: Callable[[float], object] = wait,
    ):
        self._client = Client(url, settings, chunk_bytes=chunk_bytes, pace=pace, pause=pause)
        self.root = self._client.root
        self.endpoint = self._client.endpoint
        self.settings = self._client.settings
        self.concurrency = self.settings.concurrency or _CONCURRENCY
        adapts = self._client.sends and not self._client.fixed_chunks
        self._uploads = _Uploads(
            self.concurrency if self._client.sends else math.inf,
            self._client.pace.memory_bytes(self.concurrency) if adapts else math.inf,
            self._client.pace.note_upload,
        )
        self._versions: dict[str, tuple[bytes, dict[str, str]]] = {}  # of contents, by path

    @property
    def address(self) -> str:
        """The URL, with the settings as its query."""
        query = self.settings.query()
        return f"{self.root}?{query}" if query else self.root

    def span_bytes(self, size: int) -> int:
        """As it suits the size of the file and the pace of the store."""
        if self._client.fixed_chunks or not self._client.sends:
            return super().span_bytes(size)
        return span_bytes(self._client.pace.read_bytes(size), self.concurrency)

    def exists(self, path: str) -> bool:
        """Whether the key exists, or another key below it."""
        return bool(path and self._client.head(path)) or bool(self.files(path, 1))

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """One request: the size comes before the content."""
        content, version = self._client.get(path, limit_bytes)
        self._note(path, content, version)
        return content

    def open_reader(self, path: str, size: int | None = None) -> Reader:
        """One request, for its size, unless that is given."""
        if size is None:
            head = self._client.head(path)
            if head is None:
                raise missing(self._client.name(path))
            return _ObjectReader(self._client, path, head["size"])
        return _ObjectReader(self._client, path, size)

    def create(self, path: str, data: bytes) -> None:
        """One conditional write."""
        self._note(path, data, self._client.put(path, data, cached=False))

    def open_writer(self, path: str, size: int) -> Writer:
        """No request; `write` or `finish` refuses a file that exists."""
        name = self._client.name(path)
        self._client.key(path)  # refuses a malformed path
        if size < 0:
            raise ValueError(f"{name}: size {size}; expected at least 0")
        return _Writer(self._client, self._uploads, self.concurrency, path, size, self.written)

    def list(self, path: str) -> list[Entry]:
        """One request for a thousand entries."""
        import obstore

        start = self._client.below(path)
        answer = self._client.ask(path, "listing", lambda: obstore.list_with_delimiter(self._client.kv, start))
        folders = {key[len(start) :] for key in answer["common_prefixes"]}
        files = {meta["path"][len(start) :] for meta in answer["objects"]} - folders
        return sorted([Entry(n, n in folders) for n in folders | files if n], key=lambda entry: entry.name)

    def find(self, prefix: str, folder: str | None = None) -> list[str]:
        """One listing of the folder; of everything, where none is given."""
        if folder is None:
            paths_above = [file.path for file in self.files("") if file.path.count("/") == 1]
            return sorted(path for path in paths_above if path.partition("/")[2].startswith(prefix))
        start = f"{folder}/" if folder else ""
        return [start + e.name for e in self.list(folder) if e.name.startswith(prefix) and not e.is_folder]

    def replace(self, path: str, old: bytes, new: bytes, *, patient: bool = True) -> None:
        """One write on condition that the object has not changed; before it one read, unless its version is known.

        AccessError: the store gives no version of it on which a write could rest.
        """
        stored, version = self._versions.pop(path, (b"", {}))
        if not version or stored != old:
            try:
                stored, version = self._client.get(path, len(old))
            except ValueError:  # it is longer
                raise self._other(path) from None
        if stored != old:
            raise self._other(path)
        self._check_version(path, version)
        self._note(path, new, self._client.put(path, new, version, patient=patient, cached=False))

    def _other(self, path: str) -> FileExistsError:
        return FileExistsError(errno.EEXIST, "it has other content by now", self._client.name(path))

    def _check_version(self, path: str, version: Mapping[str, str]) -> None:
        """Refuses what no condition can name: `If-Match` compares strong ETags only (RFC 9110, section 13.1.1)."""
        if "version" in version and self._client.scheme.generations:
            return
        etag = version.get("e_tag", "")
        if not etag or etag.startswith("W/"):
            tags = f"weak ETags ({etag})" if etag else "no ETag"
            raise AccessError(
                f"{self._client.name(path)}: the server, or a proxy in front of it, gives {tags}. No conditional "
                "write (If-Match) can rest on that, so nothing is saved here: reach the store without a proxy that "
                "compresses or changes answers"
            )

    def _note(self, path: str, content: bytes, version: dict[str, str]) -> None:
        """Keeps the version of a small file that was read or written, for `replace`."""
        if version and len(content) <= _KEPT_BYTES:
            self._versions[path] = content, version
            while len(self._versions) > _KEPT:
                with suppress(KeyError, StopIteration, RuntimeError):  # another thread has
                    self._versions.pop(next(iter(self._versions)))

    def check_conditions(self, path: str) -> None:
        """Two writes, which must be refused. A missing object is created first."""
        known = self.root, self.endpoint
        if known in _enforcing:
            return
        with suppress(FileExistsError):
            self._client.put(path, b"", look=False)  # the same again must be refused
            with suppress(FileExistsError):
                self._client.put(path, b"", look=False)
                raise self._heedless()
        with suppress(FileExistsError):
            self._client.put(path, b"", {"e_tag": _NO_VERSION, "version": "1"}, look=False)
            raise self._heedless()
        _enforcing.add(known)

    def _heedless(self) -> AccessError:
        return AccessError(
            f"{self.root}: this store took a conditional write whose condition does not hold. Nothing would keep "
            "two runs from writing here at the same time, so nothing is saved here: use a store that has "
            "If-None-Match and If-Match for writes"
        )

    def confirming_damage(self, read: Callable[[], T]) -> T:
        """One more request where the first answer is damaged."""
        try:
            return read()
        except (InvalidArgumentError, MismatchError):  # what was asked for is wrong, not the answer
            raise
        except (ValueError, EOFError) as error:
            logging.warning("%s: %s; it is read once more: an answer may be damaged on its way", self.root, say(error))
        return read()

    def copy(self, src: str, dst: str, *, replace: bool = True) -> None:
        """One request; S3 copies up to 5 GiB so."""
        if not replace and not self._client.scheme.copies_if_absent:
            raise io.UnsupportedOperation(f"{self.root} cannot copy on condition that there is no {dst!r}")
        self._client.copy(src, dst, replace=replace)

    def remove(self, path: str) -> None:
        """One delete."""
        with suppress(FileNotFoundError):
            self._delete(path, self._client.key(path))

    def remove_tree(self, path: str) -> None:
        """Deletes the key, and those below it until a listing is empty.

        The empty objects that consoles make for a folder, with a final slash in their names, stay: no path names them.
        """
        self.remove(path)
        before = set[str]()
        rounds = 0
        while names := {file.path for file in self.files(path)}:
            if names == before:
                return
            rounds = rounds + 1 if len(names) >= len(before) > 0 else 0
            if rounds > _REMOVE_ROUNDS:
                name = self._client.name(path)
                raise OSError(errno.ENOTEMPTY, f"files kept appearing below it {_REMOVE_ROUNDS} times over", name)
            self.remove_all([f"{path}/{name}" for name in sorted(names)])
            before = names

    def _delete(self, path: str, keys: str | Sequence[str]) -> None:
        import obstore

        self._client.ask(path, "deleting", lambda: obstore.delete(self._client.kv, keys))

    def remove_all(self, paths: Iterable[str]) -> None:
        """One request for many files, where the store has such."""
        left = list(paths)
        while left:
            some = left[:_PAGE]
            left = left[_PAGE:]
            try:
                self._delete(some[0], [self._client.key(path) for path in some])
            except FileNotFoundError:  # on Google Cloud Storage the client stops at the first that is missing
                self.each(self.remove, some)

    def files(self, path: str, limit: int | None = None) -> list[File]:
        """One request for a thousand files; with `limit` the first page that holds some."""
        import obstore

        start = self._client.below(path)

        def pages() -> list[File]:
            listed = list[File]()
            for page in obstore.list(self._client.kv, start, chunk_size=limit or _PAGE):
                for meta in page:
                    if name := meta["path"][len(start) :]:
                        listed.append(File(name, meta["size"], int(meta["last_modified"].timestamp() * 1e9)))
                if limit and listed:
                    break
            return listed

        return self._client.ask(path, "listing", pages)


class _ObjectReader(Reader):
    """One object, read by ranges."""

    def __init__(self, client: Client, path: str, size: int):
        self._client = client
        self._path = path
        self._size = size
        self._closed = False

    @property
    def size(self) -> int:
        """Length as it was when the object was opened, or as the caller gave it."""
        return self._size

    def read_parts(self, offset: int, parts: Sequence[memoryview]) -> None:
        """One ranged read, whose answer also says the size. It goes to the buffers as it comes, and nowhere before."""
        name = self._client.name(self._path)
        length = sum(part.nbytes for part in parts)
        if self._closed:
            raise ValueError(f"{name} is closed")
        if offset < 0:
            raise ValueError(f"{name}: offset {offset}; expected at least 0")
        if length and offset + length > self._size:
            raise EOFError(f"{name}: has {self._size} bytes, not the {length} from {offset} on")
        if not length:
            return
        size = self._client.read_range(self._path, offset, parts)
        if size != self._size:
            raise EOFError(f"{name}: has {size} bytes, {self._size} are expected")

    def close(self) -> None:
        """Forgets the key; no connection was held."""
        self._closed = True


class _Sending:
    """One chunk on its way: when the client took it. None: not yet."""

    def __init__(self) -> None:
        self.began: float | None = None


class _Uploads:
    """What the uploads of a store share: how many chunks may be in memory, being filled, waiting or under way.

    Args:
        chunks: so many chunks.
        nbytes: so many bytes of chunks; a single chunk may be larger.
        note: is told the bytes of each chunk that was sent, and how long that took.
    """

    def __init__(self, chunks: float, nbytes: float, note: Callable[[int, float], None]):
        self.chunks = self.free = chunks
        self._free_bytes = nbytes
        self._note = note
        self._spare: list[np.ndarray] = []  # memory for chunks, while there are uploads
        self.sent = 0  # chunks that have left memory
        self.said = -1  # how many had left when a warning said that uploads stand still
        self.moved = time.monotonic()  # when the last one left
        self.changed = threading.Condition()

    def has_room(self, nbytes: int) -> bool:
        """Whether there is room for one more chunk in so much memory."""
        return self.free > 0 and (self._free_bytes >= nbytes or self.free == self.chunks)

    def take(self, size: int, nbytes: int) -> tuple[np.ndarray, weakref.finalize[Any, Any], _Sending]:
        """A chunk of this size in memory of so many bytes, the finalizer that notes its release, and its way."""
        with self.changed:
            memory = self._spare.pop() if self._spare else None
            if memory is None or len(memory) != nbytes:
                memory = mmap.fresh(nbytes)  # not of the heap: every thread that frees so much would keep some of it
            return self._lend(memory, size, self._keep)

    def take_whole(self, size: int) -> tuple[np.ndarray, weakref.finalize[Any, Any], _Sending]:
        """The same for a whole file of this size, in memory that is not used again."""
        with self.changed:
            return self._lend(mmap.fresh(size), size, self._give)

    def _lend(
        self, memory: np.ndarray, size: int, freed: Callable[[np.ndarray, int, _Sending], None]
    ) -> tuple[np.ndarray, weakref.finalize[Any, Any], _Sending]:
        chunk = memory[:size]
        sending = _Sending()
        finalizer = weakref.finalize(chunk, freed, memory, size, sending)
        finalizer.atexit = False
        self.free -= 1
        self._free_bytes -= len(memory)
        return chunk, finalizer, sending

    def _keep(self, memory: np.ndarray, size: int, sending: _Sending) -> None:
        with self.changed:
            self._spare.append(memory)
        self._give(memory, size, sending)

    def _give(self, memory: np.ndarray, size: int, sending: _Sending) -> None:
        # Called by any thread, wherever a chunk is freed.
        with self.changed:
            self._count(len(memory))
        if sending.began is not None:
            self._note(size, time.monotonic() - sending.began)

    def _count(self, nbytes: int) -> None:
        self.free += 1
        self._free_bytes += nbytes
        self.sent += 1
        self.moved = time.monotonic()
        self.changed.notify_all()

    def end(self, chunks: Iterable[weakref.finalize[Any, Any]]) -> None:
        """The upload that had these has ended. Memory that the client still has is not used again."""
        with self.changed:
            for freed in chunks:
                if (alive := freed.detach()) is not None:
                    self._count(len(alive[2][0]))
            if self.free == self.chunks:
                self._spare.clear()
            self.changed.notify_all()


class _Writer(Writer):
    """One new object. A small one is put by `finish`; a large one is uploaded in chunks while it is written.

    Chunks are filled in their order; pieces that come early are kept. The client sends a chunk without a copy, and it
    counts until its memory is freed. A write waits for its turn, and for room. A thread that writes backwards, or many
    files at once, would wait for itself, and waits for a bounded time.
    """

    def __init__(self, client: Client, uploads: _Uploads, concurrency: int, path: str, size: int, tally: Tally):
        self._client = client
        self._uploads = uploads
        self._concurrency = concurrency
        self._tally = tally
        self._path = path
        self._size = size
        self._name = client.name(path)
        self._chunk_bytes = client.chunk_size(size)
        self._lock = threading.Condition()
        self._early: dict[int, bytes] = {}
        self._ready: deque[np.ndarray] = deque()  # chunks that are full
        self._chunk = np.empty(0, np.uint8)  # the last one
        self._room = 0  # bytes of it that are still to be filled
        self._held: list[weakref.finalize[Any, Any]] = []  # one for each chunk: alive while that is in memory
        self._unsent: deque[_Sending] = deque()  # one for each chunk that the client has not taken
        self._written = self._next = self._early_bytes = self._taken = 0
        self._begun = self._closed = self._ended = self._asked = self._said = False
        self._upload: _threads.Future[None] | None = None

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """One copy, or for a piece that is early two."""
        view = memoryview(data)
        check_piece(offset, view.nbytes, self._size, self._name)
        with self._lock:
            self._check_open()
            if not view.nbytes:
                return
            self._wait_for_turn(offset)
            self._check_open()
            self._written += view.nbytes
            if self._size > self._chunk_bytes and not self._begun:
                self._begin()
            if offset != self._next:
                self._early[offset] = bytes(view.cast("B"))
                self._early_bytes += view.nbytes
                return
        piece: memoryview | None = view.cast("B")
        while piece is not None:  # no other thread is here: `_next` does not move before
            self._fill(piece)
            self._tally.add(len(piece))
            with self._lock:
                self._next += len(piece)
                early = self._early.pop(self._next, None)
                piece = memoryview(early) if early else None
                self._early_bytes -= len(early or b"")
                self._lock.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self._name} is closed")
        if self._ended and self._upload is not None:
            self._upload.result()  # raises, because there is something left to write

    def _wait_for_turn(self, offset: int) -> None:
        """Waits while too many pieces are early, as long as others make progress."""
        before = self._next
        limit_bytes = _EARLY_CHUNKS * self._client.least_chunk_bytes
        while not self._lock.wait_for(
            lambda: offset <= self._next or self._early_bytes < limit_bytes or self._closed or self._ended,
            _patience.now().upload_late_secs,
        ):
            if before == self._next:
                return
            before = self._next

    def _fill(self, piece: memoryview) -> None:
        """Copies a piece into chunks."""
        done = 0
        while done < len(piece):
            if not self._room:
                self._take_chunk(self._next + done)
            chunk = self._chunk
            length = min(self._room, len(piece) - done)
            start = len(chunk) - self._room
            chunk[start : start + length] = np.frombuffer(piece[done : done + length], np.uint8)
            done += length
            self._room -= length
            with self._lock:
                if not self._room and not self._ended:
                    self._chunk = np.empty(0, np.uint8)
                    self._ready.append(chunk)
                    self._lock.notify_all()
            del chunk  # it must be freed once it is sent

    def _take_chunk(self, start: int) -> None:
        """Waits until the upload asks for data, and until others leave room; takes memory for the next chunk."""
        if self._upload is not None:
            with self._lock:
                self._wait(self._lock, lambda: self._asked)
        self._check_open()
        shared = self._uploads
        began = time.monotonic()

        def is_free() -> bool:
            if shared.has_room(self._chunk_bytes) or (self._begun and self._upload is None):
                return True
            late = time.monotonic() - max(began, shared.moved) >= _patience.now().upload_late_secs
            return late and not any(each.alive for each in self._held)

        with shared.changed:
            self._wait(shared.changed, is_free)
            if not self._closed and not self._ended:
                self._room = min(self._chunk_bytes, self._size - start)
                if self._size <= self._chunk_bytes:
                    self._chunk, freed, sending = shared.take_whole(self._size)
                else:
                    self._chunk, freed, sending = shared.take(self._room, self._chunk_bytes)
                self._held.append(freed)
                self._unsent.append(sending)
        self._check_open()

    def _wait(self, changed: threading.Condition, is_ready: Callable[[], bool]) -> None:
        """Waits, also for the end of the upload."""
        seen = self._progress()
        while not changed.wait_for(
            lambda: self._closed or self._ended or is_ready(),
            min(_patience.now().upload_still_secs, _patience.now().upload_late_secs),
        ):
            seen = self._look(seen)

    def _progress(self) -> tuple[int, int]:
        return self._taken, self._uploads.sent

    def _look(self, seen: tuple[int, int]) -> tuple[int, int]:
        """How far this upload is, and all; says it, once for all, if they were as far at the last look."""
        now = self._progress()
        if seen == now and not self._said and self._uploads.said != now[1]:
            self._said = True
            self._uploads.said = now[1]
            text = (
                "%s: writing: the upload stands still after %d of %d bytes; the client repeats what fails and tries on"
            )
            logging.warning(text, self._name, now[0], self._size)
        return now

    def _begin(self) -> None:
        self._begun = True
        upload: _threads.Future[None] = _threads.Future()
        try:
            threading.Thread(target=upload.run, args=(self._run,), daemon=True).start()
            self._upload = upload
        except RuntimeError:  # the interpreter is ending: `finish` writes the whole
            logging.debug("%s: no thread can be had", self._name)

    def _run(self) -> None:
        """Uploads, on a thread of its own."""
        try:
            if self._client.head(self._path) is not None:
                raise existing(self._name)
            self._client.stream(self._path, self._chunks(), self._chunk_bytes, self._concurrency)
        except StorageError:
            # The answer to the last request may be lost. No other writer uses this name.
            size = self._client.head(self._path) if self._taken == self._size else None
            if size is None or size["size"] != self._size:
                raise
        finally:
            with self._lock:
                self._end()

    def _chunks(self) -> Iterator[np.ndarray]:
        """What the upload takes, in order. An error makes it give up and remove its parts."""
        while self._taken < self._size:
            with self._lock:
                self._asked = True
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._ready or self._ended)
                if self._ended:
                    raise InterruptedError(errno.EINTR, "given up", self._name)
                self._taken += len(self._ready[0])
                self._unsent.popleft().began = time.monotonic()
            yield self._ready.popleft()  # no name holds it: it must be freed once it is sent

    def finish(self) -> None:
        """One conditional write, or the end of the upload."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self._name} is closed")
            self._closed = True
            if self._written != self._size or self._next != self._size:
                self._end()
                raise ValueError(f"{self._name}: {self._written} of {self._size} bytes written; not finished")
        if self._upload is None:
            chunks = [chunk.data for chunk in self._ready]
            try:
                self._client.put(self._path, chunks[0] if len(chunks) == 1 else b"".join(chunks))
            finally:
                self.abort()
            return
        seen = self._progress()
        while not self._upload.wait(_patience.now().upload_still_secs):
            seen = self._look(seen)
        self._upload.result()

    def abort(self) -> None:
        """Ends the upload, which removes its parts, and frees the memory."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._early.clear()
        self._early_bytes = 0
        self._ready.clear()
        self._chunk = np.empty(0, np.uint8)
        self._lock.notify_all()
        self._uploads.end(self._held)
