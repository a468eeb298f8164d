"""The views of a directory: its epochs at a glance, what takes up storage, what its runs have spent their time on."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence

from epochckpt import _text, _units
from epochckpt._metrics import flat
from epochckpt.inspection import blocks as kinds
from epochckpt.inspection import rows
from epochckpt.inspection.blocks import Block, Cell, Column, Line, Mark, Span, Tone, Words, secs, table
from epochckpt.inspection.signs import (
    BEST,
    HELD_UP,
    LATEST,
    STATES,
    UNKNOWN,
    faint,
    figure,
    node_strip,
    slow_node,
    strip_column,
    tone,
)

_RECENT = 20  # epochs that a page shows before it folds
_COLUMNS = 12  # metrics that have a column and a curve
_NAME = 40  # characters of the name of a metric
_HEAD = 10  # of them, above a column where there is no room
_VALUE = 24  # characters of a value that is not shortened
_WIDE = 40  # bars of a curve
_BLOCKED = 0.1  # seconds by which a save that held training holds it longer than most
_NODES = 12  # damaged ones that a remark names
_USED = 50  # epochs, and other things, whose use of storage is listed


def _unusual(values: Sequence[float | None], least: float) -> tuple[float | None, set[int]]:
    """The median, and which values are greater than twice that, and by at least so much."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None, set()
    median = statistics.median(known)
    far = max(2 * median, median + least)
    return median, {i for i, value in enumerate(values) if value is not None and value > far}


class _Usual:
    """What most epochs of a directory have in common: it is said once, and in the rows of those that differ."""

    def __init__(self, found: rows.Overview):
        self.rows = [row for row in found.epochs if row.state == rows.COMMITTED]
        sizes = collections.Counter(_units.nbytes(row.nbytes) for row in self.rows)
        size, count = sizes.most_common(1)[0] if sizes else ("", 0)
        self.nbytes = size if 2 * count > len(self.rows) > 1 else ""  # the size that more than half of them have
        self.secs, slow = _unusual([row.secs for row in self.rows], HELD_UP)
        self.blocked, held = _unusual([row.blocked_secs for row in self.rows], _BLOCKED)
        few = len(self.rows) < 2
        self._slow = {self.rows[i].folder for i in range(len(self.rows)) if few or i in slow}
        self._held = {self.rows[i].folder for i in range(len(self.rows)) if few or i in held}

    def size_of(self, row: rows.EpochRow) -> str:
        size = _units.nbytes(row.nbytes)
        return "" if size == self.nbytes else size

    def secs_of(self, row: rows.EpochRow) -> str:
        return secs(row.secs) if row.folder in self._slow else ""

    def blocked_of(self, row: rows.EpochRow) -> str:
        return secs(row.blocked_secs) if row.folder in self._held else ""

    def words(self) -> Iterator[Words]:
        """It in words, of several epochs."""
        if len(self.rows) < 2:
            return
        if self.nbytes:
            yield f"{self.nbytes} each"
        if self.secs is not None:
            blocked = "" if self.blocked is None else f", training blocked {_units.secs(self.blocked)}"
            yield f"saved in {_units.secs(self.secs)}{blocked}"


def overview(found: rows.Overview, *, hint: str = "") -> list[Block]:
    """A directory: its epochs and attempts, and what else lies there; `hint` says how to see epochs not shown."""
    usual = _Usual(found)
    view: list[Block] = [
        Line(Span(found.directory, Tone.STRONG, 1000), title=True),
        kinds.Summary(tuple(_summary(found, usual))),
    ]
    if found.hidden:
        size = f" ({_units.nbytes(found.hidden_nbytes)})" if found.hidden_nbytes else ""
        count = several(found.hidden, found.unit, "older ")
        view.append(faint(f"… {count}{size} {'is' if found.hidden == 1 else 'are'} not shown{hint}"))
    names = _metrics(found)
    view += _curves(found, names[:_COLUMNS])
    if found.epochs:
        view.append(table(found.epochs, *epoch_columns(found), below=_remark)._replace(recent=_RECENT))
        view += _legend(found)
    if more := names[_COLUMNS:]:
        view.append(faint(f"{_units.several(len(more), 'more metric', 'more metrics')}: {', '.join(more[:_COLUMNS])}"))
    view += kinds.problems(found.problems)
    if found.leftovers:
        size = _units.nbytes(sum(row.nbytes for row in found.leftovers))
        count = _units.several(len(found.leftovers), "thing", "things")
        heading = f"Also here, and part of no {noun(found.unit)}: {count}, {size}"
        view.append(kinds.Section(Span(heading, Tone.STRONG), (leftovers(found.leftovers, found.unit),), open=False))
    return view


