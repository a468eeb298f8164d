"""`import_`: files of flax and safetensors become epochs, bit for bit; one that is not what it says becomes nothing."""

import json
import os
import pathlib
import random
import struct
import uuid
from collections.abc import Callable
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.flax
import safetensors.numpy
from flax import nnx

import epochckpt as ec
from epochckpt.arrays.save_items import TreeItem
from epochckpt.convert import import_sources
from epochckpt.errors import (
    BufferChangedError,
    EpochExistsError,
    FormatError,
    InvalidArgumentError,
    NotACheckpointDirectoryError,
    SaveError,
    UnsupportedError,
)
from epochckpt.format import flax_msgpack
from epochckpt.format import safetensors as headers
from epochckpt.format import tree as tree_lib
from epochckpt.format.tree import dtypes
from epochckpt.storage import Store, mapped, mmap
from epochckpt.testing import Faults, StoreCall
from tests.support import prepared, stock_states
from tests.support.processes import run_worker

DEVICES = 4


def restored(directory: Any, epoch: int = 3) -> Any:
    """An epoch as it was saved; every byte of it is verified."""
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.verify(epoch).ok
        return manager.restore(epoch)


def same(found: Any, expected: Any) -> None:
    """The same tree, types and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert stock_states.differences(found, expected) == []
    assert [type(x) for x in jax.tree.leaves(found)] == [type(x) for x in jax.tree.leaves(expected)]


def all_types() -> dict[str, np.ndarray]:
    """An array of every dtype that flax can write."""
    rng = np.random.default_rng(1)
    tree = {}
    for name, dtype in dtypes().items():
        raw = rng.integers(0, 2, size=24 * dtype.itemsize, dtype=np.uint8)
        narrow = name in ("int1", "int2", "int4", "uint1", "uint2", "uint4")
        tree[name] = (raw.astype(np.int8).astype(dtype) if narrow else raw.view(dtype)).reshape(2, 3, -1)
    return tree


def mixed() -> dict[str, Any]:
    """What else a file of flax can hold."""
    return {
        "arrays": {"empty": np.zeros((0, 3)), "scalar": np.array(2.5, np.float32), "large": np.arange(50_000)},
        "numpy": [np.float32(1.5), np.int8(-3), ml_dtypes.bfloat16(2)],
        "python": {"int": -(2**40), "big": 2**64 - 1, "float": -0.0, "flag": True, "none": None, "complex": 1 - 2j},
        "text": "épocha" * 50,
        "raw": b"\x00\xff",
        "when": np.array(["2026-01-02", "NaT"], dtype="datetime64[s]"),
        "none of it": {"dict": {}, "list": []},
    }


def test_every_type_of_flax_comes_back_bit_for_bit(tmp_path: pathlib.Path) -> None:
    """As flax itself reads the file: dtypes, shapes, NumPy and Python scalars, complex numbers, empty containers."""
    tree = {"types": all_types(), **mixed()}
    (tmp_path / "x.msgpack").write_bytes(flax.serialization.msgpack_serialize(tree))
    status = ec.import_(tmp_path / "x.msgpack", tmp_path / "run", 3, metrics={"a": 1}, custom_metadata={"b": 2})
    assert (status.epoch, status.state) == (3, "committed")
    same(restored(tmp_path / "run"), tree)
    tree["types"] = {
        k: v for k, v in tree["types"].items() if k in ("bool", "bfloat16", "float32", "int8", "complex64")
    }
    data = flax.serialization.msgpack_serialize(tree)
    (tmp_path / "y").write_bytes(data)
    ec.import_(tmp_path / "y", tmp_path / "run", 4)
    same(restored(tmp_path / "run", 4), flax.serialization.msgpack_restore(data))
    with ec.CheckpointManager(tmp_path / "run") as manager:
        assert manager.metrics(3) == {"a": 1}
        assert manager.metadata(3).custom_metadata == {"b": 2}


@pytest.mark.slow
def test_stock_orbax_restores_imported_states_of_flax(tmp_path: pathlib.Path) -> None:
    """Linen with its optimizer: `to_bytes`, `import_`, stock Orbax, `from_state_dict`."""
    (tmp_path / "x.msgpack").write_bytes(flax.serialization.to_bytes(stock_states.linen()))
    ec.import_(tmp_path / "x.msgpack", tmp_path / "run", 3)
    arguments = {"directories": {"linen": str(tmp_path / "run")}, "epoch": 3}
    (found,) = run_worker("tests.support.stock_reader:flax_states", arguments, 1, DEVICES, imported=prepared.STOCK)
    assert found == {"linen": []}


@pytest.mark.slow
def test_states_of_nnx_come_back_as_flax_reads_them(tmp_path: pathlib.Path) -> None:
    """Parameters and optimizer of an NNX model, as pure dicts."""
    state = {name: nnx.to_pure_dict(part) for name, part in stock_states.nnx_state().items()}
    arrays = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)
    data = flax.serialization.to_bytes(arrays)
    (tmp_path / "x.msgpack").write_bytes(data)
    ec.import_(tmp_path / "x.msgpack", tmp_path / "run", 3)
    found = restored(tmp_path / "run")
    same(found, flax.serialization.msgpack_restore(data))
    back = flax.serialization.from_state_dict(arrays, found)
    assert stock_states.differences(back, jax.tree.map(np.asarray, arrays)) == []


def test_arrays_that_flax_cut_into_pieces_are_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As flax joins them; nothing of the joining stays on disk."""
    tree = {
        "a": np.arange(1000.0).reshape(10, 100),
        "b": {"c": np.ones((3, 7), np.int8), "d": jnp.ones(500, jnp.bfloat16)},
    }
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 333)
    data = flax.serialization.msgpack_serialize(tree)
    assert data.count(b"__msgpack_chunked_array__") == 2
    (tmp_path / "x.msgpack").write_bytes(data)
    ec.import_(tmp_path / "x.msgpack", tmp_path / "run", 3)
    same(restored(tmp_path / "run"), flax.serialization.msgpack_restore(data))
    assert sorted(os.listdir(tmp_path)) == ["run", "x.msgpack"]
    assert os.listdir(tmp_path / "run") == ["3"]


