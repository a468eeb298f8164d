"""Where an older and a newer run meet: a store that the older run reaches by a way of its own, which can hold it up.

`Pause` stops the older run at one of its requests. `MemoryPlace` and `ServerPlace` send its requests past that.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import obstore
import pytest

from epochckpt import _threads
from epochckpt.orbax import step_files
from epochckpt.storage import object_client
from epochckpt.storage.object_client import Client
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

_running = threading.local()  # `name` of the run, on its threads


def of_run(name: str) -> None:
    """This thread, and those that it starts, are this run's from now on."""
    _running.name = name


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
        """Until the block ends, threads know whose they are."""
        start = _threads.start

        def started(fn: Callable[[], Any]) -> _threads.Future[Any]:
            name = getattr(_running, "name", "")

            def call() -> Any:
                before, _running.name = getattr(_running, "name", ""), name
                try:
                    return fn()
                finally:
                    _running.name = before

            future = start(call)
            self._tasks.setdefault(name, []).append(future)
            return future

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_threads, "start", started)
            patch.setattr(object_client, "_PAUSES_SECS", (0.0,) * 8)
            self._prepare(patch)
            yield

    def _prepare(self, patch: pytest.MonkeyPatch) -> None:
        """Changes what the block needs changed."""


_METHODS = {"reading": "GET", "looking for": "HEAD", "listing": "LIST", "writing": "PUT", "deleting": "DELETE"}
_METHODS["copying"] = "PUT"


class MemoryPlace(Place):
    """`memory://`: faults happen in the client, around each call of the store. `stock`: stock Orbax may save there."""

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
        init, ask = Client.__init__, Client.ask
        older: set[int] = set()

        def made(client: Client, *args: Any, **kwargs: Any) -> None:
            init(client, *args, **kwargs)
            older.discard(id(client))
            if getattr(_running, "name", "") == "older":
                older.add(id(client))

        def asked(client: Client, path: str, doing: str, call: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
            if id(client) not in older:
                return ask(client, path, doing, call, *args, **kwargs)
            request = Request(_METHODS[doing], path)
            return ask(client, path, doing, lambda: self._send(request, call), *args, **kwargs)

        patch.setattr(Client, "__init__", made)
        patch.setattr(Client, "ask", asked)

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
