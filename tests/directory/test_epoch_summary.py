"""What lists and policies keep of each epoch: little, however many nodes have saved it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.directory import directory_of
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.errors import FormatError
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store


def test_only_the_head_has_the_seconds_of_each_node(tmp_path: pathlib.Path) -> None:
    """A manager holds a summary of every epoch, and a job may have thousands of nodes."""
    with ec.CheckpointManager(tmp_path / "run", node=["a", "b", "c"]) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}), metrics={"loss": 0.5})
    directory = directory_of(open_store(tmp_path / "run"), StepNames.of(ocp.CheckpointManagerOptions()))
    record = directory.read_head(1)
    summary = EpochSummary.of(record)
    assert (summary.nodes, summary.metrics, summary.save_id) == (3, {"loss": 0.5}, record.save_id)
    assert summary.node_secs == directory.read_summary(1).node_secs == {}
    assert EpochSummary.for_head(record).node_secs == {node.name: round(node.secs, 6) for node in record.nodes}


@pytest.mark.parametrize(
    "secs", [[0, 1.0], [0, 1.0, 2.0, 3.0], [1, 1.0, 2.0], [-1, 1.0, 2.0], [0, 1.0, "2"], [0, 1.0, 1e301], [True], "0"]
)
def test_seconds_that_are_not_those_of_the_nodes_are_refused(secs: Any) -> None:
    """One number for each node that the head names there."""
    nodes = [["a", "b"]]
    summary = EpochSummary("a-7-0", 1, 2, 3, 2, 0.1, 0.2, None, node_secs={"a": 1.0, "b": 2.0})
    written = json.loads(json.dumps(summary.to_json(nodes)))
    assert EpochSummary.from_json("head", "epochs.7", written, nodes) == summary
    with pytest.raises(FormatError, match="node_secs"):
        EpochSummary.from_json("head", "epochs.7", {**written, "node_secs": secs}, nodes)
