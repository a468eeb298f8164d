"""Processes with a disk each: whatever is killed, no epoch is listed that is not whole, and none is lost."""

from __future__ import annotations

import pathlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator

import pytest

import epochckpt as ec
from epochckpt.errors import (
    CoordinationError,
    InvalidArgumentError,
    RemovalError,
    SaveError,
    UncertainError,
    UnsupportedError,
)
from epochckpt.format import paths
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from epochckpt.tiers import read_host_record
from tests.support import disk_walk
from tests.support.disk_walk import Disks, Kill, Operation, Run, in_processes

OPERATIONS: list[Operation] = [
    ("save", 0, 10),
    ("save", 1, 11),
    ("save", 2, 12),
    ("delete", 1, 0),
    ("save", 3, 13),
    ("rollback", 2, 0),
    ("save", 3, 23),
]
SAVES = OPERATIONS[:3]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with disk_walk.installed():
        yield


@pytest.mark.slow
def test_a_run_that_nobody_kills(tmp_path: pathlib.Path) -> None:
    disks = Disks(tmp_path)
    disks.run(OPERATIONS)
    assert disks.must == {2: 12, 3: 23}
    assert disks.check() == []


def killed(root: pathlib.Path, operations: list[Operation], kill: Kill, together: bool) -> list[str]:
    """What is wrong after a kill before a step, with the mirror and without it."""
    disks = Disks(root / "run")
    run = disks.run(operations, kill, together)
    process, problems = kill[0], list[str]()
    shutil.copytree(disks.root, root / "copy")
    for without in (False, True):
        if without:
            shutil.rmtree(disks.root)
            shutil.copytree(root / "copy", disks.root)
            shutil.rmtree(disks.root / "mirror", ignore_errors=True)
        last = (run.steps[process] or ["nothing"])[-1]
        where = f"process {process}, {'all' if together else 'alone'}, {kill[1]} after {last}, mirror {not without}"
        problems += [f"{where}: {problem}" for problem in disks.check()]
    shutil.rmtree(root)
    return problems


@pytest.mark.parametrize(
    ("process", "before"),
    [
        (1, "placed/1-0"),  # it has put it in place
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (1, "claim/.*/moved/"),  # it has claimed its disk
                (1, "report/1-0"),  # it has written
                (0, "record/1-0"),  # all have
                (1, "^rename .*/1-0"),  # the others may have put it in place
                (0, "verdict/1-0"),  # all have
                (1, "^rename disk-1/0"),  # that epoch is deleted on the other disk
                (0, "^unlink epoch.json"),  # and what it was is removed, here
                (1, "^rmdir process_1"),  # or there
            ]
        ),
    ],
)
def test_a_kill_at_the_steps_of_a_commit(tmp_path: pathlib.Path, process: int, before: str) -> None:
    """One process is killed, and the others go on; or all die at once."""
    for together in (False, True):
        assert killed(tmp_path / str(together), [*SAVES, ("save", 3, 13)], (process, before), together) == []


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("process", [0, 1])
def test_a_kill_at_any_step(tmp_path: pathlib.Path, process: int, together: bool) -> None:
    """Each step of seven operations, of either process, on whose kill the others go on, or all end."""
    steps = len(Disks(tmp_path / "whole").run(OPERATIONS).steps[process])
    problems = list[str]()
    for step in range(steps + 5):
        problems += killed(tmp_path / str(step), OPERATIONS, (process, step), together)
    assert problems == []


def lose(*numbers: int) -> Callable[[pathlib.Path], None]:
    def change(root: pathlib.Path) -> None:
        for number in numbers:
            shutil.rmtree(root / f"disk-{number}")

    return change


def swap(root: pathlib.Path) -> None:
    (root / "disk-0").rename(root / "aside")
    (root / "disk-1").rename(root / "disk-0")
    (root / "aside").rename(root / "disk-1")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lose(0), id="primary"),
        *(
            pytest.param(change, id=id, marks=pytest.mark.slow)
            for id, change in {"last": lose(1), "two": lose(0, 1), "others": lose(1, 2), "swapped": swap}.items()
        ),
    ],
)
def test_disks_that_are_replaced(tmp_path: pathlib.Path, change: Callable[[pathlib.Path], None]) -> None:
    """The mirror has what they had, and everything goes on; what was rolled back does not come back."""
    disks = Disks(tmp_path, processes=3)
    disks.run(OPERATIONS)
    change(tmp_path)
    assert disks.check() == []


@pytest.mark.slow
def test_a_disk_of_last_week(tmp_path: pathlib.Path) -> None:
    """Its epochs are none of the job's, and the record of the mirror that it has is not believed."""
    disks = Disks(tmp_path)
    disks.run(OPERATIONS[:3])
    shutil.copytree(tmp_path / "disk-0", tmp_path / "old")
    disks.run([("rollback", 1, 0), ("save", 2, 22), ("save", 3, 23), ("delete", 2, 0)])
    shutil.rmtree(tmp_path / "disk-0")
    (tmp_path / "old").rename(tmp_path / "disk-0")
    assert disks.check() == []


