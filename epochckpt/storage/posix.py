"""Epochs in a POSIX directory: positional reads and writes, through the page cache or past it, atomic renames.

Every system call releases the interpreter lock. To get it back takes 5 ms beside a thread that runs Python all the
time, so callers pass pieces of megabytes. Large pieces go through the page cache of a local file system, if they are to
stay there, and their write-back begins at once. Else those that are aligned in memory and in the file go from there to
storage (`O_DIRECT`). Errors are the operating system's, with its errno and the full path. If one thread closes a
descriptor during a call of another thread, it stays open until that call ends: the system may reuse a closed number.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import grp
import io
import mmap
import os
import pwd
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress

from epochckpt._lazy import np
from epochckpt.errors import NotACheckpointDirectoryError, StorageError
from epochckpt.storage.mounts import FileSystem, file_system_of
from epochckpt.storage.store import Entry, Reader, Store, Tally, Writer, check_path, check_piece, patiently, writing

WRITE_BACK_BYTES = 1 << 20  # a write of at least this size goes to the disk at once, as direct I/O or write-back
_AHEAD_BYTES = 1 << 17  # Linux reads no more for one such request than the device takes at once
_DIRECT = getattr(os, "O_DIRECT", 0)
ALIGNMENT = max(4096, mmap.PAGESIZE)  # of direct I/O, in memory and in the file
CALL_BYTES = 1 << 30  # Linux moves at most 2 GiB - 4 KiB in one call, macOS refuses more than that
_CALL_PARTS = 1024  # neither takes more buffers in one call
_SPAN_BYTES = 8 << 20
_SPANS = 16  # a file is read with so many calls at least, so that all threads have a part of it
_REMOVE_ROUNDS = 16
_SYNC_FILE_RANGE_WRITE = 2
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_WRITE_FAILED = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
_NO_ROOM = (*_WRITE_FAILED, errno.EFBIG)
_NO_LINKS_HERE = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP)  # SMB, exFAT and some FUSE file systems
_NO_FLAGS_HERE = (errno.EINVAL, *_NO_LINKS_HERE)


class Handle:
    """A file descriptor that threads share. It is closed when its last use has ended."""

    def __init__(self, fd: int, name: str):
        self.name = name
        self._fd = fd
        self._lock = threading.Lock()
        self._uses = 0
        self._closed = False

    @contextmanager
    def use(self) -> Generator[int]:
        """Keeps the descriptor open within the block; ValueError if it is closed."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.name} is closed")
            self._uses += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._uses -= 1
                last = self._closed and not self._uses
            if last:
                os.close(self._fd)

    def close(self) -> None:
        """Closes now, or as soon as the last use has ended."""
        with self._lock:
            unused = not self._closed and not self._uses
            self._closed = True
        if unused:
            os.close(self._fd)


def _function(name: str, *arguments: type) -> Callable[..., int] | None:
    """A function of the C library that returns 0 or -1 and sets errno; None if the library lacks it."""
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function


