"""`CopyUpload`: an uploaded epoch is the epoch, whole, and nobody ever sees less of it."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.errors import StorageError
from epochckpt.format import paths
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, Rule, StoreCall
from tests.support.job_runs import reading_job
from tests.support.processes import run_worker, start_processes
from tests.support.taps import is_record
from tests.support.upload_jobs import NODES

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore
WEIGHTS = {"w": np.arange(300_000, dtype=np.float32), "steps": 7}


def content(folder: pathlib.Path) -> dict[str, bytes]:
    """Content of every file, but for the random id in the view's index."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.ocdbt")
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def links(folder: pathlib.Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): str(p.readlink()) for p in folder.rglob("*") if p.is_symlink()}


def own(by: int = 0) -> dict[str, Any]:
    return {node: {"seed": i + by, "queue": np.arange(50_000 + i)} for i, node in enumerate(NODES)}


def save(directory: Any, epoch: int = 3, by: int = 0) -> None:
    """An epoch of three nodes with everything: arrays, what handlers wrote, values of the nodes' own."""
    args = ocp.args.Composite(
        state=Save(WEIGHTS),
        config=ocp.args.JsonSave({"a": 1}),
        own=ec.args.NodeSave(own(by), by_node=True),
    )
    with ec.CheckpointManager(directory, node=NODES) as manager:
        manager.save(epoch, args=args, metrics={"loss": 0.5}, custom_metadata={"x": [1]})
        manager.wait_until_finished()


def send(directory: Any, destination: Any, epoch: int = 3, replace: bool = False) -> None:
    with ec.CheckpointManager(directory, node=NODES) as manager:
        ec.LocalSession().run(ec.CopyUpload(destination, replace=replace).build(epoch, manager))


def assert_is(directory: Any, epoch: int = 3, by: int = 0) -> None:
    """What `save` saved is there, to the last byte."""
    with ec.CheckpointManager(directory, node=NODES) as manager:
        assert manager.latest_step() == epoch
        assert manager.verify(epoch).ok
        assert manager.metrics(epoch) == {"loss": 0.5}
        assert manager.metadata(epoch).custom_metadata == {"x": [1]}
        args = ocp.args.Composite(
            state=Restore(WEIGHTS), config=ocp.args.JsonRestore(), own=ec.args.NodeRestore(by_node=True)
        )
        got = manager.restore(epoch, args=args)
    np.testing.assert_array_equal(got["state"]["w"], WEIGHTS["w"])
    assert got["config"] == {"a": 1}
    expected: Mapping[str, Any] = own(by)
    for node in NODES:
        assert got["own"][node]["seed"] == expected[node]["seed"]
        np.testing.assert_array_equal(got["own"][node]["queue"], expected[node]["queue"])


def temporary(destination: pathlib.Path) -> list[str]:
    return [p.name for p in destination.iterdir() if p.name.endswith(".orbax-checkpoint-tmp")]


def test_a_run_of_one_node_uploads_its_last_epoch(tmp_path: pathlib.Path) -> None:
    """Only that; the copy equals it, opens, restores and is read by stock Orbax when the original is gone."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        builder = ec.CopyUpload(tmp_path / "deep" / "final")
        ec.JobRunner(reading_job(3, []), manager, upload_task_group_builder=builder).train(ec.LocalSession())
    final = tmp_path / "deep" / "final"
    assert [p.name for p in final.iterdir()] == ["3"]
    assert content(final / "3") == content(tmp_path / "run" / "3")
    assert links(final / "3") == links(tmp_path / "run" / "3") != {}
    shutil.rmtree(tmp_path / "run")
    session = ec.LocalSession()
    with ec.CheckpointManager(final) as manager:
        assert manager.verify(3).ok
        assert ec.JobRunner(reading_job(4, []), manager).train(session) == 4  # and a run goes on from it
    assert set(session.workspace()["weights"]["w"].tolist()) == {10.0}
    with ocp.CheckpointManager(final, item_names=("weights",)) as stock:
        target = {"w": session.workspace()["weights"]["w"], "steps": 0}
        got = stock.restore(3, args=ocp.args.Composite(weights=Restore(target)))["weights"]
    assert set(got["w"].tolist()) == {6.0}


def test_several_nodes_of_one_process(tmp_path: pathlib.Path) -> None:
    """Arrays, what handlers wrote and what is a node's own; links stay links; also in a session that knows no nodes."""
    save(tmp_path / "run")
    send(tmp_path / "run", tmp_path / "final")
    assert_is(tmp_path / "final")
    assert content(tmp_path / "final" / "3") == content(tmp_path / "run" / "3")
    assert links(tmp_path / "final" / "3") == links(tmp_path / "run" / "3")
    with ec.CheckpointManager(tmp_path / "jobs", node=NODES) as manager:
        builder = ec.CopyUpload(tmp_path / "other")
        ec.JobRunner(reading_job(2, []), manager, upload_task_group_builder=builder).train(ec.LocalSession())
    with ec.CheckpointManager(tmp_path / "other", node=NODES) as manager:
        assert manager.nodes(2) == list(NODES)
        assert manager.verify(2).ok


