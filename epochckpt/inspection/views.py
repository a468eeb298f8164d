"""The views of a directory, of an epoch and of an item: blocks made from rows.

Notebooks and terminals draw the same blocks. Every decision about a view is made here and in `leaf_views`: which facts
and columns it has, in which order, how much of a long list, and in which words.
"""

import collections
import dataclasses
import math
import numbers
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from epochckpt import _text, _units
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import rows, tree
from epochckpt.inspection.blocks import Bar, Block, Cell, Column, Line, Mark, Problem, Span, Tone, Words, secs, table
from epochckpt.inspection.leaf_views import cuts, diff, stats

LATEST, BEST = "▸", "★"
_RECENT = 20  # epochs that a page shows before it folds
_METRICS = 8  # that are columns
_NODES = 12  # of an epoch that are listed; of more than that only some
_SLOWEST = 5
_ITEMS = 40
_FILES = 100
_ENTRIES = 40  # of one epoch's or item's metrics, of its metadata, of the runner's notes
_USED = 50  # epochs, and other things, whose use of storage is listed
_LEAVES = 10  # of an item that stock Orbax cannot read

_STATES = {  # tones and meanings
    rows.COMMITTED: (Tone.GOOD, "every node finished; the epoch can be restored"),
    rows.DAMAGED: (Tone.BAD, "it cannot be read, or files are missing or have other sizes than recorded; never loaded"),
    rows.IN_PROGRESS: (Tone.LIVE, "a save that was written to lately; it is not yet an epoch"),
    rows.ABANDONED: (Tone.WARN, "a save that failed or died; no reader looks at it"),
    rows.ELSEWHERE: (Tone.FAINT, "on the disk of another host"),
    "writing": (Tone.LIVE, ""),
    "written": (Tone.LIVE, ""),
}
_UNKNOWN = Tone.PLAIN, ""
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 3, 8, 12, 120, 120

Fact = tuple[str, Words]


def of(
    found: rows.Overview
    | rows.EpochDetail
    | rows.ItemRow
    | rows.Diff
    | rows.Usage
    | rows.Goodput
    | Sequence[rows.LeafStats],
) -> list[Block]:
    """The view of what an inspection found."""
    if isinstance(found, rows.Overview):
        return overview(found, hint="; .epochs() has the rows of all")
    if isinstance(found, rows.EpochDetail):
        return epoch(found)
    if isinstance(found, rows.Goodput):
        return goodput(found)
    if isinstance(found, rows.Usage):
        return usage(found)
    if isinstance(found, rows.ItemRow):
        return item(found, found.nbytes)
    return diff(found) if isinstance(found, rows.Diff) else stats(found)


def overview(found: rows.Overview, *, hint: str = "") -> list[Block]:
    """A directory: its epochs and attempts, and what else lies there; `hint` says how to see epochs not shown."""
    view: list[Block] = [
        Line(Span(found.directory, Tone.STRONG, 1000), title=True),
        kinds.Summary(tuple(_summary(found))),
    ]
    if found.hidden:
        size = f" ({_units.nbytes(found.hidden_nbytes)})" if found.hidden_nbytes else ""
        count = _units.several(found.hidden, "older epoch", "older epochs")
        view.append(_faint(f"… {count}{size} {'is' if found.hidden == 1 else 'are'} not shown{hint}"))
    if found.epochs:
        view.append(_epochs(found))
    view += kinds.problems(found.problems)
    if found.leftovers:
        size = _units.nbytes(sum(row.nbytes for row in found.leftovers))
        heading = f"Also here, and part of no epoch: {_units.several(len(found.leftovers), 'thing', 'things')}, {size}"
        view.append(kinds.Section(Span(heading, Tone.STRONG), (leftovers(found.leftovers),), open=False))
    return view


def _host(found: rows.Overview | rows.Usage) -> Iterator[Span]:
    if found.host:
        yield Span(f"only the part of one host, {_text.shown(found.host, 60)}", Tone.WARN)


