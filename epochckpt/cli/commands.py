"""The commands, but for `watch`: each prints its answer and returns the exit code. `--help` shows their docstrings."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from epochckpt import _progress, _units
from epochckpt._lazy import jax, ocp
from epochckpt.cli.output import FOUND, OK, UNREACHABLE, VIEW, Output
from epochckpt.errors import (
    AccessError,
    EpochCheckpointError,
    EpochNotFoundError,
    FormatVersionError,
    InvalidArgumentError,
    NotACheckpointDirectoryError,
    StorageError,
    UnknownNameError,
)
from epochckpt.inspection import columns, directory_views, leaf_views, views
from epochckpt.inspection.blocks import Block, Facts, Span, Tone
from epochckpt.inspection.directory import Inspection, inspect
from epochckpt.inspection.gc import Garbage, collect
from epochckpt.inspection.rows import DAMAGED, UNCHANGED, EpochDetail
from epochckpt.inspection.runs import inspect_runs
from epochckpt.inspection.select import narrowed
from epochckpt.inspection.text import BAD, FAINT, GOOD, HEAD, WARN, Fact, render, safe
from epochckpt.inspection.tree import ALL, Folding
from epochckpt.manager import Verification
from epochckpt.manager.status import NO_VIEW
from epochckpt.options import StorageOptions

if TYPE_CHECKING:
    from epochckpt.inspection.epoch import EpochInspection

_CHILDREN = 40  # shown of one group of a tree, where a depth is asked for
_DAMAGE = 20  # places of an epoch that are listed
_NEWER = 5  # damaged epochs that are named


def options_of(args: argparse.Namespace) -> ocp.CheckpointManagerOptions:
    """The options that say how epochs' folders are named."""
    return ocp.CheckpointManagerOptions(
        step_prefix=args.step_prefix, step_format_fixed_length=args.step_format_fixed_length, read_only=True
    )


def naming_of(args: argparse.Namespace) -> ocp.CheckpointManagerOptions | None:
    """The same; None for the default."""
    named = args.step_prefix is not None or args.step_format_fixed_length is not None
    return options_of(args) if named else None


def only_cpu() -> None:
    """Has jax start no other backend: a second process on an accelerator breaks the training beside it."""
    jax.config.update("jax_platforms", "cpu")


def opened(args: argparse.Namespace, directory: str | None = None) -> Inspection:
    """Opens the directory of a command, or the given one."""
    metric = args.metric[0] if args.metric and len(args.metric) == 1 else args.metric
    arguments = {"metric": metric, "mode": args.mode, "options": naming_of(args), "unit": args.unit}
    return inspect(directory or args.directory, **arguments, mirror=args.mirror if directory is None else None)


def epoch_of(run: Inspection, name: int | str, output: Output) -> EpochInspection:
    """One epoch: a number, `latest` or `best`. UnknownNameError or EpochNotFoundError if it does not exist."""
    if isinstance(name, int):
        return run[name]
    if name == "best" and run.metric is None:
        raise InvalidArgumentError("`best` needs --metric NAME: by which metric?")
    seen = run.overview(1)
    number = next((row.epoch for row in seen.epochs if (row.best if name == "best" else row.latest)), None)
    if number is None:
        raise UnknownNameError(f"{run.directory}: no {name} epoch: {seen.problems.get('') or 'no epoch can be used'}")
    newer = [row.epoch for row in seen.epochs if row.state == DAMAGED and row.epoch > number]
    if name == "latest" and newer:
        output.note(f"newer, but damaged: {', '.join(map(str, newer[-_NEWER:]))}; see `epochckpt ls`")
    return run[number]


def ls(args: argparse.Namespace, output: Output) -> int:
    """List the epochs of a directory, or the runs of a folder: age, metrics with their curves, what differs from most.

    ✓ is a committed epoch. Each node of several has a bar, as high as the time that it took to write; × is a damaged
    one. Sizes and times are in the rows only where they differ from what the head says of all.
    """
    try:
        run = opened(args)
    except NotACheckpointDirectoryError as error:
        try:
            metric = args.metric[0] if args.metric else None
            arguments = {"metric": metric, "mode": args.mode, "sort": args.sort, "options": naming_of(args)}
            runs = inspect_runs(args.directory, **arguments).overview()
        except NotACheckpointDirectoryError:
            raise error from None
        output.rows(runs, lambda: render(views.of(runs)))
        return FOUND if any(row.state == DAMAGED for row in runs.runs) else OK
    if args.sort is not None:
        raise InvalidArgumentError(f"--sort orders the runs of a folder, and {run.directory} is one run")
    seen = run.overview(args.limit or None, check=not args.no_check)
    seen = dataclasses.replace(seen, unit=run.unit) if args.no_check else seen  # a bucket's rows do not tell it then
    output.rows(seen, lambda: render(views.overview(seen, hint="; --limit 0 shows all")))
    return FOUND if any(row.state == DAMAGED for row in seen.epochs) else OK


