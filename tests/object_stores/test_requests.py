"""What one request to a bucket promises: it ends, it says what it met, and a lost answer loses nothing."""

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any

import jax
import obstore
import pytest

from epochckpt import _monitoring, _patience
from epochckpt.errors import AccessError, InvalidArgumentError, StorageError, UnsupportedError
from epochckpt.storage import Entry, Store, object_client, open_store
from epochckpt.storage.object_store import ObjectStore
from epochckpt.testing import in_parallel, write_file
from tests.support.object_servers import BUCKET, EMULATORS, Bucket, Fault, Request

MOMENT_SECS = 0.2  # how long something that must not happen is waited for
CHUNK = 5 << 20  # the least that S3 takes
LARGE = 3 * CHUNK + 12345


@pytest.fixture
def store(cloud: Bucket) -> Store:
    return open_store(cloud.new_url())


@pytest.fixture
def quick(patience: Callable[..., None]) -> None:
    """Pauses that a test need not wait for."""
    patience(request_pauses_secs=(0.0,) * 8)


@pytest.fixture
def in_chunks(cloud: Bucket) -> Store:
    """A store that streams large files in small parts."""
    return ObjectStore(cloud.new_url(), chunk_bytes=CHUNK)


def first(count: int, fault: Fault, kind: str = "") -> Callable[[Request], Fault | None]:
    """The fault for the first requests of one kind, or of any."""
    left, lock = [count], threading.Lock()

    def decide(request: Request) -> Fault | None:
        with lock:
            if kind not in ("", request.kind) or not left[0]:
                return None
            left[0] -= 1
            return fault

    return decide


