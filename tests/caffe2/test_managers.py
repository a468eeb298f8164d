"""`ec.caffe2`: Caffe2's managers, name for name, on epochs that exist per node."""

import contextlib
import errno
import gc
import inspect
import io
import json
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import caffe2, errors
from epochckpt.caffe2.epochs import NodeEpochs
from epochckpt.format import paths
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support import caffe2_jobs
from tests.support.caffe2_jobs import (
    BIAS,
    BLOBS,
    READER,
    TOTAL,
    WEIGHTS,
    Recorded,
    content,
    fill,
    found,
    staging,
    train,
)
from tests.support.passing_time import SlowSave, passing
from tests.support.processes import parse_result, run_worker, start_processes
from tests.support.taps import NO_SPACE

NODES = ["trainer_0", "trainer_1", "reader_0"]
JOB = "tests.support.caffe2_jobs:job"
BAD_DISK = OSError(errno.EIO, os.strerror(errno.EIO))
NO_EXCHANGE = io.UnsupportedOperation("no exchange here")


def single(directory: Any, node: str = "a", **more: Any) -> caffe2.CheckpointManager:
    return caffe2.CheckpointManager(directory, node, "epochckpt", **more)


def multi(directory: Any, **more: Any) -> caffe2.MultiNodeCheckpointManager:
    return caffe2.MultiNodeCheckpointManager(directory, "epochckpt", **more)


def filled(node: str = "a", epoch: int = 0) -> ec.LocalSession:
    """A session of one node, whose blobs are those of an epoch."""
    session = ec.LocalSession()
    session.run(ec.Task(lambda ws: fill(ws, epoch), node=node))
    return session


def files(folder: pathlib.Path) -> dict[str, bytes]:
    gc.collect()  # a job's staging folder goes with its last manager
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# -- the table, row by row ---------------------------------------------------------------------------------------------


def names_of(fn: Any) -> list[str]:
    return [name for name in inspect.signature(fn).parameters if name != "self"]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (caffe2.CheckpointManager, "db_prefix node_name db_type metadata_handler"),
        (caffe2.CheckpointManager.init, "nodes retrieve_from_epoch path_prefix path_type"),
        (caffe2.CheckpointManager.blob_list, ""),
        (caffe2.CheckpointManager.load, "epoch path_prefix path_type"),
        (caffe2.CheckpointManager.load_blobs_from_checkpoint, "blob_names epoch"),
        (caffe2.CheckpointManager.check_db_exists, "epoch"),
        (caffe2.CheckpointManager.save, "epoch"),
        (caffe2.CheckpointManager.collect_checkpoint_stats, "stats"),
        (caffe2.MultiNodeCheckpointManager, "db_prefix db_type metadata_handler"),
        (caffe2.MultiNodeCheckpointManager.init, "nodes retrieve_from_epoch path_prefix path_type"),
        (caffe2.MultiNodeCheckpointManager.load, "epoch path_prefix path_type"),
        (caffe2.MultiNodeCheckpointManager.load_blobs_locally, "nodes blob_names epoch session"),
        (caffe2.MultiNodeCheckpointManager.get_ckpt_db_name, "node_name epoch"),
        (caffe2.MultiNodeCheckpointManager.save, "epoch"),
        (caffe2.MultiNodeCheckpointManager.collect_checkpoint_stats, "stats"),
        *[
            (getattr(manager, verb), arguments)
            for manager in (caffe2.CheckpointManager, caffe2.MultiNodeCheckpointManager)
            for verb, arguments in {
                "set_params": "nodes path_prefix path_type",
                "get_resume_from_epoch_id": "user_epoch",
                "cp_accessible": "epoch",
                "report_checkpoint_stats": "action_name",
                "write_checkpoint_metadata": "epoch",
            }.items()
        ],
        (caffe2.get_ckpt_filename, "node_name epoch"),
        (caffe2.db_name, "epoch node_name db_prefix path_prefix"),
    ],
)
def test_every_name_has_its_arguments_in_order(fn: Any, expected: str) -> None:
    assert names_of(fn) == expected.split()


def test_names_of_dbs() -> None:
    """The relative path, the full one, and a prefix that is put before it as it stands."""
    assert caffe2.get_ckpt_filename("trainer_0", 12) == "12/trainer_0"
    assert caffe2.db_name(0, "trainer_0", "/ckpt") == "/ckpt/0/trainer_0"
    assert caffe2.db_name(3, "trainer_0", "/run", "/mnt/b-") == "/mnt/b-3/trainer_0"
    assert caffe2.db_name(3, "trainer_0", "/run", "/mnt/b/") == "/mnt/b/3/trainer_0"
    assert caffe2.db_name(3, "trainer_0", "/run", "") == "/run/3/trainer_0"
    with pytest.raises(errors.InvalidArgumentError, match="epoch"):
        caffe2.get_ckpt_filename("trainer_0", -1)


def test_init_takes_the_blobs_that_exist_when_it_runs(tmp_path: pathlib.Path) -> None:
    """Not those at the call, and not those that come later."""
    session, manager = ec.LocalSession(), single(tmp_path)
    task = manager.init()
    session.workspace()["early"] = 1
    session.run(task)
    session.workspace()["late"] = 2
    assert manager.blob_list() == ["early"]
    session.run(manager.save(0))
    record = json.loads((tmp_path / "0" / "a" / "epoch.json").read_text())
    assert list(record["items"]) == ["early"]


