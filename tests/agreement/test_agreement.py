"""Two managers of one job, in threads over a coordinator in memory: they agree, and nobody waits without a bound."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt._threads import Deadline
from epochckpt.agreement import coordination
from epochckpt.agreement.coordination import Preemption
from epochckpt.errors import (
    CoordinationTimeoutError,
    EpochNotFoundError,
    InvalidArgumentError,
    LateNodesError,
    SaveError,
    SaveErrorGroup,
    StorageBehindError,
    UncertainError,
)
from epochckpt.format import paths
from epochckpt.saving.primary import MAX_UNDECIDED
from epochckpt.storage import Store, Writer
from epochckpt.testing import Faults, StoreCall
from tests.support.in_memory import InMemory, Service

WAIT_SECS = 30.0


class Process(InMemory):
    """A process of the job.

    Attributes:
        before_get: called with a key before its value is got.
        before_put: called with a key before a value is put.
    """

    before_get: Callable[[str], object] = str
    before_put: Callable[[str], object] = str

    def get(self, key: str, timeout_secs: float) -> Any:
        self.before_get(key)
        return super().get(key, timeout_secs)

    def put(self, key: str, value: Any, again: bool = False) -> None:
        self.before_put(key)
        super().put(key, value, again)


class Job:
    """The processes of a job, one thread each."""

    def __init__(self, faults: Faults, directory: pathlib.Path):
        self._local, self.directory = threading.local(), directory
        self.faults = faults
        self.processes = 2
        self.together = threading.Barrier(self.processes)

    @property
    def coordinator(self) -> Process:
        """That of the calling process."""
        return self._local.coordinator

    def open(
        self, save_timeout_secs: float = WAIT_SECS, max_blocked_secs: float | None = WAIT_SECS
    ) -> ec.CheckpointManager:
        """The manager of the calling process."""
        storage = ec.StorageOptions(
            save_timeout_secs=save_timeout_secs,
            max_blocked_secs=max_blocked_secs,
            open_timeout_secs=WAIT_SECS,
            restore_timeout_secs=WAIT_SECS,
        )
        return ec.CheckpointManager(self.directory, storage=storage)

    def meet(self) -> None:
        """Waits for the other processes."""
        self.together.wait(WAIT_SECS)

    def run(self, process: Callable[[int], Any]) -> list[Any]:
        """What `process(i)` returns in each process; raises the first error."""
        service = Service()
        results: list[Any] = [None] * self.processes
        errors: list[BaseException] = []

        def thread(number: int) -> None:
            self._local.coordinator = Process(service, number, self.processes)
            try:
                results[number] = process(number)
            except BaseException as error:  # raised below
                errors.append(error)
                self.together.abort()

        threads = [threading.Thread(target=thread, args=(i,), daemon=True) for i in range(self.processes)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(2 * WAIT_SECS)
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        assert not any(each.is_alive() for each in threads), "a process is stuck"
        return results


@pytest.fixture
def job(faults: Faults, tmp_path: pathlib.Path) -> Iterator[Job]:
    """A job of two processes on one directory."""
    made = Job(faults, tmp_path / "run")
    with coordination.connecting_by(lambda *args: made.coordinator):
        yield made


def save(manager: ec.CheckpointManager, epoch: int, **kwargs: Any) -> bool:
    return manager.save(epoch, args=ocp.args.StandardSave({"a": np.full(4, float(epoch))}), **kwargs)


def commit(manager: ec.CheckpointManager, epoch: int) -> None:
    assert save(manager, epoch)
    manager.wait_until_finished()


def commit_unheard(job: Job, manager: ec.CheckpointManager, epoch: int, node_1_gave_up: threading.Event) -> None:
    """The primary commits an epoch only after the other node has given up waiting for the verdict."""
    if job.coordinator.primary:

        def wait(call: StoreCall) -> None:
            assert node_1_gave_up.wait(WAIT_SECS)

        with job.faults.before(Store.rename, wait, where=lambda call: call.target == str(epoch)) as held:
            commit(manager, epoch)
        assert held.hits == 1
    else:
        job.coordinator.unheard = ("/verdict/2-0/0",)
        assert save(manager, epoch)
        with pytest.raises(UncertainError, match="verdict"):
            manager.wait_until_finished()
        node_1_gave_up.set()
    job.meet()


def test_restore_latest_takes_the_same_epoch_on_every_node(job: Job) -> None:
    """A node that has not heard of the newest commit restores it all the same, because the primary's count counts."""
    gave_up = threading.Event()

    def process(number: int) -> Any:
        manager = job.open()
        commit(manager, 1)
        commit_unheard(job, manager, 2, gave_up)
        return list(manager.all_steps()), manager.restore(None)["a"].tolist()

    (known_0, value_0), (known_1, value_1) = job.run(process)
    assert (known_0, known_1) == ([1, 2], [1])
    assert value_0 == value_1 == [2.0] * 4


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_save_that_one_node_refuses_fails_at_once_for_all_and_can_be_repeated(job: Job, refusing: int) -> None:
    """Its caller is told why; the others hear of it long before any timeout; the next try commits."""

    def process(number: int) -> Any:
        manager = job.open(save_timeout_secs=10 * WAIT_SECS)
        began = time.monotonic()
        if number == refusing:
            with pytest.raises(InvalidArgumentError, match="custom_metadata"):
                save(manager, 5, custom_metadata={"x": object()})
            manager.wait_until_finished()  # it has been told already
        else:
            assert save(manager, 5)
            who = "process_1.*" if refusing == 1 else ""  # the primary speaks for itself
            with pytest.raises(SaveError, match=f"{who}custom_metadata") as caught:
                manager.wait_until_finished()
            assert not isinstance(caught.value, LateNodesError)
        assert time.monotonic() - began < WAIT_SECS
        assert manager.all_steps() == []
        job.meet()
        commit(manager, 5)
        return list(manager.all_steps()), save(manager, 5)

    assert job.run(process) == [([5], False), ([5], False)]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_save_that_storage_of_one_node_is_behind_with_fails_for_all(job: Job, slow: int, faults: Faults) -> None:
    """No process waits for another one: all have asked for the same epochs, and all may ask for it again."""
    requested = threading.Event()
    hold = faults.hold(Store.create, where=lambda call: call.path.endswith(f"/process_{slow}/{paths.NODE_RECORD}"))

    def process(number: int) -> Any:
        manager = job.open(max_blocked_secs=0.05 if number == slow else None)
        for epoch in (1, 2, 3):
            assert save(manager, epoch, metrics={"loss": epoch})
        asked = [
            (info.step, info.metrics)
            for info in manager.components.history.requested(manager.components.saves.queue.saving())
        ]
        may = manager.should_save(3), manager.should_save(4)
        if number == slow:
            behind = r"checkpoint 3 .*storage is behind: .*checkpoint 1, .*\((writing|waiting|beginning)"
            with pytest.raises(StorageBehindError, match=behind):
                manager.check_for_errors()
            assert manager.status(3).state == "failed"
            assert requested.wait(WAIT_SECS)
            hold.let_go()
            manager.wait_until_finished()
        else:
            requested.set()
            who = "process_1: " if slow == 1 else ""
            with pytest.raises(StorageBehindError, match=f"checkpoint 3 was not committed: .*{who}storage is behind"):
                manager.wait_until_finished()
        results = [(one.epoch, one.committed, one.behind) for one in manager.pop_save_results()]
        between = list(manager.all_steps()), sorted(results)
        job.meet()
        commit(manager, 3)
        manager.close()
        return asked, may, between, list(manager.all_steps())

    asked = [(epoch, {"loss": epoch}) for epoch in (1, 2, 3)]
    results = [(1, True, False), (2, True, False), (3, False, True)]
    assert job.run(process) == [(asked, (False, True), ([1, 2], results), [1, 2, 3])] * 2


