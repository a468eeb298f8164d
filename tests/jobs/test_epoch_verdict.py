"""What the primary makes of the reports of an epoch, without processes."""

import json
from typing import Any

import pytest

import epochckpt as ec
from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs.epoch_verdict import EpochReport, EpochReports, No, NoVote, Vote, Yes, vote_of
from epochckpt.jobs.job_conditions import ComputedCondition


def report(*votes: Vote, **fields: Any) -> dict[str, Any]:
    """What a process tells that has trained its epoch to the end."""
    usual: dict[str, Any] = {
        "preempted": False,
        "interrupted": False,
        "problem": None,
        "fenced_off": None,
        "first": False,
        "blobs": [],
    }
    told = EpochReport(votes=votes, **{**usual, **fields}).to_json()
    return json.loads(json.dumps(told))


CONDITIONS = [ec.stop.max_epochs(3), ec.stop.nan("loss")]
LIMIT, NAN = map(repr, CONDITIONS)


@pytest.mark.parametrize(
    ("told", "stops"),
    [
        ([report(No(), No()), report(No(), No())], {}),
        ([report(No(), No()), report(No(), Yes("it is nan"))], {NAN: "it is nan"}),
        ([report(Yes("three"), No()), report(No(), Yes("it is nan"))], {LIMIT: "three", NAN: "it is nan"}),
        ([report(No(), Yes("here")), report(No(), Yes("there"))], {NAN: "here"}),  # that of the first process
        ([report(No(), Yes(""))], {NAN: ""}),  # its repr is empty
        ([report(No(), No()), report(interrupted=True)], {}),  # which has seen no condition
        ([report(Yes("three"), No()), report(interrupted=True)], {LIMIT: "three"}),
        ([report(interrupted=True)], {}),
    ],
)
def test_a_condition_is_true_if_it_is_on_any_process(told: list[dict[str, Any]], stops: dict[str, str]) -> None:
    assert EpochReports(told).stops(CONDITIONS) == stops


def test_a_condition_on_a_blob_needs_a_process_that_has_it() -> None:
    condition = ComputedCondition("a blob", lambda workspace: [], "no node has it", blob="los")
    assert EpochReports([report(NoVote()), report(Yes("small"))]).stops([condition]) == {repr(condition): "small"}
    with pytest.raises(InvalidArgumentError, match=r"no node has it.*loss"):
        EpochReports([report(NoVote(), blobs=["acc"]), report(NoVote(), blobs=["loss"])]).stops([condition])


def test_one_process_is_enough_for_what_hinders_all() -> None:
    reports = EpochReports(
        [report(No()), report(No(), problem="full", fenced_off="newer", interrupted=True, preempted=True)]
    )
    assert (reports.problem, reports.fenced_off) == ("full", "newer")
    assert (reports.interrupted, reports.preempted) == (True, True)
    reports = EpochReports([report(No()), report(No())])
    assert (reports.problem, reports.fenced_off) == (None, None)
    assert (reports.interrupted, reports.preempted) == (False, False)


def test_the_first_epoch_is_one_that_all_have_trained_to_its_end() -> None:
    assert EpochReports([report(No(), first=True), report(No(), first=True)]).first
    assert not EpochReports([report(No(), first=True), report(No())]).first
    assert EpochReports([report(No(), blobs=["b", "a"]), report(No(), blobs=["b", "c"])]).blobs == ["a", "b", "c"]


class _Unnamed(ec.stop.Condition):
    def __repr__(self) -> str:
        return ""

    def holds(self, ctx: ec.stop.Context) -> bool:
        return True


@pytest.mark.parametrize(
    ("condition", "vote"),
    [
        (ec.stop.max_epochs(3), Yes("max_epochs(3)")),
        (_Unnamed(), Yes("")),
        (ec.stop.preempted, No()),  # for which a run ends anyway
        (ec.stop.preempted | ec.stop.max_epochs(9), No()),
        (ec.stop.preempted | ec.stop.max_epochs(3), Yes("preempted | max_epochs(3)")),
        (ec.stop.preempted & ec.stop.max_epochs(3), Yes("(preempted & max_epochs(3))")),
    ],
)
def test_a_vote_is_yes_for_a_reason_to_finish(condition: ec.stop.Condition, vote: Vote) -> None:
    ctx = ec.stop.Context(
        epoch=3, metrics={}, workspace=ec.Workspace(), elapsed_secs=0.0, total_secs=0.0, preempted=True
    )
    assert vote_of(condition, condition(ctx), ctx) == vote
    assert vote_of(condition, False, ctx) == No()