def test_init_takes_the_names_of_epoch_zero(tmp_path: pathlib.Path) -> None:
    """0 is a number: the names come from that epoch, not from the workspace."""
    session, manager = ec.LocalSession(), single(tmp_path)
    session.workspace()["kept"] = np.arange(3)
    session.run(manager.init())
    session.run(manager.save(0))
    again, other = single(tmp_path), ec.LocalSession()
    other.workspace()["stray"] = 1
    other.run(again.init(retrieve_from_epoch=0))
    assert again.blob_list() == ["kept"]
    other.run(again.load(0))
    assert list(other.workspace()["kept"]) == [0, 1, 2]


@pytest.mark.parametrize("verb", ["save", "load"])
def test_verbs_that_need_init_say_so(tmp_path: pathlib.Path, verb: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="init"):
        getattr(single(tmp_path), verb)(0)
    many = multi(tmp_path)
    with pytest.raises(errors.InvalidArgumentError, match=r"init\(nodes\)"):
        getattr(many, verb)(0)
    many.set_params(["a", "b"])
    with pytest.raises(errors.InvalidArgumentError, match="init"):
        getattr(many, verb)(0)
    with pytest.raises(errors.InvalidArgumentError, match="init"):
        single(tmp_path).blob_list()
    manager = single(tmp_path)
    manager.init()  # its task has not run
    with pytest.raises(errors.InvalidArgumentError, match="init"):
        ec.LocalSession().run(manager.save(0))


def test_load_uses_targets_and_states(tmp_path: pathlib.Path) -> None:
    """A blob with a target comes back as it says; an object is given its state; others come as they were saved."""
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())
    session.run(manager.save(4))
    again = ec.LocalSession()
    ws = again.workspace("a") if "a" in again.hosted else again.workspace()
    ws[READER] = reader = caffe2_jobs.Reader()
    ws.target(WEIGHTS, {"w": np.zeros(3000, np.float16)})
    later = single(tmp_path)
    again.run(later.init(retrieve_from_epoch=4))
    again.run(later.load(4))
    assert ws[READER] is reader
    assert reader.position == caffe2_jobs.seed("a") == ws[TOTAL]
    assert isinstance(ws[WEIGHTS]["w"], np.ndarray)
    assert ws[WEIGHTS]["w"].dtype == np.float16
    assert ws[BIAS].dtype == np.int64


def test_load_names_blobs_that_the_epoch_lacks(tmp_path: pathlib.Path) -> None:
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())
    session.run(manager.save(0))
    session.run(ec.Task(lambda ws: ws.update(more=1)))
    other = single(tmp_path)
    session.run(other.init())
    with pytest.raises(errors.InvalidArgumentError, match=r"lacks 'more'.*gpu_0/fc_w"):
        session.run(other.load(0))
    with pytest.raises(errors.EpochNotFoundError, match="no checkpoint 7; committed: 0"):
        session.run(manager.load(7))


def test_save_names_a_blob_that_has_gone(tmp_path: pathlib.Path) -> None:
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())
    session.run(ec.Task(lambda ws: ws.pop(TOTAL)))
    with pytest.raises(errors.SaveError, match=r"node a: 'total' existed when init ran"):
        session.run(manager.save(0))
    assert not (tmp_path / "0").exists()


def test_save_names_a_blob_that_cannot_be_saved(tmp_path: pathlib.Path) -> None:
    session, manager = filled(), single(tmp_path)
    session.workspace("a")["thing"] = {"inner": object()}
    session.run(manager.init())
    with pytest.raises(errors.InvalidArgumentError, match=r"node a, blob 'thing'.*object"):
        session.run(manager.save(0))


def test_a_subset_of_blobs(tmp_path: pathlib.Path) -> None:
    """Missing names are left out, others untouched; works on a fresh manager, and with names of other nodes."""
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())
    session.run(manager.save(1))
    fresh = ec.LocalSession()
    fresh.run(single(tmp_path).load_blobs_from_checkpoint([TOTAL, f"a/{BIAS}", "b/total", "nothing"], 1))
    assert sorted(fresh.root) == [BIAS, TOTAL]
    with pytest.raises(errors.EpochNotFoundError):
        fresh.run(single(tmp_path).load_blobs_from_checkpoint([TOTAL], 2))
    with pytest.raises(errors.InvalidArgumentError, match="list of names"):
        single(tmp_path).load_blobs_from_checkpoint(TOTAL, 1)


def test_a_subset_reads_only_its_own_bytes(tmp_path: pathlib.Path, faults: Faults) -> None:
    """The files of the other blobs are not even opened."""
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())
    session.run(manager.save(1))
    opened: list[str] = []
    faults.before(Store.open_reader, lambda call: opened.append(call.path))
    ec.LocalSession().run(single(tmp_path).load_blobs_from_checkpoint([BIAS], 1))
    data = [path for path in opened if path.endswith(".safetensors")]
    assert len(set(data)) == 1
    assert "fc_b" in data[0]


def test_check_db_exists(tmp_path: pathlib.Path) -> None:
    """A task whose output is a bool, on a fresh manager."""
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())
    session.run(manager.save(0))
    for epoch, expected in ((0, True), (1, False)):
        task = single(tmp_path).check_db_exists(epoch)
        session.run(task)
        assert task.outputs()[0].fetch() is expected
    many = multi(tmp_path)
    many.set_params(["a", "b"])
    group = many.check_db_exists(0)
    ec.LocalSession().run(group)
    assert [task.outputs()[0].fetch() for task in group] == [True, False]
    gone = single(tmp_path / "gone").check_db_exists(0)
    session.run(gone)
    assert gone.outputs()[0].fetch() is False


