"""Every change of the head of a bucket, as a value: what it does, what says it already, and what forbids it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp
import pytest

from epochckpt import errors
from epochckpt.directory import head_record
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_changes import (
    Attachment,
    AttachMetrics,
    BeginSave,
    ClaimHead,
    FinishStepRemoval,
    ForgetDead,
    ForgetKept,
    GiveUp,
    HeadChange,
    Incarnation,
    KeepDeleted,
    LogDeleted,
    LogGoneBack,
    PublishEpoch,
    Refresh,
    Release,
    RemoveKeptSteps,
    TakeIn,
    UnlistEpochs,
)
from epochckpt.directory.head_record import Head, RemovedStep
from epochckpt.directory.lineage import ClaimDirectly, ClaimLineage, Lineage
from epochckpt.directory.metrics_log import Line
from epochckpt.format import paths
from epochckpt.orbax import StepNames

OLDER = "00000001aaaaaaaa"
OURS = "00000002bbbbbbbb"
NEWER = "00000003cccccccc"
RUN = Incarnation(root="gs://bucket/run", id=OURS)
STOCK = "stock-0123456789abcdef"
NAMES = StepNames.of(ocp.CheckpointManagerOptions())


def entry(save_id: str, **fields: Any) -> EpochSummary:
    values: dict[str, Any] = {
        "started_ns": 1,
        "committed_ns": 2,
        "nbytes": 3,
        "nodes": 1,
        "secs": 0.5,
        "blocked_secs": 0.1,
        "metrics": {"loss": 1.0},
    }
    return EpochSummary(save_id=save_id, **values | fields)


def ours(epoch: int, number: int = 0, **fields: Any) -> EpochSummary:
    """An epoch that this run has saved."""
    return entry(f"{OURS}-{epoch}-{number}", **fields)


def head(**fields: Any) -> Head:
    """A head that this run has claimed."""
    return Head(incarnation=OURS, past=(OLDER,), closed=False, owner={"host": "a"}, change="1" * 16, **fields)


def taken_over(now: Head) -> Head:
    """The same head after a newer run has claimed it."""
    return now.next(incarnation=NEWER, past=(*now.past, OURS))


def after(change: HeadChange, now: Head) -> Head:
    """The head after a change; it is not the same bytes, can be written and read, and says the change."""
    found = change.apply(now)
    assert found is not None
    assert found.change != now.change
    assert head_record.parse(paths.HEAD, found.to_bytes()) == found
    return found


def only(found: Head, now: Head, **fields: Any) -> None:
    """These fields of the head have changed, and no others."""
    assert dataclasses.replace(found, change="") == dataclasses.replace(now, change="", **fields)


def refused(change: HeadChange, now: Head, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        change.apply(now)


def fenced(change: HeadChange, now: Head) -> None:
    """A newer run keeps this one from making the change."""
    refused(change, taken_over(now), errors.FencedError, r"newer run \(incarnation 3, this is 2\).*gs://bucket/run")


# -- a run -----------------------------------------------------------------------------------------------------------


def claim(**fields: Any) -> ClaimHead:
    values: dict[str, Any] = {"owner": {"host": "b"}, "lineage": ClaimDirectly(), "beside": {}, "stock": {}}
    return ClaimHead(**values | fields)


def test_the_first_claim() -> None:
    found = after(claim(), Head())
    assert found.incarnation.startswith("00000001")
    assert (found.closed, found.past, found.owner) == (False, (), {"host": "b"})
    assert found.log == ()


def test_a_claim_makes_what_older_runs_have_begun_dead() -> None:
    now = head(begun={f"{OURS}-4-0": "4"}, dead={f"{OLDER}-1-0": "1"}, epochs={"3": ours(3)})
    found = after(claim(), now)
    assert found.incarnation.startswith("00000003")
    assert found.past == (OLDER, OURS)
    assert found.begun == {}
    assert found.dead == {f"{OLDER}-1-0": "1", f"{OURS}-4-0": "4"}
    assert found.epochs == now.epochs
    refused(BeginSave(incarnation=RUN, epoch=5, folder="5", save_id=f"{OURS}-5-0"), found, errors.FencedError, "newer")


def test_a_claim_takes_in_what_lies_beside_the_epochs() -> None:
    """Steps of stock Orbax count; attempts that no head names are dead; the rest is not ours."""
    stray = f"{OLDER}-7-0"
    leaving = {"5": RemovedStep(STOCK, ""), "6": RemovedStep(STOCK, "")}
    beside = {"5": None, "6": None, "7": {stray}, "8": None, "9": None}
    found = after(claim(beside=beside, stock={"5": entry(STOCK), "8": entry(STOCK)}), head(removed_steps=leaving))
    assert found.stock.keys() == {"5", "8"}
    assert found.removed_steps == {"6": RemovedStep(STOCK, "")}  # stock Orbax has saved 5 anew
    assert found.dead == {stray: "7"}
    assert found.foreign == ("9",)


def test_a_claim_of_a_directory_without_epochs_says_in_the_log_that_the_run_begins_anew() -> None:
    log = (Line(3, metrics={"loss": 1.0}),)
    assert after(claim(), head(log=log)).log == (*log, Line(-1, back=True))
    assert after(claim(), head(logged=4)).log == (Line(-1, back=True),)
    assert after(claim(), head(log=log, epochs={"4": ours(4)})).log == log


def test_a_claim_changes_the_lineage_that_it_expects() -> None:
    mirror = Lineage(directory="home", claim="c")
    taken = after(claim(lineage=ClaimLineage(expected=mirror, directory="home", claim="d")), head(lineage=mirror))
    assert taken.lineage == Lineage(directory="home", claim="d")
    lost = after(claim(), head(lineage=mirror)).lineage
    assert lost is not None
    assert (lost.directory, lost.past) == ("", ("home",))
    other = claim(lineage=ClaimLineage(expected=None, directory="home", claim="d"))
    refused(other, head(lineage=mirror), errors.FencedError, "another directory, or another run, has claimed")


def test_a_release() -> None:
    change = Release(incarnation=RUN)
    only(after(change, head()), head(), closed=True)
    assert change.apply(head().next(closed=True)) is None
    fenced(change, head())


# -- a save ----------------------------------------------------------------------------------------------------------


def test_a_save_begins() -> None:
    save_id = f"{OURS}-4-0"
    change = BeginSave(incarnation=RUN, epoch=4, folder="4", save_id=save_id)
    only(after(change, head()), head(), begun={save_id: "4"})
    assert change.apply(head(begun={save_id: "4"})) is None
    fenced(change, head())
    assert change.apply(taken_over(head(begun={save_id: "4"}))) is None  # its answer was lost, then another run came


def test_a_save_does_not_begin_where_a_step_of_stock_orbax_is_not_gone_yet() -> None:
    change = BeginSave(incarnation=RUN, epoch=4, folder="4", save_id=f"{OURS}-4-0")
    now = head(removed_steps={"4": RemovedStep(STOCK, "")})
    refused(change, now, errors.SaveError, "gs://bucket/run/4: a deleted step of stock Orbax is not gone yet")
    fenced(change, now)


def publish(new: EpochSummary, **fields: Any) -> PublishEpoch:
    return PublishEpoch(incarnation=RUN, epoch=4, folder="4", entry=new, **fields)


def test_an_epoch_is_published() -> None:
    new, other = ours(4), f"{OURS}-5-0"
    now = head(begun={new.save_id: "4", other: "5"}, epochs={"3": ours(3)})
    found = after(publish(new), now)
    only(found, now, begun={other: "5"}, epochs={"3": ours(3), "4": new})
    assert publish(new).apply(found) is None
    assert publish(new).apply(taken_over(found)) is None  # committed, whoever came then
    fenced(publish(new), now)


@pytest.mark.parametrize("may_replace", [frozenset[str](), frozenset({f"{OLDER}-4-0"}), None])
def test_an_attempt_that_was_given_up_is_never_published(may_replace: frozenset[str] | None) -> None:
    new = ours(4)
    now = head(dead={new.save_id: "4"})
    refused(publish(new, may_replace=may_replace), now, errors.SaveError, "given up or taken over meanwhile")


def test_an_epoch_gives_way_only_to_who_may_replace_it() -> None:
    new, old = ours(4, 1), ours(4)
    now = head(begun={new.save_id: "4"}, epochs={"4": old})
    for allowed in (frozenset[str](), frozenset({f"{OURS}-4-7"})):
        refused(publish(new, may_replace=allowed), now, errors.SaveError, "gs://bucket/run/4 exists already")
    for allowed in (frozenset({old.save_id}), None):
        only(after(publish(new, may_replace=allowed), now), now, begun={}, epochs={"4": new}, dead={old.save_id: "4"})


def test_a_damaged_epoch_that_gives_way_is_kept() -> None:
    new, old = ours(4, 1), ours(4)
    now = head(begun={new.save_id: "4"}, epochs={"4": old})
    found = after(publish(new, may_replace=frozenset({old.save_id}), kept_in="damaged-1"), now)
    only(found, now, begun={}, epochs={"4": new}, aside={"damaged-1/4": old})


@pytest.mark.parametrize("kept_in", [None, "damaged-1"])
def test_a_step_of_stock_orbax_gives_way(kept_in: str | None) -> None:
    """Its objects carry no attempt's id: the head names its folder until they are gone."""
    new, old = ours(4), entry(STOCK)
    now = head(begun={new.save_id: "4"}, stock={"4": old})
    found = after(publish(new, may_replace=None, kept_in=kept_in), now)
    kept = {} if kept_in is None else {f"{kept_in}/4": old}
    steps = {"4": RemovedStep(STOCK, kept_in or "")}
    only(found, now, begun={}, stock={}, epochs={"4": new}, aside=kept, removed_steps=steps)