def _summary(found: rows.Overview) -> Iterator[Words]:
    epochs = [row for row in found.epochs if row.state in (rows.COMMITTED, rows.DAMAGED)]
    count = len(epochs) + found.hidden
    size = _units.nbytes(sum(row.nbytes for row in epochs) + found.hidden_nbytes)
    yield f"{_units.several(count, 'epoch', 'epochs')}, {size}" if count else "no epochs"
    states = collections.Counter(row.state for row in found.epochs)
    for state in (rows.DAMAGED, rows.IN_PROGRESS, rows.ABANDONED):
        if states[state]:
            yield Span(f"{_units.count(states[state])} {state}", _tone(state))
    yield from _host(found)
    if found.mirror:
        yield f"mirror {_text.shown(found.mirror, 60)}"
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
    if unchecked := sum(row.state == rows.COMMITTED and not row.checked for row in found.epochs):
        yield Span(f"files of {_units.several(unchecked, 'epoch', 'epochs')} not looked at", Tone.FAINT)


def _epochs(found: rows.Overview) -> kinds.Table:
    names = list(dict.fromkeys(name for row in found.epochs for name in rows.flat(row.metrics)))
    names.sort(key=lambda name: name != found.metric)
    # Nodes of the newest epoch come first, in their order, then those that only older epochs have.
    nodes = list(dict.fromkeys(node.name for row in reversed(found.epochs) for node in row.nodes))
    mixed = any(row.writer != "epochckpt" for row in found.epochs)
    before = {node.name: node.nbytes or 0 for row in found.epochs if row.latest for node in row.nodes}

    def measured(name: str) -> kinds.Cells[rows.EpochRow]:
        def show(row: rows.EpochRow) -> Cell:
            value = figure(rows.flat(row.metrics).get(name))
            tip = f"{value}, attached by {row.sources[name]}" if name in row.sources else value
            return Cell(Span(value, Tone.GOOD if row.best and name == found.metric else Tone.PLAIN, 16), tip=tip)

        return show

    def state(row: rows.EpochRow) -> Cell:
        tone, meaning = _STATES.get(row.state, _UNKNOWN)
        return Cell(Span(row.state, tone), tip=meaning)

    def marks(row: rows.EpochRow) -> Cell:
        words = Span(LATEST if row.latest else "", Tone.LIVE), Span(BEST if row.best else "", Tone.GOOD)
        return Cell(words, tip=" ".join(["latest"] * row.latest + ["best"] * row.best))

    def slowest(row: rows.EpochRow) -> Words:
        node = next((node for node in row.nodes if node.name == row.slowest_node), None)
        return () if node is None else (Span(node.name, Tone.WARN, 60), f" {_units.secs(node.secs)}")

    def committed(row: rows.EpochRow) -> Words:
        written = "" if row.age_secs is None else f"written {_units.secs(row.age_secs)} ago"
        return Span(written if row.committed_ns is None else _units.when(row.committed_ns), Tone.FAINT)

    def remark(row: rows.EpochRow) -> Words:
        damage = "; ".join(f"{node.name}: {node.detail}" for node in row.nodes[:_NODES] if node.detail)
        return Span(row.detail or damage, Tone.PLAIN if row.state == rows.COMMITTED else _tone(row.state), 600)

    made = table(
        found.epochs,
        (Column("epoch", 0, right=True), lambda row: Span(str(row.epoch), Tone.STRONG)),
        (Column("", 0), marks),
        (Column("state", 0), state),
        (Column("bytes", 1, right=True, tip="of its files, all nodes together"), lambda row: _units.nbytes(row.nbytes)),
        (Column("took", 2, right=True, tip="from the call of save to the commit"), lambda row: secs(row.secs)),
        (Column("blocked", 7, right=True, tip="how long the training thread waited"), lambda r: secs(r.blocked_secs)),
        *(
            (Column(_text.shown(name, 14), 6 + i if i else 3, right=True, least=9, tip=name), measured(name))
            for i, name in enumerate(names[:_METRICS])
        ),
        (
            strip_column(len(nodes)),
            lambda row: Cell(drawing=node_strip(row, nodes, before) if len(nodes) > 1 and row.nodes else None),
        ),
        (Column("slowest node", 7, least=14), slowest),
        (Column("committed", 8, tip="local time"), committed),
        (Column("by", 9), lambda row: Span(row.writer if mixed else "", Tone.FAINT)),
        (Column("in", 5, tip="the directory itself (local), its mirror, or both"), lambda row: row.tier),
        below=remark,
    )
    return made._replace(recent=_RECENT)


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
    slowest = row.slowest_node

    def mark(name: str) -> Mark:
        node = nodes.get(name)
        if node is None:
            return Mark(0.0, Tone.FAINT, -1.0, f"{_text.shown(name, 60)} · not in it")
        known = [_text.shown(name, 60), _nbytes(node.nbytes), secs(node.secs)]
        known += [node.state if node.state != rows.COMMITTED else "", node.detail]
        tip = " · ".join(filter(None, known))
        if node.state == rows.DAMAGED:
            return Mark(1.0, Tone.BAD, 2.0, tip)
        if row.state in (rows.IN_PROGRESS, rows.ABANDONED):
            level = min((node.nbytes or 0) / max(before.get(name, most), 1), 1.0)
            return Mark(level, _tone(row.state), 1.0 - level, tip)  # the node that is behind is the one to see
        # Without a duration that makes sense, the bar is half as high as the slowest one.
        timed = node.secs is not None and 0 < longest < math.inf and node.secs <= longest
        level = max(node.secs or 0.0, 0.0) / longest if timed else 0.5
        return Mark(level, Tone.WARN if name == slowest else Tone.PLAIN, level if timed else 0.0, tip)

    # The bar of a node that has written nothing yet can be seen, too.
    return kinds.Strip(tuple(each._replace(level=max(each.level, 0.01)) for each in map(mark, names)))


