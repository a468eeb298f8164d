"""Who may open what when: looking claims nothing, the first write claims, and who is fenced off is told so."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import signal
import socket
import threading
import uuid
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.directory import directory_of
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, FaultyStore, StoreCall
from tests.support.claim_jobs import args, overtaken_job, take_over
from tests.support.files import unchanged
from tests.support.processes import run_worker, start_processes


def commit(manager: ec.CheckpointManager, *epochs: int) -> None:
    for epoch in epochs:
        assert manager.save(epoch, args=args(epoch), force=True)
        manager.wait_until_finished()


def values(manager: ec.CheckpointManager) -> dict[int, float]:
    return {epoch: float(manager.restore(epoch)["w"][0]) for epoch in manager.all_steps()}


# -- looking ---------------------------------------------------------------------------------------------------------


def test_a_look_from_another_process_does_not_stop_the_run(tmp_path: pathlib.Path) -> None:
    """Opened without `read_only`, read in every way and closed, in the middle of a run: the run saves on."""
    with ec.CheckpointManager(tmp_path) as trainer:
        commit(trainer, 1, 2)
        (seen,) = run_worker("tests.support.claim_jobs:look", {"directory": str(tmp_path)}, 1)
        assert seen == [2, [2.0] * 4]
        commit(trainer, 3)
        assert trainer.all_steps() == [1, 2, 3]
        assert trainer.fenced_off == ""


def test_looks_of_every_kind_do_not_stop_the_run(directory: str) -> None:
    """Managers of this process that only look, before, between and beside the saves of another one."""
    before = ec.CheckpointManager(directory)
    trainer = ec.CheckpointManager(directory)
    commit(trainer, 1)
    for step in (2, 3):
        with ec.CheckpointManager(directory, metadata={"a": 1}) as looking:
            assert looking.latest_step() == step - 1
            looking.restore(step - 1)
            looking.restore(None)
            with pytest.raises(errors.EpochNotFoundError):
                looking.restore(17)
        commit(trainer, step)
    before.reload()
    assert before.all_steps() == [1, 2, 3]
    before.close()
    commit(trainer, 4)
    trainer.close()


def test_opening_and_reading_write_nothing(tmp_path: pathlib.Path) -> None:
    """Not even with everything that a writer is given; a missing directory alone is made."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        commit(manager, 1, 2)
    (tmp_path / "run" / f"incarnation-{'0' * 16}.orbax-checkpoint-tmp" / "3-0").mkdir(parents=True)  # a run was killed
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with (
        unchanged(tmp_path / "run"),
        ec.CheckpointManager(tmp_path / "run", options=options, metadata={"a": 1}) as manager,
    ):
        manager.restore(None)
        manager.allow_overwrite(1)
        manager.wait_until_finished()
    with ec.CheckpointManager(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run").is_dir()
        assert not list((tmp_path / "new" / "run").iterdir())


# -- the first write -------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[ec.CheckpointManager], Any]] = {
    "save": lambda m: commit(m, 5),
    "delete": lambda m: m.delete(1),
    "rollback_to": lambda m: m.rollback_to(1),
    "allow_overwrite": lambda m: (m.allow_overwrite(1), commit(m, 1)),
    "claim": lambda m: m.claim(),
}


