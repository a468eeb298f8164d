"""From what was typed to the directory and the epochs that it names."""

from __future__ import annotations

import argparse

import orbax.checkpoint as ocp

from epochckpt.cli.output import Output
from epochckpt.errors import InvalidArgumentError, UnknownNameError
from epochckpt.inspection.directory import Inspection, inspect
from epochckpt.inspection.epoch import EpochInspection
from epochckpt.inspection.rows import DAMAGED

_NEWER = 5


def options_of(args: argparse.Namespace) -> ocp.CheckpointManagerOptions:
    """The options that say how epochs' folders are named."""
    return ocp.CheckpointManagerOptions(
        step_prefix=args.step_prefix, step_format_fixed_length=args.step_format_fixed_length, read_only=True
    )


def opened(args: argparse.Namespace, directory: str | None = None) -> Inspection:
    """The directory of a command, or another one that it names."""
    return inspect(directory or args.directory, metric=args.metric or None, mode=args.mode, options=options_of(args))


def epoch_of(run: Inspection, asked: int | str, output: Output) -> EpochInspection:
    """One epoch: a number, `latest` or `best`. Raises UnknownNameError or EpochNotFoundError if there is none."""
    if isinstance(asked, int):
        return run[asked]
    if asked == "best" and run.metric is None:
        raise InvalidArgumentError("`best` needs --metric NAME: by which metric?")
    seen = run.overview(1)
    found = next((row.epoch for row in seen.epochs if (row.best if asked == "best" else row.latest)), None)
    if found is None:
        why = seen.problems.get("") or "no epoch can be used"
        raise UnknownNameError(f"{run.directory}: no {asked} epoch: {why}")
    newer = [row.epoch for row in seen.epochs if row.state == DAMAGED and row.epoch > found]
    if asked == "latest" and newer:
        output.note(f"newer, but damaged: {', '.join(map(str, newer[-_NEWER:]))}; see `epochckpt ls`")
    return run[found]