def test_stats_name_the_db_and_go_to_the_handler_together(tmp_path: pathlib.Path) -> None:
    handler = Recorded()
    manager, session = multi(tmp_path, metadata_handler=handler), ec.LocalSession()
    train(manager, session, NODES, 1)
    dbs = [manager.get_ckpt_db_name(node, 1) for node in NODES]
    assert list(handler.stats) == dbs == [str(tmp_path / "1" / node) for node in NODES]
    assert all(secs > 0 for secs in handler.stats.values())
    assert handler.calls[:2] == [f"set_params {tmp_path.name} epochckpt {NODES} None None", "last_epoch None"]
    saves = [[f"cp_accessible {epoch}", f"write {epoch}", "report checkpoint_save"] for epoch in (0, 1)]
    assert handler.calls[2:] == [*saves[0], *saves[1]]
    stats: dict[str, float] = {"other": 1.0}
    one = single(tmp_path, "trainer_0")
    one.collect_checkpoint_stats(stats)
    assert stats == {"other": 1.0}
    ec.LocalSession().run(one.load_blobs_from_checkpoint([TOTAL], 1))
    one.collect_checkpoint_stats(stats)
    assert sorted(stats) == [str(tmp_path / "1" / "trainer_0"), "other"]


def test_the_handler_is_given_the_paths_and_may_override_the_user(tmp_path: pathlib.Path) -> None:
    handler = Recorded()
    handler.last_epoch = lambda user_epoch=None: 7 if user_epoch == 3 else None
    for manager in (single(tmp_path, metadata_handler=handler), multi(tmp_path, metadata_handler=handler)):
        manager.set_params([ec.Node("a")], path_prefix="/mnt", path_type="epochckpt")
        assert handler.calls.pop() == f"set_params {tmp_path.name} epochckpt ['a'] /mnt epochckpt"
        assert manager.get_resume_from_epoch_id(3) == 7
        assert manager.get_resume_from_epoch_id(0) is None
        assert manager.cp_accessible() is True
    for manager in (single(tmp_path), multi(tmp_path)):
        assert manager.get_resume_from_epoch_id() is None
        assert manager.get_resume_from_epoch_id(0) == 0
        assert manager.cp_accessible(3) is True
        manager.write_checkpoint_metadata(0)
        manager.report_checkpoint_stats("checkpoint_save")


def test_a_handler_is_looked_at_and_so_are_its_answers(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="expected an object with set_params"):
        single(tmp_path, metadata_handler=object())
    handler = Recorded()
    handler.last_epoch = lambda user_epoch=None: "3"
    with pytest.raises(errors.InvalidArgumentError, match="answered last_epoch"):
        multi(tmp_path, metadata_handler=handler).get_resume_from_epoch_id()
    with pytest.raises(errors.InvalidArgumentError, match="epoch"):
        multi(tmp_path).get_resume_from_epoch_id(-1)


def test_a_handler_that_is_shipped_resumes_the_job(tmp_path: pathlib.Path) -> None:
    """Nobody names an epoch: the handler knows the last one, which lies beside the epochs."""
    resumed = []
    for epochs in (2, 4):
        manager = multi(tmp_path, metadata_handler=ec.metadata.JsonMetadataHandler())
        resumed.append(train(manager, ec.LocalSession(), ["a", "b"], epochs)["resumed"])
    assert resumed == [None, 2]
    assert content(str(tmp_path), "b", 4) == (0, 4)


def test_kinds_of_storage(tmp_path: pathlib.Path) -> None:
    """There is one; an unknown one is refused, and told which there is."""
    with pytest.raises(errors.InvalidArgumentError, match=r"db_type 'minidb'.*'epochckpt'"):
        caffe2.CheckpointManager(tmp_path, "a", "minidb")
    with pytest.raises(errors.InvalidArgumentError, match=r"db_type 'minidb'.*'epochckpt'"):
        caffe2.MultiNodeCheckpointManager(tmp_path, "minidb")
    manager = single(tmp_path)
    for call in (manager.set_params, manager.init):
        with pytest.raises(errors.InvalidArgumentError, match=r"path_type 'hive'.*'epochckpt'"):
            call(["a"], path_type="hive")
    manager.init(["a"], path_type="epochckpt")
    unknown: Any
    for unknown in ("hive", "", 0, False):
        with pytest.raises(errors.InvalidArgumentError, match="path_type"):
            manager.set_params(["a"], path_type=unknown)
        with pytest.raises(errors.InvalidArgumentError, match="path_type"):
            manager.init(["a"], path_type=unknown)
        with pytest.raises(errors.InvalidArgumentError, match="path_type"):
            manager.load(0, path_type=unknown)
    with pytest.raises(errors.UnsupportedError, match="file system"):
        single("memory://somewhere/")


