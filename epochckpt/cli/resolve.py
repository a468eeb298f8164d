"""From what was typed to what it names: directories, epochs, items, leaves; with near names where there are none."""

from __future__ import annotations

import argparse
import dataclasses
import glob
from collections.abc import Iterable, Sequence
from typing import Any

import orbax.checkpoint as ocp

from epochckpt import _text
from epochckpt._text import shown
from epochckpt.cli.output import MISSING, USAGE, Output, Stop
from epochckpt.inspection import describe, epoch_rows, scan
from epochckpt.inspection.epoch import read_row
from epochckpt.inspection.leaf_reader import Leaves
from epochckpt.inspection.rows import COMMITTED, DAMAGED, EpochDetail, EpochRow, ItemRow, LeafRow, Overview

_NEAR = 5


def options_of(args: argparse.Namespace) -> ocp.CheckpointManagerOptions:
    """The names of epochs' folders that were asked for."""
    return ocp.CheckpointManagerOptions(
        step_prefix=args.step_prefix, step_format_fixed_length=args.step_format_fixed_length, read_only=True
    )


class Place:
    """A directory that a command looks at.

    Args:
        args: of the command.
        output: where remarks go.
        directory: another one than the command's.

    Raises:
        NotACheckpointDirectoryError: it is none.
        AccessError: it may not be read.
        OSError: it cannot be reached.
    """

    def __init__(self, args: argparse.Namespace, output: Output, directory: str | None = None):
        self.directory = args.directory if directory is None else directory
        self.options = options_of(args)
        self.commits = scan.open_commits(self.directory, self.options, single=True)
        self._args, self._output = args, output

    def row(self, epoch: int | str, *, check: bool = True) -> EpochRow:
        """One epoch's row.

        Args:
            epoch: a number, `latest` or `best`.
            check: look whether its files are there.
        """
        if epoch == "best" and not self._args.metric:
            raise Stop(USAGE, "`best` needs --metric NAME: by which metric?")
        if isinstance(epoch, str):
            return self._marked(epoch)
        row = self._numbered(epoch)
        return self._with_marks(epoch_rows.checked(self.commits, row)) if check else row

    def rows(self, epochs: Sequence[int | str]) -> list[EpochRow]:
        """Rows of several epochs, each once; of all if none is named."""
        if epochs:
            return list({row.epoch: row for row in (self.row(epoch, check=False) for epoch in epochs)}.values())
        seen = scan.look(self.directory, limit=None, options=self.options, check=False)
        return [row for row in seen.epochs if row.state in (COMMITTED, DAMAGED)]

    def _numbered(self, epoch: int) -> EpochRow:
        row = read_row(self.commits, epoch)
        if row is not None:
            return row
        hint = _text.near_epochs(epoch, self.commits.list_epochs())
        raise Stop(MISSING, f"{scan.place(self.commits)}: no epoch {epoch}; {hint}")

    def _marked(self, which: str) -> EpochRow:
        """The latest epoch that is whole, or the best."""
        seen = self._look()
        row = next((row for row in seen.epochs if (row.best if which == "best" else row.latest)), None)
        if row is not None:
            newer = [r.epoch for r in seen.epochs if r.state == DAMAGED and r.epoch > row.epoch]
            if which == "latest" and newer:
                self._output.note(f"newer, but damaged: {', '.join(map(str, newer[-_NEAR:]))}; see `epochckpt ls`")
            return row
        why = seen.problems.get("") or "no epoch can be used"
        raise Stop(MISSING, f"{scan.place(self.commits)}: no {which} epoch: {why}")

    def _look(self) -> Overview:
        """The newest epoch, and the latest and the best that are whole, as far as a look at their files tells."""
        metric = self._args.metric or None
        return scan.look(self.directory, metric=metric, mode=self._args.mode, limit=1, options=self.options)

    def _with_marks(self, row: EpochRow) -> EpochRow:
        """The row that says whether its epoch is the latest or the best one."""
        seen = {one.epoch: one for one in self._look().epochs if one.state == COMMITTED}
        found = seen.get(row.epoch) if row.state == COMMITTED else None
        return row if found is None else dataclasses.replace(row, latest=found.latest, best=found.best)

    def detail(self, row: EpochRow) -> EpochDetail:
        """Everything about an epoch."""
        return describe.describe(self.commits, row)

    def leaves(self, row: EpochRow) -> Leaves:
        """What reads an epoch's arrays."""
        return Leaves(self.commits, row.epoch)


