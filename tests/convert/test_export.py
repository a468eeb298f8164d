"""`export`: stock Orbax and safetensors read what it writes, without anything of ours; whole or not at all."""

import errno
import functools
import json
import logging
import os
import pathlib
import shutil
import signal
import threading
import uuid
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import tensorstore as ts
from safetensors.numpy import load_file, save_file

import epochckpt as ec
from epochckpt.convert.leaf_files import FormOptions
from epochckpt.convert.orbax_form import CopiedFiles, write_orbax
from epochckpt.errors import (
    DamagedError,
    EpochNotFoundError,
    InvalidArgumentError,
    NotACheckpointDirectoryError,
    UnsupportedError,
)
from epochckpt.format.tree import dtypes
from epochckpt.orbax import parameters
from epochckpt.storage import Store, Writer, open_store
from epochckpt.testing import Faults, StoreCall
from tests.support import handler_jobs, own_memory, prepared, stock_states
from tests.support.processes import run_worker, start_processes

DEVICES = 4
FORMATS = ("orbax", "safetensors")


def save(directory: Any, tree: Any, epoch: int = 5, **storage: Any) -> None:
    """One epoch."""
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(**storage)) as manager:
        manager.save(epoch, args=ocp.args.StandardSave(tree))


def save_job(directory: str) -> None:
    """The same, by every process of a job, in small blocks and several parts."""
    save(directory, stock_states.plain(), replica_split_bytes=512, part_bytes=512, block_bytes=4096)


def stock(function: str, arguments: dict[str, Any]) -> Any:
    """What a function of tests/support/stock_reader.py answers."""
    (answer,) = run_worker(
        f"tests.support.stock_reader:{function}", arguments, 1, DEVICES, timeout=100, imported=prepared.STOCK
    )
    return answer


def tensors_of(folder: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of every tensor in a folder, by the safetensors package alone."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            assert name not in found
            found[name] = tensor["dtype"], list(tensor["shape"]), bytes(tensor["data"])
    return found


def whole_bytes(leaf: Any) -> bytes:
    """The bytes of a leaf as one array."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def arrays_of(tree: Any) -> dict[str, bytes]:
    """The arrays of a tree of dicts and lists, by the name that they should have."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path): leaf for path, leaf in pairs}
    return {name: whole_bytes(leaf) for name, leaf in named.items() if isinstance(leaf, jax.Array | np.ndarray)}


@pytest.mark.long
def test_stock_orbax_restores_it_with_and_without_arguments(tmp_path: pathlib.Path) -> None:
    """NNX, Linen + optax and everything else, bit for bit, in other shardings, too; no link, nothing of ours beside."""
    for state, make in stock_states.STATES.items():
        save(tmp_path / state, make(), block_bytes=4096)
        done = ec.export(tmp_path / state, 5, tmp_path / "out" / state)
        assert (done.epoch, done.path, done.unsupported) == (5, str(tmp_path / "out" / state), {})
        shutil.rmtree(tmp_path / state)
    files = list((tmp_path / "out").rglob("*"))
    assert not any(f.is_symlink() or f.name in ("epoch.json", "node.json") for f in files)
    directories = {state: str(tmp_path / "out" / state) for state in stock_states.STATES}
    found = stock("exported", {"directories": directories, "epoch": 5})
    for state, readers in found.items():
        assert len(readers) >= 11, state
        assert {k: v for k, v in readers.items() if v} == {}, state


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("kind", ["posix", "memory"])
def test_items_of_other_handlers_come_along(tmp_path: pathlib.Path, kind: str) -> None:
    """Files of handlers of other people, in folders of their own, and random keys; what differs per node is refused."""
    directory = str(tmp_path / "run") if kind == "posix" else f"memory://{uuid.uuid4().hex}/"
    rng = np.random.default_rng(3)
    twister = np.random.RandomState(3)
    key = jax.random.key(7)
    items: dict[str, Any] = {
        "reader": handler_jobs.ReaderSave(handler_jobs.Reader(17)),
        "key": ocp.args.JaxRandomKeySave(key),
        "twister": ocp.args.NumpyRandomKeySave(twister.get_state()),
        "state": ocp.args.StandardSave({"w": rng.normal(size=(4, 4))}),
        "bare": ocp.args.ArraySave(jnp.arange(5)),
        "own": ec.args.NodeSave({"a": 1}),
    }
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(block_bytes=4096)) as manager:
        manager.save(5, args=ocp.args.Composite(**items))
    with pytest.raises(UnsupportedError, match="  own: it differs per node"):
        ec.export(directory, 5, tmp_path / "out")
    done = ec.export(directory, 5, tmp_path / "out", skip_unsupported=True)
    assert set(done.unsupported) == {"own"}
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    with ocp.CheckpointManager(
        tmp_path / "out", item_names=("reader", "key", "twister", "state", "bare")
    ) as stock_manager:
        asked = ocp.args.Composite(
            reader=handler_jobs.ReaderRestore(handler_jobs.Reader()),
            key=ocp.args.JaxRandomKeyRestore(),
            twister=ocp.args.NumpyRandomKeyRestore(),
            state=ocp.args.StandardRestore(),
            bare=ocp.args.ArrayRestore(),
        )
        got = stock_manager.restore(5, args=asked)
    assert got["reader"].position == 17
    assert stock_states.differences([got["key"], got["bare"]], [key, jnp.arange(5)]) == []
    assert stock_states.differences(got["state"], items["state"].item) == []
    again = np.random.RandomState()
    again.set_state(got["twister"])
    assert again.randint(10**9) == twister.randint(10**9)
    with pytest.raises(UnsupportedError, match="'reader' is not made of arrays"):
        ec.export(directory, 5, tmp_path / "tensors", "safetensors", item="reader")
    ec.export(directory, 5, tmp_path / "tensors", "safetensors", item="bare")
    assert tensors_of(tmp_path / "tensors")["value"][2] == np.arange(5, dtype=np.int32).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["posix", "memory"])
