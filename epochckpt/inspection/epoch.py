"""One epoch and one item of it, as `inspection` hands them out, and the views that they give."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from epochckpt import _text as naming
from epochckpt._text import readable, shown
from epochckpt.commit import Commits
from epochckpt.errors import DamagedError, EpochDeletedError, EpochNotFoundError, InvalidArgumentError, UnknownNameError
from epochckpt.format import paths
from epochckpt.inspection import describe, epoch_rows, plain, stats
from epochckpt.inspection.leaf_reader import Leaves
from epochckpt.inspection.rows import (
    COMMITTED,
    DAMAGED,
    Diff,
    DiffRow,
    EpochDetail,
    EpochRow,
    ItemRow,
    LeafRow,
    LeafStats,
)
from epochckpt.manager import status

if TYPE_CHECKING:
    from rich.console import RenderableType

Progress = Callable[[int], None]
"""Is told how many bytes have been read, piece by piece."""


class Shown:
    """Something that shows itself: as HTML in a notebook, as text elsewhere, as JSON to programs."""

    def _rows(self) -> Any:
        raise NotImplementedError

    def _html(self, rows: Any) -> str:
        raise NotImplementedError

    def _text(self, rows: Any) -> RenderableType:
        raise NotImplementedError

    def to_json(self) -> plain.Json:
        """The rows as what `json.dumps` takes; see `plain`."""
        return plain.to_json(self._rows())

    def to_html(self) -> str:
        """What a notebook shows."""
        return self._html(self._rows())

    def to_text(self, width: int | None = None, colour: bool = False) -> str:
        """What a terminal shows.

        Args:
            width: columns; None: those of the terminal.
            colour: with escape sequences for colours.
        """
        from epochckpt.inspection import text

        return text.to_text(self._text(self._rows()), width, colour)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        return self.to_text().rstrip("\n")


class StatsView(Shown, Sequence[LeafStats]):
    """Statistics of leaves, in order of the tree.

    Args:
        rows: the statistics.
    """

    def __init__(self, rows: Sequence[LeafStats]):
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.rows[number]

    def _rows(self) -> tuple[LeafStats, ...]:
        return self.rows

    def _html(self, rows: tuple[LeafStats, ...]) -> str:
        from epochckpt.inspection import html

        return html.stats(rows)

    def _text(self, rows: tuple[LeafStats, ...]) -> RenderableType:
        from epochckpt.inspection import text

        return text.stats(rows)


class DiffView(Shown, Sequence[DiffRow]):
    """The difference of two epochs, leaf by leaf.

    Args:
        diff: the difference.
    """

    def __init__(self, diff: Diff):
        self.diff, self.rows = diff, diff.rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.rows[number]

    def _rows(self) -> Diff:
        return self.diff

    def _html(self, rows: Diff) -> str:
        from epochckpt.inspection import html

        return html.diff(rows)

    def _text(self, rows: Diff) -> RenderableType:
        from epochckpt.inspection import text

        return text.diff(rows)


class EpochInspection(Shown):
    """One epoch. Iterates over the names of its items.

    Args:
        commits: the directory.
        epoch: its number.
        marks: the latest and the best epoch, as they are now.
    """

    def __init__(self, commits: Commits, epoch: int, marks: Callable[[], tuple[int | None, int | None]]):
        self._commits, self.epoch, self._marks = commits, epoch, marks

    @property
    def row(self) -> EpochRow:
        """What is known of it as a whole; its files are looked at.

        Raises:
            EpochDeletedError: it is not there any more.
        """
        row = epoch_rows.checked(self._commits, self.plain_row())
        latest, best = self._marks()
        is_latest = row.state == COMMITTED and self.epoch == latest
        return dataclasses.replace(row, latest=is_latest, best=self.epoch == best)

    def plain_row(self) -> EpochRow:
        """Its row without a look at its files or at other epochs.

        Raises:
            EpochDeletedError: it is not there any more.
        """
        row = read_row(self._commits, self.epoch)
        if row is None:
            raise EpochDeletedError(self.epoch, self._commits.store.root, "it was there when it was asked for")
        return row

    def detail(self) -> EpochDetail:
        """Its row, its items and their leaves."""
        return describe.describe(self._commits, self.row)

    def leaves(self) -> Leaves:
        """What reads its leaves, from the attempt that is committed now.

        Raises:
            DamagedError: its record cannot be used.
            EpochDeletedError: it is not there any more.
        """
        try:
            return Leaves(self._commits, self.epoch)
        except EpochNotFoundError as error:
            row = self.plain_row()
            if row.state == DAMAGED:
                raise _unusable(row) from error
            raise EpochDeletedError(
                self.epoch, self._commits.store.root, "it was there when it was asked for"
            ) from error

    def _items(self) -> dict[str, ItemRow]:
        detail = describe.describe(self._commits, self.plain_row())
        if not detail.items and detail.row.state == DAMAGED:
            raise _unusable(detail.row)
        return {item.name: item for item in detail.items}

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[str]:
        return iter(self._items())

    def __contains__(self, item: object) -> bool:
        return item in self._items()

    def __getitem__(self, item: str) -> ItemInspection:
        """One item.

        Raises:
            InvalidArgumentError: there is none of this name; names those that are near.
            DamagedError: the epoch's record cannot be used.
        """
        items = self._items()
        if item not in items:
            hint = naming.near(str(item), items)
            if len(items) == 1 and any(leaf.name == item for leaf in next(iter(items.values())).leaves):
                hint += f"; {item!r} is a leaf of item {next(iter(items))!r}"
            raise UnknownNameError(f"epoch {self.epoch} has no item {_quoted(item)}; {hint}")
        return ItemInspection(self, items[item])

    def stats(
        self,
        patterns: str | Sequence[str] = "*",
        item: str | None = None,
        node: str | None = None,
        *,
        progress: Progress | None = None,
    ) -> StatsView:
        """Statistics of every array whose name matches; reads those arrays, in pieces.

        Args:
            patterns: shell patterns of `leaf` or `item:leaf`: `params/*`.
            item: of this item only.
            node: of this node only, for items of each node's own.
            progress: is told how many bytes have been read, leaf by leaf.

        Raises:
            InvalidArgumentError: no array matches.
            DamagedError: an array cannot be read; names it.
        """
        items = list(self._items().values()) if item is None else [self[item].row]
        arrays = [one for one in chosen(items) if one[2].kind in stats.ARRAYS]
        if node is not None:
            known = dict.fromkeys(name for each in items for name in each.nodes)
            if node not in known:
                hint = naming.near(node, known)
                raise UnknownNameError(f"epoch {self.epoch}: no node {_quoted(node)} has items of its own; {hint}")
            arrays = [one for one in arrays if one[1] == node]
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        matching = [one for one in arrays if any(naming.matches(one[0], one[2].name, pattern) for pattern in wanted)]
        broken = next((each for each in items if each.problem), None)
        if not matching and broken is not None:
            raise DamagedError(f"epoch {self.epoch}, item {_quoted(broken.name)}", broken.problem)
        if not matching and wanted != ["*"]:
            known = dict.fromkeys(leaf.name for _, _, leaf in arrays)
            said = ", ".join(_quoted(pattern) for pattern in wanted)
            raise UnknownNameError(f"epoch {self.epoch}: no array matches {said}; {naming.near(wanted[0], known)}")
        leaves, found = self.leaves(), []
        for name, of, leaf in matching:
            found.append(stats.of_leaf(functools.partial(leaves.pieces, name, leaf.name, of), name, leaf, of))
            if progress is not None:
                progress(leaf.nbytes)
        return StatsView(found)

    def verify(self, progress: Progress | None = None) -> status.Verification:
        """Reads every byte of it and compares it with what was written; see `CheckpointManager.verify`."""
        return self.leaves().verify(progress or (lambda nbytes: None))

    def _rows(self) -> EpochDetail:
        return self.detail()

    def _html(self, rows: EpochDetail) -> str:
        from epochckpt.inspection import html

        return html.epoch(rows)

    def _text(self, rows: EpochDetail) -> RenderableType:
        from epochckpt.inspection import text

        return text.epoch(rows)


class ItemInspection(Shown):
    """One item of one epoch. Iterates over the names of its leaves, of its files, or of its nodes.

    All that it reads is of the attempt that was committed at its first read; if that is deleted, it raises
    EpochDeletedError.

    Attributes:
        row: what is known of it.

    Args:
        epoch: where it is from.
        row: its row.
        node: whose it is, for what is each node's own; empty otherwise.
        name: the item's name.
    """

    def __init__(self, epoch: EpochInspection, row: ItemRow, node: str = ""):
        self._epoch, self.row, self._node = epoch, row, node

    @functools.cached_property
    def _leaves(self) -> Leaves:
        return self._epoch.leaves()

    @functools.cached_property
    def _by_name(self) -> dict[str, LeafRow]:
        return {leaf.name: leaf for leaf in self.row.leaves}

    def _names(self) -> list[str]:
        if self.row.kind == "node":
            return list(self.row.nodes)
        return [file.name for file in self.row.files] if self.row.kind == "files" else list(self._by_name)

    def __len__(self) -> int:
        return len(self._names())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __contains__(self, name: object) -> bool:
        return name in self._names() or (isinstance(name, str) and readable(name) in self._by_name)

    def __getitem__(self, leaf: str) -> Any:
        """A leaf as a NumPy array or Python value; typed keys as their data.

        Raises:
            InvalidArgumentError: there is no such leaf; names those that are near.
            DamagedError: it cannot be read, or its bytes differ from what was written.
            EpochDeletedError: the epoch went away.
        """
        row = self.row
        if row.kind == "node":
            some = ", ".join(map(_quoted, list(row.nodes)[:5]))
            raise InvalidArgumentError(f"{self._where}: it is each node's own: choose one by .node(…), of {some}")
        if row.kind == "files":
            some = ", ".join(_quoted(file.name) for file in row.files[:5])
            raise InvalidArgumentError(f"{self._where}: it has no leaves but files: .read(…) gives one, of {some}")
        name = leaf if leaf in self._by_name else readable(str(leaf))
        if name not in self._by_name:
            if row.problem and not row.leaves:
                raise DamagedError(self._where, row.problem)
            raise UnknownNameError(f"{self._where}: {naming.no_leaf(str(leaf), self._by_name)}")
        return self._leaves.value(row.name, name, self._node)

    def node(self, name: str) -> ItemInspection:
        """What one node saved of its own.

        Raises:
            InvalidArgumentError: this item is not each node's own, or there is no such node.
        """
        if self.row.kind != "node":
            raise InvalidArgumentError(f"{self._where}: it is one for all nodes, not each node's own")
        if name not in self.row.nodes:
            hint = naming.near(name, self.row.nodes)
            raise UnknownNameError(f"{self._where}: node {_quoted(name)} has none; {hint}")
        return ItemInspection(self._epoch, self.row.nodes[name], name)

    def read(self, file: str) -> bytes:
        """The content of a file that a handler wrote.

        Raises:
            InvalidArgumentError: there is no such file.
            DamagedError: it cannot be read, or its bytes differ from what was written.
            EpochDeletedError: the epoch went away.
        """
        names = [known.name for known in self.row.files]
        if file not in names:
            raise UnknownNameError(f"{self._where}: there is no file {_quoted(file)}; {naming.near(file, names)}")
        return self._leaves.file(self.row.name, file, self._node)

    def stats(self, patterns: str | Sequence[str] = "*", *, progress: Progress | None = None) -> StatsView:
        """Statistics of its arrays; see `EpochInspection.stats`."""
        return self._epoch.stats(patterns, self.row.name, self._node or None, progress=progress)

    @property
    def _where(self) -> str:
        return f"epoch {self._epoch.epoch}, item {_quoted(self.row.name)}" + (f" of {self._node}" if self._node else "")

    def _rows(self) -> ItemRow:
        return self.row

    def _html(self, rows: ItemRow) -> str:
        from epochckpt.inspection import html

        return html.item(rows, rows.nbytes)

    def _text(self, rows: ItemRow) -> RenderableType:
        from epochckpt.inspection import text

        return text.item(rows, rows.nbytes)


def chosen(items: Sequence[ItemRow]) -> list[tuple[str, str, LeafRow]]:
    """(item, node, leaf) of every leaf of some items."""
    found = []
    for item in items:
        found += [(item.name, "", leaf) for leaf in item.leaves]
        found += [(item.name, node, leaf) for node, own in item.nodes.items() for leaf in own.leaves]
    return found


def read_row(commits: Commits, epoch: int) -> EpochRow | None:
    """The row of a committed epoch, as its record and attached metrics say; None if there is none of this number."""
    if epoch in commits.hidden():
        return None
    row = epoch_rows.read(commits, commits.folder(epoch), epoch)
    return epoch_rows.with_metrics(commits, row) if isinstance(row, EpochRow) else None


def _unusable(row: EpochRow) -> DamagedError:
    where = paths.join(row.folder, paths.EPOCH_RECORD)
    return DamagedError(where, row.detail.removeprefix(f"{where}: ") or "cannot be used")


def _quoted(name: object) -> str:
    return repr(shown(name, limit=200)) if isinstance(name, str) else repr(name)[:200]