def test_attempts_are_given_up() -> None:
    lost, other = f"{OURS}-4-0", f"{OURS}-5-0"
    now = head(begun={lost: "4", other: "5"}, dead={f"{OLDER}-1-0": "1"})
    change = GiveUp(incarnation=RUN, save_ids=frozenset({lost}))
    only(after(change, now), now, begun={other: "5"}, dead={f"{OLDER}-1-0": "1", lost: "4"})
    fenced(change, now)
    assert change.apply(head(epochs={"4": ours(4)})) is None  # it has been committed
    assert change.apply(taken_over(head(dead={lost: "4"}))) is None


def test_any_process_may_give_up_attempts_that_are_silent() -> None:
    silent = {f"{OURS}-4-0": "4", f"{OURS}-5-0": "5"}
    found = after(GiveUp(incarnation=None, save_ids=frozenset(silent)), taken_over(head(begun=silent)))
    assert (found.begun, found.dead) == ({}, silent)


# -- epochs that go --------------------------------------------------------------------------------------------------


def unlist(*folders: str, **fields: Any) -> UnlistEpochs:
    return UnlistEpochs(incarnation=RUN, epoch=int(folders[0]), folders=folders, **fields)


def test_an_epoch_is_deleted() -> None:
    now = head(epochs={"3": ours(3), "4": ours(4)})
    found = after(unlist("3"), now)
    only(found, now, epochs={"4": ours(4)}, dead={f"{OURS}-3-0": "3"})
    assert unlist("3").apply(found) is None
    assert unlist("3").apply(taken_over(found)) is None
    fenced(unlist("3"), now)


