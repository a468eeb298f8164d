"""Stock Orbax reads what we write: by itself, in processes that cannot import epochckpt."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Callable
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from safetensors.numpy import load_file

import epochckpt as ec
from epochckpt.arrays import plan
from epochckpt.format.tree import dtypes
from epochckpt.orbax import Views, linked_view, ocdbt, parameters
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support import prepared, stock_states
from tests.support.processes import run_worker

DEVICES = 4
NO_SHARDING = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")  # stock Orbax, told nothing
IS_OLD = tuple(int(number) for number in ocp.__version__.split(".")[:2]) < (0, 12)


def save(directory: Any, tree: Any, **storage: Any) -> None:
    """One epoch, number 5."""
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(**storage)) as manager:
        manager.save(5, args=ocp.args.StandardSave(tree))


def save_job(directory: str, state: str) -> None:
    """The same, by every process of a job."""
    save(directory, stock_states.STATES[state](), replica_split_bytes=512, part_bytes=512)


def unsupported(directory: pathlib.Path) -> Any:
    """The note in the epoch's record."""
    return json.loads((directory / "5" / "epoch.json").read_bytes())["orbax_unsupported"]


def database(folder: pathlib.Path) -> ts.KvStore:
    """The index, opened by TensorStore alone."""
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()


def array(folder: pathlib.Path, name: str) -> np.ndarray:
    """One parameter, read by TensorStore alone."""
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}}
    return np.asarray(ts.open(spec, open=True).result().read().result())


def stock(function: str, arguments: dict[str, Any], num_processes: int = 1) -> Any:
    """Runs a function of tests/support/stock_reader.py and returns what each process answered."""
    devices = DEVICES // num_processes
    return run_worker(
        f"tests.support.stock_reader:{function}",
        arguments,
        num_processes,
        devices,
        timeout=100,
        imported=prepared.STOCK,
    )


@pytest.mark.parametrize(
    "state", [pytest.param(name, marks=[pytest.mark.slow] * (name != "plain")) for name in stock_states.STATES]
)
def test_every_reader_of_stock_orbax_restores_it_bit_for_bit(tmp_path: pathlib.Path, state: str) -> None:
    """NNX, Linen + optax and a tree of everything else; in the saved and in another sharding; nothing is left out."""
    save(tmp_path / "run", stock_states.STATES[state]())
    assert unsupported(tmp_path / "run") == {}
    (found,) = stock("read", {"directory": str(tmp_path / "run"), "epoch": 5, "state": state})
    assert len(found) == (16 if hasattr(ocp.v1, "load") else 14 if state == "linen" else 10)
    assert {k: v for k, v in found.items() if v} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "restored"),
    [(2, 1), *(pytest.param(*each, marks=pytest.mark.long) for each in [(4, 2), (1, 2)])],
)
def test_any_number_of_processes_reads_what_any_number_wrote(tmp_path: pathlib.Path, saved: int, restored: int) -> None:
    """Sharded and replicated arrays of several nodes, data files in several parts."""
    directory = tmp_path / "run"
    run_worker(
        "tests.orbax.test_view:save_job",
        {"directory": str(directory), "state": "plain"},
        saved,
        DEVICES // saved,
        timeout=100,
    )
    assert unsupported(directory) == {}
    assert len(list((directory / "5").glob("process_*/*-00001.safetensors"))) == saved
    answers = stock("read", {"directory": str(directory), "epoch": 5, "state": "plain"}, restored)
    assert len(answers) == restored
    for found in answers:
        assert {k: v for k, v in found.items() if v} == {}


def save_two_items(directory: pathlib.Path) -> None:
    """An epoch with arrays, JSON, metrics and metadata."""
    items = ocp.args.Composite(state=ocp.args.StandardSave(stock_states.plain()), config=ocp.args.JsonSave({"a": [1]}))
    with ec.CheckpointManager(directory) as manager:
        manager.save(5, args=items, metrics={"loss": 0.5}, custom_metadata={"by": "us"})


@pytest.mark.slow
@pytest.mark.parametrize("items", ["one", "two"])
def test_stock_orbax_needs_no_arguments(tmp_path: pathlib.Path, items: str) -> None:
    """`CheckpointManager(dir).restore(step)`: our nodes' folders do not stand in the way."""
    if items == "one":
        save(tmp_path / "run", stock_states.plain())
    else:
        save_two_items(tmp_path / "run")
    (found,) = stock("no_arguments", {"directory": str(tmp_path / "run"), "epoch": 5})
    expected: dict[str, Any] = {"differences": [], "steps": [5]}
    if items == "two":
        expected |= {"config": {"a": [1]}, "custom": {"by": "us"}}
    if "v1" in found:
        expected["v1"] = []
    assert found == expected


NO_HANDLER = r'Item "\w+" .* does not match with any registered handler'
TREE, CONFIG = {"w": np.arange(4.0), "step": 7}, {"a": 1}


def handlers() -> dict[str, Any]:
    """What stock managers are given for the two items."""
    return {"state": ocp.StandardCheckpointHandler(), "config": ocp.JsonCheckpointHandler()}


