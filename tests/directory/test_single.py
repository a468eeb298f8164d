"""The folder of one epoch as a directory: it has that epoch alone, whatever lies around it, and is only read."""

from __future__ import annotations

import pathlib
import uuid

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.directory.single import SingleEpochDirectory, single_epoch
from epochckpt.errors import EpochNotFoundError, UnsupportedError
from epochckpt.inspection import scan
from epochckpt.storage import open_store


@pytest.fixture(params=["posix", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    place = str(tmp_path / "run") if request.param == "posix" else f"memory://single/{uuid.uuid4()}"
    with ec.CheckpointManager(place, node=["a", "b"]) as manager:
        for epoch in range(4):
            args = ocp.args.StandardSave({"w": jnp.ones(2)})
            assert manager.save(epoch, args=args, metrics={"loss": float(epoch)})
        manager.wait_until_finished()
        manager.delete(1)
    return place


def single(place: str) -> SingleEpochDirectory:
    store = open_store(place)
    found = single_epoch(store, {entry.name for entry in store.list("")})
    assert found is not None
    return found


def test_it_has_one_epoch(place: str) -> None:
    directory = single(f"{place}/2")
    assert directory.place == f"{place}/2"
    assert directory.list_epochs() == directory.seen_epochs() == [2]
    assert directory.read_record(2).metrics == {"loss": 2.0}
    assert directory.folders(frozenset()) == {2: "2"}
    with pytest.raises(EpochNotFoundError):
        directory.read_record(3)


def test_it_has_the_files_of_that_epoch(place: str) -> None:
    contents = single(f"{place}/2").contents()
    (group,) = contents.all_files().groups
    assert (group.path, group.epochs) == ("2", (2,))
    size = contents.measure("2")
    assert size is not None
    assert 0 < sum(file.size for file in group.files) <= size.nbytes
    assert contents.saves() == contents.leftovers().others == contents.all_leftovers().others == []


def test_what_was_deleted_around_it_is_no_part_of_it(place: str) -> None:
    """The run has noted the metrics of its deleted epochs; the folder of one epoch has no history."""
    assert [row.epoch for row in scan.look(place).deleted] == [1]
    seen = scan.look(f"{place}/2")
    assert [(row.epoch, row.latest) for row in seen.epochs] == [(2, True)]
    assert seen.deleted == ()
    assert seen.leftovers == ()


def test_it_is_only_read(place: str) -> None:
    directory = single(f"{place}/2")
    for act in (directory.claim, lambda: directory.join("0" * 16)):
        with pytest.raises(UnsupportedError, match=r"2 is the folder of one epoch.* open "):
            act()


def test_a_directory_of_several_epochs_is_none(place: str) -> None:
    store = open_store(place)
    assert single_epoch(store, {entry.name for entry in store.list("")}) is None
