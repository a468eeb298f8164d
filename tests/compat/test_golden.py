"""Directories that epochckpt has really written, of each state of the format: today's code reads and writes the same.

`tests/support/golden_jobs.py` has what saved them. The values that are expected here are written once more, as plain
NumPy, and `Plain` reads data files by the rules of docs/format.md alone, with no code of ours.
"""

from __future__ import annotations

import gc
import json
import pathlib
import uuid
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from tests.support import golden, golden_jobs
from tests.support.golden import DATA, GOLDEN, SUMS

READ_ONLY = ocp.CheckpointManagerOptions(read_only=True)
CHANGED = (
    "the format changed: document it in docs/format.md and make the golden directories again "
    "(python -m tests.compat.make_golden)"
)
NODES = ["process_0", "process_1", "process_2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The golden directories, by name; tests only read them."""
    where = tmp_path_factory.mktemp("golden")
    return {name: golden.unpack(name, where / name) for name in GOLDEN}


def opened(directory: pathlib.Path | str) -> ec.CheckpointManager:
    return ec.CheckpointManager(directory, options=READ_ONLY)


def same(found: Any, expected: Any) -> bool:
    """Whether two values are equal, bit for bit, and of one type; arrays of jax may stand for those of NumPy."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, np.ndarray | np.generic):
        one, other = np.asarray(found), np.asarray(expected)
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return type(found) is type(expected) and repr(found) == repr(expected)


# -- what was saved ----------------------------------------------------------------------------------------------------


def sharded(epoch: int) -> dict[str, Any]:
    rows = [[4 * row + column + epoch for column in range(4)] for row in range(6)]
    return {
        "params": {
            "both": np.array(rows, "f4"),
            "joined": np.array([[2 * value for value in row] for row in rows], "f4"),
            "columns": np.array(rows, "f4").astype(ml_dtypes.bfloat16),
            "replicated": [np.array([10 * i + epoch + j for j in range(5)], "f4") for i in range(4)],
            "narrow": np.array([epoch, epoch + 1, epoch + 2, epoch + 3, epoch + 4, epoch + 5], "i4"),
        },
        "count": np.array(epoch, "i4"),
        "numpy": np.array([0, epoch, 2 * epoch, 3 * epoch], "i8"),
        "step": epoch,
        "rate": 0.5,
        "name": f"epoch {epoch}",
    }


def own(epoch: int, node: int) -> dict[str, Any]:
    return {"seed": 100 * epoch + node, "queue": [np.array([0, 1, 2][: node + 1], "i8"), f"node {node}"]}


SMALL_FLOATS = {  # 1, 2, 0.5 and 4 as bits, as the standards of these types have them
    "bfloat16": [0x3F80, 0x4000, 0x3F00, 0x4080],
    "float16": [0x3C00, 0x4000, 0x3800, 0x4400],
    "float8_e3m4": [0x30, 0x40, 0x20, 0x50],
    "float8_e4m3": [0x38, 0x40, 0x30, 0x48],
    "float8_e4m3b11fnuz": [0x58, 0x60, 0x50, 0x68],
    "float8_e4m3fn": [0x38, 0x40, 0x30, 0x48],
    "float8_e4m3fnuz": [0x40, 0x48, 0x38, 0x50],
    "float8_e5m2": [0x3C, 0x40, 0x38, 0x44],
    "float8_e5m2fnuz": [0x40, 0x44, 0x3C, 0x48],
    "float8_e8m0fnu": [0x7F, 0x80, 0x7E, 0x81],
    "float6_e2m3fn": [0x08, 0x10, 0x04, 0x18],
    "float6_e3m2fn": [0x0C, 0x10, 0x08, 0x14],
    "float4_e2m1fn": [0x02, 0x04, 0x01, 0x06],
}


def dtypes() -> dict[str, np.ndarray]:
    found = {name: np.array([-1, 0, 1, 1], name) for name in ("int8", "int16", "int32")}
    found |= {name: np.array([-1, 0, 1, 1]).astype(getattr(ml_dtypes, name)) for name in ("int2", "int4")}
    found |= {name: np.array([3, 0, 1, 2], name) for name in ("uint8", "uint16", "uint32")}
    found |= {name: np.array([3, 0, 1, 2]).astype(getattr(ml_dtypes, name)) for name in ("uint2", "uint4")}
    for name, bits in SMALL_FLOATS.items():
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        found[name] = np.array(bits, "u2" if dtype.itemsize == 2 else "u1").view(dtype)
    return found | {
        "float32": np.array([1, 2, 0.5, 4], "f4"),
        "bool": np.array([True, False, True]),
        "complex64": np.array([1 + 2j, -0.5j], "c8"),
        "int64": np.array([1, 2, 3], "i8"),
        "uint64": np.array([1, 2, 3], "u8"),
        "float64": np.array([1, 2, 3], "f8"),
        "complex128": np.array([1, 2, 3], "c16"),
        "datetime64": np.array(["2026-11-24", "NaT"], "M8[D]"),
        "timedelta64": np.array([5, -5], "m8[25us]"),
    }


def kinds() -> dict[str, Any]:
    """What comes back without a target: containers are dicts and lists, and empty ones what they were."""
    return {
        "dtypes": dtypes(),
        "python": [
            True,
            -7,
            0x400000000000000000,
            1.5,
            -0.0,
            float("nan"),
            2 + 3j,
            "größe",
            "\ud800",
            b"\x00\xff",
            None,
        ],
        "empty": [{}, [], (), np.array([], "f4").reshape(0, 3)],
        "long": ["long " * 1000, b"\x01\x02" * 3000],
        "scalar": np.int16(-5),
        "pair": {"left": np.array([0, 1, 2], "i8"), "right": {"left": 1}},
        "keys": {"a/b": 1, "a": {"b": 2}, "7": 3, "%": 4},
        "ints": {7: np.float32(0.5), -1: "minus"},
        "floats": {2.5: 1},
        "cut": [
            np.array([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], "f4"),
            np.array([0, 1, 2, 3, 4, 5, 6, 7], "i4"),
        ],
        "copies": np.array([[0, 1, 2], [3, 4, 5]], "u1"),
    }


# -- a reader by docs/format.md alone ----------------------------------------------------------------------------------


class Plain:
    """The arrays of one item of an epoch on a file system, read by the rules that docs/format.md gives."""

    def __init__(self, epoch: pathlib.Path, item: str):
        self.record = json.loads((epoch / "epoch.json").read_bytes())
        self.item, self.epoch, self.name = self.record["items"][item], epoch, item

    def holders(self, grid: int, cell: int) -> list[int]:
        held = self.item["grids"][grid][1][cell]
        return held if isinstance(held, list) else self.holders(grid, held)

    def cells(self, node: int) -> list[tuple[int, int]]:
        """(leaf, cell) of all that a node wrote, in the order of its files."""
        found: list[tuple[int, int, int]] = []
        for number, row in enumerate(self.item["leaves"]):
            if len(row) == 2:
                continue
            grid, rotation = row[4], row[5]
            for cell in range(len(self.item["grids"][grid][1])):
                holders = self.holders(grid, cell)
                if holders[(cell + rotation) % len(holders)] == node:
                    found.append((-self.dtype(row).itemsize, number, cell))
        return [(leaf, cell) for _, leaf, cell in sorted(found)]

    @staticmethod
    def dtype(row: list[Any]) -> np.dtype[Any]:
        return np.dtype(getattr(ml_dtypes, row[2], row[2]))

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, by the keys of their path joined with `.`."""
        found = {}
        for row in self.item["leaves"]:
            if len(row) > 2:
                found[self.key(row)] = np.zeros(row[3], self.dtype(row))
        for number, (_, _, _, _, _, files) in enumerate(self.record["nodes"]):
            parts = sorted((part, start, cells) for of, part, _, start, cells, *_ in files if of == self.name)
            every = self.cells(number)
            assert sum(cells for _, _, cells in parts) == len(every)
            for part, start, cells in parts:
                name = f"{self.name}-{part:05d}.safetensors" if part else f"{self.name}.safetensors"
                data = (self.epoch / self.record["nodes"][number][0] / name).read_bytes()
                for leaf, cell in every[:cells]:
                    row = self.item["leaves"][leaf]
                    counts = [*self.item["grids"][row[4]][0], *[1] * len(row[3])][: len(row[3])]
                    shape = [length // count for length, count in zip(row[3], counts, strict=True)]
                    size = int(np.prod(shape)) * self.dtype(row).itemsize
                    place = np.unravel_index(cell, counts) if counts else ()
                    box = tuple(slice(i * side, (i + 1) * side) for i, side in zip(place, shape, strict=True))
                    found[self.key(row)][box] = np.frombuffer(data[start : start + size], self.dtype(row)).reshape(
                        shape
                    )
                    start += size
                every = every[cells:]
                assert start == len(data)
        return found

    @staticmethod
    def key(row: list[Any]) -> str:
        return ".".join(str(part if isinstance(part, str) else part[1]) for part in row[0])


def flat(tree: Any, prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays of a tree, by keys joined with `.`."""
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: leaf for key, value in pairs for name, leaf in flat(value, f"{prefix}{key}.").items()}
    return {prefix[:-1]: np.asarray(tree)} if isinstance(tree, np.ndarray | np.generic) else {}


# -- reading -----------------------------------------------------------------------------------------------------------


def test_the_files_are_those_that_were_made(folders: dict[str, pathlib.Path]) -> None:
    """And few: they are in every clone."""
    lines = [f"{digest}  {name}/{path}" for name in GOLDEN for path, digest in golden.sums(folders[name]).items()]
    assert SUMS.read_text(encoding="utf-8").splitlines() == lines
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 2**20


def check_items(manager: ec.CheckpointManager, epoch: int, saved: int) -> None:
    old: list[Any] = []

    def reshard(states: list[Any], count: int, now: int) -> list[Any]:
        assert (count, now) == (3, 1)
        old.extend(states)
        return states[:1]

    names = {"state": ocp.args.StandardRestore(), "config": ocp.args.JsonRestore()}
    found = manager.restore(epoch, args=ocp.args.Composite(**names, own=ec.args.NodeRestore(reshard=reshard)))
    assert same(found["state"], sharded(saved))
    assert found["config"] == {"epoch": saved}
    assert [same(state, own(saved, node)) for node, state in enumerate(old)] == [True] * 3
    assert manager.nodes(epoch) == NODES
    assert manager.verify(epoch).ok


@pytest.mark.parametrize("where", ["history", "bucket"])
def test_a_history_of_several_nodes_is_read(folders: dict[str, pathlib.Path], where: str) -> None:
    """On a file system, and from the objects of a bucket."""
    directory = str(folders[where])
    if where == "bucket":
        directory = f"memory://{uuid.uuid4().hex}/run"
        golden.load(folders[where], directory)
    with opened(directory) as manager:
        assert manager.all_steps() == [0, 2, 3, 6]
        for epoch, saved in {0: 0, 2: 2, 3: 33, 6: 6}.items():
            check_items(manager, epoch, saved)
        metrics = {epoch: manager.metrics(epoch) for epoch in (0, 2, 3, 6)}
        assert str(metrics) == str(
            {
                0: {"loss": 1.0, "parts": {"a": float("nan")}, "accuracy": 0.25},
                2: {"loss": 1 / 3, "parts": {"a": float("nan")}},
                3: {"loss": 0.125},
                6: None,
            }
        )
        assert manager.metadata(2).custom_metadata == {"note": ["x", 2]}
        newest = manager.restore(None, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
        assert newest["state"]["step"] == 6
    seen = ec.inspect(directory)
    overview = seen.overview(None)
    assert [(row.epoch, row.state, row.latest) for row in overview.epochs] == [
        (0, "committed", False),
        (2, "committed", False),
        (3, "committed", False),
        (6, "committed", True),
    ]
    assert [(row.epoch, str(row.metrics)) for row in overview.deleted] == [(1, "{'loss': 0.5, 'parts/a': nan}")]
    assert [(row.kind, tuple(row.epochs)) for row in overview.leftovers] == [("rolled back", (4, 5))]
    assert len(seen.goodput().goodput.runs) == 2
    assert seen[0].row.sources == {"accuracy": "evaluator"}


@pytest.mark.parametrize("epoch", [0, 2, 3, 6])
def test_docs_format_md_alone_tells_where_each_cell_lies(folders: dict[str, pathlib.Path], epoch: int) -> None:
    """Owners by `holders[(cell + rotation) mod n]`, order, offsets, types: all arrays of all nodes' files."""
    plain = Plain(folders["history"] / str(epoch), "state")
    expected = flat(sharded(33 if epoch == 3 else epoch))
    found = plain.arrays()
    assert {name: same(found[name], expected[name]) for name in expected} == dict.fromkeys(expected, True)
    assert found.keys() == expected.keys()
    # The rule is tested: with the rotation the other way round, other nodes own.
    turned = [row for row in plain.item["leaves"] if len(row) > 2 and row[5] % 3 and len(plain.holders(row[4], 0)) == 3]
    assert turned


def test_every_dtype_and_kind_of_leaf_is_read(folders: dict[str, pathlib.Path]) -> None:
    """Without a target, and by docs/format.md alone."""
    with opened(folders["kinds"]) as manager:
        assert manager.all_steps() == [0, 1]
        found, expected = manager.restore(0, args=ocp.args.StandardRestore()), kinds()
        prng = found.pop("prng")
        assert {name: same(found[name], expected[name]) for name in expected} == dict.fromkeys(expected, True)
        assert found.keys() == expected.keys()
        assert [str(jax.random.key_impl(key)) for key in prng] == ["threefry2x32", "rbg"]
        assert np.asarray(jax.random.key_data(prng[0])).tolist() == [0, 7]
        assert np.asarray(jax.random.key_data(prng[1])).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert same(manager.restore(1), np.array([0, 1, 2], "f4"))
        assert manager.metrics(1) == 0.5
        assert all(manager.verify(epoch).ok for epoch in (0, 1))
    plain = Plain(folders["kinds"] / "0", "default").arrays()
    for name, array in flat({"dtypes": dtypes(), "cut": kinds()["cut"], "copies": kinds()["copies"]}).items():
        assert same(plain[name], array), name


def test_a_rollback_that_is_only_recorded_counts(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """Readers obey it, and the next run that writes finishes it."""
    with opened(folders["rolling-back"]) as manager:
        assert manager.all_steps() == [0]
        assert same(manager.restore(None), {"w": np.array([0, 0, 0], "i4")})
    run = golden.unpack("rolling-back", tmp_path / "run")
    with ec.CheckpointManager(run) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.zeros(2)}))
    assert not (run / "rollback.json").exists()
    assert sorted(path.name for path in run.glob("rolled-back-*/*")) == ["1", "2"]
    assert [row.epoch for row in ec.inspect(run).epochs()] == [0, 1]


def test_a_mirror_and_what_it_mirrors_are_read(folders: dict[str, pathlib.Path]) -> None:
    """Each by itself: where the mirror was is not where it is."""
    for name, epochs in {"run": [2, 3], "mirror": [0, 1, 2, 3]}.items():
        with opened(folders["mirrored"] / name) as manager:
            assert manager.all_steps() == epochs
            for epoch in epochs:
                assert np.asarray(manager.restore(epoch)["w"]).tolist() == [epoch] * 3
                assert manager.metrics(epoch) == {"loss": float(epoch)}
                assert manager.verify(epoch).ok


def test_directories_of_hosts_are_read(folders: dict[str, pathlib.Path]) -> None:
    """Each disk has the files of its node, and what that node holds; the mirror has everything."""
    for number in range(3):
        with opened(folders["hosts"] / f"disk-{number}") as manager:
            assert manager.all_steps() == [0, 1]
            assert manager.verify(1).ok
            found = manager.restore_leaves(1, "params/replicated/*", "state")
            assert same([found[f"params/replicated/{i}"] for i in range(4)], sharded(1)["params"]["replicated"])
        assert [row.state for row in ec.inspect(folders["hosts"] / f"disk-{number}").epochs()] == ["committed"] * 2
    with opened(folders["hosts"] / "mirror") as manager:
        for epoch in (0, 1):
            check_items(manager, epoch, epoch)


def test_the_objects_of_one_process_are_read(folders: dict[str, pathlib.Path]) -> None:
    """Their head says what there is, and what was deleted and rolled back."""
    url = f"memory://{uuid.uuid4().hex}/run"
    golden.load(folders["in-memory"], url)
    with opened(url) as manager:
        assert manager.all_steps() == [1, 2]
        assert [same(manager.restore(epoch), {"w": np.array([epoch, epoch + 1, epoch + 2])}) for epoch in (1, 2)]
        assert manager.metrics(2) == {"loss": 1 / 3, "accuracy": 0.5}
        assert all(manager.verify(epoch).ok for epoch in (1, 2))
    assert [(row.epoch, row.metrics) for row in ec.inspect(url).overview(None).deleted] == [(0, {"loss": 1.0})]


def test_a_job_of_steps_is_read_and_goes_on(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    """Its blobs and notes; the same job resumes, and has nothing left to do."""
    seen = ec.inspect(folders["steps"])
    assert seen.unit == "step"
    assert seen.latest is not None
    assert seen.latest.epoch == 30
    rows = seen.epochs()
    assert [row.epoch for row in rows] == [0, 10, 20, 30]
    assert [row.metrics.get("loss") for row in rows[1:]] == [1 / 46, 1 / 191, 1 / 436]
    run = golden.unpack("steps", tmp_path / "run")
    workspace = golden_jobs.steps(str(run))
    assert workspace["total"] == 435
    assert np.asarray(workspace["w"]).tolist() == [435.0, 435.0]


def test_epochs_of_single_nodes_are_read(folders: dict[str, pathlib.Path]) -> None:
    """By a manager of `ec.caffe2`, and by the views."""
    for number in range(2):
        for epoch in range(2):
            manager = ec.caffe2.CheckpointManager(folders["single-nodes"], f"trainer:{number}", "epochckpt")
            session = ec.LocalSession()
            session.run(manager.init(retrieve_from_epoch=epoch))
            session.run(manager.load(epoch))
            assert session.workspace()["step"] == epoch
            assert np.asarray(session.workspace()["w"]).tolist() == [number, number + 1, number + 2]
    assert [row.epoch for row in ec.inspect(folders["single-nodes"]).epochs()] == [0, 1]


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kinds", "in-memory", "steps", "single-nodes"])
def test_today_s_code_writes_the_same(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path, name: str) -> None:
    """Data files byte for byte, and records but for ids and times: here in this process."""
    run = tmp_path / "run"
    getattr(golden_jobs, GOLDEN[name].job)(str(run))
    gc.collect()  # managers of `ec.caffe2` end, and remove their staging
    assert golden.differences(folders[name], run) == [], CHANGED


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GOLDEN))
def test_today_s_code_makes_the_same(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path, name: str) -> None:
    """All of them, in the processes that made them, on a file system and in a bucket."""
    GOLDEN[name].make(tmp_path / "run")
    assert golden.differences(folders[name], tmp_path / "run") == [], CHANGED
