"""Who holds a directory: what a run writes down when it claims it, and what a later run says when it takes over."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
import time

from absl import logging

from epochckpt import units

MAX_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Owner:
    """The process that claimed a directory.

    Attributes:
        host: its host name.
        pid: its process id there.
        claimed_ns: when it claimed, by its wall clock.
    """

    host: str
    pid: int
    claimed_ns: int

    @classmethod
    def this_process(cls) -> Owner:
        """The process that asks, now."""
        return cls(socket.gethostname(), os.getpid(), time.time_ns())

    @classmethod
    def parse(cls, data: bytes) -> Owner | None:
        """The inverse of `to_bytes`; None for anything else: it only serves a message."""
        try:
            found = json.loads(data)
            host, pid, claimed_ns = found["host"], found["pid"], found["claimed_ns"]
        except (ValueError, RecursionError, KeyError, TypeError):
            return None
        if not isinstance(host, str) or type(pid) is not int or type(claimed_ns) is not int:
            return None
        return cls(host[:200], pid, claimed_ns)

    def to_bytes(self, token: str = "") -> bytes:
        """Its form on storage.

        Args:
            token: makes the bytes unlike those of every other claim.
        """
        return json.dumps({**dataclasses.asdict(self), **({"token": token} if token else {})}).encode()

    @property
    def is_gone(self) -> bool:
        """Whether the process is known not to run any more: it was on this host, and its process id is free."""
        if self.host != socket.gethostname() or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):  # another user's, for example
            return False
        return False


def report_takeover(directory: str, owner: Owner | None, active_ns: int | None) -> None:
    """Logs that a run which has not closed the directory is fenced off from now on.

    A warning, unless that run's process is known to be gone: then it was killed, and nobody is harmed.

    Args:
        directory: for the message.
        owner: who claimed it; None: not known.
        active_ns: when that run last wrote there, wall clock; None: not known, its claim counts.
    """
    if owner is None:
        logging.warning(
            "%s: this process takes over from a run that did not close the directory. If that run is still alive, its "
            "next save fails with FencedError",
            directory,
        )
        return
    last_ns = active_ns or owner.claimed_ns
    when = datetime.datetime.fromtimestamp(last_ns / 1e9, tz=datetime.UTC).isoformat(timespec="seconds")
    ago = units.secs(max(time.time_ns() - last_ns, 0) / 1e9)
    who = f"process {owner.pid} on host {owner.host}, last active {ago} ago, at {when}"
    if owner.is_gone:
        logging.info("%s: takes over from a run that has ended without closing it (%s)", directory, who)
        return
    this = " (this process)" if (owner.host, owner.pid) == (socket.gethostname(), os.getpid()) else ""
    logging.warning(
        "%s: this process takes over from a run that did not close the directory: %s%s. If that run is still alive, "
        "its next save fails with FencedError: only the newest run that writes may save here. To look at a run while "
        "it trains, open the directory and write nothing, or pass options with read_only=True",
        directory,
        who,
        this,
    )
