"""The commit record of an epoch: fields that name files and nodes are safe to use, or the record is refused."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import FormatError
from epochckpt.format import checksums, paths
from epochckpt.format.parsing import parse_epoch, parse_head


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A record as it was written, without its seal."""
    run = tmp_path_factory.mktemp("run")
    with ec.CheckpointManager(run, node=["a", "b"]) as manager:
        assert manager.save(1, args=ocp.args.StandardSave({"w": np.ones(4), 'a"}{\\': {"}": 1}}))
    found = json.loads(pathlib.Path(run, "1", paths.EPOCH_RECORD).read_bytes())
    del found["checksum"]
    return found


def test_a_record_is_read_with_and_without_its_items(record: dict[str, Any]) -> None:
    """Names with quotes, braces and backslashes are no reason to read less of it."""
    data = checksums.seal(record)
    whole = parse_epoch("1/epoch.json", data)
    head = parse_head("1/epoch.json", data)
    assert list(whole.items) == ["default"]
    assert head.items == {}
    assert (head.nodes, head.save_id, head.orbax_view) == (whole.nodes, whole.save_id, whole.orbax_view)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        (
            "orbax_view",
            [[], {"a": []}, {"a": [1]}, {"a": [-1, "d"]}, {"a": ["1", "d"]}, {"a": [1, 2]}, {"a": [2**62, "d"]}],
        ),
        ("orbax_view", [{"../a": [1, "d"]}, {"/a": [1, "d"]}, {"": [1, "d"]}, {"a//b": [1, "d"]}, {"a": [True, "d"]}]),
        ("nodes", [[], {}, [["a"]]]),
        ("attempt", [None, 1, "../a-1-0", "a/b", ""]),
        ("epoch", [None, -1, 2**63, True, "1"]),
        ("runs", [None, {}, [[1]], [["../a", 1, 1, 1, 1, 1, 0.0, 0.0, 0.0, None]]]),
    ],
)
def test_a_field_of_another_form_is_refused(record: dict[str, Any], key: str, values: list[Any]) -> None:
    for value in values:
        data = checksums.seal({**record, key: value})
        for parse in (parse_epoch, parse_head):
            with pytest.raises(FormatError, match=r"^1/epoch\.json\b"):
                parse("1/epoch.json", data)


@pytest.mark.parametrize("name", ["a/b", "", "a" * 1001, 1, None, "b"])
def test_a_node_with_a_name_that_is_no_folder_is_refused(record: dict[str, Any], name: Any) -> None:
    """Or that two nodes have. Records of one and of many nodes are parsed in two ways."""
    first, second = record["nodes"]
    for nodes in ([[name, *first[1:]], second], [[name, *first[1:]]]):
        if name == "b" and len(nodes) == 1:
            continue
        with pytest.raises(FormatError):
            parse_head("1/epoch.json", checksums.seal({**record, "nodes": nodes}))


def test_a_record_that_names_no_runs_is_read(record: dict[str, Any]) -> None:
    """An older epochckpt wrote none."""
    without = {key: value for key, value in record.items() if key != "runs"}
    assert parse_head("1/epoch.json", checksums.seal(without)).runs == ()
