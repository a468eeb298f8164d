"""The end of an epoch as all processes agree on it: what each reports, and what the primary makes of the reports."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from epochckpt import _text
from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs import stop
from epochckpt.jobs.job import ComputedCondition


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochReport:
    """The report of one process after it has trained an epoch."""

    reasons: Sequence[str | None]  # see `reason_of`, by stop condition; empty if the epoch was left in the middle
    interrupted: bool  # it left the epoch in the middle
    problem: str  # why it cannot save its part; empty if it can
    fenced_off: str  # how it learned that a newer run owns the directory; empty if none does
    first: bool  # it has trained the first epoch of the run to its end
    blobs: Sequence[str]  # the names of its blobs, where the decision needs them

    def to_json(self) -> dict[str, Any]:
        """The fields by name; `EpochReport(**fields)` is the way back."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochVerdict:
    """What the primary has decided at the end of an epoch; the same on all processes."""

    stop: Mapping[str, str]  # why the run ends, by the stop condition's `repr`
    interrupted: bool  # a process left the epoch in the middle
    save: bool  # the epoch is saved now
    retry: bool  # if this is the last epoch and is not saved, it is tried once more at the end of the run
    exists: bool  # the epoch is on storage and is to be replaced
    fenced_off: str  # how a process learned that a newer run owns the directory; empty if none does
    results: Sequence[Mapping[str, Any]]  # of saves that have ended, as JSON

    def to_json(self) -> dict[str, Any]:
        """The fields by name; `EpochVerdict(**fields)` is the way back."""
        return dataclasses.asdict(self)


class EpochReports:
    """The reports of all processes, by process."""

    def __init__(self, told: Sequence[Mapping[str, Any]]):
        self._reports = [EpochReport(**one) for one in told]

    @property
    def interrupted(self) -> bool:
        """Whether a process left the epoch in the middle."""
        return any(report.interrupted for report in self._reports)

    @property
    def first(self) -> bool:
        """Whether all have trained the first epoch of the run to its end."""
        return all(report.first for report in self._reports)

    @property
    def problem(self) -> str:
        """Why a process cannot save its part; empty if all can."""
        return next((report.problem for report in self._reports if report.problem), "")

    @property
    def fenced_off(self) -> str:
        """How a process learned that a newer run owns the directory; empty if none does."""
        return next((report.fenced_off for report in self._reports if report.fenced_off), "")

    @property
    def blobs(self) -> list[str]:
        """The names of all blobs that were told."""
        return sorted({name for report in self._reports for name in report.blobs})

    def stops(self, conditions: Sequence[stop.Condition]) -> dict[str, str]:
        """Why the run ends, by the condition's `repr`: one is true if it is on any process that has a vote.

        InvalidArgumentError: no process has a vote on a condition.
        """
        stops: dict[str, str] = {}
        voters = [report.reasons for report in self._reports if report.reasons]
        for condition, votes in zip(conditions, zip(*voters, strict=True), strict=False):
            if isinstance(condition, ComputedCondition) and all(vote is None for vote in votes):
                near = f"; {_text.near(condition.blob, self.blobs)}" if condition.blob else ""
                raise InvalidArgumentError(f"stop condition {condition!r}: {condition.missing}{near}")
            if any(votes):
                stops[repr(condition)] = next(filter(None, votes))
        return stops


def reason_of(condition: stop.Condition, true: bool, ctx: stop.Context) -> str | None:
    """Why a condition is true after an epoch; "" if it is not; None if this process has no vote on it."""
    if isinstance(condition, ComputedCondition) and not condition.values(ctx.workspace):
        return None
    return stop.why(condition, ctx) if true else ""
