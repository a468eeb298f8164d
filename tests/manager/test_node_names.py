"""Nodes may have any name: what a path cannot hold is escaped in the name of the folder, and shown as it was given."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import epochckpt as ec
from epochckpt import caffe2, errors
from epochckpt.format import paths

NODES = ["trainer:0", "x-trainer-3a0", "metrics", "..", "é\n", "trainer_0"]
FOLDERS = ["x-trainer-3a0", "x-x-2dtrainer-2d3a0", "x-metrics", "x-..", "x--c3-a9-0a", "trainer_0"]

PIECES = st.sampled_from(
    ["x-", "-", "3a", ":", "/", ".", "_", "é", "\ud800", "\0", "0", "Z", " ", ".orbax-checkpoint-tmp"]
)


@given(st.lists(PIECES, max_size=6).map("".join))
@example("x-trainer-3a0")
@example("x-x-2da")
def test_a_folder_name_is_valid_and_gives_the_name_back(name: str) -> None:
    """So no two names have one folder; and a name that will do is that of its folder."""
    folder = paths.folder_name(name)
    assert paths.shown_name(folder) == name
    if name:
        assert paths.is_name(folder) or len(folder) > paths.MAX_NAME
    if folder != name:
        assert not paths.is_name(name) or name.startswith("x-") or name in ("epoch.json", "metrics")


def test_what_cannot_be_a_name_is_refused() -> None:
    """Nothing, no text, a slash (which stands between node and blob), and what is too long for a file system."""
    for name in ("", "a/b", 3, "ü" * 100, "a" * 121):
        with pytest.raises(errors.InvalidArgumentError, match="is not usable: expected a text without '/'"):
            paths.check_node_name(name)


def job_of(nodes: list[str], epochs: int) -> ec.Job:
    with ec.Job() as job:
        for number, node in enumerate(nodes):
            with ec.Node(node):
                ec.Task(lambda ws, n=number: ws.update(total=100 * n), group=job.init_group)
                ec.Task(lambda ws: ws.update(total=ws["total"] + 1))
    ec.epoch_limiter(job, epochs)
    return job


@pytest.mark.parametrize("kind", ["posix", "memory", "caffe2"])
def test_a_job_with_any_names_is_saved_resumed_and_shown(tmp_path: pathlib.Path, kind: str) -> None:
    """By our manager and by Caffe2's; the handler, the result and whoever looks see the names that were given."""
    directory = str(tmp_path / "run") if kind != "memory" else "memory://node-names/"
    os.makedirs(tmp_path / "run")
    handler = ec.metadata.SqliteMetadataHandler(tmp_path / "runs.sqlite")
    for epochs, resumed in ((2, None), (3, 2)):
        if kind == "caffe2":
            manager = caffe2.MultiNodeCheckpointManager(directory, "epochckpt", handler)
        else:
            manager = ec.CheckpointManager(directory, metadata_handler=handler if kind == "posix" else None)
        runner, session = ec.JobRunner(job_of(NODES, epochs), manager), ec.LocalSession()
        assert runner.train(session) == epochs
        assert (runner.result.resumed_from, runner.result.failed_saves) == (resumed, ())
        assert [session.root[f"{node}/total"] for node in NODES] == [100 * n + epochs for n in range(len(NODES))]
        assert runner.result.slowest_node is not None
        assert runner.result.slowest_node[0] in NODES
        if isinstance(manager, ec.CheckpointManager):
            assert manager.nodes(epochs) == NODES
            assert manager.verify(epochs).ok
            assert str(manager.node_path("trainer:0", epochs)).endswith("/x-trainer-3a0" if kind == "posix" else "")
            manager.close()
    if kind != "memory":
        assert {row.node for row in handler.stats()} == set(NODES)
        assert sorted(node.name for node in ec.inspect(directory).epochs()[-1].nodes) == sorted(NODES)
        assert all((tmp_path / "run" / "3" / folder / "node.json").exists() for folder in FOLDERS)
    if kind == "caffe2":
        session.run(ec.CopyUpload(tmp_path / "copies").build(3, manager))
        again = caffe2.MultiNodeCheckpointManager(tmp_path / "copies", "epochckpt")
        session = ec.LocalSession()
        assert again.load_blobs_locally(NODES, ["total"], 3, session)
        assert session.root["../total"] == 303


def test_stock_orbax_reads_what_nodes_of_any_names_wrote(tmp_path: pathlib.Path) -> None:
    """The view's links lead to the folders; an item may not be called like one."""
    with ec.CheckpointManager(tmp_path, node="trainer:0") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.arange(6.0)}))
    with pytest.raises(errors.InvalidArgumentError, match="has the name of a node of this job, or of its folder"):
        ec.CheckpointManager(tmp_path, node="trainer:0", item_names=["x-trainer-3a0"])
    record = json.loads((tmp_path / "1" / "epoch.json").read_text())
    assert record["nodes"][0][0] == "trainer:0"
    with ocp.CheckpointManager(tmp_path) as stock:
        np.testing.assert_array_equal(stock.restore(1)["w"], np.arange(6.0))