def test_nodes_that_know_different_epochs_delete_alike_and_still_agree_later(job: Job) -> None:
    """Whether an epoch can be deleted is for the primary to say; no node leaves the common count of calls."""
    gave_up = threading.Event()

    def process(number: int) -> Any:
        manager = job.open()
        commit(manager, 1)
        commit_unheard(job, manager, 2, gave_up)
        manager.delete(2)
        with pytest.raises(EpochNotFoundError, match="committed: 1"):
            manager.delete(2)
        manager.reload()
        after = list(manager.all_steps())
        commit(manager, 3)
        return after, list(manager.all_steps()), manager.restore(None)["a"].tolist()

    assert job.run(process) == [([1], [1, 3], [3.0] * 4)] * 2


def test_an_epoch_can_be_deleted_before_every_node_has_heard_of_it(job: Job) -> None:
    """A node whose verdict comes only after the primary's deletion takes part in it, and forgets the epoch."""

    def process(number: int) -> Any:
        manager = job.open()
        commit(manager, 1)
        if number == 1:
            coordinator = job.coordinator
            deleted = f"{manager.components.directory.prefix}/call/2-0/delete(2)/0/decision"

            def be_late(key: str) -> None:
                if key.endswith("/verdict/2-0/0"):
                    coordinator.get(deleted, WAIT_SECS)

            coordinator.before_get = be_late
            assert save(manager, 2)
        else:
            commit(manager, 2)
        manager.delete(2)
        manager.wait_until_finished()
        after = list(manager.all_steps())
        manager.reload()
        return after, list(manager.all_steps())

    assert job.run(process) == [([1], [1])] * 2


