"""What a job leaves behind that is killed, or stopped and overtaken by a newer run, at any moment.

SIGKILL of the whole job: the latest epoch stays real, nothing that was seen committed is lost, the next start cleans
up. SIGSTOP, a newer run, SIGCONT: the older run can no longer commit, delete or move anything.
"""

import collections
import errno
import json
import os
import pathlib
import random
import re
import signal
import uuid
from collections.abc import Iterable
from typing import Any

import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from epochckpt.testing.faults import Failure
from tests.support import killjob, zombiejob
from tests.support.killed import KilledJob
from tests.support.processes import Processes, parse_result, start_processes
from tests.support.zombiejob import Stop

SEED = int(os.environ.get("EPOCHCKPT_KILL_SEED", "20240229"))


COUNTS = {"write": 120, "delete": 40, "renamed": 8, "any": 150, "open": 12, "time": 1}  # a kill at the 1st to n-th call
AIMED = (killjob.WRITING, killjob.DELETING)


def kill_plans(rng: random.Random, kills: int) -> list[dict[str, Any]]:
    """When each run is killed: two thirds within a write or a delete, the others anywhere."""
    kinds = [kind for kind in ("renamed", "any", "open", "time") for _ in range(kills // 12)]
    kinds += ["delete"] * (kills // 3)
    kinds += ["write"] * (kills - len(kinds))
    rng.shuffle(kinds)
    plans = []
    for number, kind in enumerate(kinds):
        processes = 2 if number % 3 == 2 else 1
        plans.append(
            {
                "processes": processes,
                "kind": kind,
                "count": rng.randint(1, COUNTS[kind]),
                "how": rng.choice(["before", "before", "after", "torn"]),
                "victim": rng.randrange(processes) if kind in ("write", "any") else 0,  # the others never delete
                "delay_ms": rng.uniform(0, 400),
            }
        )
    return plans


def kill_over_and_over(job: KilledJob, plans: Iterable[dict[str, Any]]) -> collections.Counter[str]:
    """Kills a job by plan, checks at every start and after the last; returns how many kills hit where."""
    places = collections.Counter(job.kill(plan) for plan in plans)
    assert job.violations() == []
    assert job.run(processes=1, epochs=4) == [0], "the last run, which nobody killed"
    assert job.violations() == []
    left = set(os.listdir(job.directory))
    assert left == set(map(str, sorted(map(int, left))[-killjob.KEEP :])), "a job that closed leaves epochs alone"
    seen = {e["epoch"] for e in job.events("committed")}
    requested = {e["epoch"] for e in job.events("requested")}
    print(f"\n{places.total()} kills, seed {SEED}:")
    for place in killjob.PLACES:
        print(f"{places[place]:5}  {place}")
    print(
        f"{len(requested)} epochs asked for, {len(seen)} seen committed, {len(job.events('checked'))} checks, no loss"
    )
    return places


def check_places(places: collections.Counter[str], kills: int) -> None:
    assert places.total() == kills
    assert sum(places[place] for place in AIMED) >= 0.6 * kills
    assert all(places[place] for place in AIMED)


@pytest.mark.slow
def test_a_killed_job_loses_nothing_it_saw_committed(tmp_path: pathlib.Path) -> None:
    """12 kills of real jobs of one and two processes, most of them within a write or a delete."""
    kills = 12
    check_places(kill_over_and_over(KilledJob(tmp_path), kill_plans(random.Random(SEED), kills)), kills)


@pytest.mark.long
@pytest.mark.timeout(850)
def test_a_job_killed_100_times_loses_nothing_it_saw_committed(tmp_path: pathlib.Path) -> None:
    """100 kills of real jobs of one and two processes, at least 60 of them within a write or a delete."""
    kills = 100
    check_places(kill_over_and_over(KilledJob(tmp_path), kill_plans(random.Random(SEED), kills)), kills)


@pytest.mark.slow
@pytest.mark.parametrize("unprotected", sorted(killjob.UNPROTECTED))
def test_without_the_protection_the_same_kills_are_found_out(tmp_path: pathlib.Path, unprotected: str) -> None:
    """Negative control: epochs that are written, or deleted, in place are lost, and the harness sees it."""
    job = KilledJob(tmp_path, unprotected)
    kind, count = {"write_in_place": ("write", 8), "delete_in_place": ("delete", 8)}[unprotected]
    job.kill({"kind": kind, "count": count, "how": "after"})  # within the first write, or the first delete
    job.run(epochs=0)
    print(*job.violations(), sep="\n")
    assert job.violations()


# -- an older run that is stopped, and goes on when a newer one has taken over

FENCED = "a newer run .*has taken over"
NEWER = 1000  # what the newer run saves as epoch e is the content of e + NEWER
ZOMBIE_SECS = 120.0


def open_manager(directory: str | os.PathLike[str], **options: Any) -> ec.CheckpointManager:
    return ec.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(**options),
        storage=zombiejob.STORAGE,
        item_names=zombiejob.ITEMS,
    )


def save(manager: ec.CheckpointManager, epochs: Iterable[int], offset: int = 0) -> None:
    for epoch in epochs:
        manager.save(epoch, args=killjob.save_args(epoch + offset))
    manager.wait_until_finished()


def fingerprint(directory: pathlib.Path, epochs: Iterable[int]) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time and bytes of every file of the epochs."""
    found = {}
    for epoch in epochs:
        for path in sorted((directory / str(epoch)).rglob("*")):
            if path.is_file() and not path.is_symlink():
                status = path.stat()
                found[str(path)] = (status.st_ino, status.st_mtime_ns, path.read_bytes())
    return found


def make_epochs(directory: pathlib.Path) -> None:
    """Epochs 1, 2 and 3."""
    with open_manager(directory) as manager:
        save(manager, [1, 2, 3])


def zombie_case(directory: pathlib.Path, stop: Stop, **options: Any) -> dict[str, Any]:
    """What `zombiejob.run` takes, for a directory with three epochs."""
    make_epochs(directory)
    return {"directory": str(directory), "stop": list(stop), "options": options}


def start_zombie(cases: list[dict[str, Any]], processes: int = 1, who: int = 0) -> Processes:
    args = json.dumps({"cases": cases, "who": who})
    program = ["-m", "tests.support.worker", "tests.support.zombiejob:run", args]
    return start_processes(program, processes, devices_per_process=2, imported=())  # `take_over` waits for its stops


def take_over(job: Processes, number: int, case: dict[str, Any], who: int = 0) -> list[int]:
    """Waits until the older run has stopped, opens the directory anew, saves two epochs, lets the older run go on to
    its end, and checks that everything is as the newer run left it. Returns the epochs that the newer run found.
    """
    directory = pathlib.Path(case["directory"])
    job[who].wait_for_output(f"{zombiejob.STOPPED} {number}, ", ZOMBIE_SECS)
    os.waitid(os.P_PID, job[who].pid, os.WSTOPPED)  # consumes the news of this stop, reaps nothing
    try:
        with open_manager(directory) as newer:
            found = list(newer.all_steps())
            fresh = [found[-1] + 1, found[-1] + 2]
            save(newer, fresh, NEWER)
            entries, prints = set(os.listdir(directory)), fingerprint(directory, found + fresh)
            job[who].send_signal(signal.SIGCONT)
            for process in job:
                process.wait_for_output(f"{zombiejob.DONE} {number}.", ZOMBIE_SECS)
            assert set(os.listdir(directory)) == entries
            assert fingerprint(directory, found + fresh) == prints
            newer.reload()
            assert list(newer.all_steps()) == found + fresh
            for epoch in found + fresh:
                newer.verify(epoch).raise_if_damaged()
                assert killjob.wrong_content(newer, epoch, epoch + (NEWER if epoch in fresh else 0)) == ""
            save(newer, [fresh[-1] + 1], NEWER)
            assert newer.latest_step() == fresh[-1] + 1
    except BaseException:
        job[who].send_signal(signal.SIGCONT)  # to the next case, whatever happened in this one
        raise
    assert not [name for name in os.listdir(directory) if name.startswith("incarnation-")]
    return found


def check_fenced(found: dict[str, list[str]], *calls: str) -> None:
    """The calls ended in a FencedError that says why."""
    for call in calls:
        assert found[call][0] == "FencedError", (call, found[call])
        assert re.search(FENCED, found[call][1]), (call, found[call])


@pytest.mark.slow
def test_an_older_run_stopped_anywhere_in_a_save_cannot_commit(
    tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    """Stopped before and in the middle of every write, and just before the rename: FencedError, and no trace of it."""
    cases = [zombie_case(tmp_path / str(i), stop) for i, stop in enumerate(zombiejob.STOPS.values())]
    with start_zombie(cases) as job:
        for number, (place, case) in enumerate(zip(zombiejob.STOPS, cases, strict=True)):
            with subtests.test(place):
                assert take_over(job, number, case) == [1, 2, 3]
        (outcome,) = job.wait(ZOMBIE_SECS)
    for place, found in zip(zombiejob.STOPS, parse_result(outcome.stdout), strict=True):
        with subtests.test(f"{place}: what it reports"):
            check_fenced(found, "stopped", "save", "delete", "roll back")
            assert found["close"] == ["", ""]


@pytest.mark.slow
def test_an_older_run_stopped_in_its_clean_up_cannot_delete(tmp_path: pathlib.Path, subtests: pytest.Subtests) -> None:
    """Stopped after a commit that counts: what retention, or a delete, would remove now belongs to the newer run."""
    keep = {"max_to_keep": 3}
    cases = {
        "after the rename": zombie_case(tmp_path / "renamed", zombiejob.AFTER_RENAME, **keep),
        "before the delete": zombie_case(tmp_path / "delete", zombiejob.BEFORE_DELETE, **keep),
        "before the move": zombie_case(tmp_path / "move", zombiejob.BEFORE_DELETE, **keep, todelete_subdir="trash"),
    }
    with start_zombie(list(cases.values())) as job:
        for number, (place, case) in enumerate(cases.items()):
            with subtests.test(place):
                assert take_over(job, number, case) == [1, 2, 3, 4]
        (outcome,) = job.wait(ZOMBIE_SECS)
    for place, found in zip(cases, parse_result(outcome.stdout), strict=True):
        with subtests.test(f"{place}: what it reports"):
            assert found["stopped"] == ["", ""], "its epoch 4 was committed before the newer run came"
            check_fenced(found, "save")


@pytest.mark.slow
def test_an_older_run_stopped_in_a_rollback_moves_no_epoch_of_the_newer_one(
    tmp_path: pathlib.Path, subtests: pytest.Subtests
) -> None:
    """A rollback that was recorded is finished by the newer run, one that was not is void; then it is over."""
    cases = [zombie_case(tmp_path / str(i), stop) for i, stop in enumerate(zombiejob.ROLLBACKS.values())]
    with start_zombie(cases) as job:
        for number, (place, case) in enumerate(zip(zombiejob.ROLLBACKS, cases, strict=True)):
            with subtests.test(place):
                recorded = "epoch" in place or "removed" in place
                assert take_over(job, number, case) == ([1] if recorded else [1, 2, 3])
        (outcome,) = job.wait(ZOMBIE_SECS)
    for place, found in zip(zombiejob.ROLLBACKS, parse_result(outcome.stdout), strict=True):
        with subtests.test(f"{place}: what it reports"):
            check_fenced(found, "stopped", "save", "delete")


@pytest.mark.slow
def test_an_older_run_that_replaces_a_damaged_epoch_does_not_move_the_newer_ones_repair(tmp_path: pathlib.Path) -> None:
    """Both runs found epoch 3 damaged; the newer one has saved it again when the older one goes on to set it aside."""
    case = zombie_case(tmp_path / "epochs", zombiejob.BEFORE_REPLACING)
    (data,) = (tmp_path / "epochs" / "3").rglob("state.safetensors")
    os.truncate(data, 100)
    with start_zombie([case]) as job:
        assert take_over(job, 0, case) == [1, 2]
        (outcome,) = job.wait(ZOMBIE_SECS)
    check_fenced(parse_result(outcome.stdout)[0], "stopped", "save", "delete", "roll back")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "who"), [("in the middle of the data", 1), ("before a file is created", 1), ("just before the rename", 0)]
)
def test_an_older_job_of_two_processes_cannot_commit(tmp_path: pathlib.Path, place: str, who: int) -> None:
    """Either process may be the one that slept: every process of the older job reports FencedError."""
    case = zombie_case(tmp_path / "epochs", zombiejob.STOPS[place])
    with start_zombie([case], processes=2, who=who) as job:
        assert take_over(job, 0, case, who) == [1, 2, 3]
        outcomes = job.wait(ZOMBIE_SECS)
    for outcome in outcomes:
        check_fenced(parse_result(outcome.stdout)[0], "stopped", "save", "delete", "roll back")


def test_an_older_manager_on_an_object_store_cannot_commit() -> None:
    """Two managers on one `memory://` directory: the first reports FencedError and changes nothing."""
    url = f"memory://{uuid.uuid4().hex}"
    older = open_manager(url)
    save(older, [1, 2])
    newer = open_manager(url)
    assert list(newer.all_steps()) == [1, 2]
    save(newer, [3], NEWER)
    older.save(4, args=killjob.save_args(4))
    with pytest.raises(errors.FencedError, match=FENCED):
        older.wait_until_finished()
    with pytest.raises(errors.FencedError, match=FENCED):
        older.delete(1)
    with pytest.raises(errors.FencedError, match=FENCED):
        older.rollback_to(1)
    older.close()
    newer.reload()
    assert list(newer.all_steps()) == [1, 2, 3]
    assert [killjob.wrong_content(newer, e, c) for e, c in [(1, 1), (2, 2), (3, 3 + NEWER)]] == ["", "", ""]
    assert all(newer.verify(epoch).ok for epoch in (1, 2, 3))
    save(newer, [4], NEWER)
    newer.close()


# -- the directory cannot be made durable, or the rename lies


BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))
STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def puts_2_in_place(call: StoreCall) -> bool:
    return call.target == "2"


def fail_flush_after_rename(faults: Faults) -> Failure:
    """The flush of the directory right after the rename of epoch 2 into place fails."""
    renamed = faults.before(Store.rename, lambda call: None, where=puts_2_in_place)
    return faults.fail(
        Store.sync_folder,
        BROKEN,
        where=lambda call: not call.path and renamed.hits > 0,
        times=1,
    )


def test_a_directory_that_cannot_be_flushed_after_the_rename_takes_the_epoch_out_of_sight(
    tmp_path: pathlib.Path, faults: Faults
) -> None:
    """UncertainError; the epoch is not visible, the earlier one is untouched, the next save works."""
    with open_manager(tmp_path) as manager:
        save(manager, [1])
        before = fingerprint(tmp_path, [1])
        fail_flush_after_rename(faults)
        manager.save(2, args=killjob.save_args(2))
        with pytest.raises(errors.UncertainError, match="out of sight"):
            manager.wait_until_finished()
        assert list(manager.all_steps()) == [1]
        assert not (tmp_path / "2").exists()
        manager.reload()
        assert list(manager.all_steps()) == [1]
        assert fingerprint(tmp_path, [1]) == before
        save(manager, [2], NEWER)
        assert list(manager.all_steps()) == [1, 2]
        assert killjob.wrong_content(manager, 2, 2 + NEWER) == ""
        assert manager.verify(1).ok
        assert manager.verify(2).ok
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_an_epoch_that_can_neither_be_flushed_nor_moved_back_is_reported_as_uncertain(
    tmp_path: pathlib.Path, faults: Faults
) -> None:
    """It may survive and is whole, so that neither "committed" nor "not committed" would be true."""
    manager = open_manager(tmp_path)
    save(manager, [1])
    back = faults.fail(Store.rename, BROKEN, where=lambda call: call.path == "2")
    with back, fail_flush_after_rename(faults):
        manager.save(2, args=killjob.save_args(2))
        with pytest.raises(errors.UncertainError):
            manager.wait_until_finished()
    assert back.hits == 1
    manager.reload()
    assert list(manager.all_steps()) == [1, 2]
    assert killjob.wrong_content(manager, 2, 2) == ""
    save(manager, [3])
    assert list(manager.all_steps()) == [1, 2, 3]
    manager.close()


def test_a_rename_that_reports_an_error_although_it_happened_is_a_commit(
    tmp_path: pathlib.Path, faults: Faults
) -> None:
    """As over NFS: the attempt's id under the final name tells."""
    with open_manager(tmp_path) as manager:
        save(manager, [1])

        def report_stale(call: StoreCall) -> None:
            raise STALE

        stale = faults.after(Store.rename, report_stale, where=puts_2_in_place)
        save(manager, [2])
        assert stale.hits == 1
        assert list(manager.all_steps()) == [1, 2]
        assert manager.verify(2).ok
        assert killjob.wrong_content(manager, 2, 2) == ""


def test_a_rename_that_reports_an_error_and_did_not_happen_is_no_commit(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The counterpart: nothing is visible, the error is told, the next save works."""
    with open_manager(tmp_path) as manager:
        save(manager, [1])
        faults.fail(Store.rename, STALE, where=puts_2_in_place, times=1)
        manager.save(2, args=killjob.save_args(2))
        with pytest.raises(errors.SaveError, match="renaming it into place failed"):
            manager.wait_until_finished()
        assert list(manager.all_steps()) == [1]
        save(manager, [2])
        assert list(manager.all_steps()) == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]