def noun(unit: str) -> str:
    """What there are several of: an epoch, or the checkpoint of a step."""
    return "checkpoint" if unit == "step" else unit


def several(count: int, unit: str, kind: str = "") -> str:
    """How many there are: `3 older epochs`, `1 checkpoint`."""
    return _units.several(count, f"{kind}{noun(unit)}", f"{kind}{noun(unit)}s")


def _host(found: rows.Overview | rows.Usage) -> Iterator[Span]:
    if found.host:
        yield Span(f"only the part of one host, {_text.shown(found.host, 60)}", Tone.WARN)


def _summary(found: rows.Overview, usual: _Usual) -> Iterator[Words]:
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
    """What the signs in the table mean, as far as they are there and the summary has not said it."""
    said = []
    if any(row.state == rows.COMMITTED for row in found.epochs):
        said.append(f"✓ committed: the {noun(found.unit)} can be restored")
    if any((row.notes or {}).get("partial") for row in found.epochs):
        said.append("partial: saved in the middle, a run that resumes enters it")
    if any(len(row.nodes) > 1 for row in found.epochs):
        said.append("a bar is the time that a node wrote, × a damaged node, · one that is not in it")
    return [kinds.Summary(tuple(Span(each, Tone.FAINT) for each in said))] if said else []


def _metrics(found: rows.Overview) -> list[str]:
    """The metrics that a view shows: those that were asked for, or all, and first the one that decides the best."""
    known = dict.fromkeys(name for row in found.epochs for name in flat(row.metrics)) | {**found.history}
    return [name for name in found.asked if name in known] or sorted(known, key=lambda name: name != found.metric)


def _curves(found: rows.Overview, names: Sequence[str]) -> list[Block]:
    """Each metric over all epochs that have it: its curve, where it began, where it is, its least and its greatest."""
    gone = {row.epoch for row in found.deleted}
    curves = [(name, found.history[name]) for name in names if len(found.history.get(name, ())) > 1]

    def at(point: tuple[int, float]) -> Words:
        where = f"at {point[0]}, deleted" if point[0] in gone else f"at {point[0]}"
        return f"{_units.number(point[1])} ", Span(where, Tone.FAINT)

    made = table(
        curves,
        (Column("metric", 0), lambda each: Span(each[0], limit=_NAME)),
        (Column("curve", 0, least=8, tip=f"over its {found.unit}s"), lambda each: Cell(drawing=_curve(each[1]))),
        (Column("first", 3, right=True), lambda each: _units.number(each[1][0][1])),
        (Column("latest", 1, right=True), lambda each: Span(_units.number(each[1][-1][1]), Tone.STRONG)),
        (Column("least", 2), lambda each: at(min(each[1], key=lambda point: (point[1], -point[0])))),
        (Column("greatest", 2), lambda each: at(max(each[1], key=lambda point: (point[1], point[0])))),
    )
    said = f"{several(len(gone), found.unit, 'deleted ')} {'is' if len(gone) == 1 else 'are'} part of the curves"
    return [made, *([faint(said)] if gone else [])] if curves else []