def checkpointers() -> dict[str, Any]:
    """The same, in the legacy form."""
    return {"state": ocp.PyTreeCheckpointer(), "config": ocp.Checkpointer(ocp.JsonCheckpointHandler())}


def registry() -> Any:
    """The same, as a registry."""
    made = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for name, handler in handlers().items():
        kind = "Standard" if name == "state" else "Json"
        made.add(name, getattr(ocp.args, f"{kind}Save"), handler)
        made.add(name, getattr(ocp.args, f"{kind}Restore"), handler)
    return made


@NO_SHARDING
@pytest.mark.parametrize(
    ("given", "named"),
    [
        pytest.param(lambda: {"checkpointers": ocp.PyTreeCheckpointer()}, {"restore_kwargs": {}}, id="checkpointers="),
        pytest.param(
            lambda: {"checkpointers": ocp.PyTreeCheckpointer()}, {"items": TREE}, id="checkpointers=, a target"
        ),
        pytest.param(
            lambda: {"item_handlers": ocp.StandardCheckpointHandler()},
            {"args": ocp.args.StandardRestore()},
            id="item_handlers=",
        ),
    ],
)
def test_a_stock_manager_that_was_given_a_handler_is_told_what_to_restore(
    tmp_path: pathlib.Path, given: Callable[[], dict[str, Any]], named: dict[str, Any]
) -> None:
    """The rows of docs/orbax.md about one item: without an argument it refuses the folder of a node."""
    save(tmp_path, TREE)
    with ocp.CheckpointManager(tmp_path, **given()) as manager:
        with pytest.raises(ValueError, match=NO_HANDLER):
            manager.restore(5)
        found = manager.restore(5, **named)
    assert stock_states.differences(found, TREE) == []


def save_state_and_config(directory: pathlib.Path, manager_class: Any = ec.CheckpointManager) -> None:
    """An epoch of two items."""
    with manager_class(directory) as manager:
        items = ocp.args.Composite(state=ocp.args.StandardSave(TREE), config=ocp.args.JsonSave(CONFIG))
        manager.save(5, args=items, metrics={"loss": 0.5})


BOTH = ocp.args.Composite(state=ocp.args.StandardRestore(), config=ocp.args.JsonRestore())


@NO_SHARDING
@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        pytest.param(
            lambda: {"checkpointers": checkpointers()},
            NO_HANDLER,
            {"items": {"state": None, "config": None}},
            id="checkpointers=",
        ),
        pytest.param(lambda: {"item_handlers": handlers()}, NO_HANDLER, {"args": BOTH}, id="item_handlers="),
        pytest.param(
            lambda: {"item_handlers": handlers(), "item_names": ("state", "config")},
            NO_HANDLER,
            {"args": BOTH},
            id="item_handlers= and item_names=",
        ),
        pytest.param(
            lambda: {"item_names": ("state", "config")},
            "had an undetermined `CheckpointHandler`",  # so does one of its own steps
            {"args": BOTH},
            id="item_names=",
        ),
        pytest.param(lambda: {"handler_registry": registry()}, None, {"args": BOTH}, id="handler_registry="),
        pytest.param(lambda: {}, None, {"args": BOTH}, id="nothing"),
    ],
)
def test_a_stock_manager_that_was_given_handlers_is_told_what_to_restore(
    tmp_path: pathlib.Path, given: Callable[[], dict[str, Any]], error: str | None, named: dict[str, Any]
) -> None:
    """The rows of docs/orbax.md about several items."""
    save_state_and_config(tmp_path)
    with ocp.CheckpointManager(tmp_path, **given()) as manager:
        if error is None:
            everything = manager.restore(5)
            assert set(everything.keys()) == {"state", "config", "metrics", "process_0"}
            assert stock_states.differences(everything["state"], TREE) == []
        else:
            with pytest.raises(ValueError, match=error):
                manager.restore(5)
        found = manager.restore(5, **named)
    assert stock_states.differences(found["state"], TREE) == []
    assert found["config"] == CONFIG


@NO_SHARDING
def test_stock_orbax_refuses_every_folder_that_it_has_no_handler_for(tmp_path: pathlib.Path) -> None:
    """Why our view cannot help: a step of its own, with a folder that its metadata calls JSON, is refused likewise."""
    save_state_and_config(tmp_path, ocp.CheckpointManager)
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers()) as manager:
        assert manager.restore(5)["config"] == CONFIG
    metadata = tmp_path / "5" / "_CHECKPOINT_METADATA"
    step = json.loads(metadata.read_text())
    step["item_handlers"]["beside"] = step["item_handlers"]["config"]
    metadata.write_text(json.dumps(step))
    shutil.copytree(tmp_path / "5" / "config", tmp_path / "5" / "beside")
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.restore(5)["beside"] == CONFIG
    manager = ocp.CheckpointManager(tmp_path, item_handlers=handlers())
    with manager, pytest.raises(ValueError, match=NO_HANDLER):
        manager.restore(5)