def leftovers(found: Sequence[rows.LeftoverRow]) -> kinds.Table:
    """A table of the leftovers of a directory."""
    return table(
        found,
        (Column("what"), lambda row: Span(row.kind, Tone.WARN, 30)),
        (Column("bytes", 1, right=True), lambda row: _units.nbytes(row.nbytes)),
        (Column("idle for", 2, right=True), lambda row: secs(row.age_secs)),
        (Column("path", 0, least=24), lambda row: row.path),
        (Column("epochs", 3, least=8), lambda row: Span(", ".join(map(str, row.epochs[:20])), limit=40)),
        (Column("detail", 4, least=20), lambda row: Span(row.detail, Tone.FAINT)),
    )


def usage(found: rows.Usage, limit: int | None = _USED, *, hint: str = "") -> list[Block]:
    """What a directory takes up, by kind and by thing; of epochs the newest `limit`. `hint`: how to see all."""
    kinds_ = found.kinds
    view: list[Block] = [
        Line(Span(found.directory, Tone.STRONG, 1000), title=True),
        kinds.Summary((_units.nbytes(found.nbytes), _units.several(found.files, "file", "files"), *_host(found))),
        table(
            kinds_,
            (Column("kind"), lambda each: _kind(each.kind)),
            (Column("things", 2, right=True), lambda each: _units.count(each.things)),
            (Column("bytes", 0, right=True), lambda each: _units.nbytes(each.nbytes)),
            (Column("share", 1, right=True), lambda each: kinds.share(each.nbytes, found.nbytes)),
            (Column("files", 1, right=True), lambda each: _units.count(each.files)),
            (Column("oldest", 4, tip="when it was written"), lambda each: _written(each.oldest_ns)),
            (Column("newest", 3, tip="when it was written"), lambda each: _written(each.newest_ns)),
        ),
        *kinds.problems(found.problems),
    ]
    epochs = [row for row in found.rows if row.kind == rows.COMMITTED]
    hidden = 0 if limit is None else max(len(epochs) - limit, 0)
    others = [row for row in found.rows if row.kind != rows.COMMITTED]
    shown = table(
        [*epochs[hidden:], *others[:_USED]],
        (Column("epoch", 0, right=True), lambda row: ", ".join(map(str, row.epochs[:5]))),
        (Column("kind", 1), lambda row: _kind(row.kind)),
        (Column("bytes", 0, right=True), lambda row: _units.nbytes(row.nbytes)),
        (Column("share", 2, right=True), lambda row: kinds.share(row.nbytes, found.nbytes)),
        (Column("files", 2, right=True), lambda row: _units.count(row.files)),
        (Column("newest", 3, tip="when it was written"), lambda row: _written(row.newest_ns)),
        (Column("path", 4, least=12), lambda row: Span(row.path, Tone.FAINT)),
    )
    below: list[Block] = []
    if hidden:
        what = _units.several(hidden, "older epoch is", "older epochs are")
        size = _units.nbytes(sum(row.nbytes for row in epochs[:hidden]))
        below.append(_faint(f"… {what} not shown ({size}){hint}"))
    if more := len(others) - _USED:
        below += [_faint(f"… {_units.several(more, 'more thing', 'more things')}")] if more > 0 else []
    return [*view, kinds.Section(Span("What takes it up", Tone.STRONG), (*below, shown))] if found.rows else view