def runs(found: rows.RunsOverview) -> list[Block]:
    """Runs side by side: what goes on in each, and one metric of all of them."""
    now, metric = time.time_ns(), found.metric
    states = collections.Counter(row.state for row in found.runs)
    tones = {rows.DAMAGED: Tone.BAD, "stale": Tone.WARN, "ended": Tone.WARN, "finished": Tone.GOOD}
    tones["closed"] = Tone.PLAIN
    said: list[Words] = [_units.several(len(found.runs), "run", "runs")]
    said += [Span(f"{_units.count(count)} {name}", tones.get(name, Tone.LIVE)) for name, count in states.items()]
    said.append(_units.nbytes(sum(row.nbytes for row in found.runs)))
    values = {row.name: row.best_value for row in found.runs if row.best_value is not None}
    winner = (min if found.mode == "min" else max)(values, key=lambda name: values[name], default=None)
    if winner is not None:
        figures = f"{_text.shown(metric, 30)}: {_units.number(values[winner])}"
        said.append(Span(f"{BEST} best {_text.shown(winner, 60)} by {found.mode} {figures}", Tone.GOOD))

    def age(row: rows.DirectoryRow) -> str:
        return "" if row.committed_ns is None else _units.age((now - row.committed_ns) / 1e9)

    def newest(row: rows.DirectoryRow, name: str) -> Words:
        value = row.metrics.get(name)
        if value is None:
            return ""
        return Span(_units.number(value), Tone.STRONG if math.isfinite(value) else Tone.BAD)

    def best(row: rows.DirectoryRow) -> Words:
        if row.best_value is None:
            return ""
        tone = Tone.GOOD if row.name == winner else Tone.PLAIN
        where = f" at {row.best}"
        if row.better is not None:
            where += f" ({_units.number(dict(row.history[metric])[row.better])} at {row.better}, deleted)"
        return Span(_units.number(row.best_value), tone), Span(where, Tone.FAINT)

    def damage(row: rows.DirectoryRow) -> str:
        return f"{len(row.damaged)} damaged" if row.damaged and row.state != rows.DAMAGED else ""

    def curve(row: rows.DirectoryRow) -> Cell:
        points = row.history.get(metric, ())
        return Cell(drawing=_curve(points)) if len(points) > 1 else Cell()

    def trained(row: rows.DirectoryRow) -> str:
        return "" if row.trained_secs is None else _units.secs(row.trained_secs)

    def rank(name: str, usual: int) -> int:
        return 0 if name == found.sort else usual  # what rows are ordered by is never left out

    def measured(name: str) -> Column:
        tip = f"of the latest {' or '.join(map(noun, units))}"
        return Column(_text.shown(name, _NAME), rank(name, 1), right=True, tip=tip)

    def configured(name: str) -> tuple[Column, kinds.Cells[rows.DirectoryRow]]:
        values = [row.config[name] for row in found.runs if name in row.config]
        right = all(isinstance(value, int | float) for value in values)
        column = _measures(name, map(figure, values), rank(name, 2))
        return column._replace(right=right, tip="of the config"), lambda row: Span(
            figure(row.config.get(name)), limit=24
        )

    units = list(dict.fromkeys(row.unit for row in found.runs)) or ["epoch"]
    shown = dict.fromkeys(found.differing)
    measures = [metric]
    if any(found.sort in row.metrics for row in found.runs):
        measures = list(dict.fromkeys([metric, found.sort]))
    elif any(found.sort in row.config for row in found.runs):
        shown[found.sort] = None
    names = sorted(shown, key=lambda name: name != found.sort)
    made = table(
        found.runs,
        (Column("run", 0, least=20), lambda row: Span(row.name, Tone.STRONG)),
        (Column("", 0), lambda row: Span(BEST if row.name == winner else "", Tone.GOOD)),
        (Column("state", 0), lambda row: Cell(Span(row.state, tones.get(row.state, Tone.LIVE)), tip=row.detail)),
        (Column("", 0), lambda row: Cell(Span(damage(row), Tone.BAD), tip=damage(row) and "damaged epochs")),
        (
            Column("latest", rank("latest", 1), right=True, tip=" or ".join(units)),
            lambda row: "" if row.latest is None else str(row.latest),
        ),
        (Column("age", rank("age", 2), right=True), lambda row: Span(age(row), Tone.FAINT)),
        (Column("trained", rank("trained", 3), right=True, tip="in all, as the runner noted"), trained),
        *((measured(name), lambda row, name=name: newest(row, name)) for name in measures),
        (Column("best", rank("best", 1), right=True), best),
        (Column("curve", 1, least=8), curve),
        *(configured(name) for name in names[:_COLUMNS]),
        (
            Column(" or ".join(f"{noun(unit)}s" for unit in units), rank("epochs", 4), right=True),
            lambda row: _units.count(row.epochs),
        ),
        (Column("bytes", rank("bytes", 5), right=True), lambda row: _units.nbytes(row.nbytes)),
        (Column("why", 3, least=16), lambda row: Span(row.detail, Tone.FAINT)),
    )
    title = Line(Span(found.directory, Tone.STRONG, 1000), title=True)
    return [title, kinds.Summary(tuple(said)), made, *kinds.problems(found.problems)]


