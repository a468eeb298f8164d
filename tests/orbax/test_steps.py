"""A directory that stock Orbax wrote: listed, restored, inspected and continued; half-written steps are refused."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import pathlib
import re
import shutil
import types
from collections.abc import Callable
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from etils import epath
from flax import nnx

import epochckpt as ec
from epochckpt import errors
from epochckpt.format import grid
from epochckpt.format.tree import dtypes
from epochckpt.orbax import leaves as orbax_leaves
from epochckpt.orbax import small_files
from epochckpt.storage import open_store
from epochckpt.testing import in_parallel
from tests.support import handler_jobs, stock_states
from tests.support.files import unchanged
from tests.support.processes import run_worker
from tests.support.stock_steps import BEST, CONFIG, LAYOUTS, full, simple, tree_of, write

Save, Restore, Composite = ocp.args.StandardSave, ocp.args.StandardRestore, ocp.args.Composite
Options = ocp.CheckpointManagerOptions
READ_ONLY = Options(read_only=True)
# Orbax closes its event loop while reads of other leaves go on: after the first error they have nowhere to report to.
abandoned_reads = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def target(tree: Any, single: bool, reshard: bool = False) -> Any:
    one = Restore(stock_states.abstract(tree, reshard))
    return one if single else Composite(state=one, config=ocp.args.JsonRestore())


def placed(tree: Any) -> list[Any]:
    """Where each array lies."""
    return [x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """One directory per layout, with the steps 3 and 8."""
    root = tmp_path_factory.mktemp("layouts")
    for layout in LAYOUTS:
        write(root / layout, layout, {3: full(), 8: full()})
    return {layout: root / layout for layout in LAYOUTS}


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory of stock Orbax with the steps 1 and 2."""
    simple(tmp_path / "run", 1, 2)
    return tmp_path / "run"


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_orbax_is_restored_bit_for_bit(layouts: dict[str, pathlib.Path], layout: str) -> None:
    """OCDBT or folders, zarr2 or zarr3, one item or several: same and other shardings, newest, without a target."""
    directory, single, expected = layouts[layout], layout.endswith("single"), full()
    with unchanged(directory), ec.CheckpointManager(directory, options=READ_ONLY) as manager:
        assert manager.all_steps() == [3, 8]
        assert manager.latest_step() == 8
        for step, args in (
            (3, target(expected, single)),
            (None, target(expected, single, reshard=True)),
            (8, Restore(expected) if single else Composite(state=Restore(expected), config=None)),
            (8, None),
            (3, Restore() if single else Composite(state=Restore(), config=ocp.args.JsonRestore())),
        ):
            got = manager.restore(step, args=args)
            assert stock_states.differences(got if single else got["state"], expected) == []
            assert single or got["config"] == CONFIG
            if args is None:  # typed keys among them
                assert placed(got if single else got["state"]) == placed(expected)
        if not single:
            assert list(manager.restore(3, args=Composite(config=None)).keys()) == ["config"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_orbax_can_be_inspected(layouts: dict[str, pathlib.Path], layout: str) -> None:
    """Metrics, metadata, status, leaves by name, verify: what Orbax's files say, and that they have no checksums."""
    directory, single, expected = layouts[layout], layout.endswith("single"), full()
    item = "default" if single else "state"
    with unchanged(directory), ec.CheckpointManager(directory, options=READ_ONLY) as manager:
        assert manager.metrics(3) == {"loss": 0.25}
        found = manager.metadata(8)
        assert found.custom_metadata == {"step": 8}
        assert found.item_handlers[item].endswith("PyTreeCheckpointHandler")
        assert found.metrics == {"loss": 1 / 9}
        assert 0 < found.init_timestamp_nsecs <= found.commit_timestamp_nsecs
        meta = manager.item_metadata(3) if single else manager.item_metadata(3)["state"]
        assert meta["params"]["both"].shape == (16, 24)
        assert meta["params"]["both"].name == "params.both"
        assert (
            stock_states.differences(
                manager.restore(3, args=Restore(meta) if single else Composite(state=Restore(meta)))[
                    "params" if single else "state"
                ],
                expected["params"] if single else expected,
            )
            == []
        )
        status = manager.status(3)
        assert (status.state, status.detail, status.nodes) == ("committed", "written by stock Orbax", ())
        size = sum(p.stat().st_size for p in (directory / "3").rglob("*") if p.is_file())
        assert status.nbytes == size
        verified = manager.verify(3)
        assert verified.ok
        assert verified.nbytes == size
        assert "no checksums" in verified.note
        assert manager.nodes(3) == []
        with pytest.raises(errors.InvalidArgumentError, match="stock Orbax"):
            manager.node_path("process_0", 3)
        leaves = manager.restore_leaves(3, ["params/*", "list/1/deep", "step", "text"])
        assert sorted(leaves)[0] == "list/1/deep"
        assert leaves["text"] == "größer"
        assert leaves["step"] == 7
        assert type(leaves["params/both"]) is np.ndarray
        np.testing.assert_array_equal(leaves["params/both"], np.asarray(expected["params"]["both"]))
        with pytest.raises(errors.InvalidArgumentError, match=item):
            manager.restore_leaves(3, "*", item="other")
        with pytest.raises(errors.UnknownNameError, match="'stpe'; near: 'step'"):
            manager.restore_leaves(3, "stpe")


@pytest.mark.slow
@pytest.mark.parametrize("gone", [False, True], ids=["devices exist", "devices do not exist"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metadata_of_every_leaf_is_that_of_orbax(
    layouts: dict[str, pathlib.Path], tmp_path: pathlib.Path, layout: str, gone: bool
) -> None:
    """Names, shapes, dtypes, shardings, chunks; the metadata is a target, too, on whatever devices there are."""
    single = layout.endswith("single")
    shutil.copytree(layouts[layout], tmp_path / "run", symlinks=True)
    folder = tmp_path / "run" / "3" / ("default" if single else "state")
    if gone:
        text = (folder / "_sharding").read_text()
        (folder / "_sharding").write_text(re.sub(r"(id\\\": |CPU_|cpu:)(\d)", r"\g<1>9\2", text))
    stock: Any = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder))
    with ec.CheckpointManager(tmp_path / "run", options=READ_ONLY) as manager:
        meta = manager.item_metadata(3) if single else manager.item_metadata(3)["state"]
        restored = manager.restore(3, args=Restore(meta) if single else Composite(state=Restore(meta)))
    for (path, expected), (where, found) in zip(
        *(jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (stock.tree, meta.tree)), strict=True
    ):
        assert (where, type(found), found.name) == (path, type(expected), expected.name)
        assert found == expected, path
        if type(expected) is ocp.metadata.ArrayMetadata:
            assert found.storage is not None
    assert stock_states.differences(restored if single else restored["state"], full()) == []


def bytes_read() -> int:
    """By TensorStore, from files."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in found for value in metric["values"])


def by_rows_and_whole(tmp_path: pathlib.Path) -> tuple[np.ndarray, jax.sharding.NamedSharding]:
    """A step with one value twice: as one chunk, and as one for each of four devices."""
    value = np.random.default_rng(0).integers(0, 256, (1024, 1024), np.uint8)
    rows = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:4], ("x",)), jax.sharding.PartitionSpec("x"))
    write(tmp_path, "folders-zarr2-single", {1: {"one": jnp.asarray(value), "rows": jax.device_put(value, rows)}})
    return value, rows


@pytest.mark.parametrize("axes", [("x", None), (None, "x")], ids=["rows", "columns"])
def test_a_chunk_that_several_devices_have_parts_of_is_read_once(
    tmp_path: pathlib.Path, axes: tuple[str | None, str | None]
) -> None:
    value, rows = by_rows_and_whole(tmp_path)
    sharding = jax.sharding.NamedSharding(rows.mesh, jax.sharding.PartitionSpec(*axes))
    wanted = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    with ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager:
        before = bytes_read()
        found = manager.restore(1, args=Restore({"one": wanted, "rows": wanted}))
        assert 2 * value.nbytes < bytes_read() - before < 2 * value.nbytes + 2**16
    for array in found.values():
        assert array.sharding == sharding
        np.testing.assert_array_equal(np.asarray(array), value)


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_a_chunk_that_is_cut_into_parts_is_read_once(tmp_path: pathlib.Path, axis: int) -> None:
    """Because the array is larger than what may be decoded at the same time."""
    value, _ = by_rows_and_whole(tmp_path)
    item = orbax_leaves.OrbaxItem(open_store(tmp_path), "1/default", 1, read_bytes=2**18)
    places = [tuple((k * 256, k * 256 + 256) if i == axis else (0, 1024) for i in range(2)) for k in range(4)]
    found = {row.leaf.name: [(box, np.empty(grid.box_shape(box), np.uint8)) for box in places] for row in item.leaves}
    parts = [part for row in item.leaves for part in orbax_leaves.in_bands(row, found[row.leaf.name], 2**16)]
    assert (len(parts) > 2 * len(places)) == (axis == 1)  # rows are the chunks of one of the two
    before = bytes_read()
    assert {problem for _, problem in item.read(parts)} == {None}
    assert 2 * value.nbytes < bytes_read() - before < 2 * value.nbytes + 2**16
    for read in found.values():
        np.testing.assert_array_equal(np.concatenate([out for _, out in read], axis), value)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["linen", pytest.param("nnx", marks=pytest.mark.long)])
def test_a_flax_training_loop_of_orbax_goes_on_with_us(tmp_path: pathlib.Path, state: str) -> None:
    """Stock Orbax saves; we resume into a fresh state, and save beside it; both kinds are then restored."""
    make: Callable[[int], Any] = stock_states.STATES[state]
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        for step in (1, 2):
            stock.save(step, args=Save(make(step)))
    with ec.CheckpointManager(tmp_path / "run") as manager:
        resumed = manager.restore(None, args=Restore(make(0)))
        assert stock_states.differences(resumed, make(2)) == []
        manager.save(3, args=Save(make(3)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]
        for step in (1, 2, 3):
            got = manager.restore(step, args=Restore(stock_states.abstract(make(0), reshard=True)))
            assert stock_states.differences(got, make(step)) == []
        assert manager.nodes(3) == ["process_0"]
        name = "model/layers/0/kernel" if state == "nnx" else "params/Dense_0/kernel"
        for step in (2, 3):
            (leaf,) = list(manager.restore_leaves(step, f"{name}*"))
            assert leaf.startswith(name)
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        assert stock.all_steps() == [1, 2, 3]


@pytest.mark.slow
def test_an_nnx_model_that_orbax_saved_trains_on_as_if_nothing_happened(tmp_path: pathlib.Path) -> None:
    """The next steps after the change of managers are those of a run that was never interrupted, bit for bit."""

    def start() -> tuple[Any, Any]:
        model = stock_states.Model(0)
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def train(model: Any, optimizer: Any) -> None:
        optimizer.update(model, jax.tree.map(lambda x: 0.1 * x + 1, nnx.state(model, nnx.Param)))

    model, optimizer = start()
    train(model, optimizer)
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        args = Composite(model=Save(nnx.state(model)), optimizer=Save(nnx.state(optimizer)))
        stock.save(1, args=args)
    train(model, optimizer)
    other, its = start()
    with ec.CheckpointManager(tmp_path / "run") as manager:
        got = manager.restore(1, args=Composite(model=Restore(nnx.state(other)), optimizer=Restore(nnx.state(its))))
    nnx.update(other, got["model"])
    nnx.update(its, got["optimizer"])
    train(other, its)
    assert stock_states.differences(nnx.state(other), nnx.state(model)) == []


def test_every_dtype_that_orbax_knows_is_restored(tmp_path: pathlib.Path) -> None:
    """As jax arrays and NumPy arrays, with and without a target; those of ours that Orbax cannot save are few."""
    unknown = {"int1", "uint1", "uint2", "uint4", "float8_e4m3", "complex32", "bcomplex32"}
    unknown |= {"float6_e2m3fn", "float6_e3m2fn"}
    tree: dict[str, Any] = {}
    for name, dtype in dtypes().items():
        if name not in unknown:
            values = np.array([1, 0, 1, 1]).astype(dtype).reshape(2, 2)
            tree[f"numpy {name}"] = values
            with contextlib.suppress(TypeError):  # jax has no such arrays
                if jax.dtypes.canonicalize_dtype(dtype) == dtype:
                    tree[f"jax {name}"] = jnp.asarray(values)
    assert len(tree) > 35
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        stock.save(0, args=Save(tree))
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for args in (None, Restore(), Restore(tree)):
            assert stock_states.differences(manager.restore(0, args=args), tree) == []


WITHOUT_ARRAYS = {
    "sgd": optax.sgd(0.1).init({"w": jnp.ones(3)}),
    "none": {"ema": None},
    "texts": {"name": "run", "of": "größer"},
    "containers": {"a": {}, "b": []},
}


@pytest.mark.parametrize("state", WITHOUT_ARRAYS)
@pytest.mark.parametrize("layout", ["ocdbt-zarr2-single", "ocdbt-zarr3-multi", "folders-zarr2-multi"])
def test_an_item_without_arrays_needs_no_index_of_arrays(tmp_path: pathlib.Path, layout: str, state: str) -> None:
    """Orbax writes none for it: the step is whole, listed, restored with and without a target, and verified."""
    tree = WITHOUT_ARRAYS[state]
    write(tmp_path, layout, {1: tree})
    single = layout.endswith("single")
    wanted, anything = ocp.args.PyTreeRestore(tree), ocp.args.PyTreeRestore()
    with ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager, ocp.CheckpointManager(tmp_path) as stock:
        assert (manager.all_steps(), manager.damaged_epochs(), manager.verify(1).ok) == ([1], [], True)
        got = manager.restore(1, args=wanted if single else Composite(state=wanted))
        assert (got if single else got["state"]) == tree
        args = anything if single else Composite(state=anything)
        assert manager.restore(1, args=args) == stock.restore(1, args=args)
    assert "damaged" not in ec.inspect(tmp_path)[1].to_text()


def test_keys_that_are_numbers_fit_as_numbers_and_as_text(tmp_path: pathlib.Path) -> None:
    """Orbax writes both as text: a target decides; without one they are text, as from Orbax. Odd names survive."""
    tree = {"n": {0: {1: jnp.ones(2)}, 2: [jnp.zeros(1)]}, "a.b": {"c/d": np.ones(1)}, "gr ö": 3}
    text = {**tree, "n": {"0": {"1": jnp.ones(2)}, "2": [jnp.zeros(1)]}}
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(0, args=Save(tree))
    with ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager:
        for keys in (tree, text):
            assert stock_states.differences(manager.restore(0, args=Restore(keys)), keys) == []
        assert stock_states.differences(manager.restore(0), text) == []
        assert list(manager.restore_leaves(0, ["n/0/*", "a.b/*"])) == ["a.b/c%2Fd", "n/0/1"]


def test_items_of_other_handlers_are_restored_by_them(tmp_path: pathlib.Path) -> None:
    """Orbax's random keys and single arrays; an item of an unknown handler says that it needs an argument."""
    numpy_key = np.random.RandomState(5).get_state()
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        stock.save(
            0,
            args=Composite(
                key=ocp.args.JaxRandomKeySave(jax.random.key(7)),
                legacy=ocp.args.NumpyRandomKeySave(numpy_key),
                array=ocp.args.ArraySave(jnp.arange(3)),
            ),
        )
    with ec.CheckpointManager(tmp_path / "run") as manager:
        got = manager.restore(0)
        place = ocp.ArrayRestoreArgs(sharding=stock_states.sharding())
        args = Composite(key=ocp.args.JaxRandomKeyRestore(restore_args=place), array=ocp.args.ArrayRestore())
        for found in (got, manager.restore(0, args=args)):
            assert stock_states.differences(found["key"], jax.random.key(7)) == []
            assert stock_states.differences(found["array"], jnp.arange(3)) == []
        np.testing.assert_array_equal(got["legacy"][1], numpy_key[1])
        with pytest.raises(errors.InvalidArgumentError, match="it has: array, key, legacy"):
            manager.restore(0, args=Composite(params=Restore()))
        with pytest.raises(errors.InvalidArgumentError, match="'default'"):
            manager.restore(0, args=Composite(default=Restore()))
    record = tmp_path / "run" / "0" / "_CHECKPOINT_METADATA"
    record.write_text(record.read_text().replace("NumpyRandomKeyCheckpointHandler", "SpecialHandler"))
    with (
        ec.CheckpointManager(tmp_path / "run") as manager,
        pytest.raises(errors.InvalidArgumentError, match=r"SpecialHandler, which is not known here: pass its restore"),
    ):
        manager.restore(0)


def test_items_of_any_name_are_restored_and_not_all_are_saved(tmp_path: pathlib.Path) -> None:
    """Orbax takes what is the name of a file; see docs/orbax.md for those that we save."""
    names = (
        "a b",
        "größer",
        ".hidden",
        "_x",
        "process_0",
        "a:b",
        "ckpt@1",
        "%41",
        "x.safetensors",
        "x-00001",
        "a" * 200,
    )
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(1, args=Composite(**{name: Save(tree_of(number)) for number, name in enumerate(names)}))
    with ec.CheckpointManager(tmp_path) as manager:
        got = manager.restore(1, args=Composite(**{name: Restore(tree_of(0)) for name in names}))
        for number, name in enumerate(names):
            assert stock_states.differences(got[name], tree_of(number)) == []
            with pytest.raises(errors.InvalidArgumentError, match=r"item name|of a node"):
                manager.save(2, args=Composite(**{name: Save(tree_of(0))}))
        for step in (2.0, -1, True, 2**63):
            with pytest.raises(errors.InvalidArgumentError, match="expected an integer of at least 0"):
                manager.save(step, args=Composite(state=Save(tree_of(0))))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["StandardCheckpointer", "PyTreeCheckpointer"])
