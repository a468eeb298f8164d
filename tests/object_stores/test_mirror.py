"""A directory on a file system with a mirror in a bucket."""

from __future__ import annotations

import logging
import pathlib
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.directory import directory_of
from epochckpt.directory.bucket import BucketDirectory
from epochckpt.errors import InvalidArgumentError, StorageError, UnsupportedError
from epochckpt.format import paths
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store
from tests.support import mirror_jobs
from tests.support.object_servers import Bucket, Fault, Request
from tests.support.processes import run_worker, start_processes

GOOGLE = pytest.mark.parametrize("server", ["gs"], indirect=True)
Save, Restore, Options = ocp.args.StandardSave, ocp.args.StandardRestore, ocp.CheckpointManagerOptions


@pytest.fixture
def quick(patience: Callable[..., None]) -> None:
    """Pauses that a test need not wait for."""
    patience(request_pauses_secs=(0.0,) * 3, mirror_pauses_secs=(0.01, 0.05))


def opened(directory: pathlib.Path, mirror: str, keep: int | None = None, **options: Any) -> ec.CheckpointManager:
    storage = ec.StorageOptions(mirror=mirror, **options)
    return ec.CheckpointManager(directory, options=Options(max_to_keep=keep), storage=storage)


def save(manager: ec.CheckpointManager, epoch: int, shift: float = 0.0) -> None:
    manager.save(epoch, args=Save({"w": jnp.arange(1000.0) + epoch + shift}), metrics={"loss": epoch}, force=True)
    manager.wait_until_finished()


def check(manager: ec.CheckpointManager, epoch: int, shift: float = 0.0) -> None:
    np.testing.assert_array_equal(manager.restore(epoch)["w"], np.arange(1000.0) + epoch + shift)


def mirrored(url: str) -> list[int]:
    """The epochs in the mirror, all of which are whole."""
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        for epoch in manager.all_steps():
            assert manager.verify(epoch).ok
        return list(manager.all_steps())


def objects(store: Store, folder: str = "") -> Iterator[str]:
    for entry in store.list(folder):
        path = paths.join(folder, entry.name)
        if entry.is_folder:
            yield from objects(store, path)
        else:
            yield path


def dead_objects(url: str) -> list[str]:
    """Objects of attempts that are no epoch, and were not set aside."""
    epoch_directory = directory_of(open_store(url), StepNames.of(Options()))
    assert isinstance(epoch_directory, BucketDirectory)
    head = epoch_directory.head.read()
    assert head is not None
    alive = head.named
    found = {path: paths.save_id_in(path.partition("/")[2]) for path in objects(open_store(url))}
    return [path for path, save_id in found.items() if save_id is not None and save_id not in alive]


def wait_until_swept(url: str) -> None:
    """Waits until what killed and failed copies left is removed, which happens in the background."""
    for _ in range(300):
        if not dead_objects(url):
            return
        threading.Event().wait(0.1)
    raise AssertionError(dead_objects(url))


class Away:
    """Breaks every request to a bucket until `back` is called; `asked` is set by the first one."""

    def __init__(self, cloud: Bucket):
        self._proxy, self.asked = cloud.proxy, threading.Event()
        self._proxy.decide = self._decide

    def _decide(self, request: Request) -> Fault:
        self.asked.set()
        return Fault(reset=True)

    def back(self) -> None:
        self._proxy.decide = lambda request: None


