"""`epochckpt watch`: a live run, as lines, with the saves that are under way below them on a terminal."""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from epochckpt import _units
from epochckpt.cli.commands import options_of
from epochckpt.cli.output import FOUND, MISSING, OK, Output
from epochckpt.commit import commits_of
from epochckpt.inspection import rows, scan, views
from epochckpt.inspection import watch as watching
from epochckpt.inspection.blocks import Bar, Cell, Column, Row, Tone
from epochckpt.inspection.text import BAD, FAINT, GOOD, HEAD, LIVE, WARN, Line, TextTable, safe
from epochckpt.inspection.watch import DELETED, FAILED, PRESENT, SAVED, SAVING, Event
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store

_HISTORY = 5
_STYLES = {PRESENT: FAINT, SAVED: GOOD, SAVING: LIVE, FAILED: BAD, DELETED: FAINT}
_STEP = 0.25  # without a terminal, a save has a line whenever so much more of it is written

Show = Callable[[Event, bool], None]  # an event, and whether its epoch is the best so far


def watch(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt watch`."""
    options = options_of(args)
    if args.wait:
        commits = commits_of(open_store(args.directory), StepNames.of(options))
    else:
        commits = scan.open_commits(args.directory, options)
    reached = damaged = False

    def events() -> Iterator[Event]:
        nonlocal reached
        reached = yield from watching.watch(
            commits, until=args.until, timeout_secs=args.timeout, interval_secs=args.interval, history=_HISTORY
        )

    on_terminal = output.out.is_terminal and not output.out.is_dumb_terminal and not args.json
    live = Live(console=output.out, auto_refresh=False, transient=True)
    show = _drawn(live) if on_terminal else _lines(output)
    with live if on_terminal else contextlib.nullcontext():
        for event in events():
            damaged = damaged or watching.is_damaged(event)
            if args.json:
                output.line(event)
            else:
                show(event, _is_best(args, event))
    if not reached:
        output.note(f"no epoch was committed within {_units.secs(args.timeout)}")
        return MISSING
    return FOUND if damaged else OK


def _is_best(args: argparse.Namespace, event: Event) -> bool:
    """Whether an event's epoch is the best so far."""
    if not args.metric or event.kind not in (PRESENT, SAVED):
        return False
    asked = {"metric": args.metric, "mode": args.mode, "options": options_of(args)}
    seen = scan.look(args.directory, limit=1, check=False, **asked)
    return any(row.best and row.epoch == event.row.epoch for row in seen.epochs)


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
    parts.append((9 if event.kind == SAVING else 2, safe(detail, FAINT if event.kind == SAVING else WARN, limit=300)))
    return Line(*parts)


def _progress(event: Event) -> Text:
    of = f" of {_units.nbytes(event.before.nbytes)}" if event.before is not None else ""
    share = f"{event.done:4.0%}  " if event.done is not None else ""
    return Text(f"{share}{_units.nbytes(event.row.nbytes)}{of}")


def _facts(row: rows.EpochRow) -> Iterator[tuple[int, Text]]:
    took = f" in {_units.secs(row.secs)}" if row.secs is not None else ""
    yield 1, Text(f"{_units.nbytes(row.nbytes)}{took}")
    yield 7, Text(f"blocked {_units.secs(row.blocked_secs)}" if row.blocked_secs is not None else "", FAINT)
    yield 8, safe(f"slowest {row.slowest_node}" if row.slowest_node is not None else "", FAINT, limit=60)
    for rank, (name, value) in enumerate(list(rows.flat(row.metrics).items())[:3]):
        yield 4 + rank, safe(f"{name} ", FAINT, limit=30).append_text(safe(views.figure(value), limit=12))


def _lines(output: Output) -> Show:
    """Prints one line per event, for pipes and files; of a save only now and then."""
    done: dict[str, float] = {}

    def show(event: Event, best: bool) -> None:
        attempt, share = event.row.attempt, event.done or 0.0
        if event.kind != SAVING:
            done.pop(attempt, None)
        elif share - done.get(attempt, -1.0) < _STEP:
            return
        else:
            done[attempt] = share
        output.out.print(line(event, best).whole(), soft_wrap=True)
        output.out.file.flush()

    return show


def _drawn(live: Live) -> Show:
    """Shows a line for what has happened, and below all lines the saves that are under way."""
    saving: dict[str, Event] = {}

    def show(event: Event, best: bool) -> None:
        if event.kind == SAVING:
            saving[event.row.attempt] = event
        else:
            saving.pop(event.row.attempt, None)
            live.console.print(line(event, best))
        live.update(Group(*map(under_way, saving.values())), refresh=True)

    return show


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
    return Group(Line((0, head), (1, _progress(event)), (2, safe(event.detail, FAINT))), table)
