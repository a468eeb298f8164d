"""Single leaves as NumPy arrays: the bits that were saved, ours and stock Orbax's, whole and in pieces."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import epochckpt as ec
from epochckpt.errors import DamagedError, EpochDeletedError, FormatError, InvalidArgumentError
from epochckpt.format import grid
from epochckpt.format.tree import dtypes
from epochckpt.inspection.leaf_reader import open_reader
from tests.support import stock_states
from tests.support.files import unchanged
from tests.support.leaves import SMALL, assert_pieces, assert_reads, bits, epoch_directory, flat, same, state
from tests.support.leaves import ours as ours
from tests.support.leaves import stock as stock
from tests.support.stock_steps import CONFIG, LAYOUTS, full


@pytest.mark.slow
def test_every_kind_of_leaf_comes_back_as_it_was_saved(ours: pathlib.Path) -> None:
    """All dtypes, cut and whole; keys as their data; numbers, text, bytes, None, empty containers; and in pieces."""
    with unchanged(ours):
        expected = flat(state())
        assert len(expected) > 60
        assert_reads(open_reader(epoch_directory(ours), 3), "state", expected)


def test_a_node_s_own_leaves_and_files_are_read(ours: pathlib.Path) -> None:
    """Of `NodeSave` by node, and what a handler wrote as it is."""
    leaves = open_reader(epoch_directory(ours), 3)
    assert leaves.value("own", "seed", "process_0").tolist() == [0, 1, 2, 3, 4]
    assert leaves.value("own", "name", "process_0") == "first"
    assert_pieces(leaves, "own", "seed", np.arange(5), "process_0")
    assert json.loads(leaves.file("config", "metadata")) == CONFIG


@pytest.mark.slow
def test_what_is_not_there_is_said(ours: pathlib.Path, stock: dict[str, pathlib.Path]) -> None:
    """Items, leaves, nodes and files that do not exist, and pieces of what is no array."""
    leaves, theirs = open_reader(epoch_directory(ours), 3), open_reader(epoch_directory(stock["ocdbt-zarr2-multi"]), 3)
    for call in (
        lambda: leaves.value("other", "x"),
        lambda: leaves.value("state", "x"),
        lambda: leaves.value("config", "metadata"),
        lambda: leaves.value("own", "seed"),
        lambda: leaves.value("own", "seed", "process_1"),
        lambda: leaves.value("own", "x", "process_0"),
        lambda: theirs.value("other", "x"),
        lambda: theirs.value("state", "x"),
        lambda: theirs.file("config", "../state/_METADATA"),
        lambda: theirs.file("other", "metadata"),
        lambda: next(leaves.pieces("state", "step")),
        lambda: next(leaves.pieces("state", "long")),
        lambda: next(theirs.pieces("state", "text")),
        lambda: next(leaves.pieces("state", "numpy", max_elements=0)),
    ):
        with pytest.raises(InvalidArgumentError):
            call()
    with pytest.raises(FormatError, match="nothing"):
        leaves.file("config", "nothing")
    with pytest.raises(DamagedError, match="nothing"):
        theirs.file("config", "nothing")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaves_of_stock_orbax_are_what_orbax_itself_restores(stock: dict[str, pathlib.Path], layout: str) -> None:
    """OCDBT or folders, zarr 2 or 3, one item or several: arrays, keys, numbers, text, None, empty containers."""
    directory, item = stock[layout], "default" if layout.endswith("single") else "state"
    with unchanged(directory):
        expected = flat(ocp.PyTreeCheckpointHandler().restore(directory / "3" / item, args=_as_saved(full())))
        assert expected.keys() == flat(full()).keys()
        leaves = open_reader(epoch_directory(directory), 3)
        assert_reads(leaves, item, expected)
        told: list[int] = []
        found = leaves.verify(told.append)
        assert found.ok
        assert "no checksums" in found.note
        assert sum(told) == sum(x.nbytes for x in expected.values() if isinstance(x, np.ndarray | jax.Array))


def _as_saved(tree: Any) -> Any:
    given = stock_states.abstract(tree)
    return ocp.args.PyTreeRestore(given, restore_args=ocp.checkpoint_utils.construct_restore_args(given))


def test_types_and_names_of_stock_orbax(tmp_path: pathlib.Path) -> None:
    """Every dtype that Orbax can write; keys with slashes, dots and blanks; numbers as keys; a bare array."""
    tree: dict[str, Any] = {
        "a/b": {"c.d ~e": np.arange(3)},
        "12": jnp.ones(2),
        "t/ext": {"/": "x/y"},
    }
    for name, dtype in dtypes().items():
        try:
            ts.open({"driver": "zarr", "kvstore": "memory://", "dtype": name}, shape=[1], create=True).result()
        except ValueError:
            continue
        tree[name] = bits(np.empty((4, 3)), dtype)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        args = ocp.args.Composite(tree=ocp.args.PyTreeSave(tree), one=ocp.args.ArraySave(np.arange(4.0)))
        manager.save(1, args=args)
    leaves = open_reader(epoch_directory(tmp_path / "run"), 1)
    names = {"a/b": "a%2Fb/c.d%20~e", "t/ext": "t%2Fext/%2F"}
    for key, value in tree.items():
        inner = next(iter(value.values())) if isinstance(value, dict) else value
        assert same(leaves.value("tree", names.get(key, key)), inner), key
    assert len(tree) > 20
    assert leaves.value("one", "value").tolist() == [0, 1, 2, 3]
    assert leaves.verify().ok


def test_a_step_that_is_older_than_orbax_metadata_is_read(tmp_path: pathlib.Path) -> None:
    """The tree in one msgpack file, values in it or in folders beside it."""
    params = {"w": np.arange(6.0).reshape(2, 3), "b": np.float32([1, 2])}
    tree = {"params": params, "step": 4, "raw": b"ab", "away": "PLACEHOLDER://away.w"}
    folder = tmp_path / "run" / "4" / "default"
    folder.mkdir(parents=True)
    (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    spec = {"driver": "zarr", "kvstore": f"file://{folder}/away.w/", "dtype": "int32"}
    ts.open(spec, shape=[2, 2], create=True).result().write(np.int32([[1, 2], [3, 4]])).result()
    record = {"item_handlers": {"default": ocp.PyTreeCheckpointHandler.typestr()}}
    (tmp_path / "run" / "4" / "_CHECKPOINT_METADATA").write_text(json.dumps(record))
    leaves = open_reader(epoch_directory(tmp_path / "run"), 4)
    expected = {"params/w": params["w"], "params/b": params["b"], "away": np.int32([[1, 2], [3, 4]])}
    assert_reads(leaves, "default", {**expected, "step": 4, "raw": b"ab"})
    assert leaves.verify().ok


@pytest.mark.slow
def test_a_leaf_of_a_type_that_nobody_knows_is_read_as_the_array_that_it_is(
    tmp_path: pathlib.Path, stock: dict[str, pathlib.Path]
) -> None:
    """Somebody's own type handler wrote it: the others are read all the same."""
    path = shutil.copytree(stock["ocdbt-zarr2-single"], tmp_path / "run")
    record = path / "3" / "default" / "_METADATA"
    tree = json.loads(record.read_text())
    tree["tree_metadata"]["('step',)"]["value_metadata"]["value_type"] = "mine.Own"
    record.write_text(json.dumps(tree))
    leaves = open_reader(epoch_directory(path), 3)
    np.testing.assert_array_equal(np.asarray(leaves.value("default", "step")), full()["step"])
    assert leaves.value("default", "rate") == -0.25
    assert leaves.verify().ok


