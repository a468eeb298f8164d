"""Who changes a head next: one writer at a time in this process, and those that nobody waits for give way.

A bucket takes few writes of one object, Google Cloud Storage one a second, and refuses the others. A save changes the
head two or three times. Evaluators that attach metrics, mostly in other processes, change it, too. So within a process
attachments wait for saves, and all that are waiting go with one change. Between processes their tries are far apart and
at different times, so that nearly each write of a save finds the object free: attaching takes longer instead.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epochckpt.directory.head_changes import Attachment
    from epochckpt.storage import Store


@dataclasses.dataclass(frozen=True)
class Pace:
    """How the tries of a change follow one another.

    Attributes:
        pauses_secs: pauses before each try, see `storage.rounds`; empty for the usual ones.
        limit_secs: after which no further try begins; 0 as above.
        yields: whether it lets others go first, in the store, too: a request that is refused is not repeated there.
    """

    pauses_secs: tuple[float, ...] = ()
    limit_secs: float = 0.0
    yields: bool = False


SAVES = Pace()
ATTACHMENTS = Pace((0.0, 0.0, 1.0, 2.0, 4.0, 8.0, *(16.0,) * 50), 600.0, yields=True)


class Turns:
    """The turns of the writers of one head.

    Attributes:
        waiting: attachments that are not in the head yet. The next change that attaches takes them all along.
    """

    def __init__(self) -> None:
        self.waiting: list[Attachment] = []
        self._changed = threading.Condition()
        self._taken, self._urgent = False, 0  # whether somebody's turn it is; who waits that does not yield

    @contextmanager
    def waits(self, attachment: Attachment) -> Generator[None]:
        """An attachment waits during the block: whoever attaches meanwhile takes it along."""
        self.waiting.append(attachment)
        try:
            yield
        finally:
            self.waiting.remove(attachment)

    @contextmanager
    def taken(self, pace: Pace) -> Generator[None]:
        """Nobody else's turn is it during the block."""
        with self._changed:
            self._urgent += not pace.yields
            try:
                self._changed.wait_for(lambda: not self._taken and not (pace.yields and self._urgent))
                self._taken = True
            finally:
                self._urgent -= not pace.yields
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()


_turns = weakref.WeakValueDictionary[tuple[str, str], Turns]()
_lock = threading.Lock()


def of(store: Store) -> Turns:
    """The turns at the head of a directory; all writers of this process share them."""
    with _lock:
        return _turns.setdefault((store.root.rstrip("/"), store.endpoint), Turns())
