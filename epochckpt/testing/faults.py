"""Stores that fail, wait or are slow when a test says so, to show what a program does then.

    faults = Faults()
    with faults.everywhere(), epochckpt.CheckpointManager(directory) as manager:
        with faults.fail(Store.open_writer, OSError(errno.ENOSPC, "no space left on device")):
            manager.save(1, args=...)
            ...  # what the program must do now

`Faults` has the rules, and `FaultyStore` follows them before, after or in place of each call of a store. `everywhere`
has every store that epochckpt opens in this process follow them. A rule names the method that it is about, such as
`Store.rename`, `Reader.read_into` or `Writer.finish`, and may say which of its calls. Calls that a store makes of its
own methods follow no rule, except for those of `Store.put`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from epochckpt.storage import Entry, File, Reader, Store, Tally, Writer, opening_through

T = TypeVar("T")
R = TypeVar("R", bound="Rule")

_HELD_SECS = 120.0  # how long a held call waits to be let go


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreCall:
    """One call of a store, or of a reader or writer of it.

    Attributes:
        store: the store.
        method: the method, with its class: `Store.rename`.
        paths: the paths that it is about, relative to the root of the store.
        content: the bytes that it writes. None if it writes none.
        nbytes: how many bytes it reads or writes, as far as is known before the call.
    """

    store: Store
    method: str
    paths: tuple[str, ...] = ()
    content: bytes | memoryview | None = None
    nbytes: int = 0

    @property
    def path(self) -> str:
        """The first path. Empty if it is about none, and for the root."""
        return self.paths[0] if self.paths else ""

    @property
    def target(self) -> str:
        """The second path, of `rename`, `copy`, `copy_tree`, `exchange` and `link`."""
        return self.paths[1]


def _every_call(call: StoreCall) -> bool:
    """Whether a rule is about a call, where nobody has said which ones."""
    del call
    return True


class Rule(ABC):
    """What happens at some calls of a method. A context manager: at the end of the block, the rule is removed.

    Args:
        faults: the rules that it is one of.
        method: what the calls are of. None: every method.
        where: tells which of these calls.

    Attributes:
        hits: how many calls it has met.
    """

    def __init__(self, faults: Faults, method: Callable[..., Any] | None, where: Callable[[StoreCall], bool]):
        self.hits = 0
        self._faults = faults
        self._method = None if method is None else method.__qualname__
        self._where = where
        self._lock = threading.Lock()

    def is_about(self, call: StoreCall) -> bool:
        """Whether the rule says what happens at a call."""
        return self._method in (None, call.method) and self._where(call)

    @abstractmethod
    def make(self, call: StoreCall, go_on: Callable[[], T]) -> T:
        """What the call returns. `go_on` makes it, by the other rules."""

    def remove(self) -> None:
        """From now on, calls do not follow the rule. It may be removed again."""
        self._faults.remove(self)

    def _hit(self) -> None:
        with self._lock:
            self.hits += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class Failure(Rule):
    """Calls that raise an error and change nothing; `times`: so many of them, None: all."""

    def __init__(
        self,
        faults: Faults,
        method: Callable[..., Any],
        where: Callable[[StoreCall], bool],
        error: BaseException,
        times: int | None,
    ):
        super().__init__(faults, method, where)
        self._error = error
        self._times = times

    def make(self, call: StoreCall, go_on: Callable[[], T]) -> T:
        with self._lock:
            fails = self._times is None or self.hits < self._times
            self.hits += fails
        if fails:
            raise copy.copy(self._error)
        return go_on()


class Hold(Rule):
    """Calls that wait until they are let go.

    Attributes:
        reached: set when the first call waits.
    """

    def __init__(self, faults: Faults, method: Callable[..., Any], where: Callable[[StoreCall], bool]):
        super().__init__(faults, method, where)
        self.reached = threading.Event()
        self._go = threading.Event()

    def make(self, call: StoreCall, go_on: Callable[[], T]) -> T:
        self._hit()
        self.reached.set()
        if not self._go.wait(_HELD_SECS):
            raise TimeoutError(f"{call.method} of {call.path!r} was held, and nobody let it go in {_HELD_SECS:.0f} s")
        return go_on()

    def let_go(self) -> None:
        """The calls that wait go on, and later ones do not wait."""
        self._go.set()

    def remove(self) -> None:
        """Removes the rule; the calls that wait go on."""
        super().remove()
        self._go.set()


class Action(Rule):
    """Calls beside which something else happens: `action`, which gets the call."""

    def __init__(
        self,
        faults: Faults,
        method: Callable[..., Any],
        where: Callable[[StoreCall], bool],
        action: Callable[[StoreCall], object],
    ):
        super().__init__(faults, method, where)
        self._action = action


class Before(Action):
    """Calls before which something else happens. If that raises an error, the call raises it and is not made."""

    def make(self, call: StoreCall, go_on: Callable[[], T]) -> T:
        self._hit()
        self._action(call)
        return go_on()


class After(Action):
    """Calls after which something else happens. If that raises an error, the call raises it, and has been made."""

    def make(self, call: StoreCall, go_on: Callable[[], T]) -> T:
        self._hit()
        result = go_on()
        self._action(call)
        return result


class Instead(Action):
    """Calls in place of which something else happens; they return what that returns."""

    def make(self, call: StoreCall, go_on: Callable[[], T]) -> T:
        self._hit()
        return self._action(call)  # type: ignore[return-value]


class Slowness(Rule):
    """Calls that take longer: `latency_secs` each, and the time that their bytes take at `bytes_per_sec`."""

    def __init__(self, faults: Faults, latency_secs: float, bytes_per_sec: float):
        super().__init__(faults, None, _every_call)
        self._latency_secs = latency_secs
        self._bytes_per_sec = bytes_per_sec

    def make(self, call: StoreCall, go_on: Callable[[], T]) -> T:
        self._hit()
        threading.Event().wait(self._latency_secs + call.nbytes / self._bytes_per_sec)
        return go_on()


class Faults:
    """The rules that a `FaultyStore` follows. Any thread may add and remove rules at any time.

    `method` is a method of `Store`, `Reader` or `Writer`, such as `Store.rename`. `where` tells the calls that a rule
    is about; without it, these are all calls of the method. The rule that was added last sees a call first.
    """

    def __init__(self) -> None:
        self._rules: tuple[Rule, ...] = ()
        self._lock = threading.Lock()

    def fail(
        self,
        method: Callable[..., Any],
        error: BaseException,
        *,
        where: Callable[[StoreCall], bool] = _every_call,
        times: int | None = None,
    ) -> Failure:
        """Calls raise a copy of `error`, and change nothing: `times` of them, or all."""
        return self._added(Failure(self, method, where, error, times))

    def hold(self, method: Callable[..., Any], *, where: Callable[[StoreCall], bool] = _every_call) -> Hold:
        """Calls wait until `Hold.let_go`, or until the rule is removed. TimeoutError after two minutes."""
        return self._added(Hold(self, method, where))

    def before(
        self,
        method: Callable[..., Any],
        action: Callable[[StoreCall], object],
        *,
        where: Callable[[StoreCall], bool] = _every_call,
    ) -> Before:
        """`action` is called before each call. An error of `action` is the error of the call, which is not made."""
        return self._added(Before(self, method, where, action))

    def after(
        self,
        method: Callable[..., Any],
        action: Callable[[StoreCall], object],
        *,
        where: Callable[[StoreCall], bool] = _every_call,
    ) -> After:
        """`action` is called after each call that has succeeded. An error of `action` is the error of the call."""
        return self._added(After(self, method, where, action))

    def instead(
        self,
        method: Callable[..., Any],
        action: Callable[[StoreCall], object],
        *,
        where: Callable[[StoreCall], bool] = _every_call,
    ) -> Instead:
        """`action` is called in place of each call, which returns what `action` returns."""
        return self._added(Instead(self, method, where, action))

    def slow(self, *, latency_secs: float = 0.0, bytes_per_sec: float = float("inf")) -> Slowness:
        """Every call takes longer: by a fixed time, and by the time that its bytes take at this rate."""
        return self._added(Slowness(self, latency_secs, bytes_per_sec))

    def remove(self, rule: Rule) -> None:
        """From now on, calls do not follow the rule; it need not be there."""
        with self._lock:
            self._rules = tuple(each for each in self._rules if each is not rule)

    def clear(self) -> None:
        """Removes every rule, and lets go what is held."""
        for rule in self._rules:
            rule.remove()

    @contextmanager
    def everywhere(self) -> Generator[Self]:
        """During the block, every store that epochckpt opens in this process follows these rules.

        At the end of the block the rules are removed. Stores that were open before it follow none.
        """
        try:
            with opening_through(functools.partial(FaultyStore, faults=self)):
                yield self
        finally:
            self.clear()

    def make(self, call: StoreCall, made: Callable[[], T]) -> T:
        """What a call returns by these rules; `made` makes it."""
        for rule in self._rules:
            if rule.is_about(call):
                made = functools.partial(rule.make, call, made)
        return made()

    def _added(self, rule: R) -> R:
        with self._lock:
            self._rules = (*self._rules, rule)
        return rule


class FaultyStore(Store):
    """A store whose calls follow rules; without a rule, it does what the store does that it stands for.

    Args:
        store: what does the work. If it is such a store itself, calls follow its rules as well, after these.
        faults: the rules. None: new ones, which `faults` gives.

    Attributes:
        inner: the store that does the work, without rules.
        faults: the rules.
    """

    def __init__(self, store: Store, faults: Faults | None = None):
        self.faults = faults or Faults()
        if isinstance(store, FaultyStore):
            self.inner: Store = store.inner
            self._followed: tuple[Faults, ...] = (*store._followed, self.faults)
        else:
            self.inner = store
            self._followed = (self.faults,)
        self.root = store.root
        self.atomic_folder_rename = store.atomic_folder_rename
        self.symlinks = store.symlinks
        self.sequential_writes = store.sequential_writes
        self.preferred_part_bytes = store.preferred_part_bytes
        self.max_open_files = store.max_open_files
        self.size_check_from_bytes = store.size_check_from_bytes
        self.concurrency = store.concurrency
        self.endpoint = store.endpoint
        self.settings = store.settings

    def span_bytes(self, size: int) -> int:
        return self.inner.span_bytes(size)

    def gap_bytes(self, size: int) -> int:
        return self.inner.gap_bytes(size)

    @property
    def written(self) -> Tally:  # type: ignore[override]
        return self.inner.written

    @property
    def local_path(self) -> str | None:
        return self.inner.local_path

    @property
    def address(self) -> str:
        return self.inner.address

    @property
    def advice(self) -> str:
        return self.inner.advice

    def has_beside(self, names: Iterable[str]) -> bool:
        names = tuple(names)
        return self.make(Store.has_beside, lambda: self.inner.has_beside(names), names)

    def exists(self, path: str) -> bool:
        return self.make(Store.exists, lambda: self.inner.exists(path), (path,))

    def existing(self, paths: Iterable[str]) -> set[str]:
        names = tuple(paths)
        return self.make(Store.existing, lambda: self.inner.existing(names), names)

    def size(self, path: str) -> int:
        return self.make(Store.size, lambda: self.inner.size(path), (path,))

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        return self.make(Store.read, lambda: self.inner.read(path, limit_bytes=limit_bytes), (path,))

    def open_reader(self, path: str, size: int | None = None) -> Reader:
        reader = self.make(Store.open_reader, lambda: self.inner.open_reader(path, size), (path,))
        return _FaultyReader(self, path, reader)

    def uncache(self, path: str, start: int = 0, nbytes: int | None = None) -> None:
        return self.make(Store.uncache, lambda: self.inner.uncache(path, start, nbytes), (path,))

    def read_ahead(self, path: str) -> None:
        return self.make(Store.read_ahead, lambda: self.inner.read_ahead(path), (path,))

    @property
    def leaves_files_cached(self) -> bool:
        return self.inner.leaves_files_cached

    def create(self, path: str, data: bytes) -> None:
        return self.make(Store.create, lambda: self.inner.create(path, data), (path,), content=data)

    def open_writer(self, path: str, size: int) -> Writer:
        writer = self.make(Store.open_writer, lambda: self.inner.open_writer(path, size), (path,))
        return _FaultyWriter(self, path, writer)

    def list(self, path: str) -> list[Entry]:
        return self.make(Store.list, lambda: self.inner.list(path), (path,))

    def each(self, call: Callable[[T], object], values: Iterable[T]) -> None:
        return self.inner.each(call, values)

    def find(self, prefix: str, folder: str | None = None) -> list[str]:
        return self.make(Store.find, lambda: self.inner.find(prefix, folder), (folder or "",))

    def files(self, path: str, limit: int | None = None) -> list[File]:
        return self.make(Store.files, lambda: self.inner.files(path, limit), (path,))

    def remove_all(self, paths: Iterable[str]) -> None:
        names = tuple(paths)
        return self.make(Store.remove_all, lambda: self.inner.remove_all(names), names)

    def check_conditions(self, path: str) -> None:
        return self.make(Store.check_conditions, lambda: self.inner.check_conditions(path), (path,))

    def confirming_damage(self, read: Callable[[], T]) -> T:
        return self.inner.confirming_damage(read)

    def make_folder(self, path: str) -> None:
        return self.make(Store.make_folder, lambda: self.inner.make_folder(path), (path,))

    def check_root(self) -> bool:
        return self.make(Store.check_root, self.inner.check_root)

    def is_reachable(self) -> bool:
        return self.make(Store.is_reachable, self.inner.is_reachable)

    def make_root(self) -> None:
        return self.make(Store.make_root, self.inner.make_root)

    def root_id(self) -> tuple[int, ...]:
        return self.make(Store.root_id, self.inner.root_id)

    def may_write(self) -> bool:
        return self.make(Store.may_write, self.inner.may_write)

    def link(self, path: str, target: str) -> None:
        return self.make(Store.link, lambda: self.inner.link(path, target), (path, target))

    def sync_folder(self, path: str) -> None:
        return self.make(Store.sync_folder, lambda: self.inner.sync_folder(path), (path,))

    def rename(self, src: str, dst: str, *, replace: bool = False) -> None:
        return self.make(Store.rename, lambda: self.inner.rename(src, dst, replace=replace), (src, dst))

    def copy(self, src: str, dst: str, *, replace: bool = True) -> None:
        return self.make(Store.copy, lambda: self.inner.copy(src, dst, replace=replace), (src, dst))

    def copy_tree(self, src: str, dst: str) -> None:
        return self.make(Store.copy_tree, lambda: self.inner.copy_tree(src, dst), (src, dst))

    def exchange(self, one: str, other: str) -> None:
        return self.make(Store.exchange, lambda: self.inner.exchange(one, other), (one, other))

    def put(self, path: str, data: bytes, *, draft: str, replace: bool = False) -> None:
        if type(self.inner).put is Store.put:  # it consists of other calls, which follow rules, too
            made = functools.partial(super().put, path, data, draft=draft, replace=replace)
        else:
            made = functools.partial(self.inner.put, path, data, draft=draft, replace=replace)
        return self.make(Store.put, made, (path,), content=data)

    def append_line(self, path: str, line: bytes, *, limit_bytes: int) -> bool:
        made = functools.partial(self.inner.append_line, path, line, limit_bytes=limit_bytes)
        return self.make(Store.append_line, made, (path,), content=line)

    def replace(self, path: str, old: bytes, new: bytes, *, patient: bool = True) -> None:
        made = functools.partial(self.inner.replace, path, old, new, patient=patient)
        return self.make(Store.replace, made, (path,), content=new)

    def remove(self, path: str) -> None:
        return self.make(Store.remove, lambda: self.inner.remove(path), (path,))

    def remove_tree(self, path: str) -> None:
        return self.make(Store.remove_tree, lambda: self.inner.remove_tree(path), (path,))

    def make(
        self,
        method: Callable[..., Any],
        made: Callable[[], T],
        paths: tuple[str, ...] = (),
        content: bytes | memoryview | None = None,
        nbytes: int | None = None,
    ) -> T:
        """What a call of this store, or of a reader or writer of it, returns by the rules; `made` makes it.

        The other arguments are as in `StoreCall`; without `nbytes` it is the length of the content.
        """
        if nbytes is None:
            nbytes = 0 if content is None else memoryview(content).nbytes
        call = StoreCall(
            store=self,
            method=method.__qualname__,
            paths=paths,
            content=content,
            nbytes=nbytes,
        )
        for faults in self._followed:
            made = functools.partial(faults.make, call, made)
        return made()


class SlowStore(FaultyStore):
    """A store each call of which takes longer: `latency_secs`, and the time of its bytes at `bytes_per_sec`."""

    def __init__(self, store: Store, *, latency_secs: float = 0.0, bytes_per_sec: float = float("inf")):
        super().__init__(store)
        self.faults.slow(latency_secs=latency_secs, bytes_per_sec=bytes_per_sec)


class _FaultyReader(Reader):
    """A reader whose calls follow the rules of its store."""

    def __init__(self, store: FaultyStore, path: str, reader: Reader):
        self._store = store
        self._path = path
        self._reader = reader

    @property
    def size(self) -> int:
        return self._reader.size

    def read_parts(self, offset: int, parts: Sequence[memoryview]) -> None:
        made = functools.partial(self._reader.read_parts, offset, parts)
        nbytes = sum(part.nbytes for part in parts)
        self._store.make(Reader.read_into, made, (self._path,), nbytes=nbytes)

    def close(self) -> None:
        self._reader.close()


class _FaultyWriter(Writer):
    """A writer whose calls follow the rules of its store."""

    def __init__(self, store: FaultyStore, path: str, writer: Writer):
        self._store = store
        self._path = path
        self._writer = writer

    def write(self, offset: int, data: memoryview | bytes) -> None:
        made = functools.partial(self._writer.write, offset, data)
        self._store.make(Writer.write, made, (self._path,), content=data)

    def finish(self) -> None:
        self._store.make(Writer.finish, self._writer.finish, (self._path,))

    def abort(self) -> None:
        self._store.make(Writer.abort, self._writer.abort, (self._path,))