@pytest.mark.parametrize("lead", ["", "best-"])
def test_a_path_prefix_is_for_init_and_load_only(tmp_path: pathlib.Path, lead: str) -> None:
    """It stands before `<epoch>/<node>`, as it is, in place of the prefix; saves go to the prefix."""
    old, new, prefix = tmp_path / "old", tmp_path / "new", f"{tmp_path}/old/{lead}"
    old.mkdir()
    source, session = single(old), filled()
    session.run(source.init())
    session.run(source.save(2))
    (old / "2").rename(old / f"{lead}2")
    manager, again = single(new), ec.LocalSession()
    again.run(manager.init(retrieve_from_epoch=2, path_prefix=prefix))
    again.run(manager.load(2, path_prefix=prefix))
    assert sorted(again.root) == sorted(BLOBS)
    stats: dict[str, float] = {}
    manager.collect_checkpoint_stats(stats)
    assert list(stats) == [f"{prefix}2/a"] == [caffe2.db_name(2, "a", new, prefix)]
    where = f"old/{lead}<epoch>" if lead else "old"
    with pytest.raises(errors.EpochNotFoundError, match=f"{where}, node a: no checkpoint 7; committed: 2"):
        again.run(manager.load(7, path_prefix=prefix))
    with pytest.raises(errors.NotACheckpointDirectoryError, match="new does not exist"):
        again.run(manager.save(3))


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_other_nodes_are_refused(tmp_path: pathlib.Path) -> None:
    manager = single(tmp_path)
    with pytest.raises(errors.InvalidArgumentError, match="one node, got 2"):
        manager.init(["a", "b"])
    manager.init(["a"])
    with pytest.raises(errors.InvalidArgumentError, match="'a' and now 'b'"):
        manager.init(["b"])
    many = multi(tmp_path)
    assert many.node_managers == []
    with pytest.raises(errors.InvalidArgumentError, match="got none"):
        many.init([])
    with pytest.raises(errors.InvalidArgumentError, match="twice"):
        many.init(["a", "a"])
    many.init(["a", "b"])
    many.init(["b", "a"])
    assert [(node, type(m)) for node, m in many.node_managers] == [(n, caffe2.CheckpointManager) for n in ("a", "b")]
    with pytest.raises(errors.InvalidArgumentError, match="has the nodes a, b, and was now given a, c"):
        many.init(["a", "c"])
    with pytest.raises(errors.InvalidArgumentError, match="no node 'c'; it has: a, b"):
        many.get_ckpt_db_name("c", 0)
    with pytest.raises(errors.InvalidArgumentError, match="no node 'c'"):
        many.load_blobs_locally(["c"], [TOTAL], 0, ec.LocalSession())


def test_a_manager_of_one_node_does_not_run_on_two(tmp_path: pathlib.Path) -> None:
    session = ec.LocalSession()
    for node in ("a", "b"):
        session.run(ec.Task(lambda ws: fill(ws, 0), node=node))
    with pytest.raises(errors.InvalidArgumentError, match="ran on node 'a' and now on 'b'"):
        session.run(single(tmp_path).init())


def test_the_folder_may_have_another_name_than_the_node(tmp_path: pathlib.Path) -> None:
    session, manager = filled("trainer_0"), single(tmp_path, "temp_node")
    session.run(manager.init(["trainer_0"]))
    session.run(manager.save(0))
    assert (tmp_path / "0" / "temp_node" / "epoch.json").exists()


def test_one_node_from_scratch_and_resumed(tmp_path: pathlib.Path) -> None:
    train(single(tmp_path), ec.LocalSession(), ["a"], 2)
    assert NodeEpochs(tmp_path, "a").epoch_directory.list_epochs() == [0, 1, 2]
    assert train(single(tmp_path), ec.LocalSession(), ["a"], 4, user_epoch=2)["resumed"] == 2
    assert [content(str(tmp_path), "a", epoch) for epoch in range(6)] == [*[(0, e) for e in range(5)], None]


def test_resuming_from_epoch_zero(tmp_path: pathlib.Path) -> None:
    train(multi(tmp_path), ec.LocalSession(), ["a"], 0)
    assert train(multi(tmp_path), ec.LocalSession(), ["a"], 1, user_epoch=0, branch=1)["resumed"] == 0
    assert [content(str(tmp_path), "a", epoch) for epoch in (0, 1)] == [(0, 0), (1, 1)]


def test_three_nodes_in_one_session(tmp_path: pathlib.Path) -> None:
    """Each has its own blobs, and its own folder; a subset is loaded by bare names, or of one node alone."""
    train(multi(tmp_path), ec.LocalSession(), NODES, 2)
    train(multi(tmp_path), ec.LocalSession(), NODES, 3, user_epoch=2)
    assert sorted(p.name for p in (tmp_path / "3").iterdir()) == sorted(NODES)
    session = ec.LocalSession()
    assert multi(tmp_path).load_blobs_locally(NODES, [TOTAL, f"trainer_1/{BIAS}", "nothing"], 3, session) is True
    assert sorted(session.root) == sorted([*[f"{node}/{TOTAL}" for node in NODES], f"trainer_1/{BIAS}"])
    assert session.workspace("reader_0")[TOTAL] == caffe2_jobs.seed("reader_0") + 3000


def test_an_epoch_that_any_node_lacks_loads_nothing(tmp_path: pathlib.Path) -> None:
    train(multi(tmp_path), ec.LocalSession(), ["a", "b"], 1)
    session = ec.LocalSession()
    assert multi(tmp_path).load_blobs_locally(["a", "b"], BLOBS, 2, session) is False
    shutil.rmtree(tmp_path / "1" / "b")
    assert multi(tmp_path).load_blobs_locally(["a", "b"], BLOBS, 1, session) is False
    assert not list(session.root)
    assert multi(tmp_path).load_blobs_locally(["a"], BLOBS, 1, session) is True


def test_notes_go_with_every_node(tmp_path: pathlib.Path) -> None:
    """JSON that the runner keeps beside the blobs."""
    manager, session = multi(tmp_path), ec.LocalSession()
    manager.notes = {"stop": {"best": 0.5}, "epoch": 0}
    train(manager, session, ["a", "b"], 0)
    again = multi(tmp_path)
    again.set_params(["b", "a"])
    assert again.read_notes(0) == manager.notes == single(tmp_path, "b").read_notes(0)
    assert again.read_notes(1) is None
    shutil.rmtree(tmp_path / "0" / "b")
    assert again.read_notes(0) == manager.notes
    fresh = multi(tmp_path)
    for call in (fresh.save, fresh.read_notes):
        with pytest.raises(errors.InvalidArgumentError, match="no nodes yet"):
            call(0)
    fresh.collect_checkpoint_stats(stats := {})
    assert stats == {}


