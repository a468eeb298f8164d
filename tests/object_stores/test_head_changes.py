"""Changes of the head that meet other writers, caches, weak ETags and lost answers: they end, and replace no guess."""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import _patience, errors
from epochckpt.cli import main
from epochckpt.directory import directory_of, head_turns, rebuild
from epochckpt.directory.bucket import BucketDirectory
from epochckpt.directory.head_changes import Refresh
from epochckpt.format import checksums, paths
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store
from tests.support.object_servers import Answer, Bucket, Fault, Proxy, Request

Save = ocp.args.StandardSave
Options = ocp.CheckpointManagerOptions


def save(manager: ec.CheckpointManager, *epochs: int) -> None:
    for epoch in epochs:
        assert manager.save(epoch, args=Save({"w": jnp.full(3, epoch)}), force=True)
    manager.wait_until_finished()


def steps(url: str) -> list[int]:
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        return list(manager.all_steps())


def epoch_directory(url: str) -> BucketDirectory:
    found = directory_of(open_store(url), StepNames.of(Options()))
    assert isinstance(found, BucketDirectory)
    return found


def is_head(request: Request) -> bool:
    """Whether a request reads or writes the head itself."""
    return "head.json" in urllib.parse.unquote(request.target) and request.kind in ("GET", "PUT", "POST")


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def quick(patience: Callable[..., None]) -> None:
    """The same numbers of tries, without pauses that a test need not wait for."""
    patience(change_pauses_secs=(0.0,) * len(_patience.now().change_pauses_secs), request_pauses_secs=(0.0,) * 8)


@contextmanager
def another_way(cloud: Bucket, url: str, decide: Callable[[Request], Fault | None]) -> Iterator[str]:
    """A URL of the same directory by another endpoint: whoever uses it is as in a process of its own."""
    proxy = Proxy(cloud.proxy.upstream)
    proxy.decide = decide
    try:
        yield f"{url}?endpoint={proxy.url}{'&anonymous=true' if cloud.scheme == 'gs' else ''}"
    finally:
        proxy.close()


# -- repair ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["removed", "damaged"])
def test_a_repair_replaces_only_what_it_looked_at(url: str, loss: str) -> None:
    """Another repair, and a run that saved since, come first: the later one is told, and all epochs stay."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 1, 2)
    open_store(url).remove(paths.HEAD)
    if loss == "damaged":
        open_store(url).create(paths.HEAD, b"{")
    late = epoch_directory(url)
    found = rebuild.look(late)
    ec.repair_head(url)
    with ec.CheckpointManager(url) as manager:
        save(manager, 3, 4)
        with pytest.raises(errors.InvalidArgumentError, match=r"has changed since it was looked at.*look again"):
            rebuild.write(late, found)
        save(manager, 5)
    assert steps(url) == [1, 2, 3, 4, 5]


def test_a_repair_that_takes_in_copies_changes_only_what_it_looked_at(url: str) -> None:
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    with ec.CheckpointManager(f"{url}-other") as manager:
        save(manager, 7)
    source = open_store(f"{url}-other")
    for file in source.files(""):
        if file.path.startswith("7/"):
            open_store(url).create(file.path, source.read(file.path, limit_bytes=file.size))
    late = epoch_directory(url)
    found = rebuild.look(late)
    assert list(found.epochs) == ["7"]
    with ec.CheckpointManager(url) as manager:
        save(manager, 2)
    with pytest.raises(errors.InvalidArgumentError, match="look again"):
        rebuild.write(late, found)
    assert ec.repair_head(url).epochs == (7,)
    assert steps(url) == [1, 2, 7]


@pytest.mark.slow
def test_a_repair_whose_answer_is_lost_replaces_nothing_newer(cloud: Bucket, quick: None) -> None:
    """It is carried out; a run goes on from it before the request is repeated. The repair knows its own write."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    open_store(url).remove(paths.HEAD)

    def go_on() -> None:
        with ec.CheckpointManager(url) as manager:
            save(manager, 2, 3)

    left = [Fault(withheld=go_on, lost=True)]
    cloud.proxy.decide = lambda request: left.pop() if left and is_head(request) and request.writes else None
    assert ec.repair_head(url).epochs == (1,)
    assert not left
    assert steps(url) == [1, 2, 3]


