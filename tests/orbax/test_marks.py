"""What is taken for a step of stock Orbax, and what retention may delete of it: by content, never by a name."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.directory import directory_of
from epochckpt.orbax import StepNames, step_recognition, steps
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults
from tests.support import stock_states
from tests.support.files import unchanged
from tests.support.silence import Silence

Save, Restore, Composite = ocp.args.StandardSave, ocp.args.StandardRestore, ocp.args.Composite
Options = ocp.CheckpointManagerOptions
READ_ONLY = Options(read_only=True)


def loss(metrics: Any) -> float:
    return metrics["loss"]


BEST = {"best_fn": loss, "best_mode": "min"}


def tree_of(step: int) -> dict[str, Any]:
    return {"w": jnp.full((4, 3), step, jnp.float32), "n": np.arange(3) + step, "step": step, "key": jax.random.key(1)}


def simple(directory: pathlib.Path, *steps: int, **options: Any) -> None:
    """Steps of a small tree, by stock Orbax."""
    with ocp.CheckpointManager(directory, options=Options(**options)) as manager:
        for step in steps:
            manager.save(step, args=Save(tree_of(step)), metrics={"loss": abs(step - 3.5)})


def ours(directory: pathlib.Path, *steps: int, **options: Any) -> None:
    """Epochs of ours."""
    with ec.CheckpointManager(directory, options=Options(**options)) as manager:
        for step in steps:
            manager.save(step, args=Save(tree_of(step)), metrics={"loss": abs(step - 3.5)})


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory of stock Orbax with the steps 1 and 2."""
    simple(tmp_path / "run", 1, 2)
    return tmp_path / "run"


# -- what is no step -------------------------------------------------------------------------------------------------


def _bare(path: pathlib.Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree_of(1))


def _old_bare(path: pathlib.Path) -> None:
    """As Orbax wrote it before there was `_CHECKPOINT_METADATA`."""
    _bare(path)
    (path / "_CHECKPOINT_METADATA").unlink()