@pytest.mark.slow
def test_real_processes_copy_their_own_folders(tmp_path: pathlib.Path) -> None:
    """Then one of two finds its disk full: both say so, nothing is left. Then other processes send what those saved."""
    arguments = {"directory": str(tmp_path / "run"), "destination": str(tmp_path / "final")}
    failed = run_worker("tests.support.upload_jobs:upload", {**arguments, "fail": 1}, 2)
    assert [f["error"][0] for f in failed] == ["UploadError"] * 2
    assert all("No space left" in f["error"][1] and str(tmp_path / "final") in f["error"][1] for f in failed)
    assert list((tmp_path / "final").iterdir()) == []
    done = run_worker("tests.support.upload_jobs:upload", arguments, 2)
    assert [d["reason"] for d in done] == ["was finished already"] * 2
    assert content(tmp_path / "final" / "3") == content(tmp_path / "run" / "3")
    with ec.CheckpointManager(tmp_path / "final") as manager:
        assert manager.nodes(3) == ["process_0", "process_1"]
        assert manager.verify(3).ok
    with ec.CheckpointManager(tmp_path / "run") as manager:
        ec.LocalSession().run(ec.CopyUpload(tmp_path / "again").build(3, manager))
    assert content(tmp_path / "again" / "3") == content(tmp_path / "run" / "3")


def test_steps_of_stock_orbax_are_refused(tmp_path: pathlib.Path) -> None:
    """From its manager, and out of a directory of ours; the error names what to do instead."""
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        stock.save(3, args=Save(WEIGHTS))
        stock.wait_until_finished()
        with pytest.raises(
            errors.InvalidArgumentError,
            match=r"got orbax\.checkpoint.*\.CheckpointManager; .* an UploadTaskGroupBuilder",
        ):
            ec.CopyUpload(tmp_path / "final").build(3, stock)
    with ec.CheckpointManager(tmp_path / "run") as manager:
        upload = ec.CopyUpload(tmp_path / "final").build(3, manager)
        with pytest.raises(errors.UnsupportedError, match="checkpoint 3 was written by stock Orbax"):
            ec.LocalSession().run(upload)
    assert not (tmp_path / "final").exists()


def test_again_changes_nothing_if_it_is_there(tmp_path: pathlib.Path) -> None:
    """The same folder stays; one that lacks a file is made anew."""
    save(tmp_path / "run")
    for _ in range(2):
        send(tmp_path / "run", tmp_path / "final")
        place = tmp_path / "final" / "3"
        placed = place.stat().st_ino
        send(tmp_path / "run", tmp_path / "final")
        assert place.stat().st_ino == placed
        (place / "b" / "own.safetensors").unlink()
    send(tmp_path / "run", tmp_path / "final")
    assert_is(tmp_path / "final")
    assert [p.name for p in (tmp_path / "final").iterdir()] == ["3"]


