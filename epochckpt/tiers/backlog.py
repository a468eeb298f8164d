"""What a mirror has, and which epochs are to be copied to it, as background threads and the manager share it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Mapping, Sequence

from absl import logging

from epochckpt import _threads
from epochckpt.options import StorageOptions


class MirrorEpochs:
    """The epochs that a mirror has, as the primary knows.

    Any thread may look, without a lock: each change replaces a whole mapping. Changes are made under the lock. The
    training thread never takes the lock, because a signal handler may interrupt it there, save, and wait for the
    background. So what any thread may change (`pin`, `withdraw`, `disown`) is changed in another thread, for which the
    caller waits. `look_was` and `learn` take no lock: they are called only while nothing runs in the background. The
    other changes are made by background threads alone.
    """

    def __init__(self) -> None:
        self._ids: Mapping[int, str] = {}
        self._readable: Mapping[int, str] = {}
        self._are_seen = False
        self._removed: list[int] = []
        self._lock = threading.Lock()
        self._pinned: int | None = None  # this epoch must stay
        self._leaving: int | None = None  # this one is being removed
        self._withdrawn = frozenset[int]()  # these were deleted or rolled back here, and are to be removed

    @property
    def ids(self) -> Mapping[int, str]:
        """The ids of all of them, by epoch."""
        return self._ids

    @property
    def readable(self) -> Mapping[int, str]:
        """The ids of those that are copies of this directory's history."""
        return self._readable

    @property
    def are_seen(self) -> bool:
        """Whether the mirror has shown them; else it has not answered yet, and they are as the ledger tells."""
        return self._are_seen

    def look_was(self, ids: Mapping[int, str], readable: Mapping[int, str], *, seen: bool) -> None:
        """What the mirror has, as a look before the first claim has shown, or the ledger if the mirror was not seen."""
        self._ids = dict(ids)
        self._readable = dict(readable)
        self._are_seen = seen

    def learn(self, readable: Mapping[int, str]) -> None:
        """These of its epochs are readable, too."""
        self._readable = {**self._readable, **readable}

    def take(self, ids: Mapping[int, str], readable: Mapping[int, str]) -> None:
        """After a look at the mirror: what it has."""
        with self._lock:
            self._ids = dict(ids)
            going = {*self._withdrawn, self._leaving}  # perhaps since the look
            self._readable = {epoch: id for epoch, id in readable.items() if epoch not in going}
            if self._leaving not in self._ids:
                self._leaving = None
            self._are_seen = True

    def begin_leaving(self, keep: float) -> int | None:
        """The epoch that is to be removed so that the mirror keeps no more than so many; None if it has no more.

        From then on the epoch is not readable, and counts as removed.
        """
        with self._lock:
            if self._leaving is None:
                staying = self._ids.keys() - self._withdrawn
                if len(staying) <= keep or min(staying) == self._pinned:
                    return None
                self._leaving = min(staying)
                self._removed.append(self._leaving)
                self._readable = {epoch: id for epoch, id in self._readable.items() if epoch != self._leaving}
            return self._leaving

    def set(self, epoch: int, mirror_id: str) -> None:
        """The mirror has a copy of the epoch that is here."""
        with self._lock:
            self._withdrawn = self._withdrawn.difference([epoch])
            self._ids = {**self._ids, epoch: mirror_id}
            self._readable = {**self._readable, epoch: mirror_id}

    def drop(self, epochs: Collection[int]) -> None:
        """The mirror has these epochs no longer."""
        with self._lock:
            self._ids = {epoch: id for epoch, id in self._ids.items() if epoch not in epochs}
            self._readable = {epoch: id for epoch, id in self._readable.items() if epoch not in epochs}
            self._withdrawn = self._withdrawn.difference(epochs)
            if self._leaving in epochs:
                self._leaving = None

    def pop_removed(self) -> list[int]:
        """Epochs that were removed for `mirror_keep` since the last call."""
        with self._lock:
            popped = self._removed
            self._removed = []
        return popped

    # -- what any thread may change ------------------------------------------------------------------------------

    def pin(self, epoch: int | None) -> bool:
        """Has one epoch stay in the mirror, whatever `mirror_keep` says; None: none. False if it is not there."""
        return _threads.start(lambda: self._pin(epoch)).result()

    def _pin(self, epoch: int | None) -> bool:
        with self._lock:
            self._pinned = epoch
            return epoch is None or epoch in self._readable

    def withdraw(self, epochs: Collection[int]) -> None:
        """These epochs were deleted or rolled back here, and the mirror is to follow."""
        _threads.start(lambda: self._hide(epochs, withdrawn=epochs)).result()

    def disown(self, epochs: Collection[int]) -> None:
        """What the mirror has under these numbers is no copy of this directory's any more."""
        _threads.start(lambda: self._hide(epochs)).result()

    def _hide(self, epochs: Collection[int], withdrawn: Collection[int] = ()) -> None:
        with self._lock:
            self._withdrawn = self._withdrawn.union(withdrawn)
            self._readable = {epoch: id for epoch, id in self._readable.items() if epoch not in epochs}