def test_processes_agree_again_after_a_commit_that_hung(
    job: Job, faults: Faults, patience: Callable[..., None]
) -> None:
    """Past every timeout it is uncertain everywhere; when it takes place after all, the next save tells everybody."""
    patience(verdict_margin_secs=0.5)
    hang = faults.hold(Store.rename, where=lambda call: call.target == "1")

    def process(number: int) -> Any:
        manager = job.open()
        if number == 1:
            job.coordinator.unheard = ("/verdict/1-0/0",)
        assert save(manager, 1)
        assert hang.reached.wait(WAIT_SECS)
        if number == 0:
            manager.components.saves.queue.pending()[0].start_bound(Deadline(0))
        manager.components.saves.queue.drain()
        with pytest.raises(UncertainError, match="uncertain whether checkpoint 1 was committed"):
            manager.check_for_errors()
        between = manager.status(1).state, list(manager.all_steps())
        job.coordinator.unheard = ()
        job.meet()
        hang.let_go()
        commit(manager, 2)
        costs = [cost.epoch for cost in manager.components.history.pace.costs()]  # `auto_interval` decides from them
        return *between, list(manager.all_steps()), costs

    assert job.run(process) == [("uncertain", [], [1, 2], [1])] * 2


@pytest.mark.long
@pytest.mark.parametrize("paused", [0, 1])
def test_after_a_long_pause_nodes_that_do_not_compute_in_step_commit_again(
    job: Job, paused: int, patience: Callable[..., None]
) -> None:
    """They stay as far apart as the pause has put them, further than the timeout: each is waited for that much longer,
    and one that is far ahead is held back."""
    patience(verdict_margin_secs=0.5)
    epochs, pace, timeout = range(40), 0.4, 4.0

    def process(number: int) -> Any:
        manager = job.open(save_timeout_secs=timeout)
        for epoch in epochs:
            threading.Event().wait(8.0 if (number, epoch) == (paused, 3) else pace)
            assert save(manager, epoch)
        with contextlib.suppress(SaveError):
            manager.wait_until_finished()
        return list(manager.all_steps())

    one, other = job.run(process)
    assert one == other
    assert one[:3] == [0, 1, 2]
    assert one[-6:] == list(epochs[-6:])


def test_a_coordination_service_that_hangs_holds_no_training(job: Job) -> None:
    """The primary's machine is silent when a node is to report what it has written."""
    go = threading.Event()

    def process(number: int) -> Any:
        manager = job.open()
        commit(manager, 0)
        job.meet()
        if number == 1:
            job.coordinator.before_put = lambda key: go.wait(WAIT_SECS)
            for epoch in range(1, 5):
                assert save(manager, epoch)
                assert manager.components.saves.queue.pending()[-1].written.wait(WAIT_SECS)
            assert not go.is_set()
            go.set()
        else:
            assert go.wait(WAIT_SECS)
            for epoch in range(1, 5):
                assert save(manager, epoch)
        manager.wait_until_finished()
        return list(manager.all_steps())

    assert job.run(process) == [list(range(5))] * 2