@pytest.mark.slow
def test_without_a_mirrored_copy_a_lost_disk_is_said(tmp_path: pathlib.Path) -> None:
    """Nothing is listed that cannot be restored, and no job starts from scratch unnoticed."""
    disks = Disks(tmp_path)
    disks.run(SAVES)
    shutil.rmtree(tmp_path / "disk-1")
    shutil.rmtree(tmp_path / "mirror")

    def look(number: int) -> tuple[list[int], list[int], str]:
        with disks.open(number) as manager:
            listed, damaged = list(manager.all_steps()), manager.damaged_epochs()
            with pytest.raises(ec.errors.DamagedError) as caught:
                manager.restore(None, args=ec.args.NodeRestore())
            disks.do(manager, number, ("save", 2, 22))  # the part that is there gives way
            return listed, damaged, str(caught.value)

    for found in in_processes(Run(2), look):
        assert (found[0], found[1][-2:]) == ([], [1, 2])  # the mirror may have been behind with epoch 0
        assert "process_1 has nothing of it" in found[2]
    assert len(list(tmp_path.glob("disk-0/partial-*/2/process_0"))) == 1
    disks.must, disks.may = {2: 22}, {}
    assert disks.check() == []


@pytest.mark.slow
def test_another_number_of_processes_goes_on_from_the_mirror(tmp_path: pathlib.Path) -> None:
    Disks(tmp_path, processes=3).run(SAVES)
    for processes in (1, 2):
        disks = Disks(tmp_path, processes)

        def look(number: int, disks: Disks = disks) -> list[int]:
            with disks.open(number) as manager:
                again = ec.args.NodeRestore(reshard=lambda found, _, new: [*found, *found][:new])
                for epoch in manager.all_steps():
                    assert manager.restore(epoch, args=again)["tag"] == 10 + epoch
                found = list(manager.all_steps())
                disks.do(manager, number, ("save", max(found) + 1, 11 + max(found)))
                return found

        assert in_processes(Run(processes), look) == [list(range(2 + processes))] * processes


def test_one_directory_that_all_see_is_refused(tmp_path: pathlib.Path) -> None:
    disks = Disks(tmp_path)
    (tmp_path / "disk-0").mkdir()
    (tmp_path / "disk-1").symlink_to("disk-0")
    for error in in_processes(Run(2), disks.open):
        assert isinstance(error, InvalidArgumentError)
        assert re.search("process 0 and process 1 see the same directory.*Leave local_disks out", str(error))


def test_a_part_is_not_opened_as_a_whole(tmp_path: pathlib.Path) -> None:
    """Nor is an epoch replaced in place."""
    disks = Disks(tmp_path)
    disks.run(SAVES)

    def plain(_: int) -> None:
        with pytest.raises(InvalidArgumentError, match=r"parts of epochs\. Open it with StorageOptions\(local_disks"):
            ec.CheckpointManager(tmp_path / "disk-0")

    def overwriting(number: int) -> None:
        with disks.open(number) as manager, pytest.raises(UnsupportedError, match="delete"):
            manager.allow_overwrite(2)

    assert in_processes(Run(1), plain) == [None]
    assert in_processes(Run(2), overwriting) == [None, None]


def test_a_deletion_that_one_disk_does_not_follow_is_known_to_all(tmp_path: pathlib.Path, faults: Faults) -> None:
    """All raise; and none lists the epoch, which the primary has deleted."""
    disks = Disks(tmp_path)
    read_only = OSError("the disk is read only now")

    def delete(number: int) -> list[int]:
        with disks.open(number) as manager:
            for operation in SAVES:
                disks.do(manager, number, operation)
            if number == 1:
                store = manager.components.directory.store
                faults.fail(Store.rename, read_only, where=lambda call: call.store is store and call.path == "1")
            with pytest.raises((OSError, CoordinationError), match="the disk is read only now"):
                manager.delete(1)
            return list(manager.all_steps())

    assert in_processes(Run(2), delete) == [[0, 2], [0, 2]]


