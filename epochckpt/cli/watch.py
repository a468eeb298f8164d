"""`epochckpt watch`: a live run, as lines, with the saves that are under way below them on a terminal."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Generator, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from epochckpt import _units
from epochckpt.cli.output import FOUND, MISSING, OK, Output
from epochckpt.cli.resolve import options_of
from epochckpt.commit import Commits, commits_of
from epochckpt.inspection import rows, scan, views
from epochckpt.inspection import watch as watching
from epochckpt.inspection.blocks import Bar, Cell, Column, Row, Tone
from epochckpt.inspection.rows import EpochRow
from epochckpt.inspection.text.table import BAD, FAINT, GOOD, HEAD, LIVE, WARN, Line, TextTable, text
from epochckpt.inspection.watch import DELETED, FAILED, PRESENT, SAVED, SAVING, Event
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store

_HISTORY = 5
_STYLES = {PRESENT: FAINT, SAVED: GOOD, SAVING: LIVE, FAILED: BAD, DELETED: FAINT}
_STEP = 0.25  # where nothing can be drawn over, a save has a line whenever so much more of it is done


def watch(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt watch`."""
    commits = _commits(args)
    events = watching.watch(
        commits,
        until=args.until,
        timeout_secs=args.timeout,
        interval_secs=args.interval,
        history=_HISTORY,
    )
    best = _best_of(args)
    drawn = output.out.is_terminal and not output.out.is_dumb_terminal and not args.json
    damaged = False
    with _live(output.out) if drawn else contextlib.nullcontext(_Lines(output)) as show:
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                reached = bool(end.value)
                break
            damaged = damaged or watching.is_damaged(event)
            if args.json:
                output.line(event)
            else:
                show(event, best(event))
    if not reached:
        output.note(f"no epoch was committed within {_units.secs(args.timeout)}")
        return MISSING
    return FOUND if damaged else OK


def _commits(args: argparse.Namespace) -> Commits:
    options = options_of(args)
    if args.wait:
        return commits_of(open_store(args.directory), StepNames.of(options))
    return scan.open_commits(args.directory, options)


def _best_of(args: argparse.Namespace) -> Callable[[Event], bool]:
    """Tells whether an event's epoch is the best so far."""

    def best(event: Event) -> bool:
        if not args.metric or event.kind not in (PRESENT, SAVED):
            return False
        options = options_of(args)
        seen = scan.look(args.directory, metric=args.metric, mode=args.mode, limit=1, options=options, check=False)
        return any(row.best and row.epoch == event.row.epoch for row in seen.epochs)

    return best


def line(event: Event, best: bool = False) -> Line:
    """An event as one line."""
    row = event.row
    at = time.strftime("%H:%M:%S", time.localtime(event.time_ns / 1e9))
    damaged = watching.is_damaged(event)
    kind, style = ("damaged", BAD) if damaged else (event.kind, _STYLES[event.kind])
    parts = [(0, Text(at, FAINT)), (0, Text.assemble("epoch ", (str(row.epoch), HEAD), " ", (kind, style)))]
    if event.kind in (SAVING, FAILED):
        parts.append((1, _progress(event)))
    elif event.kind != DELETED and not damaged:
        parts += _facts(row)
    parts.append((2, Text(f"{views.BEST} best" if best else "", GOOD)))
    detail = row.detail if damaged else event.detail
    parts.append((9 if event.kind == SAVING else 2, text(detail, FAINT if event.kind == SAVING else WARN, limit=300)))
    return Line(*parts)


def _progress(event: Event) -> Text:
    of = f" of {_units.nbytes(event.before.nbytes)}" if event.before is not None else ""
    share = f"{event.done:4.0%}  " if event.done is not None else ""
    return Text(f"{share}{_units.nbytes(event.row.nbytes)}{of}")


def _facts(row: EpochRow) -> Iterator[tuple[int, Text]]:
    took = f" in {_units.secs(row.secs)}" if row.secs is not None else ""
    yield 1, Text(f"{_units.nbytes(row.nbytes)}{took}")
    yield 7, Text(f"blocked {_units.secs(row.blocked_secs)}" if row.blocked_secs is not None else "", FAINT)
    yield 8, text(f"slowest {row.slowest_node}" if row.slowest_node is not None else "", FAINT, limit=60)
    for rank, (name, value) in enumerate(list(rows.flat(row.metrics).items())[:3]):
        yield 4 + rank, text(f"{name} ", FAINT, limit=30).append_text(text(views.figure(value), limit=12))


class _Lines:
    """One line per event, for what is no terminal: of a save only now and then.

    Args:
        output: where to.
    """

    def __init__(self, output: Output):
        self._output = output
        self._shown: dict[str, float] = {}

    def __call__(self, event: Event, best: bool) -> None:
        if event.kind == SAVING:
            done = event.done or 0.0
            before = self._shown.get(event.row.attempt)
            if before is not None and done - before < _STEP:
                return
            self._shown[event.row.attempt] = done
        else:
            self._shown.pop(event.row.attempt, None)
        self._output.out.print(line(event, best).whole(), soft_wrap=True)
        self._output.out.file.flush()


class _Drawn:
    """Lines for what has happened, and below them what is under way.

    Args:
        live: draws.
    """

    def __init__(self, live: Live):
        self._live = live
        self._saving: dict[str, Event] = {}

    def __call__(self, event: Event, best: bool) -> None:
        if event.kind == SAVING:
            self._saving[event.row.attempt] = event
        else:
            self._saving.pop(event.row.attempt, None)
            self._live.console.print(line(event, best))
        self._live.update(Group(*(under_way(saving) for saving in self._saving.values())), refresh=True)


def under_way(event: Event) -> RenderableType:
    """A save that is under way: how much of it is written, and by which node how much."""
    row, before = event.row, event.before
    had = {node.name: node.nbytes for node in before.nodes} if before is not None else {}
    head = Text.assemble("epoch ", (str(row.epoch), HEAD), " ", ("saving", LIVE))
    names = list(had) + [node.name for node in row.nodes if node.name not in had]
    strip = views.node_strip(row, names, had) if len(names) > 1 else None
    table = TextTable(
        [Column("all" if strip else "", least=10), views.strip_column(len(names))],
        [Row((Cell(drawing=Bar(event.done or 0.0, 40, Tone.LIVE)), Cell(drawing=strip)))],
        indent=2,
    )
    return Group(Line((0, head), (1, _progress(event)), (2, text(event.detail, FAINT))), table)


@contextlib.contextmanager
def _live(console: Console) -> Generator[_Drawn]:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _Drawn(live)