def test_save_never_waits_for_another_node(job: Job, patience: Callable[..., None]) -> None:
    """With a silent peer saves return at once; past a bounded number they fail and say what they would wait for."""
    patience(report_secs=0.2)
    limit, silent = 5.0, threading.Event()
    epochs = range(1, MAX_UNDECIDED + 5)

    def process(number: int) -> Any:
        manager = job.open(save_timeout_secs=limit)
        if number == 1:
            assert silent.wait(WAIT_SECS)
            return None
        try:
            for epoch in epochs:
                assert save(manager, epoch)
            assert {manager.status(epoch).state for epoch in epochs} == {"saving"}  # the limit has not passed
            with pytest.raises(SaveErrorGroup) as caught:
                manager.wait_until_finished()
            return caught.value.errors, list(manager.all_steps())
        finally:
            silent.set()

    (errors, committed), _ = job.run(process)
    assert committed == []
    assert [e.epoch for e in errors] == list(epochs)
    late = [e for e in errors if isinstance(e, LateNodesError)]
    assert 0 < len(late) <= MAX_UNDECIDED + 1
    assert errors[: len(late)] == late
    assert {tuple(e.nodes) for e in late} == {("process_1",)}
    assert all("waiting for their nodes" in e.reason for e in errors[len(late) :])


def test_a_silent_primary_holds_no_other_nodes_saves(job: Job) -> None:
    """The other node saves far ahead of the primary, without waiting; once the primary comes, all of it commits."""
    epochs, ahead = list(range(8)), threading.Event()

    def process(number: int) -> Any:
        manager = job.open()
        commit(manager, 100)  # from here on both know who has claimed the directory
        if number == 0:
            assert ahead.wait(WAIT_SECS), "the other node waits for the primary"
        for epoch in epochs:
            assert save(manager, epoch, force=True)
        ahead.set()
        manager.wait_until_finished()
        return list(manager.all_steps())

    assert job.run(process) == [[*epochs, 100]] * 2


def test_a_node_that_does_not_hear_of_the_claim_names_the_primary(job: Job) -> None:
    """It writes nothing, and the primary, which hears why, commits nothing."""

    def process(number: int) -> Any:
        manager = job.open()
        if number == 1:
            job.coordinator.unheard = ("/claim/1-0/decision",)
        assert save(manager, 1)
        with pytest.raises(SaveError) as raised:
            manager.wait_until_finished()
        return str(raised.value)

    for error in job.run(process):
        assert re.search("no report within .* from process_0", error)
    assert not (job.directory / "1").exists()


def test_nodes_learn_of_the_claim_from_whatever_they_do_first(job: Job, faults: Faults) -> None:
    """A claim that fails, and one that a delete makes: the other node never waits for a word that does not come."""

    def process(number: int) -> Any:
        with job.open() as manager:
            commit(manager, 1)
        job.meet()
        manager = job.open()
        if number == 0:
            faults.fail(
                Store.make_folder,
                OSError(errno.EIO, os.strerror(errno.EIO)),
                where=lambda call: paths.parse_unclaimed(call.path) is not None,
                times=1,
            )
        job.meet()
        assert save(manager, 2)
        with pytest.raises(SaveError, match="Input/output error"):
            manager.wait_until_finished()
        with pytest.raises(EpochNotFoundError):
            manager.delete(17)
        commit(manager, 3)
        manager.delete(1)
        commit(manager, 4)
        manager.close()
        return list(manager.all_steps())

    assert job.run(process) == [[3, 4]] * 2


def test_a_node_that_is_slow_but_answers_costs_no_save(job: Job, patience: Callable[..., None]) -> None:
    """A primary far ahead of the others is held back in the background; none of its saves fails."""
    patience(report_secs=WAIT_SECS)
    epochs = list(range(4 * MAX_UNDECIDED))

    def process(number: int) -> Any:
        manager = job.open()
        for epoch in epochs:
            if number == 1:
                threading.Event().wait(0.1)
            assert save(manager, epoch)
        manager.wait_until_finished()
        return list(manager.all_steps())

    assert job.run(process) == [epochs, epochs]


