"""What people see of a directory, of an epoch and of an item: blocks made from rows.

Notebooks and terminals draw the same blocks. All that is to be decided about a view is decided here and in
`leaf_views`: which facts and columns it has, in which order, how much of a long list, and in which words.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import numbers
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from epochckpt import _text, _units
from epochckpt.inspection import rows, sharding, tree
from epochckpt.inspection.blocks import (
    Bar,
    Block,
    Cell,
    Cells,
    Column,
    Cuts,
    Facts,
    Line,
    Mark,
    Problem,
    Row,
    Section,
    Span,
    Strip,
    Summary,
    Table,
    Tone,
    Tree,
    Words,
    leaf_count,
    problems,
    ratio,
    secs,
    share,
    table,
)
from epochckpt.inspection.leaf_views import diff, stats

LATEST, BEST = "▸", "★"
_RECENT = 20  # epochs that a page shows before it folds
_METRICS = 8  # that are columns
_NODES = 12  # of an epoch that are listed; of more than that only some
_SLOWEST = 5
_ITEMS = 40
_FILES = 100
_ENTRIES = 40  # of one epoch's or item's metrics, of its metadata, of the runner's notes
_LEAVES = 10  # of an item that stock Orbax cannot read

_TONES = {
    rows.COMMITTED: Tone.GOOD,
    rows.DAMAGED: Tone.BAD,
    rows.IN_PROGRESS: Tone.LIVE,
    rows.ABANDONED: Tone.WARN,
    "writing": Tone.LIVE,
    "written": Tone.LIVE,
}
_MEANINGS = {
    rows.COMMITTED: "every node finished; the epoch can be restored",
    rows.DAMAGED: "it cannot be read, or files are missing or have other sizes than recorded; it is never loaded",
    rows.IN_PROGRESS: "a save that something was written to lately; it is not yet an epoch",
    rows.ABANDONED: "a save that failed or died; no reader looks at it",
}
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 3, 8, 12, 120, 120


# A directory.


def of(found: rows.Overview | rows.EpochDetail | rows.ItemRow | rows.Diff | Sequence[rows.LeafStats]) -> list[Block]:
    """The view of what an inspection found."""
    if isinstance(found, rows.Overview):
        return overview(found, hint="; .epochs() has the rows of all")
    if isinstance(found, rows.EpochDetail):
        return epoch(found)
    if isinstance(found, rows.ItemRow):
        return item(found, found.nbytes)
    return diff(found) if isinstance(found, rows.Diff) else stats(found)


def overview(found: rows.Overview, *, hint: str = "") -> list[Block]:
    """A directory: its epochs and attempts with what each node took, and what else lies there.

    Args:
        found: the directory.
        hint: how to see the epochs that are left out.
    """
    blocks: list[Block] = [
        Line(Span(found.directory, Tone.STRONG, 1000), title=True),
        Summary(tuple(_summary(found))),
    ]
    if found.hidden:
        size = f" ({_units.nbytes(found.hidden_nbytes)})" if found.hidden_nbytes else ""
        count = _units.several(found.hidden, "older epoch", "older epochs")
        words = f"… {count}{size} {'is' if found.hidden == 1 else 'are'} not shown{hint}"
        blocks.append(Line(Span(words, Tone.FAINT)))
    if found.epochs:
        blocks.append(_epochs(found))
    blocks += problems(found.problems)
    if found.leftovers:
        size = _units.nbytes(sum(row.nbytes for row in found.leftovers))
        heading = f"Also here, and read by nobody: {_units.several(len(found.leftovers), 'thing', 'things')}, {size}"
        blocks.append(Section(Span(heading, Tone.STRONG), (leftovers(found.leftovers),), open=False))
    return blocks


def _summary(found: rows.Overview) -> Iterator[Words]:
    epochs = [row for row in found.epochs if row.state in (rows.COMMITTED, rows.DAMAGED)]
    count = len(epochs) + found.hidden
    size = _units.nbytes(sum(row.nbytes for row in epochs) + found.hidden_nbytes)
    yield f"{_units.several(count, 'epoch', 'epochs')}, {size}" if count else "no epochs"
    states = collections.Counter(row.state for row in found.epochs)
    for state in (rows.DAMAGED, rows.IN_PROGRESS, rows.ABANDONED):
        if states[state]:
            yield Span(f"{_units.count(states[state])} {state}", _TONES[state])
    for row in found.epochs:
        if row.latest:
            yield Span(f"{LATEST} latest {row.epoch}", Tone.LIVE)
    if found.metric:
        name = _text.shown(found.metric, 30)
        best = [row for row in found.epochs if row.best]
        for row in best:
            value = figure(rows.flat(row.metrics).get(found.metric))
            yield Span(f"{BEST} best {row.epoch} by {found.mode} {name}: {value}", Tone.GOOD)
        if not best:
            yield Span(f"no epoch has the metric {name}", Tone.WARN)
    unchecked = sum(row.state == rows.COMMITTED and not row.checked for row in found.epochs)
    if unchecked:
        yield Span(f"files of {_units.several(unchecked, 'epoch', 'epochs')} not looked at", Tone.FAINT)


def _epochs(found: rows.Overview) -> Table:
    names = list(dict.fromkeys(name for row in found.epochs for name in rows.flat(row.metrics)))
    names.sort(key=lambda name: name != found.metric)
    nodes = node_names(found.epochs)
    mixed = any(row.writer != "epochckpt" for row in found.epochs)
    before = {node.name: node.nbytes for row in found.epochs if row.latest for node in row.nodes}

    def measured(name: str) -> Cells[rows.EpochRow]:
        def show(row: rows.EpochRow) -> Cell:
            metrics = rows.flat(row.metrics)
            value = figure(metrics.get(name))
            tip = f"{value}, attached by {row.sources[name]}" if name in row.sources else value
            return Cell(Span(value, Tone.GOOD if row.best and name == found.metric else Tone.PLAIN, 16), tip=tip)

        return show

    def marks(row: rows.EpochRow) -> Cell:
        words = Span(LATEST if row.latest else "", Tone.LIVE), Span(BEST if row.best else "", Tone.GOOD)
        return Cell(words, tip=" ".join(["latest"] * row.latest + ["best"] * row.best))

    def remark(row: rows.EpochRow) -> Words:
        damage = "; ".join(f"{node.name}: {node.detail}" for node in row.nodes[:_NODES] if node.detail)
        return Span(row.detail or damage, Tone.PLAIN if row.state == rows.COMMITTED else _tone(row.state), 600)

    made = table(
        found.epochs,
        (Column("epoch", 0, right=True), lambda row: Span(str(row.epoch), Tone.STRONG)),
        (Column("", 0), marks),
        (Column("state", 0), lambda row: Cell(Span(row.state, _tone(row.state)), tip=_MEANINGS.get(row.state, ""))),
        (Column("bytes", 1, right=True, tip="of its files, all nodes together"), lambda row: _units.nbytes(row.nbytes)),
        (Column("took", 2, right=True, tip="from the call of save to the commit"), lambda row: secs(row.secs)),
        (
            Column("blocked", 7, right=True, tip="how long the training thread waited"),
            lambda row: secs(row.blocked_secs),
        ),
        *(
            (Column(_text.shown(name, 14), 6 + i if i else 3, right=True, least=9, tip=name), measured(name))
            for i, name in enumerate(names[:_METRICS])
        ),
        (
            strip_column(len(nodes)),
            lambda row: Cell(drawing=node_strip(row, nodes, before) if len(nodes) > 1 else None),
        ),
        (Column("slowest node", 7, least=14), _slowest),
        (Column("committed", 8, tip="local time"), _committed),
        (Column("by", 9), lambda row: Span(row.writer if mixed else "", Tone.FAINT)),
        below=remark,
    )
    older = found.epochs[:-_RECENT]
    best = "".join(f", with the best: {row.epoch}" for row in older if row.best)
    count = _units.several(len(older), "older epoch", "older epochs")
    words = f"{count}, {older[0].epoch} to {older[-1].epoch}{best}" if older else ""
    return dataclasses.replace(made, recent=_RECENT, older=words)


def _slowest(row: rows.EpochRow) -> Words:
    slowest = next((node for node in row.nodes if node.name == row.slowest_node), None)
    return () if slowest is None else (Span(slowest.name, Tone.WARN, 60), f" {_units.secs(slowest.secs)}")


def _committed(row: rows.EpochRow) -> Words:
    written = "" if row.age_secs is None else f"written {_units.secs(row.age_secs)} ago"
    return Span(written if row.committed_ns is None else _units.when(row.committed_ns), Tone.FAINT)


def node_names(epochs: Sequence[rows.EpochRow]) -> list[str]:
    """Names of all nodes: those of the newest epoch in their order, then those that only older ones have."""
    return list(dict.fromkeys(node.name for row in reversed(epochs) for node in row.nodes))


def strip_column(count: int) -> Column:
    """The column of `node_strip`, for so many nodes."""
    tip = "a bar for each node: how long it wrote; of a save under way: how much of what it wrote last time"
    return Column(f"{_units.count(count)} nodes", 4, least=min(max(count, 8), 16), tip=tip)


def node_strip(row: rows.EpochRow, names: Sequence[str], before: Mapping[str, int]) -> Strip:
    """A bar for each node: how long it wrote; of an attempt: how much of what it wrote last time.

    Args:
        row: the epoch or the attempt.
        names: of the nodes that have a bar.
        before: bytes that each node wrote last time.
    """
    nodes = {node.name: node for node in row.nodes}
    longest = max((node.secs or 0.0 for node in row.nodes), default=0.0)
    most = max((node.nbytes for node in row.nodes), default=0)
    slowest = row.slowest_node

    def mark(name: str) -> Mark:
        node = nodes.get(name)
        if node is None:
            return Mark(0.0, Tone.FAINT, -1.0, f"{_text.shown(name, 60)} · not in it")
        known = [_text.shown(name, 60), _units.nbytes(node.nbytes)]
        known += [_units.secs(node.secs)] if node.secs is not None else []
        known += [node.state] if node.state != rows.COMMITTED else []
        tip = " · ".join([*known, *([node.detail] if node.detail else [])])
        if node.state == rows.DAMAGED:
            return Mark(1.0, Tone.BAD, 2.0, tip)
        if row.state in (rows.IN_PROGRESS, rows.ABANDONED):
            level = min(node.nbytes / max(before.get(name, most), 1), 1.0)
            return Mark(level, _TONES[row.state], 1.0 - level, tip)  # the node that is behind is the one to see
        # Without a duration that makes sense, the bar is half as high as the slowest one.
        timed = node.secs is not None and 0 < longest < math.inf and node.secs <= longest
        level = max(node.secs or 0.0, 0.0) / longest if timed else 0.5
        return Mark(level, Tone.WARN if name == slowest else Tone.PLAIN, level if timed else 0.0, tip)

    return Strip(tuple(map(mark, names)))


def leftovers(found: Sequence[rows.LeftoverRow]) -> Table:
    """What lies in a directory and is no epoch."""
    return table(
        found,
        (Column("what"), lambda row: Span(row.kind, Tone.WARN, 30)),
        (Column("bytes", 1, right=True), lambda row: _units.nbytes(row.nbytes)),
        (Column("idle for", 2, right=True), lambda row: secs(row.age_secs)),
        (Column("path", 0, least=24), lambda row: row.path),
        (Column("epochs", 3, least=8), lambda row: Span(", ".join(map(str, row.epochs[:20])), limit=40)),
        (Column("detail", 4, least=20), lambda row: Span(row.detail, Tone.FAINT)),
    )


# One epoch.


def epoch(found: rows.EpochDetail) -> list[Block]:
    """One epoch: what is known of it, its nodes, and its items with their trees."""
    row = found.row
    title: list[str | Span] = [Span(f"epoch {row.epoch}", Tone.STRONG), "  ", Span(row.state, _tone(row.state))]
    title += [Span(f"  {LATEST} latest", Tone.LIVE)] if row.latest else []
    title += [Span(f"  {BEST} best", Tone.GOOD)] if row.best else []
    blocks: list[Block] = [Line(tuple(title), title=True), Facts(tuple(_facts(found))), *_nodes(row)]
    wrote = [name for each in found.items for name in (*each.nodes, *sharding.owners(each.leaves))]
    labels = sharding.NodeLabels([*(node.name for node in row.nodes), *wrote])
    shown = found.items[:_ITEMS]
    for each in shown:
        blocks.append(_item(each, row.nbytes, labels, open=each.kind == "arrays" or len(shown) == 1))
    more = ", ".join(_text.shown(each.name, 40) for each in found.items[_ITEMS : _ITEMS + 8])
    return [*blocks, *([Line(f"… {len(found.items) - _ITEMS} more items: {more}")] if more else [])]


def _facts(found: rows.EpochDetail) -> Iterator[tuple[str, Words]]:
    row = found.row
    if row.detail:
        yield "wrong" if row.state == rows.DAMAGED else "state", Span(row.detail, _tone(row.state), 2000)
    if row.committed_ns is not None:
        yield "committed", _units.when(row.committed_ns)
    elif row.age_secs is not None:
        yield "last write", f"{_units.secs(row.age_secs)} ago"
    if row.nbytes or row.nodes:
        nodes = f" on {_text.shown(row.nodes[0].name, 60)}" if len(row.nodes) == 1 else ""
        nodes = f" on {_units.several(len(row.nodes), 'node', 'nodes')}" if len(row.nodes) > 1 else nodes
        took = f" in {_units.secs(row.secs)}" if row.secs is not None else ""
        blocked = f", training blocked {_units.secs(row.blocked_secs)}" if row.blocked_secs is not None else ""
        yield "size", f"{_units.nbytes(row.nbytes)}{nodes}{took}{blocked}"
    yield "written by", "stock Orbax" if row.writer == "orbax" else f"{row.writer}, attempt {row.attempt or '?'}"
    if row.folder not in ("", str(row.epoch)):
        yield "folder", row.folder
    if row.state == rows.COMMITTED and not row.checked:
        yield "files", Span("not looked at", Tone.FAINT)
    metrics = []
    for name, value in rows.flat(row.metrics).items():
        source = f"  (attached by {row.sources[name]})" if name in row.sources else ""
        metrics.append(("metric", (f"{name} ", Span(figure(value), Tone.STRONG, 60), Span(source, Tone.FAINT))))
    yield from _first(metrics)
    yield from _metadata(row.custom_metadata)
    yield from _first(_notes(row.notes))
    if row.state == rows.COMMITTED:
        yield from _orbax(found)


def _first(facts: Iterable[tuple[str, Words]]) -> list[tuple[str, Words]]:
    """Facts of one kind, or some of them and how many there are besides."""
    found = list(facts)
    more = len(found) - _ENTRIES
    return [*found[:_ENTRIES], *([(found[-1][0], f"… {_units.count(more)} more")] if more > 0 else [])]


def _metadata(found: Any) -> list[tuple[str, Words]]:
    """What the caller attached to an epoch or an item."""
    if isinstance(found, Mapping):
        texts = (f"{name}: {figure(each)}" for name, each in rows.flat(found).items())
        return _first(("metadata", Span(each, limit=400)) for each in texts)
    return [("metadata", Span(figure(found), limit=400))] if found else []


def _notes(notes: Mapping[str, Any]) -> Iterator[tuple[str, Words]]:
    """What the runner noted, in a few words; values may be of any type, as nobody checked them."""
    known = {"version", "nodes", "metrics", "forms"}  # shown elsewhere, or of use to the runner alone
    finished = notes.get("finished")
    if finished:
        why = "; ".join(map(str, finished)) if isinstance(finished, list | tuple) else str(finished)
        yield "run ended", Span(why, limit=400)
    if notes.get("partial"):
        yield "partial", "the run was left in the middle of this epoch, and goes on there"
    if notes.get("beside"):
        yield "beside", "saved by save_checkpoints() in the middle of a run, which does not go on from it"
    trained = notes.get("total_secs")
    if isinstance(trained, int | float) and not isinstance(trained, bool):
        yield "trained for", f"{_units.secs(trained)} in all"
    for title, name in (("stop state", "stop"), ("blobs", "blobs")):
        kept = notes.get(name)
        each = [f"{key}: {_plain(value)}" for key, value in kept.items()] if isinstance(kept, Mapping) else [str(kept)]
        yield from ((title, Span(words, limit=400)) for words in each if kept is not None)
    known |= {"finished", "partial", "beside", "total_secs", "stop", "blobs"}
    yield from (("run", Span(f"{name}: {value}", limit=400)) for name, value in notes.items() if name not in known)


def _plain(value: object) -> str:
    """A value, or the entries of a mapping, without braces."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    return _units.number(value) if isinstance(value, float) else str(value)


