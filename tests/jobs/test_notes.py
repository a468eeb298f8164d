"""The runner's notes: a run writes them, anything may be read, and what is not known is kept."""

import math
from typing import Any

import pytest

from epochckpt.jobs.notes import Form, NodeNotes, RunNotes

OF_STEPS = RunNotes.of_run(
    nodes=["a", "b"], partial=True, stop_states={"nan": 1}, total_secs=2.5, went_back_to=3, unit="step", begun=40
)


def test_what_a_run_notes_comes_back() -> None:
    noted = OF_STEPS.with_end(["max_steps(50)"], {"loss": 1.0}).with_blobs({"i": "b"}, {"b": None})
    noted = noted.with_forms({"i": Form.JSON}).as_out_of_band()
    assert noted.to_json()["forms"] == {"i": "json"}
    read = RunNotes.read(noted.to_json())
    assert (read.nodes, read.partial, read.stop_states, read.total_secs) == (["a", "b"], True, {"nan": 1}, 2.5)
    assert (read.went_back_to, read.unit, read.begun, read.finished) == (3, "step", 40, ("max_steps(50)",))
    assert (read.metrics, read.blobs, read.types, read.forms) == (
        {"loss": 1.0},
        {"i": "b"},
        {"b": None},
        {"i": Form.JSON},
    )
    assert (read.out_of_band, read.is_of_run) == (True, True)


def test_a_job_of_epochs_notes_no_unit_and_a_run_that_goes_on_no_end() -> None:
    notes = RunNotes.of_run(
        nodes=["a"], partial=False, stop_states={}, total_secs=0.0, went_back_to=None, unit="epoch", begun=4
    )
    assert notes.to_json().keys() == {"version", "nodes", "partial", "stop", "total_secs"}
    notes = notes.with_end([], {})
    assert (notes.unit, notes.begun, notes.went_back_to, notes.finished) == ("epoch", None, None, ())


@pytest.mark.parametrize("found", [None, 5, "text", [], {}])
def test_an_epoch_without_notes_is_of_no_run(found: Any) -> None:
    notes = RunNotes.read(found)
    assert not notes
    assert (notes.is_of_run, notes.partial, notes.out_of_band, notes.total_secs) == (False, False, False, None)
    assert (notes.nodes, notes.blobs, notes.forms, notes.types, notes.metrics) == ([], {}, {}, {}, {})


@pytest.mark.parametrize("value", ["a text", True, math.nan, 10**400, [1], None])
def test_values_of_other_types_count_as_missing(value: Any) -> None:
    assert RunNotes({"total_secs": value}).total_secs is None
    assert (RunNotes({"begun": "x"}).begun, RunNotes({"went_back_to": "x"}).went_back_to) == (None, None)
    assert RunNotes({"blobs": value, "types": value, "nodes": 3}).blobs == {}


@pytest.mark.parametrize("form", ["of a later version", ["json"], None])
def test_a_form_that_is_not_known_counts_as_missing(form: Any) -> None:
    assert RunNotes({"forms": {"i": form, "j": "bare"}}).forms == {"i": None, "j": Form.BARE}


@pytest.mark.parametrize(("stored", "why"), [(["a", 1], ("a", "1")), ("a", ("a",)), (None, ()), ([], ()), (0, ())])
def test_why_a_run_has_finished_is_texts(stored: Any, why: tuple[str, ...]) -> None:
    assert RunNotes({"finished": stored}).finished == why


def test_a_unit_of_another_type_counts_as_missing() -> None:
    assert (RunNotes({"unit": None}).counted, RunNotes({"unit": 3}).unit) == ("epoch", "epoch")


def test_a_unit_of_a_later_version_is_shown_as_epochs_and_told_apart() -> None:
    assert (RunNotes({"unit": "token"}).unit, RunNotes({"unit": "token"}).counted) == ("epoch", "token")
    assert (RunNotes().unit, RunNotes().counted) == ("epoch", "epoch")


def test_what_is_not_known_is_kept_and_shown() -> None:
    notes = RunNotes({**OF_STEPS.to_json(), "of a later one": [1]}).as_out_of_band()
    assert notes.to_json()["of a later one"] == [1]
    assert notes.others() == {"went_back_to": 3, "of a later one": [1]}


def test_what_a_node_notes_comes_back_and_views_show_the_rest() -> None:
    noted = NodeNotes(blobs={"a": "a", "b.1": "b/1"}, types={"a": None}, notes={"partial": True})
    assert NodeNotes.read(noted.to_json()) == noted
    assert noted.rest_of({**noted.to_json(), "mine": 1}) == {
        "blobs": {"a": "a", "b.1": "b/1"},
        "types": {"a": None},
        "mine": 1,
    }
    plain = NodeNotes(blobs={"a": "a"}, types={}, notes={})
    assert plain.rest_of(plain.to_json()) == {"types": {}}


@pytest.mark.parametrize("metadata", [{}, {"notes": {}}, {"blobs": [], "notes": {}}, {"job_runner": {}}])
def test_custom_metadata_of_another_program_are_no_notes_of_a_node(metadata: dict[str, Any]) -> None:
    assert NodeNotes.read(metadata) is None


def test_blobs_alone_make_an_epoch_of_a_node() -> None:
    """`notes` may be anything: a program may have set them to None."""
    read = NodeNotes.read({"blobs": {"a": "a"}, "notes": None})
    assert read == NodeNotes(blobs={"a": "a"}, types={}, notes=None)
