"""The commands that change a directory. Without --yes they only show the change.

They refuse a directory in which a run may be alive, see `epochckpt.manager.changes`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from epochckpt import _progress, _units
from epochckpt.cli.commands import epoch_of, only_cpu, opened, options_of
from epochckpt.cli.output import FOUND, OK, Output
from epochckpt.errors import InvalidArgumentError
from epochckpt.inspection import epoch_rows, opening
from epochckpt.inspection.blocks import Block, Column, Span, Summary, TextLine, Tone, problems, table
from epochckpt.inspection.columns import noun, several
from epochckpt.inspection.rows import DAMAGED, MIRROR, EpochRow
from epochckpt.inspection.text import render
from epochckpt.storage import open_store
from epochckpt.tiers import read_ledger

if TYPE_CHECKING:
    from epochckpt.directory import EpochDirectory
    from epochckpt.inspection.directory import Inspection
    from epochckpt.manager import CheckpointManager

_UNCHANGED = TextLine(Span("Nothing was changed; --yes does it.", Tone.FAINT))


@dataclasses.dataclass(frozen=True)
class EpochChange:
    """The change of one epoch.

    Attributes:
        epoch: its number.
        nbytes: of its files.
        source: where it is: a path or URL.
        destination: where it will be; empty: it is removed.
    """

    epoch: int
    nbytes: int
    source: str
    destination: str = ""


@dataclasses.dataclass(frozen=True)
class Changes:
    """All changes that a command makes to a directory.

    Attributes:
        directory: its path or URL.
        done: False if the change is only shown.
        changes: one per epoch.
        destination: the other directory that epochs are copied to; None if there is no other.
        remark: a further sentence for people.
        mirror: the URL of its mirror.
        follows: whether the mirror follows at once.
        problems: why other epochs are left out.
        unit: what their numbers are called: `epoch` or `step`.
    """

    directory: str
    done: bool
    changes: tuple[EpochChange, ...]
    destination: str | None = None
    remark: str = ""
    mirror: str | None = None
    follows: bool = False
    problems: Mapping[int, str] = dataclasses.field(default_factory=dict)
    unit: str = "epoch"

    @property
    def nbytes(self) -> int:
        """Bytes of all epochs that change."""
        return sum(change.nbytes for change in self.changes)


def rm(args: argparse.Namespace, output: Output) -> int:
    """Delete the named epochs, and no others.

    It is a dry run without --yes, and refused while a run is alive in the directory, or writes to the mirror that
    --mirror names, which follows.
    """
    run = _directory(args)
    rows = {row.epoch: row for row in run.epochs()}
    epochs = [rows.pop(epoch_of(run, epoch, output).epoch) for epoch in dict.fromkeys(args.epochs)]
    left = f"the newest {run.unit} is {max(rows)} then" if rows else f"no {noun(run.unit)} is left then"
    changes = _changes(args, run, epochs, lambda row: "", left)
    if args.yes:
        gone = list[int]()
        try:
            with _changing(args) as manager:
                for row in epochs:
                    manager.delete(row.epoch)
                    gone.append(row.epoch)
        except Exception:
            if gone:
                output.note(f"deleted before that: {changes.unit} {', '.join(map(str, gone))}")
            raise
        _check_mirror(run, output)
    return _answer(output, changes, "delete")


def rollback(args: argparse.Namespace, output: Output) -> int:
    """Go back to an epoch: those after it are set aside, and the next run goes on from it.

    They are kept in a folder rolled-back-…, until `gc --rolled-back --delete` removes them. It is a dry run without
    --yes, and refused while a run is alive in the directory, or writes to the mirror that --mirror names; that follows.
    """
    run = _directory(args)
    to = epoch_of(run, args.epoch, output)
    if (row := to.row).state == DAMAGED:
        raise InvalidArgumentError(f"{row.unit} {to.epoch} is damaged, so that no run can go on from it: {row.detail}")
    later = [row for row in run.epochs() if row.epoch > to.epoch]
    left = f"the newest {run.unit} is {to.epoch}{' then' if later else ' already'}"
    changes = _changes(args, run, later, lambda row: _in(run.directory, f"rolled-back-…/{row.folder}"), left)
    if args.yes and later:
        with _changing(args) as manager:
            manager.rollback_to(to.epoch)
        _check_mirror(run, output)
    return _answer(output, changes, "set aside")


def cp(args: argparse.Namespace, output: Output) -> int:
    """Copy epochs to another directory, on disk or in a bucket; every byte is verified on its way.

    Epochs that are there, whole, are not copied again, and another epoch of the same number is never replaced. It is a
    dry run without --yes, and refused while a run is alive in DEST; in DIR one may be.
    """
    run = opened(args)
    rows = {row.epoch: row for row in run.epochs()}
    chosen = {epoch_of(run, epoch, output).epoch for epoch in args.epochs} or rows.keys()
    _destination(args, args.destination)
    from epochckpt.manager.changes import DirectoryCopy

    copy = DirectoryCopy(
        run.epoch_directory,
        args.destination,
        sorted(chosen),
        options_of(args),
        whole=not args.epochs,
        take_over=args.take_over,
        mirror=args.mirror,
    )
    present = len(copy.present)
    passed_over = f"{several(present, run.unit)} {'is' if present == 1 else 'are'} there already" if present else ""
    left = [rows[epoch] for epoch in copy.epochs]
    done = _changes(args, run, left, lambda row: _in(copy.destination, copy.folder(row.epoch)), passed_over)
    if args.yes and (left or copy.present):
        with _progress.work("copying", done.nbytes) as bar:
            copy.run(bar.advance)
    changes = tuple(change for change in done.changes if change.epoch not in copy.problems)
    return _answer(output, dataclasses.replace(done, changes=changes, problems=copy.problems), "copy")


def import_(args: argparse.Namespace, output: Output) -> int:
    """Make an epoch out of a file of weights: safetensors or flax msgpack, streamed; its leaves are listed first.

    It is a dry run without --yes, and refused while a run is alive in DIR, which is made if it is missing.
    """
    only_cpu()
    epoch_directory = _destination(args, args.directory)
    if epoch_directory is not None:
        from epochckpt.manager.changes import check_changeable

        check_changeable(epoch_directory, args.take_over)
    epoch = args.epoch
    if epoch is None:
        epoch = max(epoch_directory.list_epochs() if epoch_directory is not None else [], default=-1) + 1
    arguments = {name: getattr(args, name) for name in ("format", "item", "separator", "include", "exclude", "dtype")}
    options = dataclasses.replace(options_of(args), read_only=False)
    from epochckpt.convert.import_files import plan_import

    plan = plan_import(
        args.source, args.directory, epoch, **arguments, rename=dict(args.rename) or None, options=options
    )
    unit = args.unit or ("epoch" if epoch_directory is None else epoch_rows.unit_of(epoch_directory))
    if args.yes:
        plan.write(take_over=args.take_over)
    named = {name: getattr(plan, name) for name in ("source", "directory", "epoch", "item", "leaves", "nbytes")}
    shown = plan.leaves[: args.limit or None]
    more = len(plan.leaves) - len(shown)

    def view() -> Iterator[Block]:
        yield TextLine(Span(f"{plan.source} → {plan.directory}", Tone.STRONG, 2000), title=True)
        what = f"import {unit} {plan.epoch}", _units.several(len(plan.leaves), "leaf", "leaves")
        yield Summary((*what, _units.nbytes(plan.nbytes), f"item {plan.item}"))
        yield table(
            shown,
            (Column("leaf", 0, least=20), lambda leaf: leaf.name),
            (Column("in the file", 2, least=12), lambda leaf: leaf.source if leaf.source != leaf.name else ""),
            (Column("type", 1), lambda leaf: leaf.dtype),
            (Column("cast from", 3), lambda leaf: leaf.cast_from),
            (Column("shape", 1), lambda leaf: "×".join(map(str, leaf.shape))),
            (Column("bytes", 1, right=True), lambda leaf: _units.nbytes(leaf.nbytes)),
        )
        if more:
            yield TextLine(Span(f"… {_units.count(more)} more; --limit 0 lists all", Tone.FAINT))
        if not args.yes:
            yield _UNCHANGED

    output.rows({**named, "done": bool(args.yes)}, lambda: render(list(view())))
    return OK


def _directory(args: argparse.Namespace) -> Inspection:
    """The directory of a command, if it may be changed."""
    epoch_directory = opening.open_directory(
        args.directory, options_of(args)
    )  # which refuses the folder of a single epoch
    from epochckpt.manager.changes import check_both_changeable

    check_both_changeable(epoch_directory, args.mirror, args.take_over)
    return opened(args)


def _changing(args: argparse.Namespace) -> contextlib.AbstractContextManager[CheckpointManager]:
    only_cpu()
    from epochckpt.manager.changes import changing

    return changing(args.directory, options_of(args), args.mirror, take_over=args.take_over)


def _destination(args: argparse.Namespace, directory: str) -> EpochDirectory | None:
    """The epochs of a directory that something is put into; None if it is missing or empty.

    A folder that holds something else than checkpoints is refused.
    """
    store = open_store(directory)
    try:
        with opening.access(store):
            empty = not store.list("")
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        empty = False
    return None if empty else opening.open_directory(directory, options_of(args))


def _check_mirror(run: Inspection, output: Output) -> None:
    """Says so if the mirror has not followed a change."""
    ledger = read_ledger(run.epoch_directory.store)
    if ledger is not None and ledger.withdrawals:
        output.note(
            f"the mirror {ledger.url} has not followed yet: the next run here that is given this mirror goes on with "
            "that, and so does a command with --mirror"
        )


def _in(root: str, path: str) -> str:
    return f"{root.rstrip('/')}/{path}"


def _changes(
    args: argparse.Namespace, run: Inspection, rows: Sequence[EpochRow], to: Callable[[EpochRow], str], remark: str
) -> Changes:
    root = run.epoch_directory.store.root
    ledger = read_ledger(run.epoch_directory.store)
    named = None if args.mirror is None else open_store(args.mirror).root
    homes = {MIRROR: named or root}
    changes = [EpochChange(r.epoch, r.nbytes, _in(homes.get(r.tier, root), r.folder), to(r)) for r in rows]
    where = getattr(args, "destination", None)
    destination = None if where is None else open_store(where).root
    return Changes(
        directory=run.directory,
        done=bool(args.yes),
        changes=tuple(changes),
        destination=destination,
        remark=remark,
        mirror=named or (None if ledger is None else ledger.url),
        follows=named is not None,
        unit=run.unit,
    )


def _answer(output: Output, changes: Changes, verb: str) -> int:
    """Prints what a command does, or would do; returns the exit code."""
    title = changes.directory + (f" → {changes.destination}" if changes.destination else "")
    count = f"{verb} {several(len(changes.changes), changes.unit)}, {_units.nbytes(changes.nbytes)}"
    mirror = ""
    if changes.mirror and verb != "copy":
        later = "" if changes.follows else " later: no --mirror names it now"
        mirror = f"its mirror {changes.mirror} follows{later}"

    def shown(path: str) -> Span:  # below the title's directories
        for root in filter(None, (changes.destination, changes.directory)):
            path = path.removeprefix(f"{root.rstrip('/')}/")
        return Span(path, limit=1000)

    def view() -> Iterator[Block]:
        yield TextLine(Span(title, Tone.STRONG, 2000), title=True)
        yield Summary(tuple(filter(None, (count, changes.remark, mirror))))
        yield table(
            changes.changes,
            (Column(changes.unit, 0, right=True), lambda change: str(change.epoch)),
            (Column("bytes", 1, right=True), lambda change: _units.nbytes(change.nbytes)),
            (Column("from", 0, least=10), lambda change: shown(change.source)),
            (Column("to", 0, least=10), lambda change: shown(change.destination) if change.destination else "deleted"),
        )
        yield from problems({f"{changes.unit} {epoch}": why for epoch, why in changes.problems.items()})
        if changes.changes and not changes.done:
            yield _UNCHANGED

    output.rows(changes, lambda: render(list(view())))
    return FOUND if changes.problems else OK
