"""What is put in its place, or on its way to where it is kept, is there or comes there, whenever its run is killed."""

import contextlib
import errno
import functools
import io
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.caffe2.epochs import NodeEpochs
from epochckpt.directory import staging_folder
from epochckpt.directory.posix import PosixDirectory
from epochckpt.format import paths
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store, opening_through
from epochckpt.testing import Faults, FaultyStore, StoreCall

READ_ONLY = ocp.CheckpointManagerOptions(read_only=True)
NAMES = StepNames(ocp.path.step.standard_name_format())


class Killed(BaseException):
    """Nothing of a run that is killed does anything any more."""


CHANGES = (
    Store.create,
    Store.open_writer,
    Store.rename,
    Store.exchange,
    Store.make_folder,
    Store.remove,
    Store.remove_tree,
    Store.sync_folder,
    Store.link,
)


@contextlib.contextmanager
def killed_at(moment: float, faults: Faults | None = None, exchange: bool = True) -> Iterator[list[str]]:
    """Ends what runs here before its n-th change of a store; gives the changes that were made.

    It is what opens its stores in the block, or has these `faults`. Nothing of it can change a store later, either.
    Without `exchange`, the file system cannot exchange folders.
    """
    rules = faults or Faults()
    made: list[str] = []
    ended = False

    def change(call: StoreCall) -> None:
        if ended:  # at the end of an object, which nothing of a killed run sees
            raise OSError(errno.EIO, "it was killed")
        if len(made) >= moment:
            raise Killed
        made.append(" ".join([call.method.removeprefix("Store."), *call.paths]))

    if not exchange:
        rules.fail(Store.exchange, io.UnsupportedOperation("no exchange here"))
    for method in CHANGES:
        rules.before(method, change)
    with contextlib.suppress(Killed), opening_through(functools.partial(FaultyStore, faults=rules)):
        yield made
    ended = True


def save(directory: pathlib.Path, values: dict[int, int]) -> None:
    with ec.CheckpointManager(directory) as manager:
        for epoch, value in values.items():
            manager.save(epoch, args=ocp.args.StandardSave({"x": np.full(10, value)}), force=True)
            manager.wait_until_finished()


def values(directory: pathlib.Path) -> dict[int, int]:
    """What a reader finds, verified."""
    with ec.CheckpointManager(directory, options=READ_ONLY) as manager:
        for epoch in manager.all_steps():
            manager.verify(epoch).raise_if_damaged()
        return {epoch: int(manager.restore(epoch)["x"][0]) for epoch in manager.all_steps()}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("placing") / "run"
    save(directory, {1: 1, 2: 2, 3: 3})
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_an_epoch_that_is_to_be_kept_survives_every_kill(
    three: pathlib.Path, tmp_path: pathlib.Path, there: bool
) -> None:
    """`todelete_subdir`: it is in its old place, or comes to the folder with the next run; never lost, durable at the
    end. The next run may be killed, too."""
    for moment in range(30):
        run = pathlib.Path(shutil.copytree(three, tmp_path / str(moment), symlinks=True))
        if there:
            (run / "trash").mkdir()
        store = FaultyStore(open_store(run))
        writer = PosixDirectory(store, NAMES).claim()
        done = False
        with killed_at(moment, store.faults) as made:
            writer.unlist(3, "trash")
            done = True
        assert values(run) in ({1: 1, 2: 2, 3: 3}, {1: 1, 2: 2})
        if not done:
            with killed_at(moment % 5):
                PosixDirectory(open_store(run), NAMES).claim()
            PosixDirectory(open_store(run), NAMES).claim()
        seen = values(run)
        if 3 not in seen:
            assert values(run / "trash") == {3: 3}, made
        else:
            assert not done
            assert seen == {1: 1, 2: 2, 3: 3}
        if done:
            last = next(
                i for i, change in enumerate(made) if change.endswith("trash/3") and change.startswith("rename")
            )
            assert {"sync_folder trash", "sync_folder "} <= set(made[last:]), "the move is durable"
            assert there or "sync_folder " in made[:last] + made[last + 1 :], "and so is the folder"
            break
    assert moment > 4


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("whose", ["job", "nodes"])
def test_an_upload_that_replaces_is_never_half_done(
    three: pathlib.Path, tmp_path: pathlib.Path, exchange: bool, whose: str
) -> None:
    """Whenever it is killed, the destination has the old epoch or the new one; without an exchange of folders the next
    upload puts the old one back first."""
    old, new = tmp_path / "old", tmp_path / "new"
    build: Callable[[pathlib.Path], Any]
    if whose == "job":
        save(old, {1: 1})
        save(new, {1: 100})

        def build(to: pathlib.Path) -> Any:
            with ec.CheckpointManager(new, options=READ_ONLY) as manager:
                return ec.CopyUpload(to, replace=True).build(1, manager)

        look = values
    else:
        for directory, value in ((old, 1), (new, 100)):
            directory.mkdir()
            NodeEpochs(directory, "n").save(1, ocp.args.StandardSave({"x": np.full(10, value)}))

        def build(to: pathlib.Path) -> Any:
            manager = ec.caffe2.CheckpointManager(str(new), "n", "epochckpt")
            return ec.CopyUpload(to, replace=True).build(1, manager)

        def look(directory: pathlib.Path) -> dict[int, int]:
            epochs = NodeEpochs(directory, "n")
            return {e: int(epochs.reader(e).restore(None)["x"][0]) for e in epochs.epoch_directory.list_epochs()}

    found = []
    for moment in range(0, 100):
        to = pathlib.Path(shutil.copytree(old, tmp_path / str(moment), symlinks=True))
        done = False
        with killed_at(moment, exchange=exchange):
            ec.LocalSession().run(build(to))
            done = True
        seen = look(to)
        assert seen in ({1: 1}, {1: 100}) or (not exchange and seen == {}), moment
        found.append(seen)
        if seen == {}:
            (home,) = [entry.name for entry in open_store(to).list("") if entry.name.endswith(paths.TMP_SUFFIX)]
            staging_folder.leave(open_store(to), home)
            assert look(to) == {1: 1}
        with killed_at(math.inf, exchange=exchange):  # never
            ec.LocalSession().run(build(to))
        assert look(to) == {1: 100}
        # A copy that is there is only looked at: what the killed upload left waits for the next claim.
        assert os.listdir(to) == ["1"] or seen == {1: 100}
        if done:
            break
    assert {} not in found if exchange else {} in found
    assert {1: 1} in found
    assert found[-2:] == [{1: 100}, {1: 100}]


