"""The difference of two epochs, leaf by leaf, wherever they lie; ours or stock Orbax's.

Leaves belong together by item, node and name. Values count, not bits: NaN equals NaN at the same place, and 0 equals
-0. Both epochs are read side by side in pieces, verified. Files of handlers are compared by their checksums where both
epochs have them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from epochckpt import _units
from epochckpt._metrics import flat
from epochckpt.errors import DamagedError, EpochCheckpointError, EpochDeletedError, say
from epochckpt.inspection import rows, stats
from epochckpt.inspection.rows import Diff, DiffRow, EpochDetail, FileRow, ItemRow, LeafRow
from epochckpt.inspection.signs import figure

if TYPE_CHECKING:
    from epochckpt.manager import CheckpointReader

Side: TypeAlias = "tuple[EpochDetail, CheckpointReader]"
Progress = Callable[[int, int], None]
T = TypeVar("T", LeafRow, FileRow)


def compare(
    before: Side,
    after: Side,
    progress: Progress = lambda done, total: None,
    *,
    directory: str = "",
    other_directory: str = "",
) -> Diff:
    """Compares the items that the descriptions of two epochs list; see `Inspection.diff`.

    What cannot be compared is among the problems. Only EpochDeletedError ends the comparison.
    """
    pairs, problems = _pairs(before[0], after[0])
    found = _Comparison(before[1], after[1], progress, problems).run(pairs)
    metrics = dict(_changed(before[0].row.metrics, after[0].row.metrics))
    return Diff(
        directory, before[0].row.epoch, after[0].row.epoch, found, other_directory, metrics, problems, after[0].row.unit
    )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Both values of each entry that differs between two mappings, by `flat` name. A missing value is None."""
    ones = flat(before)
    others = flat(after)
    for name in others | ones:
        pair = ones.get(name), others.get(name)
        if pair[0] != pair[1] and repr(pair[0]) != repr(pair[1]):  # NaN is what it was
            yield name, pair


# -- what belongs together -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A leaf, or a file of a handler, in both epochs; None in an epoch that lacks it."""

    item: str
    node: str
    name: str
    before: LeafRow | FileRow | None
    after: LeafRow | FileRow | None

    @property
    def label(self) -> str:
        return ":".join(part for part in (self.item, self.node, self.name) if part)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in (self.before, self.after) if row is not None)

    def row(self, change: str, **more: Any) -> DiffRow:
        leaves = {side: row for side in ("before", "after") if isinstance(row := getattr(self, side), LeafRow)}
        return DiffRow(self.item, self.node, self.name, change, **leaves, **more)


def _pairs(before: EpochDetail, after: EpochDetail) -> tuple[list[_Pair], dict[str, str]]:
    """Everything that is in one of two epochs, and what cannot be looked into, by item."""
    ones, others = ({item.name: item for item in detail.items} for detail in (before, after))
    pairs: list[_Pair] = []
    problems: dict[str, str] = {}
    for name in sorted(ones.keys() | others.keys()):
        broken = [side for side in (ones.get(name), others.get(name)) if side and side.kind == "node" and side.problem]
        # A node that is not listed in such an item may have one, in a record that cannot be read.
        unlisted = [side.problem for side in broken if not any(n.problem for n in side.nodes.values())]
        problems |= {name: unlisted[0]} if unlisted else {}
        parts = _parts(ones.get(name)), _parts(others.get(name))
        for node in parts[0] | parts[1]:
            if node and any(node not in side.nodes for side in broken):
                continue
            sides = [side[node] for side in parts if node in side]
            reasons = [side.problem for side in sides if side.problem]
            if reasons:
                problems[f"{name}:{node}" if node else name] = reasons[0]
            if any(side.problem and not side.leaves and not side.files for side in sides):
                continue  # nothing says whether the leaves of the other epoch were added or removed
            before_it, after_it = (side.get(node, ItemRow(name, "")) for side in parts)
            leaves = _paired(rows.without_empty(before_it.leaves), rows.without_empty(after_it.leaves))
            files = _paired(before_it.files, after_it.files)
            pairs += [_Pair(item=name, node=node, name=path, before=one, after=two) for path, one, two in leaves]
            pairs += [_Pair(item=name, node=node, name=path, before=one, after=two) for path, one, two in files]
    return pairs, problems


