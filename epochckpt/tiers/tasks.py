"""What the primary tells the other processes of a mirror, as JSON (`to_wire`, `task_from_wire`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyTask:
    """Every process is to copy the folders of its nodes.

    Attributes:
        epoch: that is copied.
        mirror_id: of the copy.
        incarnation: of the run that has claimed the mirror.
        ledger: the primary's ledger, where each process keeps a copy of it; else empty.
    """

    epoch: int
    mirror_id: str
    incarnation: str
    ledger: str

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndOfTasks:
    """No further task comes.

    Attributes:
        ledger: as of a `CopyTask`.
    """

    ledger: str = ""

    def to_wire(self) -> dict[str, Any]:
        return {"end": True, "ledger": self.ledger}


Task = CopyTask | EndOfTasks


def task_from_wire(wire: Mapping[str, Any]) -> Task:
    """The task that the primary has published."""
    if "end" in wire:
        return EndOfTasks(ledger=wire["ledger"])
    return CopyTask(
        epoch=wire["epoch"],
        mirror_id=wire["mirror_id"],
        incarnation=wire["incarnation"],
        ledger=wire["ledger"],
    )