def test_a_torn_root_metadata_is_written_anew(tmp_path: pathlib.Path) -> None:
    """A power cut may leave a short file; one that is whole is never written again, and a kill leaves none that is
    torn."""
    path = tmp_path / "metadata" / "_ROOT_METADATA"
    for torn in (b"", b'{"custom_meta', b"\0" * 40):
        with ec.CheckpointManager(tmp_path, metadata={"by": "us"}) as manager:
            manager.claim()
        assert json.loads(path.read_bytes())["custom_metadata"] == {"by": "us"}
        path.write_bytes(torn)
    with ec.CheckpointManager(tmp_path, metadata={"by": "us"}) as manager:
        manager.claim()
        assert manager.metadata().custom_metadata == {"by": "us"}
    with ec.CheckpointManager(tmp_path, metadata={"by": "others"}) as manager:
        manager.claim()
        assert manager.metadata().custom_metadata == {"by": "us"}
    assert os.listdir(path.parent) == [path.name]
    for moment in range(10):
        run = tmp_path / str(moment)
        store = FaultyStore(open_store(run))
        writer = PosixDirectory(store, NAMES).claim()
        with killed_at(moment, store.faults) as made:
            writer.write_once(("metadata", "_ROOT_METADATA"), b'{"whole": 1}')
        left = run / "metadata" / "_ROOT_METADATA"
        assert not left.exists() or json.loads(left.read_bytes()) == {"whole": 1}
        if len(made) < moment:
            assert left.exists()
            break


def test_names_say_what_becomes_of_a_folder() -> None:
    """What is on the move says where to; what leads out of the directory is nobody's move."""
    for where in ("5", "trash/5", "5/process_0", "damaged-0123456789abcdef/step_5"):
        assert staging_folder.parse_moving(staging_folder.moving("home", where).partition("/")[2]) == where
    assert staging_folder.parse_removed(staging_folder.removed("home", "5").partition("/")[2]) == "5"
    assert staging_folder.parse_removed(staging_folder.removed("home").partition("/")[2]) == ""
    for name in ("moving-1-5", f"moving-{'0' * 16}-..%2F..%2Fetc", f"moving-{'0' * 16}-%2Fetc", f"moving-{'0' * 16}-"):
        assert staging_folder.parse_moving(name) is None


@pytest.mark.parametrize("old", [None, "home/moving-5"])
def test_what_was_put_in_place_is_durable_with_what_gave_way_to_it(tmp_path: pathlib.Path, old: str | None) -> None:
    """Both names are flushed: that of the epoch, and where the replaced one lies."""
    store = FaultyStore(open_store(tmp_path))
    store.make_folder("home")
    flushed = list[str]()
    store.faults.after(Store.sync_folder, lambda call: flushed.append(call.path))
    staging_folder.settle(store, "home", 5, "5", old)
    assert flushed == ([""] if old is None else ["", "home"])
