"""How the format grows: an epoch that needs a newer epochckpt is refused as that, and closes nothing but itself."""

from __future__ import annotations

import contextlib
import json
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.cli.main import main
from epochckpt.directory import directory_of, head_record, rebuild
from epochckpt.directory.bucket import BucketDirectory
from epochckpt.format import checksums, paths
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store

Save, Restore, Options = ocp.args.StandardSave, ocp.args.StandardRestore, ocp.CheckpointManagerOptions
Change = dict[str, Any]
FUTURE: list[tuple[Change, list[str]]] = [
    ({"requires": ["parity", "columns"]}, ["parity", "columns"]),
    ({"version": 2}, []),
]
IDS = ["requires", "version"]


def save(directory: str, *epochs: int, options: Options | None = None) -> None:
    with ec.CheckpointManager(directory, options=options) as manager:
        for epoch in epochs:
            manager.save(epoch, args=Save({"w": jnp.full(3, epoch)}), metrics={"loss": float(epoch)})


def value(manager: ec.CheckpointManager, epoch: int | None) -> float:
    return float(manager.restore(epoch, args=Restore())["w"][0])


def read(store: Store, path: str) -> bytes:
    return store.read(path, limit_bytes=2**20)


def record_paths(store: Store, epoch: int) -> list[str]:
    """The records of an epoch of one attempt; on object stores `epoch.json` is a copy of the other."""
    found = [f"{epoch}/{entry.name}" for entry in store.list(str(epoch)) if entry.name.endswith(".json")]
    return [path for path in found if path.endswith("epoch.json") or paths.save_id_in(path.rpartition("/")[2])]


def change(store: Store, path: str, fields: Change) -> None:
    """Changes fields of a record as a newer epochckpt would have written them."""
    record = json.loads(read(store, path))
    del record["checksum"]
    store.put(path, checksums.seal({**record, **fields}), draft="draft", replace=True)


def change_epoch(directory: str, epoch: int, fields: Change) -> None:
    store = open_store(directory)
    for path in record_paths(store, epoch):
        change(store, path, fields)


def tree(directory: str, below: str = "") -> dict[str, bytes]:
    store, found = open_store(directory), dict[str, bytes]()
    folders = [below]
    while folders:
        folder = folders.pop()
        for entry in store.list(folder.rstrip("/")):
            path = f"{folder}{entry.name}"
            if entry.is_folder:
                folders.append(f"{path}/")
            else:
                with contextlib.suppress(IsADirectoryError):  # a link of the Orbax view
                    found[path] = read(store, path)
    return found


@pytest.fixture(params=["posix", "bucket"])
def directory(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """Epochs 0, 1 and 2."""
    where = str(tmp_path / "run") if request.param == "posix" else f"memory://{uuid.uuid4().hex}/run"
    save(where, 0, 1, 2)
    return where


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "features"), FUTURE, ids=IDS)
@pytest.mark.parametrize("newer", [1, 2])
def test_an_epoch_that_needs_a_newer_epochckpt_closes_only_itself(
    directory: str, fields: Change, features: list[str], newer: int
) -> None:
    """It is listed; every other epoch is restored; what is asked of it names the record and the remedy."""
    change_epoch(directory, newer, fields)
    before = tree(directory, f"{newer}/")
    with ec.CheckpointManager(directory) as manager:
        assert manager.all_steps() == [0, 1, 2]
        assert manager.latest_step() == 2
        assert manager.damaged_epochs() == []
        others = {0, 1, 2} - {newer}
        assert {epoch: value(manager, epoch) for epoch in others} == {epoch: epoch for epoch in others}
        asks: list[Callable[[], Any]] = [
            lambda: manager.restore(newer),
            lambda: manager.restore_leaves(newer, "*"),
            lambda: manager.verify(newer),
            lambda: manager.metadata(newer),
            lambda: manager.allow_overwrite(newer),
        ]
        for ask in asks:
            with pytest.raises(errors.FormatVersionError, match=rf"{newer}/.*newer epochckpt") as caught:
                ask()
            assert caught.value.features == features
            assert not isinstance(caught.value, errors.FormatError | errors.DamagedError)
        assert manager.status(newer).state == "newer"
        with pytest.raises(errors.EpochExistsError):
            manager.save(newer, args=Save({"w": jnp.zeros(3)}), force=True)
        manager.reload()
        assert manager.all_steps() == [0, 1, 2]
        manager.save(3, args=Save({"w": jnp.full(3, 3)}))
        manager.wait_until_finished()
        assert value(manager, None) == 3
    assert tree(directory, f"{newer}/") == before


@pytest.mark.parametrize(("fields", "features"), FUTURE, ids=IDS)
def test_no_older_epoch_is_taken_for_one_that_needs_a_newer_epochckpt(
    directory: str, fields: Change, features: list[str]
) -> None:
    """`restore(None)` raises, and so does a job that resumes; neither sets anything aside."""
    change_epoch(directory, 2, fields)
    before = tree(directory)
    with (
        ec.CheckpointManager(directory, options=Options(read_only=True)) as manager,
        pytest.raises(errors.FormatVersionError, match="2/") as caught,
    ):
        manager.restore(None)
    assert caught.value.features == features
    with ec.Job() as job, job.epoch_group:
        ec.Task(lambda: None)
    runner = ec.JobRunner(job, ec.CheckpointManager(directory))
    with pytest.raises(errors.FormatVersionError, match="2/"):
        runner.train()
    after = tree(directory)
    assert {path: data for path, data in after.items() if path in before and path != paths.HEAD} == {
        path: data for path, data in before.items() if path != paths.HEAD
    }
    assert not [path for path in after if "damaged" in path]