@pytest.mark.skipif(IS_OLD, reason="v1 of Orbax 0.11.33 reads no items of JSON")
@NO_SHARDING
def test_stock_v1_is_told_what_to_load(tmp_path: pathlib.Path) -> None:
    """Without names it loads every folder."""
    save_state_and_config(tmp_path)
    with ocp.v1.training.Checkpointer(tmp_path) as c:
        assert set(c.load_checkpointables(5)) == {"state", "config", "process_0"}
        found = c.load_checkpointables(5, {"state": None, "config": None})
    assert stock_states.differences(found["state"], TREE) == []
    assert found["config"] == CONFIG


BARE: dict[str, Any] = {
    "array": np.arange(4.0),
    "jax array": jnp.arange(6.0).reshape(2, 3),
    "bfloat16": jnp.ones(2, jnp.bfloat16),
    "no dimensions": jnp.float32(1.5),
    "key": jax.random.key(3),
    "int": 5,
    "float": 0.5,
    "bool": True,
    "text": "hi",
}


def assert_restores(manager_class: Any, directory: pathlib.Path, args: Any, expected: Any) -> None:
    """A manager of this class reads the same value, of the same type."""
    with manager_class(directory) as manager:
        found = manager.restore(5) if args is None else manager.restore(5, args=args)
    assert stock_states.differences({"": found}, {"": expected}) == [], (manager_class, args)


@pytest.mark.slow
@NO_SHARDING
@pytest.mark.parametrize("kind", ["PyTree", "Standard", "Array"])
def test_an_item_that_is_no_tree_is_read_by_every_version(tmp_path: pathlib.Path, kind: str) -> None:
    """Alone, and beside other items; without arguments, but Orbax 0.11.33 is given a sharding where there is one."""
    for name, value in BARE.items():
        if kind == "Array" and name == "text":
            continue  # that handler takes none
        save_args = getattr(ocp.args, f"{kind}Save")(value)
        with ec.CheckpointManager(tmp_path / "alone" / name) as manager:
            manager.save(5, args=save_args)
        with ec.CheckpointManager(tmp_path / "two" / name) as manager:
            manager.save(5, args=ocp.args.Composite(value=save_args, config=ocp.args.JsonSave({"a": 1})))
        alone, two = None, None
        if IS_OLD and kind != "Array" and isinstance(value, jax.Array):
            alone = ocp.args.StandardRestore(ocp.utils.to_shape_dtype_struct(value))
            two = ocp.args.Composite(value=alone, config=ocp.args.JsonRestore())
        for reader in (ec.CheckpointManager, ocp.CheckpointManager):
            assert_restores(reader, tmp_path / "alone" / name, alone, value)
            with reader(tmp_path / "two" / name) as manager:
                found = manager.restore(5, args=two)
            assert stock_states.differences({"": found["value"]}, {"": value}) == [], (reader, name)
            assert found["config"] == {"a": 1}


@pytest.mark.slow
@pytest.mark.skipif(IS_OLD, reason="Orbax 0.11.33 cannot save such an item; the test above is about reading")
@NO_SHARDING
@pytest.mark.parametrize("value", list(BARE))
def test_an_item_that_is_no_tree_is_read_by_both(tmp_path: pathlib.Path, value: str) -> None:
    """A handler of trees gives the leaf no name, that of arrays calls it `checkpoint`."""
    expected = BARE[value]
    target = ocp.utils.to_shape_dtype_struct(expected) if isinstance(expected, jax.Array) else expected
    kinds = {"PyTree": [None, ocp.args.PyTreeRestore(), ocp.args.PyTreeRestore(target)]}
    kinds["Standard"] = [None, ocp.args.StandardRestore()]
    if value != "text":
        kinds["Array"] = [None, ocp.args.ArrayRestore()]
        kinds["Standard"].append(ocp.args.StandardRestore(target))
    for kind, restores in kinds.items():
        for writer in (ec.CheckpointManager, ocp.CheckpointManager):
            if writer is ocp.CheckpointManager and kind == "Standard":
                continue  # it refuses to save them
            directory = tmp_path / f"{kind} {writer.__module__}"
            with writer(directory) as manager:
                manager.save(5, args=getattr(ocp.args, f"{kind}Save")(expected))
            for reader in (ec.CheckpointManager, ocp.CheckpointManager):
                for args in restores:
                    assert_restores(reader, directory, args, expected)


