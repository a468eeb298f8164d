"""The commands that read or write much: `verify`, `gc`, `export`.

`epochckpt gc`: what lies in a directory that nobody needs any more, and removing it.

`epochckpt diff`: what changed between two epochs.

The commands that look at epochs: `ls`, `show`, `tree`, `stat`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from rich.console import Group, RenderableType
from rich.text import Text

from epochckpt import _units
from epochckpt.cli.output import FOUND, OK, UNREACHABLE, VIEW, Output
from epochckpt.cli.resolve import Place, all_narrowed, chosen, narrowed, options_of
from epochckpt.errors import EpochCheckpointError, EpochDeletedError, EpochNotFoundError
from epochckpt.inspection import diff as diffing
from epochckpt.inspection import gc, scan, stats
from epochckpt.inspection import text as text_views
from epochckpt.inspection.gc import Garbage
from epochckpt.inspection.rows import DAMAGED, UNCHANGED, EpochDetail, EpochRow, LeftoverRow
from epochckpt.inspection.text import leaves, overview
from epochckpt.inspection.text import tree as text_tree
from epochckpt.inspection.text.table import BAD, FAINT, GOOD, HEAD, WARN, Fact, text
from epochckpt.manager import Verification, repair, status
from epochckpt.manager import export as exporting
from epochckpt.options import StorageOptions

_FAILED = "could not be removed"


def collect(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt gc`."""
    storage = None if args.save_timeout is None else StorageOptions(save_timeout_secs=args.save_timeout)
    options = options_of(args)
    if args.todelete_subdir is not None:
        options = dataclasses.replace(options, todelete_subdir=args.todelete_subdir)

    def find() -> Garbage:
        return gc.find(
            args.directory,
            older_than_secs=args.older_than,
            epochs_too=args.rolled_back,
            options=options,
            storage=storage,
        )

    found = find()
    if args.delete and found.rows:
        with output.progress("removing", found.nbytes) as bar:
            found = gc.remove(
                args.directory,
                found.rows,
                older_than_secs=args.older_than,
                epochs_too=args.rolled_back,
                options=options,
                storage=storage,
                progress=lambda row: bar.more(row.nbytes),
            )
    answer = {"deleted": bool(args.delete), **dataclasses.asdict(found), "nbytes": found.nbytes}
    output.rows(answer, lambda: Group(*_view(found, args.delete)))
    return UNREACHABLE if any(why.startswith(_FAILED) for why in found.kept.values()) else OK


def _view(found: Garbage, deleted: bool) -> Iterator[RenderableType]:
    if found.rows:
        things = _units.several(len(found.rows), "thing", "things")
        said = f"removed: {things}" if deleted else f"can be removed: {things}"
        yield Text(f"{said}, {_units.nbytes(found.nbytes)}", HEAD)
        yield overview.leftovers(found.rows)
    else:
        yield Text("nothing was removed" if deleted else "nothing can be removed", HEAD)
    if found.kept:
        yield Text()
        yield Text("stays:", HEAD)
        yield from _kept(found.others, found)
    if found.rows and not deleted:
        yield Text()
        yield Text("Nothing was changed; --delete removes it.", FAINT)


def _kept(others: Sequence[LeftoverRow], found: Garbage) -> Iterator[RenderableType]:
    sizes = {row.path: _units.nbytes(row.nbytes) for row in others}
    for path, why in found.kept.items():
        style = BAD if why.startswith(_FAILED) else ""
        said = text(path, limit=100).append(f"  {sizes[path]}" if path in sizes else "", FAINT)
        yield Fact(Text("·", FAINT), said.append_text(text(f"  {why}", style, limit=600)), 1, 2)