def test_reading_a_record_starts_no_jax_backend(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, session = multi(tmp_path), ec.LocalSession()
    train(manager, session, ["a"], 0)
    monkeypatch.setattr(jax, "process_index", lambda: pytest.fail("it starts jax's backend"))
    again = single(tmp_path)
    session.run(again.init(["a"], retrieve_from_epoch=0))
    assert (again.blob_list(), again.read_notes(0)) == (manager.node_managers[0][1].blob_list(), manager.notes)


def test_names_of_blobs_that_are_no_names_of_files(tmp_path: pathlib.Path) -> None:
    session, manager = ec.LocalSession(), single(tmp_path)
    names = ["a", "epoch.json", "gpu_0/fc_w", "gpu_0_fc_w", "x" * 300, "ü", "..", "a:b", "a-00001", "A"]
    for number, name in enumerate(names):
        session.root[name] = number
    session.run(manager.init())
    session.run(manager.save(0))
    again, later = ec.LocalSession(), single(tmp_path)
    again.run(later.init(retrieve_from_epoch=0))
    again.run(later.load(0))
    assert dict(again.root) == {name: number for number, name in enumerate(names)}


def test_a_node_without_blobs_has_epochs_too(tmp_path: pathlib.Path) -> None:
    session, manager = ec.LocalSession(), single(tmp_path)
    session.run(manager.init())
    session.run(manager.save(0))
    again = single(tmp_path)
    session.run(again.init(retrieve_from_epoch=0))
    session.run(again.load(0))
    assert again.blob_list() == []


@pytest.mark.slow
def test_processes_of_one_job_run_their_own_nodes(tmp_path: pathlib.Path) -> None:
    """In a `jax.distributed` job; the handler hears the primary alone, arrays over processes are refused by name."""
    for me, out in enumerate(run_worker("tests.support.caffe2_jobs:distributed", {"directory": str(tmp_path)}, 2)):
        assert out["resumed"] == 1
        assert out["loaded"] is True
        assert out["total"] == caffe2_jobs.seed(f"process_{me}") + 2000
        assert "'spread' has arrays that are spread over processes" in out["refused"]
        assert [call.split()[0] for call in out["calls"]].count("write") == (2 if me == 0 else 0)
        assert bool(out["calls"]) is (me == 0)
        assert content(str(tmp_path), f"process_{me}", 2) == (0, 2)


# -- sharing a directory -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_jobs_one_after_the_other_share_a_directory(tmp_path: pathlib.Path) -> None:
    """In processes of their own; the later ones touch nothing of the earlier ones."""
    before: dict[str, bytes] = {}
    for node in ("a", "b", "c"):
        run_worker("tests.support.caffe2_jobs:single_job", {"directory": str(tmp_path), "node": node, "epochs": 1})
        now = files(tmp_path)
        assert {name: now.get(name) for name in before} == before
        before = now
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]
    run_worker(
        "tests.support.caffe2_jobs:single_job", {"directory": str(tmp_path), "node": "b", "epochs": 2, "user_epoch": 1}
    )
    assert [content(str(tmp_path), node, 2) for node in ("a", "b", "c")] == [None, (0, 2), None]
    assert multi(tmp_path).load_blobs_locally(["a", "b", "c"], BLOBS, 1, ec.LocalSession())


@pytest.mark.slow
def test_jobs_at_once_share_a_directory(tmp_path: pathlib.Path) -> None:
    with contextlib.ExitStack() as stack:
        jobs = []
        for node in ("a", "b", "c"):
            args = {"directory": str(tmp_path), "node": node, "epochs": 20}
            jobs.append(stack.enter_context(start_processes(["-m", "tests.support.worker", JOB, json.dumps(args)], 1)))
        for processes in jobs:
            (outcome,) = processes.wait(150)
            assert outcome.returncode == 0, outcome.stdout
            assert parse_result(outcome.stdout)["failed"] == {}
    assert sorted(int(p.name) for p in tmp_path.iterdir()) == list(range(21))
    assert [content(str(tmp_path), node, 20) for node in ("a", "b", "c")] == [(0, 20)] * 3