def test_a_text_that_stock_orbax_saved_is_read(tmp_path: pathlib.Path) -> None:
    """Every version of it can save a text that is an item by itself, which has no arrays."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.PyTreeSave("hi"))
    for args in (None, ocp.args.PyTreeRestore(), ocp.args.PyTreeRestore("")):
        assert_restores(ec.CheckpointManager, tmp_path, args, "hi")


@NO_SHARDING
def test_keys_of_any_characters_are_read_by_both(tmp_path: pathlib.Path) -> None:
    """Also those whose base64, in `_sharding`, is another one in URLs (`?>`), and those that end in a slash."""
    keys = ["🙂", ".", "..", "", "a\nb", "\t", "\0", "ü?>", "a/b", "a//b", "a/", "b//", "//", "~1", "a~b"]
    tree = {"p": {key: jnp.arange(3.0) + number for number, key in enumerate(keys)}, ".": 5, "//": np.ones(2)}
    for number, writer in enumerate((ec.CheckpointManager, ocp.CheckpointManager)):
        with writer(tmp_path / str(number)) as manager:
            manager.save(5, args=ocp.args.StandardSave(tree))
        for reader in (ec.CheckpointManager, ocp.CheckpointManager):
            for args in (ocp.args.StandardRestore(), ocp.args.PyTreeRestore()):
                assert_restores(reader, tmp_path / str(number), args, tree)
    assert unsupported(tmp_path / "0") == {}
    names = [set(json.loads((tmp_path / each / "5" / "default" / "_sharding").read_text())) for each in ("0", "1")]
    assert names[0] == names[1]


@NO_SHARDING
@pytest.mark.parametrize("key", ["", "/"])
def test_an_array_whose_whole_name_is_empty_is_read_by_both(tmp_path: pathlib.Path, key: str) -> None:
    """A slash alone is no name for TensorStore, either. Orbax 0.11.33 cannot save such arrays, but reads ours."""
    tree = {key: np.arange(3.0), "w": jnp.ones(2)}
    for writer in (ec.CheckpointManager,) if IS_OLD else (ec.CheckpointManager, ocp.CheckpointManager):
        with writer(tmp_path / writer.__module__) as manager:
            manager.save(5, args=ocp.args.StandardSave(tree))
        for reader in (ec.CheckpointManager, ocp.CheckpointManager):
            for args in (ocp.args.StandardRestore(), ocp.args.PyTreeRestore()):
                assert_restores(reader, tmp_path / writer.__module__, args, tree)


@NO_SHARDING
@pytest.mark.parametrize(
    "leaves",
    [
        pytest.param({"": jnp.ones(2)}, id="jax.Array without a name"),
        pytest.param({"": jax.random.key(0)}, id="random key without a name"),
        pytest.param({"a/b": "hi"}, id="text with a slash"),
        pytest.param({"a~b": "hi"}, id="text with a tilde"),
        pytest.param({"p": np.ones(1), "p/": np.zeros(1)}, id="names that differ by a last slash"),
    ],
)
def test_a_leaf_that_would_make_all_of_stock_orbaxs_restore_fail_is_left_out(
    tmp_path: pathlib.Path, leaves: dict[str, Any]
) -> None:
    """The rest of the item is read, by every version."""
    tree = {**leaves, "w": jnp.ones(2)}
    save(tmp_path, tree)
    assert len(unsupported(tmp_path)["default"]) == len(leaves)
    for args in (None, ocp.args.StandardRestore(), ocp.args.PyTreeRestore()):
        assert_restores(ocp.CheckpointManager, tmp_path, args, {"w": tree["w"]})
        assert_restores(ec.CheckpointManager, tmp_path, args, tree)


@pytest.mark.slow
def test_stock_orbax_needs_no_target(tmp_path: pathlib.Path) -> None:
    """It finds shardings, keys, scalars, JSON, metrics and metadata by itself, and single subtrees."""
    save_two_items(tmp_path / "run")
    arguments = {"directory": str(tmp_path / "run"), "epoch": 5}
    (found,) = stock("without_target", arguments)
    assert found == {
        "differences": [],
        "shardings": True,
        "config": {"a": [1]},
        "shape": [16, 24],
        "metrics": {"loss": 0.5},
        "custom": {"by": "us"},
    }
    assert stock("subset", arguments) == [[]]


def test_tensorstore_and_safetensors_read_the_same_bytes(tmp_path: pathlib.Path) -> None:
    """The index names each chunk once, in a node's data file, which is still a valid safetensors file."""
    save(tmp_path, stock_states.plain())
    folder = tmp_path / "5" / "default"
    base = ts.KvStore.open(f"file://{folder}/").result()
    (version,) = ts.ocdbt.dump(base).result()["versions"]
    entries = ts.ocdbt.dump(base, version["root"]["location"]).result()["entries"]
    assert [e["key"] for e in entries] == database(folder).list().result()
    assert version["root"]["statistics"]["num_keys"] == len(entries)
    pieces = [e["indirect_value"] for e in entries if "indirect_value" in e]
    shards = load_file(tmp_path / "5" / "process_0" / "default.safetensors")
    assert len(set(pieces)) == len(pieces) == len(shards)
    assert {p.split(":")[2] for p in pieces} == {"process_0/default.safetensors"}
    assert sum(int(p.rpartition(":")[2]) for p in pieces) == sum(s.nbytes for s in shards.values())
    expected = np.asarray(stock_states.plain()["params"]["both"])
    np.testing.assert_array_equal(array(folder, "params.both"), expected)
    np.testing.assert_array_equal(shards["params/both[0:8,0:12]"], expected[:8, :12])