@pytest.mark.parametrize("write", WRITES)
def test_the_first_write_claims_and_the_older_run_is_told_at_its_next_save(directory: str, write: str) -> None:
    """Whatever the write is. The older run's next save fails, the one after it raises at once, its deletes raise."""
    older = ec.CheckpointManager(directory)
    commit(older, 1, 2)
    newer = ec.CheckpointManager(directory)
    commit(older, 3)  # it has only been opened
    WRITES[write](newer)
    kept = values(newer)
    assert older.save(7, args=args(7))
    with pytest.raises(errors.FencedError, match=r"a newer run .*has taken over"):
        older.wait_until_finished()
    for epoch in (7, 8):
        with pytest.raises(errors.FencedError, match=r"a newer run .*has taken over"):
            older.save(epoch, args=args(epoch))
    for call in (lambda: older.delete(2), lambda: older.rollback_to(1), older.claim):
        with pytest.raises(errors.FencedError):
            call()
    assert "has taken over" in older.fenced_off
    older.close()
    newer.reload()
    assert values(newer) == kept
    commit(newer, 9)
    newer.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.rollback_to(2),
        lambda m: m.rollback_to(1),
        lambda m: m.delete(1),
        lambda m: m.delete(7),
        lambda m: m.allow_overwrite(1),
        lambda m: m.claim(),
    ],
    ids=["rollback of nothing", "rollback", "delete", "delete of nothing", "allow_overwrite", "claim"],
)
def test_a_run_that_was_fenced_off_is_told_by_whatever_it_does_next(
    directory: str, call: Callable[[ec.CheckpointManager], Any]
) -> None:
    """Also by a change that changes nothing; the newer run's directory stays as it is."""
    older = ec.CheckpointManager(directory)
    commit(older, 1, 2)
    newer = ec.CheckpointManager(directory)
    newer.claim()
    kept = values(newer)
    for _ in range(2):
        with pytest.raises(errors.FencedError, match=r"a newer run .*has taken over"):
            call(older)
    older.close()
    newer.reload()
    assert values(newer) == kept
    commit(newer, 3)
    newer.close()


def test_a_run_that_was_fenced_off_changes_nothing_when_it_ends(directory: str, faults: Faults) -> None:
    """It does not try to end a claim that is another run's by now; a run that was not does."""
    older = ec.CheckpointManager(directory)
    commit(older, 1)
    newer = ec.CheckpointManager(directory)
    newer.claim()  # what it clears up may go on beside the rest of this test
    with pytest.raises(errors.FencedError):
        older.claim()
    changed = list[str]()
    by_newer = newer.components.directory.store
    for method in (Store.create, Store.put, Store.replace, Store.rename, Store.remove, Store.remove_tree):
        faults.before(
            method,
            lambda call: changed.append(f"{call.method} {call.path}"),
            where=lambda call: call.store is not by_newer,
        )
    older.close()
    assert changed == []
    newest = ec.CheckpointManager(directory)
    newest.claim()
    changed.clear()
    newest.close()
    assert changed != []


def test_of_two_managers_of_one_process_the_last_to_begin_writing_wins(directory: str) -> None:
    """A notebook's cell that is run twice: no epoch is lost, and the first manager does not come back."""
    one, other = ec.CheckpointManager(directory), ec.CheckpointManager(directory)
    commit(one, 1)
    commit(other, 2)
    with pytest.raises(errors.FencedError):
        commit(one, 3)
    with pytest.raises(errors.FencedError):
        commit(one, 4)
    commit(other, 5)
    one.close()
    commit(other, 6)
    assert values(other) == {1: 1.0, 2: 2.0, 5: 5.0, 6: 6.0}
    other.close()


