"""What the training thread hands to the background for one save, and what comes of it."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

from epochckpt import worker
from epochckpt.coordination import Deadline
from epochckpt.plan import ItemPlan
from epochckpt.records import ItemRecord
from epochckpt.snapshot import Buffer


@dataclasses.dataclass
class Attempt:
    """What the training thread hands over.

    Attributes:
        epoch: its number.
        number: how often this epoch had been tried before.
        plans: one per array item.
        buffers: one list per array item; dropped once written.
        files: (item, content) of items that are one file, on the node that writes them.
        items: the items as they will be recorded.
        digest: gives the digest of the plan; computed in the background.
        copied_bytes: host memory that the snapshot holds.
        held_secs: how long the training thread was held.
    """

    epoch: int
    number: int
    plans: Sequence[ItemPlan]
    buffers: list[list[Buffer]]
    files: Sequence[tuple[str, bytes]]
    items: dict[str, ItemRecord]
    digest: Callable[[], str]
    default_item: bool
    metrics: Any
    custom_metadata: dict[str, Any]
    copied_bytes: int
    replaces_damaged: bool
    deadline: Deadline
    started_ns: int = dataclasses.field(default_factory=time.time_ns)
    started: float = dataclasses.field(default_factory=time.monotonic)
    held_secs: float = 0.0
    ordinal: int = 0
    state: str = "queued"
    written: worker.Future[Any] = dataclasses.field(default_factory=worker.Future)
    done: worker.Future[Any] = dataclasses.field(default_factory=worker.Future)
    reports: dict[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def plan(self) -> str:
        """Digest of the plan."""
        return self.digest()

    @property
    def folders(self) -> list[str]:
        """Items that have a folder of their own on this node."""
        return [item for item, _ in self.files]

    def log_entry(self, done: Committed) -> dict[str, Any]:
        """What an Orbax logger is told of a commit."""
        when = datetime.datetime.fromtimestamp(done.committed_ns / 1e9, tz=datetime.UTC)
        secs = time.monotonic() - self.started
        return {
            "step": done.epoch,
            "event_type": "save",
            "committed": when.isoformat(),
            "secs": secs,
            "held_secs": self.held_secs,
        }


@dataclasses.dataclass(frozen=True)
class Committed:
    """The good verdict, as every node hears it."""

    epoch: int
    metrics: Any
    committed_ns: int
    deleted: tuple[int, ...]


def human_bytes(n: int) -> str:
    """A size for people, in powers of 1000."""
    size = float(n)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