@pytest.mark.parametrize("target", ["posix", "memory"])
def test_another_epoch_of_that_number_is_replaced_only_if_asked(tmp_path: pathlib.Path, target: str) -> None:
    """Another attempt, a damaged record, somebody else's folder: refused, with what to do; nothing is touched.

    Asked to, it replaces what it knows to be an epoch.
    """
    destination = str(tmp_path / "final") if target == "posix" else f"memory://{uuid.uuid4().hex}/"
    save(tmp_path / "run")
    save(tmp_path / "other", by=5)
    send(tmp_path / "other", destination)
    with pytest.raises(errors.EpochExistsError, match=r"another one \(attempt .*move it away"):
        send(tmp_path / "run", destination)
    assert_is(destination, by=5)
    send(tmp_path / "run", destination, replace=True)
    assert_is(destination)
    names = {entry.name for entry in open_store(destination).list("")}
    assert names - {"_epochckpt"} == {"3"}
    (attempts,) = {len(open_store(destination).list(f"3/{node}")) for node in NODES} if target == "memory" else {1}
    assert attempts == 1
    if target == "posix":
        record = tmp_path / "final" / "3" / "epoch.json"
        record.write_bytes(record.read_bytes()[:-5])
        with pytest.raises(errors.EpochExistsError, match=r"not readable: 3/epoch\.json"):
            send(tmp_path / "run", destination, replace=True)
        record.unlink()
        with pytest.raises(errors.EpochExistsError, match="no epoch"):
            send(tmp_path / "run", destination, replace=True)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["data", "record", "commit", "rename", "durable"])
def test_a_killed_upload_is_not_seen_and_the_next_one_cleans_up(tmp_path: pathlib.Path, place: str) -> None:
    """SIGKILL while a node's folder is copied, before the record, before and after the rename."""
    save(tmp_path / "run")
    final = tmp_path / "final"
    save(final, epoch=2)
    code = f"from tests.support.upload_jobs import killed; killed({str(tmp_path / 'run')!r}, {str(final)!r}, {place!r})"
    with start_processes(["-c", code], 1) as job:
        (outcome,) = job.wait(150.0)
    assert outcome.returncode == -signal.SIGKILL, outcome.stdout
    assert (final / "3").exists() == (place == "durable")
    assert len(temporary(final)) == 1
    if place != "durable":
        assert_is(final, epoch=2)
    send(tmp_path / "run", final)
    if place == "durable":  # the copy is there and is only looked at: whoever writes there next cleans up
        with ec.CheckpointManager(final, node=NODES) as manager:
            manager.claim()
    assert temporary(final) == []
    assert_is(final)


def test_a_full_disk_fails_the_upload_and_harms_nothing(tmp_path: pathlib.Path, disk: pathlib.Path) -> None:
    """The error says where, what and what to do; other epochs there stay; with room it works. Read-only, too."""
    save(tmp_path / "run")
    save(disk / "final", epoch=2)
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(bytes(free.f_bavail * free.f_bsize - 2**20))
    refusal = r"checkpoint 3 was not uploaded to .*final: .*No space left.*start the job"
    with pytest.raises(errors.UploadError, match=refusal):
        send(tmp_path / "run", disk / "final")
    assert temporary(disk / "final") == []
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], timeout=30, check=True)
    try:
        with pytest.raises(errors.UploadError, match="Read-only file system"):
            send(tmp_path / "run", disk / "final")
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], timeout=30, check=True)
    assert_is(disk / "final", epoch=2)
    send(tmp_path / "run", disk / "final")
    assert_is(disk / "final")
    assert_is(tmp_path / "run")


def test_damage_is_found_on_the_way(tmp_path: pathlib.Path) -> None:
    """One flipped bit in what is to be uploaded: refused by file and leaf, nothing arrives."""
    save(tmp_path / "run")
    data = tmp_path / "run" / "3" / "b" / "own.safetensors"
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(errors.DamagedError, match=r"3/b/own\.safetensors, leaf 'queue'"):
        send(tmp_path / "run", tmp_path / "final")
    assert list((tmp_path / "final").iterdir()) == []