@pytest.mark.slow
def test_running_again_from_scratch_replaces_only_its_own_epochs(tmp_path: pathlib.Path) -> None:
    train(multi(tmp_path), ec.LocalSession(), ["a", "b"], 2)
    other = files(tmp_path / "1" / "b")
    train(multi(tmp_path), ec.LocalSession(), ["a"], 1, branch=1)
    assert [content(str(tmp_path), "a", epoch) for epoch in (0, 1, 2)] == [(1, 0), (1, 1), (0, 2)]
    assert files(tmp_path / "1" / "b") == other
    assert all(not list((tmp_path / home).iterdir()) for home in staging(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "at",
    [
        pytest.param((2, "", ".", 1, signal.SIGKILL), marks=pytest.mark.long),
        pytest.param((2, "pwrite", "", 2, signal.SIGKILL), marks=pytest.mark.long),
        pytest.param((2, "fsync", "", 4, signal.SIGKILL), marks=pytest.mark.long),
        (2, "create", "epoch.json", 1, signal.SIGKILL),
        (2, "rename", r"-> 2/b$", 1, signal.SIGKILL),
        pytest.param((2, "fsync", "^2 ->", 1, signal.SIGKILL), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_job_that_is_killed_while_it_saves(tmp_path: pathlib.Path, at: Any) -> None:
    """Earlier epochs and those of other nodes stay; the epoch is whole or not there; the next job cleans up."""
    train(multi(tmp_path), ec.LocalSession(), ["a"], 2)
    foreign = tmp_path / f"node-a-{'0' * 16}.orbax-checkpoint-tmp" / "2-1"
    foreign.mkdir(parents=True)
    others = {n: d for n, d in files(tmp_path).items() if "/a/" in n}
    args = {"directory": str(tmp_path), "node": "b", "epochs": 3, "at": at}
    with start_processes(["-m", "tests.support.worker", JOB, json.dumps(args)], 1) as processes:
        assert processes.wait(150)[0].returncode == -signal.SIGKILL
    assert {n: d for n, d in files(tmp_path).items() if "/a/" in n} == others
    assert [content(str(tmp_path), "b", epoch) for epoch in (0, 1)] == [(0, 0), (0, 1)]
    assert content(str(tmp_path), "b", 2) == ((0, 2) if at[2].startswith("^2") else None)
    assert len(staging(tmp_path, "b")) == 1
    manager = multi(tmp_path)
    train(manager, ec.LocalSession(), ["b"], 3, user_epoch=1, branch=1)
    assert [content(str(tmp_path), "b", epoch) for epoch in (1, 2, 3)] == [(0, 1), (1, 2), (1, 3)]
    (home,) = staging(tmp_path, "b")
    assert not list((tmp_path / home).iterdir())
    assert foreign.exists()
    del manager
    gc.collect()
    assert staging(tmp_path, "b") == []


@pytest.mark.slow
@pytest.mark.parametrize("path", [r"-> 1/b$", "^1 ->"], ids=["before the exchange", "after it"])
def test_a_job_that_is_killed_while_it_replaces(tmp_path: pathlib.Path, path: str) -> None:
    """The old epoch or the new one is there at once: nobody has to put anything back."""
    train(multi(tmp_path), ec.LocalSession(), ["b"], 2)
    exchange = path.endswith("b$")
    at = (1, "rename" if exchange else "fsync", path, 1, signal.SIGKILL)
    args = {"directory": str(tmp_path), "node": "b", "epochs": 2, "at": at, "branch": 1}
    with start_processes(["-m", "tests.support.worker", JOB, json.dumps(args)], 1) as processes:
        assert processes.wait(150)[0].returncode == -signal.SIGKILL
    left = 0 if exchange else 1
    assert content(str(tmp_path), "b", 1) == (left, 1)
    manager = multi(tmp_path)  # its staging folder goes with it
    train(manager, ec.LocalSession(), ["b"], 3, user_epoch=2, branch=2)
    assert [content(str(tmp_path), "b", epoch) for epoch in (0, 1, 2, 3)] == [(1, 0), (left, 1), (0, 2), (2, 3)]
    (home,) = staging(tmp_path, "b")
    assert not list((tmp_path / home).iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_job_that_is_killed_while_it_replaces_without_exchange(tmp_path: pathlib.Path, count: int) -> None:
    """What was to be replaced comes back with the next job, unless its successor is in its place."""
    train(multi(tmp_path), ec.LocalSession(), ["b"], 2)
    at = (1, "rename", r"1/b( ->|$)", count, signal.SIGKILL)
    args = {"directory": str(tmp_path), "node": "b", "epochs": 2, "at": at, "branch": 1, "exchange": False}
    with start_processes(["-m", "tests.support.worker", JOB, json.dumps(args)], 1) as processes:
        assert processes.wait(150)[0].returncode == -signal.SIGKILL
    assert content(str(tmp_path), "b", 1) == ((0, 1) if count == 1 else None)
    train(multi(tmp_path), ec.LocalSession(), ["b"], 3, user_epoch=2, branch=2)
    assert [content(str(tmp_path), "b", epoch) for epoch in (0, 1, 2, 3)] == [(1, 0), (0, 1), (0, 2), (2, 3)]


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_at_any_moment_there_is_one(tmp_path: pathlib.Path, exchange: bool, faults: Faults) -> None:
    """Looked at around every call that changes a name; only without an exchange there is a moment without it."""
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())
    session.run(manager.save(0))
    seen: list[bool] = []
    if not exchange:
        faults.fail(Store.exchange, NO_EXCHANGE)

    def look(call: StoreCall) -> None:
        seen.append((tmp_path / "0" / "a" / "epoch.json").is_file())

    for method in (Store.rename, Store.exchange):
        faults.before(method, look)
        faults.after(method, look)
    session.run(ec.Task(lambda ws: fill(ws, 0, branch=1), node="a"))
    session.run(manager.save(0))
    assert all(seen) is exchange
    assert content(str(tmp_path), "a", 0) == (1, 0)
    (home,) = staging(tmp_path)
    assert not list((tmp_path / home).iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "at",
    [
        pytest.param(("mkdir", r"node-b-[^/]+/2-\d+ ", 1, signal.SIGSTOP), marks=pytest.mark.long),
        ("create", "node.json", 1, signal.SIGSTOP),
        ("rename", r"-> 2/b$", 1, signal.SIGSTOP),
    ],
    ids=str,
)
def test_zombies_cannot_commit(tmp_path: pathlib.Path, at: Any) -> None:
    """Two older jobs for a node that were stopped: once a newer one has saved, neither commits anything."""
    with contextlib.ExitStack() as stack:
        zombies = []
        for branch in (1, 2):
            args = {"directory": str(tmp_path), "node": "b", "epochs": 3, "branch": branch, "at": (2, *at)}
            zombies.append(
                stack.enter_context(start_processes(["-m", "tests.support.worker", JOB, json.dumps(args)], 1))
            )
            zombies[-1][0].wait_for_output(caffe2_jobs.STOPPED, 60)
        train(multi(tmp_path), ec.LocalSession(), ["b"], 2, branch=3)
        for zombie in zombies:
            zombie[0].send_signal(signal.SIGCONT)
            (outcome,) = zombie.wait(150)
            assert parse_result(outcome.stdout)["failed"] == {"2": "FencedError", "3": "FencedError"}
    assert [content(str(tmp_path), "b", epoch) for epoch in range(4)] == [(3, 0), (3, 1), (3, 2), None]


def test_who_only_reads_fences_nobody_off(tmp_path: pathlib.Path) -> None:
    """An evaluator may init and load a node's epochs while its job is running."""
    manager, session = multi(tmp_path), filled()
    session.run(manager.init(["a"]))
    session.run(manager.save(0))
    reader, other = multi(tmp_path), ec.LocalSession()
    other.run(reader.init(["a"], retrieve_from_epoch=0))
    other.run(reader.load(0))
    session.run(manager.save(1))
    other.run(reader.load(1))
    assert found(other.workspace("a")) == (0, 0)


def test_a_job_that_joined_earlier_does_not_take_over_from_a_later_one(tmp_path: pathlib.Path) -> None:
    """What counts is who joined last, not who saved last."""
    first, second, session = multi(tmp_path), multi(tmp_path), filled()
    session.run(first.init(["a"]))
    session.run(second.init(["a"]))
    session.run(second.save(0))
    with pytest.raises(errors.FencedError, match="a newer job for node a"):
        session.run(first.save(1))
    session.run(second.save(1))


# -- what can go wrong -------------------------------------------------------------------------------------------------


def test_a_missing_directory_fails_saves_and_nothing_else(tmp_path: pathlib.Path) -> None:
    """It is never created; training goes to its end, and when the directory comes, saves work."""
    directory = tmp_path / "run"

    def mounted(epoch: int) -> None:
        if epoch == 2:
            directory.mkdir()

    out = train(multi(directory), ec.LocalSession(), ["a"], 3, soft=True, during=mounted)
    assert out["failed"] == {"0": "NotACheckpointDirectoryError", "1": "NotACheckpointDirectoryError"}
    assert NodeEpochs(directory, "a").epoch_directory.list_epochs() == [2, 3]
    session, manager = filled(), single(tmp_path / "gone")
    session.run(manager.init())
    with pytest.raises(OSError, match=r"gone does not exist; expected a directory, which is never created") as caught:
        session.run(manager.save(0))
    assert isinstance(caught.value, errors.EpochCheckpointError)
    (tmp_path / "gone").write_text("")
    with pytest.raises(OSError, match="is a file"):
        session.run(manager.save(0))
    assert multi(tmp_path / "nowhere").load_blobs_locally(["a"], [TOTAL], 0, session) is False


def test_a_directory_that_goes_away_meanwhile(tmp_path: pathlib.Path) -> None:
    session, manager = filled(), single(tmp_path / "run")
    (tmp_path / "run").mkdir()
    session.run(manager.init())
    session.run(manager.save(0))
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(errors.NotACheckpointDirectoryError):
        session.run(manager.save(1))
    (tmp_path / "away").rename(tmp_path / "run")
    session.run(manager.save(1))
    assert NodeEpochs(tmp_path / "run", "a").epoch_directory.list_epochs() == [0, 1]


@pytest.mark.parametrize("verb", [Store.create, Store.sync_folder, Store.rename], ids=lambda verb: verb.__name__)
def test_a_save_that_fails_leaves_nothing_and_the_next_one_works(
    tmp_path: pathlib.Path, faults: Faults, verb: Callable[..., None]
) -> None:
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())
    session.run(manager.save(0))
    with faults.fail(verb, NO_SPACE), pytest.raises(errors.SaveError, match="No space left"):
        session.run(manager.save(1))
    session.run(manager.save(0))
    session.run(manager.save(1))
    assert NodeEpochs(tmp_path, "a").epoch_directory.list_epochs() == [0, 1]
    (home,) = staging(tmp_path)
    assert not list((tmp_path / home).iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
def test_a_rename_that_is_not_durable_is_taken_back(tmp_path: pathlib.Path, exchange: bool, faults: Faults) -> None:
    """The epoch that was there is there again; the caller hears that it is uncertain."""
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())
    session.run(manager.save(0))
    before = files(tmp_path / "0")
    if not exchange:
        faults.fail(Store.exchange, NO_EXCHANGE)
    with (
        faults.fail(Store.sync_folder, BAD_DISK, where=lambda call: call.path == "0"),
        pytest.raises(errors.UncertainError, match="taken out of sight"),
    ):
        session.run(manager.save(0))
    assert files(tmp_path / "0") == before
    (home,) = staging(tmp_path)
    assert [entry.name.partition("-")[0] for entry in (tmp_path / home).iterdir()] == ["removed"]


@pytest.mark.parametrize("happens", [True, False])
def test_a_rename_of_which_nothing_can_be_seen_is_uncertain(
    tmp_path: pathlib.Path, happens: bool, faults: Faults
) -> None:
    """It reports an error, and the epoch cannot be read: "not committed" might not be true."""
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())

    def fail(call: StoreCall) -> None:
        faults.fail(Store.read, BAD_DISK)
        raise BAD_DISK

    (faults.after if happens else faults.before)(Store.rename, fail)
    with pytest.raises(errors.UncertainError, match="cannot be seen"):
        session.run(manager.save(0))
    faults.clear()
    assert NodeEpochs(tmp_path, "a").epoch_directory.list_epochs() == ([0] if happens else [])


def test_damage_is_found_and_stays_with_its_blob(tmp_path: pathlib.Path) -> None:
    train(multi(tmp_path), ec.LocalSession(), ["a"], 0)
    (file,) = (tmp_path / "0" / "a").glob("*fc_w*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    session = ec.LocalSession()
    assert multi(tmp_path).load_blobs_locally(["a"], [TOTAL, BIAS], 0, session)
    with pytest.raises(errors.DamagedError, match="fc_w"):
        multi(tmp_path).load_blobs_locally(["a"], [TOTAL, WEIGHTS], 0, ec.LocalSession())


@pytest.mark.slow
def test_somebody_elses_epoch_is_not_touched(tmp_path: pathlib.Path) -> None:
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"x": jnp.arange(3)}))
    before = files(tmp_path)
    session, one = filled(), single(tmp_path, "process_0")
    with pytest.raises(errors.UnsupportedError):
        session.run(one.init())
    assert files(tmp_path) == before