@pytest.mark.parametrize("ocdbt", [True, False])
def test_a_step_that_a_plain_checkpointer_wrote_is_one_unnamed_item(
    tmp_path: pathlib.Path, name: str, ocdbt: bool
) -> None:
    """`<directory>/<step>/` without folders of items, as scripts write it, under a prefixed name."""
    tree = full()
    checkpointer = ocp.StandardCheckpointer() if name.startswith("S") else ocp.PyTreeCheckpointer(use_ocdbt=ocdbt)
    if name.startswith("S"):
        del tree["text"]  # which it refuses
    with checkpointer:
        checkpointer.save(tmp_path / "run" / "ckpt_4", tree)
    with ec.CheckpointManager(tmp_path / "run", options=Options(step_prefix="ckpt")) as manager:
        assert manager.all_steps() == [4]
        assert stock_states.differences(manager.restore(None, args=Restore(tree)), tree) == []
        assert stock_states.differences(manager.restore(4), tree) == []
        assert manager.verify(4).ok


def test_steps_of_the_v1_api_are_restored(tmp_path: pathlib.Path) -> None:
    """`save` and `save_checkpointables` into a numbered folder: their items, under the names that v1 gives."""
    tree = {"x": stock_states.place(np.arange(8.0), "x"), "step": 3}
    save = getattr(ocp.v1, "save", None) or ocp.v1.save_pytree  # its older name
    save(tmp_path / "1", tree)
    ocp.v1.save_checkpointables(tmp_path / "2", {"a": tree, "b": {"y": np.ones(2)}})
    with ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager:
        assert manager.all_steps() == [1, 2]
        (got,) = manager.restore(1).values()
        assert stock_states.differences(got, tree) == []
        for name in ("default", "pytree", "state"):  # Orbax's v1 has called it by either of the last two
            assert manager.restore(1, args=Composite(**{name: Restore(tree)}))[name]["step"] == 3
            assert list(manager.restore_leaves(1, "st*", item=name)) == ["step"]
        several = manager.restore(None, args=Composite(a=Restore(stock_states.abstract(tree, reshard=True)), b=None))
        assert stock_states.differences(several["a"], tree) == []
        assert stock_states.differences(several["b"], {"y": np.ones(2)}) == []
    with ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager:
        assert stock_states.differences(manager.restore(1, args=Restore(tree)), tree) == []
        with pytest.raises(errors.UnknownNameError, match="no item 'default'; it has: a, b"):
            manager.restore(2, args=Restore(tree))


