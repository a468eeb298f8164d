"""The ledger of a directory, as a run writes it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Sequence

from epochckpt import _threads
from epochckpt.directory import EpochDirectory
from epochckpt.directory.epoch_directory import Writer
from epochckpt.errors import DamagedError
from epochckpt.format import paths
from epochckpt.tiers.ledger import Ledger, Withdrawal, newest, settled_withdrawals, usable_ledger
from epochckpt.tiers.ledger_kinds import LedgerKind


class LedgerFile:
    """The ledger of a directory, as the run that has claimed it writes it.

    The primary changes it. Where each host has a copy of it, the other processes `adopt` the primary's. Every change
    goes through the run's claim of its directory, and is a FencedError once a newer run has claimed that. The lock is
    never taken on the caller's thread: a signal handler may call what it has interrupted.

    Attributes:
        kind: how the directory keeps it.
    """

    def __init__(self, local: EpochDirectory, kind: LedgerKind):
        self._local = local
        self.kind = kind
        self._writer: Writer | None = None  # of the directory, once it is claimed
        self._lock = threading.Lock()
        self._acting = set[object]()  # one for each call of `withdraw` that is under way
        self._open = frozenset[int]()  # epochs of withdrawals that were written, and may not hold

    def claimed(self, writer: Writer) -> None:
        """Tells that this run has claimed the directory: only from then on the ledger is written."""
        self._writer = writer

    def undecided(self) -> frozenset[int]:
        """Epochs of withdrawals of which it is not written yet whether they hold: no policy may delete these."""
        return self._open

    def read(self) -> Ledger | None:
        """See `usable_ledger`."""
        return usable_ledger(self._local.store)

    def known(self) -> Ledger:
        """The ledger, where there is one; DamagedError if it has gone."""
        ledger = self.read()
        if ledger is None:
            problem = "has gone, or is damaged, in a directory with a mirror: the next run writes it anew"
            raise DamagedError(paths.MIRROR_RECORD, problem)
        return ledger

    def write(self, ledger: Ledger) -> Ledger:
        """Writes the ledger as it is; returns it as it was written."""
        with self._lock:
            return self._write(ledger)

    def change(self, edit: Callable[[Ledger], Ledger]) -> Ledger:
        """Changes the ledger; returns the new one."""
        with self._lock:
            ledger = self.known()
            changed = edit(ledger)
            return ledger if changed == ledger else self._write(changed)

    def confirm_claim(self) -> None:
        """Writes the ledger once more, as it is; raises FencedError if a newer run has claimed the directory."""
        with self._lock:
            self._write(self.known())

    def adopt(self, text: str) -> None:
        """Writes a ledger of the primary's here, unless this one is newer; a text that cannot be used is left out."""
        _threads.start(lambda: self._adopt(text)).result()

    def _adopt(self, text: str) -> None:
        found = newest([text], self._local.store.root)
        if found is None:
            return
        with self._lock:
            own = self.read()
            if own is None or (own.serial <= found.serial and own != found):
                self._put(text.encode())

    def told(self) -> str:
        """What a task of the mirror tells the other processes to adopt: all of it, or nothing where they need none."""
        return self.known().to_bytes().decode() if self.kind.has_copies else ""

    def text(self) -> str:
        """The file's content; empty if there is none."""
        ledger = self.read()
        return "" if ledger is None else ledger.to_bytes().decode()

    def _write(self, ledger: Ledger) -> Ledger:
        ledger = self.kind.numbered(ledger)
        self._put(ledger.to_bytes())
        return ledger

    def _put(self, data: bytes) -> None:
        assert self._writer is not None, "the ledger is written by the run that has claimed the directory"
        self._writer.overwrite(paths.MIRROR_RECORD, data)

    # -- what is deleted or rolled back here ---------------------------------------------------------------------

    def disown(self, epochs: Collection[int], there: Collection[int]) -> None:
        """Notes that what the mirror has `there` of these epochs is no copy any more, and must not come back as one.

        If that cannot be noted, it is logged: no commit fails by it, and no thread ends.
        """
        if set(there).isdisjoint(epochs):
            return
        what = f"{self._local.store.root}: that its mirror's copies of {sorted(epochs)} are outdated is not noted"
        change = _threads.start(lambda: self._disown(epochs))
        _threads.logged(what, change.result)

    def _disown(self, epochs: Collection[int]) -> None:
        if self.read() is not None:
            self.change(lambda now: now.without(epochs))

    def withdraw(self, to: int | None, epochs: Sequence[int], act: Callable[[], None]) -> None:
        """Has the mirror follow what `act` does here: epochs are deleted, or rolled back.

        The ledger says so first. Whatever happens then, what is listed here decides: an epoch that is still listed
        does not leave the mirror. If that cannot be written now, `settle` does so later.
        """
        call = object()
        try:
            self._acting.add(call)
            _threads.start(lambda: self._plan(to, epochs)).result()
            act()
        finally:
            self._acting.discard(call)
            what = f"{self._local.store.root}: its mirror's ledger"
            _threads.logged(what, lambda: _threads.start(self.settle).result())

    def _plan(self, to: int | None, epochs: Sequence[int]) -> None:
        """Writes the withdrawal, if this directory has a mirror."""
        if not epochs:
            return
        with self._lock:
            ledger = self.read()
            if ledger is None:
                return
            here = set(self._local.list_epochs()).intersection(epochs)
            if to is not None:  # also what only the mirror has, and a manager without it does not list
                epochs = sorted({*epochs, *(epoch for epoch in (*ledger.copies, *ledger.copying) if epoch > to)})
            self._open |= here
            withdrawal = Withdrawal(to=to, epochs=tuple(epochs), here=tuple(sorted(here)))
            self._write(dataclasses.replace(ledger, withdrawals=(*ledger.withdrawals, withdrawal)))

    def settle(self) -> None:
        """Drops withdrawals whose epochs were not deleted here; the others hold, whatever is saved later.

        Nothing is decided while a call is under way that may delete it. Such a call writes its withdrawal under the
        lock.
        """
        with self._lock:
            ledger = None if self._acting else self.read()
            if ledger is None:
                return
            self._open |= {epoch for each in ledger.withdrawals for epoch in each.here}
            withdrawals = settled_withdrawals(ledger, self._local)
            if withdrawals != ledger.withdrawals:
                self._write(dataclasses.replace(ledger, withdrawals=withdrawals))
            self._open = frozenset()