def test_a_deleted_epoch_is_kept() -> None:
    now = head(epochs={"3": ours(3)}, stock={"4": entry(STOCK)})
    only(after(unlist("3", kept_in="trash"), now), now, epochs={}, aside={"trash/3": ours(3)})
    steps = {"4": RemovedStep(STOCK, "trash")}
    found = after(unlist("4", kept_in="trash"), now)
    only(found, now, stock={}, aside={"trash/4": entry(STOCK)}, removed_steps=steps)
    assert unlist("4", kept_in="trash").kept(now) == {"trash/4": entry(STOCK)}
    assert unlist("4").kept(now) == {}


def test_a_place_that_is_taken_keeps_no_second_epoch() -> None:
    now = head(epochs={"3": ours(3, 1)})
    kept = now.next(aside={"trash/3": ours(3)})
    change = unlist("3", kept_in="trash")
    refused(change, kept, errors.EpochExistsError, "gs://bucket/run/trash/3 exists already")
    occupied = dataclasses.replace(change, occupied=frozenset({"3"}))
    refused(occupied, now, errors.EpochExistsError, "gs://bucket/run/trash/3 exists already")
    fenced(change, kept)
    stock = now.next(aside={"trash/3": entry(STOCK)})  # of a step, which only a folder of objects keeps
    assert after(change, stock).aside == {"trash/3": ours(3, 1)}
    assert after(unlist("3"), kept).aside == kept.aside