def test_items_metrics_and_metadata_come_along(tmp_path: pathlib.Path, kind: str) -> None:
    """From a folder and from an object store, where an epoch has no Orbax view of its own."""
    directory = str(tmp_path / "run") if kind == "posix" else f"memory://{uuid.uuid4().hex}/"
    items = ocp.args.Composite(state=ocp.args.StandardSave(stock_states.plain()), config=ocp.args.JsonSave({"a": [1]}))
    with ec.CheckpointManager(directory, metadata={"who": "us"}) as manager:
        manager.save(12, args=items, metrics={"loss": 0.5}, custom_metadata={"by": "test"})
    ec.export(directory, None, tmp_path / "out")
    assert stock("everything", {"directory": str(tmp_path / "out"), "epoch": 12}) == {
        "items": ["config", "metrics", "state"],
        "differences": [],
        "config": {"a": [1]},
        "metrics": {"loss": 0.5},
        "custom": {"by": "test"},
        "root": {"who": "us"},
    }
    assert sorted(os.listdir(tmp_path / "out" / "12" / "state" / "process_0")) == ["state.safetensors"]
    ec.export(directory, 12, tmp_path / "one", item="config")
    assert not (tmp_path / "one" / "12" / "state").exists()
    ec.export(directory, 12, tmp_path / "tensors", "safetensors")
    assert arrays_of(stock_states.plain()) == {n: data for n, (_, _, data) in tensors_of(tmp_path / "tensors").items()}


