"""`epochckpt.testing.Faults`: stores fail, wait or are slow by rules, and else do what their store does."""

import errno
import os
import pathlib
import threading
import time
import uuid

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import SaveError
from epochckpt.storage import Reader, Store, Writer, open_store
from epochckpt.testing import Faults, FaultyStore, SlowStore, StoreCall, StoreContract, write_file

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
WAIT_SECS = 60.0


@pytest.fixture
def store(tmp_path: pathlib.Path) -> FaultyStore:
    return FaultyStore(open_store(tmp_path))


class TestFaultyStore(StoreContract):
    """Without rules it keeps every promise of the store that it stands for."""

    @pytest.fixture(params=["posix", "memory"])
    def place(self, request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
        return str(tmp_path) if request.param == "posix" else f"memory://{uuid.uuid4().hex}/"

    @pytest.fixture
    def store(self, place: str) -> Store:
        return FaultyStore(open_store(place))

    @pytest.fixture
    def reopened(self, place: str, store: Store) -> Store:
        return FaultyStore(open_store(place))


def test_every_call_of_a_store_can_follow_a_rule(store: FaultyStore) -> None:
    """A method that the interface gets later must be here, too."""
    missing = [
        name
        for name, method in vars(Store).items()
        if callable(method) and not name.startswith("_") and name not in vars(FaultyStore)
    ]
    assert missing == ["address_of", "is_same", "lies_in"]  # what these return follows from the root alone
    for name in ("root", "local_path", "address", *Store.__annotations__):
        assert getattr(store, name) == getattr(store.inner, name)


def test_a_rule_is_about_the_calls_that_it_names(store: FaultyStore) -> None:
    """Of that method, where it says so, so many times; the error is a new one each time, and nothing has changed."""
    rule = store.faults.fail(Store.create, FULL, where=lambda call: call.path == "b", times=2)
    store.create("a", b"")
    for _ in range(2):
        with pytest.raises(OSError, match="No space") as failed:
            store.create("b", b"")
        assert failed.value is not FULL
        assert not store.exists("b")
    store.create("b", b"")
    assert rule.hits == 2


def test_rules_end(store: FaultyStore) -> None:
    """At the end of their block, when they are removed, and all at once."""
    with store.faults.fail(Store.list, FULL), pytest.raises(OSError, match="No space"):
        store.list("")
    store.list("")
    rule = store.faults.fail(Store.list, FULL)
    rule.remove()
    rule.remove()
    store.faults.fail(Store.list, FULL)
    store.faults.clear()
    store.list("")


def test_calls_see_what_is_done(store: FaultyStore) -> None:
    """Both paths, what is written, how much is read; of a put also the calls that it consists of."""
    seen: list[StoreCall] = []
    for method in (Store.put, Store.create, Store.rename, Reader.read_into, Writer.write, Writer.finish):
        store.faults.before(method, seen.append)
    write_file(store, "a", b"1234")
    store.put("b", b"12", draft="draft")
    with store.open_reader("a") as reader:
        assert bytes(reader.read(1, 3)) == b"234"
    assert [(call.method, call.paths, call.content, call.nbytes) for call in seen] == [
        ("Writer.write", ("a",), b"1234", 4),
        ("Writer.finish", ("a",), None, 0),
        ("Store.put", ("b",), b"12", 2),
        ("Store.create", ("draft",), b"12", 2),
        ("Store.rename", ("draft", "b"), None, 0),
        ("Reader.read_into", ("a",), None, 3),
    ]
    assert (seen[4].path, seen[4].target) == ("draft", "b")


def test_before_after_and_instead(store: FaultyStore) -> None:
    """The rule that was added last sees a call first."""
    seen: list[str] = []

    def note(call: StoreCall) -> None:
        seen.append(f"{call.path}: {os.listdir(store.root)}")

    store.faults.before(Store.create, note)
    store.faults.after(Store.create, note)
    store.create("a", b"")
    assert seen == ["a: []", "a: ['a']"]
    with store.faults.instead(Store.exists, lambda call: call.path == "nothing"):
        assert store.exists("nothing")
        assert not store.exists("a")
    with store.faults.fail(Store.create, FULL), pytest.raises(OSError, match="No space"):
        store.create("b", b"")
    assert len(seen) == 2
    store.faults.clear()
    store.faults.after(Store.create, lambda call: store.faults.fail(Store.create, FULL))
    store.create("b", b"")
    with pytest.raises(OSError, match="No space"):
        store.create("c", b"")


def test_a_held_call_waits_until_it_is_let_go(store: FaultyStore) -> None:
    """And until its rule is removed."""
    for let_go in ("let_go", "remove"):
        hold = store.faults.hold(Store.create)
        thread = threading.Thread(target=store.create, args=(let_go, b""))
        thread.start()
        assert hold.reached.wait(WAIT_SECS)
        assert not store.exists(let_go)
        getattr(hold, let_go)()
        thread.join(WAIT_SECS)
        assert store.exists(let_go)
        hold.remove()


def test_rules_about_one_store_add_up(store: FaultyStore) -> None:
    """Those that were there first see a call last, also the calls of which a put consists."""
    seen: list[str] = []
    outer = FaultyStore(store)
    for name, faults in (("inner", store.faults), ("outer", outer.faults)):
        for method in (Store.put, Store.rename):
            faults.before(method, lambda call, name=name: seen.append(f"{name} {call.method}"))
    outer.put("a", b"", draft="draft")
    assert seen == ["outer Store.put", "inner Store.put", "outer Store.rename", "inner Store.rename"]
    assert outer.inner is store.inner


def test_a_slow_store_takes_its_time(tmp_path: pathlib.Path) -> None:
    """For each call, and for each byte."""
    store = SlowStore(open_store(tmp_path), latency_secs=0.01, bytes_per_sec=1e5)
    began = time.monotonic()
    store.create("a", bytes(10_000))
    assert time.monotonic() - began >= 0.11
    with store.open_reader("a") as reader:
        began = time.monotonic()
        reader.read(0, 10_000)
        assert time.monotonic() - began >= 0.11


def test_whatever_epochckpt_opens_follows_the_rules(directory: str) -> None:
    """A manager, and who inspects its directory; no rule is left at the end."""
    state = {"x": np.arange(10)}
    with Faults().everywhere() as faults, ec.CheckpointManager(directory) as manager:
        with faults.fail(Store.open_writer, FULL) as full:
            manager.save(1, args=ocp.args.StandardSave(state))
            with pytest.raises(SaveError, match="No space"):
                manager.wait_until_finished()
        assert full.hits == 1
        manager.save(2, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        assert manager.restore(2)["x"].tolist() == list(range(10))
        lists = faults.before(Store.list, lambda call: None)
        assert [row.epoch for row in ec.inspect(directory).epochs()] == [2]
        assert lists.hits
        faults.fail(Store.read, FULL)
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as reader:
        assert reader.all_steps() == [2]