@pytest.mark.parametrize(
    ("folders", "lines"),
    [
        (("3",), (Line(3, f"{OURS}-3-0", 2, {"loss": 1.0}),)),
        (("5",), (Line(4, back=True),)),
        (("3", "5"), (Line(3, f"{OURS}-3-0", 2, {"loss": 1.0}), Line(4, back=True))),
        (("3", "4", "5"), (Line(-1, back=True),)),
    ],
    ids=["older", "newest", "both", "all"],
)
def test_the_log_gets_the_metrics_of_a_deleted_epoch(folders: tuple[str, ...], lines: tuple[Line, ...]) -> None:
    """Unless it is the newest, of which the run goes back then."""
    before = (Line(1, metrics={"loss": 2.0}),)
    now = head(epochs={"3": ours(3), "4": ours(4), "5": ours(5)}, log=before)
    assert after(unlist(*folders, log=LogDeleted(NAMES)), now).log == (*before, *lines)
    assert after(unlist(*folders), now).log == before


def test_the_log_gets_attached_metrics_and_those_of_a_record() -> None:
    attached = {"evaluator": {"accuracy": 0.5}}
    large = ours(3, metrics=None, large=True, attached=attached)
    now = head(epochs={"3": large, "4": ours(4, metrics=None, large=True), "5": ours(5)})
    log = LogDeleted(NAMES, large={large.save_id: {"loss": 3.0}})
    (line,) = after(unlist("3", log=log), now).log
    assert line.metrics == {"loss": 3.0, "accuracy": 0.5}
    assert after(unlist("4", log=log), now).log == ()  # its record could not be read
    assert [log.needs_metrics(now, folder) for folder in "3456"] == [True, True, False, False]
    newest = head(epochs={"3": ours(3), "4": ours(4, metrics=None, large=True)})
    assert not log.needs_metrics(newest, "4")


def test_a_rollback() -> None:
    now = head(epochs={"3": ours(3), "4": ours(4)}, stock={"5": entry(STOCK)}, logged=7)
    change = unlist("4", "5", kept_in="rolled-back-1", log=LogGoneBack(3))
    found = after(change, now)
    kept = {"rolled-back-1/4": ours(4), "rolled-back-1/5": entry(STOCK)}
    steps = {"5": RemovedStep(STOCK, "rolled-back-1")}
    only(found, now, epochs={"3": ours(3)}, stock={}, aside=kept, removed_steps=steps, log=(Line(3, back=True),))
    assert change.kept(now) == kept
    assert change.apply(found) is None
    fenced(change, now)


def test_the_removal_of_a_step_is_finished() -> None:
    step, other = RemovedStep(STOCK, ""), RemovedStep("stock-other", "trash")
    now = head(removed_steps={"4": step, "5": other})
    change = FinishStepRemoval(incarnation=RUN, folder="4", step=step)
    only(after(change, now), now, removed_steps={"5": other})
    assert change.apply(head()) is None
    assert change.apply(head(removed_steps={"4": other})) is None  # stock Orbax has saved there anew
    fenced(change, now)
    assert after(dataclasses.replace(change, incarnation=None), taken_over(now)).removed_steps == {"5": other}


# -- metrics ---------------------------------------------------------------------------------------------------------


def attach(folder: str, epoch: EpochSummary, source: str, metrics: Mapping[str, Any]) -> Attachment:
    return Attachment(folder=folder, save_id=epoch.save_id, source=source, metrics=metrics)


def test_metrics_are_attached_by_whoever_has_them() -> None:
    now = taken_over(head(epochs={"3": ours(3), "4": ours(4, attached={"a": {"x": 1.0}})}))
    one, two = attach("3", ours(3), "a", {"x": 2.0}), attach("4", ours(4), "b", {"y": 3.0})
    found = after(AttachMetrics((one, two)), now)
    expected = {"3": ours(3, attached={"a": {"x": 2.0}}), "4": ours(4, attached={"a": {"x": 1.0}, "b": {"y": 3.0}})}
    only(found, now, epochs=expected)
    assert AttachMetrics((one, two)).apply(found) is None
    newer = AttachMetrics((attach("3", ours(3), "a", {"x": 4.0}),))
    assert after(newer, found).epochs["3"].attached == {"a": {"x": 4.0}}