def test_all_types(tmp_path: pathlib.Path) -> None:
    """Every dtype is either read by TensorStore with the same bits, or left out and said so."""
    rng = np.random.default_rng(1)
    tree = {}
    for name, dtype in dtypes().items():
        raw = rng.integers(0, 2 if name == "bool" else 256, size=24 * dtype.itemsize, dtype=np.uint8)
        narrow = name in ("int1", "int2", "int4", "uint1", "uint2", "uint4")
        tree[name] = raw.astype(np.int8).astype(dtype) if narrow else (raw & 15 if "4_" in name else raw).view(dtype)
    save(tmp_path, tree)
    noted = set(unsupported(tmp_path)["default"])
    for name in dtypes().keys() - noted:
        assert array(tmp_path / "5" / "default", name).tobytes() == tree[name].tobytes(), name
    for name in noted:  # TensorStore's zarr has no such type
        metadata = {"dtype": name, "shape": [1], "chunks": [1], "compressor": None}
        with pytest.raises(ValueError, match="dtype"):
            ts.open({"driver": "zarr", "kvstore": "memory://", "metadata": metadata}, create=True).result()


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_what_orbax_cannot_express_is_left_out_and_named(tmp_path: pathlib.Path) -> None:
    """The rest is still right, and we still read everything."""
    tree = {
        "good": jnp.arange(3.0),
        "a.b": jnp.ones(1),
        "a": {"b": jnp.zeros(1)},
        "none": np.zeros((0, 3)),
        "huge": 2**70,
        "z": 1j,
        "raw": b"bytes",
        "": jnp.ones(2),
        "text": "héllo",
        "when": np.array(["2026-01-02"], dtype="datetime64[s]"),
    }
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        got = manager.restore(5, args=ocp.args.StandardRestore(tree))
    assert stock_states.differences(got, tree) == []
    assert set(unsupported(tmp_path)["default"]) == {"a.b", "a/b", "none", "huge", "z", "raw", "%", "when"}
    read = ocp.PyTreeCheckpointer().restore(tmp_path / "5" / "default")
    assert set(read) == {"good", "text"}
    assert read["text"] == "héllo"
    np.testing.assert_array_equal(read["good"], np.arange(3.0))


def gaps() -> dict[str, Any]:
    """Sequences with elements that Orbax cannot have: first, last, between, deep, under names that it cannot say."""
    w = np.arange(3.0)
    return {
        "first": [np.zeros((0, 3)), w],
        "last": (w, b"raw"),
        "between": [w, 2**70, w, 1j, {"x": w, "y": b""}],
        "jax": [jnp.zeros((2, 0)), jnp.ones(2)],
        "deep": [{"a": {"b": 2**70}, "c": [1j]}, w, [[b""], [w, b""]]],
        "unnamed": [w, {"": w}, {"a.b": w, "a": {"b": w}}, {"": w, "c": b""}],
        "gone": [2**70, [1j]],
        "order": [w] * 9 + [b"", w, b"", w],
        "struct": optax.ScaleByAdamState(jnp.zeros([], jnp.int32), {"w": jnp.zeros((0,))}, [jnp.zeros(0), jnp.ones(1)]),
    }


def without_gaps() -> dict[str, Any]:
    """What stock Orbax has of it."""
    w = np.arange(3.0)
    return {
        "first": [None, w],
        "last": [w, None],
        "between": [w, None, w, None, {"x": w}],
        "jax": [None, np.ones(2, np.float32)],
        "deep": [{"a": {"b": None}, "c": [None]}, w, [[None], [w, None]]],
        "unnamed": [w, {"": w}, None, {"": w}],
        "order": [w] * 9 + [None, w, None, w],
        "struct": {"count": np.array(0, np.int32), "nu": [None, np.ones(1, np.float32)]},
    }


def plain_tree(tree: Any) -> Any:
    """Arrays as (dtype, list)."""
    return jax.tree.map(lambda x: (np.asarray(x).dtype.name, np.asarray(x).tolist()), tree)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("where", ["in place", "export"])
def test_a_left_out_element_of_a_sequence_is_none(tmp_path: pathlib.Path, where: str) -> None:
    """A gap would make the whole item unreadable: with and without target, v0 and v1; it stays noted as left out."""
    save(tmp_path / "run", gaps())
    step = tmp_path / "run" / "5"
    if where == "export":
        done = ec.export(tmp_path / "run", 5, tmp_path / "out", skip_unsupported=True)
        assert done.unsupported == unsupported(tmp_path / "run")
        step = tmp_path / "out" / "5"
    noted = unsupported(tmp_path / "run")["default"]
    assert {"first/0", "between/1", "unnamed/2/a.b", "gone/0", "gone/1/0"} <= noted.keys()
    expected = plain_tree(without_gaps())
    assert plain_tree(ocp.StandardCheckpointer().restore(step / "default")) == expected
    assert plain_tree(ocp.PyTreeCheckpointer().restore(step / "default")) == expected
    with ocp.CheckpointManager(step.parent, item_names=("default",)) as manager:
        read = manager.restore(5, args=ocp.args.Composite(default=ocp.args.StandardRestore()))
    assert plain_tree(read["default"]) == expected
    target = without_gaps()
    assert plain_tree(ocp.StandardCheckpointer().restore(step / "default", target)) == expected
    target["first"][0] = np.zeros((0, 3))  # what was saved fits, too
    target["deep"][0]["a"]["b"] = 7
    assert plain_tree(ocp.StandardCheckpointer().restore(step / "default", target)) == expected
    assert plain_tree(ocp.PyTreeCheckpointer().restore(step / "default", item=target)) == expected
    for asked in (None, target):
        assert plain_tree(ocp.v1.load_checkpointables(step, {"default": asked})["default"]) == expected
    with ec.CheckpointManager(tmp_path / "run") as ours:
        got = ours.restore(5, args=ocp.args.StandardRestore(gaps()))
    assert repr(jax.tree.leaves(got)) == repr(jax.tree.leaves(gaps()))


