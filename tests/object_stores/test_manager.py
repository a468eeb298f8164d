"""Managers, jobs and commands on real servers of object stores."""

from __future__ import annotations

import pathlib
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.cli import main
from epochckpt.errors import (
    AccessError,
    DamagedError,
    EpochCheckpointError,
    RemovalError,
    StorageBehindError,
    StorageError,
    UnsupportedError,
)
from epochckpt.storage import Store, open_store
from tests.support.bucket_jobs import VALUES
from tests.support.job_runs import reading_job
from tests.support.object_servers import BUCKET, EMULATORS, Bucket, Fault, Request
from tests.support.processes import run_worker

Save, Restore, Options = ocp.args.StandardSave, ocp.args.StandardRestore, ocp.CheckpointManagerOptions


@pytest.fixture
def quick(patience: Callable[..., None]) -> None:
    """Pauses that a test need not wait for."""
    patience(request_pauses_secs=(0.0,) * 8)


def state(epoch: int) -> dict[str, Any]:
    params = {"w": jnp.arange(1000.0) + epoch, "b": jnp.ones(3)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "epoch": epoch}


def test_a_run_is_kept_and_continued(cloud: Bucket) -> None:
    """Retention by a metric, a second session, delete, rollback, and a reader beside it."""
    url = cloud.new_url()
    best = Options(max_to_keep=2, best_fn=lambda metrics: -metrics["loss"])
    with ec.CheckpointManager(url, options=best) as manager:
        for epoch in range(4):
            manager.save(epoch, args=Save(state(epoch)), metrics={"loss": abs(epoch - 1.0)})
        manager.wait_until_finished()
        assert manager.best_step() == 1
        reader = ec.CheckpointManager(url, options=Options(read_only=True))
        assert set(reader.all_steps()) == set(manager.all_steps())
        assert reader.metrics(1) == {"loss": 0.0}
        reader.close()
    with ec.CheckpointManager(url) as manager:
        for epoch in (4, 5, 6):
            manager.save(epoch, args=Save(state(epoch)))
        manager.wait_until_finished()
        manager.delete(5)
        back = manager.restore(6, args=Restore(jax.tree.map(jnp.zeros_like, state(0))))
        jax.tree.map(np.testing.assert_array_equal, back, state(6))
        manager.rollback_to(4)
        assert manager.latest_step() == 4
    with ec.CheckpointManager(url) as manager:
        assert manager.latest_step() == 4
        assert manager.restore(None)["epoch"] == 4