def test_waiting_for_a_write_that_hangs_is_bounded_and_names_this_node(
    faults: Faults, patience: Callable[..., None], tmp_path: pathlib.Path
) -> None:
    """A system call that does not return holds nobody past the save's bounds; what it still writes is not an epoch,
    and the snapshot of a save behind it is let go."""
    patience(verdict_margin_secs=0.5)
    discarded = threading.Event()
    faults.after(Store.remove_tree, lambda call: discarded.set())
    manager = ec.CheckpointManager(tmp_path / "run", storage=ec.StorageOptions(save_timeout_secs=0.5))
    with faults.hold(Writer.finish):
        assert save(manager, 1)
        assert save(manager, 2)
        behind = manager.components.saves.queue.pending()[1]
        assert behind.snapshot.trees
        with pytest.raises(SaveErrorGroup, match="process_0") as caught:
            manager.wait_until_finished()
        assert [getattr(e, "nodes", None) for e in caught.value.errors] == [["process_0"]] * 2
        assert not behind.snapshot.trees
        assert manager.status(1).state == "failed"
    assert discarded.wait(WAIT_SECS)
    manager.close()
    with ec.CheckpointManager(tmp_path / "run") as again:
        assert again.all_steps() == []


def test_saving_goes_on_beside_a_write_that_hangs_without_holding_training(
    faults: Faults, patience: Callable[..., None], tmp_path: pathlib.Path
) -> None:
    """Each save fails within its bound, as storage is behind, until `save` gives up the one that hangs."""
    patience(verdict_margin_secs=0.5)
    discarded = threading.Event()
    faults.after(Store.remove_tree, lambda call: discarded.set())
    storage = ec.StorageOptions(save_timeout_secs=2.0, max_blocked_secs=0.1)
    manager, failed = ec.CheckpointManager(tmp_path / "run", storage=storage), dict[int, SaveError]()
    with faults.hold(Writer.finish):
        for epoch in range(1000):
            assert save(manager, epoch)
            try:
                manager.check_for_errors()
            except SaveError as error:
                failed.update((one.epoch, one) for one in getattr(error, "errors", [error]))
            if 0 in failed:
                break
    assert isinstance(failed.pop(0), LateNodesError)
    assert failed
    assert all(isinstance(error, StorageBehindError) for error in failed.values())
    assert discarded.wait(WAIT_SECS)
    with contextlib.suppress(SaveError):
        manager.close()
    assert not set(manager.all_steps()) & {0, *failed}
    with ec.CheckpointManager(tmp_path / "run") as again:
        assert again.all_steps() == manager.all_steps()


def test_a_gather_hears_of_an_error_while_other_processes_are_silent() -> None:
    """Whichever of them it waits for, and long before its deadline."""
    now = 0.0

    class Silent(coordination.Coordinator):
        def get(self, key: str, timeout_secs: float) -> Any:
            nonlocal now
            now += timeout_secs
            raise CoordinationTimeoutError(key)

        def get_all(self, prefix: str) -> Mapping[str, Any]:
            return {"7": {"error": {}}} if now > 40 else {}

    found, missing = Silent().gather("reports", set(range(1, 9)), Deadline(600.0, lambda: now))
    assert found == {7: {"error": {}}}
    assert missing == {1, 2, 3, 4, 5, 6, 8}
    assert now < 60
    assert Silent().gather("reports", {1, 2}, Deadline(20.0, lambda: now)) == ({}, {1, 2})


def test_managers_of_one_process_share_what_jax_tells_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX knows one sequence of questions: every manager hears of the notice, whoever asked at the sync point."""
    asked: list[int] = []

    def sync_point(step: int) -> bool:
        asked.append(step)
        return step == 7

    monkeypatch.setattr(ocp.utils, "reached_preemption", sync_point)
    often, rarely = Preemption(), Preemption()
    answers = [(often.reached(s), often.reached(s), s % 3 == 0 and rarely.reached(s)) for s in range(100, 112)]
    assert asked == list(range(1, len(asked) + 1))
    first = next(i for i, a in enumerate(answers) if a[0])
    assert all(a[0] == a[1] for a in answers)
    assert all(a[0] for a in answers[first:])
    assert rarely.reached(112)