def _orbax(found: rows.EpochDetail) -> Iterator[tuple[str, Words]]:
    """What stock Orbax can read of a committed epoch."""
    title = "stock Orbax"
    if found.unsupported is None:
        if found.row.writer != "orbax":
            yield title, Span("cannot read this epoch as it lies here", Tone.FAINT)
    elif not found.unsupported:
        yield title, Span("can read all of it", Tone.FAINT)
    for name, reasons in (found.unsupported or {}).items():
        if name == "*":
            yield title, Span(f"can read nothing of it: {'; '.join(reasons.values())}", Tone.WARN, 1000)
            continue
        why = "; ".join(f"{_text.readable(leaf)}: {reason}" for leaf, reason in list(reasons.items())[:_LEAVES])
        more = f"; … {len(reasons) - _LEAVES} more" if len(reasons) > _LEAVES else ""
        yield title, Span(f"cannot read, of item {name}: {why}{more}", Tone.WARN, 1000)


def _nodes(row: rows.EpochRow) -> Iterator[Block]:
    """All nodes of an epoch that several wrote; of many only the damaged and the slowest ones."""
    if len(row.nodes) < 2:
        return
    listed = list(row.nodes)
    if len(listed) > _NODES:
        damaged = [node for node in listed if node.state == rows.DAMAGED][:_NODES]
        others = sorted((node for node in listed if node not in damaged), key=lambda node: -(node.secs or 0.0))
        listed = damaged + others[:_SLOWEST]
        strip = node_strip(row, [node.name for node in row.nodes], {})
        yield Table((strip_column(len(row.nodes)),), (Row((Cell(drawing=strip),)),))
        yield Line(Span(f"the {_SLOWEST} slowest{', damaged ones first' if damaged else ''}", Tone.FAINT))
    longest = max((node.secs or 0.0 for node in row.nodes), default=0.0)

    def bar(node: rows.NodeRow) -> Cell:
        slowest = Tone.WARN if node.name == row.slowest_node else Tone.FAINT
        return Cell(drawing=Bar(ratio(node.secs or 0.0, longest), 20, slowest))

    yield table(
        listed,
        (Column("node", 0, least=20), lambda node: node.name),
        (Column("state", 2), lambda node: Span(node.state if node.state != rows.COMMITTED else "", _tone(node.state))),
        (Column("bytes", 1, right=True), lambda node: _units.nbytes(node.nbytes)),
        (Column("wrote for", 1, right=True), lambda node: secs(node.secs)),
        (Column("", 3), bar),
        (Column("detail", 4, least=20), lambda node: Span(node.detail, Tone.BAD)),
    )