def goodput(found: rows.Goodput) -> list[Block]:
    """What the runs of a directory have spent their time on, and all of them together."""
    view: list[Block] = [Line(Span(found.directory, Tone.STRONG, 1000), title=True)]
    total = found.total
    if total is None:
        return [*view, _faint("no epoch here tells of a run"), *kinds.problems(found.problems)]
    runs, kills = _units.several(len(found.runs), "run", "runs"), _units.several(found.kills, "kill", "kills")
    kept = Span(f"{kinds.percent(total.goodput)} of {_units.secs(total.secs)} trained and kept", Tone.GOOD)
    each = [*found.runs, total] if len(found.runs) > 1 else found.runs
    ends = {True: Span("killed", Tone.BAD), False: "closed", None: Span("open", Tone.LIVE)}
    unknown = "from its newest commit to the next run: more that was lost, or nothing ran"
    shown = table(
        each,
        (Column("began", 2), lambda row: _units.when(row.began_ns) if row is not total else "all"),
        (Column("end", 1), lambda row: ends[row.killed] if row is not total else ""),
        (Column("saves", 4, right=True), lambda row: _units.count(row.saves)),
        (Column("epoch", 3, right=True, tip="the newest"), lambda row: str(row.epoch)),
        (Column("trained", 0, right=True), lambda row: _units.secs(row.trained_secs)),
        (Column("blocked", 0, right=True, tip="by saves"), lambda row: _units.secs(row.blocked_secs)),
        (Column("restoring", 1, right=True), lambda row: _units.secs(row.restoring_secs)),
        (Column("waiting", 1, right=True, tip="for saves"), lambda row: _units.secs(row.waiting_secs)),
        (Column("lost", 0, right=True, tip="at least"), lambda row: _lost(row)),
        (Column("unknown", 0, right=True, tip=unknown), lambda row: _units.secs(row.unknown_secs)),
        (Column("goodput", 0, right=True), lambda row: kinds.percent(row.goodput)),
    )
    return [*view, kinds.Summary((kept, runs, kills)), shown, *kinds.problems(found.problems)]


def _lost(row: rows.RunRow) -> Words:
    return Span(f"≥ {_units.secs(row.lost_secs)}", Tone.BAD) if row.lost_secs else ""


def _kind(kind: str) -> Words:
    return Span(kind, _STATES.get(kind, (Tone.PLAIN if kind == rows.OTHER else Tone.WARN, ""))[0], 30)


def _written(time_ns: int | None) -> Words:
    return Span("" if time_ns is None else _units.when(time_ns), Tone.FAINT)


def epoch(found: rows.EpochDetail) -> list[Block]:
    """One epoch: its facts, its nodes, and its items with their trees."""
    row = found.row
    marks = (LATEST, "latest", Tone.LIVE, row.latest), (BEST, "best", Tone.GOOD, row.best)
    title = Span(f"epoch {row.epoch}", Tone.STRONG), "  ", Span(row.state, _tone(row.state))
    title += tuple(Span(f"  {sign} {word}", tone) for sign, word, tone, is_so in marks if is_so)
    shown, others = found.items[:_ITEMS], found.items[_ITEMS:]
    view: list[Block] = [Line(title, title=True), kinds.Facts(tuple(_facts(found))), *_nodes(row)]
    for each in shown:
        view += item(each, row.nbytes, open=each.kind == "arrays" or len(shown) == 1)
    if others:
        view.append(Line(f"… {len(others)} more items: {', '.join(_text.shown(each.name, 40) for each in others[:8])}"))
    return view


def _facts(found: rows.EpochDetail) -> Iterator[Fact]:
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
    if elsewhere := [node for node in row.nodes if node.state == rows.ELSEWHERE]:
        here = ", ".join(node.name for node in row.nodes if node.state != rows.ELSEWHERE) or "no node"
        others = _units.several(len(elsewhere), "node are on another host's disk", "nodes are on other hosts' disks")
        yield "here", (Span(f"the files of {here}", limit=200), Span(f"; those of {others}", Tone.FAINT))
    yield "written by", "stock Orbax" if row.writer == "orbax" else f"{row.writer}, attempt {row.attempt or '?'}"
    if row.folder not in ("", str(row.epoch)):
        yield "folder", row.folder
    if row.state == rows.COMMITTED and not row.checked:
        yield "files", Span("not looked at", Tone.FAINT)
    metrics: list[Fact] = []
    for name, value in rows.flat(row.metrics).items():
        source = f"  (attached by {row.sources[name]})" if name in row.sources else ""
        metrics.append(("metric", (f"{name} ", Span(figure(value), Tone.STRONG, 60), Span(source, Tone.FAINT))))
    yield from _first(metrics)
    yield from _metadata(row.custom_metadata)
    yield from _first(_notes(row.notes or {}))
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
        texts = [f"{name}: {figure(each)}" for name, each in rows.flat(found).items()]
    return _first(("metadata", Span(each, limit=400)) for each in texts)


