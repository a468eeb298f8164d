"""Time that passes at once, for code that asks `time.monotonic` how long something has taken."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
import pytest
from etils import epath


def passing(patch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that has so many seconds pass on the clock of this process, until the end of the test."""
    monotonic = time.monotonic
    passed = [0.0]

    def passes(secs: float) -> None:
        passed[0] += secs

    patch.setattr(time, "monotonic", lambda: monotonic() + passed[0])
    return passes


class SlowHandler(ocp.CheckpointHandler):
    """Holds training until `args.wait` returns; what it does after that takes only a moment."""

    def save(self, directory: epath.Path, args: Any) -> None:
        args.wait()
        (directory / "state").write_text("saved")

    def restore(self, directory: epath.Path, args: Any = None) -> str:
        return (directory / "state").read_text()

    def finalize(self, directory: epath.Path) -> None:
        threading.Event().wait(0.05)  # more than no time


@ocp.args.register_with_handler(SlowHandler, for_save=True)
@dataclasses.dataclass
class SlowSave(ocp.args.CheckpointArgs):
    """What `SlowHandler` saves."""

    wait: Callable[[], None]