def test_what_another_run_did_since_the_directory_was_opened_is_seen_with_the_first_write(
    directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Epochs that came and went are in `all_steps()`, and named; one that exists is not overwritten."""
    early = ec.CheckpointManager(directory)
    with ec.CheckpointManager(directory) as trainer:
        commit(trainer, 1, 2, 3)
    late = ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2))
    with ec.CheckpointManager(directory) as trainer:
        trainer.delete(1)
        commit(trainer, 4)
    assert late.save(4, args=args(-1))
    with pytest.raises(errors.SaveError, match="exists already"):
        late.wait_until_finished()
    assert late.all_steps() == [2, 3, 4]
    assert "another run has committed checkpoint 4 and deleted checkpoint 1" in caplog.text
    commit(late, 5)
    assert values(late) == {4: 4.0, 5: 5.0}, "retention goes by what is there"
    late.close()
    commit(early, 6)
    assert values(early) == {4: 4.0, 5: 5.0, 6: 6.0}
    early.close()


@pytest.mark.parametrize("claims", [True, False])
def test_what_another_run_deleted_can_be_saved_anew_once_the_claim_has_told(directory: str, claims: bool) -> None:
    """By `claim()`, or with the first save; before that nothing asks storage on the training thread."""
    with ec.CheckpointManager(directory) as trainer:
        commit(trainer, 1, 2, 3)
    late = ec.CheckpointManager(directory)
    with ec.CheckpointManager(directory) as trainer:
        trainer.delete(2)
        trainer.delete(3)
    with pytest.raises(errors.EpochExistsError, match=r"reload\(\) or claim\(\) tells"):
        late.save(2, args=args(2), force=True)
    if claims:
        late.claim()
        assert late.should_save(2)
    else:
        commit(late, 4)
    assert late.save(2, args=args(-2), force=True)
    late.wait_until_finished()
    assert values(late)[2] == -2.0
    with pytest.raises(errors.EpochExistsError):
        late.save(1, args=args(-1), force=True)
    late.close()


def test_a_claim_that_fails_is_made_anew_and_loses_nothing(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The disk answers EIO in the middle of the claim: that save fails, the next commits. What was on the move when the
    run before was killed is put back."""
    with ec.CheckpointManager(tmp_path) as manager:
        commit(manager, 1, 2)
    home = tmp_path / f"incarnation-{'0' * 16}.orbax-checkpoint-tmp"
    home.mkdir()
    (tmp_path / "1").rename(home / f"moving-{'0' * 16}-1")

    def fail_once(call: StoreCall) -> None:
        if taken.hits == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), call.path)

    taken = faults.after(Store.rename, fail_once, where=lambda call: call.path == home.name)
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.save(3, args=args(3))
        with pytest.raises(errors.SaveError, match="Input/output error"):
            manager.wait_until_finished()
        commit(manager, 4)
        assert values(manager) == {1: 1.0, 2: 2.0, 4: 4.0}
    assert taken.hits
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "4"]