def du(args: argparse.Namespace, output: Output) -> int:
    """Show what a directory takes up on storage: bytes, files and ages by epoch, attempt, and whatever else lies there.

    Files with several names count once; symlinks are not followed. In a bucket it is one listing of all objects.
    """
    options = dataclasses.replace(options_of(args), todelete_subdir=args.todelete_subdir)
    usage = inspect(args.directory, options=options, unit=args.unit).du().usage
    output.rows(usage, lambda: render(views.usage(usage, args.limit or None, hint="; --limit 0 shows all")))
    return OK


def goodput(args: argparse.Namespace, output: Output) -> int:
    """Show what the runs of a directory have spent their time on: training, saves, restores, and what kills cost.

    As recorded with each commit. `lost` is at least so much: a killed process records no end. `unknown` is the time
    from a run's newest commit to the next run.
    """
    goodput = inspect(args.directory, options=options_of(args), unit=args.unit).goodput().goodput
    output.rows(goodput, lambda: render(views.goodput(goodput)))
    return OK


def show(args: argparse.Namespace, output: Output) -> int:
    """Show one epoch: its record, its nodes, its items."""
    detail = epoch_of(opened(args), args.epoch, output).detail()
    output.rows(detail, lambda: _unfolded(args, views.epoch(detail)))
    return _code(detail)


def tree(args: argparse.Namespace, output: Output) -> int:
    """Show the leaves of an epoch as a tree: types, shapes, sizes, which node holds what."""
    detail = epoch_of(opened(args), args.epoch, output).detail()
    (less,) = narrowed([detail], args.patterns or "*", args.item, args.node)
    view: list[Block] = [block for item in less.items for block in views.item(item, detail.row.nbytes)]
    if detail.row.state == DAMAGED:
        view.insert(0, Facts((("wrong", Span(detail.row.detail, Tone.BAD, 2000)),)))
    output.rows(less, lambda: _unfolded(args, view))
    return _code(detail)


def _unfolded(args: argparse.Namespace, view: Sequence[Block]) -> RenderableType:
    """A view whose trees are unfolded as far as was asked."""
    folding = ALL if args.all else None if args.depth is None else Folding(args.depth, _CHILDREN, None, False)
    return render(view, folding=folding, owners=args.owners)


def _code(detail: EpochDetail) -> int:
    return FOUND if detail.row.state == DAMAGED or any(item.problem for item in detail.items) else OK


def stat(args: argparse.Namespace, output: Output) -> int:
    """Read arrays of an epoch and show their statistics: range, mean, norm, NaN, a histogram."""
    epoch = epoch_of(opened(args), args.epoch, output)
    patterns = args.patterns or "*"
    (less,) = narrowed([epoch.detail()], patterns, args.item, args.node)
    with _progress.work(f"{epoch.plain_row().unit} {epoch.epoch}", sum(item.nbytes for item in less.items)) as bar:
        stats = epoch.stats(patterns, args.item, args.node, progress=bar.advance).rows
    output.rows(stats, lambda: render(leaf_views.stats(stats)))
    for item in less.items:
        if item.problem:
            output.note(f"item {item.name}: {item.problem}")
    return _code(less)


def diff(args: argparse.Namespace, output: Output) -> int:
    """Compare two epochs leaf by leaf.

    Relative is the norm of the change, divided by the norm of the leaf before.
    """
    run = opened(args)
    other = run if args.other is None else opened(args, args.other)
    one = epoch_of(run, args.before, output)
    two = epoch_of(other, args.after, output)
    arguments: dict[str, Any] = {"directory": args.other, "item": args.item, "node": args.node}
    rows = one.plain_row(), two.plain_row()
    what = " and ".join(f"{row.unit} {row.epoch}" for row in rows)
    with _progress.work(what, sum(row.nbytes for row in rows)) as bar:
        arguments["progress"] = bar.set
        difference = run.diff(one.epoch, two.epoch, args.patterns or "*", **arguments).diff
    shown = {"listed": args.limit or None, "unchanged": args.unchanged, "hint": "; --limit 0 lists all"}
    output.rows(difference, lambda: render(leaf_views.diff(difference, **shown)))
    return FOUND if difference.problems or any(row.change != UNCHANGED for row in difference.rows) else OK