def test_to_and_from_stores_without_rename(tmp_path: pathlib.Path) -> None:
    """There the attempt is in the paths, so that a manager opened there sweeps nothing; back, Orbax reads it again."""
    url = f"memory://{uuid.uuid4().hex}/"
    save(tmp_path / "run")
    for _ in range(2):
        send(tmp_path / "run", url)
        assert_is(url)
        assert_is(url)
    send(url, f"{url[:-1]}-copy/")
    assert_is(f"{url[:-1]}-copy/")
    send(url, tmp_path / "back")
    assert_is(tmp_path / "back")
    with ocp.CheckpointManager(tmp_path / "back", item_names=("state", "config")) as stock:
        got = stock.restore(3, args=ocp.args.Composite(state=Restore(WEIGHTS), config=ocp.args.JsonRestore()))
    np.testing.assert_array_equal(got["state"]["w"], WEIGHTS["w"])
    assert got["config"] == {"a": 1}


@pytest.mark.slow
def test_epochs_of_caffe2s_managers_node_by_node(tmp_path: pathlib.Path) -> None:
    """Each node's copy is the node's epoch; twice is once; another is replaced only if asked; others stay."""

    def finish(directory: pathlib.Path, epochs: int, final: pathlib.Path, replace: bool = False) -> None:
        directory.mkdir(exist_ok=True)
        manager = ec.caffe2.MultiNodeCheckpointManager(directory, "epochckpt")
        job = reading_job(epochs, [])
        job.nodes_to_checkpoint = lambda: list(NODES)  # type: ignore[method-assign]
        upload = ec.CopyUpload(final, replace=replace)
        ec.JobRunner(job, manager, upload_task_group_builder=upload).train(ec.LocalSession())
        group = upload.build(epochs, manager)
        placed = [(final / f"{epochs}" / node).stat().st_ino for node in NODES]
        session = ec.LocalSession()
        session.open(NODES)
        session.run(group)
        assert [(final / f"{epochs}" / node).stat().st_ino for node in NODES] == placed

    final = tmp_path / "final"
    finish(tmp_path / "run", 2, final)
    finish(tmp_path / "run", 3, final)
    assert sorted(p.name for p in final.iterdir()) == ["2", "3"]
    assert content(final / "3") == content(tmp_path / "run" / "3")
    with pytest.raises(errors.EpochExistsError, match=r"3/a already, which is another one"):
        finish(tmp_path / "other", 3, final)
    assert content(final / "3") == content(tmp_path / "run" / "3")
    finish(tmp_path / "other", 3, final, replace=True)
    assert content(final / "3") == content(tmp_path / "other" / "3")
    manager = ec.caffe2.MultiNodeCheckpointManager(final, "epochckpt")
    session = ec.LocalSession()
    assert manager.load_blobs_locally(NODES, ["total"], 3, session)
    assert session.workspace("b")["total"] == sum(range(9))
    single = ec.caffe2.CheckpointManager(tmp_path / "other", "b", "epochckpt")
    ec.LocalSession().run(ec.CopyUpload(tmp_path / "one").build(3, single))
    assert content(tmp_path / "one" / "3") == {k: v for k, v in content(final / "3").items() if k.startswith("b/")}
    with pytest.raises(errors.UnsupportedError, match="only to a directory"):
        ec.CopyUpload("memory://x/").build(3, manager)


def test_arguments_are_checked(tmp_path: pathlib.Path) -> None:
    """The directory itself, a folder in it, an unknown scheme, no manager, no such epoch."""
    save(tmp_path / "run")
    for inside in ("run", "run/final"):
        with pytest.raises(errors.InvalidArgumentError, match="lies in the checkpoint directory"):
            send(tmp_path / "run", tmp_path / inside)
    with pytest.raises(errors.InvalidArgumentError, match="destination"):
        ec.CopyUpload("nowhere://x")
    with pytest.raises(errors.InvalidArgumentError, match="timeout_secs"):
        ec.CopyUpload(tmp_path, timeout_secs=0)
    with pytest.raises(errors.InvalidArgumentError, match=r"got builtins\.int"):
        ec.CopyUpload(tmp_path / "final").build(3, 5)
    with pytest.raises(errors.EpochNotFoundError, match="no checkpoint 9; committed: 3"):
        send(tmp_path / "run", tmp_path / "final", 9)