def _notes(notes: Mapping[str, Any]) -> Iterator[Fact]:
    """The runner's notes, in a few words. No reader has checked their values, which may be of any type."""
    if finished := notes.get("finished"):
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
    known = {"finished", "partial", "beside", "total_secs", "stop", "blobs"}
    known |= {"version", "nodes", "metrics", "forms"}  # shown elsewhere, or of use to the runner alone
    yield from (("run", Span(f"{name}: {value}", limit=400)) for name, value in notes.items() if name not in known)


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
        strip = node_strip(row, [node.name for node in row.nodes], {})
        yield table([strip], (strip_column(len(row.nodes)), lambda strip: Cell(drawing=strip)))
        yield _faint(f"the {_SLOWEST} slowest{', damaged ones first' if damaged else ''}")
        listed = damaged + others[:_SLOWEST]
    longest = max((node.secs or 0.0 for node in row.nodes), default=0.0)

    def bar(node: rows.NodeRow) -> Cell:
        tone = Tone.WARN if node.name == row.slowest_node else Tone.FAINT
        return Cell(drawing=Bar(kinds.ratio(node.secs or 0.0, longest), 20, tone))

    yield table(
        listed,
        (Column("node", 0, least=20), lambda node: node.name),
        (Column("state", 2), lambda node: Span(node.state if node.state != rows.COMMITTED else "", _tone(node.state))),
        (Column("bytes", 1, right=True), lambda node: _nbytes(node.nbytes)),
        (Column("wrote for", 1, right=True), lambda node: secs(node.secs)),
        (Column("", 3), bar),
        (Column("detail", 4, least=20), lambda node: Span(node.detail, Tone.BAD)),
    )


def item(found: rows.ItemRow, total_nbytes: int, *, open: bool = True) -> list[Block]:
    """One item: its tree, its files, or the trees of all nodes; shares are of `total_nbytes`, the epoch's bytes."""
    total = max(total_nbytes, found.nbytes)
    what = {"arrays": kinds.leaf_count(len(found.leaves)), "files": _units.several(len(found.files), "file", "files")}
    what = what.get(found.kind, f"{_units.several(len(found.nodes), 'node', 'nodes')} with their own")
    handler = Span(f"  {found.handler}" if found.handler else "", Tone.FAINT)
    heading = "item ", Span(found.name, Tone.STRONG), f"  {what}, {_units.nbytes(found.nbytes)}", handler
    view: list[Block] = [Problem(Span(found.problem, limit=2000))] if found.problem else []
    if metadata := tuple(_metadata(found.custom_metadata)):
        view.append(kinds.Facts(metadata))
    leaves = list(found.leaves)
    # What each node has of its own is one tree, whose outermost groups are the nodes: they are much alike.
    for node, own in found.nodes.items():
        leaves += [dataclasses.replace(leaf, path=(node, *(leaf.path or (leaf.name,)))) for leaf in own.leaves]
    if leaves:
        view.append(kinds.Tree(tree.Branch.grown(leaves), total))
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
    if (more := len(found.files) - _FILES) > 0:
        view.append(_faint(f"… {_units.several(more, 'more file', 'more files')}"))
    return [kinds.Section(heading, tuple(view), open)]


def figure(value: object) -> str:
    """A metric, or what a caller attached: numbers as people write them, other values as Python does, shortened."""
    if isinstance(value, numbers.Real):
        return _units.number(value if isinstance(value, int) else float(value))
    return "" if value is None else value if isinstance(value, str) else _SHORT.repr(value)


def _nbytes(value: int | None) -> str:
    """A size; empty if it is not known."""
    return "" if value is None else _units.nbytes(value)


def _faint(words: str) -> Line:
    return Line(Span(words, Tone.FAINT))


def _tone(state: str) -> Tone:
    return _STATES.get(state, _UNKNOWN)[0]
