"""The command `epochckpt`: from what was typed to an exit code. See `epochckpt --help`, and docs/inspect.md."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Generator, Sequence

from absl import logging

from epochckpt._text import shown
from epochckpt.cli import arguments
from epochckpt.cli.output import BROKEN_PIPE, FAULT, FOUND, INTERRUPTED, MISSING, UNREACHABLE, USAGE, Output, Stop
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    EpochNotFoundError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
    NotACheckpointDirectoryError,
    UnknownNameError,
)

_CODES: tuple[tuple[type[BaseException], int], ...] = (  # the first that fits
    (UnknownNameError, MISSING),
    (InvalidArgumentError, USAGE),
    (EpochNotFoundError, MISSING),
    (NotACheckpointDirectoryError, MISSING),
    (FormatVersionError, MISSING),
    (DamagedError, FOUND),
    (FormatError, FOUND),
    (OSError, UNREACHABLE),
    (EpochCheckpointError, UNREACHABLE),
)
_LINES = 60  # of an error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: what was typed after `epochckpt`; None: of this process.

    Returns:
        The exit code, see `arguments.EXIT_CODES`.
    """
    try:
        args = arguments.parser(_version()).parse_args(argv)
    except SystemExit as end:  # help, or wrong usage, which argparse has printed
        return end.code if isinstance(end.code, int) else USAGE
    try:
        with _quiet():
            code = args.run(args, Output(args.json))
            sys.stdout.flush()
            return code
    except BrokenPipeError:
        _abandon_stdout()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Stop as stop:
        return _failed(args, stop, stop.code, stop.message)
    except Exception as error:
        code = next((code for kind, code in _CODES if isinstance(error, kind)), FAULT)
        if code == FAULT:
            return _failed(args, error, code, f"unexpected {type(error).__name__}: {error} (--debug shows where)")
        return _failed(args, error, code, str(error) or type(error).__name__)


def _failed(args: argparse.Namespace, error: BaseException, code: int, message: str) -> int:
    """Prints what went wrong, in lines that no terminal interprets."""
    if args.debug:
        traceback.print_exception(error)
    lines = message.splitlines() or [""]
    printable = [shown(line, limit=2000) for line in lines[:_LINES]]
    with contextlib.suppress(OSError):
        print(f"epochckpt {args.command}: " + "\n".join(printable), file=sys.stderr)
    return code


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Silences the library's log, which repeats what the views show; errors of other libraries still reach stderr."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _abandon_stdout() -> None:
    """The reader of stdout is gone: what is still buffered must not fail again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def _version() -> str:
    try:
        return importlib.metadata.version("epochckpt")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "unknown"