def in_bucket(call: StoreCall) -> bool:
    """Whether the call is about the record of an attempt; the head, which names the attempt, is changed next."""
    return call.store.root.startswith("memory://") and is_record(call.path)


@pytest.fixture
def bucket() -> str:
    """A store without rename."""
    return f"memory://{uuid.uuid4().hex}/"


def test_an_upload_that_another_has_overtaken_removes_nothing_of_it(
    tmp_path: pathlib.Path, bucket: str, faults: Faults
) -> None:
    """The one that wakes up late has an attempt of its own, which is dead."""
    save(tmp_path / "run")

    def overtake(call: StoreCall) -> None:
        overtaken.remove()
        send(tmp_path / "run", bucket)  # while the first stands still

    overtaken = faults.before(Store.create, overtake, where=in_bucket)
    with pytest.raises(errors.UploadError, match="newer run"):
        send(tmp_path / "run", bucket)
    assert_is(bucket)


def test_an_upload_of_which_nobody_knows_whether_it_arrived_keeps_its_data(
    tmp_path: pathlib.Path, bucket: str, faults: Faults
) -> None:
    """The record may be visible: what it names stays."""
    save(tmp_path / "run")
    silence = StorageError(bucket, OSError("no answer came"))

    def lose_the_answer(call: StoreCall) -> None:
        lost.remove()
        faults.fail(Store.replace, silence, where=lambda call: call.path == paths.HEAD, times=1)
        raise silence

    def complete(call: StoreCall) -> None:
        nonlocal lost
        completed.remove()
        lost = faults.after(Store.replace, lose_the_answer, where=lambda call: call.path == paths.HEAD)

    lost: Rule
    completed = faults.after(Store.create, complete, where=in_bucket)
    with pytest.raises(errors.UploadError, match=r"nor can it be read whether it was \(.*no answer came"):
        send(tmp_path / "run", bucket)
    assert_is(bucket)


def test_an_upload_that_is_there_already_disturbs_no_run_that_saves_there(tmp_path: pathlib.Path) -> None:
    """A finished job that is started again uploads once more: it only looks."""
    save(tmp_path / "run")
    send(tmp_path / "run", tmp_path / "final")
    with ec.CheckpointManager(tmp_path / "final") as tuning:
        tuning.save(4, args=Save({"x": 4}))
        tuning.wait_until_finished()
        send(tmp_path / "run", tmp_path / "final")
        save(tmp_path / "run2", by=1)
        with pytest.raises(errors.EpochExistsError):
            send(tmp_path / "run2", tmp_path / "final")
        tuning.save(5, args=Save({"x": 5}))
        tuning.wait_until_finished()
        assert tuning.all_steps() == [3, 4, 5]


def test_the_folder_has_the_name_of_the_managers_format(tmp_path: pathlib.Path) -> None:
    """Also one that cannot be told from the folder's name."""

    class Names(ocp.path.step.NameFormat[Any]):
        def build_name(self, step: int) -> str:
            return f"epoch{step}"

        def find_step(self, base_path: Any, step: int) -> Any:
            raise NotImplementedError

        def find_all(self, base_path: Any) -> Any:
            raise NotImplementedError

    options = ocp.CheckpointManagerOptions(step_name_format=Names())
    with ec.CheckpointManager(tmp_path / "run", options=options) as manager:
        manager.save(12, args=Save(WEIGHTS))
        manager.wait_until_finished()
        ec.LocalSession().run(ec.CopyUpload(tmp_path / "final").build(12, manager))
    assert os.listdir(tmp_path / "final") == ["epoch12"]
    with ec.CheckpointManager(tmp_path / "final", options=options) as manager:
        assert manager.all_steps() == [12]