# One item.


def item(found: rows.ItemRow, total_nbytes: int) -> list[Block]:
    """One item: its tree, its files, or what each node has of its own.

    Args:
        found: the item.
        total_nbytes: bytes of the epoch, of which shares are shown.
    """
    labels = sharding.NodeLabels([*found.nodes, *sharding.owners(found.leaves)])
    return [_item(found, total_nbytes, labels, open=True)]


def _item(found: rows.ItemRow, total_nbytes: int, labels: sharding.NodeLabels, *, open: bool) -> Section:
    what = {"arrays": leaf_count(len(found.leaves)), "files": _units.several(len(found.files), "file", "files")}
    what = what.get(found.kind, f"{_units.several(len(found.nodes), 'node', 'nodes')} with their own")
    size = f"  {what}, {_units.nbytes(found.nbytes)}"
    handler = Span(f"  {found.handler}" if found.handler else "", Tone.FAINT)
    blocks: list[Block] = [Problem(Span(found.problem, limit=2000))] if found.problem else []
    if metadata := _metadata(found.custom_metadata):
        blocks.append(Facts(tuple(metadata)))
    leaves = list(found.leaves)
    # What each node has of its own is one tree, whose outermost groups are the nodes: they are much alike.
    for node, own in found.nodes.items():
        leaves += [dataclasses.replace(leaf, path=(node, *(leaf.path or (leaf.name,)))) for leaf in own.leaves]
    if leaves:
        blocks.append(Tree(tree.Branch.grown(leaves), max(total_nbytes, found.nbytes)))
    if cuts := sharding.cuts(leaves):
        blocks.append(Cuts(tuple(cuts), labels))
    broken = [(node, own.problem) for node, own in found.nodes.items() if own.problem]
    blocks += [Problem((f"{node}: ", Span(problem, limit=600))) for node, problem in broken[:_NODES]]
    if (more := len(broken) - _NODES) > 0:
        blocks.append(Problem(f"… and {_units.several(more, 'more node', 'more nodes')}"))
    if found.files:
        blocks.append(_files(found.files, max(total_nbytes, found.nbytes)))
        more = len(found.files) - _FILES
        blocks += [Line(Span(f"… {_units.several(more, 'more file', 'more files')}", Tone.FAINT))] if more > 0 else []
    return Section(("item ", Span(found.name, Tone.STRONG), size, handler), tuple(blocks), open)


def _files(files: Sequence[rows.FileRow], total: int) -> Table:
    return table(
        files[:_FILES],
        (Column("file", 0, least=30), lambda file: file.name),
        (Column("bytes", 1, right=True), lambda file: _units.nbytes(file.nbytes)),
        (Column("share", 3, right=True), lambda file: share(file.nbytes, total)),
        (Column("node", 2, least=16), lambda file: Span(file.node, Tone.FAINT)),
    )


# Words.


def figure(value: object) -> str:
    """A metric, or what a caller attached: numbers as people write them, other values as Python does, shortened."""
    if isinstance(value, numbers.Real):
        return _units.number(value if isinstance(value, int) else float(value))
    return "" if value is None else value if isinstance(value, str) else _SHORT.repr(value)


def _tone(state: str) -> Tone:
    return _TONES.get(state, Tone.PLAIN)