@pytest.mark.slow
def test_what_two_processes_wrote_becomes_whole(tmp_path: pathlib.Path) -> None:
    """Sharded over both, replicated and split, in several parts: whole tensors, and a checkpoint of stock Orbax."""
    run_worker("tests.convert.test_export:save_job", {"directory": str(tmp_path / "run")}, 2, DEVICES // 2, timeout=100)
    assert len(list((tmp_path / "run" / "5").glob("process_*/*-00001.safetensors"))) == 2
    ec.export(tmp_path / "run", 5, tmp_path / "orbax")
    ec.export(tmp_path / "run", 5, tmp_path / "tensors", "safetensors", max_buffer_bytes=100)
    for format in FORMATS:
        asked: dict[str, Any] = {"include": "params", "rename": {"params": ""}, "dtype": "bfloat16"}
        ec.export(tmp_path / "run", 5, tmp_path / f"less-{format}", format, max_buffer_bytes=100, **asked)
    shutil.rmtree(tmp_path / "run")
    floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if floats(x) else x, stock_states.plain()["params"])
    for folder in ("less-safetensors", "less-orbax/5/default/process_0"):
        assert {n: data for n, (_, _, data) in tensors_of(tmp_path / folder).items()} == arrays_of(params)
    expected = arrays_of(stock_states.plain())
    assert {name: data for name, (_, _, data) in tensors_of(tmp_path / "tensors").items()} == expected
    found = stock("read", {"directory": str(tmp_path / "orbax"), "epoch": 5, "state": "plain"})
    assert len(found) >= 10
    # The trainer of v1 looks for `state`. It does not find the `default` of v0 in steps that stock Orbax wrote either.
    assert {k: v for k, v in found.items() if v and not k.startswith("v1 Checkpointer")} == {}


def test_tensors_have_every_bit_of_every_type(tmp_path: pathlib.Path) -> None:
    """Each dtype is a tensor of its own type, or refused by name; with leave to do so it is left out and reported."""
    rng = np.random.default_rng(1)
    tree: dict[str, Any] = {}
    for name, dtype in dtypes().items():
        raw = rng.integers(0, 2 if name == "bool" else 256, size=24 * dtype.itemsize, dtype=np.uint8)
        narrow = name in ("int1", "int2", "int4", "uint1", "uint2", "uint4")
        tree[name] = (
            raw.astype(np.int8).astype(dtype) if narrow else (raw & 1 if dtype.itemsize == 1 else raw).view(dtype)
        )
    save(tmp_path / "run", tree)
    with pytest.raises(UnsupportedError, match="default: int4: safetensors has no type for int4"):
        ec.export(tmp_path / "run", 5, tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists()
    done = ec.export(tmp_path / "run", 5, tmp_path / "out", "safetensors", skip_unsupported=True)
    found = tensors_of(tmp_path / "out")
    assert set(done.unsupported["default"]) == tree.keys() - found.keys()
    assert len(found) == 17
    assert {name: data for name, (_, _, data) in found.items()} == {name: tree[name].tobytes() for name in found}
    kinds = {name: kind for name, (kind, _, _) in found.items()}
    assert kinds["bfloat16"] == "BF16"
    assert kinds["float8_e4m3fn"] == "F8_E4M3"
    assert len(set(kinds.values())) == len(kinds)


def test_parts_have_the_index_of_hugging_face(tmp_path: pathlib.Path) -> None:
    """Files of at most so many bytes, numbered; the index says what lies where, and how many bytes there are."""
    tree = {"layers": [{"w": jnp.full((8, 8), i, jnp.float32), "b": jnp.ones(3, jnp.int8)} for i in range(6)]}
    save(tmp_path / "run", tree)
    ec.export(tmp_path / "run", 5, tmp_path / "out", "safetensors", max_file_bytes=600, max_buffer_bytes=64)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * (256 + 3)
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "out")) == [*files, "model.safetensors.index.json"]
    read = {}
    for file in files:
        part = load_file(tmp_path / "out" / file)
        assert {name for name, at in index["weight_map"].items() if at == file} == part.keys()
        assert sum(x.nbytes for x in part.values()) <= 600
        read.update(part)
    assert {name: x.tobytes() for name, x in read.items()} == arrays_of(tree)


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_format_cannot_express_is_refused_by_name(tmp_path: pathlib.Path, format: str) -> None:
    """All of it in one message; `skip_unsupported` exports the rest and reports what is missing."""
    bad: dict[str, Any] = {"huge": 2**70, "when": np.array(["2026-01-02"], "datetime64[s]")}
    save(tmp_path / "run", {"good": jnp.arange(3.0), **bad})
    expected = {"when"} if format == "safetensors" else set(bad)
    with pytest.raises(UnsupportedError, match="skip_unsupported=True") as caught:
        ec.export(tmp_path / "run", 5, tmp_path / "out", format)
    assert all(f"default: {name}: " in str(caught.value) for name in expected)
    assert os.listdir(tmp_path) == ["run"]
    assert (
        set(ec.export(tmp_path / "run", 5, tmp_path / "out", format, skip_unsupported=True).unsupported["default"])
        == expected
    )


