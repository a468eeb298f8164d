"""How much longer a save waits for processes that do not compute in step."""

import threading
from collections.abc import Callable, Iterable

from epochckpt.saving.save import Save

_MISSED = 16  # saves that are looked at again, per process: the oldest, which come first, and the newest


class Lags:
    """How late other processes have answered last.

    Processes that do not compute in step stay as far apart as a pause of one of them has put them, and a shorter bound
    on the wait would fail every later save. So a save waits longer for a process that has answered late, by how late
    that was: by more than `prompt_secs` after its start. It waits no longer for a silent process. `answered` says
    whether a process has answered a save by now.
    """

    def __init__(self, prompt_secs: float, answered: Callable[[Save, int], bool]):
        self._prompt_secs = prompt_secs
        self._answered = answered
        self._lock = threading.Lock()  # between the lanes; the training thread calls only `most`, which takes no lock
        self._secs: dict[int, float] = {}
        self._missed: dict[int, list[Save]] = {}

    def heard(self, processes: Iterable[int], save: Save | None = None) -> None:
        """Processes have answered a save now; None: they had answered before this process waited for them."""
        with self._lock:
            for process in processes:
                self._missed.pop(process, None)
                self._note(process, save)

    def missed(self, save: Save, processes: Iterable[int]) -> None:
        """Processes have not answered a save, which waits for them no more."""
        with self._lock:
            for process in processes:
                self._secs.pop(process, None)
                self._missed.setdefault(process, [])[_MISSED - 1 :] = [save]

    def look(self) -> None:
        """Looks whether processes that were missed have answered after all."""
        with self._lock:
            for process, missed in self._missed.items():
                for count in range(len(missed), 0, -1):
                    if self._answered(missed[count - 1], process):
                        self._note(process, missed[count - 1])
                        del missed[:count]
                        break

    def secs(self, processes: Iterable[int]) -> float:
        """By how much all of these are behind, at least, after a look at their answers."""
        self.look()
        with self._lock:
            return min((self._secs.get(process, 0.0) for process in processes), default=0.0)

    def most(self) -> float:
        """By how much the live process that is furthest behind is behind."""
        return max(list(self._secs.values()), default=0.0)

    def _note(self, process: int, save: Save | None) -> None:
        self._secs.pop(process, None)
        if save is not None and save.elapsed_secs > self._prompt_secs:
            self._secs[process] = save.elapsed_secs
