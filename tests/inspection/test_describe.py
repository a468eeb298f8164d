"""What is told of an epoch without reading arrays: every leaf against what was saved, and who wrote which part."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors

import epochckpt as ec
from epochckpt.caffe2.epochs import NodeEpochs
from epochckpt.errors import EpochDeletedError
from epochckpt.format import records
from epochckpt.inspection import describe as details
from epochckpt.inspection import text as text_views
from epochckpt.inspection import views
from epochckpt.inspection.leaf_reader import open_reader
from epochckpt.inspection.rows import ABANDONED, COMMITTED, DAMAGED, EpochDetail, EpochRow, ItemRow, LeafRow
from tests.support import stock_states, topology_jobs
from tests.support.files import unchanged
from tests.support.leaves import SMALL, assert_reads, epoch_directory, flat, state
from tests.support.leaves import ours as ours
from tests.support.leaves import stock as stock
from tests.support.processes import run_worker
from tests.support.stock_steps import LAYOUTS, full


def describe(directory: Any, epoch: int = 3) -> EpochDetail:
    return details.describe(epoch_directory(directory), EpochRow(epoch, COMMITTED))


def item(detail: EpochDetail, name: str) -> ItemRow:
    return next(found for found in detail.items if found.name == name)


def by_name(found: ItemRow) -> dict[str, LeafRow]:
    return {leaf.name: leaf for leaf in found.leaves}


def assert_rows(found: ItemRow, expected: dict[str, Any], keys: set[str]) -> None:
    """Names, shapes, dtypes, bytes and values of all leaves, in order of the tree."""
    assert [leaf.name for leaf in found.leaves] == list(expected)
    for leaf, value in zip(found.leaves, expected.values(), strict=True):
        assert leaf.name == "/".join(leaf.path)
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            data = np.asarray(value)
            assert (leaf.shape, leaf.nbytes, leaf.value) == (data.shape, data.nbytes, ""), leaf
            assert leaf.dtype == ("key<fry>" if leaf.name in keys else str(data.dtype)), leaf
            assert leaf.sharding is not None
            assert len(leaf.sharding.counts) == data.ndim
        else:
            assert (leaf.shape, leaf.dtype, leaf.sharding) == ((), "", None), leaf
            assert leaf.kind == {type(None): "none"}.get(type(value), type(value).__name__)
            if isinstance(value, str | bytes) and len(value) > 1000:
                assert leaf.value == f"<{leaf.kind} of {leaf.nbytes} bytes>"
            elif value is not None and value not in ({}, []):
                assert leaf.value == repr(value)
    assert found.nbytes == sum(leaf.nbytes for leaf in found.leaves)
    assert found.problem == ""


def test_every_leaf_of_ours_is_told_as_it_was_saved(ours: pathlib.Path) -> None:
    """All dtypes, keys, Python values, text in the data file, empty containers; and what the Orbax view lacks."""
    with unchanged(ours):
        detail = describe(ours)
    assert [(found.name, found.kind, found.handler) for found in detail.items] == [
        ("config", "files", "JsonCheckpointHandler"),
        ("own", "node", ""),
        ("state", "arrays", "StandardCheckpointHandler"),
    ]
    assert_rows(item(detail, "state"), flat(state()), {"keys"})
    both = by_name(item(detail, "state"))["params/both"].sharding
    assert both is not None
    assert (both.counts, set(both.owners), both.replicas) == ((2, 2), {"process_0"}, 1)
    assert (both.spec, both.mesh) == ("P('x', 'y')", "x=2, y=2")
    ids = [device.id for device in state()["params"]["both"].sharding.mesh.devices.flat]
    assert both.devices == tuple((n,) for n in ids)
    assert both.holders == (("process_0",),) * 4
    folded = by_name(item(detail, "state"))["params/folded"].sharding
    assert folded is not None
    assert folded.spec == "P(None, ('y', 'x'))"
    assert folded.devices == ((ids[0],), (ids[2],), (ids[1],), (ids[3],))
    partly = by_name(item(detail, "state"))["params/partly"].sharding
    assert partly is not None
    assert (partly.spec, partly.devices) == ("P('x')", ((ids[0], ids[1]), (ids[2], ids[3])))
    assert detail.unsupported is not None
    assert "raw" in detail.unsupported["state"]


def test_items_of_nodes_and_of_handlers_are_told(ours: pathlib.Path) -> None:
    """`NodeSave`: a tree for each node; files: their names, sizes and nodes."""
    detail = describe(ours)
    own = item(detail, "own")
    assert list(own.nodes) == ["process_0"]
    assert_rows(own.nodes["process_0"], {"name": "first", "seed": np.arange(5)}, set())
    (file,) = item(detail, "config").files
    assert (file.name, file.node, file.nbytes) == ("metadata", "process_0", item(detail, "config").nbytes)
    assert file.nbytes == len(open_reader(epoch_directory(ours), 3).file("config", "metadata"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What a job of two processes with two devices each saved."""
    path = tmp_path_factory.mktemp("job") / "run"
    run_worker("tests.support.topology_jobs:save", {"directory": str(path)}, 2, 2)
    return path