def _measures(name: str, values: Iterable[str], rank: int) -> Column:
    """The column of a metric, or of a value of a config. Where there is no room, its head is shortened, no value is."""
    widest = max((min(len(value), _VALUE) for value in values), default=0)
    return Column(_text.shown(name, _NAME), rank, right=True, least=max(widest, _HEAD), tip=name, missed=True)


def metrics(found: rows.RunMetrics) -> list[Block]:
    """The metrics of a run: a row per epoch, the newest first."""

    def measured(name: str) -> kinds.Cells[rows.MetricsRow]:
        return lambda row: Span(figure(flat(row.metrics).get(name)), limit=16)

    names = found.names[:_COLUMNS]
    title = Line(Span(found.directory, Tone.STRONG, 1000), title=True)
    made = table(
        found.rows,
        (Column(found.unit, 0, right=True), lambda row: Span(str(row.epoch), Tone.STRONG)),
        (Column("", 0), lambda row: Span("deleted" if row.deleted else "", Tone.FAINT)),
        (Column("committed", 1), lambda row: "" if row.committed_ns is None else _units.when(row.committed_ns)),
        *(
            (_measures(name, [figure(flat(row.metrics).get(name)) for row in found.rows], 2 + i), measured(name))
            for i, name in enumerate(names)
        ),
    )
    return [title, made._replace(recent=_RECENT), *kinds.problems(found.problems)]