@pytest.mark.slow
def test_several_processes_save_and_others_restore(cloud: Bucket) -> None:
    """Two save, sharded; two, and then one, restore another cut. Both take an older epoch when one of them finds that
    the newest has lost an object, which the other one does not read."""
    url = cloud.new_url()
    kept = run_worker(
        "tests.support.bucket_jobs:save_sharded", {"directory": url, "epochs": [1, 2, 3]}, 2, 2, env=cloud.environment
    )
    assert kept == [[2, 3]] * 2
    for processes in (2, 1):
        found = run_worker(
            "tests.support.bucket_jobs:restore_sharded",
            {"directory": url, "axis": 1},
            processes,
            2,
            env=cloud.environment,
        )
        assert found == [[3, 3, VALUES.size // processes]] * processes
    lose(open_store(url), files_of(url, 3)[1], "lost")
    found = run_worker("tests.support.bucket_jobs:restore_newest", {"directory": url}, 2, 2, env=cloud.environment)
    assert found == [[[2, 3], 2, [2]]] * 2


def test_a_job_resumes_from_a_bucket(cloud: Bucket) -> None:
    url = cloud.new_url()
    totals: list[Any] = []
    with ec.CheckpointManager(url) as manager:
        session = ec.LocalSession()
        assert ec.JobRunner(reading_job(3, totals), manager)(session) == 3
    cloud.proxy.requests.clear()
    with ec.CheckpointManager(url) as manager:
        session, record = ec.LocalSession(), f"{manager.save_id(3)}.json"
        assert ec.JobRunner(reading_job(5, totals), manager, resume_from_epoch=3)(session) == 5
        targets = [urllib.parse.unquote(request.target) for request in cloud.proxy.requests if request.kind == "GET"]
        assert sum(target.endswith(f"/3/{record}") for target in targets) == 2, "once to open, once to restore"
        assert manager.all_steps() == [0, 1, 2, 3, 4, 5]


def test_commands_look_at_a_bucket(cloud: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        for epoch in (1, 2):
            manager.save(epoch, args=Save(state(epoch)))
    calls = [["ls"], ["show"], ["verify"], ["diff", 1, 2], ["stat", 2], ["tree", 2], ["gc"]]
    for call in [[call[0], url, *call[1:]] for call in calls]:
        code = main.main([str(word) for word in call])
        said = capsys.readouterr()
        assert code == (1 if call[0] == "diff" else 0), (call, said)
        assert said.out, call


@pytest.mark.slow
def test_what_is_done_around_a_run_works_in_buckets(cloud: Bucket, tmp_path: pathlib.Path) -> None:
    """Handlers, an evaluator's metrics, `follow`, copies from and to buckets, export, import; Caffe2's nodes do not."""
    url = cloud.new_url()
    handler = ec.metadata.JsonMetadataHandler()
    with ec.CheckpointManager(url, metadata_handler=handler) as manager:
        for epoch in (1, 2):
            manager.save(epoch, args=Save({"w": jnp.arange(4.0) + epoch}), metrics={"loss": 1.0})
        manager.wait_until_finished()
        assert handler.last_epoch() == 2
    ec.attach_metrics(url, 2, {"accuracy": 0.5}, "evaluator")
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        assert manager.metrics(2) == {"loss": 1.0, "accuracy": 0.5}
    assert next(iter(ec.follow(url))) is not None
    source = url
    for destination in (cloud.new_url(), str(tmp_path / "run"), cloud.new_url()):
        with ec.CheckpointManager(source) as manager:
            ec.LocalSession().run(ec.CopyUpload(destination).build(2, manager))
        source = destination
    with ec.CheckpointManager(source) as manager:
        assert manager.all_steps() == [2]
        np.testing.assert_array_equal(manager.restore(2)["w"], np.arange(4.0) + 2)
    ec.export(url, 2, tmp_path / "out", "safetensors")
    (file,) = (tmp_path / "out").glob("**/*.safetensors")
    assert ec.import_(file, cloud.new_url(), 0).state == "committed"
    with pytest.raises(UnsupportedError, match="atomic rename"):
        ec.caffe2.CheckpointManager(url, "n0", "epochckpt")


def test_a_bucket_that_may_only_be_read_is_read(cloud: Bucket) -> None:
    """A save there fails, and says why; what is there stays."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        manager.save(1, args=Save({"w": jnp.ones(3)}))
    cloud.proxy.decide = lambda request: Fault(status=403) if request.kind in ("PUT", "POST", "DELETE") else None
    with ec.CheckpointManager(url) as manager:
        np.testing.assert_array_equal(manager.restore(1)["w"], np.ones(3))
        manager.save(2, args=Save({"w": jnp.ones(3)}))
        with pytest.raises(EpochCheckpointError, match="writing is not permitted"):
            manager.wait_until_finished()
    with pytest.raises(AccessError, match="writing is not permitted"):
        ec.attach_metrics(url, 1, {"accuracy": 0.5}, "evaluator")
    cloud.proxy.decide = lambda request: None
    with ec.CheckpointManager(url) as manager:
        assert manager.all_steps() == [1]


@pytest.mark.parametrize("problem", ["no bucket", "forbidden"])
def test_what_cannot_be_reached_is_no_empty_directory(
    problem: str, cloud: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same clear error for a manager, a reader, a job and a command; nothing starts from scratch."""
    url = cloud.new_url()
    if problem == "no bucket":
        url = url.replace(BUCKET, f"no-{BUCKET}")
    else:
        with ec.CheckpointManager(url) as manager:
            manager.save(1, args=Save({"w": jnp.ones(3)}))
        cloud.proxy.decide = lambda request: Fault(status=403)
    said = "there is no such bucket" if problem == "no bucket" else "not permitted"
    for options in (Options(), Options(read_only=True)):
        with pytest.raises(AccessError, match=said) as caught:
            ec.CheckpointManager(url, options=options)
        assert str(caught.value).count(url) == 1, caught.value
    assert main.main(["ls", url]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_store_that_goes_away_fails_a_save_and_no_more(cloud: Bucket, quick: None) -> None:
    """The epoch that was there stays, and the next save goes on."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        manager.save(1, args=Save({"w": jnp.ones(3)}))
        manager.wait_until_finished()
        cloud.proxy.decide = lambda request: Fault(status=503)
        manager.save(2, args=Save({"w": jnp.ones(3)}))
        with pytest.raises(EpochCheckpointError, match="503"):
            manager.wait_until_finished()
        with pytest.raises(StorageError, match="503"):
            manager.restore(1)
        cloud.proxy.decide = lambda request: None
        manager.save(3, args=Save({"w": jnp.zeros(3)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]
        np.testing.assert_array_equal(manager.restore(1)["w"], np.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("server", EMULATORS, indirect=True)
def test_a_policy_that_keeps_objects_fails_no_save(cloud: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """What is deleted counts no more, and stays until the policy lets it go; the log says why, and so does `delete`."""
    url, forbidden = cloud.new_url(), EMULATORS[cloud.scheme].policy
    deletes = ("DELETE",) if cloud.scheme == "gs" else ("POST",)
    cloud.proxy.decide = lambda request: forbidden if request.kind in deletes else None
    with ec.CheckpointManager(url, options=Options(max_to_keep=1)) as manager:
        for epoch in (1, 2):
            manager.save(epoch, args=Save({"w": jnp.ones(3) * epoch}))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
    assert "a policy of the bucket (retention, hold or lock) forbids deleting" in caplog.text
    with ec.CheckpointManager(url) as manager:
        manager.save(3, args=Save({"w": jnp.ones(3)}))
        manager.wait_until_finished()
        manager.delete(2)
        with pytest.raises(RemovalError, match="forbids deleting"):
            manager.wait_until_finished()
        assert manager.all_steps() == [3]
        with pytest.raises(AccessError, match="forbids deleting"):
            open_store(url).remove("3/epoch.json")


def files_of(url: str, epoch: int) -> list[str]:
    """The data files of an epoch, by node."""
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        record = manager.components.directory.epoch_directory.read_record(epoch)
        folder = manager.components.directory.epoch_directory.folder(epoch)
        return [f"{folder}/{record.path(n, node.files[0])}" for n, node in enumerate(record.nodes)]


LOSSES: dict[str, Callable[[bytes], bytes | None]] = {
    "lost": lambda data: None,
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "other bytes": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


def lose(store: Store, path: str, loss: str) -> None:
    """What becomes of an object."""
    with store.open_reader(path) as reader:
        data = LOSSES[loss](bytes(reader.read(0, reader.size)))
    store.remove(path)
    if data is not None:
        store.create(path, data)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_restore_finds_what_became_of_an_object_and_takes_an_older_epoch(loss: str, cloud: Bucket) -> None:
    """Opening looks at no file. The named epoch is an error; the newest that is whole is restored, verified, and the
    next save takes the place of the damaged one."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        for epoch in (1, 2):
            manager.save(epoch, args=Save(state(epoch)))
    (path,) = files_of(url, 2)
    lose(open_store(url), path, loss)
    with ec.CheckpointManager(url) as manager:
        assert manager.all_steps() == [1, 2]
        with pytest.raises(DamagedError, match=path):
            manager.restore(2)
        assert not manager.verify(2).ok
        assert manager.restore(None)["epoch"] == 1
        assert manager.all_steps() == [1]
        manager.save(2, args=Save(state(22)))
        manager.wait_until_finished()
        assert manager.restore(2)["epoch"] == 22


@pytest.mark.slow
def test_a_job_resumes_from_an_older_epoch_when_the_newest_has_lost_an_object(cloud: Bucket) -> None:
    url, totals = cloud.new_url(), list[Any]()
    with ec.CheckpointManager(url) as manager:
        assert ec.JobRunner(reading_job(3, totals), manager)(ec.LocalSession()) == 3
    lose(open_store(url), files_of(url, 3)[0], "lost")
    with ec.CheckpointManager(url) as manager:
        runner = ec.JobRunner(reading_job(4, []), manager)
        assert runner(ec.LocalSession()) == 4
        assert runner.result.resumed_from == 2
        assert manager.all_steps() == [0, 1, 2, 3, 4]
        assert manager.verify(3).ok


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [1, 401])
def test_a_restore_is_one_request_for_each_file_and_two_for_the_record(leaves: int, cloud: Bucket) -> None:
    """The head, the record, what the node wrote, and one range of each of its files, however many leaves there are.

    The record of an attempt never changes: it is read once.
    """
    url = cloud.new_url()
    tree = {f"leaf{i}": jnp.full(64, float(i)) for i in range(leaves)}
    with ec.CheckpointManager(url) as manager:
        manager.save(1, args=ocp.args.Composite(state=Save(tree), config=ocp.args.JsonSave({"layers": 3})))
        manager.wait_until_finished()
        for epoch in range(2, 5):
            manager.save(epoch, args=ocp.args.Composite(state=Save(tree)))
    with cloud.proxy.counted() as counts:
        reader = ec.CheckpointManager(url, options=Options(read_only=True))
    assert set(counts) == {"GET"}
    assert counts["GET"] <= 3
    target = jax.tree.map(jnp.zeros_like, tree)
    both = ocp.args.Composite(state=Restore(target), config=ocp.args.JsonRestore())
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "with a target": (4, lambda: reader.restore(4, args=ocp.args.Composite(state=Restore(target)))),
        "as it was saved": (3, lambda: reader.restore(4)),
        "one leaf": (3, lambda: reader.restore_leaves(4, "leaf0")),
        "the newest": (4, lambda: reader.restore(None)),
        "its metrics": (1, lambda: reader.metrics(4)),
        "with JSON": (5, lambda: reader.restore(1, args=both)),
    }
    for what, (expected, call) in calls.items():
        with cloud.proxy.counted() as counts:
            got = call()
        assert counts == {"GET": expected}, what
    assert got.config == {"layers": 3}
    jax.tree.map(np.testing.assert_array_equal, got.state, tree)
    reader.close()


class Together:
    """Lets requests of one kind through when so many of them are there at the same time; counts them."""

    def __init__(self, count: int, kinds: tuple[str, ...]):
        self.met = dict.fromkeys(kinds, 0)
        self.under_way = self.most = 0
        self._meeting = {kind: threading.Barrier(count) for kind in kinds}
        self._count, self._lock = count, threading.Lock()

    def __call__(self, request: Request) -> Fault | None:
        target = urllib.parse.unquote(request.target)
        kind = next((kind for kind in self.met if kind in target and request.kind == "GET"), None)
        if kind is None:
            return None
        with self._lock:
            self.met[kind] += 1
            number = self.met[kind]
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        if number <= self._count:
            self._meeting[kind].wait(30)  # an error here is a failed request
        return Fault(withheld=self._end)

    def _end(self) -> None:
        with self._lock:
            self.under_way -= 1


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 1 << 30])
def test_values_of_nodes_are_restored_several_at_a_time(limit: int | None, cloud: Bucket) -> None:
    """Two requests for each node, and as many at once as `concurrency` allows, but for data where memory is bounded."""
    nodes, at_once, url = [f"n{i:02}" for i in range(12)], 4, cloud.new_url()
    values = {name: {"position": np.full(3, number)} for number, name in enumerate(nodes)}
    with ec.CheckpointManager(url, node=nodes) as manager:
        manager.save(1, args=ocp.args.Composite(own=ec.args.NodeSave(values, by_node=True)))
    asked = ec.args.NodeRestore(reshard=lambda old, before, now: [old] * now)
    storage = ec.StorageOptions(store={"concurrency": at_once}, restore_memory_limit_bytes=limit)
    with ec.CheckpointManager(url, options=Options(read_only=True), storage=storage) as manager:
        together = Together(at_once, ("node.json", "safetensors") if limit is None else ("node.json",))
        cloud.proxy.decide = together
        with cloud.proxy.counted() as counts:
            found = manager.restore(1, args=ocp.args.Composite(own=asked)).own
        assert counts["GET"] <= 2 + 2 * len(nodes)
    assert set(together.met.values()) == {len(nodes)}
    assert together.most == at_once
    jax.tree.map(np.testing.assert_array_equal, found, [*values.values()])


