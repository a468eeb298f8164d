"""The commands that look at epochs: `ls`, `show`, `tree`, `stat`."""

from __future__ import annotations

import argparse

from rich.console import Group
from rich.text import Text

from epochckpt import overview, stats, text_tree, text_views
from epochckpt.cli_output import FOUND, OK, Output
from epochckpt.cli_places import Place, chosen, narrowed, options_of
from epochckpt.rows import DAMAGED, EpochDetail
from epochckpt.text_table import BAD, Fact, text


def ls(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt ls`."""
    seen = overview.look(
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
            found.append(stats.of_leaf(leaves, item, leaf, node))
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
