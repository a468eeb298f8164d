"""The end of an epoch as all processes agree on it: what each reports, and what the primary makes of the reports."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from epochckpt import _text
from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs import stop
from epochckpt.jobs.job_conditions import ComputedCondition


@dataclasses.dataclass(frozen=True)
class NoVote:
    """The process has none of the values that the stop condition reads."""


@dataclasses.dataclass(frozen=True)
class No:
    """The stop condition is false."""


@dataclasses.dataclass(frozen=True)
class Yes:
    """The stop condition is true."""

    reason: str


Vote = NoVote | No | Yes
"""The answer of one process to a stop condition after an epoch."""


def _vote_to_json(vote: Vote) -> Any:
    match vote:
        case NoVote():
            return None
        case No():
            return False
        case Yes(reason=reason):
            return {"reason": reason}


def _vote_from_json(data: Any) -> Vote:
    """The inverse of `_vote_to_json`."""
    if data is None:
        return NoVote()
    return Yes(**data) if data else No()


def vote_of(condition: stop.Condition, true: bool, ctx: stop.Context) -> Vote:
    """The vote of this process on a condition whose answer after the epoch was `true`.

    A preempted run ends without a vote, and has not finished. So a condition that holds for no other reason votes no.
    """
    if isinstance(condition, ComputedCondition) and not condition.values(ctx.workspace):
        return NoVote()
    if not true or stop.holds_by_preemption(condition, ctx):
        return No()
    return Yes(stop.why(condition, ctx))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochReport:
    """The report of one process after it has trained an epoch."""

    votes: Sequence[Vote]  # by stop condition; empty if the epoch was left in the middle
    preempted: bool  # the preemption notice has reached it
    interrupted: bool  # it left the epoch in the middle
    problem: str | None  # why it cannot save its part; None if it can
    fenced_off: str | None  # how it learned that a newer run owns the directory; None if none does
    first: bool  # it has trained the first epoch of the run to its end
    blobs: Sequence[str]  # the names of its blobs, where the decision needs them

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return {**dataclasses.asdict(self), "votes": [_vote_to_json(vote) for vote in self.votes]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "EpochReport":
        """The inverse of `to_json`."""
        votes = [_vote_from_json(vote) for vote in fields["votes"]]
        return cls(**{**fields, "votes": votes})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochVerdict:
    """What the primary has decided at the end of an epoch; the same on all processes."""

    stop: Mapping[str, str]  # why the run has finished, by the stop condition's `repr`; empty if it has not
    interrupted: bool  # a process left the epoch in the middle
    save: bool  # the epoch is saved now
    retry: bool  # if this is the last epoch and is not saved, it is tried once more at the end of the run
    exists: bool  # the epoch is on storage and is to be replaced
    fenced_off: str | None  # how a process learned that a newer run owns the directory; None if none does
    results: Sequence[Mapping[str, Any]]  # of saves that have ended, as JSON

    def to_json(self) -> dict[str, Any]:
        """The fields by name; `EpochVerdict(**fields)` is the way back."""
        return dataclasses.asdict(self)


class EpochReports:
    """The reports of all processes, by process."""

    def __init__(self, told: Sequence[Mapping[str, Any]]):
        self._reports = [EpochReport.from_json(one) for one in told]

    @property
    def preempted(self) -> bool:
        """Whether the preemption notice has reached a process."""
        return any(report.preempted for report in self._reports)

    @property
    def interrupted(self) -> bool:
        """Whether a process left the epoch in the middle."""
        return any(report.interrupted for report in self._reports)

    @property
    def first(self) -> bool:
        """Whether all have trained the first epoch of the run to its end."""
        return all(report.first for report in self._reports)

    @property
    def problem(self) -> str | None:
        """Why a process cannot save its part; None if all can."""
        return next((report.problem for report in self._reports if report.problem is not None), None)

    @property
    def fenced_off(self) -> str | None:
        """How a process learned that a newer run owns the directory; None if none does."""
        return next((report.fenced_off for report in self._reports if report.fenced_off is not None), None)

    @property
    def blobs(self) -> list[str]:
        """The names of all blobs that were told."""
        return sorted({name for report in self._reports for name in report.blobs})

    def stops(self, conditions: Sequence[stop.Condition]) -> dict[str, str]:
        """Why the run has finished, by the condition's `repr`: one is true if it is on any process that has a vote.

        InvalidArgumentError: no process has a vote on a condition.
        """
        stops: dict[str, str] = {}
        voters = [report.votes for report in self._reports if report.votes]
        for condition, votes in zip(conditions, zip(*voters, strict=True), strict=False):
            if isinstance(condition, ComputedCondition) and all(isinstance(vote, NoVote) for vote in votes):
                near = f"; {_text.near(condition.blob, self.blobs)}" if condition.blob else ""
                raise InvalidArgumentError(f"stop condition {condition!r}: {condition.missing}{near}")
            if (yes := next((vote for vote in votes if isinstance(vote, Yes)), None)) is not None:
                stops[repr(condition)] = yes.reason
        return stops
