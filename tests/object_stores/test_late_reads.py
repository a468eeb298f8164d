"""Reads that are late are asked for a second time, a few of all; the answer that nobody waits for harms nothing."""

import threading
from collections.abc import Callable, Iterator

import pytest

from epochckpt.storage import Store, hedging
from epochckpt.storage.landing import Landing
from epochckpt.storage.object_store import ObjectStore
from epochckpt.storage.pace import Pace
from epochckpt.testing import in_parallel, write_file
from tests.support.object_servers import Bucket, Fault, Request

DATA = bytes(range(256)) * 8000
LATE_SECS = 0.05
ENOUGH = 8  # answers, before a read can be late
READS: dict[str, Callable[[Store], bytes]] = {
    "a range": lambda store: read_range(store),
    "a record": lambda store: store.read("file", limit_bytes=len(DATA)),
}


def read_range(store: Store) -> bytes:
    out = bytearray(len(DATA))
    with store.open_reader("file", len(DATA)) as reader:
        reader.read_into(0, memoryview(out))
    return bytes(out)


def acquainted(url: str, *reads: Callable[[Store], bytes], pace: Pace | None = None) -> Store:
    """A store with a file, which knows how long each of these reads takes."""
    store = ObjectStore(url, pace=pace)
    write_file(store, "file", DATA)
    for read in reads:
        for _ in range(ENOUGH):
            assert read(store) == DATA
    return store


@pytest.fixture
def held(patience: Callable[..., None]) -> Iterator[threading.Event]:
    """Ends what a test holds; no request fails before."""
    patience(request_silent_secs=600.0, late_read_secs=LATE_SECS)
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("name", READS)
def test_a_read_that_is_held_returns_by_its_second_request(name: str, cloud: Bucket, held: threading.Event) -> None:
    """The first one is answered when nobody waits for it."""
    store = acquainted(cloud.new_url(), READS[name])
    late = [Fault(held=held)]
    cloud.proxy.decide = lambda request: late.pop() if late else None
    with cloud.proxy.counted() as counts:
        assert READS[name](store) == DATA
    assert counts == {"GET": 2}
    held.set()
    assert cloud.proxy.settle(30)
    assert READS[name](store) == DATA


def test_what_was_closed_takes_no_bytes() -> None:
    """Neither of the request that was late, nor of the one that was asked after it, whichever came first."""
    buffer = bytearray(b"first")
    landing = Landing([memoryview(buffer)])
    landing.close()
    landing.replace(b"later")
    assert not landing.put(0, b"x")
    assert buffer == b"first"


def test_a_late_answer_changes_no_buffer(cloud: Bucket, held: threading.Event) -> None:
    """The first answer, which comes last, has other bytes: they go nowhere."""
    store = acquainted(cloud.new_url(), read_range)
    late = [Fault(held=held, flipped=0)]
    cloud.proxy.decide = lambda request: late.pop() if late else None
    out = bytearray(len(DATA))
    with store.open_reader("file", len(DATA)) as reader:
        reader.read_into(0, memoryview(out))
    held.set()
    assert cloud.proxy.settle(30)
    assert out == DATA


def test_an_answer_that_stops_halfway_is_late_too(cloud: Bucket, held: threading.Event) -> None:
    """Its first half is in the buffer when the second request is sent."""
    store, seen = acquainted(cloud.new_url(), read_range), list[Request]()

    def decide(request: Request) -> Fault | None:
        seen.append(request)
        return Fault(halved=held) if len(seen) == 1 else None

    cloud.proxy.decide = decide
    assert read_range(store) == DATA
    assert len(seen) == 2
    held.set()
    assert cloud.proxy.settle(30)


@pytest.mark.parametrize("server", ["gs"], indirect=True)  # the bound knows no servers
def test_a_store_that_is_slow_for_all_is_not_asked_twice_for_all(cloud: Bucket, held: threading.Event) -> None:
    """All reads are late, again and again; three may be repeated, and a twentieth of all."""
    readers = 16
    refused, allowed, lock = set[int](), list[bool](), threading.Lock()

    class Watched(Pace):
        def may_repeat(self, looks: int) -> bool:
            may = super().may_repeat(looks)
            with lock:
                allowed.append(may)
                if looks > 1 and not may:
                    refused.add(threading.get_ident())
                if len(refused) + sum(allowed) >= readers:
                    held.set()
            return may

    store = acquainted(cloud.new_url(), read_range, pace=Watched())
    cloud.proxy.decide = lambda request: Fault(held=held)
    with cloud.proxy.counted() as counts:
        assert in_parallel([lambda: read_range(store) for _ in range(readers)]) == [DATA] * readers
        assert cloud.proxy.settle(30)
    assert held.is_set()
    assert sum(allowed) == 4
    assert counts == {"GET": readers + 4}


def test_reads_are_asked_for_once_where_that_is_set(cloud: Bucket, patience: Callable[..., None]) -> None:
    """A read that is held ends by its own time limit."""
    asked = list[int]()

    class Watched(Pace):
        def may_repeat(self, looks: int) -> bool:
            asked.append(looks)
            return super().may_repeat(looks)

    patience(request_silent_secs=0.5, request_pauses_secs=(0.0,), late_read_secs=LATE_SECS)
    held = threading.Event()
    store = acquainted(f"{cloud.new_url()}?hedged_reads=false", *READS.values(), pace=Watched())
    try:
        for read in READS.values():
            late = [Fault(held=held)]
            cloud.proxy.decide = lambda request, late=late: late.pop() if late else None
            assert read(store) == DATA
    finally:
        held.set()
    assert not asked


class Call:
    """A read that ends when a test says so."""

    def __init__(self, result: str | Exception):
        self.result, self.begun, self.go_on = result, threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(60)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def raced(first: Call, second: Call, order: list[Call], *, may: bool = True) -> str:
    """The answer to a late read; its two requests end in this order."""

    def release() -> None:
        if may:
            assert second.begun.wait(60)
        for call in order:
            call.go_on.set()

    releasing = threading.Thread(target=release)
    releasing.start()
    try:
        return hedging.first_answer(first, second, 0.0, lambda looks: may)
    finally:
        releasing.join()


@pytest.mark.parametrize("turned", [False, True])
def test_an_error_is_raised_only_if_both_requests_fail(turned: bool) -> None:
    """Whichever of the two ends first; then it is the error of the first request."""
    for results, expected in (
        (("one", ValueError("second")), "one"),
        ((ValueError("first"), "two"), "two"),
        ((ValueError("first"), ValueError("second")), "first"),
    ):
        first, second = map(Call, results)
        order = [second, first] if turned else [first, second]
        if isinstance(results[0], Exception) and isinstance(results[1], Exception):
            with pytest.raises(ValueError, match=expected):
                raced(first, second, order)
        else:
            assert raced(first, second, order) == expected


def test_a_late_read_that_may_not_be_repeated_is_awaited() -> None:
    first, second = Call("one"), Call("two")
    assert raced(first, second, [first], may=False) == "one"
    assert not second.begun.is_set()


def test_a_read_that_stays_late_may_be_repeated_later() -> None:
    """When other reads have been fast."""
    first, second = Call("one"), Call("two")
    second.go_on.set()
    try:
        assert hedging.first_answer(first, second, 0.001, lambda looks: looks == 3) == "two"
    finally:
        first.go_on.set()
