"""Which epochs are due to be copied to a mirror, and which are left out when it is behind."""

import signal
from collections.abc import Callable, Iterator

import pytest

import epochckpt as ec
from epochckpt import _threads
from epochckpt.tiers.backlog import Backlog, MirrorEpochs


def backlog(**options: int) -> Backlog:
    """One that has nothing to do yet."""
    made = Backlog(url="mirror", options=ec.StorageOptions(mirror="mirror", **options))
    made.begin([], [], [])
    return made


def due(made: Backlog) -> list[int]:
    """The epochs that are copied, in order."""
    taken = list[int]()
    while (epoch := made.take()) is not None:
        taken.append(epoch)
        made.done()
    return taken


def test_the_oldest_epochs_are_left_out_when_the_mirror_is_behind() -> None:
    made = backlog(mirror_backlog=2)
    for epoch in range(5):
        made.committed(epoch, MirrorEpochs())
    assert due(made) == [3, 4]


def test_what_the_mirror_has_in_an_older_form_is_never_left_out() -> None:
    made = backlog(mirror_backlog=1)
    epochs = MirrorEpochs()
    epochs.set(1, "older")
    for epoch in (1, 2, 3):
        made.committed(epoch, epochs)
    assert due(made) == [1, 3]


def test_what_is_being_copied_in_an_older_form_is_never_left_out() -> None:
    """It is in the mirror in a moment, and would come back there as what it was."""
    made = backlog(mirror_backlog=1)
    epochs = MirrorEpochs()
    made.committed(4, epochs)
    assert made.take() == 4
    for epoch in (4, 5, 6):  # 4 is replaced while its first form is being copied
        made.committed(epoch, epochs)
    epochs.set(4, "first form")
    made.done()
    assert due(made) == [4, 6]


def test_with_mirror_every_the_epochs_between_are_not_due() -> None:
    made = backlog(mirror_every=3)
    for epoch in range(7):
        made.committed(epoch, MirrorEpochs())
    assert due(made) == [2, 5]


class Interrupting(list[int]):
    """Epochs; a signal arrives whenever a change under a lock looks whether they contain one."""

    def __contains__(self, epoch: object) -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return super().__contains__(epoch)

    def __iter__(self) -> Iterator[int]:
        signal.raise_signal(signal.SIGUSR1)
        return super().__iter__()


@pytest.mark.parametrize("change", [MirrorEpochs.disown, MirrorEpochs.withdraw])
def test_a_signal_handler_may_wait_for_the_background_wherever_it_interrupts(
    change: Callable[[MirrorEpochs, list[int]], None],
) -> None:
    """It saves and waits for the commit, and the commit lane changes the same epochs."""
    epochs = MirrorEpochs()
    epochs.set(1, "one")
    epochs.set(2, "two")
    ended: list[bool] = []

    def handler(*_: object) -> None:
        ended.append(_threads.start(lambda: epochs.disown([2])).wait(5.0))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        change(epochs, Interrupting([1]))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended
    assert all(ended)
    assert epochs.readable == {}


def test_what_is_withdrawn_while_the_mirror_is_looked_at_is_not_readable_by_that_look() -> None:
    """It was seen before it was deleted here, and stays in the mirror until that is followed."""
    epochs = MirrorEpochs()
    seen = {1: "one", 2: "two"}
    epochs.take(ids=seen, readable=seen)
    epochs.withdraw([2])
    epochs.take(ids=seen, readable=seen)
    assert epochs.ids == seen
    assert epochs.readable == {1: "one"}
    epochs.drop([2])
    epochs.set(2, "saved again")
    assert epochs.readable == {1: "one", 2: "saved again"}