def test_a_step_that_is_older_than_orbax_metadata_is_restored(tmp_path: pathlib.Path) -> None:
    """The whole tree in one msgpack file `checkpoint`, as flax and the first versions of Orbax wrote it."""
    params = {"w": np.arange(6.0).reshape(2, 3), "b": np.float32([1, 2])}
    tree = {"params": params, "step": 4, "raw": b"ab\0\0"}
    folder = tmp_path / "run" / "4" / "default"
    folder.mkdir(parents=True)
    (folder / "checkpoint").write_bytes(flax.serialization.to_bytes(tree))
    record = {"item_handlers": {"default": ocp.PyTreeCheckpointHandler.typestr()}}  # else it would be anybody's
    (tmp_path / "run" / "4" / "_CHECKPOINT_METADATA").write_text(json.dumps(record))
    with unchanged(tmp_path / "run"), ec.CheckpointManager(tmp_path / "run", options=READ_ONLY) as manager:
        wanted = {"params": {"w": np.zeros((2, 3)), "b": jnp.zeros(2)}, "step": 0, "raw": b""}
        got = manager.restore(None, args=Restore(wanted))
        assert stock_states.differences(got, {**tree, "params": {**tree["params"], "b": jnp.float32([1, 2])}}) == []
        assert list(manager.restore_leaves(4, "params/*")) == ["params/b", "params/w"]
        assert got["raw"] == manager.restore_leaves(4, "raw")["raw"] == manager.restore(4)["raw"] == b"ab\0\0"
        with pytest.raises(errors.MismatchError, match="other"):
            manager.restore(4, args=Restore({"other": wanted}))


