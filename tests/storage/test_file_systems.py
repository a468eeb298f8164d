"""File systems that lack a call which others have: no symlinks, no hard links, no flags of renameat2, no rename."""

import contextlib
import ctypes
import errno
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.directory.epoch_directory import Rollback
from epochckpt.directory.posix import PosixDirectory
from epochckpt.errors import SaveError, UnfinishedError
from epochckpt.orbax import StepNames
from epochckpt.storage import PosixStore, Store, open_store, opening_through, posix
from epochckpt.testing import Faults
from tests.support.file_systems import immovable

READ_ONLY = ocp.CheckpointManagerOptions(read_only=True)
NO_VIEW = {"*": {"*": "the file system has no symlinks"}}


def state(value: int) -> Any:
    return ocp.args.Composite(
        state=ocp.args.StandardSave({"x": np.full(1000, value)}), note=ocp.args.JsonSave({"value": value})
    )


def save(manager: ec.CheckpointManager, *epochs: int, offset: int = 0) -> None:
    for epoch in epochs:
        assert manager.save(epoch, args=state(epoch + offset), force=True)
        manager.wait_until_finished()


def values(manager: ec.CheckpointManager) -> dict[int, int]:
    """What the epochs hold, verified."""
    found = {}
    for epoch in manager.all_steps():
        manager.verify(epoch).raise_if_damaged()
        got = manager.restore(epoch)
        (found[epoch],) = set(got["state"]["x"].tolist())
        assert got["note"] == {"value": found[epoch]}
    return found


# -- without links, and without a rename that refuses an existing name -------------------------------------------------


def live(directory: str) -> None:
    """Everything that a run does with epochs."""
    with ec.CheckpointManager(directory) as manager:
        save(manager, 1, 2, 3, 4)
        manager.allow_overwrite(2)
        save(manager, 2, offset=100)
        manager.delete(4)
        manager.rollback_to(2)
        save(manager, 3, offset=200)
        assert values(manager) == {1: 1, 2: 102, 3: 203}
    upload = ec.CopyUpload(f"{directory}-copy")
    with ec.CheckpointManager(directory) as manager:
        ec.LocalSession().run(upload.build(3, manager))
    with ec.CheckpointManager(f"{directory}-copy", options=READ_ONLY) as copy:
        assert values(copy) == {3: 203}


def check_lived(directory: pathlib.Path) -> None:
    """Nothing is left but epochs without a view, which say so, and what was rolled back."""
    left = sorted(os.listdir(directory))
    assert left[:3] == ["1", "2", "3"]
    assert [name.rpartition("-")[0] for name in left[3:]] == ["rolled-back"]
    for folder in (directory / "3", directory.with_name(f"{directory.name}-copy") / "3"):
        assert sorted(os.listdir(folder)) == ["epoch.json", "process_0"]
        assert sorted(os.listdir(folder / "process_0")) == ["node.json", "note", "state.safetensors"]
        assert json.loads((folder / "epoch.json").read_bytes())["orbax_unsupported"] == NO_VIEW
    assert "can read nothing of it: the file system has no symlinks" in " ".join(str(ec.inspect(directory)[3]).split())
    assert "can read nothing of it: the file system has no symlinks" in ec.inspect(directory)[3].to_html()


@pytest.mark.parametrize("code", ["EPERM", "EOPNOTSUPP", "ENOSYS"])
def test_without_links_everything_works_but_stock_orbax(
    tmp_path: pathlib.Path, code: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SMB, exFAT, some FUSE file systems. The Orbax view is left out, which is said once and noted in every record."""

    def no_link(*args: Any, **kwargs: Any) -> None:
        number = getattr(errno, code)
        raise OSError(number, os.strerror(number), *args[:1])

    def no_flags(*args: Any) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(os, "symlink", no_link)
    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(posix, "_renameat2", no_flags)
    live(str(tmp_path / "run"))
    check_lived(tmp_path / "run")
    said = [r.getMessage() for r in caplog.records if "has no symlinks, which the Orbax view needs" in r.getMessage()]
    assert [line.partition(":")[0] for line in said] == [str(tmp_path / "run"), str(tmp_path / "run-copy")]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace makes the kernel's calls fail")
def test_the_same_when_the_kernel_says_it(tmp_path: pathlib.Path) -> None:
    """The real errors of real system calls, by strace."""
    calls = {"symlink": "EPERM", "symlinkat": "EPERM", "link": "EPERM", "linkat": "EPERM", "renameat2": "EINVAL"}
    command = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", os.devnull, "-e", f"trace={','.join(calls)}"]
    command += [arg for call, code in calls.items() for arg in ("-e", f"inject={call}:error={code}")]
    program = "import sys; from tests.storage.test_file_systems import live; live(sys.argv[1])"
    subprocess.run([*command, sys.executable, "-c", program, str(tmp_path / "run")], check=True, timeout=100)
    check_lived(tmp_path / "run")


def test_a_rename_without_any_help_still_refuses_an_existing_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and folders; what is there stays as it is."""
    store = PosixStore(tmp_path)
    monkeypatch.setattr(posix, "_renameat2", None)
    monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EPERM, "no hard links")))
    for name in ("new", "old"):
        store.create(name, name.encode())
        store.make_folder(f"{name}-folder")
    for name in ("", "-folder"):
        with pytest.raises(FileExistsError):
            store.rename(f"new{name}", f"old{name}")
        store.rename(f"new{name}", f"free{name}")
    assert store.read("old", limit_bytes=9) == b"old"
    assert store.read("free", limit_bytes=9) == b"new"
    assert sorted(os.listdir(tmp_path)) == ["free", "free-folder", "old", "old-folder"]