def test_safetensors_files_become_nested_dicts(tmp_path: pathlib.Path) -> None:
    """Names are split at the separator; with None they stay as they are; every type has its bits."""
    tensors = {
        f"{kind}.{i}.w": jnp.full((4, i), i, kind)
        for kind in ("float32", "bfloat16", "int8", "bool")
        for i in (1, 0, 3)
    }
    safetensors.flax.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "flax"})
    ec.import_(tmp_path / "x.safetensors", tmp_path / "run", 3)
    found = restored(tmp_path / "run")
    assert found.keys() == {"float32", "bfloat16", "int8", "bool"}
    assert all(group.keys() == {"0", "1", "3"} for group in found.values())
    for name, expected in tensors.items():
        kind, i, _ = name.split(".")
        assert stock_states.differences(found[kind][i]["w"], np.asarray(expected)) == []
    ec.import_(tmp_path / "x.safetensors", tmp_path / "run", 4, separator=None, item="weights")
    same(restored(tmp_path / "run", 4)["weights"], {name: np.asarray(x) for name, x in tensors.items()})


def hugging_face(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """A folder of two parts with their index."""
    folder.mkdir(exist_ok=True)
    tensors = {f"layers.{i}.w": np.full((3, i + 1), i, np.float32) for i in range(4)}
    where = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        safetensors.numpy.save_file({n: x for n, x in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return tensors


def test_a_folder_of_hugging_face_becomes_one_epoch(tmp_path: pathlib.Path) -> None:
    """All the parts that the index lists, also through the links that its cache is made of."""
    tensors = hugging_face(tmp_path / "blobs")
    (tmp_path / "model").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    ec.import_(tmp_path / "model", tmp_path / "run", 3, separator=None)
    same(restored(tmp_path / "run"), tensors)


def test_leaves_are_chosen_renamed_and_cast(tmp_path: pathlib.Path) -> None:
    """From parts of Hugging Face: what the plan says is what the epoch has; casts round as JAX does, large ones too."""
    rng = np.random.default_rng(1)
    large = rng.integers(0, 2**32, (3, 300_000), np.uint32).view(np.float32)  # every kind of float
    tensors = {
        "model.layers.0.w": large,
        "model.layers.1.w": np.float32([[1, 2]]),
        "model.norm": np.array(1.5, np.float64),
        "model.empty": np.zeros((0, 3), np.float16),
        "model.ids": np.arange(3),
        "lm_head": np.arange(4, dtype=np.float32),
        "extra": np.ones(2),
    }
    for number, names in enumerate((list(tensors)[:3], list(tensors)[3:])):
        safetensors.numpy.save_file({n: tensors[n] for n in names}, tmp_path / f"model-{number}.safetensors")
    where = {name: f"model-{int(i > 2)}.safetensors" for i, name in enumerate(tensors)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    asked: dict[str, Any] = {
        "exclude": "extra",
        "rename": {"model/layers": "params/blocks", "model": "params", "lm_head": "head/kernel"},
        "dtype": "bfloat16",
    }
    plan = ec.plan_import(tmp_path, tmp_path / "run", 3, **asked)
    assert {leaf.name: (leaf.source, leaf.shape, leaf.dtype, leaf.cast_from) for leaf in plan.leaves} == {
        "params/blocks/0/w": ("model/layers/0/w", (3, 300_000), "bfloat16", "float32"),
        "params/blocks/1/w": ("model/layers/1/w", (1, 2), "bfloat16", "float32"),
        "params/norm": ("model/norm", (), "bfloat16", "float64"),
        "params/empty": ("model/empty", (0, 3), "bfloat16", "float16"),
        "params/ids": ("model/ids", (3,), "int64", ""),
        "head/kernel": ("lm_head", (4,), "bfloat16", "float32"),
    }
    assert plan.nbytes == 2 * (900_000 + 2 + 1 + 4) + 24
    assert not (tmp_path / "run").exists()
    assert plan.write().state == "committed"
    found = restored(tmp_path / "run")
    expected = {
        "blocks": {
            str(i): {"w": np.asarray(jnp.asarray(tensors[f"model.layers.{i}.w"]).astype(jnp.bfloat16))} for i in (0, 1)
        },
        "norm": np.array(1.5, jnp.bfloat16),
        "empty": np.zeros((0, 3), jnp.bfloat16),
        "ids": np.arange(3),
    }
    same(found, {"params": expected, "head": {"kernel": np.arange(4, dtype=jnp.bfloat16)}})
    url = f"memory://{uuid.uuid4().hex}/"  # there arrays are cut into cells
    ec.import_(tmp_path, url, 3, **asked, storage=ec.StorageOptions(part_bytes=500_000, block_bytes=30_000))
    same(restored(url), found)
    (tmp_path / "x.msgpack").write_bytes(
        flax.serialization.msgpack_serialize({"a": {"w": np.ones(3), "n": 1}, "b": 2.5})
    )
    ec.import_(tmp_path / "x.msgpack", tmp_path / "run", 4, include=["a"], rename=lambda n: f"c/{n}", dtype=np.float32)
    same(restored(tmp_path / "run", 4), {"c": {"a": {"w": np.ones(3, np.float32), "n": 1}}})


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"include": "layer/*"}, "no leaf matches 'layer/\\*'; near: 'layers/"),
        ({"exclude": ["layers/0", "wight"]}, "no leaf matches 'wight'"),
        ({"exclude": "layers"}, "include and exclude leave none"),
        ({"rename": {"layers/9": "x"}}, "rename: no leaf matches 'layers/9'; near: 'layers/"),
        ({"rename": {"layers/0": "x", "layers/1": "x"}}, "'layers/0/w' and 'layers/1/w' would both be called 'x/w'"),
        ({"rename": {"layers/0/w": "x", "layers/1": "x"}}, "'layers/0/w' would be called 'x', and 'layers/1/w' lie"),
        ({"rename": {"layers/0/w": ""}}, "which is no name of a leaf"),
        ({"rename": lambda name: None}, "is a NoneType"),
        ({"rename": {"layers": 1}}, "must map names to names"),
        ({"dtype": "int8"}, "no floating type"),
        ({"dtype": "half-ish"}, "no floating type"),
        ({"include": [""]}, "include must be a pattern"),
    ],
)
def test_selections_that_fit_nothing_are_refused(tmp_path: pathlib.Path, asked: dict[str, Any], problem: str) -> None:
    """With near names, before anything is written."""
    hugging_face(tmp_path / "model")
    with pytest.raises(InvalidArgumentError, match=problem):
        ec.plan_import(tmp_path / "model", tmp_path / "run", 3, **asked)
    assert not (tmp_path / "run").exists()