@pytest.mark.parametrize("server", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_epochs_reach_the_mirror_and_an_empty_disk_goes_on_from_there(cloud: Bucket, tmp_path: pathlib.Path) -> None:
    """What the directory has deleted is still there, and a replaced machine finds all of it."""
    url, directory = cloud.new_url(), tmp_path / "run"
    for epoch in range(3):
        with opened(directory, url, keep=1) as manager:
            save(manager, epoch)
            assert manager.all_steps() == list(range(epoch + 1))
    assert mirrored(url) == [0, 1, 2]
    assert sorted(p.name for p in directory.iterdir()) == ["2", "_epochckpt"]
    ec.attach_metrics(directory, 2, {"accuracy": 0.5}, "evaluator")
    with opened(directory, url) as manager:
        assert manager.all_steps() == [0, 1, 2]
        save(manager, 3)
        manager.delete(1)
    assert mirrored(url) == [0, 2, 3]
    shutil.rmtree(directory)
    with opened(directory, url) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([0, 2, 3], 3)
        for epoch in (0, 2, 3):
            check(manager, epoch)
            assert manager.status(epoch).state == "committed"
        assert manager.metrics(2) == {"loss": 2, "accuracy": 0.5}
        assert manager.item_metadata(3)["w"].shape == (1000,)
        np.testing.assert_array_equal(manager.restore(None)["w"], np.arange(1000.0) + 3)
        assert not manager.save(3, args=Save({"w": jnp.zeros(1)}))
        save(manager, 4)
    assert mirrored(url) == [0, 2, 3, 4]
    assert dead_objects(url) == []


@pytest.mark.slow
@GOOGLE
def test_a_mirror_that_is_away_only_delays(
    cloud: Bucket, tmp_path: pathlib.Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Training and commits go on; few epochs wait and stay, others are named; the next run catches up."""
    url, directory = cloud.new_url(), tmp_path / "run"
    with opened(directory, url, keep=1, mirror_backlog=2) as manager:
        save(manager, 0)
    away = Away(cloud)
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError):
        opened(tmp_path / "other", url)
    manager = opened(directory, url, keep=1, mirror_backlog=2)
    assert manager.all_steps() == [0]
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        for epoch in range(1, 6):
            save(manager, epoch)
        assert away.asked.wait(30)
        kept = sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())
        manager.close()
    assert len(kept) <= 4
    assert {4, 5} <= {*kept}
    said = [r.getMessage() for r in caplog.records]
    assert sum("the mirror is behind, and tries again" in text for text in said) == 1
    assert [text for text in said if "checkpoint 3 is left out" in text]
    assert [text for text in said if "not mirrored: checkpoint 4, 5" in text]
    away.back()
    with opened(directory, url, keep=1) as manager:
        assert manager.all_steps()[-2:] == [4, 5]
        save(manager, 6)
    assert [epoch for epoch in mirrored(url) if epoch != 3] == [0, 4, 5, 6]  # 3 was not deleted yet


@GOOGLE
def test_the_mirror_catches_up_while_the_run_goes_on(cloud: Bucket, tmp_path: pathlib.Path, quick: None) -> None:
    url, directory = cloud.new_url(), tmp_path / "run"
    with opened(directory, url) as manager:
        away = Away(cloud)
        save(manager, 0)
        assert away.asked.wait(30)
        save(manager, 1)
        away.back()
    assert mirrored(url) == [0, 1]


@GOOGLE
def test_damage_here_while_the_mirror_is_away_costs_one_epoch(
    cloud: Bucket, tmp_path: pathlib.Path, quick: None
) -> None:
    url, directory = cloud.new_url(), tmp_path / "run"
    with opened(directory, url) as manager:
        for epoch in range(3):
            save(manager, epoch)
    file = next((directory / "2").glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    away = Away(cloud)
    with opened(directory, url) as manager:
        assert manager.all_steps() == [0, 1]
        assert manager.damaged_epochs() == [2]
    away.back()
    with opened(directory, url) as manager:
        assert manager.all_steps() == [0, 1, 2]
        check(manager, 2)


@pytest.mark.slow
@GOOGLE
def test_what_was_rolled_back_does_not_come_back(cloud: Bucket, tmp_path: pathlib.Path, quick: None) -> None:
    """Not even if the mirror did not hear of it before the run ended."""
    url, directory = cloud.new_url(), tmp_path / "run"
    with opened(directory, url, keep=2) as manager:
        for epoch in range(5):
            save(manager, epoch)
    with opened(directory, url, keep=2) as manager:
        away = Away(cloud)
        manager.rollback_to(2)  # of the mirror: the directory has only 3 and 4
        manager.delete(0)
        assert manager.all_steps() == [1, 2]
    away.back()
    with opened(directory, url, keep=2) as manager:
        assert manager.all_steps() == [1, 2]
        check(manager, 2)
        save(manager, 3, shift=0.5)
    assert mirrored(url) == [1, 2, 3]
    shutil.rmtree(directory)
    with opened(directory, url) as manager:
        check(manager, 3, shift=0.5)


def damage_data(epoch: pathlib.Path) -> None:
    (file,) = epoch.glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-8:] = bytes(8)
    file.write_bytes(data)


def damage_record(epoch: pathlib.Path) -> None:
    (epoch / "epoch.json").write_bytes(b"{}")


@pytest.mark.slow
@GOOGLE
@pytest.mark.parametrize("damage", [damage_data, damage_record])
def test_a_damaged_epoch_is_read_from_the_mirror(
    cloud: Bucket, tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None]
) -> None:
    url, directory = cloud.new_url(), tmp_path / "run"
    with opened(directory, url) as manager:
        save(manager, 0)
        save(manager, 1)
    damage(directory / "1")
    (row,) = [row for row in ec.inspect(directory, mirror=url).overview().epochs if row.epoch == 1]
    if damage is damage_record:  # a look does not read the data
        assert (row.state, row.tier) == ("damaged", "mirror")
        assert row.detail.endswith("; it is read from the mirror")
    with opened(directory, url) as manager:
        assert manager.all_steps() == [0, 1]
        check(manager, 1)
        np.testing.assert_array_equal(manager.restore(None)["w"], np.arange(1000.0) + 1)
        save(manager, 2)
    assert mirrored(url) == [0, 1, 2]


@GOOGLE
@pytest.mark.slow
def test_an_older_epoch_of_the_mirror_is_no_copy_of_a_newer_one(cloud: Bucket, tmp_path: pathlib.Path) -> None:
    """An epoch was replaced here, and is damaged before the mirror has it: the one in the mirror is not taken."""
    url, directory = cloud.new_url(), tmp_path / "run"
    with opened(directory, url) as manager:
        save(manager, 0)
        save(manager, 1)
    with ec.CheckpointManager(directory) as manager:  # it knows of no mirror
        manager.allow_overwrite(1)
        save(manager, 1, shift=0.5)
    damage_data(directory / "1")
    with opened(directory, url) as manager:
        with pytest.raises(ec.errors.DamagedError):
            manager.restore(1)
        np.testing.assert_array_equal(manager.restore(None)["w"], np.arange(1000.0))
    with opened(directory, url) as manager:
        manager.delete(1)
        save(manager, 1, shift=0.75)
    shutil.rmtree(directory)
    with opened(directory, url) as manager:
        check(manager, 1, shift=0.75)


@GOOGLE
@pytest.mark.slow
def test_some_epochs_are_copied_and_kept(cloud: Bucket, tmp_path: pathlib.Path) -> None:
    """Every third, and the newest at the end; the mirror keeps two."""
    url, directory = cloud.new_url(), tmp_path / "run"
    with opened(directory, url, keep=1, mirror_every=3) as manager:
        for epoch in range(8):
            save(manager, epoch)
    assert mirrored(url) == [2, 5, 7]
    with opened(directory, url, keep=1, mirror_keep=2) as manager:
        save(manager, 8)
    assert mirrored(url) == [7, 8]
    unseen = ec.inspect(directory).overview()
    assert [(row.epoch, row.tier) for row in unseen.epochs] == [(8, "both")]
    found = ec.inspect(directory, mirror=url).overview()
    assert [(row.epoch, row.tier) for row in found.epochs] == [(7, "mirror"), (8, "both")]
    assert (unseen.mirror, unseen.mirror_seen, found.mirror, found.mirror_seen) == (url, False, url, True)
    assert "w" in str(ec.inspect(directory, mirror=url)[7])


@GOOGLE
@pytest.mark.long
def test_a_silent_mirror_holds_the_end_for_a_bounded_time(
    cloud: Bucket, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, directory, held = cloud.new_url(), tmp_path / "run", threading.Event()
    with opened(directory, url):
        pass
    manager = opened(directory, url, save_timeout_secs=5)
    cloud.proxy.decide = lambda request: Fault(held=held)
    save(manager, 0)
    with caplog.at_level(logging.WARNING):
        manager.close()
    assert "is not done within 5 s" in caplog.text
    assert "not mirrored: checkpoint 0" in caplog.text
    held.set()
    cloud.proxy.decide = lambda request: None
    with opened(directory, url) as manager:
        save(manager, 1)
    assert mirrored(url) == [0, 1]


def overtaken_at(cloud: Bucket, directory: pathlib.Path, number: int) -> bool:
    """Pauses a run at its request of this number, while a newer one saves and mirrors; False if it makes fewer."""
    url, count = cloud.new_url(), iter(range(10**6))
    held, reached, done = threading.Event(), threading.Event(), threading.Event()

    def decide(request: Request) -> Fault | None:
        if done.is_set() or reached.is_set() or next(count) < number:
            return None
        reached.set()
        return Fault(held=held)

    older = opened(directory, url)
    save(older, 0)
    older.close()
    cloud.proxy.decide = decide
    older = opened(directory, url)
    save(older, 1)
    closing = threading.Thread(target=older.close)
    closing.start()
    while not reached.wait(0.05):
        if not closing.is_alive():
            return False
    with opened(directory, url) as newer:
        assert newer.all_steps() == [0, 1]
        save(newer, 2)
        newer.delete(0)
    done.set()
    held.set()
    closing.join()
    assert mirrored(url)[-1] == 2
    with opened(directory, url) as newest:
        assert newest.all_steps() == [1, 2]
        for epoch in (1, 2):
            check(newest, epoch)
        save(newest, 3)
    assert mirrored(url) == [1, 2, 3]
    return True


@pytest.mark.slow
@GOOGLE
def test_a_newer_run_takes_the_mirror_over(cloud: Bucket, tmp_path: pathlib.Path, quick: None) -> None:
    """What an older run is copying is not taken for a part of what the newer one copies."""
    assert overtaken_at(cloud, tmp_path, 6)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_that_was_paused_at_any_request_changes_nothing(
    cloud: Bucket, tmp_path: pathlib.Path, quick: None
) -> None:
    number = 2  # after those of its opening
    while overtaken_at(cloud, tmp_path / str(number), number):
        number += 1
    assert number > 8


def test_a_mirror_of_another_directory_is_refused(tmp_path: pathlib.Path) -> None:
    """Nothing there is changed, and it stays what it was."""
    for name in ("one", "two"):
        with opened(tmp_path / name, str(tmp_path / f"mirror of {name}")) as manager:
            save(manager, 0)
    with pytest.raises(InvalidArgumentError, match="none of them is one of the epochs in"):
        opened(tmp_path / "one", str(tmp_path / "mirror of two"))
    with pytest.raises(UnsupportedError, match="only a directory on a file system has a mirror"):
        ec.CheckpointManager("memory://there", storage=ec.StorageOptions(mirror=str(tmp_path / "here")))
    with pytest.raises(InvalidArgumentError, match="is the directory itself"):
        opened(tmp_path / "one", str(tmp_path / "one"))
    with pytest.raises(InvalidArgumentError, match="names no store"):
        opened(tmp_path / "one", "ftp://host/run")
    (tmp_path / "one" / paths.MIRROR_RECORD).write_text("{}")
    opened(tmp_path / "one", str(tmp_path / "mirror of one")).close()  # it is as good without it
    assert mirrored(str(tmp_path / "mirror of two")) == [0]


@GOOGLE
@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)]
)
def test_several_processes_mirror_their_nodes_and_others_go_on(
    server: Bucket, tmp_path: pathlib.Path, processes: int
) -> None:
    url, directory = server.new_url(), tmp_path / "run"
    arguments = {"directory": str(directory), "mirror": url}
    run_worker("tests.support.mirror_jobs:train", {**arguments, "epochs": [1, 2, 3]}, 2, 2, env=server.environment)
    assert mirrored(url) == [1, 2, 3]
    shutil.rmtree(directory)
    if processes == 1:
        assert mirror_jobs.resume(**arguments) == [3, [1, 2, 3], True]
        return
    found = run_worker("tests.support.mirror_jobs:resume", arguments, processes, 1, env=server.environment)
    assert found == [[3, [1, 2, 3], True]] * processes


@GOOGLE
@pytest.mark.long
def test_hosts_with_disks_of_their_own_go_on_while_the_bucket_is_away(cloud: Bucket, tmp_path: pathlib.Path) -> None:
    """They open, restore and save without it, and the next run catches up; a replaced host then reads from it."""
    url, environment = cloud.new_url(), cloud.environment
    arguments = {"root": str(tmp_path), "mirror": url}
    jobs = "tests.support.local_disk_jobs"
    found = run_worker(f"{jobs}:train", {**arguments, "epochs": [1, 2]}, 2, 1, env=environment)
    assert found == [[[1, 2], 2]] * 2
    away = Away(cloud)
    found = run_worker(f"{jobs}:train_away", {**arguments, "epoch": 3}, 2, 1, env=environment, timeout=240)
    assert found == [[[1, 2], 2, [1, 2, 3]]] * 2
    assert away.asked.is_set()
    away.back()
    assert mirrored(url) == [1, 2]
    found = run_worker(f"{jobs}:train", {**arguments, "epochs": [4]}, 2, 1, env=environment)
    assert found == [[[1, 2, 3, 4], 4]] * 2
    assert mirrored(url)[-1] == 4
    shutil.rmtree(tmp_path / "disk-0")
    found = run_worker(f"{jobs}:train", {**arguments, "epochs": [5]}, 2, 1, env=environment)
    assert found == [[[*mirrored(url)], 5]] * 2


def kill_at(server: Bucket, directory: pathlib.Path, number: int) -> bool:
    """Kills a run at its request of this number, then has another run go on; False if it made fewer requests."""
    url, count = server.new_url(), iter(range(10**6))
    held, reached = threading.Event(), threading.Event()

    def decide(request: Request) -> Fault | None:
        if next(count) < number:
            return None
        reached.set()
        return Fault(held=held)

    server.proxy.decide = decide
    arguments = f'{{"directory": "{directory}", "mirror": "{url}", "epochs": [1, 2, 3]}}'
    program = ["-m", "tests.support.worker", "tests.support.mirror_jobs:train", arguments]
    with start_processes(program, num_processes=1, env=server.environment) as job:
        while not reached.wait(0.1):
            if job[0].returncode is not None:
                return False
        if number > 3:  # what it did when it was opened comes first
            job[0].wait_for_output("saved", timeout=60)
        job[0].kill()
        assert job[0].wait_for_exit(30)
    server.proxy.decide = lambda request: None
    held.set()
    before = mirrored(url)
    assert before == [1, 2, 3][: len(before)]
    with opened(directory, url, keep=2) as manager:
        epochs = list(manager.all_steps())
        for epoch in epochs:
            np.testing.assert_array_equal(manager.restore(epoch)["w"], mirror_jobs.VALUES + epoch)
        if number > 3:
            assert epochs == [1, 2, 3]
        save(manager, 4)
    assert mirrored(url) == [*epochs, 4]
    wait_until_swept(url)
    return True


@GOOGLE
@pytest.mark.slow
def test_a_kill_in_the_middle_loses_nothing(cloud: Bucket, tmp_path: pathlib.Path) -> None:
    assert kill_at(cloud, tmp_path / "run", 12)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_kill_at_any_request_loses_nothing(cloud: Bucket, tmp_path: pathlib.Path) -> None:
    number = 0
    while kill_at(cloud, tmp_path / str(number), number):
        number += 1
    assert number > 20


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_whatever_happens(cloud: Bucket, tmp_path: pathlib.Path, quick: None, seed: int) -> None:
    """Saves, deletions and rollbacks, a quarter of the requests fails, and the disk is lost again and again."""
    url, directory, rng = cloud.new_url(), tmp_path / "run", random.Random(seed)
    faults = Fault(status=500), Fault(status=429), Fault(reset=True), Fault(lost=True), Fault(cut=3)
    saved: dict[int, int] = {}

    def faulty(request: Request) -> Fault | None:
        return rng.choice(faults) if rng.random() < 0.25 else None

    def forget_others(epochs: Sequence[int]) -> None:
        for epoch in {*saved} - {*epochs}:
            del saved[epoch]

    def follow(manager: ec.CheckpointManager) -> None:
        """What both tiers have left out is not expected any more, but the newest is."""
        assert max(manager.all_steps(), default=None) == max(saved, default=None)
        assert {*manager.all_steps()} <= saved.keys()
        forget_others(manager.all_steps())
        for epoch in saved:
            check(manager, epoch, shift=saved[epoch])

    for _ in range(30):
        cloud.proxy.decide = lambda request: None
        if rng.random() < 0.3 and directory.exists():
            shutil.rmtree(directory)
        with opened(directory, url, keep=2, mirror_every=rng.choice([1, 1, 2])) as manager:
            follow(manager)
            cloud.proxy.decide = faulty
            for epoch in range(max(saved, default=-1) + 1, max(saved, default=-1) + rng.randrange(2, 5)):
                saved[epoch] = rng.randrange(1000)
                save(manager, epoch, shift=saved[epoch])
            forget_others(manager.all_steps())
            if rng.random() < 0.3:
                to = rng.choice(manager.all_steps())
                manager.rollback_to(to)
                forget_others([epoch for epoch in saved if epoch <= to])
            if rng.random() < 0.3 and len(manager.all_steps()) > 1:
                gone = rng.choice(manager.all_steps())
                manager.delete(gone)
                del saved[gone]
            if rng.random() < 0.7:
                cloud.proxy.decide = lambda request: None
        cloud.proxy.decide = lambda request: None
        with opened(directory, url, keep=2) as manager:  # the disk may be lost after this
            follow(manager)
            manager.claim()
    assert mirrored(url)[-1] == max(saved)
    with opened(directory, url) as manager:
        manager.claim()
    wait_until_swept(url)