# -- targets that do not fit -----------------------------------------------------------------------------------------


def test_a_target_that_does_not_fit_is_refused_with_every_leaf(run: pathlib.Path) -> None:
    """Missing, unexpected, other shape, other type: one table; Orbax names some of them, or none."""
    wanted = {"w": jnp.zeros((4, 4)), "n": "text", "more": jnp.zeros(1)}
    with unchanged(run), ec.CheckpointManager(run, options=READ_ONLY) as manager:
        for step in (1, None):
            with pytest.raises(errors.MismatchError) as caught:
                manager.restore(step, args=Restore(wanted))
            assert {(r.leaf, r.problem) for r in caught.value.rows} == {
                ("w", "shape"),
                ("n", "type"),
                ("more", "missing"),
                ("step", "unexpected"),
            }
        partial = ocp.args.PyTreeRestore({"w": jnp.zeros((4, 3)), "more": 5}, partial_restore=True)
        assert stock_states.differences(manager.restore(1, args=partial), {"w": tree_of(1)["w"], "more": 5}) == []
        kept = {"w": ..., "n": np.zeros(3, int), "step": 0}
        assert manager.restore(2, args=Restore(kept))["w"] is ...
        with pytest.raises(errors.InvalidArgumentError, match="JsonRestore"):
            manager.restore(1, args=ocp.args.JsonRestore())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "asked", "fits"),
    [
        (np.int32([1, 16777216]), np.float32, True),
        (np.int32([1, 16777217]), np.float32, False),
        (np.float32([1, 2]), np.int8, True),
        (np.float32([1, 2.5]), np.int8, False),
        (np.float32([1, 300]), np.int8, False),
        (np.float32([1.1, 3]), jnp.bfloat16, True),
        (np.complex64([1, 2]), np.float32, True),
        (np.complex64([1, 2j]), np.float32, False),
        (np.int64([1, 2**40]), np.int32, False),
    ],
)
@pytest.mark.parametrize("form", ["jax", "numpy", "sharded"])
def test_a_cast_to_another_kind_needs_every_value_to_survive(
    tmp_path: pathlib.Path, saved: np.ndarray, asked: Any, fits: bool, form: str
) -> None:
    """Stock Orbax gives 16777216.0 for 16777217 without a word; precision alone follows the target."""
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(0, args=Save({"x": saved}))
    wanted: Any = np.zeros(2, asked)
    if form == "sharded":
        wanted = stock_states.place(wanted, "x")
    elif form == "jax":
        wanted = jnp.asarray(wanted)
    with ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager:
        if not fits:
            with pytest.raises(errors.MismatchError, match="not every value survives"):
                manager.restore(0, args=Restore({"x": wanted}))
            return
        got = manager.restore(0, args=Restore({"x": wanted}))["x"]
    with np.errstate(all="ignore"):
        expected = np.real(saved).astype(asked) if np.iscomplexobj(saved) else saved.astype(asked)
    assert type(got) is type(wanted)
    assert got.dtype == np.dtype(asked)
    np.testing.assert_array_equal(np.asarray(got), expected)
    assert isinstance(got, np.ndarray) or got.sharding == wanted.sharding


# -- going on --------------------------------------------------------------------------------------------------------


def test_an_existing_number_is_not_saved_again(run: pathlib.Path) -> None:
    """As for epochs of ours: False without force, an error with it; the step of Orbax stays as it is."""
    with unchanged(run / "2"), ec.CheckpointManager(run) as manager:
        assert manager.save(2, args=Save(tree_of(9))) is False
        with pytest.raises(errors.EpochExistsError, match="checkpoint 2"):
            manager.save(2, args=Save(tree_of(9)), force=True)
        assert manager.save(3, args=Save(tree_of(3)))
        manager.wait_until_finished()
        assert (run / "3" / "epoch.json").exists()