def edit_index(folder: pathlib.Path, edit: Callable[[dict[str, str]], Any]) -> None:
    """Changes the map of an index."""
    path = folder / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    edit(data["weight_map"])
    path.write_text(json.dumps(data))


PART = "model-00002-of-00002.safetensors"
BROKEN_FOLDERS: dict[str, tuple[Callable[[pathlib.Path], Any], str]] = {
    "a part is missing": (lambda f: (f / PART).unlink(), "is missing"),
    "a tensor is missing": (lambda f: edit_index(f, lambda m: m.update(more=PART)), "differ in 'more'"),
    "a tensor is not listed": (lambda f: edit_index(f, lambda m: m.pop("layers.1.w")), "differ in 'layers.1.w'"),
    "a part outside": (lambda f: edit_index(f, lambda m: m.update(x="../secret.safetensors")), "no file beside it"),
    "no tensors": (lambda f: edit_index(f, lambda m: m.clear()), "lists no tensors"),
    "no map": (lambda f: (f / "model.safetensors.index.json").write_text("[1]"), "weight_map"),
    "no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "weight_map"),
}


@pytest.mark.parametrize("damage", list(BROKEN_FOLDERS))
def test_a_folder_that_does_not_fit_its_index_is_refused(tmp_path: pathlib.Path, damage: str) -> None:
    """Nothing is left out in silence, and nothing outside of the folder is read."""
    hugging_face(tmp_path / "model")
    act, problem = BROKEN_FOLDERS[damage]
    act(tmp_path / "model")
    with pytest.raises(FormatError, match=problem):
        ec.import_(tmp_path / "model", tmp_path / "run", 3)
    assert not (tmp_path / "run").exists()


