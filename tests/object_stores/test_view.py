"""The Orbax view in a bucket, and stock Orbax as its reader."""

import contextlib
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import RemovalError
from epochckpt.format import checksums, paths
from epochckpt.orbax import object_view
from epochckpt.orbax.step_files import STEP_RECORD
from epochckpt.storage import open_store
from tests.support import prepared, stock_buckets
from tests.support.object_servers import Bucket, Fault, Request, bucket
from tests.support.processes import run_worker
from tests.support.taps import eventually

Save, Options = ocp.args.StandardSave, ocp.CheckpointManagerOptions
MARKER = "commit_success.txt"
WAIT_SECS = 60


@pytest.fixture(scope="module")
def google() -> Iterator[Bucket]:
    with bucket("gs") as made:
        yield made


@pytest.fixture
def cloud(google: Bucket) -> Iterator[Bucket]:
    """Without faults at the beginning and the end."""
    google.proxy.requests.clear()
    yield google
    google.proxy.decide = lambda request: None


def state(value: float) -> dict[str, Any]:
    return {"w": np.full((4, 3), value, np.float32), "n": value}


def save(manager: ec.CheckpointManager, epoch: int, **arguments: Any) -> None:
    assert manager.save(epoch, args=Save(state(epoch)), **arguments)
    manager.wait_until_finished()


def name_of(request: Request) -> str:
    """The path of the object that a request is about, in the directory."""
    return urllib.parse.unquote(request.target.partition("?")[0]).split("/", 3)[-1]


def names(url: str) -> set[str]:
    """All objects, by path."""
    return {file.path for file in open_store(url).files("")}


def whole(url: str, epoch: int) -> None:
    """Asserts that an epoch and its view are as they should be."""
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        found = manager.verify(epoch)
        assert found.ok
        assert (found.view_damage, found.note) == ((), "")
        assert object_view.is_complete(manager.components.directory.store, str(epoch))


def in_view(url: str, epoch: int) -> set[str]:
    """What there is of a view."""
    found = {n for n in names(url) if n.startswith(f"{epoch}/") and not paths.save_id_in(n)}
    return {n for n in found if not n.endswith(paths.EPOCH_RECORD)}


def test_the_view_comes_after_the_commit_and_its_marks_last(cloud: Bucket) -> None:
    """Nine small objects and one look; nothing before the verdict."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    puts = [name_of(r) for r in cloud.proxy.requests if r.kind == "PUT"]
    view = [name for name in puts if name in in_view(url, 1)]
    assert len(view) == len(set(view)) == 9
    commit = len(puts) - 1 - puts[::-1].index(paths.HEAD)  # the last change is that of `close`
    commit = max(i for i, name in enumerate(puts[:commit]) if name == paths.HEAD)
    assert all(puts.index(name) > commit for name in view)
    assert view[-2:] == [f"1/default/{MARKER}", f"1/{MARKER}"]
    whole(url, 1)


def test_no_view_where_stock_orbax_cannot_read(cloud: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """`memory://` stands for every other store; and `orbax_view=False`."""
    with ec.CheckpointManager("memory://no-view") as manager:
        save(manager, 1)
    assert not in_view("memory://no-view", 1)
    url = cloud.new_url()
    with ec.CheckpointManager(url, storage=ec.StorageOptions(orbax_view=False)) as manager:
        save(manager, 1)
    assert not in_view(url, 1)
    with pytest.raises(ec.errors.UnsupportedError, match="none was asked for"):
        ec.repair_view(url, 1)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 4, 7, 8])
def test_a_view_that_was_cut_off_is_completed_by_the_next_claim(cloud: Bucket, after: int) -> None:
    """Whatever was written of it: stock Orbax does not see the epoch meanwhile, and we do."""
    url, done = cloud.new_url(), set[str]()

    def refuse(request: Request) -> Fault | None:
        name = name_of(request)
        if request.kind != "PUT" or name.startswith("_epochckpt/") or paths.save_id_in(name) or "epoch.json" in name:
            return None
        done.add(name)
        return Fault(status=403) if len(done) > after else None

    with ec.CheckpointManager(url) as manager:
        cloud.proxy.decide = refuse
        save(manager, 1)
    assert f"1/{MARKER}" not in names(url)
    cloud.proxy.decide = lambda request: None
    with ec.CheckpointManager(url) as manager:
        assert manager.restore(1)["n"] == 1
        manager.claim()
        assert eventually(lambda: f"1/{MARKER}" in names(url))
    whole(url, 1)


def test_what_is_deleted_loses_its_view_first(cloud: Bucket) -> None:
    """Its mark goes before anything else, and nothing stays; the others keep theirs."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        for epoch in (1, 2, 3):
            save(manager, epoch)
        cloud.proxy.requests.clear()
        manager.delete(2)
    removed = [name_of(r) for r in cloud.proxy.requests if r.kind == "DELETE"]
    assert removed[0] in (f"2/{MARKER}", f"2/default/{MARKER}")
    assert {n for n in names(url) if n.startswith("2/")} == set()
    whole(url, 1)
    whole(url, 3)


