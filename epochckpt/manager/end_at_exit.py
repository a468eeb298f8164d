"""The end of a manager that is open when the program exits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from absl import logging

from epochckpt import _patience, _threads
from epochckpt._threads import Deadline, Future


class EndAtExit:
    """A manager of the directory `root` that is `closing`, for at most `timeout_secs` from now on.

    `pending` epochs were being saved when the program began to exit; `committed` says which ones are there.
    """

    def __init__(
        self,
        *,
        root: str,
        timeout_secs: float,
        closing: Future[None],
        pending: Sequence[int],
        committed: Callable[[], Sequence[int]],
    ):
        self._root = root
        self._timeout_secs = timeout_secs
        self._deadline = Deadline(timeout_secs)
        self._closing = closing
        self._pending = pending
        self._committed = committed

    def wait(self) -> None:
        """Waits for the end, and logs what is left to do when that takes long."""
        if not self._closing.wait(min(_patience.now().long_exit_secs, self._deadline.left())):
            text = "%s: before it exits, the program waits up to %.0f s for %s"
            logging.warning(text, self._root, self._deadline.left(), self._left_to_do())
        if self._closing.wait(self._deadline.left()):
            _threads.logged(f"{self._root}: at exit", self._closing.result)
            return
        logging.error(
            "%s: the file system has not answered for %g s; the program exits without the end of %s. What was "
            "committed before is untouched, and the next run removes what is left",
            self._root,
            self._timeout_secs,
            self._left_to_do(),
        )

    def _left_to_do(self) -> str:
        committed = self._committed()
        unsaved = ", ".join(str(epoch) for epoch in self._pending if epoch not in committed)
        return f"the save of checkpoint {unsaved}" if unsaved else "its clean-up"