# -- epochs that no rename moves ---------------------------------------------------------------------------------------


@pytest.fixture(params=["overlay", "double"])
def layered(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Any]:
    """Gives a directory in which no rename moves what lay in it before, as epochs in the layer of an image."""
    (tmp_path / "run").mkdir()
    if request.param == "double":
        with contextlib.ExitStack() as stack:

            def freeze() -> pathlib.Path:
                stack.enter_context(immovable(tmp_path / "run"))
                return tmp_path / "run"

            yield tmp_path / "run", freeze
        return
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    mounted = []

    def mount() -> pathlib.Path:
        options = f"lowerdir={tmp_path}/run,upperdir={tmp_path}/upper,workdir={tmp_path}/work,redirect_dir=off"
        command = ["mount", "-t", "overlay", "overlay", "-o", options, str(tmp_path / "merged")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            pytest.skip(f"an overlay cannot be mounted here: {done.stderr.strip()}")
        mounted.append(True)
        return tmp_path / "merged"

    yield tmp_path / "run", mount
    if mounted:
        subprocess.run(["umount", "--lazy", str(tmp_path / "merged")], timeout=30, check=True)


@pytest.mark.slow
def test_epochs_that_no_rename_moves_are_deleted_and_rolled_back(layered: Any) -> None:
    """Deleted, kept by todelete_subdir, rolled back, put aside as damaged: by a record that hides them meanwhile."""
    below, mount = layered
    with ec.CheckpointManager(below) as manager:
        save(manager, *range(1, 8))
    older = below / "incarnation-0123456789abcdef.orbax-checkpoint-tmp"  # of a run that was killed
    older.mkdir()
    shutil.move(below / "5", older / "moving-0123456789abcdef-5")
    directory = mount()
    with ec.CheckpointManager(directory) as manager:
        manager.claim()
        assert values(manager) == {e: e for e in range(1, 8)}  # 5 was put back
        manager.delete(7)
        manager.allow_overwrite(2)
        with pytest.raises(SaveError, match=r"No rename moves the epoch that is there; delete\(2\) makes room"):
            save(manager, 2, offset=100)
        assert values(manager) == {e: e for e in range(1, 7)}
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(todelete_subdir="trash")) as manager:
        manager.delete(6)
        assert os.listdir(directory / "trash") == ["6"]
        manager.rollback_to(3)
        save(manager, 4, offset=100)
        assert values(manager) == {1: 1, 2: 2, 3: 3, 4: 104}
    (aside,) = directory.glob("rolled-back-*")
    assert sorted(os.listdir(aside)) == ["4", "5"]
    (directory / "3" / "process_0" / "node.json").unlink()
    with ec.CheckpointManager(directory) as manager:
        assert manager.restore(None, args=None)["note"] == {"value": 104}
        (directory / "4" / "process_0" / "node.json").unlink()
        assert manager.restore(None, args=None)["note"] == {"value": 2}
        save(manager, 3, offset=200)
        assert values(manager) == {1: 1, 2: 2, 3: 203}
    left = {name.rstrip("0123456789abcdef") for name in os.listdir(directory) if not name.isdigit()}
    assert left == {"trash", "rolled-back-", "damaged-"}
    for kept in [*aside.iterdir(), directory / "trash" / "6"]:
        shutil.move(kept, directory / f"{int(kept.name) + 10}")  # whole, links and all
        assert os.readlink(directory / f"{int(kept.name) + 10}" / "state" / "process_0") == "../process_0"


