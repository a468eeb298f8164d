"""What lies in a directory, as values of `directory`: of what kind it is, how large, how old, and how garbage goes."""

from __future__ import annotations

import os
import pathlib
import time
import uuid

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.directory import EpochDirectory, directory_of
from epochckpt.directory.bucket import BucketDirectory
from epochckpt.directory.contents import KEPT, NOT_OURS, Kind, Leftover
from epochckpt.directory.head_changes import BeginSave, Incarnation
from epochckpt.errors import AccessError
from epochckpt.format import paths
from epochckpt.inspection import leftovers as row_makers
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store
from epochckpt.testing import FaultyStore

HOUR_NS = 3600 * 10**9


@pytest.fixture(params=["posix", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "run") if request.param == "posix" else new_bucket()


def new_bucket() -> str:
    return f"memory://contents/{uuid.uuid4()}"


def opened(place: str) -> EpochDirectory:
    return directory_of(open_store(place), StepNames.of(ocp.CheckpointManagerOptions()))


def save(place: str, *epochs: int, delete: int | None = None, roll_back_to: int | None = None) -> None:
    options = ocp.CheckpointManagerOptions(todelete_subdir="trash")
    with ec.CheckpointManager(place, options=options, node=["a", "b"]) as manager:
        for epoch in epochs:
            assert manager.save(epoch, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
        manager.wait_until_finished()
        if delete is not None:
            manager.delete(delete)
        if roll_back_to is not None:
            manager.rollback_to(roll_back_to)


def folder(root: pathlib.Path, name: str, content: str = "x") -> None:
    """Makes a folder with one file in it."""
    (root / name).mkdir(parents=True)
    (root / name / "file").write_text(content)


def is_allowed(age_secs: float) -> str:
    del age_secs
    return ""


def test_epochs_that_are_kept_are_of_their_kind(place: str) -> None:
    """Both forms tell the same of deleted epochs that are kept, and of those that were rolled back."""
    save(place, 1, 2, 3, 4, delete=1, roll_back_to=2)
    found = opened(place).contents("trash").all_leftovers()
    assert found.saves == []
    assert found.problems == {}
    assert sorted((thing.kind.name, thing.epochs) for thing in found.others) == [
        ("DELETED_AND_KEPT", (1,)),
        ("ROLLED_BACK", (3, 4)),
    ]
    assert all(thing.nbytes > 0 and thing.last_ns is not None for thing in found.others)
    assert {thing.kind for thing in found.others} <= KEPT
    quick = opened(place)
    quick.refresh()
    assert {(thing.path, thing.kind, thing.epochs) for thing in quick.contents("trash").leftovers().others} == {
        (thing.path, thing.kind, thing.epochs) for thing in found.others
    }


def test_every_file_belongs_to_one_group(place: str) -> None:
    """The groups have all files of the directory, each once, and the epochs have their own groups."""
    save(place, 1, 2)
    directory = opened(place)
    everything = directory.contents().all_files()
    assert {group.path: group.epochs for group in everything.groups if group.kind is Kind.EPOCH} == {
        "1": (1,),
        "2": (2,),
    }
    names = [file.path for group in everything.groups for file in group.files]
    assert len(names) == len(set(names))
    assert {"1/epoch.json", "2/epoch.json"} <= set(names)
    assert {group.kind for group in everything.groups} <= {Kind.EPOCH, Kind.OTHER}
    (alone,) = directory.contents().files_in("2").groups
    assert (alone.kind, alone.epochs) == (Kind.EPOCH, (2,))
    (listed,) = [group for group in everything.groups if group.path == "2"]
    assert sum(file.size for file in alone.files) == sum(file.size for file in listed.files) > 0


def test_nothing_is_looked_at_before_it_is_asked_for(tmp_path: pathlib.Path) -> None:
    """A directory that has vanished by then has nothing in it, which is no error."""
    contents = opened(str(tmp_path / "none")).contents()
    assert contents.leftovers().saves == contents.leftovers().others == contents.saves() == []
    assert contents.measure("1") is None


def test_what_names_tell_on_a_file_system(tmp_path: pathlib.Path) -> None:
    """Each name that a run, a clean-up, an export or stock Orbax gives is known."""
    root = tmp_path / "run"
    save(str(root), 1)
    token = "0123456789abcdef"
    home = f"incarnation-{token}{paths.TMP_SUFFIX}"
    named = {
        f"{home}/7-1/a": Kind.SAVE,
        f"{home}/moving-{token}-5": Kind.MOVING,
        f"{home}/removed-{token}-6": Kind.REMOVED_EPOCH,
        f"{home}/removed-{token}": Kind.REMOVED_DRAFT,
        f"{home}/incarnation-{'1' * 16}{paths.TMP_SUFFIX}": Kind.TAKEN_OVER,
        f"{home}/mine": Kind.UNKNOWN,
        f"rolled-back-{token}/3": Kind.ROLLED_BACK,
        f"damaged-{token}/3": Kind.REPLACED,
        f"partial-{token}/3": Kind.PARTIAL,
        f"diverged-{token}/3": Kind.DIVERGED,
        "trash/3": Kind.DELETED_AND_KEPT,
        f"export-{token}{paths.TMP_SUFFIX}": Kind.EXPORT,
        f"unclaimed-{token}{paths.TMP_SUFFIX}": Kind.UNCLAIMED,
        f"gc-{token}{paths.TMP_SUFFIX}": Kind.REMOVAL,
        f"9{paths.TMP_SUFFIX}-12": Kind.ORBAX_SAVE,
    }
    for name in named:
        folder(root, name)
    folder(root, "notes")
    found = opened(str(root)).contents("trash").all_leftovers()
    (one,) = found.saves
    assert (one.path, one.epoch, one.save_id, one.given_up) == (f"{home}/7-1", 7, f"{token}-7-1", False)
    assert [(part.node, part.is_written) for part in one.parts] == [("a", False)]
    kinds = {thing.path: thing.kind for thing in found.others}
    for name, kind in named.items():
        if kind is not Kind.SAVE:
            path = name.removesuffix("/3")
            assert kinds.pop(path) is kind, name
    assert kinds == {}, "the epoch, and a folder of another name, are left out"
    (moving,) = [thing for thing in found.others if thing.kind is Kind.MOVING]
    assert moving.destination == "5"
    (step,) = [thing for thing in found.others if thing.kind is Kind.REMOVED_EPOCH]
    assert step.epochs == (6,)


def test_saves_of_a_bucket_are_under_way_or_given_up() -> None:
    """What the head names as begun may still be committed; what an earlier run began may not."""
    place = new_bucket()
    save(place, 1)
    directory = opened(place)
    assert isinstance(directory, BucketDirectory)
    head = directory.head.read()
    assert head is not None
    writer = directory.claim()
    run = Incarnation(place, writer.incarnation)
    for epoch, is_begun in ((5, True), (6, False)):
        save_id = f"{writer.incarnation}-{epoch}-0"
        directory.store.create(f"{epoch}/process_0/{save_id}/node.json", b"half")
        if is_begun:
            directory.head.write(BeginSave(incarnation=run, epoch=epoch, folder=str(epoch), save_id=save_id))
    directory.store.create("7/file", b"mine")
    found = directory.contents().all_leftovers()
    assert [(one.epoch, one.given_up, one.nbytes) for one in found.saves] == [(5, False, 4), (6, True, 4)]
    assert [(thing.path, thing.kind) for thing in found.others] == [("7", Kind.NOT_LISTED)]
    assert {thing.kind for thing in found.others} <= NOT_OURS
    assert [one.epoch for one in directory.contents().saves()] == [5]
    remover = directory.contents().remover(time.time)
    asked: list[float] = []
    assert remover.remove(found.saves[1], lambda age: asked.append(age) or "not now") == "not now"
    assert remover.remove(found.saves[0], is_allowed) == ""
    remover.close()
    assert len(asked) == 1
    assert [one.epoch for one in directory.contents().all_leftovers().saves] == [6]
    now = directory.head.read()
    assert now is not None
    assert not now.begun, "it can never be committed"
    assert directory.list_epochs() == [1]


def test_a_quick_look_tells_of_what_was_set_aside_once() -> None:
    """Also while a save has begun in the folder where the objects of such an epoch stay."""
    place = new_bucket()
    save(place, 1, 2, 3, roll_back_to=1)
    directory = opened(place)
    assert isinstance(directory, BucketDirectory)
    writer = directory.claim()
    run = Incarnation(place, writer.incarnation)
    save_id = f"{writer.incarnation}-2-0"
    directory.store.create(f"2/process_0/{save_id}/node.json", b"half")
    directory.head.write(BeginSave(incarnation=run, epoch=2, folder="2", save_id=save_id))
    found = directory.contents().leftovers()
    assert [one.save_id for one in found.saves] == [save_id]
    assert [(thing.kind, thing.epochs) for thing in found.others] == [(Kind.ROLLED_BACK, (2, 3))]


def test_a_removal_measures_what_it_removes(tmp_path: pathlib.Path) -> None:
    """The age is that at the removal, not that of the look before it."""
    root = tmp_path / "run"
    save(str(root), 1)
    export = f"export-{'0' * 16}{paths.TMP_SUFFIX}"
    folder(root, export)
    contents = opened(str(root)).contents()
    (thing,) = contents.all_leftovers().others
    remover = contents.remover(lambda: time.time() + 3600)
    ages: list[float] = []
    assert remover.remove(thing, lambda age: ages.append(age) or "young") == "young"
    assert 3590 < ages[0] < 3700
    assert (root / export / "file").read_text() == "x"
    assert remover.remove(thing, is_allowed) == ""
    assert remover.remove(thing, is_allowed) == "", "it is gone"
    remover.close()
    assert sorted(os.listdir(root)) == sorted(name for name in os.listdir(root) if not name.startswith(("gc-", "exp")))
    assert opened(str(root)).list_epochs() == [1]


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.SAVE])
def test_each_kind_has_a_row(kind: Kind) -> None:
    """The views have a kind of row for each thing, and words for each that is no epoch."""
    thing = Leftover(path="x", kind=kind, nbytes=3, last_ns=HOUR_NS, destination="5", numbers=("6", "7"), counted=9)
    row = row_makers.leftover_row(thing, "{root}", 2 * HOUR_NS)
    assert (row.path, row.nbytes, row.age_secs) == ("x", 3, 3600.0)
    assert row.kind == row_makers.kind_of_row(kind)
    assert "{destination}" not in row.detail
    assert row.detail.endswith("(the first 9 objects)")
    assert kind in (Kind.EPOCH, Kind.OTHER) or len(row.detail) > len(" (the first 9 objects)")


def test_a_bucket_that_may_not_be_listed_says_so_and_shows_what_its_head_names() -> None:
    place = new_bucket()
    save(place, 1, 2, 3, roll_back_to=2)
    store = FaultyStore(open_store(place))
    directory = directory_of(store, StepNames.of(ocp.CheckpointManagerOptions()))
    with store.faults.fail(Store.list, AccessError("this user may not list it")):
        found = directory.contents().leftovers()
    assert found.problems == {"": "this user may not list it"}
    assert [thing.epochs for thing in found.others] == [(3,)]


def test_a_measure_counts_each_thing_once_and_keeps_the_first_problem(tmp_path: pathlib.Path) -> None:
    folder(tmp_path, "notes", "12345")
    (tmp_path / "notes" / "link").symlink_to("file")
    found = opened(str(tmp_path)).contents().measure("notes")
    assert found is not None
    assert (found.nbytes, found.entries, found.problem) == (5, 3, "")
    for error in (FileNotFoundError("gone"), PermissionError("first"), OSError("second")):
        found.note(error)
    assert found.problem == "first"