def verify(args: argparse.Namespace, output: Output) -> int:
    """Read every byte of epochs and compare it with the recorded checksums."""
    run = opened(args)
    rows = [epoch_of(run, name, output).plain_row() for name in dict.fromkeys(args.epochs)] or run.epochs()
    sizes = {row.epoch: row.nbytes for row in rows}
    verifications: list[Verification] = []
    unread = False
    unit = run.unit
    with _progress.work("verifying", sum(sizes.values())) as bar:
        for epoch, nbytes in sizes.items():
            try:
                one = run[epoch].verify(bar.advance)
                verifications.append(_repaired(run, one, output) if args.repair_view else one)
            except EpochNotFoundError:  # a live run deletes epochs
                output.note(f"{unit} {epoch} was deleted meanwhile")
            except (AccessError, FormatVersionError, StorageError) as error:  # which says nothing about the data
                output.note(f"{unit} {epoch}: {error}")
                unread = True
            except EpochCheckpointError as error:  # its record cannot be read
                verifications.append(Verification(epoch, nbytes, (error,)))
    answer = {"directory": run.directory, "epochs": [_plain(one) for one in verifications]}
    output.rows(answer, lambda: Group(*_verifications(verifications, unit)))
    if unread or any(one.unread for one in verifications):
        return UNREACHABLE
    if any(one.damage for one in verifications):
        return FOUND
    return VIEW if any(one.view_damage for one in verifications) else OK


def _repaired(run: Inspection, one: Verification, output: Output) -> Verification:
    """Repairs an epoch's Orbax view if it is damaged or missing; returns what is known of the epoch after that."""
    from epochckpt.manager.repair import repair as repair_view

    if not one.view_damage and one.note != NO_VIEW:
        return one
    try:
        made = repair_view(run.epoch_directory, one.epoch)
    except EpochNotFoundError:
        raise
    except EpochCheckpointError as error:
        output.note(f"{run.unit} {one.epoch}: its Orbax view stays as it is: {error}")
        return one
    output.note(f"{run.unit} {one.epoch}: made anew for stock Orbax: {', '.join(made)}")
    return dataclasses.replace(one, note="", view_damage=())


def _plain(one: Verification) -> dict[str, Any]:
    """An answer for programs."""

    def place(error: EpochCheckpointError) -> dict[str, Any]:
        path, leaf, problem = (getattr(error, name, None) for name in ("path", "leaf", "problem"))
        leaves = getattr(error, "leaves", 1)
        return {"path": path or "", "leaf": leaf, "leaves": leaves, "problem": problem or str(error)}

    return {
        "epoch": one.epoch,
        "ok": one.ok,
        "nbytes": one.nbytes,
        "note": one.note,
        "damage": [place(error) for error in one.damage],
        "view_damage": [place(error) for error in one.view_damage],
        "unread": [place(error) for error in one.unread],
    }


def _verifications(verifications: Sequence[Verification], unit: str) -> Iterator[RenderableType]:
    width = max((len(str(one.epoch)) for one in verifications), default=1) + len(f"{unit} ")
    for one in verifications:
        if one.ok:
            state = Text.assemble(("ok", GOOD))
        else:
            state = Text.assemble(("damaged", BAD) if one.damage else ("not all of it was read", WARN))
        value = state.append(f"  {_units.nbytes(one.nbytes)}", "").append("  *" if one.note else "", FAINT)
        yield Fact(Text(f"{unit} {one.epoch}", HEAD), value, width)
        yield from _places(one.damage, BAD)
        yield from _places(one.unread, WARN)
        if one.view_damage:
            yield Text("  the Orbax view is damaged: stock Orbax may not read it (--repair-view)", WARN)
            yield from _places(one.view_damage, WARN)
    for note in dict.fromkeys(one.note for one in verifications if one.note):
        yield Fact(Text("*", FAINT), safe(note, FAINT, limit=600), 1)
    if not verifications:
        yield Text(f"no {columns.noun(unit)} was verified", FAINT)


def _places(errors: Sequence[EpochCheckpointError], style: str) -> Iterator[RenderableType]:
    for error in errors[:_DAMAGE]:
        yield Fact(Text("×", style), safe(str(error), style, limit=1000), 1, 2)
    if len(errors) > _DAMAGE:
        yield Text(f"  … {_units.count(len(errors) - _DAMAGE)} more", style)


