"""The views of a directory: its epochs at a glance, what takes up storage, what its runs have spent their time on."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Sequence

from epochckpt import _text, _units
from epochckpt._metrics import flat
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import rows
from epochckpt.inspection.blocks import Block, Cell, Column, Span, TextLine, Tone, Words, secs, table
from epochckpt.inspection.columns import COLUMNS, NAME, curve_of, measured_column, noun, several
from epochckpt.inspection.epoch_table import EpochTable, Usual, metric_names, remark
from epochckpt.inspection.signs import (
    BEST,
    LATEST,
    STATES,
    faint,
    figure,
    tone,
)
from epochckpt.jobs.notes import RunNotes

_RECENT = 20  # epochs that a page shows before it folds
_USED = 50  # epochs, and other things, whose use of storage is listed


def overview(found: rows.Overview, *, hint: str = "") -> list[Block]:
    """A directory: its epochs and attempts, and what else lies there; `hint` says how to see epochs not shown."""
    usual = Usual(found)
    view: list[Block] = [
        TextLine(Span(found.directory, Tone.STRONG, 1000), title=True),
        kinds.Summary(tuple(_summary(found, usual))),
    ]
    if found.hidden:
        size = f" ({_units.nbytes(found.hidden_nbytes)})" if found.hidden_nbytes else ""
        count = several(found.hidden, found.unit, "older ")
        view.append(faint(f"… {count}{size} {'is' if found.hidden == 1 else 'are'} not shown{hint}"))
    names = metric_names(found)
    view += _curves(found, names[:COLUMNS])
    if found.epochs:
        view.append(table(found.epochs, *EpochTable(found).columns(), below=remark)._replace(recent=_RECENT))
        view += _legend(found)
    if more := names[COLUMNS:]:
        view.append(faint(f"{_units.several(len(more), 'more metric', 'more metrics')}: {', '.join(more[:COLUMNS])}"))
    view += kinds.problems(found.problems)
    if found.leftovers:
        size = _units.nbytes(sum(row.nbytes for row in found.leftovers))
        count = _units.several(len(found.leftovers), "thing", "things")
        heading = f"Also here, and part of no {noun(found.unit)}: {count}, {size}"
        view.append(kinds.Section(Span(heading, Tone.STRONG), (leftovers(found.leftovers, found.unit),), open=False))
    return view


def _host(found: rows.Overview | rows.Usage) -> Iterator[Span]:
    if found.host:
        yield Span(f"only the part of one host, {_text.shown(found.host, 60)}", Tone.WARN)


def _summary(found: rows.Overview, usual: Usual) -> Iterator[Words]:
    epochs = [row for row in found.epochs if row.state in (rows.COMMITTED, rows.DAMAGED, rows.NEWER)]
    count = len(epochs) + found.hidden
    size = _units.nbytes(sum(row.nbytes for row in epochs) + found.hidden_nbytes)
    yield f"{several(count, found.unit)}, {size}" if count else f"no {noun(found.unit)}s"
    states = collections.Counter(row.state for row in found.epochs)
    for state in (rows.DAMAGED, rows.NEWER, rows.IN_PROGRESS, rows.ABANDONED):
        if states[state]:
            yield Span(f"{_units.count(states[state])} {state}", tone(state))
    yield from _host(found)
    if found.mirror:
        unseen = "" if found.mirror_seen else " (as recorded here; --mirror or mirror= looks there)"
        yield f"mirror {_text.shown(found.mirror, 60)}{unseen}"
    for row in found.epochs:
        if row.latest:
            yield Span(f"{LATEST} latest {row.epoch}", Tone.LIVE)
    if found.metric:
        name = _text.shown(found.metric, 30)
        best = [row for row in found.epochs if row.best]
        for row in best:
            value = figure(flat(row.metrics).get(found.metric))
            yield Span(f"{BEST} best {row.epoch} by {found.mode} {name}: {value}", Tone.GOOD)
        if not best:
            yield Span(f"no {noun(found.unit)} has the metric {name}", Tone.WARN)
        if found.better is not None:
            value = _units.number(dict(found.history[found.metric])[found.better])
            yield Span(f"{found.better} was better ({value}), and was deleted", Tone.WARN)
    yield from usual.words()
    if unchecked := sum(row.state == rows.COMMITTED and not row.checked for row in found.epochs):
        yield Span(f"files of {several(unchecked, found.unit)} not looked at", Tone.FAINT)


def _legend(found: rows.Overview) -> list[Block]:
    """The meaning of the signs in the table; without signs that do not occur, or that the summary explains."""
    said = []
    if any(row.state == rows.COMMITTED for row in found.epochs):
        said.append(f"✓ committed: the {noun(found.unit)} can be restored")
    if any(RunNotes.read(row.notes).partial for row in found.epochs):
        said.append("partial: saved in the middle, a run that resumes enters it")
    if any(len(row.nodes) > 1 for row in found.epochs):
        said.append("a bar is a node's time of writing, × a damaged node, · a missing node")
    return [kinds.Summary(tuple(Span(each, Tone.FAINT) for each in said))] if said else []


def _curves(found: rows.Overview, names: Sequence[str]) -> list[Block]:
    """Each metric over all its epochs: the curve, the first and the latest value, the least and the greatest."""
    gone = {row.epoch for row in found.deleted}
    curves = [(name, found.history[name]) for name in names if len(found.history.get(name, ())) > 1]

    def at(point: tuple[int, float]) -> Words:
        where = f"at {point[0]}, deleted" if point[0] in gone else f"at {point[0]}"
        return f"{_units.number(point[1])} ", Span(where, Tone.FAINT)

    made = table(
        curves,
        (Column("metric", 0), lambda row: Span(row[0], limit=NAME)),
        (Column("curve", 0, least=8, tip=f"over its {found.unit}s"), lambda row: Cell(drawing=curve_of(row[1]))),
        (Column("first", 3, right=True), lambda row: _units.number(row[1][0][1])),
        (Column("latest", 1, right=True), lambda row: Span(_units.number(row[1][-1][1]), Tone.STRONG)),
        (Column("least", 2), lambda row: at(min(row[1], key=lambda point: (point[1], -point[0])))),
        (Column("greatest", 2), lambda row: at(max(row[1], key=lambda point: (point[1], point[0])))),
    )
    said = f"{several(len(gone), found.unit, 'deleted ')} {'is' if len(gone) == 1 else 'are'} part of the curves"
    return [made, *([faint(said)] if gone else [])] if curves else []


def metrics(found: rows.RunMetrics) -> list[Block]:
    """The metrics of a run: a row per epoch, the newest first."""

    def measured(name: str, row: rows.MetricsRow) -> Words:
        return Span(figure(flat(row.metrics).get(name)), limit=16)

    names = found.names[:COLUMNS]
    title = TextLine(Span(found.directory, Tone.STRONG, 1000), title=True)
    made = table(
        found.rows,
        (Column(found.unit, 0, right=True), lambda row: Span(str(row.epoch), Tone.STRONG)),
        (Column("", 0), lambda row: Span("deleted" if row.deleted else "", Tone.FAINT)),
        (Column("committed", 1), lambda row: "" if row.committed_ns is None else _units.when(row.committed_ns)),
        *(
            (
                measured_column(name, [figure(flat(row.metrics).get(name)) for row in found.rows], 2 + i),
                functools.partial(measured, name),
            )
            for i, name in enumerate(names)
        ),
    )
    return [title, made._replace(recent=_RECENT), *kinds.problems(found.problems)]


def leftovers(found: Sequence[rows.LeftoverRow], unit: str) -> kinds.Table:
    """A table of the leftovers of a directory."""
    return table(
        found,
        (Column("what"), lambda row: Span(row.kind, Tone.WARN, 30)),
        (Column("bytes", 1, right=True), lambda row: _units.nbytes(row.nbytes)),
        (Column("idle for", 2, right=True), lambda row: secs(row.age_secs)),
        (Column("path", 0, least=24), lambda row: row.path),
        (Column(f"{unit}s", 3, least=8), lambda row: Span(", ".join(map(str, row.epochs[:20])), limit=40)),
        (Column("detail", 4, least=20), lambda row: Span(row.detail, Tone.FAINT)),
    )


def usage(found: rows.Usage, limit: int | None = _USED, *, hint: str = "") -> list[Block]:
    """What a directory takes up, by kind and by thing; of epochs the newest `limit`. `hint`: how to see all."""
    kinds_ = found.kinds
    view: list[Block] = [
        TextLine(Span(found.directory, Tone.STRONG, 1000), title=True),
        kinds.Summary((_units.nbytes(found.nbytes), _units.several(found.files, "file", "files"), *_host(found))),
        table(
            kinds_,
            (Column("kind"), lambda row: _kind(row.kind)),
            (Column("things", 2, right=True), lambda row: _units.count(row.things)),
            (Column("bytes", 0, right=True), lambda row: _units.nbytes(row.nbytes)),
            (Column("share", 1, right=True), lambda row: kinds.share(row.nbytes, found.nbytes)),
            (Column("files", 1, right=True), lambda row: _units.count(row.files)),
            (Column("oldest", 4, tip="when it was written"), lambda row: _written(row.oldest_ns)),
            (Column("newest", 3, tip="when it was written"), lambda row: _written(row.newest_ns)),
        ),
        *kinds.problems(found.problems),
    ]
    epochs = [row for row in found.rows if row.kind == rows.COMMITTED]
    hidden = 0 if limit is None else max(len(epochs) - limit, 0)
    others = [row for row in found.rows if row.kind != rows.COMMITTED]
    shown = table(
        [*epochs[hidden:], *others[:_USED]],
        (Column(found.unit, 0, right=True), lambda row: ", ".join(map(str, row.epochs[:5]))),
        (Column("kind", 1), lambda row: _kind(row.kind)),
        (Column("bytes", 0, right=True), lambda row: _units.nbytes(row.nbytes)),
        (Column("share", 2, right=True), lambda row: kinds.share(row.nbytes, found.nbytes)),
        (Column("files", 2, right=True), lambda row: _units.count(row.files)),
        (Column("newest", 3, tip="when it was written"), lambda row: _written(row.newest_ns)),
        (Column("path", 4, least=12), lambda row: Span(row.path, Tone.FAINT)),
    )
    below: list[Block] = []
    if hidden:
        what = f"{several(hidden, found.unit, 'older ')} {'is' if hidden == 1 else 'are'}"
        size = _units.nbytes(sum(row.nbytes for row in epochs[:hidden]))
        below.append(faint(f"… {what} not shown ({size}){hint}"))
    if more := len(others) - _USED:
        below += [faint(f"… {_units.several(more, 'more thing', 'more things')}")] if more > 0 else []
    return [*view, kinds.Section(Span("What takes it up", Tone.STRONG), (*below, shown))] if found.rows else view


def goodput(found: rows.Goodput) -> list[Block]:
    """What the runs of a directory have spent their time on, and all of them together."""
    view: list[Block] = [TextLine(Span(found.directory, Tone.STRONG, 1000), title=True)]
    total = found.total
    if total is None:
        return [*view, faint(f"no {noun(found.unit)} here tells of a run"), *kinds.problems(found.problems)]
    runs = _units.several(len(found.runs), "run", "runs")
    kills = _units.several(found.kills, "kill", "kills")
    kept = Span(f"{kinds.percent(total.goodput)} of {_units.secs(total.secs)} trained and kept", Tone.GOOD)
    each = [*found.runs, total] if len(found.runs) > 1 else found.runs
    unknown = "from its newest commit to the next run: more that was lost, or nothing ran"
    shown = table(
        each,
        (Column("began", 0), lambda row: _units.when(row.began_ns) if row is not total else "all"),
        (Column("end", 1), lambda row: _end(row, row is each[len(found.runs) - 1]) if row is not total else ""),
        (Column("saves", 4, right=True, missed=True), lambda row: _units.count(row.saves)),
        (Column(found.unit, 3, right=True, tip="the newest"), lambda row: str(row.epoch) if row.saves else ""),
        (Column("trained", 0, right=True), lambda row: _units.secs(row.trained_secs)),
        (Column("blocked", 0, right=True, tip="by saves"), lambda row: _units.secs(row.blocked_secs)),
        (Column("restoring", 1, right=True, missed=True), lambda row: _units.secs(row.restoring_secs)),
        (Column("waiting", 1, right=True, tip="for saves", missed=True), lambda row: _units.secs(row.waiting_secs)),
        (Column("lost", 0, right=True, tip="at least"), lambda row: _lost(row)),
        (Column("unknown", 0, right=True, tip=unknown), lambda row: _units.secs(row.unknown_secs)),
        (Column("goodput", 0, right=True), lambda row: kinds.percent(row.goodput)),
    )
    return [*view, kinds.Summary((kept, runs, kills)), shown, *kinds.problems(found.problems)]


def _end(row: rows.RunGoodput, newest: bool) -> Words:
    if row.killed is None:
        return Span("open", Tone.LIVE) if newest else "not seen"
    return Span("killed", Tone.BAD) if row.killed else "closed"


def _lost(row: rows.RunGoodput) -> Words:
    return Span(f"≥ {_units.secs(row.lost_secs)}", Tone.BAD) if row.lost_secs else ""


def _kind(kind: str) -> Words:
    return Span(kind, STATES.get(kind, (Tone.PLAIN if kind == rows.OTHER else Tone.WARN, ""))[0], 30)


def _written(time_ns: int | None) -> Words:
    return Span("" if time_ns is None else _units.when(time_ns), Tone.FAINT)
