"""`inspect`: what a notebook shows of a directory of checkpoints, and what a program asks it for.

Only looks: needs neither the code that trained nor its devices, starts no jax backend, and writes nothing. Every call
looks at storage anew: others may be writing to it, and delete from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import orbax.checkpoint as ocp

from epochckpt import _text as naming
from epochckpt.errors import EpochNotFoundError, InvalidArgumentError
from epochckpt.inspection import diff as diffing
from epochckpt.inspection import scan
from epochckpt.inspection.epoch import DiffView, EpochInspection, Shown, read_row
from epochckpt.inspection.rows import COMMITTED, DAMAGED, EpochRow, Overview
from epochckpt.manager.reader import epoch_number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from epochckpt.inspection.plots import Plots


def inspect(
    directory: str | os.PathLike[str],
    *,
    metric: str | None = None,
    mode: str = "max",
    options: ocp.CheckpointManagerOptions | None = None,
) -> Inspection:
    """Opens a directory of checkpoints to look at; a live one, a damaged one, or one of stock Orbax.

    The folder of a single epoch will do, too: one of ours, a step of stock Orbax, or what a plain Orbax checkpointer
    saved. It is the only epoch then, `.latest`.

    In a notebook the result shows itself, and so does everything that it is asked for::

        run = inspect("/checkpoints/run", metric="loss", mode="min")
        run                                         # epochs, nodes, sizes, durations, metrics, what is left over
        run[12]                                     # one epoch: its nodes, its items, the tree of each
        run[12]["default"]["params/dense/kernel"]   # a leaf, as a NumPy array
        run[12].stats("params/*")                   # least, greatest, mean, NaN, histogram; reads only those leaves
        run.diff(11, 12)                            # what changed
        run.latest, run.best

    Args:
        directory: a path or a URL.
        metric: by which the best epoch is found.
        mode: `max` or `min`: which value of it is best.
        options: the step name format and `todelete_subdir`, if they are not the defaults.

    Raises:
        NotACheckpointDirectoryError: it is no checkpoint directory; says what it looks like instead.
        AccessError: it may not be read.
        InvalidArgumentError: a mode that makes no sense.
    """
    if mode not in ("max", "min"):
        raise InvalidArgumentError(f"mode {mode!r} is not known; expected 'max' or 'min'")
    return Inspection(directory, metric=metric, mode=mode, options=options)


class Inspection(Shown):
    """A directory of checkpoints; see `inspect`. Iterates over the numbers of its epochs, ascending.

    Args:
        directory: a path or a URL.
        metric: by which the best epoch is found.
        mode: which value of it is best.
        options: the step name format.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        metric: str | None = None,
        mode: str = "max",
        options: ocp.CheckpointManagerOptions | None = None,
    ):
        self._given, self._metric, self._mode, self._options = os.fspath(directory), metric, mode, options
        self._commits = scan.open_commits(directory, options, single=True)

    @property
    def directory(self) -> str:
        """Its path or URL, in full."""
        return scan.place(self._commits)

    def overview(self, limit: int | None = 100, *, check: bool = True) -> Overview:
        """The rows of the directory.

        Args:
            limit: how many epochs, the newest; None: all.
            check: see whether the files of the newest epochs are there.
        """
        return scan.look(
            self._given, metric=self._metric, mode=self._mode, limit=limit, options=self._options, check=check
        )

    def epochs(self, *, check: bool = False) -> list[EpochRow]:
        """The row of every committed epoch, damaged ones too, ascending."""
        return [row for row in self.overview(None, check=check).epochs if row.state in (COMMITTED, DAMAGED)]

    @property
    def latest(self) -> EpochInspection | None:
        """The newest epoch that is whole, as far as a look at its files tells; None if there is none."""
        found = self._marks()[0]
        return None if found is None else self._epoch(found)

    @property
    def best(self) -> EpochInspection | None:
        """The best epoch by the metric that was asked for, of those that are whole; None if no epoch has it.

        Raises:
            InvalidArgumentError: none was asked for.
        """
        if self._metric is None:
            raise InvalidArgumentError("best by which metric? Pass it: inspect(directory, metric='loss', mode='min')")
        found = self._marks()[1]
        return None if found is None else self._epoch(found)

    def __len__(self) -> int:
        return len(self._numbers())

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers())

    def __contains__(self, epoch: object) -> bool:
        return epoch in self._numbers()

    def __getitem__(self, epoch: int) -> EpochInspection:
        """One epoch.

        Raises:
            EpochNotFoundError: there is none of this number; names those that are near.
            InvalidArgumentError: it is no number of an epoch.
        """
        if isinstance(epoch, slice):
            raise InvalidArgumentError("epochs are asked for one by one; .epochs() gives the rows of all of them")
        if isinstance(epoch, int) and not isinstance(epoch, bool) and epoch < 0:
            raise InvalidArgumentError(f"epochs go by their own numbers, found {epoch}; .latest is the newest one")
        number = epoch_number(epoch)
        if read_row(self._commits, number) is None:
            raise self._no_epoch(number)
        return self._epoch(number)

    def diff(
        self,
        before: int,
        after: int,
        patterns: str | Sequence[str] = "*",
        directory: str | os.PathLike[str] | None = None,
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> DiffView:
        """What changed between two epochs: leaves added, removed, reshaped, retyped, changed, unchanged.

        Reads every leaf that matches, in pieces, except where checksums show that nothing changed.

        Args:
            before: the first epoch.
            after: the second epoch.
            patterns: shell patterns of `leaf` or `item:leaf`.
            directory: where the second epoch lies, if elsewhere.
            progress: is told how many bytes of both have been read, and how many there are to read.

        Returns:
            One row per leaf. What could not be compared is among its problems.

        Raises:
            EpochNotFoundError: there is no such epoch; names those that are near.
            InvalidArgumentError: no leaf of either epoch matches.
        """
        other = self if directory is None else Inspection(directory, options=self._options)
        a, b = self[before], other[after]
        elsewhere = "" if directory is None else other.directory
        sides = (a.detail(), a.leaves()), (b.detail(), b.leaves())
        found = diffing.compare(*sides, patterns, progress, directory=self.directory, other_directory=elsewhere)
        return DiffView(found)

    @property
    def plots(self) -> Plots:
        """Plots of all its epochs."""
        from epochckpt.inspection.plots import Plots

        return Plots(lambda: self.overview(None, check=False))

    def _numbers(self) -> list[int]:
        return [row.epoch for row in self.epochs()]

    def _epoch(self, number: int) -> EpochInspection:
        return EpochInspection(self._commits, number, self._marks)

    def _marks(self) -> tuple[int | None, int | None]:
        """The latest and the best epoch, of those that are whole as far as a look at their files tells."""
        seen = self.overview(1)
        latest = next((row.epoch for row in seen.epochs if row.latest), None)
        return latest, next((row.epoch for row in seen.epochs if row.best), None)

    def _no_epoch(self, epoch: int) -> EpochNotFoundError:
        """The error for an epoch that is not there: names those that are near, and an attempt at it."""
        seen = self.overview(None, check=False).epochs
        known = [row.epoch for row in seen if row.state in (COMMITTED, DAMAGED)]
        error = EpochNotFoundError(epoch, self.directory, known)
        said = naming.near_epochs(epoch, known)
        tried = [row for row in seen if row.epoch == epoch]
        if tried:
            said += f". An attempt at saving it is {tried[-1].state}"
        error.args = (f"{self.directory}: no epoch {epoch}; {said}",)
        return error

    def _rows(self) -> Overview:
        return self.overview()

    def _html(self, rows: Overview) -> str:
        from epochckpt.inspection import html

        return html.overview(rows)

    def _text(self, rows: Overview) -> RenderableType:
        from epochckpt.inspection import text

        return text.overview(rows, hint="; .epochs() has the rows of all")