def test_an_epoch_that_was_on_the_move_is_named_at_open_and_back_after_the_claim(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run was killed while it replaced epoch 2, where no exchange is to be had: whoever opens is told."""
    with ec.CheckpointManager(tmp_path) as manager:
        commit(manager, 1, 2)
    home = tmp_path / f"incarnation-{'0' * 16}.orbax-checkpoint-tmp"
    home.mkdir()
    (tmp_path / "2").rename(home / f"moving-{'0' * 16}-2")
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [1]
        assert re.search(r"checkpoint 2, .*claim\(\)", caplog.text)
        manager.claim()
        assert values(manager) == {1: 1.0, 2: 2.0}


# -- who is told -----------------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == level and "takes over" in r.getMessage()]


def test_a_take_over_of_a_run_that_is_alive_is_a_warning(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    """With host, process id and time of the other; a run that has closed is nobody's business."""
    with ec.CheckpointManager(directory) as closed:
        commit(closed, 1)
    alive = ec.CheckpointManager(directory)
    commit(alive, 2)
    assert warnings_of(caplog, "WARNING") == []
    with ec.CheckpointManager(directory) as newer:
        assert warnings_of(caplog, "WARNING") == []
        commit(newer, 3)
    (said,) = warnings_of(caplog, "WARNING")
    assert f"process {os.getpid()} on host {socket.gethostname()}" in said
    assert re.search(r"which claimed it \S+ m?s ago\)", said)
    alive.close()


def test_a_take_over_of_a_run_that_was_killed_is_no_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process is gone: the usual restart."""
    program = [
        "-m",
        "tests.support.worker",
        "tests.support.claim_jobs:die_after_a_save",
        f'{{"directory": "{tmp_path}"}}',
    ]
    with start_processes(program, 1) as job:
        (outcome,) = job.wait(150)
    assert outcome.returncode == -signal.SIGKILL, outcome.stdout
    with caplog.at_level("INFO", logger="absl"), ec.CheckpointManager(tmp_path) as manager:
        commit(manager, 2)
    assert warnings_of(caplog, "WARNING") == []
    (said,) = [r.getMessage() for r in caplog.records if "has ended without closing" in r.getMessage()]
    assert socket.gethostname() in said


# -- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_that_is_fenced_off_ends_at_once_with_a_code_of_its_own(tmp_path: pathlib.Path) -> None:
    """It does not train on unsaved: no further epoch, no download, no exit group."""
    ran: list[str] = []
    manager = ec.CheckpointManager(tmp_path)
    runner = ec.JobRunner(overtaken_job(ran, manager, 9, lambda: take_over(str(tmp_path), 100)), manager)
    assert runner.train(ec.LocalSession()) == 3
    assert ran == ["epoch 1", "epoch 2", "epoch 3"]
    assert runner.result.exit_code == ec.FENCED_OFF_EXIT_CODE == 76
    assert runner.result.fenced_off
    assert "fenced off: a newer run" in str(runner.result)
    assert runner.result.last_committed_epoch == 1
    manager.close()  # the result has told it
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [0, 1, 100]


def test_a_run_that_is_fenced_off_in_init_trains_nothing(tmp_path: pathlib.Path) -> None:
    """What init saves beside the run shows that a newer one has come; the run ends before its first epoch."""
    ran: list[str] = []
    manager = ec.CheckpointManager(tmp_path)
    job = ec.Job()

    @job.init
    def init(ws: ec.Workspace) -> None:
        ws["n"] = 0
        take_over(str(tmp_path), 100)
        manager.save(1, args=args(1), force=True)
        with pytest.raises(errors.FencedError):
            manager.wait_until_finished()

    job.epoch(lambda ws: ran.append(f"epoch {ws.epoch}"))
    job.exit(lambda ws: ran.append("exit"))
    job.stop_when(ec.stop.max_epochs(3))
    runner = ec.JobRunner(job, manager)
    assert runner.train(ec.LocalSession()) == 0
    assert ran == []
    assert (runner.result.fenced_off, runner.result.exit_code) == (True, 76)
    manager.close()


def test_a_run_that_is_fenced_off_in_its_last_save_says_so(tmp_path: pathlib.Path) -> None:
    """The newer run comes in the last epoch: the exit code is the same, whatever else was asked for."""
    job = ec.Job()
    job.init(lambda ws: ws.update(n=0))

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        manager.wait_until_finished()
        with ec.CheckpointManager(tmp_path) as newer:
            commit(newer, 100)

    job.stop_when(ec.stop.max_epochs(1))
    manager = ec.CheckpointManager(tmp_path)
    runner = ec.JobRunner(job, manager, raise_if_not_saved=True)
    runner.train(ec.LocalSession())
    assert runner.result.exit_code == 76
    manager.close()


def test_a_run_claims_before_it_chooses_the_epoch_to_resume_from(tmp_path: pathlib.Path) -> None:
    """An older run that is still alive cannot save past the epoch that the new one resumes from."""
    older = ec.CheckpointManager(tmp_path)
    older.claim()
    job = ec.Job()
    job.init(lambda ws: ws.update(n=0))

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        assert older.save(ws.epoch + 10, args=args(1))
        with pytest.raises(errors.FencedError):
            older.wait_until_finished()

    job.stop_when(ec.stop.max_epochs(1))
    with ec.CheckpointManager(tmp_path) as manager:
        ec.JobRunner(job, manager).train(ec.LocalSession())
        assert manager.all_steps() == [0, 1]
    older.close()


@pytest.mark.slow
def test_every_process_of_a_run_that_is_fenced_off_ends_alike(tmp_path: pathlib.Path) -> None:
    """Two real processes."""
    found = run_worker("tests.support.claim_jobs:train_until_fenced_off", {"directory": str(tmp_path)}, 2)
    for code, fenced_off, reason, ran in found:
        assert (code, fenced_off, ran) == (76, True, ["epoch 1", "epoch 2", "epoch 3"])
        assert reason.startswith("fenced off: a newer run")


def test_a_run_starts_nothing_over_beside_folders_that_it_cannot_tell(tmp_path: pathlib.Path) -> None:
    """No epoch, but a folder named like one: refused before init, as a directory of damaged epochs is."""
    (tmp_path / "12").mkdir()
    job = ec.Job()
    job.init(lambda ws: ws.update(n=0))
    job.stop_when(ec.stop.max_epochs(1))
    with ec.CheckpointManager(tmp_path) as manager, pytest.raises(errors.FormatError, match=r"/12 is named like"):
        ec.JobRunner(job, manager).train(ec.LocalSession())


def test_of_two_runs_that_claim_at_the_same_moment_the_later_one_wins(tmp_path: pathlib.Path) -> None:
    """Before any call to storage of the one the other claims: the first is fenced off and says so; nothing is lost."""

    def overtaken(number: int) -> tuple[int, BaseException | None]:
        run = tmp_path / str(number)
        left = run / "incarnation-0123456789abcdef.orbax-checkpoint-tmp"
        moving = f"moving-{'0' * 16}"
        for name in (f"{moving}-damaged-0123456789abcdef%2F4", f"{moving}-5", "3-1"):
            (left / name).mkdir(parents=True)
        names = StepNames.of(ocp.CheckpointManagerOptions())
        store = FaultyStore(open_store(run))
        older = directory_of(store, names)
        newer = directory_of(open_store(run), names)
        calls = 0

        def count(call: StoreCall) -> None:
            nonlocal calls
            if calls == number:
                newer.claim()
            calls += 1

        for method in (
            Store.make_root,
            Store.make_folder,
            Store.create,
            Store.list,
            Store.rename,
            Store.exists,
            Store.existing,
            Store.read,
            Store.sync_folder,
            Store.remove,
        ):
            store.faults.before(method, count)
        error = None
        try:
            older.claim(7)
        except Exception as caught:
            error = caught
        if calls > number:
            assert (run / "damaged-0123456789abcdef" / "4").is_dir()
            assert (run / "5").is_dir()
        return calls, error

    number = 0
    outcomes = []
    while True:
        calls, error = overtaken(number)
        if calls <= number:
            assert error is None
            break
        outcomes.append(error)
        number += 1
    assert number > 10
    assert outcomes[0] is None  # the other one was the earlier one
    assert all(error is None or isinstance(error, errors.FencedError) for error in outcomes), outcomes
    assert sum(error is not None for error in outcomes) > number // 2


def test_a_run_whose_claim_came_too_late_does_not_claim_again(tmp_path: pathlib.Path, faults: Faults) -> None:
    """Of two runs that begin at the same moment one goes on: the saves that the other has begun do not take over."""
    newer, older = ec.CheckpointManager(tmp_path), ec.CheckpointManager(tmp_path)

    def overtake(call: StoreCall) -> None:
        overtaking.remove()
        commit(newer, 1)

    overtaking = faults.before(Store.create, overtake)
    for epoch in (5, 6):
        with pytest.raises(errors.FencedError):
            older.components.saves.claim.take(epoch)
    assert overtaking.hits == 1
    commit(newer, 2)
    newer.close()
    older.close()
    assert newer.all_steps() == [1, 2]


def test_a_claim_sweeps_nothing_that_no_run_of_this_directory_has_begun(faults: Faults) -> None:
    """On an object store: runs named by numbers one folder deeper, models, and ids that only look like attempts."""
    root = f"memory://{uuid.uuid4().hex}/"
    for run in ("5", "6"):
        with ec.CheckpointManager(f"{root}{run}") as manager:
            commit(manager, 1, 2)
    store = open_store(root)
    others = [
        "7/variables/variables.data-00000-of-00001/x",
        "8/default/d/0-8-0",
        "9/process_0/00000001-12-0/x",
        "9/process_0/00000007-9-0/default.safetensors",
        "9/process_1/0123456789abcdef-9-3/node.json",
    ]
    for path in others:
        store.create(path, b"x")
    swept = threading.Event()
    faults.after(Store.remove_all, lambda call: swept.set(), where=lambda call: call.path.startswith("99/process_0/"))
    for number in range(2):  # the second run knows them from the head
        with ec.CheckpointManager(root) as above:
            assert sorted(above.foreign_folders()) == [5, 6, 7, 8, 9]
            commit(above, 11)
            assert above.all_steps() == [11]
            above.delete(11)
            with pytest.raises(errors.EpochExistsError, match="named like an epoch"):
                above.save(9, args=ocp.args.StandardSave({"w": 1.0}), force=True)
            if number == 0:  # what the sweep of the second run removes last
                left = f"99/process_0/{above.components.directory.job_directory.incarnation}-99-0/node.json"
                store.create(left, b"x")
    assert swept.wait(60)
    assert not store.exists(left)
    for run in ("5", "6"):
        with ec.CheckpointManager(f"{root}{run}") as manager:
            assert values(manager) == {1: 1.0, 2: 2.0}
    assert all(store.exists(path) for path in others)