def test_epochs_that_are_rolled_back_lose_their_view(cloud: Bucket) -> None:
    """Their data stay, and the number has a view of its own again when it is saved anew."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        for epoch in (1, 2, 3):
            save(manager, epoch)
        manager.rollback_to(1)
        assert not in_view(url, 2) | in_view(url, 3)
        save(manager, 2)
    whole(url, 2)
    assert not in_view(url, 3)


def test_an_epoch_that_is_replaced_has_the_view_of_the_new_one(cloud: Bucket) -> None:
    """Another item, another tree: nothing of the old view stays."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        items = ocp.args.Composite(old=Save(state(1)), config=ocp.args.JsonSave({"a": 1}))
        assert manager.save(1, args=items, metrics={"loss": 0.5})
        manager.wait_until_finished()
        before = in_view(url, 1)
        assert "1/config/metadata" in before
        manager.allow_overwrite(1)
        assert manager.save(1, args=ocp.args.Composite(new=Save(state(2))))
    now = in_view(url, 1)
    assert not {n for n in now if n.startswith(("1/old/", "1/config/", "1/metrics/"))}
    assert {n for n in now if n.startswith("1/new/")}
    whole(url, 1)


def test_the_view_of_a_replaced_epoch_gives_way_when_the_run_was_killed_after_the_commit(cloud: Bucket) -> None:
    """The old view is complete, but its epoch is gone: the next claim does not take it for that of the new epoch."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        items = ocp.args.Composite(old=Save(state(1)), config=ocp.args.JsonSave({"a": 1}))
        assert manager.save(1, args=items, metrics={"loss": 0.5})

    def refuse(request: Request) -> Fault | None:
        name = name_of(request)
        if name.startswith("_epochckpt/") or (request.kind == "PUT" and paths.save_id_in(name)):
            return None
        return Fault(status=403) if request.kind in ("PUT", "DELETE", "POST") else None

    with ec.CheckpointManager(url) as manager:
        manager.allow_overwrite(1)
        cloud.proxy.decide = refuse
        assert manager.save(1, args=ocp.args.Composite(new=Save(state(2))))
        with contextlib.suppress(RemovalError):
            manager.wait_until_finished()
    cloud.proxy.decide = lambda request: None
    assert f"1/{MARKER}" in names(url)
    with ec.CheckpointManager(url) as manager:
        manager.claim()
        assert eventually(lambda: "1/new/_METADATA" in names(url) and "1/config/metadata" not in names(url))
        assert eventually(lambda: manager.verify(1).view_damage == ())
    assert not {n for n in in_view(url, 1) if n.startswith(("1/old/", "1/config/", "1/metrics/"))}
    whole(url, 1)


def test_a_view_that_another_version_made_anew_is_not_written_at_each_claim(cloud: Bucket) -> None:
    """`repair_view` has written it: it differs from what the record says, and is as good."""
    url = cloud.new_url()

    def keep_old(request: Request) -> Fault | None:
        is_removal = request.kind in ("DELETE", "POST") and paths.save_id_in(name_of(request))
        return Fault(status=403) if is_removal else None

    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
        cloud.proxy.decide = keep_old
        manager.allow_overwrite(1)
        with contextlib.suppress(RemovalError):
            save(manager, 1)
        path = f"1/{manager.save_id(1)}.json"
    cloud.proxy.decide = lambda request: None
    store = open_store(url)
    record = checksums.parse_sealed(path, store.read(path, limit_bytes=1 << 20))
    record["orbax_view"][STEP_RECORD] = [1, checksums.digest(b" ")]  # the version that saved it wrote something else
    store.put(path, checksums.seal(record), draft="", replace=True)
    store.remove(f"1/{STEP_RECORD}")
    assert ec.repair_view(url, 1)
    cloud.proxy.requests.clear()
    with ec.CheckpointManager(url) as manager:
        manager.claim()
        assert eventually(lambda: any(name_of(each) == "1/_CHECKPOINT_METADATA" for each in cloud.proxy.requests))
        save(manager, 2)
    written = {name_of(each) for each in cloud.proxy.requests if each.kind == "PUT"}
    assert not [name for name in written if name.startswith("1/")]


def test_a_damaged_view_is_found_and_repaired(cloud: Bucket) -> None:
    """Files that are missing, cut or other; a copy of what a handler wrote; nothing else is touched."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        items = ocp.args.Composite(state=Save(state(1)), config=ocp.args.JsonSave({"a": 1}))
        assert manager.save(1, args=items)
    store = open_store(url)
    store.remove("1/state/_METADATA")
    store.put("1/state/index.0", b"x", draft="", replace=True)
    store.put("1/config/metadata", b"{}", draft="", replace=True)
    with ec.CheckpointManager(url) as manager:
        damage = manager.verify(1)
        assert damage.ok
        assert len(damage.view_damage) == 3
    assert ec.repair_view(url, 1) == ["config/metadata", "state/_METADATA", "state/index.0"]
    whole(url, 1)
    assert ec.repair_view(url, 1) == []
    assert not store.find("view-")


