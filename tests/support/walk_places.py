"""Where an older and a newer run meet: a store that the older run reaches by a way of its own, which can hold it up.

`Pause` stops the older run at one of its requests. `MemoryPlace` and `ServerPlace` send its requests past that.
"""

import contextvars
import functools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import obstore
import pytest

from epochckpt import _patience, _threads
from epochckpt.orbax import step_files
from epochckpt.storage import Store, opening_through
from epochckpt.storage.object_client import Client
from epochckpt.testing import Faults, FaultyStore, StoreCall
from tests.support.object_servers import Bucket, Fault, Proxy, Request

FORMS = ("before", "after", "lost", "killed", "late", "again")
"""How the older run meets its pause.

before: the request waits, and is sent when the newer run is done.
after: the store has done what was asked; the answer waits.
lost: the same, and then the connection breaks instead: the client asks again.
killed: the run ends; the request never arrives.
late: the run ends; the request arrives when the newer run is done.
again: the request is given up and repeated, nothing is paused; the first one arrives when the newer run is done.

The last four are about requests that write, and count only those.
"""

KILLED = ("killed", "late")
WAIT_SECS = 60.0

T = TypeVar("T")
_running: contextvars.ContextVar[str] = contextvars.ContextVar("run", default="")


def of_run(name: str) -> None:
    """This thread, and those that it starts, are this run's from now on."""
    _running.set(name)


class Pause:
    """The older run's way to the store: holds its request of one number, and all that come after it."""

    def __init__(self, form: str, number: int):
        self.form, self.number = form, number
        self.reached, self.go = threading.Event(), threading.Event()
        self.request: Request | None = None  # the one that was chosen
        self._count, self._lock = 0, threading.Lock()

    def decide(self, request: Request) -> Fault | None:
        with self._lock:
            if self.request is None:
                self._count += request.writes or self.form in ("before", "after")
                if self._count < self.number or not (request.writes or self.form in ("before", "after")):
                    return None
                self.request = request
                return self._fault()
        if self.form in KILLED:
            return Fault(status=400)
        return None if self.form == "again" else Fault(held=self.go)

    def _fault(self) -> Fault:
        if self.form in ("before", *KILLED):
            self.reached.set()
        return {
            "before": Fault(held=self.go),
            "after": Fault(withheld=self._stand),
            "lost": Fault(withheld=self._stand, lost=True),
            "killed": Fault(status=400),
            "late": Fault(late=self.go.wait),
            "again": Fault(late=self.go.wait),
        }[self.form]

    def _stand(self) -> None:
        self.reached.set()
        self.go.wait(WAIT_SECS)


class Place:
    """A store, and a way of its own by which the older run reaches it: `decide` chooses the fault of each request."""

    def __init__(self, scheme: str):
        self.scheme, self._tasks = scheme, dict[str, list[_threads.Future[Any]]]()

    def decide_by(self, decide: Callable[[Request], Fault | None]) -> None:
        raise NotImplementedError

    def new_url(self) -> str:
        raise NotImplementedError

    def go_by(self, name: str) -> None:
        """What is opened from now on is the older run's, or another's."""
        of_run(name)

    def requests_end(self) -> bool:
        """Waits until no request of the older run is under way."""
        raise NotImplementedError

    def settle(self, name: str) -> None:
        """Waits until all that a run does in the background is over."""
        deadline, tasks = time.monotonic() + 2 * WAIT_SECS, self._tasks.get(name, [])
        while tasks:
            assert tasks.pop().wait(deadline - time.monotonic()), f"the {name} run does not come to an end"

    def keys(self, url: str) -> dict[str, bytes]:
        """All objects below a directory, by path."""
        client, found = Client(url), dict[str, bytes]()
        start = client.below("")
        for page in obstore.list(client.kv, start):
            for meta in page:
                found[meta["path"][len(start) :]] = bytes(obstore.get(client.kv, meta["path"]).bytes())
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Until the block ends, what a run opens and does in the background is its own."""
        start = _threads.start

        def started(fn: Callable[[], Any], **how: bool) -> _threads.Future[Any]:
            future = start(fn, **how)
            self._tasks.setdefault(_running.get(), []).append(future)
            return future

        with (
            pytest.MonkeyPatch.context() as patch,
            _patience.use(request_pauses_secs=(0.0,) * 8),
            opening_through(_owned),
        ):
            patch.setattr(_threads, "start", started)
            self._prepare(patch)
            yield

    def _prepare(self, patch: pytest.MonkeyPatch) -> None:
        """Changes what the block needs changed."""


class _OfRun(Faults):
    """Has the calls of a run's stores be its own, whoever makes them."""

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def make(self, call: StoreCall, made: Callable[[], T]) -> T:
        token = _running.set(self._name)
        try:
            return made()
        finally:
            _running.reset(token)


