"""`epochckpt watch`: a live run, as lines, with the saves that are under way below them on a terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

from rich.console import Group
from rich.live import Live

from epochckpt import _units
from epochckpt._metrics import flat
from epochckpt.cli.commands import options_of
from epochckpt.cli.output import FOUND, MISSING, OK, Output
from epochckpt.directory import directory_of
from epochckpt.inspection import epoch_rows, opening, rows, scan, signs
from epochckpt.inspection import watch as watching
from epochckpt.inspection.blocks import Bar, Cell, Column, Row, Span, Tone, Words
from epochckpt.inspection.text import TextTable
from epochckpt.inspection.watch import DELETED, FAILED, PRESENT, SAVED, SAVING, Event
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store

_HISTORY = 5
_TONES = {PRESENT: Tone.FAINT, SAVED: Tone.GOOD, SAVING: Tone.LIVE, FAILED: Tone.BAD, DELETED: Tone.FAINT}
_WHOLE = 10_000  # columns: in pipes, files and dumb terminals, no part of a line is left out
_STEP = 0.25  # without a terminal, a save has a line whenever so much more of it is written

Show = Callable[[Event, bool], None]  # an event, and whether its epoch is the best so far


def watch(args: argparse.Namespace, output: Output) -> int:
    """Follow a live run: epochs as they are committed, the progress of a save, saves that fail.

    Ends with Ctrl-C. --json gives a line per event.
    """
    options = options_of(args)
    if args.wait:
        epoch_directory = directory_of(open_store(args.directory), StepNames.of(options))
    else:
        epoch_directory = opening.open_directory(args.directory, options)
    on_terminal = output.out.is_terminal and not output.out.is_dumb_terminal and not args.json
    live = Live(console=output.out, auto_refresh=False, transient=True)
    show = _drawn(live) if on_terminal else _lines(output)
    newest = -1
    damaged = False
    unit = epoch_rows.unit_of(epoch_directory)
    limits = {"until": args.until, "timeout_secs": args.timeout, "interval_secs": args.interval}
    with live if on_terminal else contextlib.nullcontext():
        for event in watching.watch(epoch_directory, **limits, history=_HISTORY):
            newest = max(newest, event.row.epoch if event.kind in (PRESENT, SAVED) else -1)
            damaged = damaged or watching.is_damaged(event)
            if args.json:
                output.line(event)
            else:
                # Neither a save under way says it, nor an epoch that is damaged.
                unit = next((row.unit for row in (event.row, event.before) if row is not None and row.notes), unit)
                row = dataclasses.replace(event.row, unit=args.unit or unit)
                show(dataclasses.replace(event, row=row), _is_best(args, event))
    if args.until is None or newest < args.until:
        output.note(f"nothing was committed within {_units.secs(args.timeout)}")
        return MISSING
    return FOUND if damaged else OK


def _is_best(args: argparse.Namespace, event: Event) -> bool:
    """Whether an event's epoch is the best so far."""
    if not args.metric or event.kind not in (PRESENT, SAVED):
        return False
    arguments = {"metric": args.metric[0], "mode": args.mode, "options": options_of(args)}
    seen = scan.look(args.directory, limit=1, check=False, **arguments)
    return any(row.best and row.epoch == event.row.epoch for row in seen.epochs)


def line(event: Event, best: bool = False) -> TextTable:
    """An event as one line."""
    row = event.row
    damaged = watching.is_damaged(event)
    at = time.strftime("%H:%M:%S", time.localtime(event.time_ns / 1e9))
    kind, tone = ("damaged", Tone.BAD) if damaged else (event.kind, _TONES[event.kind])
    parts: list[tuple[int, Words]] = [(1, Span(at, Tone.FAINT)), (0, _epoch(row, kind, tone))]
    if event.kind in (SAVING, FAILED):
        parts.append((1, _progress(event)))
    elif event.kind != DELETED and not damaged:
        took = f" in {_units.secs(row.secs)}" if row.secs is not None else ""
        parts.append((1, f"{_units.nbytes(row.nbytes)}{took}"))
        if row.blocked_secs is not None:
            parts.append((7, Span(f"blocked {_units.secs(row.blocked_secs)}", Tone.FAINT)))
        if (slow := signs.slow_node(row)) is not None:
            parts.append((8, Span(f"slow node {slow.name}", Tone.WARN, 60)))
        for rank, (name, value) in enumerate(list(flat(row.metrics).items())[:3], start=4):
            parts.append((rank, (Span(f"{name} ", Tone.FAINT, 30), Span(signs.figure(value), limit=12))))
    parts.append((2, Span(f"{signs.BEST} best" if best else "", Tone.GOOD)))
    rank, tone = (9, Tone.FAINT) if event.kind == SAVING else (2, Tone.WARN)
    parts.append((rank, Span(row.detail if damaged else event.detail, tone, 300)))
    return _line(parts)


def _line(parts: Sequence[tuple[int, Words | Cell]]) -> TextTable:
    """Parts side by side, each with its rank: a narrow terminal leaves out those of the greatest rank, the last first.

    Before that, parts of the ranks 2 and 3 are shortened: details and drawings. Numbers, which are shown whole or not
    at all, have other ranks. Parts of rank 0 stay.
    """
    columns = [Column("", rank, least=10 if rank in (2, 3) else None) for rank, _ in parts]
    return TextTable(columns, [Row(tuple(part if isinstance(part, Cell) else Cell(part) for _, part in parts))])


def _epoch(row: rows.EpochRow, kind: str, tone: Tone) -> Words:
    return f"{row.unit} ", Span(str(row.epoch), Tone.STRONG), " ", Span(kind, tone)


def _progress(event: Event) -> str:
    of = f" of {_units.nbytes(event.before.nbytes)}" if event.before is not None else ""
    share = f"{event.done:4.0%}  " if event.done is not None else ""
    return f"{share}{_units.nbytes(event.row.nbytes)}{of}"


def _lines(output: Output) -> Show:
    """Prints one line per event, for pipes and files; of a save only now and then."""
    done: dict[str, float] = {}
    output.out.size = _WHOLE, 25

    def show(event: Event, best: bool) -> None:
        save_id = event.row.save_id
        share = event.done or 0.0
        if event.kind != SAVING:
            done.pop(save_id, None)
        elif share - done.get(save_id, -1.0) < _STEP:
            return
        else:
            done[save_id] = share
        output.out.print(line(event, best))
        output.out.file.flush()

    return show


def _drawn(live: Live) -> Show:
    """Shows a line for each event, and the saves under way below all lines."""
    saving: dict[str, Event] = {}

    def show(event: Event, best: bool) -> None:
        if event.kind == SAVING:
            saving[event.row.save_id] = event
        else:
            saving.pop(event.row.save_id, None)
            live.console.print(line(event, best))
        live.update(Group(*map(under_way, saving.values())), refresh=True)

    return show


def under_way(event: Event) -> TextTable:
    """A save that is under way: how much of it is written, and by which node how much."""
    row = event.row
    before = event.before
    had = {node.name: node.nbytes or 0 for node in before.nodes} if before is not None else {}
    names = list(had) + [node.name for node in row.nodes if node.name not in had]
    bar = Cell(drawing=None if event.done is None else Bar(event.done, 20, Tone.LIVE))
    strip = Cell(drawing=signs.node_strip(row, names, had) if len(names) > 1 else None)
    head: list[tuple[int, Words | Cell]] = [(0, _epoch(row, "saving", Tone.LIVE)), (1, _progress(event))]
    return _line([*head, (3, bar), (3, strip), (2, Span(event.detail, Tone.FAINT))])
