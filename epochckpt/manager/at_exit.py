"""Closes a manager when the program ends, within a bound: the exit waits for saves, but not for a dead file system."""

from __future__ import annotations

from collections.abc import Callable

from absl import logging

from epochckpt import _threads
from epochckpt._threads import Deadline

_QUIET_SECS = 10.0  # how long an exit may take without a word


def begin_close(
    close: Callable[[], None], directory: str, timeout_secs: float, unsaved: Callable[[], list[int]]
) -> Callable[[], None]:
    """Begins to close a manager; the call that is returned waits for the end, and says so if that takes long.

    Args:
        close: closes it. Runs in a thread that can be abandoned.
        directory: for messages.
        timeout_secs: how long to wait.
        unsaved: the epochs whose saves have not ended yet.
    """
    deadline, closing = Deadline(timeout_secs), _threads.start(close)

    def left_to_do() -> str:
        epochs = ", ".join(map(str, unsaved()))
        return f"the save of epoch {epochs}" if epochs else "its clean-up"

    def wait() -> None:
        if not closing.wait(min(_QUIET_SECS, deadline.left())):
            what, secs = left_to_do(), deadline.left()
            logging.warning("%s: before it exits, the program waits up to %.0f s for %s", directory, secs, what)
        if closing.wait(deadline.left()):
            _threads.logged(f"{directory}: at exit", closing.result)
        else:
            logging.error(
                "%s: the file system has not answered for %g s; the program exits without the end of %s. What was "
                "committed before is untouched, and the next run removes what is left",
                directory,
                timeout_secs,
                left_to_do(),
            )

    return wait
