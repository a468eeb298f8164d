"""What the primary makes of the reports of an epoch, without processes."""

from typing import Any

import pytest

import epochckpt as ec
from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs.epoch_verdict import EpochReport, EpochReports
from epochckpt.jobs.job import ComputedCondition


def report(*reasons: str | None, **fields: Any) -> dict[str, Any]:
    """What a process tells that has trained its epoch to the end."""
    usual: dict[str, Any] = {"interrupted": False, "problem": "", "fenced_off": "", "first": False, "blobs": []}
    return EpochReport(reasons=reasons, **{**usual, **fields}).to_json()


CONDITIONS = [ec.stop.max_epochs(3), ec.stop.nan("loss")]
LIMIT, NAN = map(repr, CONDITIONS)


@pytest.mark.parametrize(
    ("told", "stops"),
    [
        ([report("", ""), report("", "")], {}),
        ([report("", ""), report("", "it is nan")], {NAN: "it is nan"}),
        ([report("three", ""), report("", "it is nan")], {LIMIT: "three", NAN: "it is nan"}),
        ([report("", "here"), report("", "there")], {NAN: "here"}),  # that of the first process
        ([report("", ""), report(interrupted=True)], {}),  # which has seen no condition
        ([report("three", ""), report(interrupted=True)], {LIMIT: "three"}),
        ([report(interrupted=True)], {}),
    ],
)
def test_a_condition_is_true_if_it_is_on_any_process(told: list[dict[str, Any]], stops: dict[str, str]) -> None:
    assert EpochReports(told).stops(CONDITIONS) == stops


def test_a_condition_on_a_blob_needs_a_process_that_has_it() -> None:
    condition = ComputedCondition("a blob", lambda workspace: [], "no node has it", blob="los")
    assert EpochReports([report(None), report("small")]).stops([condition]) == {repr(condition): "small"}
    with pytest.raises(InvalidArgumentError, match=r"no node has it.*loss"):
        EpochReports([report(None, blobs=["acc"]), report(None, blobs=["loss"])]).stops([condition])


def test_one_process_is_enough_for_what_hinders_all() -> None:
    reports = EpochReports([report(""), report("", problem="full", fenced_off="newer", interrupted=True)])
    assert (reports.problem, reports.fenced_off, reports.interrupted) == ("full", "newer", True)
    reports = EpochReports([report(""), report("")])
    assert (reports.problem, reports.fenced_off, reports.interrupted) == ("", "", False)


def test_the_first_epoch_is_one_that_all_have_trained_to_its_end() -> None:
    assert EpochReports([report("", first=True), report("", first=True)]).first
    assert not EpochReports([report("", first=True), report("")]).first
    assert EpochReports([report("", blobs=["b", "a"]), report("", blobs=["b", "c"])]).blobs == ["a", "b", "c"]