@pytest.mark.long
def test_items_with_too_many_chunks_for_an_epochs_view_can_be_exported(tmp_path: pathlib.Path) -> None:
    """As the note in the epoch says."""
    count = parameters.MAX_ENTRIES // 2 + 1  # each leaf has two entries
    tree = {str(i): i for i in range(count)}
    save(tmp_path / "run", tree)
    assert not (tmp_path / "run" / "5" / "default").exists()
    note = json.loads((tmp_path / "run" / "5" / "epoch.json").read_bytes())["orbax_unsupported"]["default"]["*"]
    assert note.startswith("its index would have 250,002 entries, more than 250,000; an export takes 1,048,576")
    ec.export(tmp_path / "run", 5, tmp_path / "out")
    driver = {"driver": "ocdbt", "base": f"file://{tmp_path / 'out' / '5' / 'default'}/"}
    store = ts.KvStore.open(driver).result()
    for i in (0, 77_777, count - 1):  # a listing of all takes long
        assert int.from_bytes(store.read(f"{i}/0").result().value, "little") == i


def test_an_export_has_bounds_of_its_own(tmp_path: pathlib.Path) -> None:
    """What has more entries than the index of an export takes is refused."""
    save(tmp_path / "run", {str(i): np.full(2, i) for i in range(9)})
    options = FormOptions(separator=".", framework="np", max_file_bytes=1, max_buffer_bytes=1, skip_unsupported=False)
    with ec.CheckpointManager(tmp_path / "run") as manager:
        native, _ = manager.source(5)
        assert native is not None
        for most in (17, 18):
            (tmp_path / str(most)).mkdir()
            copy = functools.partial(
                write_orbax,
                CopiedFiles(native, native.record),
                native.store,
                open_store(tmp_path / str(most)),
                options,
                max_entries=most,
            )
            if most == 17:
                with pytest.raises(UnsupportedError, match="default: its index would have 18 entries, more than 17; "):
                    copy()
            else:
                assert copy() == {}


def test_names_that_would_collide_are_refused(tmp_path: pathlib.Path) -> None:
    """Both leaves are named; another separator helps."""
    save(tmp_path / "run", {"a.b": jnp.ones(1), "a": {"b": jnp.zeros(2)}})
    with pytest.raises(InvalidArgumentError, match=r"'a/b' and 'a\.b' would both be called 'a\.b'"):
        ec.export(tmp_path / "run", 5, tmp_path / "out", "safetensors")
    ec.export(tmp_path / "run", 5, tmp_path / "out", "safetensors", separator="/")
    assert set(tensors_of(tmp_path / "out")) == {"a.b", "a/b"}


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_bit_is_refused_and_leaves_nothing(tmp_path: pathlib.Path, format: str) -> None:
    """Anywhere in the data file: in its header, in the first and the last byte of the data, between."""
    tree = {"w": jnp.arange(6000.0), "x": jnp.ones((3, 5), jnp.bfloat16), "n": 3}
    save(tmp_path / "run", tree, 4)
    save(tmp_path / "run", tree, 5, block_bytes=4096)
    path = tmp_path / "run" / "5" / "process_0" / "default.safetensors"
    data = path.read_bytes()
    places = [4096, 9000, 20000, len(data) - 31, len(data) - 1, *([9, 100] if format == "orbax" else [])]
    for place in places:
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(DamagedError, match=r"process_0/default\.safetensors"):
            ec.export(tmp_path / "run", 5, tmp_path / "out", format, max_buffer_bytes=1000)
        assert os.listdir(tmp_path) == ["run"]
    done = ec.export(tmp_path / "run", None, tmp_path / "out", format)
    assert done.epoch == 4  # the newest that can be read
    path.write_bytes(data)
    assert ec.export(tmp_path / "run", None, tmp_path / "again", format).epoch == 5


