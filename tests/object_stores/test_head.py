"""The head of a directory in an object store: what is refused without it, and how it is made anew."""

from __future__ import annotations

import json
import pathlib
import uuid

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.cli import main
from epochckpt.directory import directory_of
from epochckpt.directory.bucket import BucketDirectory
from epochckpt.format import paths
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store
from epochckpt.storage.object_store import ObjectStore
from epochckpt.testing import Faults
from tests.support.object_servers import Bucket, Fault

Save = ocp.args.StandardSave
Options = ocp.CheckpointManagerOptions


def save(manager: ec.CheckpointManager, *epochs: int) -> None:
    for epoch in epochs:
        args = Save({"w": jnp.full(3, epoch)})
        assert manager.save(epoch, args=args, metrics={"loss": float(epoch)}, force=True)
    manager.wait_until_finished()


def values(url: str) -> dict[int, float]:
    """What each epoch holds; all of it is verified."""
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        assert all(manager.verify(epoch).ok for epoch in manager.all_steps())
        return {epoch: float(manager.restore(epoch)["w"][0]) for epoch in manager.all_steps()}


def tree_of(store: Store) -> dict[str, bytes]:
    """All objects of a directory."""
    return {file.path: store.read(file.path, limit_bytes=file.size) for file in store.files("")}


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.mark.parametrize("loss", ["removed", "damaged"])
def test_a_lost_head_is_made_anew_from_the_records(url: str, loss: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing opens the directory before; then every epoch is there, those that were rolled back stay aside."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 1, 2, 3, 4)
        ec.attach_metrics(url, 2, {"accuracy": 0.5}, "evaluator")
        manager.rollback_to(2)
        save(manager, 3)
        fenced = ec.CheckpointManager(url)
    store = open_store(url)
    store.remove(paths.HEAD)
    if loss == "damaged":
        store.create(paths.HEAD, b"{")
    kind = errors.NotACheckpointDirectoryError if loss == "removed" else errors.DamagedError
    for look in (ec.CheckpointManager, lambda where: list(ec.follow(where, timeout_secs=0))):
        with pytest.raises(kind) as caught:
            look(url)
        assert f"epochckpt repair {url}" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert main.main(["repair", url]) == 0
    assert "can be taken in (--yes does so): 1, 2, 3" in capsys.readouterr().out
    left_out = "holds no commit record that can be used (epoch.json)"
    assert main.main(["repair", url, "--yes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["epochs"], len(found["aside"]), found["left_out"]) == ([1, 2, 3], 2, {"4": left_out})
    assert values(url) == {1: 1, 2: 2, 3: 3}
    with ec.CheckpointManager(url) as manager:
        assert manager.metrics(2) == {"loss": 2.0, "accuracy": 0.5}
        save(manager, 4)
    fenced.close()
    assert values(url) == {1: 1, 2: 2, 3: 3, 4: 4}
    assert ec.repair_head(url) == ec.manager.repair.HeadRepair("", (), (), {})  # type: ignore[attr-defined]


def test_the_folder_of_one_epoch_shows_what_was_attached_to_it(url: str) -> None:
    """As on a file system, though the head lies above it."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    ec.attach_metrics(url, 1, {"accuracy": 0.5}, "evaluator")
    (row,) = ec.inspect(f"{url}/1").epochs()
    assert row.metrics == {"loss": 1.0, "accuracy": 0.5}


def test_a_run_that_was_alive_is_fenced_off_by_a_repair(url: str) -> None:
    """The head that it knew is gone: its next save fails, and nothing of what was repaired changes."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
        open_store(url).remove(paths.HEAD)
        assert manager.save(2, args=Save({"w": jnp.ones(3)}))
        with pytest.raises(errors.SaveError, match="is gone"):
            manager.wait_until_finished()
        ec.repair_head(url)
        assert manager.save(2, args=Save({"w": jnp.ones(3)}))
        with pytest.raises(errors.FencedError):
            manager.wait_until_finished()
    assert values(url) == {1: 1}


def test_only_whole_epochs_are_taken_in(url: str) -> None:
    """A record without its data, and data without a record, are left alone, and said."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 1, 2, 3, 4)
        attempts = {epoch: manager.save_id(epoch) for epoch in manager.all_steps()}
    store = open_store(url)
    store.remove(paths.HEAD)
    store.remove(f"2/default/process_0/{attempts[2]}/default.safetensors")
    store.remove("3/epoch.json")  # the attempt's own record says as much
    store.remove("4/epoch.json")
    store.remove(f"4/{attempts[4]}.json")
    before = tree_of(store)
    found = ec.repair_head(url, write=False)
    assert tree_of(store) == before
    assert found.epochs == (1, 3)
    assert f"2/default/process_0/{attempts[2]}/default.safetensors is missing" in found.left_out["2"]
    assert "holds no commit record" in found.left_out["4"]
    ec.repair_head(url)
    assert values(url) == {1: 1, 3: 3}


def test_epochs_that_were_copied_into_a_directory_are_taken_in(url: str, tmp_path: pathlib.Path) -> None:
    """From another bucket directory, and from a file system; until then they are nobody's. A live run comes first."""
    with ec.CheckpointManager(f"{url}-other") as other, ec.CheckpointManager(tmp_path / "run") as local:
        save(other, 7)
        save(local, 8)
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
    source, target = open_store(f"{url}-other"), open_store(url)
    for path, data in tree_of(source).items():
        if path.startswith("7/"):
            target.create(path, data)
    for path in (tmp_path / "run" / "8").rglob("*"):
        if path.is_file():
            target.create(f"8/{path.relative_to(tmp_path / 'run' / '8')}", path.read_bytes())
    assert values(url) == {1: 1}
    with ec.CheckpointManager(url) as manager:
        manager.claim()
        assert "epochckpt repair" in ec.CheckpointManager(url).foreign_folders()[7]
        with pytest.raises(errors.InvalidArgumentError, match="may be alive"):
            ec.repair_head(url)
    assert ec.repair_head(url).epochs == (7, 8)
    node_files = ["8/process_0/node.json", "8/process_0/default.safetensors", "8/epoch.json"]
    assert set(tree_of(target)) >= set(node_files)
    assert values(url) == {1: 1, 7: 7, 8: 8}
    with ec.CheckpointManager(url) as manager:
        manager.delete(8)
        manager.delete(7)
    assert not target.exists("7")
    assert set(tree_of(target)) & set(node_files) == set()


def test_a_directory_of_a_file_system_has_no_head(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="is on a file system"):
        ec.repair_head(tmp_path)


def test_a_store_that_does_not_enforce_conditions_is_refused(cloud: Bucket) -> None:
    """Each of two runs would take itself for the only one: the first write there fails, and says why."""
    cloud.proxy.decide = lambda request: Fault(heedless=True)
    with ec.CheckpointManager(cloud.new_url()) as manager:
        manager.save(1, args=Save({"w": jnp.ones(3)}))
        with pytest.raises(errors.EpochCheckpointError, match="took a conditional write whose condition does not hold"):
            manager.wait_until_finished()


@pytest.mark.slow
def test_requests_of_a_head(cloud: Bucket) -> None:
    """Opening, following and saving cost the same, whatever the number of epochs."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, *range(12))
        with cloud.proxy.counted() as requests:
            save(manager, 12)
        view = 10 if cloud.scheme == "gs" else 0  # for stock Orbax, after the commit
        assert sum(requests.values()) <= 9 + view, requests
    with cloud.proxy.counted() as requests, ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        assert len(manager.all_steps()) == 13
    assert "LIST" not in requests
    with cloud.proxy.counted() as requests:
        assert list(ec.follow(url, after=11, timeout_secs=0)) == [12]
    assert "LIST" not in requests


@pytest.mark.slow
def test_keeping_the_metrics_of_deleted_epochs_costs_no_request(cloud: Bucket) -> None:
    """They go with the change that deletes the epoch."""
    counts = []
    for metrics in ({"note": "no number"}, {"loss": 1.0}):
        url = cloud.new_url()
        with ec.CheckpointManager(url, options=Options(max_to_keep=1)) as manager:
            for epoch in range(3):
                assert cloud.proxy.settle(60)
                with cloud.proxy.counted() as requests:
                    assert manager.save(epoch, args=Save({"w": jnp.ones(3)}), metrics=metrics)
                    manager.wait_until_finished()
        counts.append((len(ec.inspect(url).metrics()), dict(requests)))
    assert counts[0][1] == counts[1][1]
    assert [count for count, _ in counts] == [1, 3]


@pytest.mark.slow
def test_what_a_killed_run_began_is_removed_by_the_next(cloud: Bucket) -> None:
    """Its objects carry the name of its attempt; what it wrote for an epoch that is there by now goes, too."""
    url = cloud.new_url()
    with ec.CheckpointManager(url) as manager:
        save(manager, 1)
        writer = manager.components.directory.job_directory.writer
        writer.stage(2, dead := f"{writer.incarnation}-2-9")
        writer.stage(1, again := f"{writer.incarnation}-1-9")
        store = manager.components.directory.store
        for path in (f"2/process_0/{dead}/node.json", f"2/default/process_0/{dead}/x", f"1/process_0/{again}/x"):
            store.create(path, b"x")
    newer = directory_of(open_store(url), StepNames.of(Options()))
    assert isinstance(newer, BucketDirectory)
    writer = newer.claim()
    seen = set[str]()
    cloud.proxy.decide = lambda request: (
        None if request.target in seen else seen.add(request.target) or Fault(lost=True)
    )
    newer.sweep().remove_dead(newer.head.read().dead)  # type: ignore[union-attr]
    cloud.proxy.decide = lambda request: None
    assert not [path for path in tree_of(store) if "-9/" in path]
    writer.stage(3, f"{writer.incarnation}-3-0")
    assert newer.head.read().dead == {}  # type: ignore[union-attr]
    assert values(url) == {1: 1}
    assert isinstance(store, ObjectStore)
    np.testing.assert_array_equal(ec.CheckpointManager(url).restore(1)["w"], np.ones(3))


def test_what_comes_late_to_an_epoch_that_is_gone_is_in_nobodys_way(url: str) -> None:
    """Copies of a record and of metrics, or objects of a dead attempt: no epoch, and removed by the next claim."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 1, 2, 3, 4)
        ec.attach_metrics(url, 2, {"accuracy": 0.5}, "evaluator")
        store, save_id = open_store(url), manager.save_id(3)
        written = tree_of(store)
        manager.delete(2)
        manager.delete(3)
    for path, data in written.items():
        if path in ("2/epoch.json", "2/_metrics-evaluator.json") or (path.startswith("3/") and path != "3/epoch.json"):
            store.create(path, data)
    with ec.CheckpointManager(url) as manager:
        assert manager.all_steps() == [1, 4]
        manager.claim()
        assert not manager.foreign_folders()
        directory = manager.components.directory.epoch_directory
        assert isinstance(directory, BucketDirectory)
        directory.sweep().remove_dead({save_id: "3"})  # the claim does it in the background
        assert not store.exists("2")
        assert not store.exists("3")
        save(manager, 2, 3)
    assert values(url) == {1: 1, 2: 2, 3: 3, 4: 4}


def test_a_deleted_epoch_that_is_put_back_is_taken_in(url: str) -> None:
    """From a backup, with its record: no claim takes it for what a dead run left."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 1, 2)
        backup = {path: data for path, data in tree_of(open_store(url)).items() if path.startswith("1/")}
        manager.delete(1)
    for path, data in backup.items():
        open_store(url).create(path, data)
    with ec.CheckpointManager(url) as manager:
        save(manager, 3)
        assert manager.all_steps() == [2, 3]
    assert ec.repair_head(url).epochs == (1,)
    assert values(url) == {1: 1, 2: 2, 3: 3}


def test_a_late_copy_of_a_record_never_hides_a_newer_one(url: str, faults: Faults) -> None:
    """The older run stands still before it copies the record of its epoch, which is then saved anew."""
    with ec.CheckpointManager(url) as older, ec.CheckpointManager(url) as newer:
        with faults.hold(Store.create, where=lambda call: call.path == "1/epoch.json" and not copy.hits) as copy:
            assert older.save(1, args=Save({"w": jnp.zeros(3)}))
            assert copy.reached.wait(60)
            newer.reload()
            replaced = newer.save_id(1)
            newer.allow_overwrite(1)
            save(newer, 1)
        older.wait_until_finished()
        assert newer.save_id(1) != replaced
        assert json.loads(open_store(url).read("1/epoch.json", limit_bytes=2**20))["attempt"] == newer.save_id(1)


def test_a_rollback_that_was_killed_on_the_way_is_completed_by_the_next_claim(url: str, faults: Faults) -> None:
    """It is decided in the head; the copies for people follow."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 1, 2)
        with faults.fail(Store.put, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            manager.rollback_to(1)
    store = open_store(url)
    assert store.exists("2/epoch.json")
    with ec.CheckpointManager(url) as manager:
        manager.claim()
        (aside,) = [entry.name for entry in store.list("") if entry.name.startswith("rolled-back-")]
        assert store.exists(f"{aside}/2/epoch.json")
        assert not store.exists("2/epoch.json")
        save(manager, 2)
    assert values(url) == {1: 1, 2: 2}
