"""The signs and words that all views share: what a state looks like, figures, the bars of nodes."""

from __future__ import annotations

import math
import numbers
import reprlib
import statistics
from collections.abc import Mapping, Sequence

from epochckpt import _text, _units
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import rows
from epochckpt.inspection.blocks import Column, Mark, Span, TextLine, Tone, secs

LATEST, BEST = "▸", "★"
HELD_UP = 1.0  # seconds by which what held up a save takes longer than most

STATES = {  # tones and meanings
    rows.COMMITTED: (Tone.GOOD, "every node finished; it can be restored"),
    rows.DAMAGED: (Tone.BAD, "it cannot be read, or files are missing or have other sizes than recorded; never loaded"),
    rows.NEWER: (Tone.WARN, "only a newer epochckpt can read it; nothing is known to be wrong with it"),
    rows.IN_PROGRESS: (Tone.LIVE, "a save that was written to lately; it is not committed yet"),
    rows.ABANDONED: (Tone.WARN, "a save that failed or died; no reader looks at it"),
    rows.ELSEWHERE: (Tone.FAINT, "on the disk of another host"),
    "writing": (Tone.LIVE, ""),
    "written": (Tone.LIVE, ""),
}
UNKNOWN = Tone.PLAIN, ""
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxdict = 8
_SHORT.maxlist = 12
_SHORT.maxstring = 120
_SHORT.maxother = 120


def tone(state: str) -> Tone:
    """What a state looks like."""
    return STATES.get(state, UNKNOWN)[0]


def figure(value: object) -> str:
    """A metric, or what a caller attached: numbers as people write them, other values as Python does, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"  # as in JSON
    if isinstance(value, numbers.Real):
        return _units.number(value if isinstance(value, int) else float(value))
    return "" if value is None else value if isinstance(value, str) else _SHORT.repr(value)


def nbytes(value: int | None) -> str:
    """A size; empty if it is not known."""
    return "" if value is None else _units.nbytes(value)


def faint(words: str) -> TextLine:
    """A line that matters less."""
    return TextLine(Span(words, Tone.FAINT))


def slow_node(row: rows.EpochRow) -> rows.NodeRow | None:
    """The node that held up an epoch: the slowest one, if it took twice as long as most, and a second longer."""
    slowest = next((node for node in row.nodes if node.name == row.slowest_node), None)
    times = [node.secs for node in row.nodes if node.secs is not None and math.isfinite(node.secs)]
    if slowest is None or slowest.secs is None or not times:
        return None
    median = statistics.median(times)
    return slowest if slowest.secs > max(2 * median, median + HELD_UP) else None


def strip_column(count: int) -> Column:
    """The column of `node_strip`, for so many nodes."""
    tip = "a bar for each node: how long it wrote; of a save under way: how much of what it wrote last time"
    return Column(f"{_units.count(count)} nodes", 4, least=min(max(count, 8), 16), tip=tip)


def node_strip(row: rows.EpochRow, names: Sequence[str], before: Mapping[str, int]) -> kinds.Strip:
    """A bar for each of the named nodes of an epoch: how long it wrote.

    The bars of an attempt are shares of the bytes that each node wrote last time, which `before` has.
    """
    nodes = {node.name: node for node in row.nodes}
    longest = max((node.secs or 0.0 for node in row.nodes), default=0.0)
    most = max((node.nbytes or 0 for node in row.nodes), default=0)
    slow = slow_node(row)

    def mark(name: str) -> Mark:
        node = nodes.get(name)
        if node is None:
            return Mark(0.0, Tone.FAINT, -1.0, f"{_text.shown(name, 60)} · not in it")
        known = [_text.shown(name, 60), nbytes(node.nbytes), secs(node.secs)]
        known += [node.state if node.state != rows.COMMITTED else "", node.detail]
        tip = " · ".join(filter(None, known))
        if node.state == rows.DAMAGED:
            return Mark(1.0, Tone.BAD, 2.0, tip)
        if row.state in (rows.IN_PROGRESS, rows.ABANDONED):
            level = min((node.nbytes or 0) / max(before.get(name, most), 1), 1.0)
            return Mark(level, tone(row.state), 1.0 - level, tip)  # the node that is behind is the one to see
        # Without a duration that makes sense, the bar is half as high as the slowest one.
        timed = node.secs is not None and 0 < longest < math.inf and node.secs <= longest
        level = max(node.secs or 0.0, 0.0) / longest if timed else 0.5
        return Mark(level, Tone.WARN if node == slow else Tone.PLAIN, level if timed else 0.0, tip)

    # The bar of a node that has written nothing yet can be seen, too.
    return kinds.Strip(tuple(each._replace(level=max(each.level, 0.01)) for each in map(mark, names)))