_sync_file_range = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_fallocate = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_renameat2 = _function("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)


class PosixStore(Store):
    """A directory of a POSIX file system, which is made absolute now and need not exist yet; see `open_store`.

    On a local file system, files of at most `cached_bytes` are written through the page cache; others go past it, where
    that can be. `call_bytes` is the most that one system call reads or writes. Without a `file_system`, the system is
    asked for it.
    """

    atomic_folder_rename = True
    symlinks = True
    sequential_writes = False
    preferred_part_bytes = None
    max_open_files = 64  # a process may have few descriptors
    size_check_from_bytes = 2**20

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        folder_mode: int | None = None,
        cached_bytes: int = 0,
        call_bytes: int = CALL_BYTES,
        file_system: FileSystem | None = None,
    ):
        self.root = os.path.abspath(directory)
        self._given_file_system = file_system
        self._folder_mode = folder_mode
        self._cached_bytes = cached_bytes
        self._call_bytes = call_bytes
        self._prefix = os.path.join(self.root, "")

    @property
    def local_path(self) -> str:
        return self.root

    def span_bytes(self, size: int) -> int:
        """A sixteenth of the file. Of a large one as much as the processor's cache keeps until it is hashed."""
        return min(_SPAN_BYTES, size // _SPANS)

    def gap_bytes(self, size: int) -> int:
        """None: another call costs less than unwanted bytes."""
        del size
        return 0

    def exists(self, path: str) -> bool:
        """One stat(2). A link that leads to itself exists, too."""
        return self._leads_somewhere(path, self._target)

    def existing(self, paths: Iterable[str]) -> set[str]:
        """One access(2) each, from the root, which is opened once; also of what a link leads to outside of it."""
        try:
            root = os.open(self._target(""), os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        try:
            return {path for path in paths if self._is_there(check_path(path), root)}
        finally:
            os.close(root)

    def _is_there(self, path: str, root: int) -> bool:
        if os.access(path, os.F_OK, dir_fd=root):  # of thousands of names nearly all are there; faster than a stat
            return True
        try:
            os.stat(path, dir_fd=root)
            return True
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return self._leads_somewhere(path, check_path, root)

    def _leads_somewhere(self, path: str, place: Callable[[str], str], folder: int | None = None) -> bool:
        try:
            name = self._name(path)
            target = place(path)
            patiently(name, lambda: os.stat(target, dir_fd=folder))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        return True

    def open_reader(self, path: str, size: int | None = None) -> PosixReader:
        """One open(2) of a regular file; anything else is refused."""
        check_path(path, root_allowed=False)
        return patiently(self._name(path), lambda: self._open_reader(path))

    def _open_reader(self, path: str) -> PosixReader:
        name = self._name(path)
        # Non-blocking: a pipe of that name would wait for a writer. The resolved path is opened, so that a last
        # component that becomes a symlink after the check is refused.
        with _named(name):
            fd = os.open(self._target(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", name)
        except BaseException:
            os.close(fd)
            raise
        return PosixReader(fd, name, status.st_size, call_bytes=self._call_bytes)

    def uncache(self, path: str, start: int = 0, nbytes: int | None = None) -> None:
        if nbytes == 0:  # which would mean the rest of the file for the system
            return
        with self.open_reader(path) as reader, reader.handle.use() as fd:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, start, nbytes or 0, os.POSIX_FADV_DONTNEED)

    def read_ahead(self, path: str) -> None:
        with self.open_reader(path) as reader, reader.handle.use() as fd:
            if hasattr(os, "posix_fadvise") and reader.size <= self._cached_bytes:
                for start in range(0, reader.size, _AHEAD_BYTES):
                    os.posix_fadvise(fd, start, min(_AHEAD_BYTES, reader.size - start), os.POSIX_FADV_WILLNEED)

    @property
    def leaves_files_cached(self) -> bool:
        return self._cached_bytes > 0 and self._file_system.is_local_disk

    def create(self, path: str, data: bytes) -> None:
        """One open(2) with `O_EXCL`, one write, one fsync(2)."""
        writer = self.open_writer(path, len(data))
        try:
            writer.write(0, data)
            writer.finish()
        except BaseException:
            writer.abort()
            with suppress(OSError):  # the error that counts is the one being raised
                os.unlink(self._name(path))
            raise

    def open_writer(self, path: str, size: int) -> PosixWriter:
        name = self._place(path)
        if size < 0:
            raise ValueError(f"{name}: size {size}; expected at least 0")
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            if size >= WRITE_BACK_BYTES and self._file_system.reserves_quickly:
                _reserve(fd, size, name)
        except BaseException:
            os.close(fd)
            with suppress(OSError):  # the error that counts is the one being raised
                os.unlink(name)
            raise
        direct = not self.leaves_files_cached or size > self._cached_bytes
        return PosixWriter(fd, name, size, direct=direct, call_bytes=self._call_bytes, tally=self.written)

    @functools.cached_property
    def _file_system(self) -> FileSystem:
        return self._given_file_system or file_system_of(self.root)

    @property
    def advice(self) -> str:
        scheme = self._file_system.bucket_scheme
        if not scheme:
            return ""
        return (
            f"{self.root} is a bucket that a program shows as a folder ({self._file_system.kind}). A commit here "
            "renames a folder, and such a program then copies every object, one by one. Open the bucket by its "
            f"URL ({scheme}…): one conditional write commits an epoch there"
        )

    def list(self, path: str) -> list[Entry]:
        """One scandir, without a stat per entry."""
        target = self._target(path)

        def look() -> list[Entry]:
            with _named(self._name(path)), os.scandir(target) as entries:
                return [Entry(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

        return sorted(patiently(self._name(path), look), key=lambda entry: entry.name)

    def find(self, prefix: str, folder: str | None = None) -> list[str]:
        paths = list[str]()
        places = [] if folder is None else [folder]
        with suppress(FileNotFoundError, NotADirectoryError):
            places = places or [e.name for e in self.list("") if e.is_folder]
        for place in places:
            with suppress(FileNotFoundError, NotADirectoryError):  # deleted just now
                entries = [e.name for e in self.list(place) if e.name.startswith(prefix) and not e.is_folder]
                paths += [f"{place}/{name}" if place else name for name in entries]
        return sorted(paths)

    def make_folder(self, path: str) -> None:
        self._make(self._place(path))

    def _make(self, path: str) -> None:
        os.mkdir(path)
        if self._folder_mode is not None:
            os.chmod(path, self._folder_mode)  # mkdir(2) would subtract the umask

    def check_root(self) -> bool:
        try:
            found = patiently(self.root, lambda: os.lstat(self.root))
        except FileNotFoundError:
            return False
        if not is_folder(self.root):
            kind = "a broken link" if stat.S_ISLNK(found.st_mode) and not os.path.exists(self.root) else "a file"
            raise NotACheckpointDirectoryError(f"{self.root} is {kind}; expected a directory for checkpoints")
        return True

    def is_reachable(self) -> bool:
        return os.path.isdir(self.root)

    def make_root(self) -> None:
        """Creates the missing folders from the top down, and flushes each folder that got a new entry."""
        missing = []
        folder = self.root
        while not is_folder(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(missing):
            with suppress(FileExistsError):  # another process made it, or a file has this name
                if folder == self.root:
                    self._make(folder)
                else:
                    os.mkdir(folder)
            if not is_folder(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
            _sync_folder(os.path.dirname(folder), os.path.dirname(folder))

    def root_id(self) -> tuple[int, ...]:
        try:
            status = patiently("", lambda: os.stat(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return ()
        return (status.st_dev, status.st_ino)

    def may_write(self) -> bool:
        return os.access(self.root, os.W_OK | os.X_OK) or not os.path.isdir(self.root)

    def link(self, path: str, target: str) -> None:
        place = self._place(path)
        try:
            os.symlink(target, place)
        except OSError as error:
            if error.errno in _NO_LINKS_HERE:
                problem = f"{place}: this file system has no symlinks ({error.strerror})"
                raise io.UnsupportedOperation(problem) from error
            raise

    def sync_folder(self, path: str) -> None:
        _sync_folder(self._target(path), self._name(path))

    def rename(self, src: str, dst: str, *, replace: bool = False) -> None:
        """One renameat2(2), or a hard link for files, so that an existing name is refused atomically."""
        source = self._place(src)
        target = self._place(dst)
        try:
            if replace:
                os.rename(source, target)
            else:
                _rename_if_absent(source, target)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # what some systems say instead of EEXIST
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, target) from error
            raise

    def copy_tree(self, src: str, dst: str) -> None:
        self.make_folder(dst)
        with _named(self._name(src)), os.scandir(self._target(src)) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        for entry in listed:
            source = f"{src}/{entry.name}"
            target = f"{dst}/{entry.name}"
            if entry.is_symlink():
                self.link(target, os.readlink(entry.path))
            elif entry.is_dir(follow_symlinks=False):
                self.copy_tree(source, target)
            else:
                with self.open_reader(source) as reader, writing(self, target, reader.size) as writer:
                    start = 0
                    for piece in reader.pieces():
                        writer.write(start, piece)
                        start += len(piece)
        self.sync_folder(dst)

    def exchange(self, one: str, other: str) -> None:
        """One renameat2(2), if the system and the file system have it."""
        if not _rename_with(_RENAME_EXCHANGE, self._place(one), self._place(other)):
            raise io.UnsupportedOperation(f"{self.root}: this file system cannot exchange {one!r} and {other!r}")

    def append_line(self, path: str, line: bytes, *, limit_bytes: int) -> bool:
        """One open(2) with `O_APPEND` and one write."""
        fd = os.open(self._place(path), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        try:
            size = os.fstat(fd).st_size
            if size >= limit_bytes:
                return False
            torn = size and os.pread(fd, 1, size - 1) != b"\n"
            os.write(fd, b"\n" + line if torn else line)
            return True
        finally:
            os.close(fd)

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._place(path))

    def remove_tree(self, path: str) -> None:
        """Goes from open folder to open folder, so that no symlink is followed out of the tree."""
        name = self._place(path)
        with suppress(FileNotFoundError):
            parent = os.open(os.path.dirname(name), os.O_RDONLY | os.O_DIRECTORY)
            try:
                _remove_at(parent, os.path.basename(name), name)
            except RecursionError:
                raise OSError(errno.ENAMETOOLONG, "folders are nested too deeply", name) from None
            finally:
                os.close(parent)

    def _name(self, path: str) -> str:
        """The full path as the user writes it."""
        check_path(path)
        return self._prefix + path if path else self.root

    def _target(self, path: str) -> str:
        """The full path, which must lie in the root; symlinks below the root are resolved."""
        name = self._name(path)
        if not patiently(name, lambda: self._leads_through_link(path)):
            return name
        root, target = patiently(name, lambda: (_resolved(self.root), _resolved(name)))
        if target != root and not target.startswith(os.path.join(root, "")):
            problem = f"a symlink leads out of the root {self.root}, to {target}: refused"
            raise PermissionError(errno.EACCES, problem, name)
        return target

    def _leads_through_link(self, path: str) -> bool:
        """Whether a component below the root is a symlink: one lstat(2) each, a tenth of what `realpath` costs."""
        end = 0 if path else -1
        try:
            while end >= 0:
                end = path.find("/", end + 1)
                if stat.S_ISLNK(os.lstat(self._prefix + (path if end < 0 else path[:end])).st_mode):
                    return True
        except (FileNotFoundError, NotADirectoryError):  # what does not exist is no link
            pass
        return False

    def _place(self, path: str) -> str:
        """The full path of an entry to make or move: its folder must lie in the root; the entry is not followed."""
        check_path(path, root_allowed=False)
        self._target(path.rpartition("/")[0])
        return self._name(path)


class PosixReader(Reader):
    """One file, read by position."""

    def __init__(self, fd: int, name: str, size: int, *, call_bytes: int = CALL_BYTES):
        self.handle = Handle(fd, name)
        self._size = size
        self._call_bytes = call_bytes

    @property
    def size(self) -> int:
        return self._size

    def read_parts(self, offset: int, parts: Sequence[memoryview]) -> None:
        """One call of the system, as far as it takes so many parts and bytes."""
        if offset < 0:
            raise ValueError(f"{self.handle.name}: offset {offset}; expected at least 0")
        rest = [part.cast("B") for part in parts if part.nbytes]
        if not rest:
            return
        length = sum(map(len, rest))
        done = 0
        with self.handle.use() as fd, _named(self.handle.name):
            while done < length:
                now = _first(rest, self._call_bytes)
                count = patiently(self.handle.name, functools.partial(os.preadv, fd, now, offset + done))
                if not count:
                    span = f"bytes [{offset}, {offset + length})"
                    end = os.fstat(fd).st_size
                    raise EOFError(f"{self.handle.name}: {span} requested; the file ends at {end}")
                done += count
                rest = _after(rest, count)

    def close(self) -> None:
        self.handle.close()


def _first(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first so many bytes of some parts, or fewer, if these are more parts than a call takes."""
    found: list[memoryview] = []
    for part in parts[:_CALL_PARTS]:
        found.append(part[:nbytes])
        nbytes -= len(found[-1])
        if not nbytes:
            break
    return found


def _after(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What comes after the first so many bytes of some parts."""
    for number, part in enumerate(parts):
        if nbytes < len(part):
            return [part[nbytes:], *parts[number + 1 :]]
        nbytes -= len(part)
    return []


class PosixWriter(Writer):
    """One new file, written by position."""

    def __init__(
        self,
        fd: int,
        name: str,
        size: int,
        *,
        direct: bool = True,
        call_bytes: int = CALL_BYTES,
        tally: Tally | None = None,
    ):
        self.handle = Handle(fd, name)
        self._direct: Handle | None = None  # the same file once more, past the page cache
        self._refused = False  # the file system cannot, after all
        if direct and _DIRECT and size >= WRITE_BACK_BYTES:
            with suppress(OSError):  # the file system cannot
                self._direct = Handle(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | _DIRECT), name)
        self._size = size
        self._call_bytes = call_bytes
        self._written = 0
        self._tally = tally
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview | bytes) -> None:
        view = memoryview(data)
        check_piece(offset, view.nbytes, self._size, self.handle.name)
        if not view.nbytes:
            return
        view = view.cast("B")
        with self.handle.use() as fd, _named(self.handle.name):
            done = begun = self._write_direct(offset, view)
            while done < len(view):
                done += os.pwrite(fd, view[done : done + self._call_bytes], offset + done)
            if done - begun >= WRITE_BACK_BYTES:
                _start_write_back(fd, offset + begun, done - begun)
        with self._lock:
            self._written += done
        if self._tally is not None:
            self._tally.add(done)

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Writes what can go past the page cache; returns how many bytes from the start of the view that were.

        No page gets bytes both ways, but for the one where a direct write ended early.
        """
        whole = len(view) // ALIGNMENT * ALIGNMENT
        done = 0
        handle = self._direct
        if handle is None or self._refused or whole < WRITE_BACK_BYTES or offset % ALIGNMENT:
            return 0
        if np.frombuffer(view, np.uint8).ctypes.data % ALIGNMENT:
            return 0
        with handle.use() as fd:
            while done < whole:
                try:
                    done += os.pwrite(fd, view[done : min(done + self._call_bytes, whole)], offset + done)
                except OSError as error:
                    if error.errno not in _NO_FLAGS_HERE:
                        raise
                    self._refused = True  # it stays open: other threads are about to use it
                    break
        return done

    def finish(self) -> None:
        name = self.handle.name
        try:
            with self.handle.use() as fd, _named(name):
                if self._written != self._size:  # or a write is still running, which counts at its end
                    raise ValueError(f"{name}: {self._written} of {self._size} bytes written; not finished")
                os.fsync(fd)
        finally:
            self._close()

    def abort(self) -> None:
        with suppress(OSError):
            self._close()

    def _close(self) -> None:
        try:
            if self._direct is not None:
                self._direct.close()
        finally:
            self.handle.close()


@contextmanager
def _named(name: str) -> Generator[None]:
    """Puts the full path into the errors of calls that know only a descriptor or a part of the path."""
    try:
        yield
    except OSError as error:
        error.filename = name
        raise


def owner_of(path: str) -> str:
    """The owner, group and mode of a file or folder, for people."""
    try:
        status = os.lstat(path)
    except OSError:
        return "an unknown user"
    return f"{_user(status.st_uid)}, group {_group(status.st_gid)}, with the mode {stat.filemode(status.st_mode)}"


def this_user() -> str:
    """The user of this process, for people."""
    return _user(os.geteuid())


def _user(uid: int) -> str:
    with suppress(KeyError):  # as in a container
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"the user with uid {uid}"


def _group(gid: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def is_folder(path: str) -> bool:
    """Whether there is a folder, or a link to one; StorageError, unlike `os.path.isdir`, if storage does not answer."""
    try:
        return stat.S_ISDIR(patiently(path, lambda: os.stat(path)).st_mode)
    except StorageError:
        raise
    except OSError:
        return False


def _resolved(path: str) -> str:
    """The path with symlinks resolved, as far as it exists; other errors than a missing name are raised."""
    try:
        return os.path.realpath(path, strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return os.path.realpath(path)


def _reserve(fd: int, size: int, name: str) -> None:
    """Reserves room for a file that gets this size now: the writes that follow are faster, and find the room there."""
    if _fallocate is None or not _fallocate(fd, 0, 0, size):
        return
    code = ctypes.get_errno()
    if code in _NO_ROOM:  # another error means that this file system or sandbox lacks the call
        raise OSError(code, os.strerror(code), name)


def _start_write_back(fd: int, offset: int, length: int) -> None:
    """Has the kernel start writing a range to the disk, without waiting; this is no flush."""
    if _sync_file_range is None or not _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE):
        return
    code = ctypes.get_errno()
    if code in _WRITE_FAILED:  # another error means that this file system or sandbox lacks the call
        raise OSError(code, os.strerror(code))


def _sync_folder(folder: str, name: str) -> None:
    with _named(name):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _rename_with(flag: int, source: str, target: str) -> bool:
    """Renames by renameat2(2); False if the system or the file system (NFS, some FUSE) lacks it."""
    while _renameat2 is not None:
        if not _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag):
            return True
        code = ctypes.get_errno()
        if code in _NO_FLAGS_HERE:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), source, None, target)
    return False


def _rename_if_absent(source: str, target: str) -> None:
    """Renames onto a free name. rename(2) replaces files and empty folders, so it is the last resort."""
    if _rename_with(_RENAME_NOREPLACE, source, target):
        return
    if not stat.S_ISDIR(os.lstat(source).st_mode):
        try:
            os.link(source, target, follow_symlinks=False)  # refuses an existing name atomically
            os.unlink(source)
            return
        except OSError as error:
            if error.errno not in _NO_LINKS_HERE:
                raise
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, target)
    os.rename(source, target)  # refuses a folder with content that appears just now; see Store.rename


def _remove_at(parent: int, name: str, full: str) -> None:
    """Removes `name` in an open folder, with everything below; FileNotFoundError if it is gone."""
    for _ in range(_REMOVE_ROUNDS):
        with _named(full):
            try:
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                os.unlink(name, dir_fd=parent)  # a file, or a symlink wherever it points
                return
        try:
            _empty(fd, full)
        finally:
            os.close(fd)
        with _named(full):
            try:
                os.rmdir(name, dir_fd=parent)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    raise OSError(errno.ENOTEMPTY, f"files kept appearing in it {_REMOVE_ROUNDS} times over", full)


def _empty(fd: int, full: str) -> None:
    with _named(full), os.scandir(fd) as entries:
        children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in children:
        path = os.path.join(full, name)
        with suppress(FileNotFoundError):  # another thread or process removes it, too
            if is_folder:
                _remove_at(fd, name, path)
            else:
                with _named(path):
                    os.unlink(name, dir_fd=fd)