def test_a_folder_must_be_clear(tmp_path: pathlib.Path) -> None:
    """One file, or parts with one index; the message lists what is there."""
    with pytest.raises(InvalidArgumentError, match="found: none"):
        ec.import_(tmp_path, tmp_path / "run", 3)
    for name in ("a", "b"):
        safetensors.numpy.save_file({"x": np.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"found: a\.safetensors, b\.safetensors"):
        ec.import_(tmp_path, tmp_path / "run", 3)
    (tmp_path / "c.msgpack").write_bytes(flax.serialization.msgpack_serialize({"y": np.ones(3)}))
    ec.import_(tmp_path, tmp_path / "run", 3, format="msgpack")
    same(restored(tmp_path / "run"), {"y": np.ones(3)})


@pytest.mark.parametrize("kind", ["posix", "memory"])
def test_what_export_wrote_comes_back_exactly(tmp_path: pathlib.Path, kind: str) -> None:
    """Lists, ints and odd strings as keys, Python values, typed keys, empty containers: the tree that was saved."""
    directory = str(tmp_path / "run") if kind == "posix" else f"memory://{uuid.uuid4().hex}/"
    tree = {
        **{k: v for k, v in stock_states.plain().items() if k != "params"},
        "ints": {7: np.ones(2), -1: {}},
        "odd": {"a.b": {"": np.zeros(1)}, "7": np.arange(3), "list": [[np.ones(1)], {}, (), None]},
        "values": {"int": 2**70, "float": float("nan"), "complex": 1j, "text": "é\ud800", "raw": b"\0", "flag": False},
        "long": {"text": "wörter" * 1000, "raw": b"\x01\x02" * 4000, "bf": ml_dtypes.bfloat16(3), "0d": np.array(2)},
    }
    with ec.CheckpointManager(directory) as manager:
        manager.save(5, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        expected = manager.restore(5)
    ec.export(directory, 5, tmp_path / "out", "safetensors", max_file_bytes=100, separator="/")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    ec.import_(tmp_path / "out", directory, 6)
    found = restored(directory, 6)
    jax_as_numpy = jax.tree.map(lambda x: x if not isinstance(x, jax.Array) or _is_key(x) else np.asarray(x), expected)
    assert repr(jax.tree.leaves(found)) == repr(jax.tree.leaves(jax_as_numpy))
    same({k: v for k, v in found.items() if k != "values"}, {k: v for k, v in jax_as_numpy.items() if k != "values"})
    assert repr(found["values"]) == repr(jax_as_numpy["values"])


def _is_key(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def test_local_files_may_be_given_by_their_urls(tmp_path: pathlib.Path) -> None:
    """As every path."""
    url = f"file://{tmp_path}/a%20b"
    safetensors.numpy.save_file({"a": np.arange(3)}, tmp_path / "a b.safetensors")
    ec.import_(f"{url}.safetensors", tmp_path / "run", 0)
    assert ec.export(tmp_path / "run", 0, url, "safetensors").path == str(tmp_path / "a b")


def test_an_epoch_that_exists_stays_as_it_is(tmp_path: pathlib.Path) -> None:
    """Also a damaged one, and also before anything of the source was looked at."""
    (tmp_path / "x.msgpack").write_bytes(flax.serialization.msgpack_serialize({"y": np.ones(3)}))
    ec.import_(tmp_path / "x.msgpack", tmp_path / "run", 3)
    (tmp_path / "run" / "3" / "process_0" / "node.json").write_text("{}")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(EpochExistsError, match="checkpoint 3 exists"):
        ec.import_(tmp_path / "missing", tmp_path / "run", 3)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_options_name_epochs_and_delete_none(tmp_path: pathlib.Path) -> None:
    """Step names and folder modes are those of the job; what it keeps is its own business."""
    (tmp_path / "x.msgpack").write_bytes(flax.serialization.msgpack_serialize({"y": np.ones(3)}))
    files = ocp.options.FileOptions(path_permission_mode=0o750)
    options = ocp.CheckpointManagerOptions(step_prefix="step", max_to_keep=1, file_options=files)
    for epoch in (1, 2, 3):
        ec.import_(tmp_path / "x.msgpack", tmp_path / "run", epoch, options=options)
    assert sorted(os.listdir(tmp_path / "run")) == ["step_1", "step_2", "step_3"]
    assert (tmp_path / "run" / "step_2").stat().st_mode & 0o777 == 0o750
    assert ec.export(tmp_path / "run", None, tmp_path / "out", options=options).epoch == 3
    assert os.listdir(tmp_path / "out") == ["3"]


def test_wrong_arguments_are_refused(tmp_path: pathlib.Path) -> None:
    """Before anything is written."""
    (tmp_path / "x.msgpack").write_bytes(flax.serialization.msgpack_serialize({"y": np.ones(3)}))
    for problem, source, epoch, more in (
        ("format 'zip'", "x.msgpack", 3, {"format": "zip"}),
        ("separator", "x.msgpack", 3, {"separator": ""}),
        ("item name", "x.msgpack", 3, {"item": "../x"}),
        ("integer of at least 0", "x.msgpack", -1, {}),
        ("metrics holds a object", "x.msgpack", 3, {"metrics": {"x": object()}}),
        ("custom_metadata holds a object", "x.msgpack", 3, {"custom_metadata": {"x": object()}}),
        ("custom_metadata has the key 1", "x.msgpack", 3, {"custom_metadata": {1: 2}}),
        ("custom_metadata must be a dict", "x.msgpack", 3, {"custom_metadata": [1]}),
    ):
        with pytest.raises(InvalidArgumentError, match=problem):
            ec.import_(tmp_path / source, tmp_path / "run", epoch, **more)
    with pytest.raises(UnsupportedError, match="only local files"):
        ec.import_("gs://bucket/x.msgpack", tmp_path / "run", 3)
    with pytest.raises(FileNotFoundError):
        ec.import_(tmp_path / "missing.msgpack", tmp_path / "run", 3)
    assert not (tmp_path / "run").exists()
    with pytest.raises(NotACheckpointDirectoryError):
        ec.import_(tmp_path / "x.msgpack", tmp_path / "x.msgpack", 3)


def refused(source: str, directory: str) -> str:
    """What a process of a job is told."""
    with pytest.raises(UnsupportedError) as caught:
        ec.import_(source, directory, 3)
    return str(caught.value)


@pytest.mark.slow
def test_a_job_of_several_processes_is_told_to_import_before(tmp_path: pathlib.Path) -> None:
    """Every process, at once, instead of waiting for the others."""
    arguments = {"source": str(tmp_path / "x.msgpack"), "directory": str(tmp_path / "run")}
    answers = run_worker("tests.convert.test_import_files:refused", arguments, 2)
    assert ["one process" in answer for answer in answers] == [True, True]
    assert not (tmp_path / "run").exists()


# -- files that are not what they say ---------------------------------------------------------------------------------


def _tensors(header: Any, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(start: int, stop: int, shape: list[Any], dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def _note(**changes: Any) -> bytes:
    note = {"version": 1, "separator": ".", "tensors": {}, "values": [], **changes}
    return _tensors({"__metadata__": {"epochckpt": json.dumps(note)}, "a": _entry(0, 8, [8])})


BAD_TENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "safetensors"),
    "short": (b"\1\0\0", "safetensors"),
    "huge header": (struct.pack("<Q", 2**60) + b"{}", "a header of 1152921504606846976 bytes"),
    "large header": (struct.pack("<Q", 200_000_000) + b"{}", "a header of"),
    "no JSON": (_tensors(b"{]"), "not usable JSON"),
    "deep JSON": (_tensors(b"[" * 100_000), "not usable JSON"),
    "a list": (_tensors([]), "not a JSON object"),
    "metadata": (_tensors({"__metadata__": {"a": 1}}, b""), "map of strings"),
    "overlap": (_tensors({"a": _entry(0, 8, [8]), "b": _entry(4, 8, [4])}), "'b' overlaps"),
    "hole": (_tensors({"a": _entry(0, 3, [3]), "b": _entry(4, 8, [4])}), "'b' leaves a hole"),
    "out of range": (_tensors({"a": _entry(0, 80, [80])}), "truncated: "),
    "too long": (_tensors({"a": _entry(0, 4, [4])}), "longer than its header says"),
    "backwards": (_tensors({"a": _entry(8, 0, [8])}), "fit together"),
    "negative": (_tensors({"a": _entry(0, 8, [-8])}), "fit together"),
    "wrong size": (_tensors({"a": _entry(0, 8, [3])}), "fit together"),
    "overflow": (_tensors({"a": _entry(0, 8, [2**61, 8])}), "fit together"),
    "no elements, large": (_tensors({"a": _entry(0, 0, [0, 2**61, 2**61])}, b""), "fit together"),
    "no elements, wide": (_tensors({"a": _entry(0, 0, [0, 2**60], "F64")}, b""), "fit together"),
    "two NaN": (_note(tensors={"a": [[["x", "nan"]], "numpy"]}, values=[[[["x", "nan"]], "int", "0x1"]]), "are called"),
    "text as shape": (_tensors({"a": _entry(0, 8, ["8"])}), "fit together"),
    "no offsets": (_tensors({"a": {"dtype": "U8", "shape": [8]}}), "fit together"),
    "twice": (_tensors(b'{"a":%s,"a":%s}' % ((json.dumps(_entry(0, 8, [8])).encode(),) * 2)), "twice"),
    "leaf and folder": (_tensors({"a": _entry(0, 4, [4]), "a.b": _entry(4, 8, [4])}), "a leaf and a folder at once"),
    "deep": (_tensors({"a" + ".a" * 100_000: _entry(0, 8, [8])}), "nested deeper"),
    "note": (_tensors({"__metadata__": {"epochckpt": "{"}, "a": _entry(0, 8, [8])}), "what epochckpt's export writes"),
    "version": (_note(version=2), "what epochckpt's export writes"),
    "kind": (_note(tensors={"a": [["x"], "pickle"]}), "what epochckpt's export writes"),
    "path": (_note(tensors={"a": [[["s", -1]], "numpy"]}), "key path"),
    "key": (_note(tensors={"a": [["x"], "prng", "no such"]}), "recorded with kind prng"),
    "key data": (_note(tensors={"a": [["x"], "prng", "threefry2x32"]}), "recorded with kind prng"),
    "text": (
        _tensors({**json.loads(_note(tensors={"a": [["x"], "longstr"]})[8:-8])}, b"\xff" * 8),
        "recorded with kind longstr",
    ),
    "value": (_note(values=[[["x"], "int", "zz"]]), "a int value"),
    "value kind": (_note(values=[[["x"], ["int"], 1]]), "what epochckpt's export writes"),
}


@pytest.mark.parametrize("case", list(BAD_TENSORS))
def test_bad_safetensors_files_are_refused(tmp_path: pathlib.Path, case: str) -> None:
    """Headers that are too large, lie about offsets, or carry notes that export never wrote."""
    data, problem = BAD_TENSORS[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(FormatError, match=problem):
        ec.import_(tmp_path / "x.safetensors", tmp_path / "run", 3)
    assert not (tmp_path / "run").exists()


def _array(shape: Any, dtype: Any, data: Any, code: int = 1) -> bytes:
    return msgpack.packb({"a": msgpack.ExtType(code, msgpack.packb((shape, dtype, data)))})


def _pieces(shape: Any, chunks: Any) -> bytes:
    tree = {"__msgpack_chunked_array__": True, "shape": shape, "chunks": chunks}
    return flax.serialization.msgpack_serialize({"a": tree})


BAD_MSGPACK: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "huge map": (b"\xdf\xff\xff\xff\xff" + b"\xc0" * 9, "exceeds max_map_len"),
    "huge list": (b"\xdd\xff\xff\xff\xff", "exceeds max_array_len"),
    "huge text": (b"\xdb\xff\xff\xff\xff", "truncated"),
    "huge array": (b"\xc9\xff\xff\xff\xff\x01", "exceeds max_ext_len"),
    "deep": (b"\x91" * 100_000 + b"\xc0", "StackError"),
    "deep keys": (b"\x81" * 100_000 + b"\xc0", "StackError"),
    "deep within msgpack's bound": (b"\x91" * 300 + b"\xc0", "nested deeper than 256"),
    "more": (b"\xc0\xc0", "extra data"),
    "no token": (b"\x81\xa1a\xc1", "no msgpack file"),
    "no text": (b"\x81\xa1\xff\xc0", "utf-8"),
    "bytes as key": (b"\x81\xc4\x01a\xc0", "key of type bytes"),
    "list as key": (b"\x81\x90\xc0", "key of type list"),
    "twice": (b"\x82\xa1a\xc0\xa1a\xc0", "'a' twice"),
    "keys of types": (msgpack.packb({1: None, "a": None}), "sorts the keys"),
    "shape": (_array([3], "float32", b"\0" * 8), r"shape \(3,\) and dtype float32 that does not fit"),
    "negative": (_array([-2], "uint8", b""), "no list of at most 32 sizes"),
    "overflow": (_array([2**40, 2**40], "uint8", b""), "does not fit its bytes"),
    "no shape": (_array("x", "uint8", b"x"), "no list of at most 32 sizes"),
    "no bytes": (_array([1], "uint8", 7), "does not fit its bytes"),
    "two parts": (msgpack.packb(msgpack.ExtType(1, msgpack.packb([1, 2]))), "is not \\(shape"),
    "trailing": (msgpack.packb(msgpack.ExtType(1, msgpack.packb(([1], "uint8", b"x")) + b"y")), "extra data"),
    "complex": (msgpack.packb(msgpack.ExtType(2, msgpack.packb([1]))), "complex"),
    "scalar with a shape": (_array([1], "uint8", b"x", code=3), "a scalar that has a shape"),
    "dimensions": (_array([1] * 40, "uint8", b"x"), "no list of at most 32 sizes"),
    "deep shape": (_array([[]], "uint8", b""), "no list of"),
    "deep complex": (msgpack.packb(msgpack.ExtType(2, b"\x91" * 300 + b"\xc0")), "complex"),
    "nested ext": (msgpack.packb(msgpack.ExtType(1, b"\x93" + _array([1], "uint8", b"x"))), "no msgpack file"),
    "no elements, large": (_array([0, 2**61, 2**61], "uint8", b""), "does not fit its bytes"),
    "no elements, larger": (_array([2**63, 0], "uint8", b""), "does not fit its bytes"),
    "no elements, wide": (_array([0, 2**60], "float64", b""), "does not fit its bytes"),
    "half a map": (b"\xde\x00\x09" + b"\xc0" * 12, "incomplete"),
    "two NaN": (b"\x82" + (b"\xcb" + struct.pack(">d", float("nan")) + b"\xc0") * 2, "'nan' twice"),
    "NaN of two kinds": (
        b"\x82" + b"".join(b"\xcb" + struct.pack(">d", x) + b"\xc0" for x in (float("nan"), -float("nan"))),
        "'nan' twice",
    ),
    "many maps": (b"\xdd" + struct.pack(">I", 300_000) + b"\x80" * 300_000, "exceeds max_array_len"),
    "pieces": (_pieces({"0": 5}, {"0": np.ones(2), "1": np.ones(2)}), "do not make up its shape"),
    "pieces of types": (_pieces({"0": 4}, {"0": np.ones(2), "1": np.ones(2, np.int8)}), "do not fit together"),
    "no pieces": (_pieces({"0": 0}, {}), "do not fit together"),
    "unnumbered": (_pieces({"0": 2}, {"1": np.ones(2)}), "not numbered"),
    "pieces of what": (_pieces(3, 4), "not numbered"),
}


@pytest.mark.parametrize("case", list(BAD_MSGPACK))
def test_bad_msgpack_files_are_refused(tmp_path: pathlib.Path, case: str) -> None:
    """Lengths beyond the file, depth, objects that flax never writes."""
    data, problem = BAD_MSGPACK[case]
    (tmp_path / "x.msgpack").write_bytes(data)
    with pytest.raises(FormatError, match=problem):
        ec.import_(tmp_path / "x.msgpack", tmp_path / "run", 3)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (_array([1], "object", b"x" * 8), "dtype 'object'"),
        (_array([1], "datetime64[y2k]", b"x" * 8), "dtype 'datetime64"),
        *(
            (_array([1], f"{name}64[{unit}]", b"x" * 8), f"dtype '{name}64")
            for name in ("datetime", "timedelta")
            for unit in ("0s", "00s", "0", "", "-1s", "s/0", "1", "25s/5", "\u0661s", "9999999999s", "B", "generic")
        ),
        (msgpack.packb(msgpack.Timestamp(1)), "leaf 'value' is a Timestamp"),
        (_tensors({"a": _entry(0, 8, [16], "F4")}), "'a' is of type 'F4'"),
    ],
)
def test_types_that_we_lack_are_named(tmp_path: pathlib.Path, data: bytes, problem: str) -> None:
    """A file that is fine, but holds what cannot be kept."""
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(UnsupportedError, match=problem):
        ec.import_(tmp_path / "x", tmp_path / "run", 3)
    assert not (tmp_path / "run").exists()


def test_arrays_without_elements_keep_their_dimensions(tmp_path: pathlib.Path) -> None:
    """As large as NumPy can say them; and one key that is NaN, multiples of units."""
    tree: dict[Any, Any] = {
        "a": np.zeros((0, 2**40, 2**22), np.int8),
        "b": np.zeros(3, "M8[25us]"),
        "c": np.zeros(1, "m8[Y]"),
    }
    (tmp_path / "x").write_bytes(flax.serialization.msgpack_serialize(tree))
    ec.import_(tmp_path / "x", tmp_path / "run", 3)
    found = restored(tmp_path / "run")
    assert {name: (x.shape, x.dtype) for name, x in found.items()} == {n: (x.shape, x.dtype) for n, x in tree.items()}
    (tmp_path / "y").write_bytes(_tensors({"a": _entry(0, 0, [0, 2**40, 2**22])}, b""))
    ec.import_(tmp_path / "y", tmp_path / "run", 4)
    assert restored(tmp_path / "run", 4)["a"].shape == (0, 2**40, 2**22)
    (tmp_path / "z").write_bytes(msgpack.packb({float("nan"): 1}))
    ec.import_(tmp_path / "z", tmp_path / "run", 5)
    assert [repr(key) for key in restored(tmp_path / "run", 5)] == ["nan"]


def test_datetimes_that_numpy_divides_by_zero_for_are_not_built() -> None:
    """Neither from a record of ours; comparing such a dtype would end the process. What is not read is not written."""
    for name in ("<M8[0s]", "<m8[0ns]", "<M8[00s]", "<M8[]", "<M8[25s/5]", "<M8[9999999999s]", "<M8[B]"):
        with pytest.raises(FormatError, match="unknown dtype"):
            tree_lib.parse_dtype("epoch.json", name)
    for name in ("<M8[ns]", "<m8[25us]", "<M8", "<m8", "<M8[999999999as]", "<M8[M]"):
        dtype = tree_lib.parse_dtype("epoch.json", name)
        assert tree_lib.dtype_name(dtype, "x") == name
    with pytest.raises(InvalidArgumentError, match="cannot be saved"):
        tree_lib.dtype_name(np.dtype("<M8[2000000000s]"), "x")


def test_the_number_of_values_is_bounded(tmp_path: pathlib.Path) -> None:
    """Those of all containers together; an array is one."""
    path = tmp_path / "x.msgpack"
    path.write_bytes(flax.serialization.msgpack_serialize({"a": np.zeros(5000), "b": [b"x" * 600, "y" * 600]}))
    assert flax_msgpack.load(str(path), max_values=4)["b"] == [b"x" * 600, "y" * 600]
    with pytest.raises(FormatError, match="more than 3 values"):
        flax_msgpack.load(str(path), max_values=3)
    half = [0] * (flax_msgpack.MAX_VALUES // 2)
    path.write_bytes(msgpack.packb({"a": half, "b": half}))
    with pytest.raises(FormatError, match="more than 200000 values"):
        ec.import_(path, tmp_path / "run", 4)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["msgpack", "safetensors"])
def test_a_file_cut_anywhere_is_refused(tmp_path: pathlib.Path, format: str) -> None:
    """Not one of its beginnings is taken for a file."""
    path = tmp_path / f"x.{format}"
    if format == "msgpack":
        data = flax.serialization.msgpack_serialize({"types": all_types(), **mixed()})
    else:
        data = safetensors.numpy.save({"a.b": np.arange(20.0), "c": np.ones((2, 2), np.int8)})
    for length in [*range(0, len(data), max(1, len(data) // 900)), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(FormatError):
            import_sources.source_of(str(path), format).tree(".")


@pytest.mark.slow
@pytest.mark.parametrize("format", ["msgpack", "safetensors"])
def test_a_file_with_any_byte_changed_is_read_or_refused(tmp_path: pathlib.Path, format: str) -> None:
    """1000 random changes: an error of ours or a tree, never another error, never a read beyond the file."""
    chance = random.Random(5)
    tree: Any = {"a": np.arange(6.0), "b": [1, 2.5, "text", b"raw", None, 1j, np.int8(3)], "c": {"d": jnp.ones(3)}}
    good = flax.serialization.msgpack_serialize(tree)
    if format == "safetensors":
        notes = json.dumps({"version": 1, "separator": ".", "tensors": {"a": [["x"], "numpy"]}, "values": []})
        arrays = {"a": np.arange(6.0), "b.c": np.ones(2, np.int8)}
        good = safetensors.numpy.save(arrays, {"epochckpt": notes})
    path = tmp_path / f"x.{format}"
    outcomes = set()
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(chance.choice([1, 1, 2, 8])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
        try:
            import_sources.source_of(str(path), format).tree(".")
            outcomes.add("read")
        except ec.EpochCheckpointError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_our_headers_are_parsed_like_everybody_elses() -> None:
    """What `safetensors.header` writes, `safetensors.parse` reads."""
    dtype = np.dtype(np.float32)
    head = headers.header([("a", dtype, (2, 3), 24), ("empty", dtype, (0,), 0)], {"k": "v"})
    tensors, metadata = headers.parse("x", head, len(head) + 24)
    assert metadata == {"k": "v"}
    assert tensors["a"] == headers.Tensor(dtype, (2, 3), len(head), len(head) + 24)
    assert list(tensors) == ["a", "empty"]


# -- mapped files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "dtype"), [(10_000, None), (200_000, None), (200_000, "float32")])
def test_a_source_that_changes_meanwhile_is_noticed(
    tmp_path: pathlib.Path, faults: Faults, count: int, dtype: str | None
) -> None:
    """Between the look at the file and its writing: the epoch does not come to be. Small tensors are copied at once."""
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.arange(count, dtype=np.float64)}, path)

    def change(_: StoreCall) -> None:
        with open(path, "r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\7" * 8)

    written = faults.before(Store.open_writer, change)
    with pytest.raises(SaveError, match="leaf 'a' changed") as caught:
        ec.import_(path, tmp_path / "run", 3, dtype=dtype)
    assert written.hits == 1
    assert isinstance(caught.value, BufferChangedError)
    with ec.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == []


def test_maps_of_an_import_are_not_copied_and_those_of_a_caller_are(tmp_path: pathlib.Path) -> None:
    """Pieces of every form of the former; of the latter later changes do not show, whatever the mode."""
    data = np.arange(300_000, dtype=np.float32)
    for name in ("ours", "theirs"):
        data.tofile(tmp_path / name)
    ours = mapped.open_map(tmp_path / "ours").view(np.float32)
    pieces = {"part": ours[7:100_001], "rows": ours.reshape(3, -1)[1:], "strided": ours[::3], "none": ours[:0]}
    pieces["odd"] = ours.view(np.uint8)[3:-1].view(np.float32)
    theirs = {mode: np.memmap(tmp_path / "theirs", np.float32, mode) for mode in ("r", "r+", "c")}  # type: ignore[call-overload]
    tree: dict[str, Any] = {**pieces, **theirs, "swapped": np.memmap(tmp_path / "ours", ">f4", "r")[:10]}
    assert all(isinstance(piece, mapped.Mapped) for piece in pieces.values())
    assert not any(isinstance(value, mapped.Mapped) for value in theirs.values())
    expected = {name: np.array(x, x.dtype.newbyteorder("=")) for name, x in tree.items()}
    with ec.CheckpointManager(tmp_path / "run") as manager:
        planner = manager.components.saves.planner
        copied = set()
        for name, x in tree.items():
            (taken,) = planner.plan([TreeItem("default", tree={"x": x})]).snapshot().trees
            copied |= {name for buffer in taken.buffers if buffer.sample is None}
        assert copied == {"strided", "none", "swapped", *theirs}
        manager.save(3, args=ocp.args.StandardSave(tree))
        theirs["c"][:] = 0
        theirs["r+"][:] = 0
    same(restored(tmp_path / "run"), expected)


@pytest.mark.slow
def test_arrays_in_pieces_are_read_from_anywhere_to_anywhere(tmp_path: pathlib.Path) -> None:
    """Every range of elements, whole and of parts, as NumPy has them; also of no dimension."""
    np.arange(64, dtype=np.float64).tofile(tmp_path / "data")
    data = mapped.open_map(tmp_path / "data").view(np.float64)[:60].reshape(4, 3, 5)
    where = [(slice(0, 4), slice(j, j + 1), k) for j in range(3) for k in (slice(0, 2), slice(2, 5))]
    whole = mmap.Assembled(data.shape, np.dtype(np.int16), [(place, data[place]) for place in where])
    part = slice(1, 4), slice(0, 2), slice(1, 4)
    for array, expected in ((whole, data), (whole[part], data[part])):
        flat = expected.astype(np.int16).reshape(-1)
        for start in range(flat.size):
            for stop in range(start, flat.size + 1):
                assert array.read(start, stop).tolist() == flat[start:stop].tolist()
    assert mmap.Assembled((), np.dtype(np.float32), [((), data[1, 2, 3, ...])]).read().tolist() == [28]


def test_pages_that_were_released_come_back(tmp_path: pathlib.Path) -> None:
    """Also of pieces that begin and end anywhere in a page."""
    np.arange(100_000, dtype=np.uint16).tofile(tmp_path / "data")
    whole = mapped.open_map(tmp_path / "data").view(np.uint16)
    for start, stop in ((0, None), (1, 4097), (5000, 5001), (199_999, 200_000)):
        mmap.release(whole, start, stop)
        mmap.release(whole[3:70_000], start, stop)
    np.testing.assert_array_equal(whole, np.arange(100_000, dtype=np.uint16))