def _curve(points: Sequence[tuple[int, float]]) -> kinds.Strip:
    """A bar for each epoch; of many, one for the mean of some that follow each other."""
    share = -(-len(points) // _WIDE)
    groups = [points[first : first + share] for first in range(0, len(points), share)]
    means = [math.fsum(value / len(group) for _, value in group) for group in groups]
    low, high = min(means), max(means)
    marks = []
    for group, mean in zip(groups, means, strict=True):
        level = kinds.ratio(mean / 2 - low / 2, high / 2 - low / 2) if high > low else 0.5  # halves do not overflow
        numbers = f"{group[0][0]}" if len(group) == 1 else f"{group[0][0]} to {group[-1][0]}"
        # Of bars that share a place, the last is drawn; also the least value has a bar.
        marks.append(Mark(max(level, 0.02), Tone.PLAIN, len(marks), f"at {numbers}: {_units.number(mean)}"))
    return kinds.Strip(tuple(marks))


def epoch_columns(found: rows.Overview) -> list[tuple[Column, kinds.Cells[rows.EpochRow]]]:
    """The columns of the epochs of a directory, in their order, each with what makes its cells: for every view."""
    usual = _Usual(found)
    # Nodes of the newest epoch come first, in their order, then those that only older epochs have.
    nodes = list(dict.fromkeys(node.name for row in reversed(found.epochs) for node in row.nodes))
    mixed = any(row.writer != "epochckpt" for row in found.epochs)
    before = {node.name: node.nbytes or 0 for row in found.epochs if row.latest for node in row.nodes}
    now = time.time_ns()

    def measured(name: str) -> kinds.Cells[rows.EpochRow]:
        def show(row: rows.EpochRow) -> Cell:
            value = figure(flat(row.metrics).get(name))
            tip = f"{value}, attached by {row.sources[name]}" if name in row.sources else value
            return Cell(Span(value, Tone.GOOD if row.best and name == found.metric else Tone.PLAIN, 16), tip=tip)

        return show

    def state(row: rows.EpochRow) -> Cell:
        tone, meaning = STATES.get(row.state, UNKNOWN)
        if (row.notes or {}).get("partial"):
            return Cell(Span("partial", Tone.WARN), tip="saved in the middle of it; a run that resumes enters it")
        return Cell(Span("✓" if row.state == rows.COMMITTED else row.state, tone), tip=meaning)

    def marks(row: rows.EpochRow) -> Cell:
        words = Span(LATEST if row.latest else "", Tone.LIVE), Span(BEST if row.best else "", Tone.GOOD)
        return Cell(words, tip=" ".join(["latest"] * row.latest + ["best"] * row.best))

    def age(row: rows.EpochRow) -> Cell:
        since = row.age_secs if row.committed_ns is None else (now - row.committed_ns) / 1e9
        tip = "" if row.committed_ns is None else f"committed {_units.when(row.committed_ns)}"
        return Cell(Span("" if since is None else _units.age(since), Tone.FAINT), tip=tip)

    def slowest(row: rows.EpochRow) -> Words:
        node = slow_node(row)
        return () if node is None else (Span(node.name, Tone.WARN, 60), f" {_units.secs(node.secs)}")

    return [
        (Column(found.unit, 0, right=True), lambda row: Span(str(row.epoch), Tone.STRONG)),
        (Column("", 0), marks),
        (Column("", 0), state),
        (Column("age", 0, right=True, tip="since the commit, or since the last write of a save"), age),
        *(
            (_measures(name, [figure(flat(row.metrics).get(name)) for row in found.epochs], 1 + i), measured(name))
            for i, name in enumerate(_metrics(found)[:_COLUMNS])
        ),
        (
            strip_column(len(nodes)),
            lambda row: Cell(drawing=node_strip(row, nodes, before) if len(nodes) > 1 and row.nodes else None),
        ),
        (Column("slow node", 7, least=14, tip="it took twice as long as most, and held up the commit"), slowest),
        (Column("bytes", 2, right=True, tip="of its files, all nodes together"), usual.size_of),
        (Column("took", 3, right=True, tip="from the call of save to the commit"), usual.secs_of),
        (Column("blocked", 7, right=True, tip="how long the training thread waited"), usual.blocked_of),
        (Column("by", 9), lambda row: Span(row.writer if mixed else "", Tone.FAINT)),
        (Column("in", 5, tip="the directory itself (local), its mirror, or both"), lambda row: row.tier),
    ]


def _remark(row: rows.EpochRow) -> Words:
    """What is shown below the row of an epoch."""
    damage = "; ".join(f"{node.name}: {node.detail}" for node in row.nodes[:_NODES] if node.detail)
    return Span(row.detail or damage, Tone.PLAIN if row.state == rows.COMMITTED else tone(row.state), 600)


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
    view: list[Block] = [Line(Span(found.directory, Tone.STRONG, 1000), title=True)]
    total = found.total
    if total is None:
        return [*view, faint(f"no {noun(found.unit)} here tells of a run"), *kinds.problems(found.problems)]
    runs, kills = _units.several(len(found.runs), "run", "runs"), _units.several(found.kills, "kill", "kills")
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


def _end(row: rows.RunRow, newest: bool) -> Words:
    if row.killed is None:
        return Span("open", Tone.LIVE) if newest else "not seen"
    return Span("killed", Tone.BAD) if row.killed else "closed"


def _lost(row: rows.RunRow) -> Words:
    return Span(f"≥ {_units.secs(row.lost_secs)}", Tone.BAD) if row.lost_secs else ""


def _kind(kind: str) -> Words:
    return Span(kind, STATES.get(kind, (Tone.PLAIN if kind == rows.OTHER else Tone.WARN, ""))[0], 30)


def _written(time_ns: int | None) -> Words:
    return Span("" if time_ns is None else _units.when(time_ns), Tone.FAINT)