def test_an_item_without_any_leaf_for_orbax_is_left_out(tmp_path: pathlib.Path) -> None:
    """Stock Orbax would stumble over it; the other items, and the same item in another epoch, are there."""
    nothing: dict[str, Any] = {"a": [2**70, b""], "none": np.zeros((0, 3))}
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch, state in enumerate((nothing, {"a": [1, b""]}, nothing)):
            args = {"state": ocp.args.StandardSave(state), "bare": ocp.args.StandardSave(np.zeros((0, 3)))}
            manager.save(epoch, args=ocp.args.Composite(**args, good=ocp.args.StandardSave({"w": jnp.ones(2)})))
        manager.wait_until_finished()
        assert all(manager.verify(epoch).ok for epoch in range(3))
    for epoch in (0, 2):
        noted = json.loads((tmp_path / str(epoch) / "epoch.json").read_bytes())["orbax_unsupported"]
        assert "any of its leaves: a/0 (Orbax has no type for this int), " in noted["state"]["*"]
        assert noted["bare"].keys() == {"*"}
        assert not (tmp_path / str(epoch) / "state").exists()
        with ocp.CheckpointManager(tmp_path) as stock_manager:
            assert set(stock_manager.restore(epoch).keys()) >= {"good"}
    assert ocp.PyTreeCheckpointer().restore(tmp_path / "1" / "state") == {"a": [1, None]}


def test_text_with_a_lone_surrogate_is_left_out(tmp_path: pathlib.Path) -> None:
    """`_strings.json` stays valid JSON; what a text holds in one epoch does not show in the next."""
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch, text in enumerate(("\U0001f600", "a\udc80", "")):
            manager.save(epoch, args=ocp.args.StandardSave({"text": text, "more": ["é", text]}))
        manager.wait_until_finished()
        assert manager.restore(1)["text"] == "a\udc80"
    for epoch, expected in enumerate(("\U0001f600", None, "")):
        assert ocp.PyTreeCheckpointer().restore(tmp_path / str(epoch) / "default") == {
            "more": ["é", expected],
            **({} if expected is None else {"text": expected}),
        }
        noted = json.loads((tmp_path / str(epoch) / "epoch.json").read_bytes())["orbax_unsupported"]
        reason = "Orbax cannot store a lone surrogate"
        assert noted == ({"default": {"more/1": reason, "text": reason}} if epoch == 1 else {})
        texts = json.loads((tmp_path / str(epoch) / "default" / "_strings.json").read_bytes())
        assert all(value.encode() is not None for value in texts.values())


def test_items_that_orbax_can_have_nothing_of(tmp_path: pathlib.Path) -> None:
    """Bytes alone, what differs per node, and more cells than an index should hold: no folder, and a note.

    `tests/convert/test_export.py` saves an item that has too many cells.
    """
    with ec.CheckpointManager(tmp_path) as manager:
        items = {"raw": ocp.args.StandardSave(b"alone"), "many": ocp.args.StandardSave({str(i): i for i in range(9)})}
        manager.save(5, args=ocp.args.Composite(**items, own=ec.args.NodeSave({"position": 3})))
        manager.wait_until_finished()
        assert set(unsupported(tmp_path)) == {"raw", "own"}
        assert not (tmp_path / "5" / "raw").exists()
        assert not (tmp_path / "5" / "own").exists()
        record = manager.components.directory.epoch_directory.read_record(5)
    view, noted = Views(max_entries=3).note(record)
    assert view is not None
    assert noted.orbax_unsupported is not None
    assert "more than 3" in noted.orbax_unsupported["many"]["*"]
    assert "many" not in view.folders
    assert noted.orbax_view is not None
    assert not any(path.startswith("many/") for path in noted.orbax_view)