def test_a_run_that_was_paused_writes_over_no_newer_view(cloud: Bucket) -> None:
    """Its epoch was rolled back and saved again by a newer run: the view stays the newer one's."""
    url, reached, go = cloud.new_url(), threading.Event(), threading.Event()

    def hold(request: Request) -> Fault | None:
        name = name_of(request)
        if request.kind != "PUT" or not name.startswith("2/default/") or paths.save_id_in(name) or reached.is_set():
            return None
        reached.set()
        return Fault(held=go)

    older = ec.CheckpointManager(url)
    save(older, 1)
    cloud.proxy.decide = hold
    assert older.save(2, args=Save(state(20)))
    assert reached.wait(WAIT_SECS)
    with ec.CheckpointManager(url) as newer:
        newer.rollback_to(1)
        save(newer, 2)
    go.set()
    older.close()
    whole(url, 2)


def stock(cloud: Bucket, function: str, devices: int, **arguments: Any) -> Any:
    """What a function of stock_buckets answers, in a process with so many devices."""
    pytest.importorskip("gcsfs")  # how stock Orbax reaches gs://
    env = {**cloud.environment, "TENSORSTORE_GCS_HTTP_URL": cloud.proxy.url}
    (found,) = run_worker(
        f"tests.support.stock_buckets:{function}", arguments, 1, devices, timeout=110, env=env, imported=prepared.STOCK
    )
    return found


@pytest.mark.slow
def test_stock_orbax_restores_all_items_without_being_told(cloud: Bucket) -> None:
    """Arrays, JSON, a random key, metrics, metadata; what it cannot have stands in nobody's way."""
    url = cloud.new_url()
    key = jax.random.key(7)
    items = ocp.args.Composite(
        state=Save(stock_buckets.placed(stock_buckets.values(5))),
        config=ocp.args.JsonSave({"a": [1]}),
        key=ocp.args.JaxRandomKeySave(key),
        own=ec.args.NodeSave({"position": 3}),
    )
    with ec.CheckpointManager(url, storage=ec.StorageOptions(part_bytes=128)) as manager:  # the arrays are cut
        assert manager.save(5, args=items, metrics={"loss": 0.5}, custom_metadata={"by": "us"})
    whole(url, 5)
    assert stock(cloud, "read_all", 4, directory=url, epoch=5) == {
        "items": ["config", "key", "metrics", "own", "process_0", "state"],
        "state": True,
        "config": {"a": [1]},
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "metrics": {"loss": 0.5},
        "custom": {"by": "us"},
    }


@pytest.mark.slow
def test_stock_orbax_finds_the_unnamed_item_of_its_own_style(cloud: Bucket) -> None:
    """v0 what our v0 has saved, v1 what our v1 has; ours find both. See docs/orbax.md, "Names"."""
    if not hasattr(ocp.v1, "load"):
        pytest.skip("older Orbax")
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        manager.save(1, args=Save(stock_buckets.placed(stock_buckets.values(1))))
    with ec.training.Checkpointer(url) as trainer:
        trainer.save(2, stock_buckets.placed(stock_buckets.values(2)))
        for epoch in (1, 2):
            assert stock_buckets.equal(trainer.load(epoch), epoch)
            assert trainer.load_checkpointables(epoch).keys() == {"state"}
            target = ocp.args.StandardRestore(stock_buckets.abstract(epoch))
            assert stock_buckets.equal(trainer.manager.restore(epoch, args=target), epoch)
    of_v0, of_v1 = stock(cloud, "by_default", 8, directory=url, epochs=[1, 2])
    v0, v1, v1_by_name = of_v0
    assert (v0, v1_by_name) == (True, True)
    assert "dict_keys(['state']) for loading were not found" in v1
    v0, v1, _ = of_v1
    assert v1 is True
    assert "Must provide `args` of type `Composite`" in v0


