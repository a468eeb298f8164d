"""`epochckpt diff`: what changed between two epochs."""

from __future__ import annotations

import argparse

from epochckpt import diffing, text_leaves
from epochckpt.cli_output import FOUND, OK, Output
from epochckpt.cli_places import Place, all_narrowed
from epochckpt.rows import UNCHANGED


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
        lambda: text_leaves.diff(
            found, listed=args.limit or None, unchanged=args.unchanged, hint="; --limit 0 lists all"
        ),
    )
    return FOUND if found.problems or any(row.change != UNCHANGED for row in found.rows) else OK
