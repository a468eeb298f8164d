"""When a manager becomes the one writer of its directory: at its first write, never when it is opened.

Guarantees:
- who only opens, lists, restores or looks claims nothing and needs no permission to write;
- the first save, delete, rollback or replacement claims, on the primary, in the background where that is where the
  write happens. It fences off the run that claimed before;
- a manager that was fenced off stays so: it never claims again, and its next save raises;
- the other processes learn of the claim with the first thing that they do together with the primary: an answer to a
  common call, or the word that the primary publishes for each save until every process has reported once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from epochckpt.commit import Commits
from epochckpt.errors import AccessError, FencedError


class Claim:
    """One manager's claim to its directory.

    Args:
        commits: the directory.
        refused: why this process may not write there, as far as that could be seen at open; None: nothing is known.
        on_claim: called once on every process, with the epochs that are committed when the directory is claimed:
            another run may have saved and deleted some since it was opened.
        root_files: files of the directory itself, path by (folder, name), that are written with the claim unless they
            exist.
    """

    def __init__(
        self,
        commits: Commits,
        refused: AccessError | None,
        on_claim: Callable[[list[int]], None],
        root_files: Mapping[tuple[str, str], bytes],
    ):
        self._commits, self._refused, self._on_claim, self._root_files = commits, refused, on_claim, root_files
        self._lock = threading.Lock()
        self._known: dict[str, Any] | None = None
        self._fenced: FencedError | None = None

    @property
    def known(self) -> bool:
        """Whether this process knows that the directory is claimed, and by which incarnation."""
        return self._known is not None

    @property
    def fenced(self) -> FencedError | None:
        """How this manager learned that a newer run has taken over; None: it has not."""
        return self._fenced

    def check(self, epoch: int) -> None:
        """Raises what keeps this manager from saving at all; no I/O unless it was refused at open.

        Raises:
            FencedError: a newer run has taken over the directory.
            AccessError: the directory may not be written by this user.
        """
        if self._fenced is not None:
            raise FencedError(epoch, self._fenced.reason) from self._fenced
        if self._refused is not None and not self.known:
            self._refused = self._commits.write_refusal()
            if self._refused is not None:
                raise self._refused

    def note(self, error: BaseException | None) -> None:
        """Remembers a failure that means that a newer run has taken over."""
        if isinstance(error, FencedError) and self._fenced is None:
            self._fenced = FencedError(error.epoch, error.reason)  # whoever raises `error` has it hold what they hold
            logging.error(
                "%s: %s. Nothing more is saved by this manager: save() raises FencedError from now on",
                self._commits.store.root,
                error.reason,
            )

    def take(self, epoch: int) -> dict[str, Any]:
        """On the primary: claims the directory unless this manager has claimed it; returns what the others are told.

        Raises:
            FencedError: this manager was fenced off.
            OSError: the directory cannot be claimed now.
        """
        with self._lock:
            if self._known is not None:
                return self._known
            if self._fenced is not None:
                raise FencedError(epoch, self._fenced.reason)
            try:
                self._commits.claim(epoch)
                for parts, data in self._root_files.items():
                    self._commits.write_once(parts, data)
                told = {"incarnation": self._commits.incarnation, "epochs": self._commits.list_epochs()}
            except BaseException:
                self._commits.incarnation = ""  # the next try makes a new one, which sweeps what this one has begun
                raise
            self._adopt(told)
            return told

    def learn(self, told: dict[str, Any]) -> None:
        """On the other processes: takes what the primary said of its claim."""
        with self._lock:
            if self._known is None:
                self._commits.join_incarnation(told["incarnation"])
                self._adopt(told)

    def _adopt(self, told: dict[str, Any]) -> None:
        self._on_claim(list(told["epochs"]))
        self._known = told

    def release(self) -> None:
        """On the primary: ends the incarnation, if this manager ever claimed; failures are logged."""
        if self._known is None or self._fenced is not None:
            return
        try:
            self._commits.release()
        except OSError as error:  # the next run that writes sweeps it
            logging.warning("%s: the staging folder could not be removed: %s", self._commits.store.root, error)