@pytest.mark.long
def test_the_largest_index_that_tensorstore_reads(tmp_path: pathlib.Path) -> None:
    """One entry more is too many for it."""
    entries = {b"%d" % i: b"" for i in range(ocdbt.MAX_ENTRIES)} | {b"0": b"first"}
    for _ in range(2):
        folder = tmp_path / str(len(entries))
        folder.mkdir()
        for name, data in ocdbt.Index(entries).files({}, bytes(16), 0).items():
            (folder / name).write_bytes(data)
        entries[b"more"] = b""
    fits, over = sorted(tmp_path.iterdir())
    assert database(fits).read(b"0").result().value == b"first"
    with pytest.raises(ValueError, match="arity"):
        database(over).read(b"0").result()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has the index of no further view be made."""

    def value(_: bytes) -> int:
        raise KeyError("a bug")

    return functools.partial(monkeypatch.setattr, google_crc32c, "value", value)


def test_links_of_nodes_to_items_without_a_view_do_not_stay(
    tmp_path: pathlib.Path, broken: Callable[[], None], faults: Faults
) -> None:
    """What each node of a job makes is what the primary would have made, and is removed where the view is not."""
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(stock_states.plain()),
        keys=ocp.args.JaxRandomKeySave(jax.random.key(1)),
        empty=ocp.args.StandardSave({"none": np.zeros(0)}),
    )
    made = list[str]()

    def as_in_a_job(call: StoreCall) -> None:
        node_folder, _ = os.path.split(call.path)
        folder, node = os.path.split(node_folder)
        bases = ["state", "keys/jax_random_key", "empty"]
        linked_view.link_node(call.store, folder, node, False, bases)
        made.extend(os.readlink(f"{call.store.root}/{folder}/{base}/{node}") for base in bases)

    def view_of(directory: pathlib.Path, **storage: Any) -> set[tuple[str, str]]:
        with ec.CheckpointManager(directory, node="a b", storage=ec.StorageOptions(**storage)) as manager:
            manager.save(5, args=items)
            manager.wait_until_finished()
            assert manager.verify(5).ok
        found = (directory / "5").rglob("*")
        return {(str(p.relative_to(directory)), os.readlink(p) if p.is_symlink() else "") for p in found}

    expected = view_of(tmp_path / "alone")
    faults.before(Store.create, as_in_a_job, where=lambda call: call.path.endswith("/node.json"))
    assert view_of(tmp_path / "job") == expected
    assert made == ["../x-a-20b", "../../x-a-20b", "../x-a-20b"]
    broken()
    left = {path for path, _ in view_of(tmp_path / "lost")}
    assert left == {path for path, _ in expected if path.startswith("5/x-a-20b")} | {"5/x-a-20b", "5/epoch.json"}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_values_change_from_epoch_to_epoch(tmp_path: pathlib.Path) -> None:
    """What is kept from the last save never shows in the next: numbers, strings, types, arrays, trees."""
    trees: list[Any] = [
        {"w": jnp.zeros(2), "step": 1, "name": "one", "big": 5},
        {"w": jnp.ones(2), "step": 2, "name": "another", "big": 2**70},
        {"w": jnp.ones(2), "step": -3, "name": "", "big": 6},
        {"w": jnp.ones(2), "step": 2.5, "name": "x", "big": 7},
        {"w": jnp.ones(3), "step": 2.5, "more": True},
    ]
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch, tree in enumerate(trees):
            manager.save(epoch, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    for epoch, tree in enumerate(trees):
        expected = {k: v for k, v in tree.items() if (epoch, k) != (1, "big")}
        read = ocp.PyTreeCheckpointer().restore(tmp_path / str(epoch) / "default")
        assert {k: np.asarray(v).tolist() for k, v in read.items()} == {
            k: np.asarray(v).tolist() for k, v in expected.items()
        }


def _tar(source: pathlib.Path, target: pathlib.Path) -> None:
    with tarfile.open(target.with_suffix(".tar"), "w") as archive:
        archive.add(source, arcname=target.name)
    with tarfile.open(target.with_suffix(".tar")) as archive:
        known = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        archive.extractall(target.parent, **known)  # type: ignore[arg-type]


def _unzip(archive: pathlib.Path, target: pathlib.Path) -> None:
    shutil.unpack_archive(archive, target)


def _zip(source: pathlib.Path, target: pathlib.Path) -> None:
    archive = target.with_suffix(".zip")
    subprocess.run(["zip", "-qr", archive, "."], cwd=source, check=True)  # follows links
    _unzip(archive, target)


def _zip_by_python(source: pathlib.Path, target: pathlib.Path) -> None:
    _unzip(pathlib.Path(shutil.make_archive(str(target), "zip", source)), target)


COPIES: dict[str, Any] = {
    "cp -r": lambda a, b: subprocess.run(["cp", "-r", a, b], check=True),
    "cp -rL": lambda a, b: subprocess.run(["cp", "-rL", a, b], check=True),
    "shutil.copytree": lambda a, b: shutil.copytree(a, b),
    "rsync -a": lambda a, b: subprocess.run(["rsync", "-a", f"{a}/", b], check=True),
    "tar": _tar,
    "zip -r": _zip,
    "shutil.make_archive zip": _zip_by_python,  # drops links to folders
}


@pytest.mark.slow
@pytest.mark.parametrize("way", list(COPIES))
def test_copies_are_read_by_everybody(tmp_path: pathlib.Path, way: str) -> None:
    """Links that were kept and links that became files: our reader, safetensors and (but for one way) stock Orbax."""
    if way.startswith(("rsync", "zip")) and shutil.which(way.split()[0]) is None:
        pytest.skip("no such program here")
    tree = stock_states.plain()
    save(tmp_path / "run", tree)
    COPIES[way](tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    with ec.CheckpointManager(tmp_path / "copy", options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        found = manager.verify(5)
        assert found.ok
        assert bool(found.view_damage) == (way == "shutil.make_archive zip")
        assert stock_states.differences(manager.restore(5, args=ocp.args.StandardRestore(tree)), tree) == []
    assert "list/0[0:2]" in load_file(tmp_path / "copy" / "5" / "process_0" / "default.safetensors")
    if way == "shutil.make_archive zip":
        assert not any((tmp_path / "copy" / "5" / "default" / "process_0").iterdir())
        assert ec.repair_view(tmp_path / "copy", 5) == ["default", "pytree", "state"]
    target = stock_states.abstract(tree)
    read = ocp.StandardCheckpointer().restore(tmp_path / "copy" / "5" / "default", target)
    assert stock_states.differences(read, tree) == []


def test_our_reader_ignores_the_view(tmp_path: pathlib.Path) -> None:
    """Damaged, hostile or absent: it changes nothing for us."""
    tree = stock_states.plain()
    save(tmp_path / "run", tree)
    view = tmp_path / "run" / "5" / "default"
    (view / "index.0").write_bytes(b"garbage")
    (view / "process_0").unlink()
    (view / "process_0").symlink_to("/etc")
    for remove in (False, True):
        if remove:
            shutil.rmtree(view)
        with ec.CheckpointManager(tmp_path / "run") as manager:
            assert manager.verify(5).ok
            assert stock_states.differences(manager.restore(5, args=ocp.args.StandardRestore(tree)), tree) == []


def test_no_view_where_none_is_wanted_or_possible(tmp_path: pathlib.Path) -> None:
    """`orbax_view=False`, and object stores."""
    save(tmp_path, {"a": jnp.ones(2)}, orbax_view=False)
    assert sorted(os.listdir(tmp_path / "5")) == ["epoch.json", "process_0"]
    assert unsupported(tmp_path) is None
    with ec.CheckpointManager(f"memory://{uuid.uuid4().hex}/run") as manager:
        manager.save(5, args=ocp.args.StandardSave({"a": jnp.ones(2)}))
        manager.wait_until_finished()
        assert manager.verify(5).ok
    with pytest.raises(ec.EpochCheckpointError, match="orbax_view"):
        ec.StorageOptions(orbax_view=1)  # type: ignore[arg-type]


def test_a_view_that_cannot_be_built_costs_no_epoch(tmp_path: pathlib.Path, broken: Callable[[], None]) -> None:
    """It is logged and noted in the record, and the epoch is committed without one."""
    broken()
    save(tmp_path, {"a": jnp.ones(2, ml_dtypes.bfloat16)})
    assert unsupported(tmp_path) == {"*": {"*": "KeyError: 'a bug'"}}
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [5]
        assert manager.verify(5).ok


def test_the_recorded_shardings_are_what_orbax_itself_would_record() -> None:
    """Orbax's own metadata class writes the same text, key for key."""
    array = stock_states.place(np.ones((4, 4), np.float32), "x", "y")

    leaves = [array, jax.device_put(1.0, jax.devices()[2])]
    forms = plan.forms_of(plan.leaf_keys(leaves), leaves, lambda leaf: ("default", str(leaf)))
    item = plan.plan_item(
        "default",
        [(("k", "a"),), (("k", "b"),)],
        forms,
        node=0,
        node_of_process={0: 0},
        replica_split_bytes=1 << 20,
        part_bytes=None,
    ).item
    found = [json.loads(str(parameters.sharding_text(item, row))) for row in item.shardings]
    named = ocp.metadata.NamedShardingMetadata.from_jax_sharding(array.sharding).to_serialized_string()
    single = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    lone = ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(single).to_serialized_string()
    assert found == [json.loads(named), json.loads(lone)]