# -- damage and deletion ---------------------------------------------------------------------------------------------


def flip(path: pathlib.Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_names_its_leaf_and_hides_no_other(tmp_path: pathlib.Path) -> None:
    """The bytes of one leaf: neither it nor a piece with them is handed out; the other leaf is read."""
    tree = {"good": np.arange(4096.0), "hurt": np.arange(4096.0)}
    with ec.CheckpointManager(tmp_path / "run", storage=SMALL) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        files = sorted(manager.node_path("process_0", 1).glob("default*.safetensors"))
    (path,) = [pathlib.Path(f) for f in files if b'"hurt"' in pathlib.Path(f).read_bytes()[:4096]]
    flip(path, path.stat().st_size - 8)
    leaves = open_reader(epoch_directory(tmp_path / "run"), 1)
    with pytest.raises(DamagedError, match="leaf 'hurt'") as caught:
        leaves.value("default", "hurt")
    assert caught.value.leaf == "hurt"
    seen = []
    with pytest.raises(DamagedError, match="leaf 'hurt'"):
        seen.extend(leaves.pieces("default", "hurt", max_elements=512))
    assert np.concatenate(seen).tolist() == list(range(4096 - 512))  # what lies in front of it is good
    assert same(leaves.value("default", "good"), tree["good"])
    assert not leaves.verify().ok


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["folders-zarr2-single", "ocdbt-zarr3-single"])
def test_a_damaged_step_of_stock_orbax_is_said(
    tmp_path: pathlib.Path, stock: dict[str, pathlib.Path], layout: str
) -> None:
    """A chunk that is gone, or a data file cut short: DamagedError; verifying names it and goes on."""
    path = shutil.copytree(stock[layout], tmp_path / "run")
    item = path / "3" / "default"
    if layout.startswith("folders"):
        (item / "params.both" / "0.0").unlink()
    else:
        for data in (*item.glob("d/*"), *item.glob("ocdbt.process_0/d/*")):
            with open(data, "r+b") as file:
                file.truncate(data.stat().st_size // 2)
    leaves = open_reader(epoch_directory(path), 3)
    with pytest.raises(DamagedError, match="default"):
        leaves.value("default", "params/both")
    found = leaves.verify()
    assert not found.ok
    if layout.startswith("folders"):
        assert [getattr(e, "leaf", None) for e in found.damage] == ["params/both"]
        assert leaves.value("default", "params/swapped").shape == (16, 24)


@pytest.mark.parametrize("layout", ["folders-zarr2-single", "ocdbt-zarr3-single"])
def test_a_pipe_in_a_step_of_stock_orbax_is_not_waited_for(
    tmp_path: pathlib.Path, stock: dict[str, pathlib.Path], layout: str
) -> None:
    """TensorStore would open it, and wait for whoever writes to it: neither a look nor a restore does."""
    path = shutil.copytree(stock[layout], tmp_path / "run")
    item = path / "3" / "default"
    pipe = item / ("params.both/0.0" if layout.startswith("folders") else "manifest.ocdbt")
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(DamagedError, match="a pipe or a device"):
        open_reader(epoch_directory(path), 3).value("default", "params/both")
    with ec.CheckpointManager(path, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        with pytest.raises(DamagedError, match=r"a pipe or a device|not a regular file"):
            manager.restore(3)
        assert not manager.verify(3).ok


def delete(path: pathlib.Path, epoch: int) -> None:
    shutil.rmtree(path / str(epoch))


@pytest.mark.parametrize("writer", ["epochckpt", "orbax"])
def test_an_epoch_that_goes_away_is_no_damage(
    tmp_path: pathlib.Path, ours: pathlib.Path, stock: dict[str, pathlib.Path], writer: str
) -> None:
    """Deleted before a leaf, or in the midst of one: EpochDeletedError, whatever was to be read."""
    source, item = (ours, "state") if writer == "epochckpt" else (stock["folders-zarr2-multi"], "state")
    path = shutil.copytree(source, tmp_path / "run", symlinks=True)
    leaves, fresh = open_reader(epoch_directory(path), 3), open_reader(epoch_directory(path), 3)
    pieces = leaves.pieces(item, "params/both", max_elements=24)
    next(pieces)
    delete(path, 3)
    with pytest.raises(EpochDeletedError):
        list(pieces)
    for call in (
        lambda: fresh.value(item, "params/both"),
        lambda: list(fresh.pieces(item, "numpy")),
        lambda: fresh.file("config", "metadata"),
        lambda: fresh.verify(),
    ):
        with pytest.raises(EpochDeletedError):
            call()


@pytest.mark.slow
def test_pieces_of_a_large_array_are_bounded_in_memory(tmp_path: pathlib.Path) -> None:
    """What is held while 64 MiB are read in pieces is a few pieces, not the array."""
    import tracemalloc

    data = np.arange(2**24, dtype=np.float32).reshape(64, -1)
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": data}))
    leaves = open_reader(epoch_directory(tmp_path / "run"), 1)
    tracemalloc.start()
    try:
        total = sum(_sums(leaves.pieces("default", "w", max_elements=2**18)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == data.sum(dtype=np.float64)
    assert peak < 24 * 2**20


def test_a_chunk_of_stock_orbax_is_decoded_once(tmp_path: pathlib.Path) -> None:
    """An array in one chunk, in many pieces: its bytes are read about once, not once for each piece."""
    data = np.random.default_rng(5).normal(size=(64, 8192)).astype(np.float32)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": data}))
    leaves = open_reader(epoch_directory(tmp_path / "run"), 1)
    before = _bytes_read()
    assert sum(_sums(leaves.pieces("default", "w", max_elements=8192))) == pytest.approx(data.sum(dtype=np.float64))
    stored = sum(path.stat().st_size for path in (tmp_path / "run" / "1").rglob("*") if path.is_file())
    assert _bytes_read() - before < 2 * stored


def _bytes_read() -> int:
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in found for value in metric["values"])


def _sums(parts: Iterator[np.ndarray]) -> Iterator[float]:
    for part in parts:
        yield part.sum(dtype=np.float64)


def test_where_blocks_lie_is_worked_out_once_per_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading thousands of small leaves one by one costs that many reads, not the square of it."""
    tree = {f"leaf_{i}": np.full(3, i) for i in range(40)}
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=ocp.args.StandardSave(tree))
    calls: list[int] = []
    cut = grid.blocks

    def counted(*args: Any) -> np.ndarray:
        calls.append(1)
        return cut(*args)

    monkeypatch.setattr(grid, "blocks", counted)
    leaves = open_reader(epoch_directory(tmp_path / "run"), 0)
    assert [leaves.value("default", name).tolist() for name in tree] == [value.tolist() for value in tree.values()]
    assert len(calls) == 1
