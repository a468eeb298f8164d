"""`inspect`: what a notebook shows of a directory of checkpoints, and what a program asks it for.

Needs neither the code that trained nor its devices, starts no JAX backend, and writes nothing. Every call looks at
storage anew, because others may be writing there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from epochckpt import _text
from epochckpt.errors import EpochCheckpointError, EpochNotFoundError, InvalidArgumentError
from epochckpt.format import paths
from epochckpt.inspection import diff as diffing
from epochckpt.inspection import epoch_rows, goodput, opening, scan, usage, whole_run
from epochckpt.inspection.epoch import DiffView, EpochInspection, GoodputView, MetricsView, NamedContents, UsageView
from epochckpt.inspection.rows import COMMITTED, DAMAGED, NEWER, EpochRow, Overview, RunMetrics
from epochckpt.inspection.select import narrowed
from epochckpt.manager.numbers import epoch_number

if TYPE_CHECKING:
    from epochckpt._lazy import ocp
    from epochckpt.directory import EpochDirectory
    from epochckpt.inspection.plots import Plots

_LOOKS = 16  # at a directory whose chosen epoch is deleted again and again


def inspect(
    directory: str | os.PathLike[str],
    *,
    metric: str | Sequence[str] | None = None,
    mode: str = "max",
    options: ocp.CheckpointManagerOptions | None = None,
    unit: str | None = None,
    mirror: str | os.PathLike[str] | None = None,
) -> Inspection:
    """Opens a directory of checkpoints to look at: ours or stock Orbax's, also a live or a damaged one.

    The folder of a single epoch will do, too: one of ours, a step of stock Orbax, or what a plain Orbax checkpointer
    saved. It is the only epoch then, `.latest`.

    In a notebook the result draws itself, and so does everything that it gives.

    Examples:
        >>> import epochckpt as ec, jax.numpy as jnp, orbax.checkpoint as ocp
        >>> with ec.CheckpointManager("run") as manager:
        ...     for epoch in range(2):
        ...         state = ocp.args.StandardSave({"w": jnp.full(3, epoch)})
        ...         _ = manager.save(epoch, args=state, metrics={"loss": 1.0})
        >>> run = ec.inspect("run", metric="loss", mode="min")
        >>> list(run), run.latest.epoch
        ([0, 1], 1)
        >>> run[0]["default"]["w"]
        array([0, 0, 0], dtype=int32)
        >>> [(leaf.item, leaf.leaf.name, leaf.mean) for leaf in run[1].stats("w")]
        [('default', 'w', 1.0)]
        >>> [(leaf.name, leaf.change, leaf.elements) for leaf in run.diff(0, 1)]
        [('w', 'changed', 3)]

    Args:
        directory: a path or a URL.
        metric: the metric by which the best epoch is found; or several: by the first of them, and views show these
            alone, in this order.
        mode: which value of the metric is best: `max` or `min`.
        options: the step name format and `todelete_subdir`, if they are not the defaults.
        unit: what views call a number: `epoch` or `step`; None: what the job counts that saved the newest one, see
            `Job`.
        mirror: the directory's mirror (`StorageOptions.mirror`), which is looked at, too. The mirror that the directory
            itself names is only shown: an address that comes out of a directory is never opened.

    Raises:
        NotACheckpointDirectoryError: it is no checkpoint directory; the message guesses its nature.
        AccessError: it may not be read.
        InvalidArgumentError: an unknown mode or unit.
    """
    if mode not in ("max", "min"):
        raise InvalidArgumentError(f"mode {mode!r} is not known; expected 'max' or 'min'")
    if unit not in (None, "epoch", "step"):
        raise InvalidArgumentError(f"unit {unit!r} is not known; expected 'epoch' or 'step'")
    return Inspection(directory, metric, mode, options, unit, None if mirror is None else os.fspath(mirror))


class Inspection(NamedContents):
    """A directory of checkpoints; see `inspect`. Iterates over the numbers of its epochs, ascending.

    Attributes:
        metric: the metric by which the best epoch is found; None if none was given.
        epoch_directory: the epochs on storage.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        metric: str | Sequence[str] | None,
        mode: str,
        options: ocp.CheckpointManagerOptions | None,
        unit: str | None = None,
        mirror: str | None = None,
    ):
        self._mirror = mirror
        self._given = os.fspath(directory)
        self._mode = mode
        self._options = options
        self._unit = unit
        self._asked = () if metric is None or isinstance(metric, str) else tuple(metric)
        self.metric = metric if metric is None or isinstance(metric, str) else next(iter(self._asked), None)
        self.epoch_directory = opening.open_directory(directory, options, single=True)

    @property
    def directory(self) -> str:
        """Its path or URL, in full."""
        return self.epoch_directory.place

    @property
    def unit(self) -> str:
        """What views call a number, `epoch` or `step`: see `inspect`."""
        return self._unit or epoch_rows.unit_of(self.epoch_directory)

    def overview(self, limit: int | None = 100, *, check: bool = True) -> Overview:
        """The rows of the directory.

        Args:
            limit: how many epochs, the newest; None: all.
            check: see whether the files of the newest epochs are there.
        """
        self.epoch_directory.forget_records()
        return self._look(limit, check)

    def _look(self, limit: int | None, check: bool) -> Overview:
        with opening.access(self.epoch_directory.store):
            known = self.epoch_directory if self.epoch_directory.refresh() else None
        found = scan.look(
            self._given,
            metric=self.metric,
            mode=self._mode,
            limit=limit,
            options=self._options,
            check=check,
            known=known,
            mirror=self._mirror,
        )
        return dataclasses.replace(found, asked=self._asked, unit=self._unit or found.unit)

    def epochs(self, *, check: bool = False) -> list[EpochRow]:
        """The row of every committed epoch, also of those that cannot be read, ascending.

        In an object store there is no request per epoch: `EpochRow` lists the fields that are unknown then.
        """
        return [row for row in self.overview(None, check=check).epochs if row.state in (COMMITTED, DAMAGED, NEWER)]

    def du(self) -> UsageView:
        """What the directory takes up on storage: bytes, files and their ages, by epoch and by everything else.

        Every file is met once: that is one listing in an object store, a request for a thousand objects.
        """
        todelete = self._options.todelete_subdir if self._options else None
        return UsageView(dataclasses.replace(usage.measure(self.epoch_directory, todelete), unit=self.unit))

    def metrics(self) -> MetricsView:
        """The metrics of the whole run: a row per epoch, also of those that were deleted.

        Of a deleted epoch the numbers are kept, as they were when it was deleted: attached ones, too. An epoch that was
        rolled back, or deleted while it was the newest, is not there. `.to_pandas()` makes a DataFrame of the rows.
        """
        found = self.overview(None, check=False)
        rows = tuple(whole_run.rows_of(found))
        return MetricsView(RunMetrics(found.directory, rows, found.asked, found.problems, self.unit))

    def goodput(self) -> GoodputView:
        """What the runs here have spent their time on: training, saves, restores, and what was lost with each kill.

        One row per run, from the newest epoch's record; `.goodput.total` is the sum of them. What no record tells is
        `unknown_secs`. Runs that never committed an epoch, and those of older versions, are not known.
        """
        return GoodputView(dataclasses.replace(goodput.measure(self.epoch_directory), unit=self.unit))

    @property
    def latest(self) -> EpochInspection | None:
        """The newest epoch that is whole, as far as a look at its files tells; None if there is none."""
        return self._epoch(lambda: self._latest_and_best()[0])

    @property
    def best(self) -> EpochInspection | None:
        """The best of the epochs that are whole, by the metric that `inspect` was given; None if none has the metric.

        Raises:
            InvalidArgumentError: no metric was given.
        """
        if self.metric is None:
            raise InvalidArgumentError("best by which metric? Pass it: inspect(directory, metric='loss', mode='min')")
        return self._epoch(lambda: self._latest_and_best()[1])

    def _names(self) -> list[int]:
        return [row.epoch for row in self.epochs()]

    def __getitem__(self, epoch: int) -> EpochInspection:
        """One epoch.

        Raises:
            EpochNotFoundError: there is no epoch of this number; names those that are near.
            InvalidArgumentError: it is no number of an epoch.
        """
        if isinstance(epoch, slice):
            raise InvalidArgumentError("epochs are asked for one by one; .epochs() gives the rows of all of them")
        if isinstance(epoch, int) and not isinstance(epoch, bool) and -paths.MAX_EPOCH <= epoch < 0:
            raise InvalidArgumentError(f"epochs go by their own numbers, found {epoch}; .latest is the newest one")
        number = epoch_number(epoch)
        if epoch_rows.find(self.epoch_directory, number) is not None:
            return self._at(self.epoch_directory, number)
        if self._mirror is not None:
            with contextlib.suppress(EpochCheckpointError, OSError):  # the mirror does not answer
                from epochckpt.tiers import viewed  # with jax and Orbax, which a directory without a mirror needs not

                mirror = viewed(self._mirror, self.epoch_directory)
                if number in mirror.readable() and epoch_rows.find(mirror.there, number) is not None:
                    return self._at(mirror.there, number)
        rows = self.overview(None, check=False).epochs
        known = [row.epoch for row in rows if row.state in (COMMITTED, DAMAGED, NEWER)]
        error = EpochNotFoundError(number, self.directory, known)
        attempt = next((f". An attempt at saving it is {row.state}" for row in rows if row.epoch == number), "")
        error.args = (f"{self.directory}: no checkpoint {number}; {_text.near_epochs(number, known)}{attempt}",)
        raise error

    def diff(
        self,
        before: int,
        after: int,
        patterns: str | Sequence[str] = "*",
        directory: str | os.PathLike[str] | None = None,
        *,
        item: str | None = None,
        node: str | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> DiffView:
        """What changed between two epochs, one row per leaf: added, removed, reshaped, retyped, changed, unchanged.

        Every leaf that both epochs have is read, in pieces; a file of a handler only if its checksums do not tell. What
        could not be compared is among the `diff.problems` of the result.

        Args:
            before: the first epoch.
            after: the second epoch.
            patterns: names of leaves, parts of the tree or items, or shell patterns of `leaf` or `item:leaf`.
            directory: where the second epoch lies, if elsewhere.
            item: compare this item only.
            node: compare what this node saved of its own only.
            progress: called with the bytes of both epochs that have been read, and with those that are to be read.

        Raises:
            EpochNotFoundError: there is no such epoch; names those that are near.
            UnknownNameError: a pattern matches nothing in either epoch; names what is near.
        """
        other = self if directory is None else Inspection(directory, None, self._mode, self._options)
        one = self[before]
        two = other[after]
        details = narrowed([one.detail(), two.detail()], patterns, item, node)
        elsewhere = "" if other is self else other.directory
        diff = diffing.compare(
            (details[0], one.leaves()),
            (details[1], two.leaves()),
            progress,
            directory=self.directory,
            other_directory=elsewhere,
        )
        return DiffView(diff)

    @property
    def plots(self) -> Plots:
        """Plots of all its epochs."""
        from epochckpt.inspection.plots import Plots

        def look() -> Overview:
            return dataclasses.replace(self.overview(None, check=False), unit=self.unit)

        return Plots(look, lambda: self.goodput().goodput)

    def _epoch(self, choose: Callable[[], int | None]) -> EpochInspection | None:
        """The epoch that is chosen; another one is, if a run has deleted it meanwhile."""
        for left in reversed(range(_LOOKS)):
            number = choose()
            if number is None or not self.epoch_directory.has_cheap_reads:
                return None if number is None else self._at(self.epoch_directory, number)
            try:
                return self[number]  # it may be in the mirror alone
            except EpochNotFoundError:
                if not left:
                    raise
        return None

    def _at(self, epoch_directory: EpochDirectory, number: int) -> EpochInspection:
        return EpochInspection(
            epoch_directory=epoch_directory,
            epoch=number,
            latest_and_best=self._latest_and_best,
            unit=self._unit,
            mirror=self._mirror if epoch_directory is self.epoch_directory else None,
        )

    def _latest_and_best(self) -> tuple[int | None, int | None]:
        """Of the epochs that are whole as far as a look at their files tells."""
        rows = self._look(1, True).epochs
        return next((r.epoch for r in rows if r.latest), None), next((r.epoch for r in rows if r.best), None)

    def _rows(self) -> Overview:
        return self.overview()