def test_a_flipped_bit_in_a_json_item_is_refused(tmp_path: pathlib.Path) -> None:
    """Items that are a file are verified, too."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.Composite(config=ocp.args.JsonSave({"rate": 123})))
    path = tmp_path / "run" / "1" / "process_0" / "config" / "metadata"
    path.write_bytes(path.read_bytes().replace(b"123", b"133"))
    with pytest.raises(DamagedError, match="config/metadata"):
        ec.export(tmp_path / "run", 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "method", [Writer.finish, Store.rename, Store.sync_folder], ids=lambda method: method.__qualname__
)
def test_a_failed_export_leaves_nothing(
    tmp_path: pathlib.Path, faults: Faults, format: str, method: Callable[..., Any]
) -> None:
    """A full disk, a failed rename, a failed flush: the error is raised, and the folder is as it was before."""
    save(tmp_path / "run", stock_states.plain())
    (tmp_path / "out").mkdir()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with faults.fail(method, full), pytest.raises(OSError, match="No space left"):
        ec.export(tmp_path / "run", 5, tmp_path / "out", format)
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]
    assert os.listdir(tmp_path / "out") == []
    ec.export(tmp_path / "run", 5, tmp_path / "out", format)


def export_until_killed(directory: str, destination: str) -> None:
    """Stops for good just before the rename."""

    def stop(_: StoreCall) -> None:
        print("before the rename", flush=True)
        threading.Event().wait()

    with Faults().everywhere() as faults:
        faults.before(Store.rename, stop)
        ec.export(directory, 5, destination)


@pytest.mark.slow
def test_a_killed_export_leaves_nothing_under_the_name(tmp_path: pathlib.Path) -> None:
    """What it leaves has a name that no tool takes for a checkpoint, and does not hinder the next try."""
    save(tmp_path / "run", stock_states.plain())
    arguments = json.dumps({"directory": str(tmp_path / "run"), "destination": str(tmp_path / "out")})
    program = ["-m", "tests.support.worker", "tests.convert.test_export:export_until_killed", arguments]
    with start_processes(program, 1, devices_per_process=1) as job:
        job[0].wait_for_output("before the rename", timeout=60)
        job[0].send_signal(signal.SIGKILL)
        job.wait(timeout=30)
    (left,) = set(os.listdir(tmp_path)) - {"run"}
    assert left.endswith(".orbax-checkpoint-tmp")
    ec.export(tmp_path / "run", 5, tmp_path / "out")
    assert ocp.StandardCheckpointer().restore(tmp_path / "out" / "5" / "default")["step"] == 7


def test_only_a_free_name_or_an_empty_folder_will_do(tmp_path: pathlib.Path) -> None:
    """Nothing that exists is touched; the message says what is in the way."""
    save(tmp_path / "run", {"a": jnp.ones(2)})
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    for name, problem in {
        "file": "is a file",
        "full": "is not empty",
        "run/6": "lies in the checkpoint directory",
    }.items():
        with pytest.raises(InvalidArgumentError, match=problem):
            ec.export(tmp_path / "run", 5, tmp_path / name)
    with pytest.raises(InvalidArgumentError, match="is a URL"):
        ec.export(tmp_path / "run", 5, "s3://bucket/x")
    (tmp_path / "empty").mkdir()
    ec.export(tmp_path / "run", 5, tmp_path / "empty")
    ec.export(tmp_path / "run", 5, tmp_path / "new" / "folders" / "too", "safetensors")
    assert sorted(os.listdir(tmp_path / "run")) == ["5"]


@pytest.mark.parametrize(
    "name", ["", "6", "1/exp", "rollback.json", "metadata", "incarnation-x.orbax-checkpoint-tmp/x", "a/b/c"]
)
def test_nothing_is_exported_into_the_checkpoint_directory(tmp_path: pathlib.Path, name: str) -> None:
    """At any depth, through links, too, and by the directory's URL; the message names both. Beside it is fine."""
    save(tmp_path / "run", {"a": jnp.ones(2)}, 1)
    (tmp_path / "link").symlink_to("run")
    before = sorted((tmp_path / "run").rglob("*"))
    url = f"file://{tmp_path}/run"
    for directory, folder in (("run", "run"), ("run", "link"), ("link", "run"), ("link", "link"), (url, "run")):
        with pytest.raises(InvalidArgumentError, match="lies in the checkpoint directory") as caught:
            ec.export(directory if directory == url else tmp_path / directory, 1, tmp_path / folder / name)
        assert f"{os.path.join(tmp_path, 'run', name).rstrip('/')} lies in" in str(caught.value)
        assert f"directory {tmp_path}/run," in str(caught.value)
    assert sorted((tmp_path / "run").rglob("*")) == before
    ec.export(tmp_path / "run", 1, tmp_path / f"run{name.replace('/', '-')}-out")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2770, 0o500])