@pytest.mark.slow
def test_what_is_no_epoch_is_not_touched(tmp_path: pathlib.Path) -> None:
    session, one = filled(), single(tmp_path, "process_0")
    session.run(one.init())
    (tmp_path / "1" / "process_0").mkdir(parents=True)
    before = files(tmp_path)
    with pytest.raises(errors.SaveError, match=r"holds no epoch\.json"):
        session.run(one.save(1))
    assert files(tmp_path) == before
    (tmp_path / "2").write_text("")
    with pytest.raises(errors.SaveError):
        session.run(one.save(2))


def test_a_record_that_belongs_elsewhere_is_refused(tmp_path: pathlib.Path) -> None:
    train(multi(tmp_path), ec.LocalSession(), ["a"], 1)
    shutil.copytree(tmp_path / "0" / "a", tmp_path / "0" / "b")
    with pytest.raises(errors.FormatError, match="expected checkpoint 0 of node 'b'"):
        single(tmp_path, "b").read_notes(0)
    epochs = NodeEpochs(tmp_path, "c")
    epochs.save(0, ocp.args.Composite(x=ocp.args.StandardSave({"y": 1}), note=ocp.args.JsonSave({"z": 2})))
    assert dict(epochs.reader(0).restore(None).items()) == {"note": {"z": 2}, "x": {"y": 1}}
    with pytest.raises(errors.FormatError, match=r"was not written by a manager of epochckpt\.caffe2"):
        ec.LocalSession().run(single(tmp_path, "c").load_blobs_from_checkpoint([TOTAL], 0))


