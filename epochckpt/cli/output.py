"""Where the command line writes: rows to stdout as text or JSON, remarks to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.text import Text

from epochckpt._text import shown
from epochckpt.inspection import plain
from epochckpt.inspection.text import WARN

OK = 0
FOUND = 1
USAGE = 2
MISSING = 3
UNREACHABLE = 4
VIEW = 5
FAULT = 70
INTERRUPTED = 130
BROKEN_PIPE = 141

_PIECE = 2**14  # characters


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Left to `cli.main`, which gives the exit code."""
        raise BrokenPipeError


class Output:
    """The output of one command: an answer as text, or as JSON with `as_json`; remarks."""

    def __init__(self, as_json: bool):
        self._as_json = as_json
        if sys.stdout is None:
            raise OSError("stdout is closed")
        for stream in (sys.stdout, sys.stderr):
            # A character that the stream's encoding lacks becomes `?`, not a traceback.
            with contextlib.suppress(AttributeError, OSError):
                stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
        self.out = _Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
        self._err = _Console(stderr=True, highlight=False, markup=False, emoji=False)

    def rows(self, rows: object, view: Callable[[], RenderableType]) -> None:
        """The answer of a command: rows as JSON, or their view."""
        if self._as_json:
            self.line(rows)
        else:
            with self.out.capture() as captured:
                self.out.print(view())
            self._write(captured.get())

    def line(self, rows: object) -> None:
        """Rows as one line of JSON."""
        self._write(json.dumps(plain.to_json(rows), allow_nan=False) + "\n")

    def _write(self, written: str) -> None:
        # In pieces: one large write to a pipe whose reader goes away meanwhile ends without an error.
        for first in range(0, len(written), _PIECE):
            sys.stdout.write(written[first : first + _PIECE])
            sys.stdout.flush()

    def note(self, message: str) -> None:
        """A remark beside the answer."""
        self._err.print(Text(f"epochckpt: {shown(message, limit=2000)}", WARN))