def test_a_head_of_a_newer_version_is_not_repaired(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is another epochckpt's; no error recommends it either."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    bucket = open_store(url)
    old = bucket.read(paths.HEAD, limit_bytes=2**20)
    newer = json.loads(old) | {"version": 99}
    del newer["checksum"]
    bucket.replace(paths.HEAD, old, checksums.seal(newer))
    for call in (lambda: ec.repair_head(url), lambda: ec.CheckpointManager(url)):
        with pytest.raises(errors.FormatVersionError) as caught:
            call()
        assert "repair" not in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert main.main(["repair", url, "--yes"]) != 0
    assert "install a newer epochckpt" in capsys.readouterr().err
    assert bucket.read(paths.HEAD, limit_bytes=2**20) == checksums.seal(newer)


def test_a_lost_head_is_not_made_anew_where_a_newer_version_has_saved(url: str) -> None:
    """What this epochckpt would write could not name those epochs."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 1, 2)
        save_id = manager.save_id(2)
    bucket = open_store(url)
    bucket.remove(paths.HEAD)
    for path in ("2/epoch.json", f"2/{save_id}.json"):
        newer = json.loads(bucket.read(path, limit_bytes=2**20)) | {"version": 99}
        del newer["checksum"]
        bucket.put(path, checksums.seal(newer), draft="", replace=True)
    with pytest.raises(errors.FormatVersionError):
        ec.repair_head(url)
    assert not bucket.exists(paths.HEAD)


# -- caches and proxies in front of the store ------------------------------------------------------------------------


def writers(url: str) -> dict[str, Callable[[], object]]:
    """Each way to change an object that is there."""
    manager = ec.CheckpointManager(url)

    def claim() -> None:
        manager.claim()

    return {
        "claim": claim,
        "change": lambda: epoch_directory(url).head.write(Refresh()),
        "put": lambda: open_store(url).put(paths.HEAD, b"x", draft="", replace=True),
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", ["claim", "change", "put"])
def test_reads_that_are_out_of_date_end_in_an_error_that_says_so(cloud: Bucket, what: str, quick: None) -> None:
    """A cache answers each read of the head with what it saw first. The tries end, and are few."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    seen = list[Answer]()

    def cached(answer: Answer) -> Answer:
        seen.append(answer)
        return seen[0]

    cloud.proxy.decide = lambda request: Fault(rewrite=cached) if is_head(request) and request.kind == "GET" else None
    call = writers(url)[what]
    epoch_directory(url).head.read()  # fills the cache
    head = open_store(url).read(paths.HEAD, limit_bytes=2**20)
    open_store(url).replace(paths.HEAD, head, head + b" ")
    with cloud.proxy.counted() as requests, pytest.raises(errors.StorageError, match="Reads are out of date"):
        call()
    assert sum(requests.values()) < 150, requests


@pytest.mark.parametrize("server", ["s3"], indirect=True)
@pytest.mark.parametrize("what", ["claim", "change", "put"])
def test_weak_etags_are_refused_at_once(cloud: Bucket, what: str) -> None:
    """A proxy that compresses makes them: no condition can rest on such, and none is tried."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)

    def weak(answer: Answer) -> Answer:
        headers = [(name, f"W/{value}" if name.lower() == "etag" else value) for name, value in answer.headers]
        return Answer(answer.status, headers, answer.content)

    cloud.proxy.decide = lambda request: Fault(rewrite=weak)
    call = writers(url)[what]
    with cloud.proxy.counted() as requests, pytest.raises(errors.AccessError, match="weak ETags"):
        call()
    assert sum(requests.values()) < 20, requests


def test_no_cache_may_keep_the_head(cloud: Bucket) -> None:
    """Objects that are public are cached for an hour on Google Cloud Storage, unless they say otherwise."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    written = [request for request in cloud.proxy.requests if is_head(request) and request.writes]
    assert len(written) >= 3
    assert {request.headers.get("cache-control") for request in written} == {"no-store"}


def test_a_store_that_ignores_conditions_is_found_out_before_its_head_is_replaced(cloud: Bucket) -> None:
    """The head that is there stays as it is: other runs may rely on it."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    head = open_store(url).read(paths.HEAD, limit_bytes=2**20)
    with another_way(cloud, url, lambda request: Fault(heedless=True)) as heedless:
        manager = ec.CheckpointManager(heedless)
        calls: list[Callable[[], object]] = [
            manager.claim,
            lambda: ec.attach_metrics(heedless, 1, {"a": 1.0}, "evaluator"),
        ]
        for call in calls:
            with pytest.raises(errors.AccessError, match="took a conditional write whose condition does not hold"):
                call()
    assert open_store(url).read(paths.HEAD, limit_bytes=2**20) == head


def test_whether_a_store_checks_conditions_is_asked_once(cloud: Bucket) -> None:
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    cloud.proxy.requests.clear()
    with ec.CheckpointManager(url) as manager:
        save(manager, 2)
    assert not [request for request in cloud.proxy.requests if paths.CONDITIONS in urllib.parse.unquote(request.target)]


# -- many writers ----------------------------------------------------------------------------------------------------


class Quota:
    """A server that takes one write of the head in an interval, and refuses the others with 429."""

    def __init__(self, secs: float):
        self._secs, self._next, self._lock = secs, 0.0, threading.Lock()
        self.refused = 0

    def decide(self, request: Request) -> Fault | None:
        if not is_head(request) or not request.writes:
            return None
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self.refused += 1
                return Fault(status=429)
            self._next = now + self._secs
            return None


@pytest.fixture
def shrunk(patience: Callable[..., None]) -> float:
    """All pauses, and the interval of the quota, are this part of what they really are."""
    part = 0.02
    usual = _patience.now()
    patience(
        request_pauses_secs=tuple(part * secs for secs in usual.request_pauses_secs),
        attachment_pauses_secs=tuple(part * secs for secs in usual.attachment_pauses_secs),
    )
    return part


@pytest.mark.slow
@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_ten_evaluators_beside_a_run_fail_neither_saves_nor_attachments(cloud: Bucket, shrunk: float) -> None:
    """The head takes one write a second, as on Google Cloud Storage; here all times are a fiftieth of that."""
    url, epochs, evaluators = cloud.new_url(), 3, 10
    saved = [threading.Event() for _ in range(epochs)]
    failed = list[BaseException]()
    quota = Quota(shrunk)
    cloud.proxy.decide = quota.decide

    def evaluate(number: int) -> None:
        try:
            with another_way(cloud, url, quota.decide) as own:
                for epoch in range(epochs):
                    assert saved[epoch].wait(60)
                    ec.attach_metrics(own, epoch, {f"accuracy_{number}": 0.5}, f"evaluator-{number}")
        except BaseException as error:  # shown by the test
            failed.append(error)

    threads = [threading.Thread(target=evaluate, args=(number,)) for number in range(evaluators)]
    for thread in threads:
        thread.start()
    try:
        with ec.CheckpointManager(url) as manager:
            for epoch in range(epochs):
                save(manager, epoch)
                saved[epoch].set()
    finally:
        for event in saved:
            event.set()
        for thread in threads:
            thread.join(100)
    assert not failed
    assert quota.refused
    with ec.CheckpointManager(url) as manager:
        expected = {f"accuracy_{number}": 0.5 for number in range(evaluators)}
        assert [manager.metrics(epoch) for epoch in range(epochs)] == [expected] * epochs


def test_a_save_goes_on_while_others_keep_the_head_busy(cloud: Bucket, shrunk: float) -> None:
    """It is refused more often than a request is repeated. But others change the head meanwhile: the store works."""
    url, refused = cloud.new_url(), list[Request]()
    most = len(_patience.now().request_pauses_secs) + 1

    def decide(request: Request) -> Fault | None:
        if not is_head(request) or not request.writes or len(refused) > most:
            return None
        refused.append(request)
        if len(refused) == 3:
            with another_way(cloud, url, lambda request: None) as other:
                ec.attach_metrics(other, 1, {"accuracy": 0.5}, "evaluator")
        return Fault(status=429)

    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
        cloud.proxy.decide = decide
        save(manager, 2)
        assert len(refused) > most
        assert manager.all_steps() == [1, 2]
    with ec.CheckpointManager(url) as manager:
        assert manager.metrics(1) == {"accuracy": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault(lost=True), Fault(reset=True), Fault(status=503), Fault(status=429)])
def test_attaching_survives_a_fault_that_passes(cloud: Bucket, shrunk: float, fault: Fault) -> None:
    """Also one that loses the answer of a write that was carried out."""
    url, left = cloud.new_url(), [fault] * 2
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    cloud.proxy.decide = lambda request: left.pop() if left and is_head(request) and request.writes else None
    ec.attach_metrics(url, 1, {"accuracy": 0.5}, "evaluator")
    with ec.CheckpointManager(url) as manager:
        assert manager.metrics(1) == {"accuracy": 0.5}


def test_attachments_that_wait_in_one_process_go_with_one_change(cloud: Bucket) -> None:
    """While a save has its turn with the head they wait; then the first takes all along."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    turns, failed = head_turns.of(open_store(url)), list[BaseException]()

    def attach(number: int) -> None:
        try:
            ec.attach_metrics(url, 1, {f"accuracy_{number}": 0.5}, f"evaluator-{number}")
        except BaseException as error:  # shown by the test
            failed.append(error)

    threads = [threading.Thread(target=attach, args=(number,)) for number in range(5)]
    with turns.taken(head_turns.SAVES):
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while len(turns.waiting) < len(threads):
            assert time.monotonic() < deadline
            threading.Event().wait(0.005)
        cloud.proxy.requests.clear()
    for thread in threads:
        thread.join(60)
    assert not failed
    written = [request for request in cloud.proxy.requests if is_head(request) and request.writes]
    assert len(written) == 1
    with ec.CheckpointManager(url) as manager:
        assert manager.metrics(1) == {f"accuracy_{number}": 0.5 for number in range(5)}


def test_a_save_has_its_turn_before_attachments(url: str) -> None:
    turns, order = head_turns.of(open_store(url)), list[str]()
    taken, waiting = threading.Event(), itertools.count()

    def take(name: str, pace: head_turns.Pace) -> None:
        next(waiting)
        with turns.taken(pace):
            order.append(name)

    threads = [threading.Thread(target=take, args=("attachment", head_turns.ATTACHMENTS)) for _ in range(3)]
    threads.append(threading.Thread(target=take, args=("save", head_turns.SAVES)))
    with turns.taken(head_turns.SAVES):
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while not turns.urgent:
            assert time.monotonic() < deadline
            taken.wait(0.001)
    for thread in threads:
        thread.join(60)
    assert order == ["save", *["attachment"] * 3]