def _owned(store: Store) -> Store:
    """The store of the run that opens it."""
    return FaultyStore(store, _OfRun(_running.get()))


_METHODS = {
    "get": "GET",
    "head": "HEAD",
    "list": "LIST",
    "list_with_delimiter": "LIST",
    "put": "PUT",
    "copy": "PUT",
    "delete": "DELETE",
}


class MemoryPlace(Place):
    """`memory://`: faults happen around each request of the older run. `stock`: stock Orbax may save there."""

    def __init__(self, *, stock: bool = False) -> None:
        super().__init__("memory")
        self._stock = stock
        self._decide: Callable[[Request], Fault | None] = lambda request: None
        self._late: list[threading.Thread] = []

    def decide_by(self, decide: Callable[[Request], Fault | None]) -> None:
        self._decide = decide

    def new_url(self) -> str:
        return f"memory://{uuid.uuid4().hex}"

    def requests_end(self) -> bool:
        for thread in self._late:
            thread.join(WAIT_SECS)
        return not any(thread.is_alive() for thread in self._late)

    def _prepare(self, patch: pytest.MonkeyPatch) -> None:
        if self._stock:
            patch.setattr(step_files, "saves_to", lambda store: True)
        for name in _METHODS:
            patch.setattr(obstore, name, functools.partial(self._ask, getattr(obstore, name)))

    def _ask(self, call: Callable[..., Any], kv: Any, key: Any = "", *args: Any, **kwargs: Any) -> Any:
        made = functools.partial(call, kv, key, *args, **kwargs)
        if _running.get() != "older":
            return made()
        target = key if isinstance(key, str) else key[0]
        return self._send(Request(_METHODS[call.__name__], target), made)

    def _send(self, request: Request, call: Callable[[], Any]) -> Any:
        fault = self._decide(request) or Fault()
        broken = obstore.exceptions.GenericError("the connection broke")
        if fault.held is not None:
            fault.held.wait(WAIT_SECS)
        if fault.status:
            raise obstore.exceptions.GenericError(f"Server returned status code: {fault.status}")
        if (late := fault.late) is not None:

            def arrive() -> None:
                late()
                with suppress(obstore.exceptions.BaseError, FileNotFoundError):
                    call()

            self._late.append(threading.Thread(target=arrive, daemon=True))
            self._late[-1].start()
            raise broken
        answer: Any = None
        error: BaseException | None = None
        try:
            answer = call()
        except (obstore.exceptions.BaseError, FileNotFoundError) as refused:
            error = refused
        if fault.withheld is not None:
            fault.withheld()
        if fault.lost:
            raise broken
        if error is not None:
            raise error
        return answer


class ServerPlace(Place):
    """A bucket on a server, which the older run reaches by a proxy of its own."""

    def __init__(self, bucket: Bucket):
        super().__init__(bucket.scheme)
        self._bucket, self._proxy = bucket, Proxy(bucket.proxy.upstream)
        (self._endpoint,) = (name for name, value in bucket.environment.items() if value == bucket.proxy.url)

    def decide_by(self, decide: Callable[[Request], Fault | None]) -> None:
        self._proxy.decide = decide

    def new_url(self) -> str:
        return self._bucket.new_url()

    def go_by(self, name: str) -> None:
        super().go_by(name)
        os.environ[self._endpoint] = self._proxy.url if name == "older" else self._bucket.proxy.url

    def requests_end(self) -> bool:
        return self._proxy.settle(WAIT_SECS)

    def close(self) -> None:
        self.go_by("")
        self._proxy.close()
