"""Makes rows and words of the things beside the epochs of a directory, see `directory.contents`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from epochckpt import _units
from epochckpt.directory.contents import Contents, Kind, Leftover, UnfinishedSave, age_secs
from epochckpt.format import paths
from epochckpt.inspection import rows
from epochckpt.inspection.rows import EpochRow, LeftoverRow, NodeRow

LIVE_SECS = 600.0
"""A save that something was written to within so many seconds counts as under way."""


class RowText(NamedTuple):
    """What the row of a thing says: its kind, and a detail, in which names in braces are filled in."""

    kind: str
    text: str


_ROWS: Mapping[Kind, RowText] = {
    Kind.EPOCH: RowText(rows.COMMITTED, ""),
    Kind.SAVE: RowText(rows.ATTEMPT, "a save"),
    Kind.ORBAX_SAVE: RowText(rows.ORBAX_ATTEMPT, "a save of stock Orbax, under way or left over"),
    Kind.EXPORT: RowText(rows.ATTEMPT, "staging of an export"),
    Kind.ROLLED_BACK: RowText(rows.ROLLED_BACK, "quarantined by rollback_to"),
    Kind.REPLACED: RowText(rows.QUARANTINED, "a damaged epoch that was replaced"),
    Kind.PARTIAL: RowText(rows.QUARANTINED, "parts of epochs that other hosts lack"),
    Kind.DIVERGED: RowText(rows.QUARANTINED, "no part of the history that the mirror has"),
    Kind.DELETED_AND_KEPT: RowText(rows.QUARANTINED, "deleted epochs, kept because of todelete_subdir"),
    Kind.SET_ASIDE: RowText(rows.QUARANTINED, "epochs that were deleted and kept"),
    Kind.MOVING: RowText(rows.QUARANTINED, "an epoch on the move to {destination}: the next run puts it there"),
    Kind.HOLDS_MOVING: RowText(rows.QUARANTINED, "what an earlier run left, with an epoch on the move in it"),
    Kind.UNCLAIMED: RowText(rows.DELETED, "staging of a run that has not begun, or has ended"),
    Kind.REMOVAL: RowText(rows.DELETED, "being removed, or left by a removal that was interrupted"),
    Kind.TAKEN_OVER: RowText(rows.DELETED, "what an earlier run left, out of sight"),
    Kind.REMOVED_EPOCH: RowText(rows.DELETED, "a deleted or replaced epoch, out of sight"),
    Kind.REMOVED_DRAFT: RowText(rows.DELETED, "a failed save, or a draft, out of sight"),
    Kind.REMOVED_STEP: RowText(rows.DELETED, "a deleted step of stock Orbax: no reader looks at it"),
    Kind.DEAD_EPOCH: RowText(
        rows.DELETED,
        "a deleted or replaced epoch, or a save that failed at its end: no reader looks at it",
    ),
    Kind.LATE_COPY: RowText(
        rows.DELETED,
        "what a run that was killed or overtaken wrote late of a deleted epoch: no reader looks at it",
    ),
    Kind.UNKNOWN: RowText(rows.FOREIGN, "not known"),
    Kind.NOT_AN_EPOCH: RowText(
        rows.FOREIGN,
        "named like an epoch, and none: neither ours nor stock Orbax's on a file system",
    ),
    Kind.NOT_LISTED: RowText(rows.FOREIGN, "named like an epoch, and none: the head names no attempt at it"),
    Kind.RENUMBERED_COPY: RowText(
        rows.FOREIGN,
        "a copy of checkpoint {numbers} under another number, which no reader looks at",
    ),
    Kind.UNLISTED_EPOCH: RowText(
        rows.FOREIGN,
        f"an epoch that {paths.HEAD} does not name, such as a copy; `epochckpt repair {{root}}` can help",
    ),
    Kind.UNLISTED_KEPT: RowText(rows.FOREIGN, f"named like what a run sets aside, but {paths.HEAD} does not name it"),
    Kind.OTHER: RowText(rows.OTHER, ""),
}
"""The kind of the row of each thing, and what the row says of it."""


@dataclasses.dataclass(frozen=True)
class LeftoverRows:
    """What was found beside the epochs."""

    attempts: list[EpochRow] = dataclasses.field(default_factory=list)  # saves that have not been committed
    others: list[LeftoverRow] = dataclasses.field(default_factory=list)
    problems: dict[str, str] = dataclasses.field(default_factory=dict)  # what could not be looked at, by path


def rows_of(contents: Contents, root: str, now_ns: int) -> LeftoverRows:
    """The rows of what a quick look finds beside the epochs of the directory `root`."""
    found = contents.leftovers()
    problems = {path or "what lies beside the epochs": problem for path, problem in found.problems.items()}
    if more := found.unlisted:
        some = ", ".join(more[:8]) + (", …" if more[8:] else "")
        what = _units.several(len(more), "more folder holds", "more folders hold")
        problems[some] = f"{what} something other than an epoch; `epochckpt du {root}` shows all"
    return LeftoverRows(
        attempts=[attempt_row(save, now_ns) for save in found.saves],
        others=[leftover_row(thing, root, now_ns) for thing in found.others],
        problems=problems,
    )


def kind_of_row(kind: Kind) -> str:
    """The kind of the row of a thing."""
    return _ROWS[kind].kind


def silence(age: float) -> str:
    """What to say of an attempt that nothing was written to for long."""
    return f"nothing was written for {_units.secs(age)}: it failed, or its job was killed"


def progress(nodes: Sequence[NodeRow]) -> str:
    """How many nodes of an attempt have written their part."""
    done = sum(n.state == "written" for n in nodes)
    began = _units.several(len(nodes), "node", "nodes")
    return f"{done} of the {began} that began {'has' if done == 1 else 'have'} written"


def state_of(*, given_up: bool, age: float) -> str:
    """Whether a save is in progress or abandoned."""
    return rows.ABANDONED if given_up or age >= LIVE_SECS else rows.IN_PROGRESS


def attempt_row(save: UnfinishedSave, now_ns: int) -> EpochRow:
    """The row of an attempt."""
    nodes = [
        NodeRow(part.node, part.nbytes, part.secs, "written" if part.is_written else "writing") for part in save.parts
    ]
    age = age_secs(save.last_ns, now_ns) or 0.0
    detail = progress(nodes)
    if save.given_up:
        detail += "; it was given up, or is of an earlier run: it is never committed"
    elif age >= LIVE_SECS:
        detail += f"; {silence(age)}"
    return EpochRow(
        save.epoch,
        state_of(given_up=save.given_up, age=age),
        detail=save.problem or detail,
        folder=save.folder,
        save_id=save.save_id,
        nodes=tuple(nodes),
        nbytes=save.nbytes,
        started_ns=save.started_ns,
        age_secs=age,
    )


def leftover_row(thing: Leftover, root: str, now_ns: int) -> LeftoverRow:
    """The row of a thing other than an epoch or an attempt."""
    row = _ROWS[thing.kind]
    detail = row.text.format(destination=thing.destination, numbers=", ".join(thing.numbers), root=root)
    detail += f" (the first {_units.count(thing.counted)} objects)" if thing.counted is not None else ""
    detail += f" ({thing.problem})" if thing.problem else ""
    return LeftoverRow(thing.path, row.kind, thing.nbytes, age_secs(thing.last_ns, now_ns), thing.epochs, detail)
