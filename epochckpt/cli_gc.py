"""`epochckpt gc`: what lies in a directory that nobody needs any more, and removing it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from epochckpt import gc, text_overview, units
from epochckpt.cli_output import OK, UNREACHABLE, Output
from epochckpt.cli_places import options_of
from epochckpt.gc import Garbage
from epochckpt.options import StorageOptions
from epochckpt.rows import RemainRow
from epochckpt.text_table import BAD, FAINT, HEAD, Fact, text

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
        things = units.several(len(found.rows), "thing", "things")
        said = f"removed: {things}" if deleted else f"can be removed: {things}"
        yield Text(f"{said}, {units.nbytes(found.nbytes)}", HEAD)
        yield text_overview.remains(found.rows)
    else:
        yield Text("nothing was removed" if deleted else "nothing can be removed", HEAD)
    if found.kept:
        yield Text()
        yield Text("stays:", HEAD)
        yield from _kept(found.others, found)
    if found.rows and not deleted:
        yield Text()
        yield Text("Nothing was changed; --delete removes it.", FAINT)


def _kept(others: Sequence[RemainRow], found: Garbage) -> Iterator[RenderableType]:
    sizes = {row.path: units.nbytes(row.nbytes) for row in others}
    for path, why in found.kept.items():
        style = BAD if why.startswith(_FAILED) else ""
        said = text(path, limit=100).append(f"  {sizes[path]}" if path in sizes else "", FAINT)
        yield Fact(Text("·", FAINT), said.append_text(text(f"  {why}", style, limit=600)), 1, 2)