FAULTS = {
    "a lost answer": Fault(lost=True),
    "two lost answers": Fault(lost=True),
    "a reset": Fault(reset=True),
    "429": Fault(status=429),
    "500": Fault(status=500),
    "503": Fault(status=503),
    "a cut body": Fault(cut=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("server", EMULATORS, indirect=True)
@pytest.mark.parametrize("name", FAULTS)
def test_every_call_survives_a_fault_that_passes(name: str, cloud: Bucket, store: Store, quick: None) -> None:
    """A lost answer is no conflict, even where a condition is met by the object of the request itself."""
    store.create("old", b"before")
    store.create("a/kept", b"0123456789")
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: store.create("new", b"content"),
        "replace": lambda: store.replace("old", b"before", b"after"),
        "write": lambda: write_file(store, "small", b"x" * 1000),
        "read": lambda: store.read("a/kept", limit_bytes=100),
        "range": lambda: store.open_reader("a/kept").read_into(2, memoryview(bytearray(5))),
        "list": lambda: store.list(""),
        "exists": lambda: store.exists("a"),
        "remove": lambda: store.remove("old"),
        "remove_tree": lambda: store.remove_tree("a"),
    }
    for call in calls.values():
        cloud.proxy.decide = first(2 if name.startswith("two") else 1, FAULTS[name])
        call()
    cloud.proxy.decide = lambda request: None
    assert [entry.name for entry in store.list("")] == ["new", "small"]
    assert store.read("new", limit_bytes=100) == b"content"


@pytest.mark.slow
def test_a_lost_answer_does_not_hide_a_conflict(cloud: Bucket, store: Store, quick: None) -> None:
    """The first request never arrives, and another writer is faster than the second."""
    other = open_store(store.root)
    store.create("swapped", b"old")

    def overtaken(call: Callable[[], None]) -> Callable[[Request], Fault | None]:
        def decide(request: Request) -> Fault | None:
            if request.kind != "PUT":
                return None
            cloud.proxy.decide = lambda request: None
            call()
            return Fault(reset=True)

        return decide

    cloud.proxy.decide = overtaken(lambda: other.create("claim", b"theirs"))
    with pytest.raises(FileExistsError, match="claim"):
        store.create("claim", b"mine")
    cloud.proxy.decide = overtaken(lambda: other.replace("swapped", b"old", b"theirs"))
    with pytest.raises(FileExistsError, match="swapped"):
        store.replace("swapped", b"old", b"mine")
    assert store.read("claim", limit_bytes=10) == store.read("swapped", limit_bytes=10) == b"theirs"


@pytest.mark.slow
def test_one_of_many_writers_wins_though_answers_are_lost(cloud: Bucket, store: Store, quick: None) -> None:
    for round_ in range(5):
        cloud.proxy.decide = first(4, Fault(lost=True), "PUT")
        name = f"claim{round_}"
        results = in_parallel([lambda i=i, n=name: store.create(n, b"%d" % i) for i in range(8)])
        winners = [i for i, result in enumerate(results) if result is None]
        assert len(winners) == 1, results
        assert store.read(name, limit_bytes=10) == b"%d" % winners[0]


@pytest.mark.parametrize("status", [400, 501])
def test_a_refusal_that_is_no_answer_says_nothing_about_the_data(status: int, cloud: Bucket, store: Store) -> None:
    """An expired token (400) is no damage: the error is StorageError, at once."""
    store.create("a", b"x")
    for call in (lambda: store.read("a", limit_bytes=1), lambda: store.list(""), lambda: store.create("b", b"")):
        cloud.proxy.decide = lambda request: Fault(status=status)
        with cloud.proxy.counted() as counts, pytest.raises(StorageError, match=f"{store.root}.*{status}"):
            call()
        assert sum(counts.values()) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_what_is_forbidden_is_no_empty_folder(status: int, cloud: Bucket, store: Store) -> None:
    store.create("a", b"x")
    cloud.proxy.decide = lambda request: Fault(status=status)
    calls = {
        "read": lambda: store.read("a", limit_bytes=1),
        "list": lambda: store.list(""),
        "find": lambda: store.find("a"),
        "exists": lambda: store.exists("b"),
        "create": lambda: store.create("b", b""),
        "remove": lambda: store.remove("a"),
    }
    for call in calls.values():
        with pytest.raises(PermissionError, match="not permitted"):
            call()


def test_a_bucket_that_does_not_exist_is_no_empty_folder(cloud: Bucket) -> None:
    store = open_store(f"{cloud.scheme}://no-{BUCKET}/run")
    for call in (
        lambda: store.list(""),
        lambda: store.exists(""),
        lambda: store.create("a", b"x"),
        lambda: store.read("a", limit_bytes=1),
        lambda: store.find("a"),
    ):
        with pytest.raises(AccessError, match=f"no-{BUCKET}/run: there is no such bucket"):
            call()


def put_by_another(cloud: Bucket, store: Store, name: str) -> None:
    """Another client writes an object, whose name need not be one of ours."""
    key = urllib.parse.quote(f"{store.root.partition(f'{BUCKET}/')[2]}/{name}", safe="")
    put = urllib.request.Request(f"{cloud.proxy.url}/{BUCKET}/{key}", data=b"1", method="PUT")
    with urllib.request.urlopen(put) as answer:
        assert answer.status == 200


def test_folders_that_a_console_made_hold_nothing_up(cloud: Bucket, store: Store) -> None:
    """They are empty objects whose names end with a slash: first, last and only one of a folder, and its own."""
    for name in ("", "1/", "1/a/", "1/z/", "2/"):
        put_by_another(cloud, store, name)
    assert store.find("x") == []
    store.create("1/m/x", b"1")
    assert [entry.name for entry in store.list("")] == ["1", "2"]
    assert [entry.name for entry in store.list("1")] == ["a", "m", "z"]
    assert store.list("2") == []
    store.remove_tree("1")
    store.remove_tree("2")
    assert not store.exists("1/m")


@pytest.mark.slow
def test_long_listings_have_many_pages(cloud: Bucket, store: Store) -> None:
    names = [f"{i % 7}/x{i:04}" for i in range(120)]
    assert in_parallel([lambda n=n: [store.create(p, b"") for p in names[n::8]] for n in range(8)]) == [[None] * 15] * 8
    assert store.find("x") == sorted(names)
    assert len(store.list("")) == 7
    store.remove_tree("3")
    assert store.find("x") == sorted(name for name in names if name[0] != "3")


@pytest.mark.slow
def test_a_tree_is_removed_though_requests_fail(cloud: Bucket, store: Store, quick: None) -> None:
    """Each fifth is refused: what is deleted already does not end the rest."""
    in_parallel([lambda n=n: [store.create(f"1/{n}/{i}", b"") for i in range(15)] for n in range(8)])
    count = itertools.count()
    cloud.proxy.decide = lambda request: Fault(status=503) if next(count) % 5 == 4 else None
    store.remove_tree("1")
    cloud.proxy.decide = lambda request: None
    assert not store.exists("1")


def test_a_conflict_that_asks_to_try_again_is_none(cloud: Bucket, store: Store, quick: None) -> None:
    """S3 answers 409 while another conditional write of that name is under way."""
    cloud.proxy.decide = first(1, Fault(status=409), "PUT")
    store.create("a", b"1")
    cloud.proxy.decide = first(1, Fault(status=409), "GET")
    assert store.read("a", limit_bytes=1) == b"1"


def test_every_repeated_request_is_an_event(
    cloud: Bucket, store: Store, quick: None, patience: Callable[..., None]
) -> None:
    """Of `jax.monitoring`: what was asked, and how the store refused."""
    patience(delivery_secs=60.0)
    store.create("a", b"1")
    heard: list[Any] = []

    def listen(name: str, **tags: Any) -> None:
        heard.append((name, tags))

    jax.monitoring.register_event_listener(listen)
    try:
        cloud.proxy.decide = first(2, Fault(status=503), "GET")
        assert store.read("a", limit_bytes=1) == b"1"
        _monitoring.deliver()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert heard == [("/epochckpt/storage/retry", {"doing": "reading", "status": "503"})] * 2


def refusing(text: str, count: int) -> Callable[[], str]:
    """A request that is refused some times, as the client says it, and then answered."""
    left = [count]

    def call() -> str:
        if left[0]:
            left[0] -= 1
            raise obstore.exceptions.GenericError(text)
        return "answer"

    return call


def test_credentials_that_cannot_be_had_just_now_are_asked_for_again(quick: None) -> None:
    """Tokens end after an hour; a server of tokens that fails once fails no save. One that refuses is an answer."""
    client = object_client.Client("memory://name")
    token = "Error performing token request: GET http://169.254.169.254/token - Server returned status code: "
    assert client.ask("", "reading", refusing(f"{token}503", 3)) == "answer"
    assert client.ask("", "reading", refusing("Error performing token request: error sending request", 3)) == "answer"
    with pytest.raises(AccessError, match="memory://name: found no credentials"):
        client.ask("", "reading", refusing(f"{token}404", 1))
    with pytest.raises(AccessError, match="found no credentials"):
        client.ask("", "reading", refusing(f"{token}503", 100))
    with pytest.raises(AccessError, match="set AWS_REGION"):
        client.ask("", "reading", refusing("Received redirect without LOCATION", 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_ENDPOINT_URL", "localhost:9000"), ("AWS_ENDPOINT_URL_S3", "ftp://x"), ("AWS_ENDPOINT", "https://u:p@x")],
)
def test_an_endpoint_that_is_no_url_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=f"{name} is no URL of a server: expected http://host:port"):
        open_store("s3://bucket/run")


@pytest.mark.parametrize("name", ["./x", "../x", "a//x", "1/../x"])
def test_a_name_that_is_no_path_is_said(name: str, cloud: Bucket, store: Store) -> None:
    """Another client has put it there."""
    store.create("2/x", b"1")
    put_by_another(cloud, store, name)
    folder = name.partition("/")[0] if name[0] != "." else ""
    with pytest.raises(UnsupportedError, match="name is no path; rename or remove it"):
        store.remove_tree(folder) if folder else store.list("")
    assert store.list("2") == [Entry("x", False)]


def test_a_store_that_is_away_is_said_and_given_up(
    cloud: Bucket, store: Store, quick: None, patience: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, then an error, each with the URL, the request and its answer."""
    patience(request_quiet_secs=0.0)
    cloud.proxy.decide = lambda request: Fault(status=503)
    error = pytest.raises(StorageError, match=rf"{store.root}/record.*reading failed.*503")
    with caplog.at_level(logging.WARNING), cloud.proxy.counted() as counts, error as caught:
        store.read("record", limit_bytes=10)
    assert len(str(caught.value)) < 1000
    assert counts == {"GET": 9}
    said = [record.getMessage() for record in caplog.records if "trying on" in record.getMessage()]
    assert [(store.root in text, "503" in text) for text in said] == [(True, True)], said


def test_a_server_that_falls_silent_is_asked_again(cloud: Bucket, patience: Callable[..., None]) -> None:
    """A request without an answer ends."""
    patience(request_silent_secs=0.5)
    store, held = open_store(cloud.new_url()), threading.Event()
    try:
        for call in (lambda: store.create("a", b"1"), lambda: store.read("a", limit_bytes=1), lambda: store.list("")):
            cloud.proxy.decide = first(1, Fault(held=held))
            with cloud.proxy.counted() as counts:
                call()
            assert sum(counts.values()) >= 2
    finally:
        held.set()


@pytest.mark.parametrize("fault", ["silence", "reset", "lost"])
def test_a_data_file_of_one_request_is_sent_again(fault: str, cloud: Bucket, store: Store, quick: None) -> None:
    """A large one may take long, and is repeated though that took longer than all of a small request may."""
    held, data = threading.Event(), os.urandom((1 << 20) + 1)
    chosen = {"silence": Fault(held=held), "reset": Fault(reset=True), "lost": Fault(lost=True)}[fault]
    cloud.proxy.decide = first(1, chosen, "PUT")
    try:
        with _patience.use(request_silent_secs=0.2, large_request_secs=0.6), cloud.proxy.counted() as counts:
            write_file(open_store(store.root), "data", data)
        assert counts["PUT"] == 2
        assert store.read("data", limit_bytes=len(data)) == data
    finally:
        held.set()


@pytest.mark.timeout(80)
def test_ctrl_c_does_not_wait_for_an_answer(cloud: Bucket, patience: Callable[..., None]) -> None:
    """A server that is silent for longer than this test may take does not hold the main thread."""
    patience(request_silent_secs=85.0)
    store, held = open_store(cloud.new_url()), threading.Event()

    def decide(request: Request) -> Fault:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return Fault(held=held)

    cloud.proxy.decide = decide
    try:
        with pytest.raises(KeyboardInterrupt):
            store.read("a", limit_bytes=1)
    finally:
        held.set()


@pytest.mark.parametrize("prefix", ["a//b", "./a", "a/..", "a\nb"])
def test_a_folder_that_no_object_can_be_in_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidArgumentError, match="in no object's name"):
        open_store(f"memory://name/{prefix}")


@pytest.mark.parametrize(
    "url", ["hf://bucket/run", "gs://", "az://", "s3:///run", "gs://me:secret@bucket/run", "s3://bucket/a#b"]
)
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected gs://bucket/run"):
        open_store(url)


def pieces(writer_order: str, size: int = LARGE) -> list[tuple[int, int]]:
    step = 2 << 20
    found = [(start, min(start + step, size)) for start in range(0, size, step)]
    return found[::-1] if writer_order == "backwards" else found


@pytest.mark.slow
@pytest.mark.parametrize("order", ["in order", "backwards", "in parallel"])
def test_a_large_file_is_streamed_in_parts(
    order: str, cloud: Bucket, in_chunks: Store, patience: Callable[..., None]
) -> None:
    """It appears only when it is finished, whatever the order of its pieces, even if too many are early."""
    patience(upload_late_secs=0.02)
    store, size = in_chunks, 6 * CHUNK + 12345
    data = os.urandom(size)
    writer = store.open_writer("large", size)
    view = memoryview(data)
    calls = [lambda a=a, b=b: writer.write(a, view[a:b]) for a, b in pieces(order, size)]
    with cloud.proxy.counted() as counts:
        if order == "in parallel":
            assert in_parallel(calls) == [None] * len(calls)
        else:
            for call in calls:
                call()
        assert not store.exists("large")
        writer.finish()
    assert counts["PUT"] >= 7
    assert store.read("large", limit_bytes=size) == data


def nth_write(number: int, fault: Fault, failed: list[Request]) -> Callable[[Request], Fault | None]:
    """The fault for one of the requests that write; that request is added to the list."""
    count = itertools.count()

    def decide(request: Request) -> Fault | None:
        if request.kind not in ("PUT", "POST") or next(count) != number:
            return None
        failed.append(request)
        return fault

    return decide


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost", "status", "reset"])
def test_a_large_file_survives_a_fault_in_any_request(fault: str, cloud: Bucket, in_chunks: Store) -> None:
    """One request of an upload fails: its beginning, each of its parts, its end."""
    store, data, number = in_chunks, os.urandom(LARGE), 0
    chosen = {"lost": Fault(lost=True), "status": Fault(status=503), "reset": Fault(reset=True)}[fault]
    while True:
        failed: list[Request] = []
        cloud.proxy.decide = nth_write(number, chosen, failed)
        write_file(store, f"large{number}", data)
        cloud.proxy.decide = lambda request: None
        assert store.read(f"large{number}", limit_bytes=LARGE) == data
        if not failed:
            break
        number += 1
    assert number == 6


def test_a_large_file_that_is_given_up_leaves_nothing(cloud: Bucket, in_chunks: Store) -> None:
    """The parts of the upload are removed."""
    writer = in_chunks.open_writer("large", LARGE)
    data, removed = os.urandom(LARGE), threading.Event()
    for a, b in pieces("")[:-1]:
        writer.write(a, data[a:b])
    cloud.proxy.decide = lambda request: Fault(withheld=removed.set) if request.kind == "DELETE" else None
    with cloud.proxy.counted() as counts:
        writer.abort()
        assert removed.wait(30)
        with pytest.raises(ValueError, match="closed"):
            writer.write(0, b"x")
    assert counts["DELETE"] == 1
    assert not in_chunks.exists("large")


@pytest.mark.slow
def test_what_comes_early_waits_for_what_is_late(
    cloud: Bucket, in_chunks: Store, patience: Callable[..., None]
) -> None:
    """Memory for early pieces is bounded, however many threads there are; nothing is lost when the late one comes."""
    patience(upload_late_secs=600.0)
    data, piece, kept = os.urandom(6 * CHUNK), 1 << 20, threading.Event()
    too_many = threading.Event()
    writer = in_chunks.open_writer("large", len(data))
    starts = range(piece, len(data), piece)
    early, returned = 4 * CHUNK // piece, list[int]()

    def write(start: int) -> None:
        writer.write(start, data[start : start + piece])
        returned.append(start)
        if len(returned) >= early:
            (too_many if len(returned) > early else kept).set()

    rest = [threading.Thread(target=write, args=(start,)) for start in starts]
    for thread in rest:
        thread.start()
    assert kept.wait(60)
    assert not too_many.wait(MOMENT_SECS)
    writer.write(0, data[:piece])
    for thread in rest:
        thread.join(60)
    assert sorted(returned) == list(starts)
    writer.finish()
    assert in_chunks.read("large", limit_bytes=len(data)) == data


def test_an_upload_that_stands_still_is_said(cloud: Bucket, in_chunks: Store, patience: Callable[..., None]) -> None:
    """Once, while it still tries; then it goes on."""
    patience(upload_still_secs=0.05)
    store = in_chunks
    held, data = threading.Event(), os.urandom(LARGE)
    cloud.proxy.decide = lambda request: Fault(held=held) if request.kind in ("PUT", "POST") else None
    writing_ = threading.Thread(target=write_file, args=(store, "large", data))

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "stands still" in record.getMessage():
                said.append(record.getMessage())
                held.set()

    said: list[str] = []
    heard = Heard()
    logging.getLogger("absl").addHandler(heard)
    try:
        writing_.start()
        assert held.wait(60)
        writing_.join()
    finally:
        held.set()
        logging.getLogger("absl").removeHandler(heard)
    assert store.read("large", limit_bytes=LARGE) == data
    assert len(said) == 1
    assert f"{store.root}/large" in said[0]


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
from epochckpt.errors import UnsupportedError
from epochckpt.storage import open_store

def in_child(name):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        open_store("memory://forked").exists("a")
        for each in (store, open_store(url)):
            each.create(name, b"1")
            name += "2"
        os._exit(0)
    except UnsupportedError as error:
        os._exit(7 if "start it with spawn" in str(error) and str(os.getppid()) in str(error) else 8)
    except BaseException:
        os._exit(9)

url = sys.argv[1]
store = open_store(url)
codes = [in_child("before")]
open_store("memory://forked").create("a", b"1")
codes.append(in_child("memory"))
store.create("parent", b"1")
codes.append(in_child("bucket"))
store.create("parent2", b"1")
print(codes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("server", ["gs"], indirect=True)  # the client's threads are the same for all
def test_a_forked_child_is_told_instead_of_waiting_for_ever(cloud: Bucket) -> None:
    """A fresh client would not help it: the client's threads are the parent's. Before its use a fork is harmless."""
    url = cloud.new_url()
    environment = {**os.environ, "PYTHONPATH": os.curdir}
    words = [sys.executable, "-c", FORKED, url]
    ended = subprocess.run(words, env=environment, timeout=110, capture_output=True, text=True)
    assert ended.stdout.split("\n")[0] == "[0, 7, 7]", ended
    assert {entry.name for entry in open_store(url).list("")} == {"before", "before2", "parent", "parent2"}


def test_pieces_that_overlap_are_refused(in_chunks: Store) -> None:
    """As many bytes as there should be, but not those."""
    for size in (1000, LARGE):
        writer = in_chunks.open_writer("file", size)
        writer.write(0, bytes(size // 2))
        writer.write(1, bytes(size - size // 2))
        with pytest.raises(ValueError, match="not finished"):
            writer.finish()
        assert not in_chunks.exists("file")


def test_an_upload_that_fails_is_an_error(cloud: Bucket, in_chunks: Store) -> None:
    store = in_chunks
    cloud.proxy.decide = lambda request: Fault(status=400) if request.kind in ("PUT", "POST") else None
    with pytest.raises(StorageError, match=f"{store.root}/large.*400"):
        write_file(store, "large", os.urandom(LARGE))
    cloud.proxy.decide = lambda request: None
    assert not store.exists("large")


def test_requests_are_few(cloud: Bucket, store: Store) -> None:
    """One for each thing that is asked."""
    with cloud.proxy.counted() as counts:
        store.create("a/x", b"1")
        store.read("a/x", limit_bytes=1)
        store.list("a")
        store.remove("a/x")
    assert counts == {"PUT": 1, "GET": 1, "LIST": 1, "DELETE" if cloud.scheme == "gs" else "POST": 1}
    with cloud.proxy.counted() as counts:
        write_file(store, "small", b"x" * 100)
        with store.open_reader("small") as reader:
            reader.read_into(10, memoryview(bytearray(50)))
    assert counts == {"HEAD": 1, "PUT": 1, "GET": 1}
    with cloud.proxy.counted() as counts, store.open_reader("small", 100) as reader:
        assert reader.read(10, 50) == b"x" * 50
    assert counts == {"GET": 1}


@pytest.mark.slow
def test_memory_is_shared_by_the_stores_of_a_process() -> None:
    name = uuid.uuid4().hex
    open_store(f"memory://{name}/a").create("x", b"1")
    assert open_store(f"memory://{name}").read("a/x", limit_bytes=1) == b"1"
    assert not open_store(f"memory://{name}2").exists("")