CHANGES = ("create", "rename", "exchange", "make_folder", "remove", "remove_tree", "copy_tree", "sync_folder", "link")


class Killed(BaseException):
    """Nothing of a run that is killed does anything any more."""


class Countdown:
    """The changes that are left to a run; at the last one it is killed."""

    def __init__(self) -> None:
        self.left = math.inf

    def count(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise Killed


class MortalStore(PosixStore):
    """A file system on which a run is killed before one of its changes. Those that a copy consists of count, too."""

    def __init__(self, directory: str, countdown: Countdown):
        super().__init__(directory)
        self._countdown = countdown

    def __getattribute__(self, name: str) -> Any:
        if name in CHANGES:
            self._countdown.count()
        return super().__getattribute__(name)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_anywhere_in_it_loses_nothing(tmp_path: pathlib.Path, steps: int) -> None:
    """Before each change, and in the middle of a copy (the long form walks all of them): hidden or whole to readers,
    finished by the next run, and what is quarantined is whole."""
    with ec.CheckpointManager(tmp_path / "epochs") as manager:
        save(manager, 1, 2, 3)
    names = StepNames(ocp.path.step.standard_name_format())
    kinds = {"rollback": Rollback(1, (2, 3), "ab"), "kept": Rollback(None, (3,), "ab", "trash"), "deleted": None}
    countdown = Countdown()
    for kind, rollback in kinds.items():
        for moment in range(1, 100, steps):
            run = tmp_path / f"{kind}-{moment}"
            shutil.copytree(tmp_path / "epochs", run, symlinks=True)
            with opening_through(lambda store: MortalStore(store.root, countdown)), immovable(run):
                writer = PosixDirectory(open_store(run), names).claim()
                countdown.left = moment
                try:
                    if rollback is None:
                        writer.unlist(3)()
                    else:
                        writer.roll_back(rollback)
                    break
                except Killed:
                    pass
                finally:
                    countdown.left = math.inf
                with ec.CheckpointManager(run, options=READ_ONLY) as reader:
                    seen = values(reader)
                    assert seen in ({1: 1, 2: 2, 3: 3}, {1: 1} if kind == "rollback" else {1: 1, 2: 2}), (kind, moment)
                with ec.CheckpointManager(run) as manager:
                    save(manager, 9)
                    assert values(manager) == {**seen, 9: 9}, (kind, moment)
                aside = {"rollback": "rolled-back-ab", "kept": "trash"}.get(kind)
                left = {name for name in os.listdir(run) if not name.isdigit()}
                assert left - {aside} == set(), (kind, moment)
                if aside is not None and 3 not in seen:
                    with ec.CheckpointManager(run / aside, options=READ_ONLY) as reader:
                        assert values(reader) == ({2: 2, 3: 3} if kind == "rollback" else {3: 3}), (kind, moment)
        assert moment > 8


def test_what_cannot_be_set_aside_stops_no_run(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The rollback holds, for readers and writers alike; an epoch of such a number is refused, not lost; when the
    cause is gone the next save of it, or the next open, finishes."""
    run = tmp_path / "run"
    with ec.CheckpointManager(run) as manager:
        save(manager, 1, 2, 3)
    with immovable(run), faults.fail(Store.copy_tree, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) as full:
        with ec.CheckpointManager(run) as manager:
            with pytest.raises(UnfinishedError, match=r"checkpoints 2, 3 are rolled back .*No space left"):
                manager.rollback_to(1)
            assert manager.all_steps() == [1]
        with ec.CheckpointManager(run, options=READ_ONLY) as reader:
            assert values(reader) == {1: 1}
        with ec.CheckpointManager(run) as manager:
            assert values(manager) == {1: 1}
            with pytest.raises(SaveError, match=r"checkpoint 2 was not committed.*No space left"):
                save(manager, 2, offset=100)
            save(manager, 4)
            with pytest.raises(UnfinishedError):
                manager.rollback_to(1)
            assert values(manager) == {1: 1, 4: 4}
            full.remove()
            save(manager, 2, offset=100)
            assert values(manager) == {1: 1, 2: 102, 4: 4}
    (aside,) = run.glob("rolled-back-*")
    assert sorted(os.listdir(aside)) == ["2", "3"]
    assert sorted(os.listdir(run)) == ["1", "2", "4", aside.name]