@pytest.mark.slow
def test_a_client_that_breaks_down_fails_the_save_at_once(cloud: Bucket, quick: None) -> None:
    """It panics when it is to wait for no time at all before it repeats the beginning of an upload."""
    large = jnp.zeros(3 << 20)
    with ec.CheckpointManager(cloud.new_url()) as manager:
        cloud.proxy.decide = lambda request: Fault(status=503) if request.kind == "POST" else None
        assert manager.save(1, args=Save({"w": large}))
        with pytest.raises(ec.errors.SaveError, match=r"writing failed: the client has broken down: .*empty range"):
            manager.wait_until_finished()
        cloud.proxy.decide = lambda request: None
        assert manager.save(2, args=Save({"w": large}))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]


def held(go_on: threading.Event) -> Callable[[Request], Fault | None]:
    """No arrays are written until the event is set."""
    return lambda request: Fault(held=go_on) if request.kind == "PUT" and "safetensors" in request.target else None


def test_a_store_that_is_away_holds_training_for_no_longer_than_it_may(cloud: Bucket) -> None:
    """The third save fails within its bound, and says why; the two before it are committed when the store answers."""
    go_on = threading.Event()
    with ec.CheckpointManager(cloud.new_url(), storage=ec.StorageOptions(max_blocked_secs=0.05)) as manager:
        cloud.proxy.decide = held(go_on)
        try:
            for epoch in (1, 2, 3):
                assert manager.save(epoch, args=Save({"w": jnp.ones(3)}))
            with pytest.raises(
                StorageBehindError, match=r"checkpoint 3 .*storage is behind: .* the save of checkpoint 1, which"
            ):
                manager.check_for_errors()
        finally:
            go_on.set()
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]


