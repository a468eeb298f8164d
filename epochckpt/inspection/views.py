"""The views of an epoch and of an item, and of all else through `of`: blocks made from rows.

Notebooks and terminals draw the same blocks. Every decision about a view is made here, in `directory_views` with its
tables, in `runs_views` and in `leaf_views`: which facts and columns it has, in which order, how much of a long list,
and in which words.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from epochckpt import _text, _units
from epochckpt._metrics import flat
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import leaf_views, rows, tree
from epochckpt.inspection.blocks import Bar, Block, Cell, Column, Problem, Span, TextLine, Tone, Words, secs, table
from epochckpt.inspection.directory_views import goodput, metrics, overview, usage
from epochckpt.inspection.leaf_views import cuts, diff, stats
from epochckpt.inspection.runs_views import runs
from epochckpt.inspection.signs import BEST, LATEST, faint, figure, nbytes, node_strip, slow_node, strip_column, tone
from epochckpt.jobs.notes import RunNotes
from epochckpt.orbax.view import WHOLE

_NODES = 12  # of an epoch that are listed; of more than that only some
_SLOWEST = 5
_ITEMS = 40
_FILES = 100
_ENTRIES = 40  # of one epoch's or item's metrics, of its metadata, of the runner's notes
_LEAVES = 10  # of an item that stock Orbax cannot read

Fact = tuple[str, Words]


def of(
    found: rows.Overview
    | rows.EpochDetail
    | rows.ItemRow
    | rows.Diff
    | rows.Usage
    | rows.Goodput
    | rows.RunsOverview
    | rows.RunMetrics
    | rows.ArrayLook
    | Sequence[rows.LeafStats],
) -> list[Block]:
    """The view of what an inspection found."""
    if isinstance(found, rows.Overview):
        return overview(found, hint="; .epochs() has the rows of all")
    if isinstance(found, rows.EpochDetail):
        return epoch(found)
    if isinstance(found, rows.RunsOverview):
        return runs(found)
    if isinstance(found, rows.Goodput):
        return goodput(found)
    if isinstance(found, rows.ArrayLook):
        return leaf_views.look(found)
    if isinstance(found, rows.RunMetrics):
        return metrics(found)
    if isinstance(found, rows.Usage):
        return usage(found)
    if isinstance(found, rows.ItemRow):
        return item(found, found.nbytes)
    return diff(found) if isinstance(found, rows.Diff) else stats(found)


def epoch(found: rows.EpochDetail) -> list[Block]:
    """One epoch: its facts, its nodes, and its items with their trees."""
    row = found.row
    marks = (LATEST, "latest", Tone.LIVE, row.latest), (BEST, "best", Tone.GOOD, row.best)
    title = Span(f"{row.unit} {row.epoch}", Tone.STRONG), "  ", Span(row.state, tone(row.state))
    title += tuple(Span(f"  {sign} {word}", tone) for sign, word, tone, is_so in marks if is_so)
    shown = found.items[:_ITEMS]
    others = found.items[_ITEMS:]
    view: list[Block] = [TextLine(title, title=True), kinds.Facts(tuple(_facts(found))), *_nodes(row)]
    roots: dict[str, tree.Branch] = {}
    for each in shown:
        blocks = item(each, row.nbytes, open=each.kind == "arrays" or len(shown) == 1)
        for drawn in kinds.trees(blocks):
            roots[each.name] = drawn.root
        view += blocks
    tree.fold_twins(roots)
    if others:
        names = ", ".join(_text.shown(item.name, 40) for item in others[:8])
        view.append(TextLine(f"… {len(others)} more items: {names}"))
    return view


def _facts(found: rows.EpochDetail) -> Iterator[Fact]:
    row = found.row
    if row.detail:
        yield "wrong" if row.state == rows.DAMAGED else "state", Span(row.detail, tone(row.state), 2000)
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
    if elsewhere := [node for node in row.nodes if node.state == rows.ELSEWHERE]:
        here = ", ".join(node.name for node in row.nodes if node.state != rows.ELSEWHERE) or "no node"
        others = _units.several(len(elsewhere), "node are on another host's disk", "nodes are on other hosts' disks")
        yield "here", (Span(f"the files of {here}", limit=200), Span(f"; those of {others}", Tone.FAINT))
    yield "written by", "stock Orbax" if row.writer == "orbax" else f"{row.writer}, attempt {row.save_id or '?'}"
    if row.folder not in ("", str(row.epoch)):
        yield "folder", row.folder
    if row.state == rows.COMMITTED and not row.checked:
        yield "files", Span("not looked at", Tone.FAINT)
    metrics: list[Fact] = []
    for name, value in flat(row.metrics).items():
        source = f"  (attached by {row.sources[name]})" if name in row.sources else ""
        metrics.append(("metric", (f"{name} ", Span(figure(value), Tone.STRONG, 60), Span(source, Tone.FAINT))))
    yield from _first(metrics)
    yield from _metadata(row.custom_metadata)
    yield from _first(_notes(RunNotes.read(row.notes)))
    if row.state == rows.COMMITTED:
        yield from _orbax(found)


def _first(facts: Iterable[Fact]) -> Iterator[Fact]:
    """The first facts of one kind, and how many more there are."""
    found = list(facts)
    yield from found[:_ENTRIES]
    if len(found) > _ENTRIES:
        yield found[-1][0], f"… {_units.count(len(found) - _ENTRIES)} more"


def _metadata(found: Any) -> Iterator[Fact]:
    """The custom metadata of an epoch or an item."""
    texts = [figure(found)] if found else []
    if isinstance(found, Mapping):
        texts = [f"{name}: {figure(each)}" for name, each in flat(found).items()]
    return _first(("metadata", Span(each, limit=400)) for each in texts)


def _notes(notes: RunNotes) -> Iterator[Fact]:
    """The runner's notes, in a few words."""
    if notes.finished:
        yield "run ended", Span("; ".join(notes.finished), limit=400)
    if notes.partial:
        yield "partial", "the run was left in the middle of it, and goes on there"
    if notes.out_of_band:
        yield "beside", "saved by save_checkpoints() in the middle of a run, which does not go on from it"
    if notes.total_secs is not None:
        yield "trained for", f"{_units.secs(notes.total_secs)} in all"
    for title, kept in (("stop state", notes.stop_states), ("blobs", notes.entries.get("blobs"))):
        each = [f"{key}: {_plain(value)}" for key, value in kept.items()] if isinstance(kept, Mapping) else [str(kept)]
        yield from ((title, Span(words, limit=400)) for words in each if kept is not None)
    yield from (("run", Span(f"{name}: {value}", limit=400)) for name, value in notes.others().items())