def patterns(typed: Sequence[str]) -> list[str]:
    """Shell patterns for what was typed: patterns, names of leaves, parts of the tree, names of items."""
    found = []
    for name in typed or ["*"]:
        found += [name, glob.escape(name), f"{glob.escape(name.rstrip('/'))}/*"]
    return list(dict.fromkeys(found))


def narrowed(detail: EpochDetail, args: argparse.Namespace) -> EpochDetail:
    """An epoch with the items, nodes and leaves only that were asked for.

    Raises:
        Stop: there are none.
    """
    (found,) = all_narrowed([detail], args)
    return found


def all_narrowed(sides: Sequence[EpochDetail], args: argparse.Namespace) -> list[EpochDetail]:
    """The same for epochs that are compared: it is enough if one of them has what was asked for.

    Raises:
        Stop: none of them has.
    """
    items = [list(side.items) for side in sides]
    newest = sides[-1]
    if args.item is not None:
        known = dict.fromkeys(item.name for side in items for item in side)
        if args.item not in known:
            raise _missing(newest, "item", args.item, known)
        items = [[item for item in side if item.name == args.item] for side in items]
    if args.node is not None:
        known = dict.fromkeys(node for side in items for item in side for node in item.nodes)
        if args.node not in known:
            raise _missing(newest, "node with items of its own", args.node, known)
        items = [
            [_of(item, nodes={args.node: item.nodes[args.node]}) for item in side if args.node in item.nodes]
            for side in items
        ]
    for typed in args.patterns:
        here = [item for side in items for item in side]
        if not any(_names([_matching(item, patterns([typed]))]) for item in here):
            known = _names(here)
            several = dict.fromkeys(item.name for item in here)
            raise _missing(newest, "leaf", typed, [*(several if len(several) > 1 else ()), *known])
    if args.patterns:
        kept = [[_matching(item, patterns(args.patterns)) for item in side] for side in items]
        items = [[item for item in side if _names([item])] for side in kept]
    return [dataclasses.replace(side, items=tuple(less)) for side, less in zip(sides, items, strict=True)]


def chosen(detail: EpochDetail) -> list[tuple[str, str, LeafRow]]:
    """(item, node, leaf) of every leaf of an epoch."""
    found = []
    for item in detail.items:
        found += [(item.name, "", leaf) for leaf in item.leaves]
        found += [(item.name, node, leaf) for node, own in item.nodes.items() for leaf in own.leaves]
    return found


def _matching(item: ItemRow, wanted: Sequence[str]) -> ItemRow:
    """An item with what matches a pattern of `leaf` or `item:leaf`; all of it if a pattern is its name."""
    if item.name in wanted:
        return item

    def matches(name: str) -> bool:
        return any(_text.matches(item.name, name, pattern) for pattern in wanted)

    leaves = tuple(leaf for leaf in item.leaves if matches(leaf.name))
    nodes = {node: _matching(own, wanted) for node, own in item.nodes.items()}
    files = tuple(file for file in item.files if matches(file.name))
    return _of(item, leaves=leaves, nodes={n: own for n, own in nodes.items() if own.leaves}, files=files)


def _of(item: ItemRow, **changed: Any) -> ItemRow:
    """An item with less in it."""
    less = dataclasses.replace(item, **changed)
    held = sum(leaf.nbytes for leaf in less.leaves) + sum(file.nbytes for file in less.files)
    return dataclasses.replace(less, nbytes=held + sum(own.nbytes for own in less.nodes.values()))


def _names(items: Iterable[ItemRow]) -> list[str]:
    found: dict[str, None] = {}
    for item in items:
        found.update(dict.fromkeys(leaf.name for leaf in item.leaves))
        found.update(dict.fromkeys(file.name for file in item.files))
        for own in item.nodes.values():
            found.update(dict.fromkeys(leaf.name for leaf in own.leaves))
    return list(found)


def _missing(detail: EpochDetail, what: str, name: str, known: Iterable[str]) -> Stop:
    said = f"epoch {detail.row.epoch} has no {what} '{shown(name, limit=200)}'"
    return Stop(MISSING, f"{said}; {_text.near(name, known)}")
