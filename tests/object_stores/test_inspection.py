"""Looking at a bucket: what is shown, what that costs in requests, and what gc may remove there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.cli import main
from epochckpt.directory import directory_of
from epochckpt.directory.bucket import CHECKED_REQUESTS, BucketDirectory
from epochckpt.directory.bucket_contents import LISTED
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_changes import BeginSave, Incarnation, TakeIn
from epochckpt.directory.head_record import Head, parse
from epochckpt.errors import AccessError, FormatError, NotACheckpointDirectoryError, StorageError
from epochckpt.format import checksums, paths
from epochckpt.inspection import epoch_rows, gc, scan, text, views
from epochckpt.inspection.rows import COMMITTED, DAMAGED, EpochRow, Overview
from epochckpt.inspection.watch import DELETED, FAILED, SAVED, SAVING, Watcher
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store
from tests.support import bucket_jobs, stock_steps
from tests.support.object_servers import Bucket, Fault, Request, bucket
from tests.support.processes import start_processes

Save, Options = ocp.args.StandardSave, ocp.CheckpointManagerOptions
NODES = [f"process_{i}" for i in range(4)]
BUDGET = 20  # requests to show a directory
PAGES = 3  # of the head of 500 epochs, which the first look reads


def save(manager: ec.CheckpointManager, *epochs: int) -> None:
    for epoch in epochs:
        assert manager.save(epoch, args=Save({"w": jnp.arange(100.0) + epoch}), metrics={"loss": 1 / (epoch + 1)})
    manager.wait_until_finished()


def opened(url: str, **options: Any) -> ec.CheckpointManager:
    return ec.CheckpointManager(url, node=NODES, options=Options(**options))


def new_memory() -> str:
    """A directory where requests are not counted."""
    return f"memory://{uuid.uuid4().hex}/run"


def epoch_directory(url: str) -> BucketDirectory:
    found = directory_of(open_store(url), StepNames.of(Options()))
    assert isinstance(found, BucketDirectory)
    return found


def next_week() -> float:
    """A clock: nothing that is there now was written to for a week."""
    return time.time() + 7 * gc.DAY_SECS


def lengthen(url: str, count: int) -> None:
    """Adds older epochs to the head, whose objects would be missed by whoever asks for them."""
    found = epoch_directory(url)
    head = found.head.read()
    assert head is not None
    entries = list(head.epochs.values())

    def older(epoch: int) -> EpochSummary:
        like = entries[epoch % len(entries)]
        metrics = {"loss": 2.0 + epoch / 1000, "accuracy": epoch / 1234.5}
        return dataclasses.replace(like, save_id=f"{head.incarnation}-{epoch}-0", metrics=metrics)

    epochs = {str(epoch): older(epoch) for epoch in range(count)}
    found.head.write(TakeIn(root=url, epochs=epochs, aside={}, expected=head.change))


@pytest.fixture(scope="module")
def long_run(server: Bucket) -> str:
    """A run of 500 epochs, of which the newest 8 were saved. Not to be changed."""
    url = server.new_url()
    with opened(url) as manager:
        save(manager, *range(492, 500))
    lengthen(url, 492)
    return url


def named(request: Request) -> str:
    """The object that a request is about."""
    return urllib.parse.unquote(request.target).partition("?")[0]


@contextlib.contextmanager
def within(cloud: Bucket, most: int) -> Iterator[dict[str, int]]:
    """At most so many requests."""
    with cloud.proxy.counted() as counts:
        yield counts
    assert sum(counts.values()) <= most, counts


@pytest.mark.slow
def test_many_epochs_are_listed_in_few_requests(
    long_run: str, cloud: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, with the best one too, in a notebook, and as rows; only what is checked is read."""
    with within(cloud, BUDGET) as counts:
        assert main.main(["ls", long_run]) == 0
    said = capsys.readouterr().out
    assert "500 epochs" in said
    assert "files of 45 epochs not looked at" in said
    assert counts["LIST"] <= 1 + CHECKED_REQUESTS
    with within(cloud, BUDGET):
        assert main.main(["ls", long_run, "--metric", "loss", "--mode", "min", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["epochs"]
    assert [row["epoch"] for row in shown if row["best"]] == [499]
    assert [row["epoch"] for row in shown if row["checked"]] == [495, 496, 497, 498, 499]
    with within(cloud, BUDGET):
        assert "500 epochs" in ec.inspect(long_run)._repr_html_()
    for epoch, most in (("499", 10 + PAGES), ("latest", 12 + PAGES)):
        with within(cloud, most):
            assert main.main(["show", long_run, epoch]) == 0
    run = ec.inspect(long_run)
    with within(cloud, 3 + PAGES):
        rows = run.epochs()
    assert [row.epoch for row in rows] == list(run) == list(range(500))
    assert len(open_store(long_run).read(paths.HEAD, limit_bytes=10**7)) < 200_000


@pytest.mark.slow
def test_a_row_says_the_same_whether_its_record_was_read_or_not(long_run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the views show of epochs in a list is in the head; an epoch that is opened has the rest."""
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)  # ages
    found = epoch_directory(long_run)
    assert len(found.entries()) == 500
    briefly = [
        row for epoch in range(492, 500) if isinstance(row := epoch_rows.brief(found, str(epoch), epoch), EpochRow)
    ]
    full = [epoch_rows.read(found, str(epoch), epoch) for epoch in range(492, 500)]
    assert all(isinstance(row, EpochRow) for row in full)

    def shown(rows: list[Any]) -> str:
        return text.to_text(text.render(views.of(Overview(long_run, tuple(rows)))), 200)

    assert shown(briefly) == shown(full)
    assert "█" in shown(briefly)
    assert [row.slowest_node for row in briefly] == [row.slowest_node for row in full if isinstance(row, EpochRow)]
    assert briefly[0].custom_metadata is briefly[0].notes is briefly[0].nodes[0].nbytes is None
    assert ec.inspect(long_run)[499].row.custom_metadata == {}


def test_the_head_has_the_seconds_of_few_nodes_only() -> None:
    """Of more than 16 nodes they are in the records: the bars of those that were not read stay empty."""
    url = new_memory()
    with ec.CheckpointManager(url, node=[f"n{i}" for i in range(17)]) as manager:
        for epoch in range(7):
            manager.save(epoch, args=Save({"w": jnp.ones(3)}))
        manager.wait_until_finished()
    head = epoch_directory(url).head.read()
    assert head is not None
    assert [(entry.nodes, dict(entry.node_secs)) for entry in head.epochs.values()] == [(17, {})] * 7
    rows = scan.look(url).epochs
    assert [len(row.nodes) for row in rows] == [0, 0, 17, 17, 17, 17, 17]
    assert "n16" in ec.inspect(url).to_html()


@pytest.mark.parametrize("check", [True, False])
def test_who_attached_metrics_is_told_with_and_without_a_look_at_the_files(check: bool) -> None:
    url = new_memory()
    with ec.CheckpointManager(url) as manager:
        manager.save(1, args=Save({"w": jnp.ones(3)}), metrics={"loss": 0.5})
    ec.attach_metrics(url, 1, {"score": 0.25}, "evaluator")
    (row,) = scan.look(url, check=check).epochs
    assert (row.metrics, row.sources) == ({"loss": 0.5, "score": 0.25}, {"score": "evaluator"})


@pytest.mark.parametrize("entry", [[0, 0.5], [1], [0, 1.0, "a"], [0, 1.0, float("1e301")], [-1, 1.0, 2.0], ["0", 1, 2]])
def test_a_head_whose_seconds_do_not_fit_its_nodes_is_refused(entry: list[Any]) -> None:
    made = EpochSummary("a-1-0", 1, 2, 3, 2, 0.1, 0.2, None, node_secs={"a": 1.0, "b": 2.0})
    data = Head(epochs={"1": made}).to_bytes()
    assert parse("head", data).epochs["1"] == made
    head = json.loads(data)
    head["epochs"]["1"]["node_secs"] = entry
    del head["checksum"]
    with pytest.raises(FormatError, match="node_secs"):
        parse("head", checksums.seal(head))


@pytest.mark.slow
def test_damage_is_seen_where_files_are_looked_at(cloud: Bucket) -> None:
    """A file that is gone makes its epoch damaged; an older epoch says that nobody has looked, until it is opened."""
    url = cloud.new_url()
    with opened(url) as manager:
        save(manager, *range(8))
        attempts = {epoch: manager.save_id(epoch) for epoch in (0, 6, 7)}
    store = open_store(url)
    store.remove(f"7/{attempts[7]}.json")
    store.remove("7/epoch.json")
    for epoch in (0, 6):
        store.remove(f"{epoch}/default/process_0/{attempts[epoch]}/default.safetensors")
    found = scan.look(url)
    rows = {row.epoch: row for row in found.epochs}
    assert [epoch for epoch, row in rows.items() if row.state == DAMAGED] == [6, 7]
    assert (rows[5].latest, rows[5].checked, rows[0].checked) == (True, True, False)
    assert rows[6].detail.endswith("default.safetensors: is missing")
    assert f"7/{attempts[7]}.json: is missing, and {paths.HEAD} names it" in rows[7].detail
    assert "files of 3 epochs not looked at" in text.to_text(text.render(views.of(found)))
    assert ec.inspect(url)[0].row.state == DAMAGED


@pytest.mark.slow
def test_what_a_store_refuses_is_no_damage(cloud: Bucket) -> None:
    """An answer that says nothing about the data ends the look with an error; without listing, epochs are shown."""
    url = cloud.new_url()
    with opened(url) as manager:
        save(manager, 1)
        name = f"{manager.save_id(1)}.json"
    cloud.proxy.decide = lambda request: Fault(status=400) if named(request).endswith(name) else None
    for look in (lambda: scan.look(url), lambda: ec.inspect(url)[1].row):
        with pytest.raises(StorageError, match="400"):
            look()
    cloud.proxy.decide = lambda request: Fault(status=403) if request.kind == "LIST" else None
    found = scan.look(url, check=False)
    assert [(row.epoch, row.state) for row in found.epochs] == [(1, COMMITTED)]
    assert "not permitted" in found.problems["what lies beside the epochs"]
    with pytest.raises(AccessError, match="not permitted"):
        scan.look(url)


# -- a live run ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_look_at_a_run_that_does_nothing_is_one_request(long_run: str, cloud: Bucket) -> None:
    """Of `watch`, and of `follow`, which reads no record at all."""
    watcher = Watcher(epoch_directory(long_run))
    with within(cloud, 7 + PAGES):
        assert len(watcher.look()) == 500
    with cloud.proxy.counted() as counts:
        assert watcher.look() == []
    assert counts == {"GET": 1}
    with cloud.proxy.counted() as counts:
        assert list(ec.follow(long_run, timeout_secs=0)) == list(range(500))
    assert counts == {"GET": 1 + PAGES}


def stopped_at(cloud: Bucket, ending: str) -> tuple[threading.Event, threading.Event]:
    """Requests that write objects with such an ending wait, and are lost then: (one has come, let them go)."""
    reached, go_on = threading.Event(), threading.Event()

    def decide(request: Request) -> Fault | None:
        if request.kind not in ("PUT", "POST") or not named(request).endswith(ending):
            return None
        reached.set()
        return Fault(held=go_on, reset=True)

    cloud.proxy.decide = decide
    return reached, go_on


def test_a_save_under_way_is_watched_by_one_listing(cloud: Bucket) -> None:
    url = cloud.new_url()
    with opened(url) as manager:
        save(manager, 1)
        watcher = Watcher(epoch_directory(url))
        assert [(event.kind, event.row.epoch) for event in watcher.look()] == [(SAVED, 1)]
        reached, go_on = stopped_at(cloud, "process_3/" + str(manager.save_id(1)).replace("-1-", "-2-") + "/node.json")
        try:
            manager.save(2, args=Save({"w": jnp.arange(100.0)}))
            assert reached.wait(60)
            (event,) = watcher.look()
            assert (event.kind, event.row.epoch) == (SAVING, 2)
            assert event.done is not None
            with cloud.proxy.counted() as counts:
                watcher.look()
            assert counts == {"GET": 1, "LIST": 1}
        finally:
            cloud.proxy.decide = lambda request: None
            go_on.set()
        manager.wait_until_finished()
        assert [(event.kind, event.row.epoch) for event in watcher.look()] == [(SAVED, 2)]
        manager.delete(1)
        manager.wait_until_finished()
        assert [(event.kind, event.row.epoch) for event in watcher.look()] == [(DELETED, 1)]
        cloud.proxy.decide = lambda request: Fault(status=400) if named(request).endswith("node.json") else None
        manager.save(3, args=Save({"w": jnp.arange(100.0)}))
        with pytest.raises(ec.errors.SaveError):
            manager.wait_until_finished()
        cloud.proxy.decide = lambda request: None
        assert {event.kind for event in watcher.look()} <= {FAILED, SAVING}
        assert scan.look(url).epochs[-1].epoch == 2


@pytest.mark.slow
def test_a_slow_evaluator_is_not_given_what_was_deleted_meanwhile(cloud: Bucket) -> None:
    """While it scores one epoch, others go: the head is read again before the next is handed out."""
    url = cloud.new_url()
    with opened(url) as manager:
        save(manager, *range(6))
        seen = []
        for epoch in ec.follow(url, timeout_secs=0, interval_secs=1e-9):
            seen.append(epoch)
            if epoch == 1:
                manager.delete(2)
                manager.delete(3)
                manager.wait_until_finished()
        assert seen == [0, 1, 4, 5]


# -- what else lies there --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_lies_beside_the_epochs_is_told_apart(cloud: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    """Epochs that were rolled back, copies, other people's folders, late objects: nothing of it is an epoch, `du` adds
    all of it up, and gc removes only what the head has named."""
    url = cloud.new_url()
    with opened(url) as manager:
        save(manager, 1, 2, 3, 4)
        manager.rollback_to(3)
        save_id = str(manager.save_id(2))
    store = open_store(url)
    incarnation = save_id.partition("-")[0]
    for file in store.files("2"):
        store.copy(f"2/{file.path}", f"77/{file.path}")
    store.create("88/saved_model.pb", b"x" * 100)
    store.create("notes/readme", b"hello")
    for late in (f"2/process_0/{incarnation}-2-7/node.json", f"9/process_0/{incarnation}-9-7/node.json"):
        store.create(late, b"late")
    found = scan.look(url)
    assert [(row.epoch, row.state) for row in found.epochs] == [(e, COMMITTED) for e in (1, 2, 3)] + [(9, "abandoned")]
    assert {row.path.partition("-")[0]: row.kind for row in found.leftovers} == {
        "77": "foreign",
        "88": "foreign",
        "rolled": "rolled back",
    }
    details = {row.path: row.detail for row in found.leftovers}
    assert "a copy of checkpoint 2" in details["77"]
    with cloud.proxy.counted() as counts:
        assert main.main(["du", url, "--json"]) == 0
    assert counts.keys() == {"GET", "LIST"}
    assert counts["GET"] == 5  # of which three are of records, which may say what the job counts
    said = json.loads(capsys.readouterr().out)
    every = store.files("")
    assert (said["nbytes"], said["files"]) == (sum(file.size for file in every), len(every))
    kinds = {row["kind"]: row for row in said["kinds"]}
    assert {kind: row["things"] for kind, row in kinds.items()} == {
        "committed": 3,
        "abandoned": 2,
        "rolled back": 1,
        "foreign": 2,
        "other": 2,
    }
    assert kinds["rolled back"]["nbytes"] > sum(file.size for file in store.files("4"))
    assert kinds["committed"]["oldest_ns"] <= kinds["committed"]["newest_ns"]
    assert main.main(["du", url]) == 0
    assert "rolled back" in capsys.readouterr().out
    assert gc.collect(url, delete=True).rows == ()
    removed = gc.collect(url, delete=True, clock=next_week)
    assert [row.path for row in removed.rows] == [f"2/{incarnation}-2-7", f"9/{incarnation}-9-7"]
    assert removed.kept.keys() == {row.path for row in found.leftovers}
    removed = gc.collect(url, delete=True, clock=next_week, epochs_too=True)
    assert [row.epochs for row in removed.rows] == [(4,)]
    assert not store.files("4")
    assert len(store.files("77")) == len(store.files("2"))
    with opened(url) as manager:
        assert all(manager.verify(epoch).ok for epoch in (1, 2, 3))


def test_a_copied_epoch_survives_the_next_run() -> None:
    """One that was deleted, and that somebody has put back from a copy: nobody sweeps it, and repair takes it in."""
    url, kept = new_memory(), new_memory()
    with opened(url) as manager:
        save(manager, 1, 2)
        store, elsewhere = open_store(url), open_store(kept)
        copied = {file.path: store.read(f"1/{file.path}", limit_bytes=file.size) for file in store.files("1")}
        manager.delete(1)
        manager.wait_until_finished()
        assert not store.files("1")
    for path, data in copied.items():
        store.create(f"1/{path}", data)
        elsewhere.create(f"1/{path}", data)
    with opened(url) as manager:
        save(manager, 3)
        manager.wait_until_finished()
    assert {file.path for file in store.files("1")} == copied.keys()
    assert [row.kind for row in scan.look(url).leftovers] == ["foreign"]
    assert gc.collect(url, delete=True, clock=next_week, epochs_too=True).rows == ()
    ec.repair_head(url)
    assert [row.epoch for row in scan.look(url).epochs] == [1, 2, 3]
    with pytest.raises(NotACheckpointDirectoryError, match="epochckpt repair"):
        scan.look(kept)
    assert [row.state for row in scan.look(f"{kept}/1").epochs] == [COMMITTED]
    assert ec.inspect(f"{kept}/1").latest.detail().items[0].name == "default"  # type: ignore[union-attr]


def test_a_late_object_of_an_upload_is_no_obstacle_to_the_next_one(tmp_path: pathlib.Path) -> None:
    """Its id is of no run of this directory, so that a claim takes its folder for somebody else's."""
    url, source = new_memory(), str(tmp_path / "source")
    bucket_jobs.save_some(url, [1])
    bucket_jobs.save_some(source, [2])
    with ec.CheckpointManager(source) as manager:
        open_store(url).create(f"2/process_0/{manager.save_id(2)}-late/node.json", b"late")
    with ec.CheckpointManager(url) as manager:
        manager.claim()
    assert epoch_directory(url).scan() == ([1], {2: "2"})
    bucket_jobs.upload(source, url, 2)
    assert epoch_directory(url).scan() == ([1, 2], {})


@pytest.mark.slow
def test_many_dead_saves_do_not_cost_many_requests(cloud: Bucket) -> None:
    """Some are looked at, and the others are said."""
    url = cloud.new_url()
    with opened(url) as manager:
        save(manager, 1)
        found = epoch_directory(url)
        head = found.head.read()
        assert head is not None
    begun = {f"{head.incarnation}-{epoch}-0": str(epoch) for epoch in range(10, 30)}
    run = Incarnation(url, head.incarnation)
    for save_id, folder in begun.items():
        found.store.create(f"{folder}/process_0/{save_id}/node.json", b"half")
        found.head.write(BeginSave(incarnation=run, epoch=int(folder), folder=folder, save_id=save_id))
    with within(cloud, BUDGET):
        seen = scan.look(url)
    attempts = [row for row in seen.epochs if row.state != COMMITTED]
    assert len(attempts) == LISTED
    (problem,) = seen.problems.values()
    assert "16 more folders hold" in problem
    assert len(epoch_directory(url).contents().all_leftovers().saves) == 20


def test_a_clock_that_is_ahead_of_the_store_makes_nothing_old(cloud: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts for a removal is the time at which the store dates a change that is made now."""
    url = cloud.new_url()
    with opened(url) as manager:
        save(manager, 1)
        save_id = str(manager.save_id(1)).replace("-1-", "-5-")
    open_store(url).create(f"5/process_0/{save_id}/node.json", b"half")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 7 * gc.DAY_SECS)
    found = gc.collect(url, delete=True, clock=time.time)
    assert found.rows == ()
    assert "was written to it" in found.kept[f"5/{save_id}"].reason
    assert open_store(url).files("5")


# -- killed processes ------------------------------------------------------------------------------------------------


def kill(cloud: Bucket, function: str, arguments: Mapping[str, Any], ending: str) -> None:
    """Kills a process when it writes an object with this ending; the object is never written."""
    reached, go_on = stopped_at(cloud, ending)
    program = ["-m", "tests.support.worker", f"tests.support.bucket_jobs:{function}", json.dumps(arguments)]
    try:
        with start_processes(program, num_processes=1, env=cloud.environment) as job:
            while not reached.wait(0.1):
                assert job[0].returncode is None, job[0].output
            job[0].kill()
            assert job[0].wait_for_exit(30)
    finally:
        cloud.proxy.decide = lambda request: None
        go_on.set()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a save", "an upload"])
def test_what_a_killed_process_left_is_removed_when_it_is_old(what: str, cloud: Bucket, tmp_path: pathlib.Path) -> None:
    """And not before; the epoch that was there stays, and the number can be saved again."""
    url = cloud.new_url()
    bucket_jobs.save_some(url, [1])
    if what == "a save":
        kill(cloud, "save_some", {"directory": url, "epochs": [2]}, "/node.json")
    else:
        source = str(tmp_path / "source")
        bucket_jobs.save_some(source, [2])
        kill(cloud, "upload", {"source": source, "destination": url, "epoch": 2}, "/node.json")
    head = epoch_directory(url).head.read()
    assert head is not None
    ((save_id, folder),) = head.begun.items()
    assert folder == "2"
    states = [(row.epoch, row.state, row.latest) for row in scan.look(url).epochs]
    assert states == [(1, COMMITTED, True), (2, "in progress", False)]
    found = gc.collect(url, delete=True)
    assert (found.rows, list(found.kept)) == ((), [f"2/{save_id}"])
    removed = gc.collect(url, delete=True, clock=next_week)
    assert [row.path for row in removed.rows] == [f"2/{save_id}"]
    assert removed.nbytes > bucket_jobs.VALUES.nbytes
    assert not open_store(url).files("2")
    head = epoch_directory(url).head.read()
    assert head is not None
    assert not head.begun
    assert not head.dead
    assert gc.collect(url, clock=next_week).rows == ()
    bucket_jobs.save_some(url, [2])
    with ec.CheckpointManager(url) as manager:
        for epoch in (1, 2):
            np.testing.assert_array_equal(manager.restore(epoch)["w"], bucket_jobs.VALUES + epoch)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_500_saved_epochs_are_listed_in_few_requests(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them there, with pages of a thousand names as the real services have."""
    with bucket(scheme, page=1000) as cloud:
        url = cloud.new_url()
        with opened(url) as manager:
            for epoch in range(500):
                save(manager, epoch)
        for call in (["ls", url], ["ls", url, "--limit", "0"], ["ls", url, "--metric", "loss", "--mode", "max"]):
            with within(cloud, BUDGET):
                assert main.main(call) == 0
            assert "500 epochs" in capsys.readouterr().out
        with within(cloud, BUDGET):
            assert "500 epochs" in ec.inspect(url)._repr_html_()
        # The head twice, its pages, and the records of three epochs, of which one may say what its number counts.
        with within(cloud, 10 + len(open_store(url).files("")) // 1000):
            assert main.main(["du", url]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_a_bucket_of_stock_orbax_has_its_head_looked_for_a_few_times(cloud: Bucket, tmp_path: pathlib.Path) -> None:
    """There is none, and no step costs another request for it."""
    stock_steps.simple(tmp_path, *range(1, 9))

    def looks_for_head(count: int) -> int:
        url = cloud.new_url()
        stock_steps.upload(tmp_path, url, *range(1, count + 1))
        cloud.proxy.requests.clear()
        assert len(scan.look(url, check=False).epochs) == count
        return sum(paths.HEAD in urllib.parse.unquote(request.target) for request in cloud.proxy.requests)

    assert looks_for_head(8) == looks_for_head(2) <= 6