@pytest.mark.slow
def test_arrays_that_lie_over_nodes_are_put_together(job: pathlib.Path) -> None:
    """Cut in every direction, replicated, split among holders: the same bits, in pieces as well."""
    leaves = open_reader(epoch_directory(job), 8)
    assert [n.name for n in leaves.record.nodes] == ["worker-0", "worker-1"]
    expected: dict[str, Any] = {f"arrays/{name}": data for name, data in topology_jobs.values().items()}
    for name, impl in (("sharded", "threefry2x32"), ("both", "rbg"), ("replicated", "threefry2x32")):
        expected[f"keys/{name}"] = topology_jobs.key_data(impl)
    assert_reads(leaves, "default", {**expected, **flat({"plain": topology_jobs.plain()})})
    assert leaves.verify().ok


@pytest.mark.slow
def test_the_owner_of_each_part_has_it_in_its_file(job: pathlib.Path) -> None:
    """Cut in every direction, replicated, split among holders: what the nodes' own files hold says who wrote what."""
    held: dict[str, set[str]] = {}
    for node in ("worker-0", "worker-1"):
        held[node] = set()
        for path in (job / "8" / node).glob("default*.safetensors"):
            with safetensors.safe_open(path, "np") as file:
                held[node].update(file.keys())
    found = by_name(item(describe(job, 8), "default"))
    split = 0
    for leaf in found.values():
        sharding = leaf.sharding
        if sharding is None or not math.prod(leaf.shape):
            continue
        assert len(sharding.owners) == math.prod(sharding.counts)
        cell = [d // c for d, c in zip(leaf.shape, sharding.counts, strict=True)]
        whole = math.prod(sharding.counts) == 1
        for number, owner in enumerate(sharding.owners):
            at = np.unravel_index(number, sharding.counts) if sharding.counts else ()
            bounds = [(int(i) * c, (int(i) + 1) * c) for i, c in zip(at, cell, strict=True)]
            cut = "" if whole else f"[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"
            name = leaf.name + cut
            assert [node for node in held if name in held[node]] == [owner], name
        split += set(sharding.owners) == set(held)
    assert split > 5
    assert {name for name in topology_jobs.SPECS if (s := found[f"arrays/{name}"].sharding) and s.replicas == 2} >= {
        "everywhere",
        "large",
    }
    assert (s := found["arrays/rows"].sharding) is not None
    assert (s.counts, s.replicas, s.owners) == ((4, 1), 1, ("worker-0", "worker-0", "worker-1", "worker-1"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_leaf_of_stock_orbax_is_told_as_it_was_saved(stock: dict[str, pathlib.Path], layout: str) -> None:
    """All layouts: shapes, dtypes, keys, the values of numbers and text, how arrays lay on devices."""
    single = layout.endswith("single")
    with unchanged(stock[layout]):
        detail = describe(stock[layout])
    found = item(detail, "default" if single else "state")
    assert_rows(found, flat(full()), {"keys"})
    assert found.handler == "PyTreeCheckpointHandler"
    assert detail.unsupported is None
    leaves = by_name(found)
    for name, counts in (
        ("both", (2, 2)),
        ("folded", (1, 4)),
        ("partly", (2, 1)),
        ("everywhere", (1, 1)),
        ("scalar", ()),
    ):
        sharding = leaves[f"params/{name}"].sharding
        assert sharding is not None
        assert (sharding.counts, sharding.owners, sharding.replicas) == (counts, (), 0), name
        assert sharding.spec.startswith("P(")
        assert sharding.mesh == "x=2, y=2"
    if not single:
        (file,) = item(detail, "config").files
        assert (file.name, file.nbytes) == ("metadata", (stock[layout] / "3/config/metadata").stat().st_size)


def test_one_device_and_memory_are_said(tmp_path: pathlib.Path) -> None:
    """An array on a single device, by both writers; metadata of an item."""
    tree = {"x": jax.device_put(np.arange(4), jax.devices()[1])}
    args = ocp.args.PyTreeSave(tree, custom_metadata={"by": "me"})
    for name, manager_class in (("ours", ec.CheckpointManager), ("stock", ocp.CheckpointManager)):
        with manager_class(tmp_path / name) as manager:
            manager.save(3, args=args)
        (found,) = describe(tmp_path / name).items
        sharding = by_name(found)["x"].sharding
        assert sharding is not None
        assert "1" in sharding.spec
        assert not sharding.mesh
        assert found.custom_metadata == {"by": "me"}


def test_long_values_are_shortened() -> None:
    """Text of any length, and numbers that Python itself refuses to write."""
    for value in ("x" * 1000, 10**5000, -(10**5000), b"\0" * 4000):
        assert len(details.shortened(value)) <= details.MAX_REPR
    assert details.shortened(2**64) == str(2**64)


def test_attempts_have_no_items_and_an_epoch_that_went_away_is_said(ours: pathlib.Path) -> None:
    assert details.describe(epoch_directory(ours), EpochRow(9, ABANDONED)).items == ()
    with pytest.raises(EpochDeletedError):
        describe(ours, 9)


# -- damage ----------------------------------------------------------------------------------------------------------


def test_a_damaged_record_is_said_and_has_no_items(tmp_path: pathlib.Path, ours: pathlib.Path) -> None:
    path = shutil.copytree(ours, tmp_path / "run", symlinks=True)
    record = path / "3" / "epoch.json"
    record.write_bytes(record.read_bytes()[:-20])
    detail = describe(path)
    assert detail.items == ()
    assert detail.row.state == DAMAGED
    assert "epoch.json" in detail.row.detail


def test_a_damaged_node_hides_only_what_it_describes(tmp_path: pathlib.Path, ours: pathlib.Path) -> None:
    """`node.json` is gone: the item of each node's own has a problem, the others are told in full."""
    path = shutil.copytree(ours, tmp_path / "run", symlinks=True)
    (path / "3" / "process_0" / "node.json").unlink()
    detail = describe(path)
    assert "node.json" in item(detail, "own").problem
    assert "node.json" in item(detail, "own").nodes["process_0"].problem
    assert len(item(detail, "state").leaves) == len(flat(state()))


@pytest.mark.slow
def test_an_item_of_stock_orbax_that_is_damaged_hides_no_other(
    tmp_path: pathlib.Path, stock: dict[str, pathlib.Path]
) -> None:
    """No tree: a problem. Metadata of one array gone: a problem that names it, and the other leaves."""
    path = shutil.copytree(stock["folders-zarr2-multi"], tmp_path / "run")
    (path / "3" / "state" / "params.both" / ".zarray").unlink()
    found = item(describe(path), "state")
    assert "params/both" in found.problem
    assert len(found.leaves) == len(flat(full()))
    assert by_name(found)["params/both"].kind == "unknown"
    assert by_name(found)["params/swapped"].shape == (16, 24)
    (path / "3" / "state" / "_METADATA").write_text('{"tree_metadata": {"x": 3}}')
    detail = describe(path)
    assert "_METADATA" in item(detail, "state").problem
    assert item(detail, "config").files


@pytest.mark.parametrize("row", [{"mesh": 7}, {"mesh": 0, "spec": 3}, {"device": 1}, {}, "text", None, [1], 5])
def test_a_sharding_that_makes_no_sense_is_left_out(tmp_path: pathlib.Path, row: Any) -> None:
    """Nobody checked these rows of the record before: the leaf is told without."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"x": stock_states.place(np.arange(8), "x")}))
    found = epoch_directory(tmp_path / "run").read_record(3)
    arrays = found.items["default"].arrays
    assert arrays is not None
    broken = dataclasses.replace(found.items["default"], arrays=dataclasses.replace(arrays, shardings=(row,)))
    changed: records.EpochRecord = dataclasses.replace(found, items={"default": broken})
    (tmp_path / "run" / "3" / "epoch.json").write_bytes(changed.to_bytes())
    (leaf,) = item(describe(tmp_path / "run"), "default").leaves
    assert leaf.sharding is not None
    assert (leaf.sharding.counts, leaf.sharding.spec) == ((2,), "")


# -- epochs of single nodes ------------------------------------------------------------------------------------------


@pytest.fixture
def lone(tmp_path: pathlib.Path) -> pathlib.Path:
    """What two nodes saved that know nothing of each other."""
    for number, node in enumerate(("alpha", "beta")):
        epochs = NodeEpochs(tmp_path, node, SMALL)
        tree = ocp.args.StandardSave({"x": np.arange(6) + number})
        epochs.save(3, ocp.args.Composite(state=tree, config=ocp.args.JsonSave({"node": node})))
    return tmp_path


def test_epochs_of_single_nodes_are_told_and_read_by_node(lone: pathlib.Path) -> None:
    """Trees and files of each; one that is damaged hides no other, and is found by verifying."""
    detail = describe(lone)
    assert [(found.name, found.kind, list(found.nodes)) for found in detail.items] == [
        ("config", "node", ["alpha", "beta"]),
        ("state", "node", ["alpha", "beta"]),
    ]
    assert by_name(item(detail, "state").nodes["beta"])["x"].shape == (6,)
    leaves = open_reader(epoch_directory(lone), 3)
    assert leaves.value("state", "x", "beta").tolist() == [1, 2, 3, 4, 5, 6]
    assert json.loads(leaves.file("config", "metadata", "alpha")) == {"node": "alpha"}
    assert leaves.verify().ok
    record = lone / "3" / "alpha" / "epoch.json"
    record.write_bytes(record.read_bytes()[:-9])
    detail = describe(lone)
    assert "alpha" in item(detail, "state").problem
    assert list(item(detail, "state").nodes) == ["beta"]
    leaves = open_reader(epoch_directory(lone), 3)
    assert leaves.value("state", "x", "beta").tolist() == [1, 2, 3, 4, 5, 6]
    assert [str(error.path) for error in leaves.verify().damage] == ["3/alpha"]


def test_small_json_is_shown_and_compared(tmp_path: pathlib.Path) -> None:
    """A line per value; a difference names the values that changed, of scalars too, and of metrics."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for epoch in (0, 1):
            config = {"lr": 0.5 / (epoch + 1), "model": {"layers": 3, "name": "é"}, "long": "x" * 20_000 * epoch}
            args = {"state": ocp.args.StandardSave({"step": np.int64(59_000 + epoch)}), "c": ocp.args.JsonSave(config)}
            small = ocp.args.JsonSave(config | {"long": None})
            manager.save(epoch, args=ocp.args.Composite(**args, small=small), metrics={"loss": 1.0 - epoch})
    run = ec.inspect(tmp_path / "run")
    items = {item.name: item for item in run[1].detail().items}
    assert items["small"].files[0].content == {"lr": 0.25, "model": {"layers": 3, "name": "é"}, "long": None}
    assert items["c"].files[0].content is None, "too long to be shown"
    text = text_views.to_text(text_views.render(views.epoch(run[1].detail())), 100)
    assert re.search(r"model/name +\"é\"", text)
    diff = run.diff(0, 1).diff
    assert {row.name: row.detail for row in diff.rows if row.item != "c"} == {
        "metadata": "lr 0.5 → 0.25",
        "step": "59000 → 59001",
    }
    assert diff.metrics == {"loss": (1.0, 0.0)}
    file = tmp_path / "run" / "1" / "process_0" / "small" / "metadata"
    damaged = bytearray(file.read_bytes())
    damaged[3] ^= 1
    file.chmod(0o644)
    file.write_bytes(damaged)
    (item,) = (each for each in ec.inspect(tmp_path / "run")[1].detail().items if each.problem)
    assert "differ from what was written" in item.problem