def test_a_failure_that_a_process_hears_of_late_leaves_nothing_on_its_disk(
    tmp_path: pathlib.Path, faults: Faults, patience: Callable[..., None]
) -> None:
    """The primary fails before it offers the commit, when the other process has stopped to wait for it."""
    patience(verdict_margin_secs=0.1)
    disks = Disks(tmp_path)
    is_uncertain = threading.Event()
    has_failed = threading.Event()

    def fail_late(call: StoreCall) -> None:
        assert is_uncertain.wait(disk_walk.WAIT_SECS)
        raise OSError("the disk has failed")

    def save(number: int) -> list[str]:
        with disks.open(number, save_timeout_secs=disk_walk.WAIT_SECS if number == 0 else 2.0) as manager:
            manager.claim()
            if number == 0:
                store = manager.components.directory.store
                late = faults.before(Store.open_writer, fail_late, where=lambda call: call.store is store)
                with pytest.raises(SaveError, match="the disk has failed"):
                    disks.do(manager, number, ("save", 0, 10))
                late.remove()
                has_failed.set()
            else:
                with pytest.raises(UncertainError, match="the primary's verdict did not arrive"):
                    disks.do(manager, number, ("save", 0, 10))
                is_uncertain.set()
                assert has_failed.wait(disk_walk.WAIT_SECS)
            disks.do(manager, number, ("save", 1, 11))
            assert manager.all_steps() == [1]
            manager.components.saves.queue.drain_removals()
            return [path.name for path in (tmp_path / f"disk-{number}").glob("incarnation-*/0-0")]

    assert in_processes(Run(2), save) == [[], []]


def is_on(manager: ec.CheckpointManager, path: str) -> Callable[[StoreCall], bool]:
    """Whether a call is about a path on the disk of a manager."""
    root = manager.components.directory.store.root
    return lambda call: call.store.root == root and call.path == path


@pytest.mark.parametrize("failing", [0, 1])
def test_a_commit_stays_one_where_older_epochs_cannot_be_listed(
    tmp_path: pathlib.Path, faults: Faults, failing: int
) -> None:
    """The epoch is saved on every process, and the one that was to be deleted stays where it is."""
    disks = Disks(tmp_path, every=100)
    newest = tmp_path / f"disk-{failing}" / "2"

    def save(number: int) -> bool:
        with disks.open(number) as manager:
            for operation in SAVES[:2]:
                disks.do(manager, number, operation)
            if number == failing:
                is_root = is_on(manager, "")
                blind = faults.fail(
                    Store.list,
                    OSError("the disk cannot be read now"),
                    where=lambda call: is_root(call) and newest.exists(),
                )
                with pytest.raises(RemovalError, match=r"checkpoint 0.*the disk cannot be read now"):
                    disks.do(manager, number, SAVES[2])
                blind.remove()
            else:
                disks.do(manager, number, SAVES[2])
            assert manager.all_steps() == ([0, 1, 2] if failing == 0 else [1, 2])
            manager.components.saves.queue.drain_removals()
            return (tmp_path / f"disk-{number}" / "0").exists()

    assert in_processes(Run(2), save) == [failing == 0, True]


@pytest.mark.parametrize(
    ("failing", "file"), [(0, paths.HOST_RECORD), (1, paths.HOST_RECORD), (0, paths.MIRROR_RECORD)]
)
def test_a_write_that_fails_during_the_claim_costs_one_save(
    tmp_path: pathlib.Path, faults: Faults, failing: int, file: str
) -> None:
    """All processes take part in the next one."""
    disks = Disks(tmp_path)

    def save(number: int) -> list[int]:
        with disks.open(number) as manager:
            if number == failing:
                full = faults.fail(Store.put, OSError("the disk is full"), where=is_on(manager, file))
            with pytest.raises(SaveError, match="the disk is full"):
                disks.do(manager, number, SAVES[0])
            if number == failing:
                full.remove()
            disks.do(manager, number, SAVES[1])
            return list(manager.all_steps())

    assert in_processes(Run(2), save) == [[1], [1]]


def test_an_offer_whose_answer_is_lost_leaves_nothing(tmp_path: pathlib.Path) -> None:
    """The other process puts its part in place, hears at once that the save has failed, and takes it back."""
    disks = Disks(tmp_path)
    run = Run(2)

    def save(number: int) -> list[int]:
        with disks.open(number) as manager:
            run.lost_answers = frozenset({"record/0-0/0"})
            with pytest.raises(SaveError, match="DEADLINE_EXCEEDED") as failed:
                disks.do(manager, number, SAVES[0])
            assert not isinstance(failed.value, UncertainError)
            disks.do(manager, number, ("save", 0, 20))
            assert manager.restore(0, args=ec.args.NodeRestore())["tag"] == 20
            return list(manager.all_steps())

    assert in_processes(run, save) == [[0], [0]]


def test_the_record_of_a_disk_has_the_name_that_its_node_was_given(tmp_path: pathlib.Path) -> None:
    """Also a name that the manager was given once it was open."""
    disks = Disks(tmp_path)

    def save(number: int) -> str:
        with disks.open(number) as manager:
            manager.set_nodes(["east", "west"])
            disks.do(manager, number, SAVES[0])
            record = read_host_record(manager.components.directory.store)
            assert record is not None
            return record.node

    assert in_processes(Run(2), save) == ["east", "west"]
