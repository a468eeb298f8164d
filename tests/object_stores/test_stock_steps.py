"""Steps of stock Orbax in a bucket: deleted, set aside, replaced, retired; their numbers saved anew."""

import json
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import epochckpt as ec
from epochckpt import _threads
from epochckpt.directory import directory_of
from epochckpt.format import paths
from epochckpt.inspection import rows
from epochckpt.inspection.gc import collect
from epochckpt.orbax import StepNames, object_view
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, StoreCall
from tests.support import stock_steps
from tests.support.object_servers import Bucket, bucket

Options = ocp.CheckpointManagerOptions
MARKER = "commit_success.txt"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Steps 1 to 3, on a local disk."""
    directory = tmp_path_factory.mktemp("stock")
    stock_steps.simple(directory, 1, 2, 3)
    return directory


@pytest.fixture(scope="module")
def google() -> Iterator[Bucket]:
    with bucket("gs") as made:
        yield made


@pytest.fixture
def url(google: Bucket, written: pathlib.Path) -> str:
    """A directory with these steps in a bucket, of the kind that stock Orbax saves to."""
    url = google.new_url()
    stock_steps.upload(written, url, 1, 2, 3)
    return url


def state(value: float) -> Any:
    return ocp.args.StandardSave({"w": np.full(3, value, np.float32)})


def save(manager: ec.CheckpointManager, epoch: int, **arguments: Any) -> None:
    assert manager.save(epoch, args=state(epoch), force=True, **arguments)
    manager.wait_until_finished()


def names(url: str, folder: str = "") -> set[str]:
    return {file.path for file in open_store(url).files(folder)}


def as_stock(manager: ec.CheckpointManager, epoch: int) -> bool:
    """Whether an epoch has what stock Orbax saved as it."""
    found = manager.restore(epoch)
    return all(np.array_equal(found[name], value) for name, value in stock_steps.tree_of(epoch).items())


def is_ours(url: str, epoch: int) -> bool:
    """Whether an epoch is one that `save` saved, with a whole view for stock Orbax."""
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        verified = manager.verify(epoch)
        assert verified.ok
        assert (verified.view_damage, verified.note) == ((), "")
        return manager.restore(epoch)["w"].tolist() == [epoch] * 3


def test_a_deleted_step_is_gone_and_its_number_free(url: str) -> None:
    others = names(url) - {f"2/{name}" for name in names(url, "2")}
    with ec.CheckpointManager(url) as manager:
        manager.delete(2)
        assert list(manager.all_steps()) == [1, 3]
    assert names(url, "2") == set()
    assert others < names(url)
    with ec.CheckpointManager(url) as manager:
        assert list(manager.all_steps()) == [1, 3]
        assert as_stock(manager, 3)
        save(manager, 2)
    assert is_ours(url, 2)


@pytest.mark.slow
def test_steps_that_are_rolled_back_keep_their_bytes(url: str, written: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Stock Orbax reads them where they are kept, and their numbers are saved anew."""
    with ec.CheckpointManager(url) as manager:
        save(manager, 4)
        manager.rollback_to(1)
        assert list(manager.all_steps()) == [1]
        for epoch in (2, 3):
            save(manager, epoch)
    with ec.CheckpointManager(url) as manager:
        assert list(manager.all_steps()) == [1, 2, 3]
        assert as_stock(manager, 1)
    assert is_ours(url, 2)
    assert is_ours(url, 3)
    (kept,) = (entry.name for entry in open_store(url).list("") if entry.name.startswith("rolled-back-"))
    for epoch in (2, 3):
        place = stock_steps.download(url, f"{kept}/{epoch}", tmp_path / str(epoch))
        files = {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        before = written / str(epoch)
        expected = {path.relative_to(before): path.read_bytes() for path in before.rglob("*") if path.is_file()}
        assert files == expected | {pathlib.Path(MARKER): b""}
    found = ocp.StandardCheckpointer().restore(tmp_path / "2" / "default")
    assert all(np.array_equal(found[name], value) for name, value in stock_steps.tree_of(2).items())


@pytest.mark.slow
def test_a_good_step_is_replaced_by_deleting_it(url: str) -> None:
    with ec.CheckpointManager(url) as manager:
        with pytest.raises(ec.errors.EpochExistsError):
            save(manager, 3)
        with pytest.raises(ec.errors.InvalidArgumentError, match=r"delete\(\) makes room"):
            manager.allow_overwrite(3)
        assert as_stock(manager, 3)


@pytest.mark.slow
def test_a_replacement_that_fails_leaves_the_step(url: str, faults: Faults) -> None:
    """A damaged one, too, with its marker and its records, which a view would have under the same names."""
    open_store(url).remove("3/default/_METADATA")
    before = names(url, "3")
    with ec.CheckpointManager(url) as manager:
        manager.restore(None)
        save(manager, 4)
        refused = ec.errors.StorageError("head", OSError("refused"))
        with faults.fail(Store.replace, refused, where=lambda call: call.path == paths.HEAD):
            assert manager.save(3, args=state(3), force=True)
            with pytest.raises(ec.errors.SaveError):
                manager.wait_until_finished()
    with ec.CheckpointManager(url) as manager:
        save(manager, 5)
        assert list(manager.all_steps()) == [1, 2, 3, 4, 5]
    assert names(url, "3") == before


def test_retention_deletes_what_is_a_step_without_doubt(url: str) -> None:
    """Something else was saved below step 1; only a caller may delete that."""
    open_store(url).create("1/default/_CHECKPOINT_METADATA", b"{}")
    with ec.CheckpointManager(url, options=Options(max_to_keep=1)) as manager:
        save(manager, 4)
        assert list(manager.all_steps()) == [1, 4]
    assert names(url, "2") == names(url, "3") == set()
    assert f"1/{MARKER}" in names(url)
    with ec.CheckpointManager(url) as manager:
        manager.delete(1)
    assert names(url, "1") == set()


def test_a_step_that_is_in_doubt_is_read_once(url: str, faults: Faults) -> None:
    """A bucket charges for each look, and retention would look with every save."""
    open_store(url).create("1/default/_CHECKPOINT_METADATA", b"{}")
    directory = directory_of(open_store(url), StepNames.of(Options()))
    directory.refresh()
    read = list[str]()
    faults.after(Store.open_reader, lambda call: read.append(call.path))
    faults.after(Store.read, lambda call: read.append(call.path))
    assert [directory.is_certain_step(step) for step in (1, 2, 2)] == [False, True, True]
    assert read != []
    read.clear()
    assert not directory.is_certain_step(1)
    assert read == []


def test_a_subfolder_keeps_deleted_steps(url: str) -> None:
    before = names(url, "2")
    with ec.CheckpointManager(url, options=Options(todelete_subdir="trash")) as manager:
        manager.delete(2)
    assert names(url, "trash/2") == before
    assert names(url, "2") == set()
    with ec.CheckpointManager(url, options=Options(todelete_subdir="trash")) as manager:
        save(manager, 2)
        with pytest.raises(ec.errors.EpochExistsError, match="trash/2 exists already"):
            manager.delete(2)


def test_what_lies_where_a_step_would_be_kept_is_not_taken_for_it(url: str) -> None:
    """Such as another step 2, of the same names and sizes."""
    store, before = open_store(url), names(url, "2")
    for name in before:
        store.create(f"trash/2/{name}", bytes(store.size(f"2/{name}")))
    with ec.CheckpointManager(url, options=Options(todelete_subdir="trash")) as manager:
        with pytest.raises(ec.errors.EpochExistsError, match="trash/2 exists already; move it away"):
            manager.delete(2)
        assert list(manager.all_steps()) == [1, 2, 3]
        assert as_stock(manager, 2)
        store.remove_tree("trash")
        manager.delete(2)
    assert names(url, "trash/2") == before
    assert names(url, "2") == set()


@pytest.mark.slow
@pytest.mark.parametrize("then", ["before the files", "after the files"])
def test_a_gc_of_kept_steps_that_is_killed_leaves_room(then: str, url: str, faults: Faults) -> None:
    """Until nothing is left of them the head names them, and the next gc goes on."""
    options = Options(todelete_subdir="trash")

    def kill(call: StoreCall) -> None:
        raise KeyboardInterrupt

    def gc() -> None:
        collect(url, delete=True, epochs_too=True, options=options, clock=lambda: time.time() + 1e7)

    with ec.CheckpointManager(url, options=options) as manager:
        manager.delete(2)
    at = faults.after if then == "after the files" else faults.before
    with at(Store.remove_tree, kill), pytest.raises(KeyboardInterrupt):
        gc()
    gc()
    assert names(url, "trash") == set()
    with ec.CheckpointManager(url, options=options) as manager:
        save(manager, 2)
        manager.delete(2)
        assert list(manager.all_steps()) == [1, 3]
    assert names(url, "trash/2")


@pytest.mark.slow
def test_a_deletion_that_is_late_leaves_the_view_of_a_newer_run(url: str, faults: Faults) -> None:
    """It has listed the step, which the newer run then removes, to save its number."""
    paused, go_on = threading.Event(), threading.Event()

    def wait(call: StoreCall) -> None:
        if not paused.is_set():
            paused.set()
            assert go_on.wait(100)

    with ec.CheckpointManager(url) as older, ec.CheckpointManager(url) as newer:
        older.claim()
        faults.after(Store.files, wait, where=lambda call: call.path == "2")
        deletion = _threads.start(lambda: older.delete(2))
        assert paused.wait(100)
        try:
            newer.claim()
            save(newer, 2)
        finally:
            go_on.set()
            deletion.result()
    assert is_ours(url, 2)


@pytest.mark.slow
@pytest.mark.parametrize("to_end", ["the next claim", "repair_view"])
def test_a_view_waits_until_the_step_it_replaces_is_set_aside(to_end: str, url: str, faults: Faults) -> None:
    """The store refuses to copy; then the step is set aside, whole, and the view is written."""
    store = open_store(url)
    store.remove("3/default/_METADATA")
    before = {name: store.read(f"3/{name}", limit_bytes=1 << 20) for name in names(url, "3")}

    with ec.CheckpointManager(url) as manager, faults.fail(Store.copy, OSError("refused")):
        manager.restore(None)
        save(manager, 3)
        save(manager, 4)
        assert manager.restore(3)["w"].tolist() == [3] * 3
        there = names(url, "3")
        assert "default/_METADATA" not in there
        assert {n: store.read(f"3/{n}", limit_bytes=1 << 20) for n in before.keys() & there} == before
    if to_end == "repair_view":
        ec.repair_view(url, 3)
    else:
        with ec.CheckpointManager(url) as manager:
            manager.claim()
    pause = threading.Event()  # a thread of the claim's does it, and writes the marker of the view at its end
    while not names(url) >= {"3/default/_METADATA", f"3/{MARKER}"}:
        pause.wait(0.01)
    (kept,) = (entry.name for entry in store.list("") if entry.name.startswith("damaged-"))
    assert {name: store.read(f"{kept}/3/{name}", limit_bytes=1 << 20) for name in before} == before
    assert is_ours(url, 3)


@pytest.mark.parametrize("tree", [{"w": np.ones(3, np.float32)}, {"n": 7}], ids=["array", "number"])
def test_a_step_that_goes_while_it_is_read_is_not_read_as_zeros(
    tree: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax once left zeros out, and does not say in such steps that it did not."""
    stock_steps.write(tmp_path, "folders-zarr2-single", {1: tree, 2: tree})
    path = tmp_path / "2" / "default" / "_METADATA"
    record = json.loads(path.read_text())
    del record["store_array_data_equal_to_fill_value"]
    path.write_text(json.dumps(record))
    begin = ts.open
    with ec.CheckpointManager(tmp_path) as manager, ec.CheckpointManager(tmp_path) as other:

        def late(*args: Any, **arguments: Any) -> Any:
            if 2 in other.all_steps():
                other.delete(2)
            return begin(*args, **arguments)

        assert manager.verify(2).ok
        manager.reload()
        monkeypatch.setattr(ts, "open", late)
        with pytest.raises(ec.errors.EpochDeletedError):
            manager.restore(2)


@pytest.mark.slow
def test_a_damaged_step_is_set_aside_when_its_number_is_saved(url: str) -> None:
    open_store(url).remove("3/default/_METADATA")
    before = names(url, "3")
    with ec.CheckpointManager(url) as manager:
        assert np.array_equal(manager.restore(None)["n"], stock_steps.tree_of(2)["n"])
        assert list(manager.all_steps()) == [1, 2]
        save(manager, 3)
    assert is_ours(url, 3)
    (kept,) = (entry.name for entry in open_store(url).list("") if entry.name.startswith("damaged-"))
    assert names(url, f"{kept}/3") == before


@pytest.mark.slow
def test_what_stock_orbax_saves_anew_meanwhile_stays(url: str, written: pathlib.Path, faults: Faults) -> None:
    """The run is paused before it removes the step that it has deleted; the next claim finds the new one."""

    def save_anew(call: StoreCall) -> None:
        deleted.remove()
        store = open_store(url)
        store.remove_tree("2")
        stock_steps.upload(written, url, 2)
        record = store.read("2/_CHECKPOINT_METADATA", limit_bytes=1 << 20)
        time_ns = b'"commit_timestamp_nsecs": 1'
        store.put(
            "2/_CHECKPOINT_METADATA", record.replace(b'"commit_timestamp_nsecs": ', time_ns), draft="", replace=True
        )

    with ec.CheckpointManager(url) as manager:
        manager.claim()
        deleted = faults.after(Store.replace, save_anew, where=lambda call: call.path == paths.HEAD)
        manager.delete(2)
        assert deleted.hits == 1
        manager.reload()
        assert list(manager.all_steps()) == [1, 3]
    with ec.CheckpointManager(url) as manager:
        manager.claim()
        assert list(manager.all_steps()) == [1, 2, 3]
        assert as_stock(manager, 2)


@pytest.mark.slow
@pytest.mark.parametrize("to_end", ["the next claim", "gc"])
def test_a_deletion_that_was_cut_short_is_finished(to_end: str, url: str, faults: Faults) -> None:
    """Nobody lists the step meanwhile."""
    with ec.CheckpointManager(url) as manager:
        manager.claim()
        with faults.fail(Store.files, OSError("cut short"), where=lambda call: call.path in ("2", "3")) as cut:
            manager.delete(2)
            with pytest.raises(ec.errors.RemovalError):
                manager.wait_until_finished()
            manager.rollback_to(1)
        assert cut.hits == 2
    assert f"2/{MARKER}" in names(url)
    assert f"3/{MARKER}" in names(url)
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        assert list(manager.all_steps()) == [1]
    assert {row.path: row.kind for row in ec.inspect(url).du().usage.rows}["2"] == rows.DELETED
    if to_end == "gc":
        assert "2" in {row.path for row in collect(url, delete=True, clock=lambda: time.time() + 1e7).rows}
    else:
        with ec.CheckpointManager(url) as manager:
            manager.claim()
            save(manager, 3)
        assert is_ours(url, 3)
    assert names(url, "2") == set()


@pytest.mark.slow
def test_what_comes_late_of_a_view_takes_no_number(url: str) -> None:
    """Any of its small files, after its epoch was deleted. A folder with anything else is somebody's."""
    store = open_store(url)
    with ec.CheckpointManager(url) as manager:
        save(manager, 7, metrics={"loss": 1.0})
    late = {
        name: store.read(f"7/{name}", limit_bytes=1 << 20) for name in names(url, "7") if object_view.is_small(name)
    }
    assert len(late) > 6
    assert "metrics/metrics" in late
    for some in (*([name] for name in late), list(late)):
        with ec.CheckpointManager(url) as manager:
            manager.delete(7)
        for name in some:
            store.create(f"7/{name}", late[name])
        with ec.CheckpointManager(url) as manager:
            manager.claim()
            save(manager, 7, metrics={"loss": 1.0})
        assert is_ours(url, 7)
    for name, content in {"8/default/d/0": b"x", "9/default/metadata": b"{}", "10/_CHECKPOINT_METADATA": b"{}"}.items():
        store.create(name, content)
    with ec.CheckpointManager(url) as manager:
        manager.claim()
        manager.reload()
        assert sorted(manager.foreign_folders()) == [8, 9, 10]


@pytest.mark.slow
def test_gc_removes_steps_that_were_rolled_back_when_it_is_told_to(url: str) -> None:
    with ec.CheckpointManager(url) as manager:
        manager.rollback_to(1)
    collect(url, delete=True, epochs_too=True, clock=lambda: time.time() + 1e7)
    assert {name.partition("/")[0] for name in names(url)} == {"1", "_epochckpt"}
    with ec.CheckpointManager(url) as manager:
        assert list(manager.all_steps()) == [1]
        assert as_stock(manager, 1)