def test_the_best_epoch_and_retention_look_at_both_kinds(tmp_path: pathlib.Path) -> None:
    """Metrics of Orbax's steps rank with ours; the worst go, whoever wrote them."""
    simple(tmp_path, 1, 2, 3, **BEST)
    with ec.CheckpointManager(tmp_path, options=Options(max_to_keep=2, **BEST)) as manager:
        assert manager.best_step() == 3
        assert [manager.metrics(s)["loss"] for s in (1, 2, 3)] == [2.5, 1.5, 0.5]
        manager.save(4, args=Save(tree_of(4)), metrics={"loss": 0.1})
        manager.wait_until_finished()
        assert manager.best_step() == 4
        assert manager.all_steps() == [3, 4]
        manager.save(5, args=Save(tree_of(5)), metrics={"loss": 9.0})
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4, 5]  # the two best, and the newest
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["3", "4", "5"]


def test_the_latest_are_kept_of_both_kinds(run: pathlib.Path) -> None:
    """`max_to_keep` counts steps of Orbax, and deletes them first: they are the oldest."""
    with ec.CheckpointManager(run, options=Options(max_to_keep=2)) as manager:
        for step in (3, 4):
            manager.save(step, args=Save(tree_of(step)))
            manager.wait_until_finished()
            assert manager.all_steps() == [step - 1, step]
    assert not (run / "2").exists()


def test_rolling_back_over_both_kinds_keeps_what_was_set_aside(run: pathlib.Path) -> None:
    """Back to a step of Orbax: later ones, theirs and ours, lie whole under `rolled-back-…`; the number is free."""
    with ec.CheckpointManager(run) as manager:
        manager.save(3, args=Save(tree_of(3)))
        manager.wait_until_finished()
        manager.rollback_to(1)
        assert manager.all_steps() == [1]
        (aside,) = run.glob("rolled-back-*")
        assert sorted(p.name for p in aside.iterdir()) == ["2", "3"]
        got = manager.restore(2, directory=aside, args=Restore(tree_of(0)))
        assert stock_states.differences(got, tree_of(2)) == []
        manager.save(2, args=Save(tree_of(20)))
        manager.wait_until_finished()
        assert stock_states.differences(manager.restore(2, args=Restore(tree_of(0))), tree_of(20)) == []


def test_a_step_of_orbax_can_be_deleted(run: pathlib.Path) -> None:
    """Also the newest; what is left is what storage says."""
    with ec.CheckpointManager(run) as manager:
        manager.delete(2)
        assert manager.all_steps() == [1]
        assert manager.reload() is None
        assert manager.latest_step() == 1
        with pytest.raises(errors.EpochNotFoundError):
            manager.restore(2)
    assert not (run / "2").exists()


def test_an_evaluator_follows_both_kinds(run: pathlib.Path) -> None:
    """Steps of Orbax, then ours; a step that is being written is not among them."""
    (run / "3.orbax-checkpoint-tmp-17").mkdir()
    steps = ec.follow(run, timeout_secs=0.05, interval_secs=0.01)
    assert [next(steps), next(steps)] == [1, 2]
    with ec.CheckpointManager(run) as manager:
        manager.save(3, args=Save(tree_of(3)))
    assert list(steps) == [3]


