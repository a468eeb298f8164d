"""What a manager allows: a closed one nothing, and one that is read only, or was inherited by a fork, no change."""

from __future__ import annotations

import os

from epochckpt.errors import InvalidArgumentError


class Access:
    """Whether a manager of the directory `root` may still be used, and may write."""

    def __init__(self, root: str, read_only: bool):
        self._root = root
        self.read_only = read_only
        self.closed = False
        self.forked = False  # this process was forked off the one that opened the manager

    @property
    def may_write(self) -> bool:
        """Whether this process could save with the manager, as long as that is open."""
        return not self.read_only and not self.forked

    def close(self) -> None:
        """The manager is closed from now on."""
        self.closed = True

    def after_fork(self) -> None:
        """In a forked child: this process only reads."""
        self.forked = True

    def check_open(self, verb: str) -> None:
        """Raises InvalidArgumentError if the manager is closed."""
        if self.closed:
            raise InvalidArgumentError(f"{verb}: this manager of {self._root} is closed; open another one")

    def check_write(self, verb: str) -> None:
        """Raises InvalidArgumentError if this process may not change the directory with this manager."""
        self.check_open(verb)
        if self.read_only:
            raise InvalidArgumentError(f"{verb}: {self._root} is open read only")
        if self.forked:
            raise InvalidArgumentError(
                f"{verb}: this process (pid {os.getpid()}) was forked off the one that opened {self._root}, and "
                "can only read with its manager. Save and delete there; or start this process with the method 'spawn', "
                "and open another directory in it"
            )