def test_an_empty_folder_keeps_its_mode_and_group(tmp_path: pathlib.Path, mode: int) -> None:
    """Also while it is being written, under its other name; only its owner may write more than before."""
    save(tmp_path / "run", {"a": jnp.ones(2)})
    out = tmp_path / "out"
    out.mkdir()
    other = next((g for g in os.getgroups() if g != os.getgid()), 12345 if not os.getuid() else os.getgid())
    os.chown(out, -1, other)
    out.chmod(mode)
    for format in FORMATS:
        ec.export(tmp_path / "run", 5, out, format)
        assert out.stat().st_mode & 0o7777 == mode | 0o700
        assert out.stat().st_gid == other
        for entry in out.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def test_the_current_directory_is_not_replaced(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process would stand in a folder that is gone; folders in it are fine."""
    save(tmp_path / "run", {"a": jnp.ones(2)})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", tmp_path / "here"):
        with pytest.raises(InvalidArgumentError, match="current working directory"):
            ec.export(tmp_path / "run", 5, name)
    ec.export(tmp_path / "run", 5, "out")
    assert os.listdir(os.curdir) == ["out"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_failed_export_removes_the_folders_that_it_made(tmp_path: pathlib.Path, format: str) -> None:
    """And no others."""
    save(tmp_path / "run", {"w": jnp.arange(6000.0)})
    path = tmp_path / "run" / "5" / "process_0" / "default.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    (tmp_path / "old").mkdir()
    for epoch in (5, None):
        for name in ("new/deep/dest", "old/deep/dest"):
            with pytest.raises((DamagedError, EpochNotFoundError)):
                ec.export(tmp_path / "run", epoch, tmp_path / name, format)
    assert sorted(os.listdir(tmp_path)) == ["old", "run"]
    assert os.listdir(tmp_path / "old") == []


def test_wrong_arguments_are_refused(tmp_path: pathlib.Path) -> None:
    """Unknown formats and items, sizes, several items of arrays, no epoch."""
    items = {name: ocp.args.StandardSave({"x": jnp.ones(1)}) for name in ("one", "two")}
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, args=ocp.args.Composite(**items))
    out = tmp_path / "out"
    with pytest.raises(InvalidArgumentError, match="format 'tar'"):
        ec.export(tmp_path / "run", 5, out, "tar")
    with pytest.raises(InvalidArgumentError, match=r"pass item= \(--item\), one of: one, two"):
        ec.export(tmp_path / "run", 5, out, "safetensors")
    with pytest.raises(InvalidArgumentError, match="no item 'three'; it has: one, two"):
        ec.export(tmp_path / "run", 5, out, "safetensors", item="three")
    with pytest.raises(InvalidArgumentError, match="max_buffer_bytes"):
        ec.export(tmp_path / "run", 5, out, max_buffer_bytes=0)
    with pytest.raises(InvalidArgumentError, match="separator"):
        ec.export(tmp_path / "run", 5, out, "safetensors", separator="")
    with pytest.raises(EpochNotFoundError, match="committed: 5"):
        ec.export(tmp_path / "run", 6, out)
    with pytest.raises(EpochNotFoundError, match="no committed checkpoint"):
        ec.export(tmp_path / "nothing", None, out)
    (tmp_path / "file").write_text("x")
    (tmp_path / "below").symlink_to("file/x")
    for epoch in (None, 5):
        for source in ("file", "below", "file/x"):
            with pytest.raises(NotACheckpointDirectoryError, match=f"{source} is a file, or lies below one"):
                ec.export(tmp_path / source, epoch, out)
    assert not out.exists()
    ec.export(tmp_path / "run", 5, out, "safetensors", item="two")
    assert set(tensors_of(out)) == {"x"}


def test_it_says_what_it_did(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line at INFO at the end."""
    save(tmp_path / "run", {"a": jnp.ones(1000)})
    with caplog.at_level(logging.INFO, logger="absl"):
        done = ec.export(tmp_path / "run", 5, tmp_path / "out")
    sizes = [path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert done.nbytes == sum(sizes)
    assert f"checkpoint 5 of {tmp_path / 'run'} exported as orbax to {tmp_path / 'out'}: " in caplog.text


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_it_tells_how_many_bytes_it_has_written(tmp_path: pathlib.Path, format: str) -> None:
    """Piece by piece; together they are all of it."""
    save(tmp_path / "run", {"a": jnp.ones(10_000), "b": jnp.ones((3, 5))}, block_bytes=4096)
    told: list[int] = []
    done = ec.export(tmp_path / "run", 5, tmp_path / "out", format, progress=told.append)
    assert sum(told) == done.nbytes
    assert len(told) > 1


def test_pieces_of_long_rows_are_read_as_pieces(tmp_path: pathlib.Path) -> None:
    """Rows that span several blocks, columns of them on other devices: right, whatever the bound on memory."""
    rng = np.random.default_rng(2)
    data = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in {"a": (2, 9000), "b": (1, 2, 8000)}.items()
    }
    tree = {"a": stock_states.place(data["a"], None, "y"), "b": data["b"], "c": stock_states.place(data["a"], "x")}
    save(tmp_path / "run", tree, block_bytes=4096)
    for bound in (500, 20_000, 10**6):
        ec.export(tmp_path / "run", 5, tmp_path / str(bound), "safetensors", max_buffer_bytes=bound)
        found = load_file(tmp_path / str(bound) / "model.safetensors")
        for name, expected in {**data, "c": data["a"]}.items():
            np.testing.assert_array_equal(found[name], expected)


# -- memory ------------------------------------------------------------------------------------------------------------

MIB = 2**20
LARGE = 256 * MIB
BOUND = LARGE // 4


def there_and_back(folder: str) -> dict[str, int]:
    """Growth of this process by each step, in bytes; the last one is a control that takes a file into memory."""
    here = pathlib.Path(folder)
    save_file({"w": np.ones((2, 8), np.float32)}, here / "small.safetensors")
    for format in FORMATS:  # what a first call costs in any case
        directory = here / f"warm-{format}"
        ec.import_(here / "small.safetensors", directory, 0)
        ec.export(directory, 0, here / f"warm-out-{format}", format)
    grown = {}
    steps = {
        "import safetensors": lambda: ec.import_(here / "large.safetensors", here / "run", 0),
        "import msgpack": lambda: ec.import_(here / "large.msgpack", here / "run", 1),
        "export orbax": lambda: ec.export(here / "run", 0, here / "orbax"),
        "export safetensors": lambda: ec.export(
            here / "run", 1, here / "out", "safetensors", max_buffer_bytes=16 * MIB
        ),
        "import cast": lambda: ec.import_(here / "large.safetensors", here / "run", 2, dtype="bfloat16"),
        "export cast": lambda: ec.export(
            here / "run", 0, here / "cast", rename={"rows": "r"}, dtype="bfloat16", max_buffer_bytes=8 * MIB
        ),
        "control": lambda: np.fromfile(here / "large.safetensors", np.uint8),
    }
    for name, step in steps.items():
        own_memory.forget_peak()
        before = own_memory.nbytes("VmRSS")
        step()
        grown[name] = own_memory.nbytes("VmHWM") - before
    return grown


def write_large(folder: pathlib.Path) -> None:
    """A safetensors and a msgpack file with the same bytes in two large arrays: of two rows, and in two pieces."""
    piece = np.random.default_rng(0).integers(0, 256, MIB, dtype=np.uint8).tobytes()
    half, count = LARGE // 2, LARGE // 2 // MIB
    entries = {
        "rows": {"dtype": "F32", "shape": [2, half // 8], "data_offsets": [0, half]},
        "flat": {"dtype": "U8", "shape": [half], "data_offsets": [half, LARGE]},
    }
    head = json.dumps(entries).encode()
    with open(folder / "large.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for _ in range(2 * count):
            file.write(piece)
    packer = msgpack.Packer()

    def array(file: Any, shape: list[int], dtype: str, pieces: int) -> None:
        inner = packer.pack_array_header(3) + packer.pack(shape) + packer.pack(dtype)
        inner += b"\xc6" + (pieces * MIB).to_bytes(4, "big")
        file.write(b"\xc9" + (len(inner) + pieces * MIB).to_bytes(4, "big") + b"\x01" + inner)
        for _ in range(pieces):
            file.write(piece)

    with open(folder / "large.msgpack", "wb") as file:
        file.write(packer.pack_map_header(2) + packer.pack("rows"))
        array(file, [2, half // 8], "float32", count)
        file.write(packer.pack("flat") + packer.pack_map_header(3) + packer.pack("__msgpack_chunked_array__"))
        file.write(packer.pack(True) + packer.pack("shape") + packer.pack({"0": half}))
        file.write(packer.pack("chunks") + packer.pack_map_header(2))
        for key in ("0", "1"):
            file.write(packer.pack(key))
            array(file, [half // 2], "uint8", count // 2)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
def test_memory_stays_bounded(tmp_path: pathlib.Path) -> None:
    """256 MiB there and back, from safetensors and to both kinds of exports, in less than 64 MiB each.

    A msgpack file is read whole: its map, its arrays, and those in pieces once more.
    """
    write_large(tmp_path)
    (grown,) = run_worker("tests.convert.test_export:there_and_back", {"folder": str(tmp_path)}, 1, 1, timeout=100)
    assert grown.pop("control") > LARGE * 0.9, "the control shows nothing"
    assert grown.pop("import msgpack") < LARGE * 2.5 + BOUND
    assert {step: size // MIB for step, size in grown.items() if size > BOUND} == {}
    piece = np.fromfile(tmp_path / "large.safetensors", np.uint8)[-LARGE:]
    for name, start in {"rows": 0, "flat": LARGE // 2}.items():
        found = np.asarray(load_file(tmp_path / "out" / "model.safetensors")[name]).reshape(-1).view(np.uint8)
        assert np.array_equal(found, piece[start : start + LARGE // 2])
    read = ocp.PyTreeCheckpointer().restore(tmp_path / "orbax" / "0" / "default")
    assert np.array_equal(np.asarray(read["flat"]), piece[LARGE // 2 :])
    shutil.rmtree(tmp_path)  # pytest would keep more than a gigabyte
