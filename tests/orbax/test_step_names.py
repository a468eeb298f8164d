"""A folder of a single epoch is looked at, and refused by managers; epochs of other names are not overlooked."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import epochckpt as ec
from epochckpt import errors
from epochckpt.agreement.coordination import JaxCoordinator
from epochckpt.cli import main
from epochckpt.format import paths
from epochckpt.saving.opening import open_directory
from epochckpt.tiers import layout_of

TREE = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "step": 7}
NUMBERS = {"ours/12": 12, "copy": 12, "stock/3": 3, "final": 0, "ckpt-7": 7, "v1": 0, "bare": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Single epochs of all kinds, and a directory of each kind of manager with a prefix."""
    at = tmp_path_factory.mktemp("single")
    prefixed = ocp.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=6)
    for name, made, options, number in (
        ("ours", ec.CheckpointManager, None, 12),
        ("stock", ocp.CheckpointManager, None, 3),
        ("our_steps", ec.CheckpointManager, prefixed, 10),
        ("stock_steps", ocp.CheckpointManager, prefixed, 10),
    ):
        with made(at / name, options=options) as manager:
            manager.save(number, args=ocp.args.StandardSave(TREE))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(at / "final", TREE)
    ocp.PyTreeCheckpointer().save(at / "ckpt-7", TREE)
    (getattr(ocp.v1, "save", None) or ocp.v1.save_pytree)(at / "v1", TREE)  # its older name
    shutil.copytree(at / "final", at / "bare")
    (at / "bare" / "_CHECKPOINT_METADATA").unlink()  # as older versions of Orbax left it
    shutil.copytree(at / "ours/12", at / "copy", symlinks=True)
    return at


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_a_single_epoch_is_looked_at(
    folders: pathlib.Path, name: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours wherever it was copied to, a step of stock Orbax, what plain checkpointers of both APIs saved."""
    before = sorted(str(path) for path in folders.rglob("*"))
    run = ec.inspect(folders / name)
    assert (list(run), run.directory) == ([NUMBERS[name]], str(folders / name))
    (row,) = run.overview().epochs
    assert (row.latest, run.overview().leftovers) == (True, ())
    assert run.latest is not None
    (item,) = [name for name in run.latest if name != "metrics"]
    np.testing.assert_array_equal(run.latest[item]["params/w"], TREE["params"]["w"])
    monkeypatch.chdir(folders / name)
    for command in ("ls", "show", "tree", "stat"):
        assert main.main([command, "--json", "."]) == 0
        assert json.loads(capsys.readouterr().out)
    assert sorted(str(path) for path in folders.rglob("*")) == before


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", [*NUMBERS, "stock/3/default"])
def test_a_manager_refuses_a_single_epoch_and_says_what_to_do(
    folders: pathlib.Path, name: str, read_only: bool
) -> None:
    """It would begin a directory of epochs inside of the epoch. Nothing is left in it."""
    before = sorted(str(path) for path in folders.rglob("*"))
    options = ocp.CheckpointManagerOptions(read_only=read_only)
    with pytest.raises(errors.NotACheckpointDirectoryError) as caught:
        ec.CheckpointManager(folders / name, options=options)
    above = (folders / name).parent.parent if name.endswith("default") else (folders / name).parent
    for text in (f"{folders / name} is", f"Open {above}, if it is that", "ec.inspect", "epochckpt show"):
        assert text in str(caught.value)
    assert sorted(str(path) for path in folders.rglob("*")) == before


def test_a_folder_of_one_epoch_of_many_is_not_swept(folders: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    """`gc` takes directories only: beside a single epoch may lie anything."""
    shutil.copytree(folders / "final", tmp_path / "final")
    (tmp_path / "incarnation-0123456789abcdef.orbax-checkpoint-tmp").mkdir()
    assert main.main(["gc", str(tmp_path / "final")]) != 0
    assert "pass its parent" in capsys.readouterr().err
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("name", ["our_steps", "stock_steps"])
def test_epochs_of_another_name_are_not_overlooked(
    folders: pathlib.Path, name: str, tmp_path: pathlib.Path, caplog: Any, capsys: Any
) -> None:
    """A manager warns, a look says it, with what to pass; also where something else shows a checkpoint directory."""
    directory = tmp_path / "run"
    shutil.copytree(folders / name, directory, symlinks=True)
    with ec.CheckpointManager(directory) as manager:
        assert manager.all_steps() == []
    expected = (
        "holds epochs whose folders are named otherwise (step_000010/): pass "
        "CheckpointManagerOptions(step_prefix='step', step_format_fixed_length=6), or "
        "--step-prefix step --step-format-fixed-length 6 to the command"
    )
    assert expected in caplog.text
    assert main.main(["ls", str(directory)]) != 0
    assert expected in capsys.readouterr().err
    (directory / "incarnation-0123456789abcdef.orbax-checkpoint-tmp" / "3-1").mkdir(parents=True)
    assert expected in ec.inspect(directory).overview().problems[""]
    caplog.clear()
    options = ocp.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=6)
    with ec.CheckpointManager(directory, options=options) as manager:
        assert manager.all_steps() == [10]
    with ec.CheckpointManager(folders / "ours", options=options) as manager:
        assert manager.all_steps() == []
    assert "(12/): pass no step_prefix and no step_format_fixed_length" in caplog.text


def test_an_unusable_name_format_is_refused_before_another_process_hears_of_it(tmp_path: pathlib.Path) -> None:
    """On any process; the primary would wait for one that has gone."""

    class Unusable(ocp.path.step.NameFormat):
        def build_name(self, step: int) -> str:
            return f"{step}-x"

        def find_all(self, *args: Any, **kwargs: Any) -> Any:
            return iter(())

        def find_step(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError

    options = ocp.CheckpointManagerOptions(step_name_format=Unusable())
    second = JaxCoordinator(None, [0, 1], 1)  # without a service: any message fails
    kind = layout_of(ec.StorageOptions(), options).kind
    with pytest.raises(errors.UnsupportedError):
        open_directory(tmp_path, options, ec.StorageOptions(), None, second, kind=kind)


UNUSABLE = {
    "a separator": {"step_prefix": "a/b"},
    "the folder above": {"step_prefix": "../x"},
    "NUL": {"step_prefix": "a\0"},
    "a line break": {"step_prefix": "a\n"},
    "a name that Orbax passes over": {"step_prefix": f"a{paths.TMP_SUFFIX}"},
    "more than a name": {"step_prefix": "a" * 254},
    "digits": {"step_format_fixed_length": 300},
    "fewer than no digits": {"step_format_fixed_length": -1},
    "a name that cannot be moved": {"step_prefix": "a" * 185},
    "the same, escaped": {"step_prefix": "ä" * 31},
    "a folder that cannot be moved": {"todelete_subdir": "a" * 210},
    "both": {"step_prefix": "a" * 100, "todelete_subdir": "b" * 109},
}


@pytest.mark.parametrize("fields", UNUSABLE.values(), ids=UNUSABLE)
def test_options_that_make_unusable_names_are_refused_at_construction(
    tmp_path: pathlib.Path, fields: dict[str, Any]
) -> None:
    """Before anything is written; the message names the option."""
    options = ocp.CheckpointManagerOptions(max_to_keep=1, **fields)
    with pytest.raises(errors.InvalidArgumentError) as caught:
        ec.CheckpointManager(tmp_path / "run", options=options)
    assert all(name in str(caught.value) for name in fields)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"step_prefix": "a" * 184},
        {"step_prefix": "ä" * 30},
        {"todelete_subdir": "a" * 209},
        {"step_prefix": "a" * 100, "todelete_subdir": "b" * 108},
    ],
    ids=["prefix", "escaped prefix", "folder", "both"],
)
def test_the_longest_names_can_be_moved(tmp_path: pathlib.Path, fields: dict[str, Any]) -> None:
    """The epoch of the largest number is replaced, deleted, kept, set aside when it is damaged, and rolled back."""
    last = paths.MAX_EPOCH
    options = ocp.CheckpointManagerOptions(**fields)

    def save(manager: ec.CheckpointManager, *epochs: int) -> None:
        for epoch in epochs:
            manager.save(epoch, args=ocp.args.StandardSave({"w": np.zeros(3)}), force=True)
            manager.wait_until_finished()

    with ec.CheckpointManager(tmp_path, options=options) as manager:
        save(manager, 1, last)
        manager.allow_overwrite(last)
        save(manager, last)
        manager.delete(last)
        manager.wait_until_finished()
        save(manager, last)
        manager.rollback_to(1)
        save(manager, last)
        for path in tmp_path.glob(f"*{last}/epoch.json"):
            path.write_bytes(b"{")
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        assert (manager.all_steps(), manager.damaged_epochs()) == ([1], [last])
        save(manager, last)
        assert manager.all_steps() == [1, last]


def test_a_folder_with_a_number_beyond_the_largest_is_no_epoch(tmp_path: pathlib.Path) -> None:
    """Whatever is in it."""
    (tmp_path / str(paths.MAX_EPOCH + 1)).mkdir()
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == []
        assert manager.foreign_folders() == {}


class Days(ocp.path.step.NameFormat[Any]):
    """A step is a day: 0 is 2026-01-01. Like `datetime`, it has no names for steps after the year 9999."""

    def build_name(self, step: int) -> str:
        return (DAY + datetime.timedelta(days=step)).isoformat()

    def find_all(self, base_path: Any) -> Iterator[Any]:
        for path in epath.Path(base_path).iterdir():
            try:
                day = datetime.date.fromisoformat(path.name)
            except ValueError:
                continue
            yield ocp.path.step.Metadata(step=(day - DAY).days, path=path)

    def find_step(self, base_path: Any, step: int) -> Any:
        return next(one for one in self.find_all(base_path) if one.step == step)


class Dates(Days):
    """A step is a date, such as 20260131; no other number has a name. No name ends in a number."""

    def build_name(self, step: int) -> str:
        return f"{datetime.datetime.strptime(str(step), '%Y%m%d'):%Y-%b-%d}.done"

    def find_all(self, base_path: Any) -> Iterator[Any]:
        for path in epath.Path(base_path).glob("*.done"):
            day = datetime.datetime.strptime(path.name, "%Y-%b-%d.done")
            yield ocp.path.step.Metadata(step=int(f"{day:%Y%m%d}"), path=path)


class Stamped(Days):
    """The name says also in which session the step was saved, so that a later one builds another."""

    session = "0101"

    def build_name(self, step: int) -> str:
        return f"{self.session}-{step}"

    def find_all(self, base_path: Any) -> Iterator[Any]:
        for path in epath.Path(base_path).iterdir():
            if path.name[:4].isdecimal() and path.name[4] == "-":
                yield ocp.path.step.Metadata(step=int(path.name[5:]), path=path)


DAY = datetime.date(2026, 1, 1)
FORMATS = {"days": (Days, 30, 31), "dates": (Dates, 20260131, 20260201), "sessions": (Stamped, 5, 6)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("reader", [ocp.CheckpointManager, ec.CheckpointManager])
def test_epochs_of_a_name_format_of_ones_own_are_found_again(
    directory: str, name: str, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its `find_all`, here and by stock Orbax: listed, restored, retained, deleted, saved on, and looked at."""
    kind, first, second = FORMATS[name]
    options = ocp.CheckpointManagerOptions(step_name_format=kind(), max_to_keep=2)
    with ec.CheckpointManager(directory, options=options) as manager:
        manager.save(first, args=ocp.args.StandardSave(TREE))
        manager.save(second, args=ocp.args.StandardSave(TREE), force=True)
    monkeypatch.setattr(Stamped, "session", "0102")
    if "://" not in directory or reader is ec.CheckpointManager:
        with reader(directory, options=options) as manager:
            assert list(manager.all_steps()) == [first, second]
            got = manager.restore(second, args=ocp.args.StandardRestore(TREE))
            np.testing.assert_array_equal(got["params"]["w"], TREE["params"]["w"])
    third = second + 1
    with ec.CheckpointManager(directory, options=options) as manager:
        assert manager.save(third, args=ocp.args.StandardSave(TREE), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [second, third]
        manager.delete(second)
        manager.wait_until_finished()
    assert list(ec.inspect(directory, options=options)) == [third]
    with ec.CheckpointManager(directory, options=options) as manager:
        assert manager.all_steps() == [third]
        assert manager.verify(third).ok


def test_steps_that_stock_orbax_called_by_days_are_continued(tmp_path: pathlib.Path) -> None:
    """And what the format finds beside them that is no step is left alone."""
    options = ocp.CheckpointManagerOptions(step_name_format=Days())
    with ocp.CheckpointManager(tmp_path, options=options) as stock:
        stock.save(3, args=ocp.args.StandardSave(TREE))
    (tmp_path / "notes").mkdir()
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.all_steps() == [3]
        assert manager.save(4, args=ocp.args.StandardSave(TREE))
    with ocp.CheckpointManager(tmp_path, options=options) as stock:
        assert sorted(stock.all_steps()) == [3, 4]
    assert {"2026-01-04", "2026-01-05", "notes"} <= set(os.listdir(tmp_path))


def test_a_step_without_a_name_in_the_format_is_refused_by_the_save(tmp_path: pathlib.Path) -> None:
    """Before anything begins; other steps can be saved."""
    options = ocp.CheckpointManagerOptions(step_name_format=Dates())
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        with pytest.raises(errors.InvalidArgumentError, match=r"no name for step 7.*does not match format"):
            manager.save(7, args=ocp.args.StandardSave(TREE))
        assert manager.save(20260131, args=ocp.args.StandardSave(TREE))
        manager.wait_until_finished()
        assert manager.all_steps() == [20260131]
