"""The command `epochckpt`: from a command line to an exit code. See `epochckpt --help`, and docs/inspect.md."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from absl import logging

from epochckpt import _text, errors
from epochckpt.cli import arguments
from epochckpt.cli.output import BROKEN_PIPE, FAULT, FOUND, INTERRUPTED, MISSING, UNREACHABLE, USAGE, Output
from epochckpt.storage import with_settings

_CODES = {  # the first that fits
    errors.UnknownNameError: MISSING,
    errors.InvalidArgumentError: USAGE,
    errors.EpochNotFoundError: MISSING,
    errors.NotACheckpointDirectoryError: MISSING,
    errors.FormatVersionError: MISSING,
    errors.DamagedError: FOUND,
    errors.FormatError: FOUND,
    errors.EpochCheckpointError: UNREACHABLE,
    OSError: UNREACHABLE,
}
_LINES = 60  # of an error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line, by default the one of this process; returns one of `arguments.EXIT_CODES`."""
    try:
        args = arguments.parser().parse_args(argv)
    except SystemExit as end:  # help, or wrong usage, which argparse has printed
        return end.code if isinstance(end.code, int) else USAGE
    # The library's log repeats what the views show. Errors of other libraries still reach stderr.
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        _take_store(args)
        code = args.run(args, Output(args.json))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _abandon_stdout()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _failed(args, error)
    finally:
        logging.set_verbosity(verbosity)


def _take_store(args: argparse.Namespace) -> None:
    """Gives the settings of `--store` to the buckets that a command names."""
    if not args.store:
        return
    given = {
        name: place for name in ("directory", "other", "destination", "mirror") if (place := getattr(args, name, None))
    }
    places = {name: with_settings(place, args.store) for name, place in given.items()}
    if places == given:
        raise errors.InvalidArgumentError(f"--store applies to bucket URLs only; {args.directory} is a local path")
    vars(args).update(places)


def _failed(args: argparse.Namespace, error: Exception) -> int:
    """Prints an error, in lines that no terminal interprets; returns its exit code."""
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), FAULT)
    message = str(error) or type(error).__name__
    if code == FAULT:
        message = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
    if args.debug:
        traceback.print_exception(error)
    printable = [_text.shown(line, limit=2000) for line in message.splitlines()[:_LINES]]
    with contextlib.suppress(OSError):
        print(f"epochckpt {args.command}: " + "\n".join(printable), file=sys.stderr)
    return code


def _abandon_stdout() -> None:
    """Redirects stdout, whose reader is gone: the rest of its buffer must not fail again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
