"""The phases of a save: which moves there are, that each is made once, and how a save ends."""

from __future__ import annotations

import itertools
import pathlib
import re
import threading
from collections.abc import Callable

import pytest

from epochckpt import _progress
from epochckpt._threads import Deadline
from epochckpt.arrays.snapshot import Snapshot
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.errors import LateNodesError, SaveError, StorageBehindError, UncertainError
from epochckpt.format import Nodes
from epochckpt.saving.history import History
from epochckpt.saving.in_flight import InFlight
from epochckpt.saving.reports import Committed
from epochckpt.saving.save import Phase, Save, SaveRequest
from epochckpt.storage import Tally
from epochckpt.tiers import NO_MIRROR

MOVES = {
    (Phase.QUEUED, Phase.CLAIMING),
    (Phase.CLAIMING, Phase.WRITING),
    (Phase.CLAIMING, Phase.WRITTEN),
    (Phase.WRITING, Phase.WRITTEN),
    (Phase.WRITTEN, Phase.COMMITTING),
    (Phase.COMMITTING, Phase.COMMITTED),
    (Phase.COMMITTING, Phase.UNCERTAIN),
    (Phase.WRITTEN, Phase.UNCERTAIN),
    (Phase.UNCERTAIN, Phase.COMMITTED),
    (Phase.QUEUED, Phase.DROPPED),
    (Phase.QUEUED, Phase.FAILED),
    (Phase.CLAIMING, Phase.FAILED),
    (Phase.WRITING, Phase.FAILED),
    (Phase.WRITTEN, Phase.FAILED),
    (Phase.COMMITTING, Phase.FAILED),
    (Phase.UNCERTAIN, Phase.FAILED),
}
ROADS = {
    Phase.QUEUED: (),
    Phase.CLAIMING: (Phase.CLAIMING,),
    Phase.WRITING: (Phase.CLAIMING, Phase.WRITING),
    Phase.WRITTEN: (Phase.CLAIMING, Phase.WRITING, Phase.WRITTEN),
    Phase.COMMITTING: (Phase.CLAIMING, Phase.WRITING, Phase.WRITTEN, Phase.COMMITTING),
    Phase.UNCERTAIN: (Phase.CLAIMING, Phase.WRITING, Phase.WRITTEN, Phase.COMMITTING, Phase.UNCERTAIN),
    Phase.COMMITTED: (Phase.CLAIMING, Phase.WRITING, Phase.WRITTEN, Phase.COMMITTING, Phase.COMMITTED),
    Phase.FAILED: (Phase.FAILED,),
    Phase.DROPPED: (Phase.DROPPED,),
}


def pictured(picture: str) -> set[tuple[Phase, Phase]]:
    """The moves that a picture shows: lines of phases, with an arrow between those that a move joins."""
    moves = set()
    for line in picture.splitlines():
        groups = [[Phase[name] for name in re.findall(r"[A-Z]{6,}", group)] for group in line.split("──►")]
        for before, after in itertools.pairwise(groups):
            moves |= set(itertools.product(before, after))
    return moves


def test_the_pictures_show_every_move() -> None:
    assert pictured((Phase.__doc__ or "").partition("\n    |")[0]) == MOVES
    page = pathlib.Path(__file__).parents[2].joinpath("docs/architecture.md").read_text("utf-8")
    assert pictured(page.partition("### The phases of a save")[2].split("```")[1]) == MOVES


def in_phase(phase: Phase, refusal: Exception | None = None) -> Save:
    save = Save(SaveRequest(epoch=3, number=0, refusal=refusal), Snapshot(), Deadline(60.0))
    for step in ROADS[phase]:
        assert save.advance(step)
    assert save.phase is phase
    return save


class Told:
    """A listener that keeps how saves have ended."""

    def __init__(self) -> None:
        self.ends: list[SaveError | None] = []

    def announce(self, save: Save, commit: Committed) -> None:
        raise AssertionError("nothing here announces")

    def ended(self, save: Save, failure: SaveError | None) -> None:
        self.ends.append(failure)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def in_flight(told: Told) -> InFlight:
    history = History(lambda epoch: pytest.fail("nothing reads a record"), True, mirror=NO_MIRROR)
    return InFlight(root="run", nodes=Nodes(("process_0",)), history=history, listener=told)


@pytest.mark.parametrize(("now", "to"), [*itertools.product(Phase, Phase)])
def test_a_save_makes_the_moves_of_the_table_and_no_other(now: Phase, to: Phase) -> None:
    """Whatever is not in the table leaves the save where it is."""
    save = in_phase(now)
    assert save.advance(to) is ((now, to) in MOVES)
    assert save.phase is (to if (now, to) in MOVES else now)