def diff(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt diff`."""
    place = Place(args, output)
    other = place if args.other is None else Place(args, output, args.other)
    one, two = place.row(args.before, check=False), other.row(args.after, check=False)
    before, after = all_narrowed([place.detail(one), other.detail(two)], args)
    with output.progress(f"epochs {one.epoch} and {two.epoch}", one.nbytes + two.nbytes) as bar:
        found = diffing.compare(
            (before, place.leaves(one)),
            (after, other.leaves(two)),
            progress=bar.at,
            directory=place.commits.store.root,
            other_directory=other.commits.store.root if args.other is not None else "",
        )
    output.rows(
        found,
        lambda: leaves.diff(found, listed=args.limit or None, unchanged=args.unchanged, hint="; --limit 0 lists all"),
    )
    return FOUND if found.problems or any(row.change != UNCHANGED for row in found.rows) else OK


def ls(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt ls`."""
    seen = scan.look(
        args.directory,
        metric=args.metric or None,
        mode=args.mode,
        limit=args.limit or None,
        options=options_of(args),
        check=not args.no_check,
    )
    output.rows(seen, lambda: text_views.overview(seen, hint="; --limit 0 shows all"))
    return FOUND if any(row.state == DAMAGED for row in seen.epochs) else OK


def show(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt show`."""
    place = Place(args, output)
    detail = place.detail(place.row(args.epoch))
    output.rows(detail, lambda: text_views.epoch(detail, folding=_folding(args), owners=args.owners))
    return _code(detail)


def tree(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt tree`."""
    place = Place(args, output)
    detail = place.detail(place.row(args.epoch))
    less = narrowed(detail, args)
    folding = _folding(args) or text_tree.Folding(rows=max(text_tree.SCREEN // max(len(less.items), 1), 8))

    def view() -> Group:
        total = detail.row.nbytes
        items = [text_views.item(item, total, folding=folding, owners=args.owners) for item in less.items]
        between = [part for item in items for part in (Text(), item)][1:]
        said = text(detail.row.detail, BAD, limit=2000)
        wrong = [Fact(Text("wrong", BAD), said, 5)] if detail.row.state == DAMAGED else []
        return Group(*wrong, *between)

    output.rows(less, view)
    return _code(detail)


def stat(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt stat`."""
    place = Place(args, output)
    row = place.row(args.epoch, check=False)
    less = narrowed(place.detail(row), args)
    wanted = [one for one in chosen(less) if one[2].kind in stats.ARRAYS]
    found = []
    leaves = place.leaves(row)
    with output.progress(f"epoch {row.epoch}", sum(leaf.nbytes for _, _, leaf in wanted)) as bar:
        for item, node, leaf in wanted:
            found.append(stats.of_leaf(functools.partial(leaves.pieces, item, leaf.name, node), item, leaf, node))
            bar.more(leaf.nbytes)
    output.rows(found, lambda: text_views.stats(found))
    for item in less.items:
        if item.problem:
            output.note(f"item {item.name}: {item.problem}")
    return _code(less)


def _folding(args: argparse.Namespace) -> text_tree.Folding | None:
    if args.all:
        return text_tree.ALL
    return None if args.depth is None else text_tree.Folding.to_depth(args.depth)


def _code(detail: EpochDetail) -> int:
    return FOUND if detail.row.state == DAMAGED or any(item.problem for item in detail.items) else OK


_DAMAGE = 20  # places of an epoch that are listed


def verify(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt verify`."""
    place = Place(args, output)
    rows = place.rows(args.epochs)
    found: list[Verification] = []
    with output.progress("verifying", sum(row.nbytes for row in rows)) as bar:
        for row in rows:
            try:
                one = _verified(place, row, bar.more)
                if args.repair_view:
                    one = _repaired(place, one, output)
                found.append(one)
            except EpochNotFoundError as error:  # a live run deletes epochs
                if not isinstance(error, EpochDeletedError) and row.epoch in args.epochs:
                    raise
                output.note(f"epoch {row.epoch} was deleted meanwhile")
    answer = {"directory": place.commits.store.root, "epochs": [_plain(one) for one in found]}
    output.rows(answer, lambda: Group(*_verifications(found)))
    if any(not one.ok for one in found):
        return FOUND
    return VIEW if any(one.view_damage for one in found) else OK


def _repaired(place: Place, one: Verification, output: Output) -> Verification:
    """What is known of an epoch when its Orbax view has been made anew, if it was not as it should be."""
    if not one.view_damage and one.note != status.NO_VIEW:
        return one
    try:
        made = repair.repair(place.commits, one.epoch)
    except EpochNotFoundError:
        raise
    except EpochCheckpointError as error:
        output.note(f"epoch {one.epoch}: its Orbax view stays as it is: {error}")
        return one
    output.note(f"epoch {one.epoch}: made anew for stock Orbax: {', '.join(made)}")
    return dataclasses.replace(one, note="", view_damage=())


def _verified(place: Place, row: EpochRow, progress: Callable[[int], None]) -> Verification:
    try:
        return place.leaves(row).verify(progress)
    except EpochNotFoundError:
        raise
    except EpochCheckpointError as error:  # its record cannot be read
        return Verification(row.epoch, row.nbytes, (error,))


def _plain(one: Verification) -> dict[str, Any]:
    """An answer for programs."""
    damage, view = (
        [
            {
                "path": getattr(error, "path", ""),
                "leaf": getattr(error, "leaf", None),
                "problem": getattr(error, "problem", str(error)),
            }
            for error in errors
        ]
        for errors in (one.damage, one.view_damage)
    )
    rest = {"nbytes": one.nbytes, "note": one.note, "damage": damage, "view_damage": view}
    return {"epoch": one.epoch, "ok": one.ok, **rest}


def _verifications(found: Sequence[Verification]) -> Iterator[RenderableType]:
    width = max((len(str(one.epoch)) for one in found), default=1) + len("epoch ")
    for one in found:
        said = Text.assemble(("ok", GOOD) if one.ok else ("damaged", BAD))
        value = said.append(f"  {_units.nbytes(one.nbytes)}", "").append("  *" if one.note else "", FAINT)
        yield Fact(Text(f"epoch {one.epoch}", HEAD), value, width)
        yield from _places(one.damage, BAD)
        if one.view_damage:
            yield Text("  the Orbax view is damaged: stock Orbax may not read it (--repair-view)", WARN)
            yield from _places(one.view_damage, WARN)
    for note in dict.fromkeys(one.note for one in found if one.note):
        yield Fact(Text("*", FAINT), text(note, FAINT, limit=600), 1)
    if not found:
        yield Text("no epochs", FAINT)


def _places(errors: Sequence[EpochCheckpointError], style: str) -> Iterator[RenderableType]:
    for error in errors[:_DAMAGE]:
        yield Fact(Text("×", style), text(str(error), style, limit=1000), 1, 2)
    if len(errors) > _DAMAGE:
        yield Text(f"  … {_units.count(len(errors) - _DAMAGE)} more", style)


def export(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt export`."""
    # Orbax names a single device as jax does, so that jax is asked for its devices. It is to start the CPU's only: a
    # second process that starts an accelerator's backend breaks the training beside it.
    jax.config.update("jax_platforms", "cpu")
    place = Place(args, output)
    row = place.row(args.epoch, check=False)
    with output.progress(f"exporting epoch {row.epoch}", row.nbytes) as bar:
        done = exporting.export(
            args.directory,
            row.epoch,
            args.destination,
            args.format,
            item=args.item,
            separator=args.separator,
            skip_unsupported=args.skip_unsupported,
            options=place.options,
            progress=bar.more,
        )

    def view() -> RenderableType:
        said = Text.assemble(f"epoch {done.epoch} as {args.format}: {_units.nbytes(done.nbytes)} in ", text(done.path))
        left = [
            Fact(text(item), text(", ".join(f"{leaf}: {why}" for leaf, why in leaves.items()), limit=2000), 12, 2)
            for item, leaves in done.unsupported.items()
        ]
        return Group(said, *([Text("left out:"), *left] if left else []))

    output.rows(done, view)
    return OK