def _parts(item: ItemRow | None) -> dict[str, ItemRow]:
    """An item by node where each node has its own; else the item under an empty name."""
    if item is None:
        return {}
    return dict(item.nodes) if item.kind == "node" else {"": item}


def _paired(before: Iterable[T], after: Iterable[T]) -> Iterator[tuple[str, T | None, T | None]]:
    """Rows of the same name together: in the order of the second epoch, then those that it lacks."""
    ones, others = ({row.name: row for row in rows} for rows in (before, after))
    return ((name, ones.get(name), others.get(name)) for name in others | ones)


# -- comparing -------------------------------------------------------------------------------------------------------


class _Comparison:
    """Compares two epochs; notes in `problems` what cannot be compared."""

    def __init__(self, before: CheckpointReader, after: CheckpointReader, progress: Progress, problems: dict[str, str]):
        self._before = before
        self._after = after
        self._progress = progress
        self._problems = problems
        self._done = self._total = 0
        self._same_files = functools.cache(self._files_of_same_checksums)

    def run(self, pairs: Sequence[_Pair]) -> tuple[DiffRow, ...]:
        """A row for each pair that can be compared."""
        found: dict[int, DiffRow | None] = {}  # by place: a leaf and a file may have one name
        for place, pair in enumerate(pairs):
            with self._guarded(pair):
                found[place] = self._without_reading(pair)
        to_read = [place for place, row in found.items() if row is None]
        self._total = sum(pairs[place].nbytes for place in to_read)
        self._progress(0, self._total)
        end = 0
        for place in to_read:
            end += pairs[place].nbytes
            with self._guarded(pairs[place]):
                found[place] = self._by_reading(pairs[place])
            self._tell(end - self._done)
        return tuple(row for row in found.values() if row is not None)

    @contextlib.contextmanager
    def _guarded(self, pair: _Pair) -> Iterator[None]:
        try:
            yield
        except EpochDeletedError:
            raise
        except EpochCheckpointError as error:
            self._problems[pair.label] = say(error)

    def _tell(self, nbytes: int) -> None:
        if nbytes:
            self._done += nbytes
            self._progress(min(self._done, self._total), self._total)

    def _without_reading(self, pair: _Pair) -> DiffRow | None:
        """What the records say of a pair; None if they do not."""
        one = pair.before
        other = pair.after
        if one is None or other is None:
            return pair.row(rows.ADDED if one is None else rows.REMOVED)
        if isinstance(one, FileRow) or isinstance(other, FileRow):
            said = _changes(one, other)
            if one.nbytes != other.nbytes:
                return pair.row(rows.CHANGED, detail=said or f"{one.nbytes} → {other.nbytes} bytes")
            same = self._same_files(pair.item, pair.node).get(pair.name)
            return None if same is None else pair.row(rows.UNCHANGED if same else rows.CHANGED, detail=said)
        arrays = one.kind in stats.ARRAYS and other.kind in stats.ARRAYS
        if arrays and one.shape != other.shape:
            return pair.row(rows.RESHAPED, detail=_both(one, other))
        if not arrays and one.kind != other.kind:
            return pair.row(rows.RETYPED, detail=_both(one, other))
        if (one.kind, one.dtype) != (other.kind, other.dtype) and "prng" in (one.kind, other.kind):
            return pair.row(rows.RETYPED, detail=_both(one, other))
        return None

    def _by_reading(self, pair: _Pair) -> DiffRow:
        one = pair.before
        other = pair.after
        if not isinstance(one, LeafRow) or not isinstance(other, LeafRow):
            before = self._before.file(pair.item, pair.name, pair.node)
            after = self._after.file(pair.item, pair.name, pair.node)
            detail = "" if before == after else _changes(one, other) or _first_difference(before, after)
            return pair.row(rows.UNCHANGED if before == after else rows.CHANGED, detail=detail)
        if one.kind in stats.ARRAYS:
            return self._arrays(pair, one, other)
        before = self._before.value(pair.item, pair.name, pair.node)
        after = self._after.value(pair.item, pair.name, pair.node)
        if before == after or (isinstance(before, float | complex) and repr(before) == repr(after)):
            return pair.row(rows.UNCHANGED)
        if one.value == other.value and isinstance(before, str | bytes):  # too long to be shown
            return pair.row(rows.CHANGED, detail=_first_difference(before, after))
        return pair.row(rows.CHANGED, detail=f"{one.value} → {other.value}")

    def _arrays(self, pair: _Pair, one: LeafRow, other: LeafRow) -> DiffRow:
        # Datetimes and words of random keys are compared, but a distance between them means nothing.
        odd = ("datetime64", "timedelta64")
        change = stats.ArrayChange(numbers=not any(x.kind == "prng" or x.dtype.startswith(odd) for x in (one, other)))
        values = ""
        try:
            befores = self._before.pieces(pair.item, pair.name, pair.node)
            afters = self._after.pieces(pair.item, pair.name, pair.node)
            for before, after in zip(befores, afters, strict=True):
                change.add(before, after)
                if before.size == 1 and change.largest is not None and math.prod(one.shape) == 1:
                    values = f"{_number(before.item())} → {_number(after.item())}"
                self._tell(before.nbytes + after.nbytes)
        except ValueError as error:
            if isinstance(error, EpochCheckpointError):
                raise
            raise DamagedError(pair.label, f"is not of the shape that is recorded: {error}", pair.name) from error
        retyped = (one.kind, one.dtype) != (other.kind, other.dtype)
        details = ([_both(one, other)] if retyped else []) + ([change.words] if change.words else [])
        details += [values] if values and change.elements else []
        kind = rows.RETYPED if retyped else rows.CHANGED if change.elements else rows.UNCHANGED
        numbers = {"norm": change.norm, "relative": change.relative, "largest": change.largest}
        return pair.row(kind, **numbers, elements=change.elements, detail="; ".join(details))

    def _files_of_same_checksums(self, item: str, node: str) -> dict[str, bool]:
        """Whether a file of handlers is the same, for each that both epochs have with comparable checksums.

        Stock Orbax has no checksums.
        """
        one = self._before.checksummed_files(item, node)
        other = self._after.checksummed_files(item, node)
        both = ((name, f, other[name]) for name, f in one.items() if name in other)
        return {
            name: (a.size, a.sums) == (b.size, b.sums)
            for name, a, b in both
            if a.block_bytes == b.block_bytes and a.sums.kind == b.sums.kind
        }


