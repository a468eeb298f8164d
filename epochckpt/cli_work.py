"""The commands that read or write much: `verify`, `gc`, `export`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from rich.console import Group, RenderableType
from rich.text import Text

from epochckpt import exporting, repairing, status, units
from epochckpt.cli_output import FOUND, OK, VIEW, Output
from epochckpt.cli_places import Place
from epochckpt.errors import EpochCheckpointError, EpochDeleted, EpochNotFoundError
from epochckpt.rows import EpochRow
from epochckpt.status import Verification
from epochckpt.text_table import BAD, FAINT, GOOD, HEAD, WARN, Fact, text

_DAMAGE = 20  # places of an epoch that are listed


def verify(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt verify`."""
    place = Place(args, output)
    rows = place.rows(args.epochs)
    found: list[Verification] = []
    with output.progress("verifying", sum(row.nbytes for row in rows)) as bar:
        for row in rows:
            try:
                one = _verified(place, row, bar.more)
                if args.repair_view:
                    one = _repaired(place, one, output)
                found.append(one)
            except EpochNotFoundError as error:  # a live run deletes epochs
                if not isinstance(error, EpochDeleted) and row.epoch in args.epochs:
                    raise
                output.note(f"epoch {row.epoch} was deleted meanwhile")
    answer = {"directory": place.commits.store.root, "epochs": [_plain(one) for one in found]}
    output.rows(answer, lambda: Group(*_verifications(found)))
    if any(not one.ok for one in found):
        return FOUND
    return VIEW if any(one.view_damage for one in found) else OK


def _repaired(place: Place, one: Verification, output: Output) -> Verification:
    """What is known of an epoch when its Orbax view has been made anew, if it was not as it should be."""
    if not one.view_damage and one.note != status.NO_VIEW:
        return one
    try:
        made = repairing.repair(place.commits, one.epoch)
    except EpochNotFoundError:
        raise
    except EpochCheckpointError as error:
        output.note(f"epoch {one.epoch}: its Orbax view stays as it is: {error}")
        return one
    output.note(f"epoch {one.epoch}: made anew for stock Orbax: {', '.join(made)}")
    return dataclasses.replace(one, note="", view_damage=())


def _verified(place: Place, row: EpochRow, progress: Callable[[int], None]) -> Verification:
    try:
        return place.leaves(row).verify(progress)
    except EpochNotFoundError:
        raise
    except EpochCheckpointError as error:  # its record cannot be read
        return Verification(row.epoch, row.nbytes, (error,))


def _plain(one: Verification) -> dict[str, Any]:
    """An answer for programs."""
    damage, view = (
        [
            {
                "path": getattr(error, "path", ""),
                "leaf": getattr(error, "leaf", None),
                "problem": getattr(error, "problem", str(error)),
            }
            for error in errors
        ]
        for errors in (one.damage, one.view_damage)
    )
    rest = {"nbytes": one.nbytes, "note": one.note, "damage": damage, "view_damage": view}
    return {"epoch": one.epoch, "ok": one.ok, **rest}


def _verifications(found: Sequence[Verification]) -> Iterator[RenderableType]:
    width = max((len(str(one.epoch)) for one in found), default=1) + len("epoch ")
    for one in found:
        said = Text.assemble(("ok", GOOD) if one.ok else ("damaged", BAD))
        value = said.append(f"  {units.nbytes(one.nbytes)}", "").append("  *" if one.note else "", FAINT)
        yield Fact(Text(f"epoch {one.epoch}", HEAD), value, width)
        yield from _places(one.damage, BAD)
        if one.view_damage:
            yield Text("  the Orbax view is damaged: stock Orbax may not read it (--repair-view)", WARN)
            yield from _places(one.view_damage, WARN)
    for note in dict.fromkeys(one.note for one in found if one.note):
        yield Fact(Text("*", FAINT), text(note, FAINT, limit=600), 1)
    if not found:
        yield Text("no epochs", FAINT)


def _places(errors: Sequence[EpochCheckpointError], style: str) -> Iterator[RenderableType]:
    for error in errors[:_DAMAGE]:
        yield Fact(Text("×", style), text(str(error), style, limit=1000), 1, 2)
    if len(errors) > _DAMAGE:
        yield Text(f"  … {units.count(len(errors) - _DAMAGE)} more", style)


def export(args: argparse.Namespace, output: Output) -> int:
    """`epochckpt export`."""
    # Orbax names a single device as jax does, so that jax is asked for its devices. It is to start the CPU's only: a
    # second process that starts an accelerator's backend breaks the training beside it.
    jax.config.update("jax_platforms", "cpu")
    place = Place(args, output)
    row = place.row(args.epoch, check=False)
    with output.progress(f"exporting epoch {row.epoch}", row.nbytes) as bar:
        done = exporting.export(
            args.directory,
            row.epoch,
            args.destination,
            args.format,
            item=args.item,
            separator=args.separator,
            allow_left_out=args.allow_left_out,
            options=place.options,
            progress=bar.more,
        )

    def view() -> RenderableType:
        said = Text.assemble(f"epoch {done.epoch} as {args.format}: {units.nbytes(done.nbytes)} in ", text(done.path))
        left = [
            Fact(text(item), text(", ".join(f"{leaf}: {why}" for leaf, why in leaves.items()), limit=2000), 12, 2)
            for item, leaves in done.left_out.items()
        ]
        return Group(said, *([Text("left out:"), *left] if left else []))

    output.rows(done, view)
    return OK
