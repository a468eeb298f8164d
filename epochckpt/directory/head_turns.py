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

from epochckpt import _patience

if TYPE_CHECKING:
    from epochckpt.directory.head_changes import Attachment
    from epochckpt.storage import Store


@dataclasses.dataclass(frozen=True)
class Pace:
    """How the tries of a change follow one another.

    Attributes:
        limit_secs: after which no further try begins; 0 for the usual time, see `storage.rounds`.
        yields: whether it lets others go first, in the store, too: a request that is refused is not repeated there.
    """

    limit_secs: float = 0.0
    yields: bool = False

    @property
    def pauses_secs(self) -> tuple[float, ...]:
        """The pauses before each try."""
        now = _patience.now()
        return now.attachment_pauses_secs if self.yields else now.change_pauses_secs


SAVES = Pace()
ATTACHMENTS = Pace(600.0, yields=True)


class Turns:
    """The turns of the writers of one head.

    Attributes:
        waiting: attachments that are not in the head yet. The next change that attaches takes them all along.
        urgent: how many writers wait that do not yield.
    """

    def __init__(self) -> None:
        self.waiting: list[Attachment] = []
        self._changed = threading.Condition()
        self.urgent = 0
        self._taken = False  # whether it is somebody's turn

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
            self.urgent += not pace.yields
            try:
                self._changed.wait_for(lambda: not self._taken and not (pace.yields and self.urgent))
                self._taken = True
            finally:
                self.urgent -= not pace.yields
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