def test_the_shardings_of_a_large_job_name_no_devices(tmp_path: pathlib.Path) -> None:
    """For every leaf Orbax would list all devices; without them it takes JAX's, and restores to the same sharding.

    There are few devices here: the name of an axis makes the shardings as long.
    """
    axis = "x" * 2**18
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(jax.devices()[:4], (axis,)), jax.sharding.PartitionSpec(axis)
    )
    tree = {str(i): jax.device_put(np.arange(4, dtype=np.float32) + i, sharding) for i in range(40)}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(4, args=ocp.args.StandardSave({name: tree[name] for name in "12"}))
        manager.save(5, args=ocp.args.StandardSave(tree))
    assert "device_mesh" in (tmp_path / "4" / "default" / "_sharding").read_text()
    assert "device_mesh" not in (tmp_path / "5" / "default" / "_sharding").read_text()
    with ocp.StandardCheckpointer() as stock:
        found = stock.restore(tmp_path / "5" / "default")
    for name, array in tree.items():
        assert found[name].sharding == sharding
        assert np.array_equal(found[name], array)


def test_what_stock_orbax_will_not_see_is_logged_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """For each item, and not with every commit again."""
    dates = np.array(["2020-01-01"], "M8[D]")
    items = {name: ocp.args.StandardSave({"t": dates, "w": np.ones(2)}) for name in "abcd"}
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch in range(3):
            manager.save(epoch, args=ocp.args.Composite(**items))
    said = [record.getMessage() for record in caplog.records if "stock Orbax will not see" in record.getMessage()]
    assert sorted(line.split(":")[0] for line in said) == [f"item {name}" for name in "abcd"]
