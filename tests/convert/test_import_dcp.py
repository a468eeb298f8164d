"""`import_` of what `torch.distributed.checkpoint` saved, without torch; no pickle runs anything."""

import collections
import io
import os
import pathlib
import pickle
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.convert import import_files
from epochckpt.errors import DamagedError, EpochCheckpointError, FormatError, UnsupportedError
from tests.support import stock_states

DATA = pathlib.Path(__file__).resolve().parent.parent / "compat" / "data" / "torch-2.13-dcp.zip"
W = (np.arange(30, dtype=np.float32) / np.float32(7)).reshape(5, 6)


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory that two processes of torch 2.13 saved; see write_torch_dcp.py beside the data."""
    with zipfile.ZipFile(DATA) as archive:
        archive.extractall(tmp_path / "dcp")
    return tmp_path / "dcp"


def expected() -> dict[str, Any]:
    """What was saved, with each "." a level of the tree."""
    third = (np.arange(5, dtype=np.float32) / 3).astype(ml_dtypes.bfloat16)
    model = {
        "rows": {"weight": W},
        "columns": {"weight": W},
        "replicated": W[0],
        "half": third,
        "ids": np.arange(4),
        "mask": np.array([True, False]),
        "scalar": np.array(1.5),
        "empty": np.zeros((0, 3), np.float32),
        "transposed": W[:2].T,
    }
    optimizer = {"param_groups": {"0": {"lr": 0.001, "betas": [0.9, 0.999]}}, "step": 7}
    return {"model": model, "optimizer": optimizer}


def restored(directory: Any, epoch: int = 0) -> Any:
    """An epoch as it was saved; every byte of it is verified."""
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.verify(epoch).ok
        return manager.restore(epoch)


def test_a_directory_of_dcp_becomes_an_epoch(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Chunks of two processes by rows and by columns, every kind of leaf; chosen, renamed and cast, too."""
    ec.import_(saved, tmp_path / "run", 0)
    assert stock_states.differences(restored(tmp_path / "run"), expected()) == []
    asked: dict[str, Any] = {"include": "model/*/weight", "rename": {"model": "params"}, "dtype": "bfloat16"}
    plan = ec.plan_import(saved, tmp_path / "run", 1, **asked)
    assert [(leaf.source, leaf.cast_from) for leaf in plan.leaves] == [
        (f"model/{name}/weight", "float32") for name in ("columns", "rows")
    ]
    plan.write()
    cast = {"weight": W.astype(ml_dtypes.bfloat16)}
    assert stock_states.differences(restored(tmp_path / "run", 1), {"params": {"rows": cast, "columns": cast}}) == []
    ec.import_(saved, tmp_path / "run", 2, separator=None, include="*.weight")
    assert restored(tmp_path / "run", 2).keys() == {"model.rows.weight", "model.columns.weight"}


