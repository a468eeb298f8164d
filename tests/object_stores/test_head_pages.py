"""The head stays small, whatever the number of epochs: older entries are in pages, which it names."""

from __future__ import annotations

import itertools
import random
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.directory import head_pages, head_record
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_record import Head
from epochckpt.format import paths
from epochckpt.inspection import gc
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults
from tests.support.long_heads import NEWEST, epoch_directory, lengthen, older
from tests.support.object_servers import Bucket

Save = ocp.args.StandardSave
Options = ocp.CheckpointManagerOptions
LONG = "x" * 7000  # as a metric: the head has room for two such epochs, and a page for nine


def save(manager: ec.CheckpointManager, *epochs: int, text: str = "") -> None:
    for epoch in epochs:
        args = Save({"w": jnp.full(3, epoch)})
        assert manager.save(epoch, args=args, metrics=metrics_of(epoch, text), force=True)
    manager.wait_until_finished()


def metrics_of(epoch: int, text: str) -> dict[str, Any]:
    return {"loss": float(epoch), "text": text} if text else {"loss": float(epoch)}


def head_of(url: str) -> Head:
    found = epoch_directory(url).head.read()
    assert found is not None
    return found


def is_page(path: str) -> bool:
    return path.rpartition("/")[2].startswith(paths.HEAD_PAGE_PREFIX)