def _plain(value: object) -> str:
    """A value, or the entries of a mapping, without braces."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    return _units.number(value) if isinstance(value, float) else str(value)


def _orbax(found: rows.EpochDetail) -> Iterator[Fact]:
    """Which items of a committed epoch stock Orbax can read, and why not the rest."""
    title = "stock Orbax"
    if found.unsupported is None:
        if found.row.writer != "orbax":
            yield title, Span("cannot read it as it lies here", Tone.FAINT)
    elif not found.unsupported:
        yield title, Span("can read all of it", Tone.FAINT)
    for name, reasons in (found.unsupported or {}).items():
        if name == WHOLE:
            yield title, Span(f"can read nothing of it: {'; '.join(reasons.values())}", Tone.WARN, 1000)
            continue
        each = [(_text.readable(leaf), reason) for leaf, reason in list(reasons.items())[:_LEAVES]]
        why = "; ".join(reason if leaf == WHOLE else f"{leaf}: {reason}" for leaf, reason in each)
        more = f"; … {len(reasons) - _LEAVES} more" if len(reasons) > _LEAVES else ""
        what = "item" if WHOLE in reasons else "all of item"
        yield title, Span(f"cannot read {what} {name}: {why}{more}", Tone.WARN, 1000)


def _nodes(row: rows.EpochRow) -> Iterator[Block]:
    """All nodes of an epoch that several wrote; of many only the damaged and the slowest ones."""
    if len(row.nodes) < 2:
        return
    listed = list(row.nodes)
    if len(listed) > _NODES:
        damaged = [node for node in listed if node.state == rows.DAMAGED][:_NODES]
        others = sorted((node for node in listed if node not in damaged), key=lambda node: -(node.secs or 0.0))
        strip = node_strip(row, [node.name for node in row.nodes], {})
        yield table([strip], (strip_column(len(row.nodes)), lambda strip: Cell(drawing=strip)))
        yield faint(f"the {_SLOWEST} slowest{', damaged ones first' if damaged else ''}")
        listed = damaged + others[:_SLOWEST]
    longest = max((node.secs or 0.0 for node in row.nodes), default=0.0)

    slow = slow_node(row)

    def bar(node: rows.NodeRow) -> Cell:
        tone = Tone.WARN if node == slow else Tone.FAINT
        return Cell(drawing=Bar(kinds.ratio(node.secs or 0.0, longest), 20, tone))

    yield table(
        listed,
        (Column("node", 0, least=20), lambda node: node.name),
        (Column("state", 2), lambda node: Span(node.state if node.state != rows.COMMITTED else "", tone(node.state))),
        (Column("bytes", 1, right=True), lambda node: nbytes(node.nbytes)),
        (Column("wrote for", 1, right=True), lambda node: secs(node.secs)),
        (Column("", 3), bar),
        (Column("detail", 4, least=20), lambda node: Span(node.detail, Tone.BAD)),
    )


def _json(file: rows.FileRow) -> Block:
    """The content of a JSON file: a line per value."""
    content = file.content if isinstance(file.content, Mapping) else {file.name: file.content}
    values = list(flat(content).items())
    more = [("…", f"{_units.count(len(values) - _ENTRIES)} more")] if len(values) > _ENTRIES else []
    return table(
        [*values[:_ENTRIES], *more],
        (Column("key", 0, least=20), lambda row: Span(row[0], Tone.FAINT)),
        (Column("value", 0, least=20), lambda row: Span(_value(row[1]), limit=400)),
    )


def _value(value: object) -> str:
    """A value of a JSON file, as there."""
    return _units.number(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def item(found: rows.ItemRow, total_nbytes: int, *, open: bool = True) -> list[Block]:
    """One item: its tree, its files, or the trees of all nodes; shares are of `total_nbytes`, the epoch's bytes."""
    total = max(total_nbytes, found.nbytes)
    what = {"arrays": leaf_views.extent(found.leaves), "files": _units.several(len(found.files), "file", "files")}
    what = what.get(found.kind, f"{_units.several(len(found.nodes), 'node', 'nodes')} with their own")
    leaves = rows.without_empty(found.leaves)
    # The nodes' own items are drawn as one tree, with a group per node: they are much alike.
    for node, own in found.nodes.items():
        own_leaves = rows.without_empty(own.leaves)
        leaves += [dataclasses.replace(leaf, path=(node, *(leaf.path or (leaf.name,)))) for leaf in own_leaves]
    usual = leaf_views.usual_place(leaves)
    where = f", on {_text.shown(usual[1], 60)}" if usual[1] else ""
    handler = Span(f"  {found.handler}" if found.handler else "", Tone.FAINT)
    heading = "item ", Span(found.name, Tone.STRONG), f"  {what}, {_units.nbytes(found.nbytes)}{where}", handler
    view: list[Block] = [Problem(Span(found.problem, limit=2000))] if found.problem else []
    if metadata := tuple(_metadata(found.custom_metadata)):
        view.append(kinds.Facts(metadata))
    if leaves:
        if usual[0]:
            view.append(faint(f"mesh {usual[0]}"))
        placed = any(leaf_views.placed(leaf, usual) for leaf in leaves)
        view.append(kinds.Tree(tree.Branch.grown(leaves), total, usual, placed))
    view += cuts(leaves)
    view += kinds.problems({node: own.problem for node, own in found.nodes.items() if own.problem})
    if found.files:
        files = table(
            found.files[:_FILES],
            (Column("file", 0, least=30), lambda file: file.name),
            (Column("bytes", 1, right=True), lambda file: _units.nbytes(file.nbytes)),
            (Column("share", 3, right=True), lambda file: kinds.share(file.nbytes, total)),
            (Column("node", 2, least=16), lambda file: Span(file.node, Tone.FAINT)),
        )
        view.append(files)
    for file in found.files:
        if file.content is not None:
            view.append(_json(file))
    if (more := len(found.files) - _FILES) > 0:
        view.append(faint(f"… {_units.several(more, 'more file', 'more files')}"))
    return [kinds.Section(heading, tuple(view), open)]