def _files(*names: str, content: str = "{}") -> Callable[[pathlib.Path], None]:
    def write(path: pathlib.Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(content)

    return write


FOREIGN: dict[str, Callable[[pathlib.Path], None]] = {
    "sweep of stock managers": lambda p: simple(p, 1, 2),
    "sweep of stock managers, prefixed": lambda p: simple(p, 1, 2, step_prefix="ckpt"),
    "sweep of our managers": lambda p: ours(p, 1, 2),
    "sweep of plain checkpointers": lambda p: _bare(p / "5"),
    "sweep of plain checkpointers, prefixed": lambda p: _bare(p / "ckpt_5"),
    "sweep of old plain checkpointers": lambda p: _old_bare(p / "5"),
    "TensorFlow": _files("checkpoint", "model.ckpt-5.index", "model.ckpt-5.data-00000-of-00001"),
    "TensorFlow below": _files("train/checkpoint", "train/model.ckpt-5.index"),
    "zarr group": _files(".zgroup", "temperature/.zarray", "temperature/0.0"),
    "zarr array": _files(".zarray", "0.0"),
    "zarr3": _files("zarr.json", "temperature/zarr.json", "temperature/c/0"),
    "database": _files("manifest.ocdbt", "d/0123456789abcdef"),
    "database below": _files("default/manifest.ocdbt", "default/d/0123456789abcdef"),
    "msgpack": _files("checkpoint"),
    "msgpack of an item": _files("default/checkpoint"),
    "committed by somebody": _files("commit_success.txt", "default/commit_success.txt"),
    "staging below": _files("default.orbax-checkpoint-tmp-17/_METADATA", content='{"tree_metadata": {}}'),
    "tree of something else": _files("_METADATA", "default/_METADATA", content='{"title": "weather"}'),
    "tree that is a folder": _files("_METADATA/x", "default/_METADATA/x"),
    "record of something else": _files("_CHECKPOINT_METADATA", content='{"model": "tiny"}'),
    "record without fields": _files("_CHECKPOINT_METADATA"),
    "record that is a list": _files("_CHECKPOINT_METADATA", content="[1]"),
    "record that is a folder": _files("_CHECKPOINT_METADATA/x"),
    "numbered trees": _files("7/_METADATA", "008/_METADATA", content='{"tree_metadata": {}}'),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_not_proved_to_be_a_step_is_none_and_untouched(
    tmp_path: pathlib.Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention would delete it: a sweep, TensorFlow's, zarr's or a database's folders that are named by numbers."""
    FOREIGN[what](tmp_path / "1")
    FOREIGN[what](tmp_path / "2022")
    before = len(list(tmp_path.rglob("*")))
    with unchanged(tmp_path):
        for options in (None, READ_ONLY):
            with ec.CheckpointManager(tmp_path, options=options) as manager:
                assert manager.all_steps() == []
                assert list(manager.foreign_folders()) == [1, 2022]
                with pytest.raises(errors.EpochNotFoundError):
                    manager.restore(1)
    assert len(list(tmp_path.rglob("*"))) == before
    assert f"{tmp_path}/1 is named like an epoch" in caplog.text
    manager = ec.CheckpointManager(tmp_path, options=Options(max_to_keep=1))
    with unchanged(tmp_path / "1"), unchanged(tmp_path / "2022"), manager:
        for epoch in (2, 3):
            assert manager.save(epoch, args=Save({"x": np.zeros(1)}))
        with pytest.raises(errors.EpochExistsError, match="no finished step of stock Orbax"):
            manager.save(2022, args=Save({"x": np.zeros(1)}), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [3]


# -- what is one, and what retention may delete ----------------------------------------------------------------------


@pytest.mark.parametrize("bare", [True, False])
def test_a_step_without_its_record_is_read_and_never_retired(
    tmp_path: pathlib.Path, bare: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The tree alone proves it; retention leaves it alone and says so once; `delete` removes it."""
    if bare:
        _bare(tmp_path / "1")
    else:
        simple(tmp_path, 1)
    simple(tmp_path, 2)
    (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
    with ec.CheckpointManager(tmp_path, options=Options(max_to_keep=1)) as manager:
        assert manager.all_steps() == [1, 2]
        assert stock_states.differences(manager.restore(1), tree_of(1)) == []
        assert manager.verify(1).ok  # older Orbax wrote none
        for step in (3, 4, 5):
            manager.save(step, args=Save(tree_of(step)))
            manager.wait_until_finished()
            assert manager.all_steps() == [1, step]
        assert sum("checkpoint 1 of stock Orbax is not deleted" in r.getMessage() for r in caplog.records) == 1
        assert stock_states.differences(manager.restore(1), tree_of(1)) == []
        manager.delete(1)
        assert manager.all_steps() == [5]
    assert not (tmp_path / "1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["empty", "garbage", "list", "gone", "folder"])
def test_unusable_metrics_do_not_cost_the_step(tmp_path: pathlib.Path, harm: str) -> None:
    """With `keep_checkpoints_without_metrics=False` it would be the first to go; `verify` says what is wrong."""
    simple(tmp_path, 1, 2, 3, **BEST)
    metrics = tmp_path / "1" / "metrics" / "metrics"
    metrics.unlink()
    if harm == "folder":
        metrics.mkdir()
    elif harm != "gone":
        metrics.write_bytes({"empty": b"", "garbage": b"\0\xff" * 9, "list": b"[]"}[harm])
    options = Options(max_to_keep=1, keep_checkpoints_without_metrics=False, **BEST)
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.metrics(1) is None
        found = manager.verify(1)
        assert not found.ok
        assert [getattr(e, "path", None) for e in found.damage] == ["1/metrics/metrics"]
        assert manager.verify(2).ok
        manager.save(4, args=Save(tree_of(4)), metrics={"loss": 0.0})
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 4]
        assert stock_states.differences(manager.restore(1), tree_of(1)) == []


def test_a_step_below_which_others_were_saved_is_not_retired(run: pathlib.Path) -> None:
    """It is whole, but what lies in it is no part of it."""
    _bare(run / "1" / "7")
    with ec.CheckpointManager(run, options=Options(max_to_keep=1)) as manager:
        manager.save(3, args=Save(tree_of(3)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]
    assert (run / "1" / "7" / "_METADATA").exists()


def test_a_step_in_a_folder_with_our_name_is_no_epoch_of_ours(tmp_path: pathlib.Path) -> None:
    """Stock Orbax writes the path of a step into the step."""
    directory = tmp_path / "epochckpt committed this epoch."
    simple(directory, 1, 2)
    with ec.CheckpointManager(directory) as manager:
        assert manager.all_steps() == [1, 2]
        np.testing.assert_array_equal(manager.restore(1, args=Restore(tree_of(0)))["w"], tree_of(1)["w"])
        manager.delete(2)
        assert manager.latest_step() == 1


def test_what_identifies_a_step_without_a_record_survives_a_touch_and_a_rename(run: pathlib.Path) -> None:
    """Else a damaged step that is to be replaced would be called another one."""
    (run / "2" / "_CHECKPOINT_METADATA").unlink()
    store = open_store(run)
    first = steps.read(store, "2", 2)
    os.utime(run / "2", ns=(1, 1))
    (run / "2").rename(run / "3")
    assert steps.read(store, "3", 3).save_id == first.save_id
    assert steps.read(store, "1", 1).save_id != first.save_id


def test_folders_do_not_make_a_step_bare(run: pathlib.Path) -> None:
    """Items may be called as the files of a tree; and the step's own record says whether there are items."""
    store = open_store(run)
    for name in ("_sharding", "array_metadatas", "manifest.ocdbt", "checkpoint"):
        (run / "2" / name).mkdir()
    (run / "1" / "checkpoint").write_text("of somebody")
    assert steps.read(store, "1", 1).folders == {"default": "default"}
    (run / "2" / "_CHECKPOINT_METADATA").unlink()
    assert "default" in steps.read(store, "2", 2).folders


@pytest.mark.parametrize("code", [errno.ENOTDIR, errno.ENOENT, errno.EACCES])
def test_a_step_that_cannot_be_looked_at(run: pathlib.Path, faults: Faults, code: int) -> None:
    """Gone while it is read, or not permitted: errors of ours."""
    epoch_directory = directory_of(open_store(run), StepNames.of(Options()))
    faults.fail(Store.list, OSError(code, os.strerror(code), "2"), where=lambda call: call.path == "2")
    with pytest.raises(errors.AccessError if code == errno.EACCES else errors.EpochNotFoundError, match="2"):
        epoch_directory.read_record(2)


def test_a_record_that_the_device_cannot_read_does_not_block_the_directory(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch, patience: Callable[..., None]
) -> None:
    """A bad sector under `_CHECKPOINT_METADATA`: the arrays are there, and retention leaves them alone."""
    patience(read_pauses_secs=())
    Silence(monkeypatch, run, lambda n, path: errno.EIO if path == "1/_CHECKPOINT_METADATA" else 0)
    with ec.CheckpointManager(run, options=Options(max_to_keep=1)) as manager:
        assert stock_states.differences(manager.restore(1), tree_of(1)) == []
        assert not manager.verify(1).ok
        manager.save(3, args=Save(tree_of(3)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]


# -- epochs of ours that lost their records, and exports -------------------------------------------------------------


def _three_kinds() -> Any:
    return Composite(
        state=Save(tree_of(3)), config=ocp.args.JsonSave({"a": 1}), key=ocp.args.JaxRandomKeySave(jax.random.key(7))
    )


def _no_json(folder: pathlib.Path) -> None:
    for path in folder.rglob("*.json"):
        path.unlink()


def _only_view(folder: pathlib.Path) -> None:
    """What is left when the nodes' folders were not copied."""
    (folder / "epoch.json").unlink()
    shutil.rmtree(folder / "process_0")


def _copied(folder: pathlib.Path) -> None:
    """`cp -rL`, without records."""
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)
    _no_json(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "three", "json"])
@pytest.mark.parametrize("how", [_no_json, _only_view, _copied])
@pytest.mark.parametrize("says", [True, False])
def test_an_epoch_of_ours_that_lost_its_records_is_recognized(
    run: pathlib.Path, kind: str, how: Callable[[pathlib.Path], None], says: bool
) -> None:
    """Its view looks like a step, but the bytes behind it would not be verified. `says`: as in `commit_success.txt`."""
    with ec.CheckpointManager(run) as manager:
        json_only = Composite(config=ocp.args.JsonSave({"a": 1}))
        manager.save(3, args={"one": Save(tree_of(3)), "three": _three_kinds(), "json": json_only}[kind])
    text = run / "3" / "commit_success.txt"
    assert b"epochckpt" in text.read_bytes()
    how(run / "3")
    if not says:
        text.write_text("The checkpoint was committed.\n")
    with unchanged(run):
        manager = ec.CheckpointManager(run, options=Options(max_to_keep=1))
        with (
            manager,
            pytest.raises(errors.EpochExistsError, match=r"/3 is an epoch of epochckpt that lost its records"),
        ):
            manager.save(3, args=Save(tree_of(3)), force=True)
        with ec.CheckpointManager(run, options=READ_ONLY) as manager:
            assert manager.all_steps() == [1, 2]
            with pytest.raises(errors.EpochNotFoundError):
                manager.restore(3)


def test_data_files_of_somebody_elses_handler_are_no_mark_of_ours(run: pathlib.Path) -> None:
    """An item with a `.safetensors` that Orbax recorded another handler for."""
    (run / "2" / "model").mkdir()
    (run / "2" / "model" / "model.safetensors").write_bytes(b"x")
    store, record = open_store(run), run / "2" / "_CHECKPOINT_METADATA"
    assert step_recognition.lost_records(store, "2")
    content = json.loads(record.read_text())
    content["item_handlers"]["model"] = "my.Handler"
    record.write_text(json.dumps(content))
    assert not step_recognition.lost_records(store, "2")


@pytest.mark.parametrize("several", [True, False])
def test_an_export_to_orbax_is_a_step(tmp_path: pathlib.Path, several: bool) -> None:
    """Nothing of ours lies in it but an index; our manager continues it as a directory of Orbax."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=_three_kinds() if several else Save(tree_of(3)), metrics={"loss": 1.0})
    ec.export(tmp_path / "run", 3, tmp_path / "out", format="orbax")
    assert b"epochckpt" not in (tmp_path / "out" / "3" / "commit_success.txt").read_bytes()
    with ec.CheckpointManager(tmp_path / "out", options=Options(max_to_keep=1)) as manager:
        assert manager.all_steps() == [3]
        assert manager.metrics(3) == {"loss": 1.0}
        assert manager.verify(3).ok
        got = manager.restore(3)
        assert stock_states.differences(got["state"] if several else got, tree_of(3)) == []
        if several:
            assert got["config"] == {"a": 1}
            assert stock_states.differences(got["key"], jax.random.key(7)) == []
        manager.save(4, args=Save(tree_of(4)))
        manager.wait_until_finished()
        assert manager.all_steps() == [4]  # it is a step without doubt


# -- symlinks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_an_item_that_is_a_symlink_is_not_followed_and_nothing_is_advised_to_be_deleted(
    run: pathlib.Path, tmp_path: pathlib.Path, inside: bool
) -> None:
    """The data is elsewhere, and fine."""
    elsewhere = (run if inside else tmp_path) / "elsewhere"
    (run / "2" / "default").rename(elsewhere)
    (run / "2" / "default").symlink_to(elsewhere)
    with unchanged(tmp_path), ec.CheckpointManager(run, options=READ_ONLY) as manager:
        assert manager.all_steps() == [1]
        with pytest.raises(errors.DamagedError, match="2/default: is a symlink, which is not followed") as caught:
            manager.restore(2)
        assert "delete" not in str(caught.value)
        found = manager.verify(2)
        assert not found.ok
        assert found.nbytes > 0
        assert manager.status(2).state == "damaged"


def test_symlinks_deeper_down_are_counted_or_passed_over(run: pathlib.Path) -> None:
    """A link to a folder and to a file of the directory, and one to nothing, cost no raw error."""
    (run / "notes").mkdir()
    (run / "notes.txt").write_text("12345")
    for name, place in (("folder", "notes"), ("file", "notes.txt"), ("nothing", "nowhere")):
        (run / "2" / "default" / name).symlink_to(run / place)
    with ec.CheckpointManager(run, options=READ_ONLY) as manager:
        found = manager.verify(2)
        assert found.ok
        assert found.nbytes == sum(p.stat().st_size for p in (run / "2").rglob("*") if p.is_file())
        assert manager.status(2).state == "committed"


@pytest.mark.parametrize("what", ["link", "broken link", "file"])
def test_a_symlink_or_a_file_that_is_named_like_an_epoch_is_logged_once(
    run: pathlib.Path, tmp_path: pathlib.Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not followed, is no epoch, and stays."""
    if what == "file":
        (run / "7").write_text("x")
    else:
        (run / "7").symlink_to(run / "2" if what == "link" else tmp_path / "nowhere")
    with ec.CheckpointManager(run, options=Options(max_to_keep=1)) as manager:
        assert manager.all_steps() == [1, 2]
        with pytest.raises(errors.AccessError if what == "broken link" else errors.EpochNotFoundError, match="7"):
            manager.restore(7)
        manager.reload()
        manager.save(8, args=Save(tree_of(8)))
        manager.wait_until_finished()
        assert manager.all_steps() == [8]
    assert os.path.lexists(run / "7")
    assert what != "link" or not (run / "2").exists()
    said = [r for r in caplog.records if f"{run}/7 is a symlink or a file" in r.getMessage()]
    assert len(said) == 1
