"""When a manager becomes the one writer of its directory: at its first write, never when it is opened.

Guarantees:
- a manager that only opens, lists, restores or looks claims nothing and needs no permission to write;
- the first save, delete, rollback or replacement claims the directory, on the primary, on the thread that writes. It
  fences off the run that had claimed before, and logs the process of that run;
- a manager that was fenced off stays so: it never claims again, and its next save raises;
- the other processes learn of the claim from the primary's answer to a collective call, or from what the primary
  publishes for each save until every process has reported once.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from epochckpt.directory import owners
from epochckpt.errors import AccessError, FencedError

if TYPE_CHECKING:
    from epochckpt.directory.epoch_directory import Writer
    from epochckpt.saving.job_directory import JobDirectory


@dataclasses.dataclass(frozen=True)
class _Taken:
    """On the primary: the directory is claimed, and no process has joined the claim yet."""

    claim: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Joined:
    """This process has joined the claim, and `on_claim` has yet to hear of it."""

    claim: dict[str, Any]
    epochs: Sequence[int]  # of the job, at the time of the claim


@dataclasses.dataclass(frozen=True)
class _Known:
    """This process knows of the claim, and so the incarnation."""

    claim: dict[str, Any]


class Claim:
    """One manager's claim to its directory.

    `refused` says why this process may not write there, as far as the open could see that. `on_claim` is called on
    every process, with the epochs that are committed when the directory is claimed: another run may have saved and
    deleted some since it was opened. If it fails, the next save calls it again. The `root_files`, by (folder, name),
    are written with the claim unless they exist.
    """

    def __init__(
        self,
        directory: JobDirectory,
        refused: AccessError | None,
        on_claim: Callable[[list[int]], None],
        root_files: Mapping[tuple[str, str], bytes],
    ):
        self._directory = directory
        self._epoch_directory = directory.epoch_directory
        self._refused = refused
        self._on_claim = on_claim
        self._root_files = root_files
        self._lock = threading.Lock()
        self._state: _Taken | _Joined | _Known | None = None  # None: not claimed, as far as this process knows
        self.fenced: FencedError | None = None  # how this manager learned that a newer run has taken over

    @property
    def known(self) -> bool:
        """Whether this process knows of the claim, and so the incarnation."""
        return isinstance(self._state, _Known)

    def check(self, epoch: int) -> None:
        """Raises the error that keeps this manager from saving, if any. No I/O, unless it was refused at open."""
        if self.fenced is not None:
            raise FencedError(epoch, self.fenced.reason) from self.fenced
        if self._refused is not None and not self.known:
            self._refused = self._epoch_directory.write_refusal()
            if self._refused is not None:
                raise self._refused

    def note(self, error: BaseException | None) -> None:
        """Remembers a failure that says that a newer run has taken over."""
        if isinstance(error, FencedError) and self.fenced is None:
            self.fenced = FencedError(error.epoch, error.reason)  # a new one: the traceback of `error` holds arrays
            logging.error(
                "%s: %s. Nothing more is saved by this manager: save() raises FencedError from now on",
                self._epoch_directory.store.root,
                error.reason,
            )

    def take(self, epoch: int, *, take_over: bool = True) -> dict[str, Any]:
        """On the primary: claims the directory unless this manager has; returns the claim, which all then `learn`.

        `take_over`: also from a run that may be alive; if not, such a run is an InvalidArgumentError.
        """
        with self._lock:
            if self._state is not None:
                return self._state.claim
            if self.fenced is not None:
                raise FencedError(epoch, self.fenced.reason)
            try:
                if take_over:
                    writer = self._epoch_directory.claim(epoch)
                else:
                    writer = self._epoch_directory.claim(
                        epoch, functools.partial(owners.check_idle, self._epoch_directory)
                    )
                self._state = _Taken(self._directory.claimed(writer, self._write_root_files))
            except BaseException as error:
                self._failed(error)
                raise
            return self._state.claim

    def learn(self, claim: dict[str, Any], wait_secs: float = 0.0) -> None:
        """On every process: adopts the claim that the primary's `take` returned, once all have joined who have to."""
        with self._lock:
            if isinstance(self._state, _Known):
                return
            if not isinstance(self._state, _Joined):
                try:
                    epochs = self._directory.join(claim, self._write_root_files, wait_secs)
                except BaseException as error:
                    self._failed(error)
                    raise
                self._state = _Joined(claim, epochs)
            self._on_claim(list(self._state.epochs))
            self._state = _Known(self._state.claim)

    def _failed(self, error: BaseException) -> None:
        """Notes the error before another save may try to claim: its claim would fence off the newer run."""
        self.note(error)
        self._directory.forget_claim()  # the next try is a new incarnation, which sweeps this one
        self._state = None

    def _write_root_files(self, writer: Writer) -> None:
        for parts, data in self._root_files.items():
            writer.write_once(parts, data)

    def release(self) -> None:
        """Ends the incarnation, if this manager ever claimed, where this process `acts`; failures are logged."""
        if not self.known or self.fenced is not None or not self._directory.acts:
            return
        try:
            self._directory.writer.release()
        except OSError as error:  # the next run that writes sweeps it
            logging.warning("%s: the staging folder could not be removed: %s", self._epoch_directory.store.root, error)