def test_metrics_of_another_attempt_are_not_attached() -> None:
    stale = attach("3", ours(3), "a", {"x": 2.0})
    assert AttachMetrics((stale,)).apply(head(epochs={"3": ours(3, 1)})) is None
    assert AttachMetrics((stale,)).apply(head()) is None


def test_attachments_that_wait_go_along() -> None:
    """All that wait in the process go with the change of the first; no other change takes them."""
    own, other = attach("3", ours(3), "a", {"x": 1.0}), attach("3", ours(3), "b", {"y": 2.0})
    assert AttachMetrics((own,)).along_with([own, other]) == AttachMetrics((own, other))
    assert AttachMetrics((own,)).along_with([]) == AttachMetrics((own,))
    release = Release(incarnation=RUN)
    assert release.along_with([own]) is release


def test_lines_of_another_directory_are_kept() -> None:
    lines = (Line(1, metrics={"loss": 2.0}), Line(2, metrics={"loss": 1.0}))
    change = KeepDeleted(incarnation=RUN, lines=lines)
    before = (Line(0, metrics={"loss": 3.0}),)
    found = after(change, head(log=before))
    only(found, head(log=before), log=(*before, *lines))
    assert change.apply(found) is None
    fenced(change, head())


# -- repair and gc -----------------------------------------------------------------------------------------------------


def test_epochs_are_taken_in() -> None:
    mirror = Lineage(directory="home", claim="c")
    now = taken_over(head(epochs={"3": ours(3)}, foreign=("4", "9"), lineage=mirror))
    found_epochs, found_aside = {"3": ours(3, 1), "4": ours(4)}, {"damaged-1/2": ours(2)}
    change = TakeIn(root=RUN.root, epochs=found_epochs, aside=found_aside, expected=now.change)
    found = after(change, now)
    assert found.epochs == {"3": ours(3), "4": ours(4)}  # what the head names counts
    assert found.aside == found_aside
    assert found.foreign == ("9",)
    assert found.lineage is not None
    assert found.lineage.directory == ""
    assert change.apply(found) is None
    moved_on = now.next(closed=True)
    refused(change, moved_on, errors.InvalidArgumentError, "gs://bucket/run.*has changed since.*look again")


def test_kept_epochs_are_forgotten() -> None:
    kept = {"trash/3": ours(3), "trash/4": entry(STOCK)}
    now = taken_over(head(aside={**kept, "damaged-1/5": ours(5)}))
    found = after(ForgetKept(kept), now)
    only(found, now, aside={"damaged-1/5": ours(5)}, dead={f"{OURS}-3-0": "3"})
    assert ForgetKept(kept).apply(found) is None
    assert ForgetKept(kept).apply(head(aside={"trash/3": ours(3, 1)})) is None  # another one is kept there by now


def test_steps_on_their_way_to_a_folder_are_removed_instead() -> None:
    now = taken_over(head(removed_steps={"3": RemovedStep(STOCK, "trash"), "4": RemovedStep(STOCK, "damaged-1")}))
    found = after(RemoveKeptSteps("trash"), now)
    only(found, now, removed_steps={"3": RemovedStep(STOCK, ""), "4": RemovedStep(STOCK, "damaged-1")})
    assert RemoveKeptSteps("trash").apply(found) is None


def test_dead_attempts_of_which_nothing_is_left_are_forgotten() -> None:
    now = taken_over(head(dead={f"{OURS}-3-0": "3", f"{OURS}-4-0": "4"}))
    change = ForgetDead(frozenset({f"{OURS}-3-0", f"{OURS}-9-0"}))
    found = after(change, now)
    only(found, now, dead={f"{OURS}-4-0": "4"})
    assert change.apply(found) is None


def test_a_refresh_writes_the_same_head() -> None:
    now = taken_over(head(epochs={"3": ours(3)}))
    only(after(Refresh(), now), now)