@pytest.mark.slow
def test_a_run_outlives_a_store_that_is_away_and_saves_its_last_epoch(cloud: Bucket) -> None:
    """No save begins while two are waiting; that is not too many failures in a row. The last epoch is saved in the end,
    also where its first try had to fail."""
    go_on = threading.Event()
    with ec.CheckpointManager(cloud.new_url(), storage=ec.StorageOptions(max_blocked_secs=0.05)) as manager:
        wait = manager.wait_until_finished

        def answer_again() -> None:
            if manager.is_saving_in_progress():  # the last epoch is trained
                go_on.set()
            wait()

        manager.wait_until_finished = answer_again
        runner = ec.JobRunner(reading_job(8, []), manager, max_consecutive_save_failures=0)
        cloud.proxy.decide = held(go_on)
        try:
            assert runner(ec.LocalSession()) == 8
        finally:
            go_on.set()
        failed = dict(runner.result.failed_saves)
        assert sorted(failed) == [2, 3, 4, 5, 6, 7, 8]
        assert all("storage is behind" in reason for reason in failed.values())
        assert (runner.result.last_committed_epoch, runner.result.unsaved, runner.result.exit_code) == (8, "", 0)
        assert manager.all_steps() == [0, 1, 8]


@pytest.mark.slow
def test_lost_answers_cost_no_save(cloud: Bucket, quick: None) -> None:
    """Every third answer is lost, of whatever request: each save is committed, none twice, nothing is damaged."""
    url, count = cloud.new_url(), [0]

    def decide(request: Any) -> Fault | None:
        count[0] += 1
        return Fault(lost=True) if count[0] % 3 == 0 else None

    cloud.proxy.decide = decide
    with ec.CheckpointManager(url, options=Options(max_to_keep=3)) as manager:
        for epoch in range(6):
            manager.save(epoch, args=Save(state(epoch)))
        manager.wait_until_finished()
        manager.delete(4)
        manager.rollback_to(3)
    with ec.CheckpointManager(url) as manager:
        assert manager.all_steps() == [3]
        jax.tree.map(np.testing.assert_array_equal, manager.restore(3, args=Restore(state(0))), state(3))
    assert count[0] > 100


@pytest.mark.slow
@pytest.mark.parametrize("server", ["gs"], indirect=True)  # moto takes twice the time
def test_memory_of_a_save_is_bounded(cloud: Bucket) -> None:
    """A gigabyte goes to a bucket through less than a quarter of it, and through less with less concurrency."""
    grown = []
    for query in ("", "?concurrency=2"):
        args = {"directory": cloud.new_url() + query, "arrays": 10, "megabytes": 100}
        grown += run_worker(
            "tests.support.bucket_jobs:memory_of_a_save", args, 1, 1, timeout=300, env=cloud.environment
        )
    assert grown[1] < grown[0] < 250, f"{grown} MB"