def test_views_show_what_needs_a_newer_epochckpt(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The list has it with a state of its own; `verify` and `show` do not call it damaged."""
    change_epoch(directory, 2, {"requires": ["parity"]})
    seen = ec.inspect(directory)
    row = seen[2].row
    assert row.state == "newer"
    assert row.latest
    assert seen.latest is not None
    assert seen.latest.epoch == 2
    assert "'parity'" in row.detail
    with pytest.raises(errors.FormatVersionError, match="'parity'"):
        seen[2]["default"]
    for command in ("ls", "show", "verify"):
        main([command, directory, *(["2"] if command != "ls" else [])])
        said = "".join(capsys.readouterr()).lower()
        assert "newer" in said
        assert "damaged" not in said


def test_retention_keeps_what_only_a_newer_epochckpt_can_judge(tmp_path: pathlib.Path) -> None:
    """By `best_fn`, an epoch whose metrics cannot be read is no loser; by number it goes as any other."""
    run = str(tmp_path / "run")
    save(run, 0, 1, 2)
    change_epoch(run, 1, {"requires": ["parity"]})
    best = Options(max_to_keep=1, best_fn=lambda metrics: metrics["loss"])
    save(run, 5, options=best)
    with ec.CheckpointManager(run, options=best) as manager:
        assert manager.all_steps() == [1, 5]
        assert manager.best_step() == 5
    save(run, 6, options=Options(max_to_keep=2))
    with ec.CheckpointManager(run) as manager:
        assert manager.all_steps() == [5, 6]


@pytest.mark.parametrize(("fields", "features"), FUTURE, ids=IDS)
def test_a_head_that_needs_a_newer_epochckpt_closes_the_directory(fields: Change, features: list[str]) -> None:
    """Nobody may write it without understanding it, and `repair` does not rebuild it from what it understands."""
    url = f"memory://{uuid.uuid4().hex}/run"
    save(url, 0)
    store = open_store(url)
    change(store, paths.HEAD, fields)
    before = read(store, paths.HEAD)
    epoch_directory = directory_of(open_store(url), StepNames.of(Options()))
    assert isinstance(epoch_directory, BucketDirectory)
    for call in (
        lambda: ec.CheckpointManager(url),
        lambda: ec.CheckpointManager(url, options=Options(read_only=True)),
        lambda: ec.inspect(url),
        lambda: rebuild.look(epoch_directory),
    ):
        with pytest.raises(errors.FormatVersionError, match=r"head\.json.*newer epochckpt") as caught:
            call()
        assert caught.value.features == features
        assert not getattr(caught.value, "__notes__", [])  # no advice to repair it
    assert main(["repair", url, "--yes"]) != 0
    assert read(store, paths.HEAD) == before


def test_a_lost_head_is_not_made_anew_where_an_epoch_needs_a_newer_epochckpt() -> None:
    """What it would leave out, a later run would sweep."""
    url = f"memory://{uuid.uuid4().hex}/run"
    save(url, 0, 1)
    change_epoch(url, 1, {"requires": ["parity"]})
    open_store(url).remove(paths.HEAD)
    epoch_directory = directory_of(open_store(url), StepNames.of(Options()))
    assert isinstance(epoch_directory, BucketDirectory)
    with pytest.raises(errors.FormatVersionError, match="1/"):
        rebuild.look(epoch_directory)


def test_fields_that_a_reader_does_not_know_do_not_disturb(directory: str) -> None:
    """In every record of an epoch, and in the head: what is not required may be ignored."""
    store = open_store(directory)
    for path in record_paths(store, 1):
        change(store, path, {"future": {"items": [1, {"a": None}], "default_item": True}})
    if not store.atomic_folder_rename:
        change(store, paths.HEAD, {"future": {"epochs": 3}})
        head_record.parse(paths.HEAD, read(store, paths.HEAD))
    with ec.CheckpointManager(directory) as manager:
        assert [value(manager, epoch) for epoch in (0, 1, 2)] == [0, 1, 2]
        assert manager.verify(1).ok
        manager.save(3, args=Save({"w": jnp.full(3, 3)}))
    with ec.CheckpointManager(directory) as manager:
        assert np.array_equal([value(manager, epoch) for epoch in (1, 3)], [1, 3])


@pytest.mark.parametrize("requires", ["parity", [3], [["x"]], ["x" * 101], {"parity": 1}, None])
def test_requirements_that_are_none_are_damage(tmp_path: pathlib.Path, requires: Any) -> None:
    """No version of the format writes such."""
    run = str(tmp_path / "run")
    save(run, 0, 1)
    change_epoch(run, 1, {"requires": requires})
    with ec.CheckpointManager(run, options=Options(read_only=True)) as manager:
        assert manager.all_steps() == [0]
        with pytest.raises(errors.FormatError, match="requires"):
            manager.restore(1)