@pytest.mark.slow
def test_other_readers_of_such_a_directory(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A `CheckpointManager` sees no epoch and says what is there; so does a save of that number; nothing is deleted."""
    train(multi(tmp_path), ec.LocalSession(), ["a", "b"], 1)
    before = files(tmp_path)
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == []
        assert re.search(r"epochs of single nodes.*\(a, b\).*ec\.caffe2", caplog.text)
        with pytest.raises(errors.EpochCheckpointError, match="epochs of single nodes"):
            manager.save(1, args=ocp.args.StandardSave({"x": 1}), force=True)
    assert files(tmp_path) == before
    with ec.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.all_steps() == []
        assert manager.latest_step() is None
    assert list(ec.follow(tmp_path, timeout_secs=0.01, interval_secs=0.01)) == []
    assert files(tmp_path) == before
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(read_only=True)) as stock:
        stock.all_steps()
    assert files(tmp_path) == before


def test_epochs_of_single_nodes_are_known_under_any_name(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody has renamed the epoch and a node's folder: it is still said what is there, and how it is read."""
    train(multi(tmp_path), ec.LocalSession(), ["a", "b"], 1)
    (tmp_path / "1" / "b").rename(tmp_path / "1" / "old b")
    (tmp_path / "1").rename(tmp_path / "9")
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == []
    assert re.search(r"/9 holds epochs of single nodes \(a, old b\).*ec\.caffe2", caplog.text)


def test_a_copied_folder_is_an_epoch_by_itself(tmp_path: pathlib.Path) -> None:
    """The record and the files lie together: a copy of them restores, under an epoch's name for everybody."""
    train(multi(tmp_path), ec.LocalSession(), ["a"], 3)
    (tmp_path / "copy").mkdir()
    shutil.copytree(tmp_path / "3" / "a", tmp_path / "copy" / "3")
    with ec.CheckpointManager(tmp_path / "copy") as manager:
        assert manager.latest_step() == 3
        assert manager.verify(3).ok
        assert manager.restore(3)[TOTAL] == caffe2_jobs.seed("a") + 3000


def test_staging_names_carry_the_node() -> None:
    """No node is taken for another, whatever their names look like."""
    token = "0123456789abcdef"
    for node in ("a", "a-b", f"a-{token}", f"node-a-{token}", "x" * 100):
        name = paths.node_staging_folder(node, token)
        assert paths.parse_node_staging(name) == node
        assert paths.parse_incarnation(name) is None
        assert "orbax-checkpoint-tmp" in name
    assert paths.parse_node_staging("incarnation-0123456789abcdef.orbax-checkpoint-tmp") is None


def test_the_snapshots_time_is_not_the_saves_time(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save's bound, which handlers have to keep, begins after the snapshot."""
    passes = passing(monkeypatch)
    epochs = NodeEpochs(tmp_path, "a")
    epochs.save(0, SlowSave(lambda: passes(1e6)))
    assert epochs.epoch_directory.list_epochs() == [0]


def test_ctrl_c_in_a_save_leaves_nothing_staged(tmp_path: pathlib.Path, faults: Faults) -> None:
    """In a notebook a save may be interrupted many times; what was staged goes, and the next save works."""
    session, manager = filled(), single(tmp_path)
    session.run(manager.init())
    interrupted = faults.fail(Store.rename, KeyboardInterrupt(), where=lambda call: call.target == "0/a")
    with interrupted, pytest.raises(KeyboardInterrupt):
        session.run(manager.save(0))
    assert interrupted.hits
    (home,) = staging(tmp_path, "a")
    assert [p.name for p in (tmp_path / home).iterdir() if p.name.startswith("0-")] == []
    session.run(manager.save(0))
    assert content(str(tmp_path), "a", 0) == (0, 0)
