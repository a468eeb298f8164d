"""How much longer a save waits for processes that have answered late before, and no longer for silent ones."""

from __future__ import annotations

import time

import pytest

from epochckpt._threads import Deadline
from epochckpt.arrays.snapshot import Snapshot
from epochckpt.saving.lags import Lags
from epochckpt.saving.save import Save, SaveRequest

PROMPT_SECS = 1000.0


def begun(secs: float, epoch: int = 0) -> Save:
    """A save that began so many seconds ago."""
    return Save(SaveRequest(epoch=epoch, number=0, started=time.monotonic() - secs), Snapshot(), Deadline(60.0))


class Answers:
    """Which processes have answered which epochs' saves."""

    def __init__(self) -> None:
        self.given: set[tuple[int, int]] = set()

    def __call__(self, save: Save, process: int) -> bool:
        return (save.epoch, process) in self.given


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def lags(answers: Answers) -> Lags:
    return Lags(PROMPT_SECS, answers)


def test_a_process_that_answered_late_is_waited_for_as_long_as_it_was_late(lags: Lags) -> None:
    """And no longer once it has been prompt, or had answered before anybody waited."""
    lags.heard([1], begun(5000.0))
    lags.heard([2], begun(9000.0))
    assert lags.secs([1]) == pytest.approx(5000.0, abs=500.0)
    assert lags.secs([1, 2]) == pytest.approx(5000.0, abs=500.0)  # all of them are as far behind, at least
    assert lags.secs([1, 2, 3]) == lags.secs([]) == 0.0
    assert lags.most() == pytest.approx(9000.0, abs=500.0)
    lags.heard([2], begun(0.0))
    lags.heard([1])
    assert lags.secs([1]) == lags.secs([2]) == lags.most() == 0.0


def test_a_silent_process_is_not_waited_for_until_it_has_answered_after_all(lags: Lags, answers: Answers) -> None:
    """The newest answer counts, and the one that it gave to a save before the silence does not."""
    lags.heard([1], begun(5000.0))
    first, second, third = (begun(secs, epoch) for epoch, secs in enumerate((9000.0, 7000.0, 3000.0)))
    for save in (first, second, third):
        lags.missed(save, [1])
    assert lags.secs([1]) == lags.most() == 0.0
    answers.given.add((first.epoch, 1))
    assert lags.secs([1]) == pytest.approx(9000.0, abs=500.0)
    answers.given |= {(second.epoch, 1), (third.epoch, 1)}
    lags.look()
    assert lags.most() == pytest.approx(3000.0, abs=500.0)


def test_the_oldest_and_the_newest_of_many_missed_saves_are_looked_at(lags: Lags, answers: Answers) -> None:
    """Sixteen of them; others are forgotten."""
    for epoch in range(40):
        lags.missed(begun(10_000.0 - 100.0 * epoch, epoch), [1])
    answers.given |= {(epoch, 1) for epoch in range(15, 39)}
    assert lags.secs([1]) == 0.0
    answers.given.add((14, 1))
    assert lags.secs([1]) == pytest.approx(8600.0, abs=50.0)
    answers.given.add((39, 1))
    assert lags.secs([1]) == pytest.approx(6100.0, abs=50.0)