def gc(args: argparse.Namespace, output: Output) -> int:
    """List what no run and no reader needs any more: attempts that failed, half-done removals.

    Nothing is removed without --delete; epochs never are.
    """
    storage = None if args.save_timeout is None else StorageOptions(save_timeout_secs=args.save_timeout)
    options = dataclasses.replace(options_of(args), todelete_subdir=args.todelete_subdir)
    arguments: dict[str, Any] = {"older_than_secs": args.older_than, "epochs_too": args.rolled_back}
    search = functools.partial(collect, args.directory, options=options, storage=storage, **arguments)
    garbage = search()
    if args.delete and garbage.rows:
        with _progress.work("removing", garbage.nbytes) as bar:
            garbage = search(delete=True, progress=lambda row: bar.advance(row.nbytes))
    answer = {"deleted": bool(args.delete), **dataclasses.asdict(garbage), "nbytes": garbage.nbytes}
    answer["kept"] = {path: kept.reason for path, kept in garbage.kept.items()}
    answer["failed"] = [path for path, kept in garbage.kept.items() if kept.failed]
    unit = args.unit or inspect(args.directory, options=options).unit
    output.rows(answer, lambda: Group(*_garbage(garbage, args.delete, unit)))
    return UNREACHABLE if garbage.failed else OK


def repair(args: argparse.Namespace, output: Output) -> int:
    """Make the record of which epochs a bucket directory has name all that are whole there.

    For a record that is lost or damaged, and for epochs that were copied into the directory. Nothing is removed, and
    nothing is written without --yes.
    """
    from epochckpt.manager.repair import repair_head

    repair = repair_head(args.directory, write=args.yes, options=options_of(args))

    def lines() -> Iterator[RenderableType]:
        if repair.problem:
            yield safe(repair.problem, WARN)
        if repair.epochs or repair.aside or repair.problem:
            epochs = ", ".join(map(str, repair.epochs)) or "nothing"
            yield Text(f"{'taken in' if args.yes else 'can be taken in (--yes does so)'}: {epochs}", HEAD)
            yield from (safe(f"  set aside: {folder}") for folder in repair.aside)
        else:
            yield Text("nothing is to be repaired", HEAD)
        for folder, why in repair.left_out.items():
            yield safe(f"  left alone: {folder}: {why}", WARN)

    output.rows({"written": bool(args.yes), **dataclasses.asdict(repair)}, lambda: Group(*lines()))
    return OK


def _garbage(garbage: Garbage, deleted: bool, unit: str) -> Iterator[RenderableType]:
    if garbage.rows:
        things = _units.several(len(garbage.rows), "thing", "things")
        yield Text(f"{'removed' if deleted else 'can be removed'}: {things}, {_units.nbytes(garbage.nbytes)}", HEAD)
        yield render([directory_views.leftovers(garbage.rows, unit)])
    else:
        yield Text("nothing was removed" if deleted else "nothing can be removed", HEAD)
    if garbage.kept:
        yield Text()
        yield Text("stays:", HEAD)
    sizes = {row.path: f"  {_units.nbytes(row.nbytes)}" for row in garbage.others}
    for path, kept in garbage.kept.items():
        style = BAD if kept.failed else ""
        line = safe(path, limit=100).append(sizes.get(path, ""), FAINT)
        yield Fact(Text("·", FAINT), line.append_text(safe(f"  {kept.reason}", style, limit=600)), 1, 2)
    if garbage.rows and not deleted:
        yield Text()
        yield Text("Nothing was changed; --delete removes it.", FAINT)


def export(args: argparse.Namespace, output: Output) -> int:
    """Write an epoch, or some of its leaves, as a stock Orbax checkpoint or as safetensors, every byte verified."""
    only_cpu()  # Orbax asks jax for its devices, to name a single one
    from epochckpt.convert.export import export as write  # with jax and Orbax, which the other commands need not
    from epochckpt.convert.selected_arrays import say_cast

    epoch = epoch_of(opened(args), args.epoch, output)
    arguments: dict[str, Any] = {
        "item": args.item,
        "separator": args.separator,
        "skip_unsupported": args.skip_unsupported,
    }
    chosen = {"include": args.include, "exclude": args.exclude, "rename": dict(args.rename), "dtype": args.dtype}
    arguments |= {**chosen, "framework": args.framework, "config": args.config, "options": options_of(args)}
    arguments |= {"mirror": args.mirror}
    arguments |= {"max_file_bytes": args.max_file_size} if args.max_file_size else {}
    row = epoch.plain_row()
    with _progress.work(f"exporting {row.unit} {epoch.epoch}", None if any(chosen.values()) else row.nbytes):
        done = write(args.directory, epoch.epoch, args.destination, args.format, **arguments)

    def view() -> Iterator[RenderableType]:
        what = f"{row.unit} {done.epoch} as {args.format}: {_units.nbytes(done.nbytes)} in "
        yield Text.assemble(what, safe(done.path))
        if done.cast:
            yield Text(say_cast(done.cast, args.dtype))
        if done.unsupported:
            yield Text("left out:")
        for item, leaves in done.unsupported.items():
            why = ", ".join(f"{leaf}: {reason}" for leaf, reason in leaves.items())
            yield Fact(safe(item), safe(why, limit=2000), 12, 2)

    output.rows(done, lambda: Group(*view()))
    return OK
