"""When a manager becomes the one writer of its directory: at its first write, never when it is opened.

Guarantees:
- a manager that only opens, lists, restores or looks claims nothing and needs no permission to write;
- the first save, delete, rollback or replacement claims the directory, on the primary, on the thread that writes. It
  fences off the run that claimed before, and logs which process that was;
- a manager that was fenced off stays so: it never claims again, and its next save raises;
- the other processes learn of the claim from the primary's answer to a collective call, or from what the primary
  publishes for each save until every process has reported once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from absl import logging

from epochckpt.directory import owners
from epochckpt.errors import AccessError, FencedError

if TYPE_CHECKING:
    from epochckpt.directory import Commits
    from epochckpt.directory.protocol import Stager, Writer
    from epochckpt.saving.hosts import Hosts


class Claim:
    """One manager's claim to its directory.

    `refused` says why this process may not write there, as far as the open could see that. `on_claim` is called once on
    every process, with the epochs that are committed when the directory is claimed: another run may have saved and
    deleted some since it was opened. The `root_files`, by (folder, name), are written with the claim unless they exist.
    """

    def __init__(
        self,
        commits: Commits,
        refused: AccessError | None,
        on_claim: Callable[[list[int]], None],
        root_files: Mapping[tuple[str, str], bytes],
        hosts: Hosts | None = None,
    ):
        self._commits, self._refused, self._on_claim, self._root_files = commits, refused, on_claim, root_files
        self._hosts = hosts
        self._lock = threading.Lock()
        self._writer: Writer | None = None  # of the process that has claimed; with local disks, of each
        self._stager: Stager | None = None  # of the other processes
        self._taken: dict[str, Any] | None = None  # on the primary: a claim that the other hosts have yet to join
        self._known: dict[str, Any] | None = None
        self.may_take_over = True  # from a run that may be alive
        self.fenced: FencedError | None = None  # how this manager learned that a newer run has taken over

    @property
    def known(self) -> bool:
        """Whether this process knows of the claim, and so the incarnation."""
        return self._known is not None

    @property
    def writer(self) -> Writer:
        """The right to change the directory; only a process that has claimed it may ask."""
        assert self._writer is not None, "the directory was not claimed by this process"
        return self._writer

    @property
    def stager(self) -> Stager:
        """Says where the nodes of a save write; only a process that knows of the claim may ask."""
        stager = self._writer or self._stager
        assert stager is not None, "the directory was not claimed"
        return stager

    @property
    def incarnation(self) -> str:
        """The run's id; empty before the claim."""
        stager = self._writer or self._stager
        return "" if stager is None else stager.incarnation

    def check(self, epoch: int) -> None:
        """Raises the error that keeps this manager from saving, if any. No I/O, unless it was refused at open."""
        if self.fenced is not None:
            raise FencedError(epoch, self.fenced.reason) from self.fenced
        if self._refused is not None and not self.known:
            self._refused = self._commits.write_refusal()
            if self._refused is not None:
                raise self._refused

    def note(self, error: BaseException | None) -> None:
        """Remembers a failure that says that a newer run has taken over."""
        if isinstance(error, FencedError) and self.fenced is None:
            self.fenced = FencedError(error.epoch, error.reason)  # a new one: the traceback of `error` holds arrays
            logging.error(
                "%s: %s. Nothing more is saved by this manager: save() raises FencedError from now on",
                self._commits.store.root,
                error.reason,
            )

    def take(self, epoch: int) -> dict[str, Any]:
        """On the primary: claims the directory unless this manager has; returns the claim, for `learn`.

        With local disks it is complete only when the primary has learned it, too.
        """
        with self._lock:
            if (claim := self._known or self._taken) is not None:
                return claim
            if self.fenced is not None:
                raise FencedError(epoch, self.fenced.reason)
            try:
                if self.may_take_over:
                    self._writer = self._commits.claim(epoch)
                else:
                    self._writer = self._commits.claim(epoch, functools.partial(owners.check_idle, self._commits))
                if self._hosts is not None:
                    self._taken = {"incarnation": self._writer.incarnation}
                    return self._taken
                self._write_root_files(self._writer)
                claim = {"incarnation": self._writer.incarnation, "epochs": self._commits.list_epochs()}
            except BaseException as error:
                self.note(error)  # before another save may try: it would take over from the run that was the later one
                self._writer = None  # the next try is a new incarnation, which sweeps this one
                raise
            return self._adopt(claim)

    def learn(self, claim: dict[str, Any], wait_secs: float = 0.0) -> None:
        """Adopts the claim that the primary's `take` returned; with local disks, waits until all hosts have joined."""
        with self._lock:
            if self._known is not None:
                return
            if self._hosts is None:
                self._stager = self._commits.join(claim["incarnation"])
            else:
                try:
                    epochs = self._hosts.join(claim["incarnation"], self._writer, self._write_root_files, wait_secs)
                except BaseException as error:
                    self.note(error)
                    self._writer = None
                    self._taken = None
                    raise
                self._writer = self._hosts.writer
                claim = {**claim, "epochs": epochs}
            self._adopt(claim)

    def _write_root_files(self, writer: Writer) -> None:
        for parts, data in self._root_files.items():
            writer.write_once(parts, data)

    def _adopt(self, claim: dict[str, Any]) -> dict[str, Any]:
        self._on_claim(list(claim["epochs"]))
        self._known = claim
        return claim

    def release(self) -> None:
        """On the primary: ends the incarnation, if this manager ever claimed; failures are logged.

        With local disks every process does so on its own.
        """
        if self._known is None or self.fenced is not None or self._writer is None:
            return
        try:
            self._writer.release()
        except OSError as error:  # the next run that writes sweeps it
            logging.warning("%s: the staging folder could not be removed: %s", self._commits.store.root, error)
