"""The inspections of one epoch and of one item, and their tables."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from epochckpt import _text
from epochckpt._metrics import flat
from epochckpt._text import readable
from epochckpt.errors import (
    DamagedError,
    EpochDeletedError,
    EpochNotFoundError,
    FormatVersionError,
    InvalidArgumentError,
    UnknownNameError,
    UnsupportedError,
)
from epochckpt.format import paths
from epochckpt.inspection import epoch_rows, plain, stats
from epochckpt.inspection.rows import (
    DAMAGED,
    NEWER,
    ArrayLook,
    Diff,
    DiffRow,
    EpochDetail,
    EpochRow,
    Goodput,
    ItemRow,
    LeafRow,
    LeafStats,
    MetricsRow,
    RunGoodput,
    RunMetrics,
    Usage,
    UsageRow,
)
from epochckpt.inspection.select import narrowed, quoted

if TYPE_CHECKING:
    from epochckpt.directory import EpochDirectory
    from epochckpt.manager import CheckpointReader, Verification

Progress = Callable[[int], None]
"""Called with the number of bytes that have been read since the last call."""

T = TypeVar("T")


def _ignore(nbytes: int) -> None:
    """A progress callback that does nothing."""


class Shown:
    """Something that shows itself: as HTML in a notebook, as text elsewhere, as JSON to programs."""

    def _rows(self) -> Any:
        raise NotImplementedError

    def to_json(self) -> plain.Json:
        """The rows as what `json.dumps` takes; see `plain`."""
        return plain.to_json(self._rows())

    def to_html(self) -> str:
        """What a notebook shows."""
        from epochckpt.inspection import html, views

        return html.page(views.of(self._rows()))

    def to_text(self, width: int | None = None, colour: bool = False) -> str:
        """What a terminal shows.

        Args:
            width: columns; None: those of the terminal.
            colour: with escape sequences for colours.
        """
        from epochckpt.inspection import text, views

        return text.to_text(text.render(views.of(self._rows())), width, colour)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        return self.to_text().rstrip("\n")


class NamedContents(Shown):
    """A view that can also be iterated, for the names of its contents."""

    def _names(self) -> Sequence[Any]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._names())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names())

    def __contains__(self, name: object) -> bool:
        return name in self._names()


class RowsView(Shown, Sequence[T]):
    """A sequence of rows that shows itself."""

    def __init__(self, rows: Sequence[T]):
        self.rows = tuple(rows)

    def _rows(self) -> Any:
        return self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.rows[number]


class DiffView(RowsView[DiffRow]):
    """The difference of two epochs, one row per leaf; `diff` also has the epochs and what could not be compared."""

    def __init__(self, diff: Diff):
        super().__init__(diff.rows)
        self.diff = diff

    def _rows(self) -> Diff:
        return self.diff


class UsageView(RowsView[UsageRow]):
    """What a directory takes up on storage, one row per epoch or other thing; `usage` also has the sums by kind."""

    def __init__(self, usage: Usage):
        super().__init__(usage.rows)
        self.usage = usage

    def _rows(self) -> Usage:
        return self.usage


class GoodputView(RowsView[RunGoodput]):
    """What the runs of a directory have spent their time on, one row per run; `goodput` also has the sums."""

    def __init__(self, goodput: Goodput):
        super().__init__(goodput.runs)
        self.goodput = goodput

    def _rows(self) -> Goodput:
        return self.goodput


class MetricsView(RowsView[MetricsRow]):
    """The metrics of a run, one row per epoch."""

    def __init__(self, found: RunMetrics):
        super().__init__(found.rows)
        self._found = found

    def _rows(self) -> RunMetrics:
        return self._found

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`: by epoch, the columns `committed` (UTC) and `deleted`, and one per metric.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError as error:
            raise UnsupportedError("a DataFrame needs pandas: pip install pandas") from error
        index = pandas.Index([row.epoch for row in self.rows], name=self._found.unit)
        named = [flat(row.metrics) for row in self.rows]
        times = pandas.to_datetime([row.committed_ns for row in self.rows], unit="ns", utc=True)
        columns: dict[str, Any] = {"committed": times, "deleted": [row.deleted for row in self.rows]}
        columns |= {name: [each.get(name) for each in named] for name in self._found.names}
        return pandas.DataFrame(columns, index=index)


class ArrayView(Shown):
    """One array with its statistics, a picture of its elements, and of how it is cut over devices and nodes."""

    def __init__(self, look: ArrayLook):
        self.look = look

    def _rows(self) -> ArrayLook:
        return self.look


class EpochInspection(NamedContents):
    """One epoch. Iterates over the names of its items.

    Attributes:
        epoch: its number.
    """

    def __init__(
        self,
        epoch_directory: EpochDirectory,
        epoch: int,
        latest_and_best: Callable[[], tuple[int | None, int | None]],
        unit: str | None = None,
        mirror: str | None = None,
    ):
        self.epoch = epoch
        self._epoch_directory = epoch_directory
        self._latest_and_best = latest_and_best
        self._unit = unit
        self._mirror = mirror

    @property
    def row(self) -> EpochRow:
        """What is known of the epoch as a whole, after a look at its files.

        Raises:
            EpochDeletedError: the epoch is not there any more.
        """
        row = epoch_rows.checked(self._epoch_directory, self.plain_row())
        latest, best = self._latest_and_best()
        return dataclasses.replace(row, latest=row.state != DAMAGED and row.epoch == latest, best=row.epoch == best)

    def plain_row(self) -> EpochRow:
        """The row without a look at the files or at other epochs; raises EpochDeletedError if the epoch is gone."""
        row = epoch_rows.find(self._epoch_directory, self.epoch)
        if row is None:
            raise self._gone()
        unit = self._unit or (epoch_rows.unit_of(self._epoch_directory) if row.state == DAMAGED else row.unit)
        return dataclasses.replace(row, unit=unit)

    def _gone(self) -> EpochDeletedError:
        return EpochDeletedError(self.epoch, self._epoch_directory.store.root, "it existed when it was opened")

    def detail(self) -> EpochDetail:
        """The row, the items and their leaves."""
        return self._described_as(self.row)

    def _described_as(self, row: EpochRow) -> EpochDetail:
        from epochckpt.inspection.describe import describe  # with jax and Orbax, which a list of epochs needs not

        return describe(self._epoch_directory, row, self._mirror)

    def leaves(self) -> CheckpointReader:
        """A reader of the leaves of the attempt that is committed now."""
        from epochckpt.inspection.leaf_reader import open_reader

        try:
            return open_reader(self._epoch_directory, self.epoch, self._mirror)
        except EpochNotFoundError as error:
            row = self.plain_row()
            raise (_unusable(row) if row.state == DAMAGED else self._gone()) from error

    def _described(self) -> EpochDetail:
        detail = self._described_as(self.plain_row())
        if not detail.items and detail.row.state in (DAMAGED, NEWER):
            raise _unusable(detail.row)
        return detail

    def _items(self) -> dict[str, ItemRow]:
        return {item.name: item for item in self._described().items}

    def _names(self) -> list[str]:
        return list(self._items())

    def __getitem__(self, item: str) -> ItemInspection:
        """One item.

        Raises:
            UnknownNameError: there is no such item; names those that are near.
            DamagedError: the epoch's record cannot be used.
            FormatVersionError: only a newer epochckpt can read it.
        """
        items = self._items()
        if item not in items:
            hint = _text.near(str(item), items)
            if len(items) == 1 and any(leaf.name == item for leaf in next(iter(items.values())).leaves):
                hint += f"; {item!r} is a leaf of item {next(iter(items))!r}"
            raise UnknownNameError(f"checkpoint {self.epoch} has no item {quoted(item)}; {hint}")
        return ItemInspection(self, items[item])

    def stats(
        self,
        patterns: str | Sequence[str] = "*",
        item: str | None = None,
        node: str | None = None,
        *,
        progress: Progress | None = None,
    ) -> RowsView[LeafStats]:
        """Statistics of every array that is meant; reads those arrays, in pieces.

        Args:
            patterns: names of leaves, parts of the tree or items, or shell patterns of `leaf` or `item:leaf`.
            item: only arrays of this item.
            node: only arrays of this node's own items.
            progress: called with the bytes of each array that has been read.

        Raises:
            UnknownNameError: a pattern matches nothing, or no array.
            DamagedError: an array cannot be read; names it.
        """
        (found,) = narrowed([self._described()], patterns, item, node)
        owners = [(item.name, node, own) for item in found.items for node, own in {"": item, **item.nodes}.items()]
        arrays = [(name, node, leaf) for name, node, own in owners for leaf in own.leaves if leaf.kind in stats.ARRAYS]
        broken = next((each for each in found.items if each.problem), None)
        if not arrays and broken is not None:
            raise DamagedError(f"checkpoint {self.epoch}, item {quoted(broken.name)}", broken.problem)
        if not arrays and patterns != "*":
            raise UnknownNameError(f"checkpoint {self.epoch}: what matches {quoted(patterns)} is no array")
        reader = self.leaves()
        rows = []
        for name, of, leaf in arrays:
            rows.append(stats.of_leaf(functools.partial(reader.pieces, name, leaf.name, of), name, leaf, of))
            (progress or _ignore)(leaf.nbytes)
        return RowsView(rows)

    def verify(self, progress: Progress | None = None) -> Verification:
        """Reads every byte of the epoch and compares it with its checksums; see `CheckpointManager.verify`."""
        self._epoch_directory.forget_records()
        return self.leaves().verify(progress or _ignore)

    def _rows(self) -> EpochDetail:
        return self.detail()


class ItemInspection(NamedContents):
    """One item of one epoch. Iterates over the names of its leaves, of its files, or of its nodes.

    Everything is read from the attempt that was committed at the first read. If that attempt is deleted, reads raise
    EpochDeletedError.

    Attributes:
        row: what is known of the item.
    """

    def __init__(self, epoch: EpochInspection, row: ItemRow, node: str = ""):
        self._epoch = epoch
        self.row = row
        self._node = node

    @functools.cached_property
    def _leaves(self) -> CheckpointReader:
        return self._epoch.leaves()

    @functools.cached_property
    def _by_name(self) -> dict[str, LeafRow]:
        return {leaf.name: leaf for leaf in self.row.leaves}

    def _names(self) -> list[str]:
        if self.row.kind == "node":
            return list(self.row.nodes)
        return [file.name for file in self.row.files] if self.row.kind == "files" else list(self._by_name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and bool(self._meant(name)))

    def _meant(self, name: str) -> list[str]:
        """The leaf of this name, or the leaves of the subtree of this name."""
        for one in (name, readable(name)):
            if one in self._by_name:
                return [one]
        below = f"{readable(name.rstrip('/'))}/"
        return [known for known in self._by_name if known.startswith(below)]

    def __getitem__(self, leaf: str) -> Any:
        """A leaf as a NumPy array or Python value, a subtree as a dict of dicts; typed keys as their data.

        The keys of these dicts are the parts of the leaves' names: `item["params/w"]` is `item["params"]["w"]`.

        Raises:
            UnknownNameError: there is no such leaf or subtree; names those that are near.
            InvalidArgumentError: the item has files, or is each node's own.
            DamagedError: the leaf cannot be read, or its bytes do not match their checksums.
            EpochDeletedError: the epoch went away.
        """
        names = self._named(str(leaf))
        values = self._leaves.values(self.row.name, names, self._node)
        if names[0] in (leaf, readable(str(leaf))):
            return values[0]
        tree: dict[str, Any] = {}
        start = len(readable(str(leaf).rstrip("/"))) + 1
        for name, value in zip(names, values, strict=True):
            *above, last = name[start:].split("/")
            inner = tree
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = value
        return tree

    def _named(self, name: str) -> list[str]:
        """The leaf of this name, or those of the subtree; raises what `__getitem__` does."""
        row = self.row
        some = ", ".join(map(quoted, self._names()[:5]))
        if row.kind == "node":
            raise InvalidArgumentError(f"{self._where}: it is each node's own: choose one by .node(…), of {some}")
        if row.kind == "files":
            raise InvalidArgumentError(f"{self._where}: it has no leaves but files: .read(…) gives one, of {some}")
        names = self._meant(name)
        if not names:
            if row.problem and not row.leaves:
                raise DamagedError(self._where, row.problem)
            raise UnknownNameError(f"{self._where}: {_text.no_leaf(name, self._by_name)}")
        return names

    def node(self, name: str) -> ItemInspection:
        """What one node saved of its own.

        Raises:
            InvalidArgumentError: the item is not each node's own.
            UnknownNameError: there is no such node; names those that are near.
        """
        if self.row.kind != "node":
            raise InvalidArgumentError(f"{self._where}: it is one for all nodes, not each node's own")
        if name not in self.row.nodes:
            raise UnknownNameError(f"{self._where}: node {quoted(name)} has none; {_text.near(name, self.row.nodes)}")
        return ItemInspection(self._epoch, self.row.nodes[name], name)

    def read(self, file: str) -> bytes:
        """The content of a file that a handler wrote.

        Raises:
            UnknownNameError: there is no such file; names those that are near.
            DamagedError: the file cannot be read, or its bytes do not match their checksums.
            EpochDeletedError: the epoch went away.
        """
        names = [known.name for known in self.row.files]
        if file not in names:
            raise UnknownNameError(f"{self._where}: there is no file {quoted(file)}; {_text.near(file, names)}")
        return self._leaves.file(self.row.name, file, self._node)

    def stats(self, patterns: str | Sequence[str] = "*", *, progress: Progress | None = None) -> RowsView[LeafStats]:
        """Statistics of the item's arrays; see `EpochInspection.stats`."""
        return self._epoch.stats(patterns, self.row.name, self._node or None, progress=progress)

    def look(self, leaf: str) -> ArrayView:
        """One array as a picture: the means of its parts as squares, its statistics, and how it is cut.

        It is read twice, in pieces. A notebook draws it as `treescope.render_array` does an array in memory, without a
        script; `.look.means` has the means.

        Raises:
            UnknownNameError: there is no such leaf, or it is no array; names those that are near.
            DamagedError: the array cannot be read, or its bytes do not match their checksums.
        """
        names = self._named(leaf)
        row = self._by_name[names[0]]
        if len(names) > 1 or row.kind not in stats.ARRAYS or not math.prod(row.shape):
            raise UnknownNameError(f"{self._where}: {quoted(leaf)} is no single array with elements")
        pieces = functools.partial(self._leaves.pieces, self.row.name, row.name, self._node)
        found = stats.of_leaf(pieces, self.row.name, row, self._node)
        return ArrayView(ArrayLook(found, stats.means(pieces(), row.shape)))

    @property
    def _where(self) -> str:
        of = f" of {self._node}" if self._node else ""
        return f"checkpoint {self._epoch.epoch}, item {quoted(self.row.name)}{of}"

    def _rows(self) -> ItemRow:
        return self.row


def _unusable(row: EpochRow) -> DamagedError | FormatVersionError:
    where = paths.join(row.folder, paths.EPOCH_RECORD)
    kind = FormatVersionError if row.state == NEWER else DamagedError
    return kind(where, row.detail.removeprefix(f"{where}: ") or "cannot be used")
