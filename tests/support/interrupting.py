"""Does something at any one line, or bytecode, of code under test: what Ctrl-C and signal handlers do, by count.

for place in itertools.count(1):
    if not interrupt(manager_module, place, lambda: manager.save(1, args=…), action=ctrl_c):
        break  # the call has fewer places than that
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import Any


def ctrl_c() -> None:
    """What Python's own handler of SIGINT does."""
    raise KeyboardInterrupt


def interrupt(
    modules: Iterable[ModuleType],
    place: int,
    call: Callable[[], Any],
    action: Callable[[], None],
    *,
    opcodes: bool = False,
) -> bool:
    """Makes a call, and before one line of it has something done in the same thread, as Python does with a signal.

    Args:
        modules: whose lines are counted.
        place: which of the lines that are run, from 1.
        call: the call; KeyboardInterrupt that leaves it is the end of it.
        action: what is done.
        opcodes: count bytecodes, of which a line has several.

    Returns:
        Whether there was such a line.
    """
    files = {module.__file__ for module in modules}
    before, left = sys.gettrace(), place

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = opcodes
        if event == ("opcode" if opcodes else "line"):
            left -= 1
            if left == 0:
                sys.settrace(before)
                action()
        return look if left > 0 else None

    sys.settrace(look)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left <= 0
