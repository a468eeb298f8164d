"""How far long work is: one bar, on a terminal or in a notebook, for what lasts longer than `Patience.bar_delay_secs`.

Guarantees:
- log files, pipes, and processes other than the primary get nothing; the environment's TQDM_DISABLE=1 turns all off;
- no code counts for the bar alone: a thread of the bar reads numbers that are counted anyway;
- work inside of other work has no bar of its own: it counts into the outer bar.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import importlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from epochckpt import _patience, _threads
from epochckpt._lazy import jax
from epochckpt._text import shown

if TYPE_CHECKING:
    from tqdm import tqdm

_EVERY_SECS = 0.1  # how often a bar is drawn
_CELL_COLUMNS = 80  # of a bar below a notebook's cell


class Work:
    """Work on so many bytes.

    Attributes:
        notes: what else is counted, by name; see `note`.
    """

    def __init__(self, what: str, total: float | None = None, outer: Work | None = None):
        self.notes = collections.Counter[str]()
        self._what = what
        self._total = total
        self._outer = outer
        self._done = 0.0
        self._parts: list[tuple[Callable[[], float], float]] = []
        self._lock = threading.Lock()

    def advance(self, nbytes: float) -> None:
        """So many more bytes are done; any thread may say so."""
        if self._outer is not None:
            self._outer.advance(nbytes)
        with self._lock:
            self._done += nbytes

    def set(self, done: float, total: float) -> None:
        """So many bytes are done, of so many."""
        self._done = done
        self._total = total

    def follow(self, done: Callable[[], float], total: float) -> None:
        """A part of the work, of `total` bytes, whose progress `done` tells; of work whose total is known, nothing."""
        if self._outer is not None:
            self._outer.follow(done, total)
        if self._total is None:
            self._parts.append((done, total))

    def figures(self) -> tuple[float, float | None]:
        """The bytes that are done, and all of them, as far as known.

        Work that copies counts the same bytes in followed parts and in `advance`: the larger count is taken.
        """
        parts = list(self._parts)
        advanced = self._done
        done = max(advanced, sum(min(done(), total) for done, total in parts))
        total = self._total
        if total is None and parts and not advanced:
            total = sum(total for _, total in parts)
        return done, None if total is not None and done > total else total

    @contextlib.contextmanager
    def drawn(self) -> Generator[None]:
        """Draws it, within the block, if that lasts long enough."""
        began = time.time()
        over = _threads.Future[None]()
        drawing = _threads.start(lambda: self._draw(began, over))
        try:
            yield
        finally:
            over.set(None)
            if time.time() - began >= _patience.now().bar_delay_secs:
                drawing.wait(_patience.now().bar_removal_secs)

    def _draw(self, began: float, over: _threads.Future[None]) -> None:
        if over.wait(_patience.now().bar_delay_secs) and time.time() - began < _patience.now().bar_delay_secs:
            return
        done, total = self.figures()
        with bar(shown(self._what, limit=60), total, "B", unit_scale=True, leave=False) as drawn:
            while True:
                ended = over.wait(_EVERY_SECS)
                done, total = self.figures()
                if total != drawn.total:
                    drawn.reset(total)
                drawn.start_t = began
                drawn.n = done
                drawn.refresh()
                if ended:
                    return


class _CellOutput:
    """A file whose last line is shown below the cell of a notebook that runs, in place of the line before.

    What goes to a notebook's stderr is red, and many front ends stack the states of a bar that is drawn there.
    """

    encoding = "utf-8"  # tqdm asks whether it can draw blocks

    def __init__(self):
        self._display = importlib.import_module("IPython.display").display
        self._handle: Any = None

    def write(self, text: str) -> None:
        """Shows a state of the bar; tqdm begins each with a carriage return. An empty one takes the bar away."""
        _, carriage_return, line = text.rpartition("\r")
        if not carriage_return:
            return
        shown = {"text/plain": line.rstrip()}
        if self._handle is not None:
            self._handle.update(shown, raw=True)
        elif line.strip():
            self._handle = self._display(shown, raw=True, display_id=True)

    def flush(self) -> None:
        """Nothing waits to be shown."""


def bar(what: str, total: float | None, unit: str, **look: Any) -> tqdm[Any]:
    """A bar of tqdm: below the notebook's cell, or on the terminal, as wide as that, or as one that does not tell."""
    from tqdm import tqdm

    place: dict[str, Any] = {"file": sys.stderr, "dynamic_ncols": True}
    if _in_notebook():
        place = {"file": _CellOutput(), "ncols": _CELL_COLUMNS}
    else:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is no terminal
            if not os.get_terminal_size(sys.stderr.fileno()).columns:
                columns, rows = shutil.get_terminal_size()
                place |= {"dynamic_ncols": False, "ncols": columns, "nrows": rows}
    return tqdm(desc=what, total=total, unit=unit, **look, **place)


_current: contextvars.ContextVar[Work | None] = contextvars.ContextVar("epochckpt.work", default=None)


@contextlib.contextmanager
def work(what: str, total: float | None = None) -> Generator[Work]:
    """Work that may last long, on `total` bytes where that is known before; see `Work`. Also decorates a function."""
    outer = _current.get()
    made = Work(what, total, outer)
    token = _current.set(made)
    try:
        with made.drawn() if outer is None and is_shown() else contextlib.nullcontext():
            yield made
    finally:
        _current.reset(token)


def follow(done: Callable[[], float], total: float) -> None:
    """Has the work that goes on, if any, follow a part of it; see `Work.follow`."""
    if (current := _current.get()) is not None:
        current.follow(done, total)


def note(name: str, count: int) -> None:
    """Adds to what the work that goes on, if any, counts under a name."""
    if count and (current := _current.get()) is not None:
        current.notes[name] += count


def counting() -> Callable[[int], None] | None:
    """What advances the work that goes on, from any thread; None if none does."""
    current = _current.get()
    return None if current is None else current.advance


def is_shown() -> bool:
    """Whether this process draws bars: it is the primary, and its stderr is a terminal, or it is a notebook's."""
    if jax.distributed.is_initialized() and jax.process_index():
        return False
    if _in_notebook():
        return True
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # stderr is missing or closed
        return False


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