def test_a_directory_that_lacks_or_has_other_bytes_is_refused(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A flipped bit of a tensor by its checksum; a file that is gone or cut short by its size; nothing is written."""
    path = saved / "__1_0.distcp"
    data = path.read_bytes()
    where = data.index(W[3:].tobytes())
    path.write_bytes(data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :])
    with pytest.raises(DamagedError, match=r"__1_0\.distcp: 48 bytes of a tensor have the CRC-32"):
        ec.import_(saved, tmp_path / "run", 0)
    path.write_bytes(data[:-100])
    with pytest.raises(FormatError, match=r"__1_0\.distcp: has \d+ bytes; \.metadata lists"):
        ec.import_(saved, tmp_path / "run", 0)
    path.unlink()
    with pytest.raises(FormatError, match="is missing"):
        ec.import_(saved, tmp_path / "run", 0)
    assert not (tmp_path / "run").exists()


class Call:
    """Unpickled by pickle itself, it makes a folder."""

    def __init__(self, function: Any, *args: Any):
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def harmful(folder: str) -> dict[str, bytes]:
    """Pickles that run code, or change what a class of the reader does, where names are not looked at."""
    return {
        "call": pickle.dumps(Call(os.mkdir, folder)),
        "eval": pickle.dumps(Call(eval, f"__import__('os').mkdir({folder!r})")),
        "device": b"\x80\x02ctorch\ndevice\n(U\x03cputR.",
        "extension": b"\x80\x02\x82\x01.",
        "state of a class": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n}U\x05stateK\x01sb.",
        "state of a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}U\x0c__defaults__Ns\x86b.",
        "memory": b"\x80\x05\x96" + (2**45).to_bytes(8, "little") + b".",
        "no record": pickle.dumps({"state_dict_metadata": {}}),
        "cut short": pickle.dumps(list(range(1000)))[:500],
        "recursion": b"\x80\x02" + b"(" * 100_000 + b"l." ,
    }  # fmt: skip


def put_step(saved: pathlib.Path, content: bytes, storage: bytes = b"") -> None:
    """Makes this the pickle of the entry `optimizer.step`, and the storage that it names."""
    path = saved / "__1_0.distcp"
    data, end = path.read_bytes(), b"PK\x05\x06"  # that of an archive, and 18 bytes
    at = data.find(b"K\x07.")
    at = at if at >= 0 else data.index(b"archive/data/0")
    start, stop = data.rindex(end, 0, at) + 22, data.index(end, at) + 22
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", storage)
    new = made.getvalue()
    path.write_bytes(data[:start] + b"\0" * (stop - start - len(new)) + new + data[stop:])


@pytest.mark.parametrize("kind", harmful(""))
def test_no_pickle_runs_code(saved: pathlib.Path, tmp_path: pathlib.Path, kind: str) -> None:
    """Neither the metadata nor an entry, which is refused by name, and may be left out."""
    content = harmful(str(tmp_path / "harm"))[kind]
    if len(content) < 500 and kind != "no record":
        put_step(saved, content)
        problem = r"'optimizer/step' cannot be read \(its pickle .*; leave it out with exclude="
        with pytest.raises(UnsupportedError, match=problem):
            ec.plan_import(saved, tmp_path / "run", 0)
    assert ec.plan_import(saved, tmp_path / "run", 0, exclude="optimizer/step").leaves
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(FormatError, match=r"\.metadata"):
        ec.plan_import(saved, tmp_path / "run", 0)
    assert not (tmp_path / "harm").exists()


def test_values_may_be_trees_and_tensors(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Whatever is no object of a class comes along."""
    put_step(saved, pickle.dumps(collections.OrderedDict(a=[1, 2.5, None], b={"c": b"x"}), 2))
    ec.import_(saved, tmp_path / "run", 0, include="optimizer/step")
    assert restored(tmp_path / "run") == {"optimizer": {"step": {"a": [1, 2.5, None], "b": {"c": b"x"}}}}
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x03tQ"
    tensor = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x01(K\x02t(K\x01t\x89NtR."
    put_step(saved, tensor, np.arange(3, dtype=np.float32).tobytes())
    ec.import_(saved, tmp_path / "run", 1, include="optimizer/step")
    assert restored(tmp_path / "run", 1)["optimizer"]["step"].tolist() == [1, 2]


@pytest.mark.slow
def test_a_small_pickle_of_very_many_values_is_refused(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One list in two places of a list, which is in two places of another: 2^60 values."""
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    put_step(saved, pickle.dumps(value, 2))
    with pytest.raises(UnsupportedError, match=r"'optimizer/step' cannot be read \(it holds more than"):
        ec.plan_import(saved, tmp_path / "run", 0)


@pytest.mark.slow
def test_any_byte_of_a_directory_may_be_another(saved: pathlib.Path) -> None:
    """It is read, or refused with an error of ours."""
    rng = np.random.default_rng(0)
    outcomes = collections.Counter[str]()
    for name in (".metadata", "__0_0.distcp"):
        good = (saved / name).read_bytes()
        for _ in range(150):
            data = bytearray(good)
            data[rng.integers(len(data))] = rng.integers(256)
            (saved / name).write_bytes(data)
            try:
                import_files.plan_import(saved, saved.parent / "run", 0)
                outcomes["read"] += 1
            except EpochCheckpointError:
                outcomes["refused"] += 1
        (saved / name).write_bytes(good)
    assert outcomes.keys() == {"read", "refused"}