def test_another_directory_of_orbax_can_be_restored_from(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """`restore(directory=…)`, with a number and without one."""
    with ec.CheckpointManager(tmp_path / "mine") as manager:
        for step in (2, None):
            got = manager.restore(step, directory=run, args=Restore(tree_of(0)))
            assert stock_states.differences(got, tree_of(2)) == []
        assert manager.all_steps() == []


def test_root_metadata_of_orbax_is_read(tmp_path: pathlib.Path) -> None:
    """What the manager of Orbax was constructed with."""
    with ocp.CheckpointManager(tmp_path, metadata={"model": "tiny"}) as stock:
        stock.save(0, args=Save(tree_of(0)))
    with ec.CheckpointManager(tmp_path, metadata={"model": "other"}) as manager:
        assert manager.metadata().custom_metadata == {"model": "tiny"}


# -- several processes -----------------------------------------------------------------------------------------------


def write_job(directory: str) -> None:
    """Every process of a job saves with stock Orbax."""
    for layout in LAYOUTS:
        if layout.endswith("single"):
            write(pathlib.Path(directory) / layout, layout, {1: stock_states.plain(), 2: stock_states.plain()})


def read_job(directory: str) -> dict[str, Any]:
    """Every process restores with us, and goes on."""
    expected, out = stock_states.plain(), {}
    host = jax.tree.map(_whole, expected)
    for layout in LAYOUTS:
        if layout.endswith("single"):
            with ec.CheckpointManager(pathlib.Path(directory) / layout) as manager:
                args = [Restore(stock_states.abstract(expected, moved)) for moved in (False, True)]
                got = [manager.restore(1, args=a) for a in args]
                got += [manager.restore(None, args=args[1]), manager.restore(2)]
                if jax.process_index() == 0:  # a read waits for no other process
                    alone = manager.restore_leaves(2, "params/*")
                    assert not _wrong({"params": {k[7:]: v for k, v in alone.items()}}, {"params": host["params"]})
                manager.save(5, args=Save(got[0]), metrics={"loss": 0.0})
                manager.wait_until_finished()
                got.append(manager.restore(5, args=args[1]))
                manager.delete(1)
                out[layout] = [[_wrong(g, host) for g in got], list(manager.all_steps()), manager.best_step()]
    return out


def _whole(x: Any) -> Any:
    """The values of a global array, on every process."""
    if not isinstance(x, jax.Array):
        return x
    data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    everywhere = jax.jit(lambda y: y, out_shardings=stock_states.sharding())(data)
    return np.asarray(everywhere.addressable_data(0))


def _wrong(tree: Any, host: Any) -> list[str]:
    """Leaves with a shard on this process that is not as it was saved; compares without collectives."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    wrong = [] if len(found) == len(jax.tree.leaves(host)) else ["other leaves"]
    for (path, x), y in zip(found, jax.tree.leaves(host), strict=False):
        typed = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(x) if typed else x
        if isinstance(data, jax.Array):
            same = data.dtype == y.dtype and all(
                np.asarray(s.data).tobytes() == y[s.index].tobytes() for s in data.addressable_shards
            )
        else:
            same = type(x) is type(y) and np.array_equal(x, y)
        wrong += [] if same else [jax.tree_util.keystr(path)]
    return wrong


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Directories that stock Orbax wrote from two processes."""
    root = tmp_path_factory.mktemp("two")
    run_worker("tests.orbax.test_steps:write_job", {"directory": str(root)}, 2, 2)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_any_number_of_processes_reads_what_two_wrote(
    of_two: pathlib.Path, tmp_path: pathlib.Path, processes: int
) -> None:
    """Sharded, replicated and NumPy leaves and keys, by vote, in another sharding, without a target; then goes on."""
    shutil.copytree(of_two, tmp_path / "copy")
    job = "tests.orbax.test_steps:read_job"
    found = run_worker(job, {"directory": str(tmp_path / "copy")}, processes, 4 // processes)
    assert len(found) == processes
    for process in found:
        assert len(process) == 4
        assert process == {layout: [[[]] * 5, [2, 5], 5] for layout in process}


def read_on_one_device(directory: str) -> list[str]:
    """What arrays are whose devices do not exist here; and that they go where the target says."""
    with ec.CheckpointManager(directory, options=READ_ONLY) as manager:
        got = manager.restore(2)["params"]
        asked = {"params": jax.tree.map(jnp.zeros_like, got)}
        args = ocp.args.PyTreeRestore(asked, partial_restore=True)
        again = manager.restore(2, args=args)["params"]
        same = all(np.array_equal(got[k], again[k]) and len(again[k].devices()) == 1 for k in got)
    return [type(x).__name__ for x in got.values()] + [str(same)]


@pytest.mark.slow
def test_arrays_whose_devices_do_not_exist_come_back_as_numpy(of_two: pathlib.Path) -> None:
    """Saved on four devices, restored where there is one: without a target; with one they are placed on it."""
    (found,) = run_worker("tests.orbax.test_steps:read_on_one_device", {"directory": str(of_two / LAYOUTS[0])})
    assert found == ["ndarray"] * 6 + ["True"]


# -- half-written and foreign ----------------------------------------------------------------------------------------


def _empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def _garbage(path: pathlib.Path) -> None:
    path.write_bytes(b"\x00\xff" * 40)


def _unfinished(path: pathlib.Path) -> None:
    path.rename(path.with_name(f"{path.name}.orbax-checkpoint-tmp-1700"))


def _remove(path: pathlib.Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


# what is harmed, how, what the error says, and whether a look at the files, without reading arrays, finds it
HARM = {
    "item not finished": ("default", _unfinished, "'default' was not finished", True),
    "item missing": ("default", _remove, "2/default", True),
    "metadata empty": ("default/_METADATA", _empty, "2/default/_METADATA: is no JSON", True),
    "metadata garbage": ("default/_METADATA", _garbage, "2/default/_METADATA: is no JSON", True),
    "metadata missing": ("default/_METADATA", _remove, "2/default/_METADATA: is missing", True),
    "index missing": ("default/manifest.ocdbt", _remove, "2/default/manifest.ocdbt: is missing", True),
    "index empty": ("default/manifest.ocdbt", _empty, "2/default/manifest.ocdbt: has 0 bytes", True),
    "index garbage": ("default/manifest.ocdbt", _garbage, "2/default, leaf 'n': cannot be read", False),
    "rows missing": ("default/array_metadatas", _remove, "2/default/array_metadatas: is missing", True),
    "rows lost": ("default/array_metadatas/process_0", _remove, "2/default/array_metadatas: is missing", True),
    "data missing": ("default/d", _remove, "2/default, leaf 'n': cannot be read", False),
    "array missing": ("default/w", _remove, "2/default, leaf 'w': is missing", False),
    "array metadata empty": ("default/w/.zarray", _empty, "2/default, leaf 'w': cannot be read", False),
    "chunk truncated": ("default/w/0.0", _garbage, "2/default, leaf 'w': cannot be read", False),
}


@pytest.mark.slow
@abandoned_reads
@pytest.mark.parametrize("harm", HARM)
def test_a_half_written_step_is_skipped_loudly_and_says_what_to_do(
    tmp_path: pathlib.Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is missing, where, and what to do; `restore(None)` takes the older one; nothing changes on disk."""
    part, how, says, shallow = HARM[harm]
    layout = "folders-zarr2-single" if "/w" in part else "ocdbt-zarr2-single"
    write(tmp_path, layout, {1: tree_of(1), 2: tree_of(2)})
    how(tmp_path / "2" / part)
    with unchanged(tmp_path), ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager:
        assert manager.all_steps() == ([1] if shallow else [1, 2])
        assert manager.status(2).state == ("damaged" if shallow else "committed")
        with pytest.raises(errors.DamagedError) as caught:
            manager.restore(2, args=Restore(tree_of(0)))
        for text in (says, "if nobody needs it, delete(2)", "restore an older one", "whole copy", "Stock Orbax"):
            assert text in str(caught.value)
        verified = manager.verify(2)
        assert not verified.ok
        assert "chunk" not in harm or verified.damage[0].leaf == "w"
        got = manager.restore(None, args=Restore(tree_of(0)))
        assert stock_states.differences(got, tree_of(1)) == []
        assert manager.all_steps() == [1]
    assert any("checkpoint 2" in r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR)


def _as_type(path: pathlib.Path, leaf: str, name: str) -> None:
    """Has the metadata of an item say that a leaf is of another type."""
    record = json.loads((path / "_METADATA").read_text())
    (row,) = [v for k, v in record["tree_metadata"].items() if leaf in k]
    row["value_metadata"]["value_type"] = name
    (path / "_METADATA").write_text(json.dumps(record))


def test_metadata_of_a_leaf_that_cannot_be_looked_into_makes_no_number_of_it(tmp_path: pathlib.Path) -> None:
    """Of a user's type: its name; of a damaged one: the damage."""
    write(tmp_path, "folders-zarr2-single", {1: tree_of(1)})
    _as_type(tmp_path / "1" / "default", "w", "Point")
    _remove(tmp_path / "1" / "default" / "w")
    with ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager:
        found = manager.item_metadata(1)["w"]
        assert type(found) is ocp.metadata.Metadata
        assert found.name == "w"
    _as_type(tmp_path / "1" / "default", "w", "jax.Array")
    with (
        ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager,
        pytest.raises(errors.DamagedError, match="leaf 'w': is missing"),
    ):
        manager.item_metadata(1)


def test_a_leaf_of_a_users_type_keeps_nothing_else_from_being_restored(tmp_path: pathlib.Path) -> None:
    """An array is one whatever its handler calls it; what is none is refused only where it is asked for."""
    write(tmp_path, "folders-zarr2-single", {1: tree_of(1)})
    folder, expected = tmp_path / "1" / "default", tree_of(1)
    _as_type(folder, "w", "Mine")
    _as_type(folder, "n", "Point")
    _remove(folder / "n")
    with ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager:
        wanted = {**tree_of(0), "n": ...}
        got = manager.restore(1, args=ocp.args.PyTreeRestore(wanted))
        assert stock_states.differences({**got, "n": 0}, {**expected, "n": 0}) == []
        wanted = {"w": jnp.zeros((4, 3))}
        got = manager.restore(1, args=ocp.args.PyTreeRestore(wanted, partial_restore=True))
        assert stock_states.differences(got, {"w": expected["w"]}) == []
        for args in (None, Restore(tree_of(0))):
            with pytest.raises(errors.UnsupportedError, match="'Point'"):
                manager.restore(1, args=args)


def test_a_step_that_is_deleted_before_its_numbers_are_read_is_not_called_damaged(run: pathlib.Path) -> None:
    """`EpochDeletedError` of a leaf that is no array, as of arrays."""
    with ec.CheckpointManager(run, options=READ_ONLY) as manager:
        values = manager.components.readers.open(2).arrays("default").record.items["default"].values
        number = next(iter(values))
        shutil.rmtree(run / "2")
        with pytest.raises(errors.EpochDeletedError, match="checkpoint 2"):
            values[number]


def test_texts_that_were_missing_are_looked_for_again(tmp_path: pathlib.Path) -> None:
    """A look at a step outlives a file that storage did not show for a moment."""
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(0, args=ocp.args.PyTreeSave({"name": "run"}))
    item = orbax_leaves.OrbaxItem(open_store(tmp_path), "0/default", 0)
    strings = tmp_path / "0" / "default" / "_strings.json"
    aside = strings.rename(tmp_path / "aside")
    with pytest.raises(errors.DamagedError, match=r"_strings\.json: is missing"):
        item.value(item.leaves[0])
    aside.rename(strings)
    assert item.value(item.leaves[0]) == "run"


@pytest.mark.parametrize(
    ("harm", "cause", "advised"),
    [(_remove, FileNotFoundError, True), (_garbage, ValueError, True), (_folder, IsADirectoryError, False)],
)
def test_deleting_is_advised_only_for_what_is_known_to_be_lost(
    run: pathlib.Path, harm: Callable[[pathlib.Path], None], cause: type[Exception], advised: bool
) -> None:
    """Not where the tree of an item cannot be read; the error keeps its cause."""
    harm(run / "1" / "default" / "_METADATA")
    with pytest.raises(errors.DamagedError) as caught:
        small_files.tree_record(open_store(run), "1/default", 1)
    assert isinstance(caught.value.__cause__, cause)
    assert ("delete(1)" in str(caught.value)) is advised


def test_an_array_in_the_old_file_has_no_sharding_of_another_leaf(tmp_path: pathlib.Path) -> None:
    """Of a tree that is older than Orbax's metadata, some arrays lie in the file and some beside it."""
    write(tmp_path, "folders-zarr2-single", {1: tree_of(1)})
    folder = tmp_path / "1" / "default"
    (folder / "_METADATA").unlink()
    tree = {"a": np.arange(4.0), "w": "PLACEHOLDER://w"}
    (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    with ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager:
        found = manager.item_metadata(1)
        assert found["w"].sharding is not None
        assert found["a"].sharding is None


@pytest.mark.parametrize(
    ("raised", "error"), [(RuntimeError, RuntimeError), (NotImplementedError, errors.UnsupportedError)]
)
def test_an_error_of_the_program_is_no_damage(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch, raised: type[Exception], error: type[Exception]
) -> None:
    """It says nothing about the data: no older epoch is taken for it."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise raised("it went wrong")

    with ec.CheckpointManager(run, options=READ_ONLY) as manager:
        monkeypatch.setattr(ts, "open", fail)
        with pytest.raises(error, match="it went wrong") as caught:
            manager.restore(None, args=Restore(tree_of(0)))
        assert not isinstance(caught.value, errors.DamagedError)


class _Failing:
    """What TensorStore's key-value stores are, where reads of some keys fail with an error of the system's."""

    def __init__(self, kv: Any, part: str, code: int):
        self.kv, self.part, self.code = kv, part, code

    def read(self, key: str) -> Any:
        return self if self.part in key else self.kv.read(key)

    def result(self) -> Any:
        status = "PERMISSION_DENIED" if self.code == errno.EACCES else "INTERNAL"
        raise ValueError(f"{status}: Error reading file [os_error_code='{self.code}']")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_an_unreadable_array_record_is_no_damage(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """No older epoch is taken for it: storage did not answer, or this user may not read it."""
    write(tmp_path, "folders-zarr2-single", {1: tree_of(1), 2: tree_of(2)})
    opened = ts.KvStore.open

    class Store:
        @staticmethod
        def open(*args: Any, **kwargs: Any) -> Any:
            kv = opened(*args, **kwargs).result()
            found = _Failing(kv, "w/.zarray", code) if "/2/" in kv.url else kv
            return types.SimpleNamespace(result=lambda: found)

    monkeypatch.setattr(ts, "KvStore", Store)
    error = errors.AccessError if code == errno.EACCES else errors.StorageError
    with ec.CheckpointManager(tmp_path, options=READ_ONLY) as manager:
        for step in (2, None):
            with pytest.raises(error):
                manager.restore(step, args=Restore(tree_of(0)))
        assert manager.all_steps() == [1, 2]


def test_a_step_without_any_item_is_damaged(run: pathlib.Path) -> None:
    """Only Orbax's step record is left, and it names nothing."""
    _remove(run / "2" / "default")
    (run / "2" / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {}}')
    with ec.CheckpointManager(run, options=READ_ONLY) as manager:
        assert manager.all_steps() == [1]
        with pytest.raises(errors.DamagedError, match="2: holds no item"):
            manager.restore(2)


def test_a_half_written_step_can_be_replaced_or_deleted(run: pathlib.Path) -> None:
    """As one of ours that is damaged: a new save sets it aside; `delete` removes it."""
    _remove(run / "2" / "default" / "_METADATA")
    shutil.copytree(run / "2", run / "3")
    with ec.CheckpointManager(run) as manager:
        assert manager.all_steps() == [1]
        manager.delete(3)
        assert not (run / "3").exists()
        manager.save(2, args=Save(tree_of(22)))
        manager.wait_until_finished()
        assert stock_states.differences(manager.restore(2, args=Restore(tree_of(0))), tree_of(22)) == []
    (aside,) = run.glob("damaged-*/2")
    assert (aside / "default" / "manifest.ocdbt").exists()


def test_a_broken_step_record_or_metrics_file_costs_no_array(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut leaves them empty: the arrays are restored all the same, the loss is logged, Orbax's time is lost."""
    simple(tmp_path, 1, 2, **BEST)
    _empty(tmp_path / "2" / "_CHECKPOINT_METADATA")
    _empty(tmp_path / "2" / "metrics" / "metrics")
    with ec.CheckpointManager(tmp_path, options=Options(read_only=True, **BEST)) as manager:
        assert stock_states.differences(manager.restore(None, args=Restore(tree_of(0))), tree_of(2)) == []
        assert manager.metrics(2) is None
        assert manager.best_step() == 1
    assert "2/_CHECKPOINT_METADATA is no JSON" in caplog.text
    assert "2/metrics/metrics is no JSON" in caplog.text


def test_a_step_that_is_deleted_while_it_is_read_is_not_called_damaged(run: pathlib.Path) -> None:
    """`EpochDeletedError`: take another one."""
    reader = ec.CheckpointManager(run, options=READ_ONLY).components.readers.open(2)
    shutil.rmtree(run / "2")
    for read in (lambda: reader.restore(None), lambda: reader.restore_leaves("*", None), reader.verify, reader.status):
        with pytest.raises(errors.EpochDeletedError, match="checkpoint 2"):
            read()


def test_staging_of_orbax_is_no_epoch_and_left_alone(run: pathlib.Path) -> None:
    """`<step>.orbax-checkpoint-tmp-…` may be another process's save on its way."""
    (run / "3.orbax-checkpoint-tmp-17" / "default.orbax-checkpoint-tmp-18").mkdir(parents=True)
    with unchanged(run / "3.orbax-checkpoint-tmp-17"), ec.CheckpointManager(run) as manager:
        assert manager.all_steps() == [1, 2]
        manager.save(3, args=Save(tree_of(3)))


def test_an_epoch_of_ours_without_its_record_is_no_step_of_orbax(run: pathlib.Path) -> None:
    """Its Orbax view looks like a step, but the bytes behind it would not be verified."""
    with ec.CheckpointManager(run) as manager:
        manager.save(3, args=Save(tree_of(3)))
    (run / "3" / "epoch.json").unlink()
    with unchanged(run), ec.CheckpointManager(run) as manager:
        assert manager.all_steps() == [1, 2]
        with pytest.raises(errors.EpochExistsError, match=r"/3 .*lost its records.*no epoch.json"):
            manager.save(3, args=Save(tree_of(3)), force=True)


@pytest.mark.parametrize("inside", ["nothing", "a file", "a folder", "json"])
def test_a_folder_of_somebody_else_is_left_alone_among_steps_of_orbax(run: pathlib.Path, inside: str) -> None:
    """Neither ours nor Orbax's: named, and nothing is written there."""
    (run / "5").mkdir()
    if inside == "a file":
        (run / "5" / "weights.bin").write_text("precious")
    elif inside == "a folder":
        (run / "5" / "weights").mkdir()
    elif inside == "json":
        (run / "5" / "notes").mkdir()
        (run / "5" / "notes" / "metadata").write_text(json.dumps({"a": 1}))
    with unchanged(run), ec.CheckpointManager(run) as manager:
        assert manager.all_steps() == [1, 2]
        assert list(manager.foreign_folders()) == [5]
        with pytest.raises(errors.EpochExistsError, match=r"/5 .*stock Orbax"):
            manager.save(5, args=Save(tree_of(5)), force=True)


@pytest.mark.slow
@abandoned_reads
@pytest.mark.parametrize(
    "part",
    [
        "default/_METADATA",
        "default/array_metadatas/process_0",
        "default/_sharding",
        "_CHECKPOINT_METADATA",
        "default/_strings.json",
    ],
)
@pytest.mark.parametrize(
    "junk", ["[]", "{}", '{"tree_metadata": {"x": 1}, "array_metadatas": 5}', "5", "null", "[" * 9999]
)
def test_records_of_orbax_that_hold_something_else_are_refused_or_not_needed(
    run: pathlib.Path, part: str, junk: str
) -> None:
    """JSON of another form: an error of ours that names the step, or the right values; nothing else."""
    (run / "2" / part).write_text(junk)
    with ec.CheckpointManager(run, options=READ_ONLY) as manager:
        for args in (Restore(tree_of(0)), None):
            problem, got = "", None
            try:
                got = manager.restore(2, args=args)
            except (errors.DamagedError, errors.FormatError) as error:
                problem = str(error)
            assert "2/default" in problem or stock_states.differences(got, tree_of(2)) == []
        newest = manager.restore(None, args=Restore(tree_of(0)))
        assert newest["step"] in (1, 2)
        assert stock_states.differences(newest, tree_of(newest["step"])) == []
        manager.verify(2)
        manager.status(2)


def test_a_handler_of_somebody_elses_reads_what_it_wrote_under_orbax(tmp_path: pathlib.Path) -> None:
    """A reader saved by stock Orbax with its own handler; what that handler refuses is not called damage."""
    with ocp.CheckpointManager(tmp_path) as stock:
        items = {"iter": handler_jobs.ReaderSave(handler_jobs.Reader(7)), "w": Save({"a": jnp.ones(2)})}
        stock.save(0, args=Composite(**items))
        stock.wait_until_finished()
    with ec.CheckpointManager(tmp_path) as manager:
        reader = handler_jobs.Reader()
        assert manager.restore(0, args=Composite(iter=handler_jobs.ReaderRestore(reader))).iter is reader
        assert reader.position == 7
        (tmp_path / "0" / "iter" / "process_0-of-1.json").rename(tmp_path / "0" / "iter" / "process_0-of-9.json")
        with pytest.raises(ValueError, match="another number of processes") as caught:
            manager.restore(None, args=Composite(iter=handler_jobs.ReaderRestore(reader)))
        assert not isinstance(caught.value, errors.EpochCheckpointError)


def test_a_step_of_orbax_is_not_exported(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """It is what an export would give; said by name, and nothing is written."""
    with pytest.raises(errors.UnsupportedError, match="checkpoint 2 was written by stock Orbax"):
        ec.export(run, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_threads_share_the_numbers_that_are_read_ahead(tmp_path: pathlib.Path) -> None:
    """As those of a notebook do with one look at a step: each number is read once, and all threads have it."""
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(0, args=Save({f"n{i}": i for i in range(2000)}))
        stock.wait_until_finished()
    item = orbax_leaves.OrbaxItem(open_store(tmp_path), "0/default", 0)
    numbers = in_parallel([lambda: {row.leaf.name: item.value(row) for row in item.leaves}] * 6)
    assert numbers == [{f"n{i}": i for i in range(2000)}] * 6