def _changes(one: FileRow | LeafRow | None, other: FileRow | LeafRow | None) -> str:
    """What differs between two JSON files, value by value; empty if that is not known."""
    sides = [row.content for row in (one, other) if isinstance(row, FileRow)]
    if len(sides) < 2 or any(side is None for side in sides):
        return ""
    before, after = (side if isinstance(side, Mapping) else {"": side} for side in sides)
    return "; ".join(f"{name} {_word(a)} → {_word(b)}".lstrip() for name, (a, b) in _changed(before, after))


def _word(value: Any) -> str:
    return "nothing" if value is None else figure(value)


def _number(value: Any) -> str:
    return _units.number(value) if isinstance(value, float) else str(value)


def _first_difference(before: str | bytes, after: str | bytes) -> str:
    size = 2**16
    end = min(len(before), len(after))
    # Slices are compared much faster than bytes or characters one by one.
    start = next((n for n in range(0, end, size) if before[n : n + size] != after[n : n + size]), end)
    pairs = enumerate(zip(before[start : start + size], after[start : start + size], strict=False), start)
    place = next((n for n, (a, b) in pairs if a != b), end)
    unit = "character" if isinstance(before, str) else "byte"
    return f"{len(before)} → {len(after)} {unit}s, the first difference at {unit} {place}"


def _both(one: LeafRow, other: LeafRow) -> str:
    """Both leaves in a few words, with their kinds where these differ."""

    def words(leaf: LeafRow) -> str:
        if leaf.kind not in stats.ARRAYS:
            return " ".join(filter(None, (leaf.kind, leaf.value)))
        array = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        return f"{leaf.kind} {array}" if one.kind != other.kind else array

    return f"{words(one)} → {words(other)}"