def pages_in(store: Store) -> set[str]:
    return set(store.find(paths.HEAD_PAGE_PREFIX, paths.HEAD.partition("/")[0]))


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, 1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_save_costs_the_same_whatever_the_number_of_epochs(cloud: Bucket, count: int) -> None:
    """Also one that begins a page. Opening reads the pages, and lists nothing."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, NEWEST)
    filled = epoch_directory(url)
    lengthen(filled, range(1, count - 5))
    if count > 100:  # until the head is nearly full
        loose = sum(_size(entries) for entries in (filled.head.seen() or Head()).loose().values())
        start, nbytes = (
            len((filled.head.seen() or Head()).epochs),
            _size(older(filled.head.seen() or Head(), range(1, 2))),
        )
        lengthen(filled, range(start, start + (head_pages.INLINE_BYTES - loose) // nbytes - 5))
    store, pages = open_store(url), list[set[str]]()
    with ec.CheckpointManager(url) as manager:
        manager.claim()
        for epoch in range(NEWEST + 1, NEWEST + 11):
            pages.append(pages_in(store))
            start = len(cloud.proxy.requests)
            save(manager, epoch)
            requests = cloud.proxy.requests[start:]
            written = sum(int(request.headers.get("content-length", 0)) for request in requests if request.writes)
            assert len(requests) < 20, [(request.kind, request.target) for request in requests]
            assert written < 200_000
        pages.append(pages_in(store))
    assert count < 100 or any(before != after for before, after in itertools.pairwise(pages))
    with cloud.proxy.counted() as requests, ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        assert len(manager.all_steps()) >= count
    assert "LIST" not in requests
    assert sum(requests.values()) <= 4 + len(pages_in(store))
    assert len(pages_in(store)) <= 2 + count // 150
    assert {page.path for page in head_of(url).pages} == pages_in(store)


def test_everything_works_on_epochs_whose_entries_are_in_pages(url: str) -> None:
    """Restoring, attaching, replacing, deleting, going back, retention, and a repair: as on those in the head."""
    store = open_store(url)
    with ec.CheckpointManager(url) as manager:
        save(manager, *range(20), text=LONG)
        assert len(pages_in(store)) > 2
        assert [float(manager.restore(epoch)["w"][0]) for epoch in (0, 7, 19)] == [0, 7, 19]
        ec.attach_metrics(url, 1, {"accuracy": 0.5}, "evaluator")
        manager.delete(2)
        manager.allow_overwrite(3)
        save(manager, 3, text=LONG)
        manager.rollback_to(15)
        save(manager, 16, text=LONG)
    expected = [0, 1, *range(3, 17)]
    with ec.CheckpointManager(url) as manager:
        assert manager.all_steps() == expected
        assert manager.metrics(1) == {**metrics_of(1, LONG), "accuracy": 0.5}
        assert all(manager.verify(epoch).ok for epoch in expected)
    assert len(head_of(url).aside) == 4
    store.remove(paths.HEAD)
    assert list(ec.repair_head(url).epochs) == expected
    with ec.CheckpointManager(url, options=Options(max_to_keep=3)) as manager:
        assert manager.metrics(1) == {**metrics_of(1, LONG), "accuracy": 0.5}
        save(manager, 17, text=LONG)
        assert manager.all_steps() == [15, 16, 17]
    assert {page.path for page in head_of(url).pages} == pages_in(store)


@pytest.mark.slow
def test_pages_hold_what_the_head_says_after_any_changes() -> None:
    """Against a model, with random additions, deletions and changes; what is written reads back the same."""
    lengths = (*(1, 200, 4000) * 10, 70_000)  # the last one is larger than a page
    for seed in range(3):
        chance, pages = random.Random(seed), dict[str, bytes]()
        head = Head(incarnation="0000000112345678")
        for step in range(30):
            changes = {name: dict(getattr(head, name)) for name in ("epochs", "stock", "aside")}
            for _ in range(chance.choice((1, 1, 1, 30))):
                name = chance.choice(("epochs", "epochs", "stock", "aside"))
                key = f"kept/{chance.randrange(50)}" if name == "aside" else str(chance.randrange(50))
                if chance.random() < 0.4:
                    changes[name].pop(key, None)
                else:
                    metrics = {"loss": chance.random(), "text": "x" * chance.choice(lengths)}
                    changes[name][key] = EpochSummary(f"a-{step}-0", step, step, 1, 1, 0.0, 0.0, metrics)
            head = head_pages.paged(head.next(**changes))
            pages |= {page.digest: page.data for page in head.pages if page.data}
            data = head.to_bytes()
            read = head_record.parse(
                paths.HEAD, data, lambda names, p=pages: [head_record.parse_page(name, p[name]) for name in names]
            )
            expected = {name: changes[name] for name in changes}
            assert {name: getattr(read, name) for name in changes} == expected
            assert [page.digest for page in read.pages] == [page.digest for page in head.pages]
            total = sum(_size(entries) for entries in expected.values())
            assert _size(head.loose()["epochs"]) <= head_pages.INLINE_BYTES
            assert len(head.pages) <= 3 + 3 * total // head_pages.PAGE_BYTES
            head = read if chance.random() < 0.5 else head


def _size(entries: Mapping[str, EpochSummary]) -> int:
    return sum(head_record.PageEntry.of("epochs", key, entry).nbytes for key, entry in entries.items())


def test_a_reader_that_meets_a_page_that_was_just_removed_looks_again(url: str, faults: Faults) -> None:
    """It has the old head; a run has filled that page up into another one meanwhile."""
    with ec.CheckpointManager(url) as manager:
        save(manager, *range(3), text=LONG)
        reader, store = epoch_directory(url), open_store(url)
        seen = reader.head.read_bytes()
        assert seen is not None
        named = pages_in(store)
        save(manager, *range(3, 7), text=LONG)
        assert named - pages_in(store)
        stale = faults.instead(
            Store.read, lambda call: seen, where=lambda call: call.path == paths.HEAD and not stale.hits
        )
        found = reader.head.read()
        assert stale.hits == 1
    assert found is not None
    assert len(found.epochs) == 7


@pytest.mark.parametrize("loss", ["removed", "damaged", "another"])
def test_a_page_that_is_lost_is_damage_that_a_repair_mends(url: str, loss: str) -> None:
    """Never a list with fewer epochs."""
    with ec.CheckpointManager(url) as manager:
        save(manager, *range(12), text=LONG)
    store = open_store(url)
    one, other, *_ = sorted(pages_in(store))
    data = store.read(other, limit_bytes=2**20)
    store.remove(one)
    if loss != "removed":
        store.create(one, data if loss == "another" else b"{")
    with pytest.raises(errors.DamagedError, match=one.rpartition("/")[2]) as caught:
        ec.CheckpointManager(url)
    assert f"epochckpt repair {url}" in "".join(caught.value.__notes__)
    assert list(ec.repair_head(url).epochs) == list(range(12))
    with ec.CheckpointManager(url) as manager:
        assert manager.all_steps() == list(range(12))
        save(manager, 12)
    assert wait_for(lambda: pages_in(store) == {page.path for page in head_of(url).pages})


def wait_for(holds: Callable[[], bool]) -> bool:
    """Whether it comes true: a claim removes things in the background."""
    return any(holds() or threading.Event().wait(0.01) for _ in range(1000))


def test_pages_of_a_run_that_was_killed_before_the_head_named_them_go_with_the_next_claim(
    url: str, faults: Faults
) -> None:
    """Nor are those needed that it wrote, nor missing those that it did not come to remove."""
    store = open_store(url)
    with ec.CheckpointManager(url) as manager:
        save(manager, *range(6), text=LONG)
        # Killed after the head was written.
        with faults.fail(Store.remove_all, OSError("killed"), where=lambda call: is_page(call.path)) as unremoved:
            save(manager, *range(6, 12), text=LONG)
        assert unremoved.hits
        before = pages_in(store)
        assert len(before) > len(head_of(url).pages)
        killed = epoch_directory(url)
        killed.head.read()
        # And one that dies before.
        with faults.fail(Store.replace, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            lengthen(killed, range(50, 150))
        assert pages_in(store) > before
    with ec.CheckpointManager(url) as manager:
        assert manager.all_steps() == list(range(12))
        save(manager, 12)
        assert wait_for(lambda: pages_in(store) == {page.path for page in head_of(url).pages})


def test_views_and_gc_take_pages_for_the_directory_s_own(url: str) -> None:
    with ec.CheckpointManager(url) as manager:
        save(manager, *range(12), text=LONG)
    assert pages_in(open_store(url))
    assert not gc.collect(url, delete=False).rows
    assert len(ec.inspect(url).epochs()) == 12