def test_of_many_threads_one_makes_a_move() -> None:
    """Also where they end the save in different ways."""
    for _ in range(50):
        save = in_phase(Phase.COMMITTING)
        gate, won = threading.Barrier(8), list[Phase]()

        def end(to: Phase, save: Save = save, gate: threading.Barrier = gate, won: list[Phase] = won) -> None:
            gate.wait()
            if save.advance(to):
                won.append(to)

        kinds = [Phase.COMMITTED, Phase.FAILED] * 4
        threads = [threading.Thread(target=end, args=(to,)) for to in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [save.phase]


def test_a_save_that_may_be_committed_is_not_given_up() -> None:
    """Before that it is; afterwards the same call changes nothing."""
    assert in_phase(Phase.WRITTEN).advance(Phase.FAILED, before=Phase.COMMITTING)
    for phase in (Phase.COMMITTING, Phase.COMMITTED, Phase.UNCERTAIN):
        save = in_phase(phase)
        assert not save.advance(Phase.FAILED, before=Phase.COMMITTING)
        assert save.phase is phase


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.CLAIMING, Phase.WRITING, Phase.WRITTEN])
def test_a_wait_beyond_the_last_bound_fails_a_save_that_is_not_committing(
    phase: Phase, in_flight: InFlight, told: Told, patience: Callable[..., None]
) -> None:
    """It names this process's node, and its late outcome changes nothing."""
    patience(verdict_margin_secs=0.0)
    save = in_phase(phase)
    save.start_bound(Deadline(0.0))
    in_flight.add(save)
    assert in_flight.wait(save, save.done)
    in_flight.finish(save, SaveError(3, "the nodes differ"))
    assert (save.phase, in_flight.all()) == (Phase.FAILED, [])
    assert told.ends == in_flight.untold() == [save.failure]
    assert isinstance(save.failure, LateNodesError)
    assert save.failure.nodes == ["process_0"]


def test_a_wait_for_a_commit_that_hangs_ends_uncertain_and_the_commit_settles_it(
    in_flight: InFlight, told: Told, patience: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """The manager is told once; the log says when the commit is known after all."""
    patience(verdict_margin_secs=0.0)
    save = in_phase(Phase.COMMITTING)
    save.start_bound(Deadline(0.0))
    in_flight.add(save)
    assert in_flight.wait(save, save.done)
    assert save.phase is Phase.UNCERTAIN
    assert isinstance(save.failure, UncertainError)
    assert in_flight.failure(3) == ("uncertain", save.failure.reason)
    with caplog.at_level("WARNING", logger="absl"):
        in_flight.finish(save, Committed(epoch=3, summary=EpochSummary.unrecorded(metrics=None, time_ns=0)))
        in_flight.finish(save, Committed(epoch=3, summary=EpochSummary.unrecorded(metrics=None, time_ns=0)))
    assert save.phase is Phase.COMMITTED
    assert len(told.ends) == 1
    assert caplog.text.count("checkpoint 3 was committed after all; its outcome had been unknown") == 1


def test_what_ctrl_c_left_half_ended_is_ended_by_the_next_outcome(in_flight: InFlight, told: Told) -> None:
    """A thread was interrupted between its move and letting go: nobody waits for ever, and the first failure counts."""
    save, late = in_phase(Phase.WRITING), SaveError(3, "late")
    in_flight.add(save)
    assert save.advance(Phase.FAILED, before=Phase.COMMITTING, failure=late)
    in_flight.finish(save, SaveError(3, "another reason"))
    assert save.done.done()
    assert save.written.done()
    assert (in_flight.all(), told.ends) == ([], [late])


def test_a_refusal_that_save_has_raised_is_not_told_again(in_flight: InFlight, told: Told) -> None:
    """`wait_until_finished` raises nothing that `save` has raised. Where storage was behind, it was told at once."""
    raised = in_phase(Phase.WRITTEN, refusal=ValueError("bad"))
    behind = in_phase(Phase.WRITTEN, refusal=StorageBehindError(3, "slow"))
    for save in (raised, behind):
        in_flight.add(save)
        in_flight.finish(save, SaveError(3, "it could not begin"))
    assert in_flight.untold() == []
    assert told.ends == [raised.failure]


def test_a_save_that_was_not_needed_is_let_go_and_nobody_is_told(in_flight: InFlight, told: Told) -> None:
    """Before it begins; one that is under way goes on."""
    dropped, begun = in_phase(Phase.QUEUED), in_phase(Phase.WRITING)
    for save in (dropped, begun):
        in_flight.add(save)
        in_flight.drop(save)
    assert (dropped.phase, begun.phase) == (Phase.DROPPED, Phase.WRITING)
    assert in_flight.all() == [begun]
    assert told.ends == []


def test_a_wait_shows_what_this_process_has_written_of_the_save() -> None:
    """Not what the store had written before, and all of it once its nodes have written."""
    tally = Tally()
    tally.add(100)
    save = Save(SaveRequest(epoch=3, number=0, nbytes=400), Snapshot(), Deadline(60.0))
    with _progress.work("waiting") as outer, save.shown(tally):
        assert outer.figures() == (0.0, 400)
        save.begin_writing(tally)
        tally.add(250)
        assert outer.figures() == (250.0, 400)
        save.written.set(None)
        assert outer.figures() == (400.0, 400)