@pytest.mark.slow
def test_a_clean_up_of_stock_orbax_leaves_committed_epochs(cloud: Bucket) -> None:
    """It removes every folder without a mark; those of the head and of epochs have one."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
        save(manager, 2)
    assert stock(cloud, "clean_up", 1, directory=url) == [1, 2]
    whole(url, 1)
    whole(url, 2)
    with ec.CheckpointManager(url) as manager:
        assert manager.restore(2)["n"] == 2


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("devices", [8, 4, 1])
def test_every_reader_of_stock_orbax_on_any_number_of_devices(cloud: Bucket, devices: int) -> None:
    url = cloud.new_url()
    with ec.CheckpointManager(url, storage=ec.StorageOptions(part_bytes=512)) as manager:
        for epoch in (1, 2):
            items = ocp.args.Composite(state=Save(stock_buckets.placed(stock_buckets.values(epoch))))
            assert manager.save(epoch, args=items, metrics={"loss": 1.0 / epoch})
    found = stock(cloud, "read", devices, directory=url, epoch=2, item="state")
    assert found == {"wrong": [], "steps": [1, 2], "metrics": {"loss": 0.5}, "devices": devices}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["plain", "linen", "nnx"])
def test_every_reader_restores_every_state_bit_for_bit(cloud: Bucket, name: str) -> None:
    """As on a file system; in the saved and in another sharding."""
    from tests.support import stock_states

    pytest.importorskip("gcsfs")
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        assert manager.save(5, args=Save(stock_states.STATES[name]()))
    env = {**cloud.environment, "TENSORSTORE_GCS_HTTP_URL": cloud.proxy.url}
    arguments = {"directory": url, "epoch": 5, "state": name}
    (found,) = run_worker(
        "tests.support.stock_reader:read", arguments, 1, 4, timeout=300, env=env, imported=prepared.STOCK
    )
    assert len(found) >= 10
    assert {k: v for k, v in found.items() if v} == {}


@pytest.mark.slow
def test_what_stock_orbax_wrote_is_read_continued_and_kept(
    cloud: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Values, JSON, metrics; beside epochs of ours; deleted, rolled back, and their numbers saved anew."""
    url = cloud.new_url()
    assert stock(cloud, "save", 4, directory=url, epochs=[1, 2, 5]) is None
    kept = {name for name in names(url) if name.startswith("5/")}
    with ec.CheckpointManager(url, options=Options(read_only=True)) as reader:
        assert list(reader.all_steps()) == [1, 2, 5]
        assert reader.metrics(2) == {"loss": 0.5}
        # TensorStore would ask another server: it is given a copy.
        assert stock_buckets.equal(reader.restore(5).state, 5)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", cloud.proxy.url)
    assert "the whole item is copied" in caplog.text
    caplog.clear()
    with ec.CheckpointManager(url) as manager:
        target = stock_buckets.abstract(2)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target), config=ocp.args.JsonRestore())
        found = manager.restore(2, args=items)
        assert stock_buckets.equal(found.state, 2)
        assert found.config == {"epoch": 2}
        assert manager.verify(2).ok
        assert "the whole item is copied" not in caplog.text
        manager.delete(1)
        manager.rollback_to(2)
        for epoch in (5, 6):
            assert manager.save(epoch, args=ocp.args.Composite(state=Save(state(epoch))), metrics={"loss": 0.1 / epoch})
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [2, 5, 6]
    writers = [(row.epoch, row.writer) for row in ec.inspect(url).epochs()]
    assert writers == [(2, "orbax"), (5, "epochckpt"), (6, "epochckpt")]
    with ec.CheckpointManager(url, options=Options(max_to_keep=1)) as again:
        assert list(again.all_steps()) == [2, 5, 6]
        assert stock_buckets.equal(again.restore(2)["state"], 2)
        assert again.restore(5)["state"]["n"] == 5
        whole(url, 5)
        assert again.save(7, args=ocp.args.Composite(state=Save(state(7))))
        again.wait_until_finished()
        assert list(again.all_steps()) == [7]
    (aside,) = {name.partition("/")[0] for name in names(url) if name.startswith("rolled-back-")}
    there = {name.removeprefix(f"{aside}/") for name in names(url) if name.startswith(aside)}
    assert there == kept
    assert not [name for name in names(url) if name.startswith(("1/", "2/"))]


def test_an_unfinished_step_of_stock_orbax_is_none(cloud: Bucket) -> None:
    """Without its mark it is foreign: it is not read, and nothing is saved over it."""
    url = cloud.new_url()
    store = open_store(url)
    store.create("1/_CHECKPOINT_METADATA", b'{"item_handlers": {"default": "x"}, "init_timestamp_nsecs": 1}')
    store.create("1/default/d/0", b"x")
    with ec.CheckpointManager(url, options=Options(read_only=True)) as reader:
        assert list(reader.all_steps()) == []
    assert names(url) == {"1/_CHECKPOINT_METADATA", "1/default/d/0"}