@dataclasses.dataclass(frozen=True, eq=False)
class Due:
    """One epoch that is to be copied; two of one number are two saves of it."""

    epoch: int


class Backlog:
    """The epochs that are to be copied, in order.

    Only background threads use it, and take its lock. The training thread may call `withdraw`, which does so in
    another thread.
    """

    def __init__(self, url: str, options: StorageOptions):
        self._url = url
        self._options = options
        self._lock = threading.Lock()
        self._due: list[Due] = []
        self._copying: Due | None = None
        self._since = 0  # epochs that were committed since the last that is to be copied
        self._fresh = set[int]()  # epochs that were committed since the last look at the mirror began
        self._outdated = frozenset[int]()  # epochs that the mirror has, or may have, in an older form

    def begin(self, epochs: Sequence[int], present: Collection[int], outdated: Collection[int]) -> None:
        """Takes the epochs of the directory, those that the mirror has, and those that it has in an older form."""
        newest = max(present, default=-1)
        missing = [epoch for epoch in epochs if epoch > newest]
        every = self._options.mirror_every
        with self._lock:
            self._due = [Due(epoch) for epoch in (*sorted(outdated), *missing[every - 1 :: every])]
            self._since = len(missing) % every
            self._outdated = frozenset(outdated)
            self._bound(present)

    def committed(self, epoch: int, epochs: MirrorEpochs) -> None:
        """An epoch was committed here.

        If an older save of it is in the mirror, or is being copied, it is due. Whether it is there is asked under the
        lock: a copy that has just been made is there before `done` says so.
        """
        with self._lock:
            self._since += 1
            self._fresh.add(epoch)
            present = epochs.ids.keys()
            copying = self._copying is not None and self._copying.epoch == epoch
            if self._since >= self._options.mirror_every or copying or epoch in present:
                self._since = 0
                others = (due for due in self._due if due.epoch != epoch or due is self._copying)
                self._due = [*others, Due(epoch)]
                self._bound(present)

    def _bound(self, present: Collection[int]) -> None:
        """Keeps the backlog within its bound, under the lock: the oldest epochs are not mirrored.

        What the mirror has in an older form, or is about to have, is never left out.
        """
        copying = set() if self._copying is None else {self._copying.epoch}
        kept = {*present, *self._outdated, *copying}
        waiting = [due for due in self._due if due is not self._copying and due.epoch not in kept]
        skipped = waiting[: max(0, len(waiting) - self._options.mirror_backlog)]
        if skipped:
            self._due = [due for due in self._due if due not in skipped]
            names = ", ".join(str(due.epoch) for due in skipped)
            text = "%s: it is behind, and checkpoint %s is left out: at most %d may wait (mirror_backlog)"
            logging.warning(text, self._url, names, self._options.mirror_backlog)

    def begin_look(self) -> None:
        """A comparison of the mirror with this directory begins now; `correct` takes its result."""
        with self._lock:
            self._fresh = set()

    def correct(self, outdated: Collection[int], present: Collection[int]) -> frozenset[int]:
        """Takes the result of the comparison.

        The mirror has the `outdated` epochs in an older form, and the `present` ones as they are here. Returns the
        epochs that were committed since the comparison began; it does not cover them.
        """
        with self._lock:
            due = {each.epoch for each in self._due if each.epoch not in present or each.epoch in self._fresh}
            self._due = [Due(epoch) for epoch in sorted({*outdated, *due})]
            self._outdated = frozenset(outdated)
            return frozenset(self._fresh)

    def withdraw(self, epochs: Collection[int]) -> None:
        """These epochs are not to be copied any more."""
        _threads.start(lambda: self._withdraw(epochs)).result()

    def _withdraw(self, epochs: Collection[int]) -> None:
        with self._lock:
            self._due = [due for due in self._due if due.epoch not in epochs]

    def add(self, epoch: int) -> None:
        """One more epoch is due, unless it is already."""
        with self._lock:
            if epoch not in [due.epoch for due in self._due]:
                self._due.append(Due(epoch))

    def take(self) -> int | None:
        """The next epoch to be copied, if there is one."""
        with self._lock:
            self._copying = self._due[0] if self._due else None
            return None if self._copying is None else self._copying.epoch

    def done(self) -> None:
        """The epoch that was taken has been copied, or cannot be. A later save of its number stays due."""
        with self._lock:
            self._due = [due for due in self._due if due is not self._copying]
            self._copying = None

    def failed(self) -> None:
        """The copy that was taken has failed for now."""
        with self._lock:
            self._copying = None

    def waiting(self) -> frozenset[int]:
        """The epochs that are due."""
        with self._lock:
            return frozenset(due.epoch for due in self._due)
