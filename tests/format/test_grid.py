"""Index arithmetic: which node writes which part of which leaf, against JAX's own maps and by counting elements."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from epochckpt.arrays.plan import CellSource, HostSource, ItemPlan, forms_of, leaf_keys, plan_item
from epochckpt.arrays.sharding_grids import boxes_of_devices, device_cells
from epochckpt.errors import FormatError
from epochckpt.format import (
    ArrayItem,
    DataFile,
    EpochRecord,
    Grid,
    ItemKind,
    ItemRecord,
    Leaf,
    NodeEntry,
    NodeRecord,
    checksums,
    grid,
)
from epochckpt.format.grid import blocks
from epochckpt.format.parsing import parse_epoch, parse_head, parse_node
from epochckpt.format.records import ReplicaFile
from tests.support.processes import run_worker

SHAPES: tuple[tuple[int, ...], ...] = ((), (8,), (16, 8), (8, 24), (0, 8), (8, 16, 8), (8, 1, 8, 2))


def specs_of(axes: Sequence[str], rank: int) -> Iterator[PartitionSpec]:
    """Every PartitionSpec that gives each dimension none, one or several (in any order) of the mesh's axes."""
    entries: list[Any] = [None, *axes, *itertools.permutations(axes, 2), *itertools.permutations(axes, 3)]
    for chosen in itertools.product(entries, repeat=min(rank, 3)):
        flat = [a for e in chosen if e is not None for a in (e if isinstance(e, tuple) else (e,))]
        if len(set(flat)) == len(flat):
            yield PartitionSpec(*chosen)


def check_against_jax(sharding: Any, shape: tuple[int, ...]) -> None:
    """Cells and boxes say of every device what `devices_indices_map` says."""
    expected = {
        device: tuple(s.indices(d)[:2] for s, d in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    counts, cells = device_cells(sharding, shape)
    assert cells.keys() == expected.keys()
    assert boxes_of_devices(sharding, shape) == expected
    piece = [d // c for d, c in zip(shape, counts, strict=True)]
    assert tuple(piece) == sharding.shard_shape(shape)
    leaf = Leaf((), "value", "jax", np.dtype(np.int8), shape, 0)
    item = ArrayItem("default", (leaf,), (Grid(counts, ((0,),) * math.prod(counts)),))
    if math.prod(shape):
        for device, cell in cells.items():
            assert item.cell_box(0, cell) == expected[device]
    assert set(cells.values()) == set(range(math.prod(counts)))


def arithmetic_job() -> int:
    """Runs where there are eight devices; returns how many cases were compared."""
    devices = np.array(jax.devices())
    assert len(devices) == 8
    meshes = [
        Mesh(devices, ("x",)),
        Mesh(devices[::-1].reshape(2, 4), ("x", "y")),
        Mesh(devices.reshape(4, 2), ("x", "y")),
        Mesh(devices[[3, 1, 7, 5]].reshape(2, 2), ("x", "y")),
        Mesh(devices.reshape(1, 8), ("x", "y")),
        Mesh(devices[[0, 4, 2, 6, 1, 5, 3, 7]].reshape(2, 2, 2), ("x", "y", "z")),
    ]
    cases = 0
    for mesh, shape in itertools.product(meshes, SHAPES):
        for spec in specs_of(mesh.axis_names, len(shape)):
            sharding = NamedSharding(mesh, spec)
            try:
                sharding.shard_shape(shape)
            except ValueError:  # uneven: such arrays cannot be made
                continue
            check_against_jax(sharding, shape)
            cases += 1
    for shape in SHAPES:
        check_against_jax(SingleDeviceSharding(devices[5]), shape)
    return cases


@pytest.mark.slow
def test_cells_and_boxes_are_those_of_jax() -> None:
    """For many meshes of eight devices and every PartitionSpec, index arithmetic gives JAX's own map."""
    (cases,) = run_worker("tests.format.test_grid:arithmetic_job", devices_per_process=8)
    assert cases > 300


# -- plans of jobs with many nodes: fake devices, everything else real ---------------------------------------------


class FakeDevice:
    """A device of a process, for sharding arithmetic only."""

    platform, device_kind, client = "cpu", "cpu", None

    def __init__(self, number: int, process: int):
        self.id, self.process_index = number, process

    def __repr__(self) -> str:
        return f"FakeDevice({self.id})"


@dataclasses.dataclass
class FakeShard:
    device: FakeDevice


class FakeArray:
    """What planning looks at in a global `jax.Array`, as one process of the job sees it."""

    __class__ = jax.Array  # type: ignore[assignment]  # isinstance() believes it
    weak_type = False
    committed = True

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, process: int):
        self.shape, self.dtype, self.sharding = shape, np.dtype(dtype), sharding
        self.ndim = len(shape)
        mine = [d for d in sharding.mesh.devices.flat if d.process_index == process]
        self.addressable_shards = [FakeShard(d) for d in mine]

    def is_deleted(self) -> bool:
        return False


Spec = tuple[str, tuple[int, ...], Any, Any]  # name, shape, dtype, sharding (None: a NumPy leaf)


def fake_mesh(shape: tuple[int, ...], axes: tuple[str, ...], per_process: int) -> Mesh:
    count = math.prod(shape)
    devices = np.array([FakeDevice(i, i // per_process) for i in range(count)], dtype=object)
    return Mesh(devices.reshape(shape), axes)


def plan_on(
    node: int,
    nodes: int,
    state: Sequence[Spec],
    replica_split_bytes: int = 16 * 2**20,
    local_disks: bool = False,
    part_bytes: int | None = None,
) -> ItemPlan:
    leaves: list[Any] = [
        np.zeros(shape, dtype) if sharding is None else FakeArray(shape, dtype, sharding, node)
        for _, shape, dtype, sharding in state
    ]
    return plan_item(
        "default",
        [(("k", name),) for name, *_ in state],
        forms_of(leaf_keys(leaves), leaves, lambda leaf: ("default", state[leaf][0])),
        node=node,
        node_of_process={i: i for i in range(nodes)},
        replica_split_bytes=replica_split_bytes,
        part_bytes=part_bytes,
        cut=part_bytes is not None,
        local_disks=local_disks,
    )


def check_source(plan: ItemPlan, take: CellSource, cell: int, spec: Spec, mesh: Mesh, node: int) -> None:
    """The cell is taken from the place that it is written for."""
    info, sharding = plan.item.leaves[take.leaf], spec[3]
    assert isinstance(take, HostSource) == (sharding is None)
    if sharding is None or isinstance(take, HostSource) or not math.prod(info.shape):
        return
    shards = [d for d in mesh.devices.flat if d.process_index == node]
    index = sharding.devices_indices_map(info.shape)[shards[take.shard]]
    whole = [s.indices(d)[:2] for s, d in zip(index, info.shape, strict=True)]
    cut = take.cut or tuple(slice(0, b - a) for a, b in whole)
    found = tuple((a + s.start, a + s.stop) for (a, _), s in zip(whole, cut, strict=True))
    assert found == plan.item.cell_box(take.leaf, cell), info.name


def small_state(mesh: Mesh) -> list[Spec]:
    def on(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    return [
        ("rows", (16, 8), np.float32, on("x")),
        ("columns", (16, 8), np.float16, on(None, "y")),
        ("both", (16, 8), np.float32, on("x", "y")),
        ("folded", (32, 3), np.int8, on(("y", "x"))),
        ("everywhere", (48, 5), np.float32, on()),
        ("large", (96, 64), np.float32, on()),
        ("large_rows", (96, 64), np.float32, on("y")),
        ("scalar", (), np.int32, on()),
        ("nothing", (0, 8), np.float32, on(None, "y")),
        ("host", (7, 3), np.float64, None),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "per_process"), [((4, 2), 2), ((2, 4), 2), ((4, 2), 1), ((2, 2), 4)])
@pytest.mark.parametrize("replica_split_bytes", [1, 1024, 16 * 2**20])
@pytest.mark.parametrize("part_bytes", [None, 40, 1000])
def test_owners_cover_every_element_exactly_once(
    shape: tuple[int, int], per_process: int, replica_split_bytes: int, part_bytes: int | None
) -> None:
    """All nodes compute the same item, and their cells together cover each leaf without gap or overlap."""
    mesh = fake_mesh(shape, ("x", "y"), per_process)
    nodes = math.prod(shape) // per_process
    state = small_state(mesh)
    plans = [plan_on(n, nodes, state, replica_split_bytes, part_bytes=part_bytes) for n in range(nodes)]
    item = plans[0].item
    if part_bytes:  # the host's leaf has rows of 24 bytes, and a prime number of them
        assert all(item.cell_bytes(i) <= part_bytes for i in range(len(item.leaves)))
    assert all(p.item.json_fields == item.json_fields for p in plans)
    covered = [np.zeros(leaf.shape, dtype=np.int64) for leaf in item.leaves]
    written = [0] * len(item.leaves)
    for node, plan in enumerate(plans):
        order = []
        for leaf, cell, size, take in zip(*(a.tolist() for a in plan.owned), plan.sources, strict=True):
            info = item.leaves[leaf]
            assert item.owner(leaf, cell) == node
            assert take.leaf == leaf
            box = item.cell_box(leaf, cell)
            covered[leaf][tuple(slice(a, b) for a, b in box)] += 1
            written[leaf] += size
            order.append((-info.dtype.itemsize, leaf, cell))
            check_source(plan, take, cell, state[leaf], mesh, node)
        assert order == sorted(order), "a file is ordered by item size, leaf, cell"
    for leaf, seen, size in zip(item.leaves, covered, written, strict=True):
        assert (seen == 1).all(), leaf.name
        assert size == leaf.nbytes


@pytest.mark.parametrize(("shape", "per_process"), [((4, 2), 2), ((2, 4), 2), ((4, 2), 1), ((2, 2), 4)])
@pytest.mark.parametrize("replica_split_bytes", [1, 1024, 16 * 2**20])
def test_with_local_disks_a_node_writes_all_that_its_devices_hold_once(
    shape: tuple[int, int], per_process: int, replica_split_bytes: int
) -> None:
    """What it owns and what it writes besides are disjoint, and together its devices' boxes; the item is the same."""
    mesh = fake_mesh(shape, ("x", "y"), per_process)
    nodes = math.prod(shape) // per_process
    state = [*small_state(mesh), ("wide", (100, 100), np.float64, None)]
    for node in range(nodes):
        plan, plain = (plan_on(node, nodes, state, replica_split_bytes, local) for local in (True, False))
        assert plan.replicas is not None
        assert plain.replicas is None
        assert plan.digest == plain.digest
        item = plan.item
        assert {item.leaves[i].name for i in item.inlined} == {"host"}
        written = [np.zeros(leaf.shape, dtype=np.int64) for leaf in item.leaves]
        for part in (plan, plan.replicas):
            for leaf, cell, _, take in zip(*(a.tolist() for a in part.owned), part.sources, strict=True):
                assert take.leaf == leaf
                assert (item.owner(leaf, cell) == node) == (part is plan)
                check_source(plan, take, cell, state[leaf], mesh, node)
                written[leaf][tuple(slice(a, b) for a, b in item.cell_box(leaf, cell))] += 1
        for leaf, (_, _, _, sharding), seen in zip(item.leaves, state, written, strict=True):
            held = np.zeros(leaf.shape, dtype=np.int64)
            if sharding is None:
                held[...] = node == 0 or leaf.name == "wide"
            else:
                for device, index in sharding.devices_indices_map(leaf.shape).items():
                    held[index] |= device.process_index == node
            assert np.array_equal(held, seen), leaf.name


def test_what_a_node_wrote_for_local_disks_survives_its_record() -> None:
    """It is in the record of the node alone; small contents are in that of the epoch, and others are refused there."""
    file = ReplicaFile("default", 0, 5000, 4096, 3, 4096, checksums.BlockSums(checksums.WRITTEN, ("0" * 16, "1" * 16)))
    node = NodeRecord(
        epoch=7,
        save_id="0123456789abcdef-7-0",
        node="a",
        process=0,
        processes=2,
        plan="ab",
        files=(),
        timings={},
        replicas=(file,),
    )
    again = parse_node("7/a/node.json", node.to_bytes())
    assert again == node
    assert again.replicas[0].path == "_also/default.safetensors"
    assert b"also" not in dataclasses.replace(node, replicas=()).to_bytes()
    named = dataclasses.replace(node, replicas=(dataclasses.replace(file, name="x"),))
    with pytest.raises(FormatError, match="also: expected data files"):
        parse_node("7/a/node.json", named.to_bytes())

    leaf = Leaf((("k", "host"),), "host", "numpy", np.dtype(np.int16), (3,), 0, 0, -1)
    arrays = ArrayItem("default", (leaf,), (Grid((), ((0,),)),))
    record = dataclasses.replace(record_of(4, 1), items={"default": ItemRecord(ItemKind.ARRAYS, "", arrays)})
    assert b"carried" not in record.to_bytes()
    carrying = dataclasses.replace(record, inlined={"default": {"0": b"\0\1\2\3\4\5"}})
    assert parse_epoch("7/epoch.json", carrying.to_bytes()).inlined == carrying.inlined
    assert not parse_head("7/epoch.json", carrying.to_bytes()).inlined
    for wrong in ({"default": {"1": b"\0" * 6}}, {"default": {"0": b"\0"}}, {"other": {"0": b"\0" * 6}}):
        with pytest.raises(FormatError, match="carried"):
            parse_epoch("7/epoch.json", dataclasses.replace(record, inlined=wrong).to_bytes())


@pytest.mark.parametrize(
    ("shape", "cells"),
    [
        ((64, 16), (8,)),  # 128 bytes each
        ((3, 5, 1024), (3, 5, 8)),  # rows are larger: along the next axis, and the one after it
        ((50257, 2), (1733,)),  # 29 rows each, no other number divides them
        ((100003,), ()),  # a prime number of small rows
        ((7 * 100003,), (7,)),  # as near as one comes
        ((1, 1, 2**30), (8192,)),  # they are not to be too many
    ],
)
def test_what_is_larger_than_a_part_is_cut_by_rows(shape: tuple[int, ...], cells: tuple[int, ...]) -> None:
    """Into contiguous pieces of one size, as few as fit, if that is possible without making too many."""
    sharding = NamedSharding(fake_mesh((2, 1), ("x", "y"), 1), PartitionSpec())
    item = plan_on(0, 2, [("a", shape, np.uint8, sharding)], 2**40, part_bytes=128).item
    assert tuple(c for c in item.counts(0) if c > 1) == cells


def test_pieces_of_one_holder_each_leave_no_holder_with_more() -> None:
    """Three pieces on two nodes: the one that has two of a leaf has one of the next one."""
    sharding = NamedSharding(fake_mesh((2, 1), ("x", "y"), 1), PartitionSpec())
    plan = plan_on(0, 2, [(f"a{i}", (3, 128), np.uint8, sharding) for i in range(4)], 2**40, part_bytes=128)
    assert len(plan.owned.leaves) == 6


@pytest.mark.parametrize(
    ("part_bytes", "owners"),
    [(None, [[0], [1], [2], [3], [0]]), (2**19, [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]])],
    ids=["one cell", "two cells"],
)
def test_the_next_leaf_begins_after_the_owners_of_the_one_before(
    part_bytes: int | None, owners: list[list[int]]
) -> None:
    """Four nodes hold all of some arrays: of one cell each, or of two."""
    sharding = NamedSharding(fake_mesh((4, 1), ("x", "y"), 1), PartitionSpec())
    item = plan_on(
        0, 4, [(f"a{i}", (2, 2**19), np.uint8, sharding) for i in range(5)], 2**40, part_bytes=part_bytes
    ).item
    found = [[item.owner(leaf, cell) for cell in range(math.prod(item.counts(leaf)))] for leaf in range(5)]
    assert found == owners


def test_a_cell_belongs_only_to_a_node_that_holds_it() -> None:
    """Owners are among the holders, and holders are the processes of the devices that JAX gives the part to."""
    mesh = fake_mesh((4, 2), ("x", "y"), 2)
    state = small_state(mesh)
    item = plan_on(0, 4, state, 1024).item
    for number, (leaf, (_, shape, _, sharding)) in enumerate(zip(item.leaves, state, strict=True)):
        if sharding is None:
            assert item.grids[leaf.grid].holders == ((0,),)
            continue
        holders = item.grids[leaf.grid].holders
        owners = item.grids[leaf.grid].owners(leaf.rotation)
        for cell, held in enumerate(holders):
            assert owners[cell] == item.owner(number, cell)
            assert item.owner(number, cell) in held
            if math.prod(shape) == 0:
                continue
            box = item.cell_box(number, cell)
            expected = set()
            for device, index in sharding.devices_indices_map(shape).items():
                outer = [s.indices(d)[:2] for s, d in zip(index, shape, strict=True)]
                if all(a <= low and high <= b for (a, b), (low, high) in zip(outer, box, strict=True)):
                    expected.add(device.process_index)
            assert set(held) == expected


def test_the_cells_that_touch_a_box_are_those_that_meet_it() -> None:
    """Against brute force, for every box of a small leaf."""
    leaf = Leaf((), "value", "jax", np.dtype(np.int8), (6, 4), 0)
    item = ArrayItem("default", (leaf,), (Grid((3, 2), ((0,),) * 6),))
    owner_of = np.zeros((6, 4), dtype=int)
    for cell in range(6):
        owner_of[tuple(slice(a, b) for a, b in item.cell_box(0, cell))] = cell
    for a, b, c, d in itertools.product(range(7), range(7), range(5), range(5)):
        expected = sorted(set(owner_of[a:b, c:d].ravel().tolist())) if a <= b and c <= d else []
        assert item.cells_touching(0, ((a, b), (c, d))) == expected


def test_blocks_are_runs_of_whole_small_cells_or_pieces_of_one_large() -> None:
    """Ends ascend, the last is the file's; no block is larger than allowed; a cell is whole or alone in its blocks."""
    rng = np.random.default_rng(0)
    fixed = [[], [0], [5], [100], [101], [99, 1, 1], [250, 3, 0, 100, 0], [0, 0, 300]]
    for sizes in [*fixed, *(rng.choice([0, 1, 7, 50, 99, 100, 101, 230], size=20).tolist() for _ in range(200))]:
        array = np.array(sizes, dtype=np.int64)
        ends = blocks(array, 40, 100).tolist()
        assert ends[0] == 40
        assert ends[-1] == 40 + sum(sizes)
        assert ends == sorted(set(ends))
        lengths = np.diff(ends)
        assert (lengths <= 100).all()
        starts = 40 + np.concatenate([[0], np.cumsum(array)])
        for start, size in zip(starts[:-1].tolist(), sizes, strict=True):
            inside = [e for e in ends if start < e < start + size]
            if size < 100:
                assert inside == [], "a small cell is never cut"
            else:
                assert start in ends
                assert inside == list(range(start + 100, start + size, 100))
                assert start + size in ends
        cells = list(zip(starts[:-1].tolist(), sizes, strict=True))
        for a, b, c in zip(ends, ends[1:], ends[2:], strict=False):
            if all(size < 100 for start, size in cells if start < c and start + size > a):
                assert c - a > 100, f"blocks {a}-{b} and {b}-{c} of small cells would have fitted into one"


def transformer(mesh: Mesh, layers: int) -> list[Spec]:
    """Parameters and Adam moments of a decoder, weights sharded over `model` only: replicated over `data`."""

    def on(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    state: list[Spec] = []
    for copy in ("params", "mu", "nu"):
        dtype = ml_dtypes.bfloat16 if copy == "params" else np.float32
        state.append((f"{copy}/embed", (32000, 1024), dtype, on(None, "model")))
        for i in range(layers):
            base = f"{copy}/{i}"
            state += [
                (f"{base}/qkv", (1024, 3072), dtype, on(None, "model")),
                (f"{base}/out", (1024, 1024), dtype, on("model")),
                (f"{base}/up", (1024, 4096), dtype, on(None, "model")),
                (f"{base}/down", (4096, 1024), dtype, on("model")),
                (f"{base}/norm", (1024,), np.float32, on()),
                (f"{base}/bias", (1024,), np.float32, on()),
            ]
    return [*state, ("step", (), np.int32, on())]


@pytest.mark.parametrize(
    ("shape", "per_process", "limit"),
    [
        ((16, 4), 4, 1.3),
        ((4, 4), 4, 1.3),
        ((8, 2), 1, 1.3),
        ((32, 1), 1, 1.3),
        ((24, 1), 1, 1.3),
        # The cells of one column of `model` meet only every fourth of its holders.
        ((8, 4), 1, 1.45),
        ((16, 4), 2, 1.45),
    ],
)
def test_replicated_bytes_spread_evenly_over_their_holders(
    shape: tuple[int, int], per_process: int, limit: float
) -> None:
    """The node with the most to write has at most 1.3 times the mean, for a state replicated over `data`."""
    mesh = fake_mesh(shape, ("data", "model"), per_process)
    nodes = math.prod(shape) // per_process
    item = plan_on(0, nodes, transformer(mesh, 12)).item
    loads = np.array([item.owned(n).nbytes.sum() for n in range(nodes)])
    assert loads.sum() == sum(leaf.nbytes for leaf in item.leaves)
    assert loads.max() / loads.mean() <= limit, loads.tolist()


def test_few_nodes_own_the_small_replicated_leaves_of_a_large_job() -> None:
    """A restore opens few files; large leaves are spread over all nodes, and the table of grids has one row."""
    mesh = fake_mesh((64, 1), ("data", "model"), 1)
    everywhere = NamedSharding(mesh, PartitionSpec())
    small: list[Spec] = [(f"s{i}", (100,), np.float32, everywhere) for i in range(200)]
    large: list[Spec] = [(f"l{i}", (512, 1024), np.float32, everywhere) for i in range(200)]
    items = [plan_on(0, 64, state).item for state in (small, large)]
    owners = [{item.owner(i, 0) for i in range(200)} for item in items]
    assert [len(each) for each in owners] == [16, 64]
    assert [len(item.grids) for item in items] == [1, 1]


def test_equal_leaves_share_one_row_of_the_grid_table() -> None:
    """The table of grids grows with distinct shardings, not with leaves."""
    mesh = fake_mesh((16, 4), ("data", "model"), 4)
    few, many = (plan_on(0, 16, transformer(mesh, layers)).item for layers in (2, 24))
    assert len(few.grids) == len(many.grids) <= 8
    assert len(few.shardings) == len(many.shardings)
    assert len(many.meshes) == 1


# -- scale ---------------------------------------------------------------------------------------------------------


def record_of(nodes: int, leaves: int) -> EpochRecord:
    """An epoch of many nodes: a few distinct grids, each with a cell or more per node, and replicated leaves."""
    everyone = tuple(range(nodes))
    grids = (
        Grid((nodes,), tuple((n,) for n in everyone)),
        Grid((1, nodes), tuple((n,) for n in everyone)),
        Grid((nodes // 4,), tuple(tuple(range(4 * i, 4 * i + 4)) for i in range(nodes // 4))),
        Grid((), (everyone,)),
        Grid((8,), (everyone,) * 8),
    )
    entries = []
    for i in range(leaves):
        path = (("k", "params"), ("k", f"layer_{i // 10}"), ("k", "attention"), ("k", f"kernel_{i % 10}"))
        name = "/".join(key for _, key in path)
        shape = (8 * nodes, 8 * nodes)
        entries.append(Leaf(path, name, "jax", np.dtype(np.float32), shape, i % len(grids), i % 97, 0))
    sharding = {"mesh": 0, "spec": ["x", None], "memory": None}
    mesh = {"platform": "tpu", "axes": ["x"], "shape": [4 * nodes], "devices": list(range(4 * nodes))}
    item = ArrayItem("default", tuple(entries), grids, (sharding,), (mesh,))
    files = tuple(
        NodeEntry(f"process_{n}", n, 12345, "0123456789abcdef" * 2, (DataFile("default", 0, 10**9, 8192, 5000),), 1.5)
        for n in everyone
    )
    record = ItemRecord(ItemKind.ARRAYS, "", item, {})
    return EpochRecord(
        epoch=7,
        save_id="0123456789abcdef-1",
        objects=False,
        plan="ab" * 16,
        nodes=files,
        items={"default": record},
        default_item=True,
        metrics=None,
        custom_metadata={},
        started_ns=1,
        committed_ns=2,
        timings={"secs": 1.0},
    )


def test_a_record_of_1000_nodes_and_5000_leaves_is_small() -> None:
    """`epoch.json` stays under 1.5 MB, and survives its own parser."""
    record = record_of(1000, 5000)
    data = record.to_bytes()
    assert len(data) < 1.5e6
    again = parse_epoch("7/epoch.json", data)
    assert again.to_bytes() == data
    first, second = (r.items["default"].arrays for r in (record, again))
    assert first is not None
    assert second is not None
    assert first.leaves == second.leaves
    assert first.grids == second.grids


def test_a_record_does_not_grow_with_leaves_times_nodes() -> None:
    """Its size is a sum of a part that grows with nodes and a part that grows with leaves."""
    size = {(n, k): len(record_of(n, k).to_bytes()) for n in (100, 1000) for k in (500, 5000)}
    by_leaves = size[100, 5000] - size[100, 500]
    assert size[1000, 5000] - size[1000, 500] == pytest.approx(by_leaves, rel=0.05)


@pytest.mark.slow
def test_what_a_node_owns_is_found_without_walking_all_cells_in_python() -> None:
    """The cells of one of 1000 nodes: each appears once, and all nodes together own every cell."""
    item = record_of(1000, 50).items["default"].arrays
    assert item is not None
    total = sum(len(item.owned(n).leaves) for n in range(1000))
    assert total == sum(len(item.grids[leaf.grid].holders) for leaf in item.leaves)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7,), (3, 5), (1, 1, 9), (2, 3, 4, 5), (5, 0), (1, 64), (64, 1)])
@pytest.mark.parametrize("limit", [1, 2, 7, 16, 1000])
def test_boxes_are_the_array_piece_by_piece(shape: tuple[int, ...], limit: int) -> None:
    """One after the other they are the array's bytes in C order, and none is larger than asked for."""
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    pieces = [array[grid.slices(box)] for box in grid.boxes(shape, limit)]
    assert all(0 < piece.size <= limit for piece in pieces)
    joined = list(itertools.chain.from_iterable(piece.ravel().tolist() for piece in pieces))
    assert joined == array.ravel().tolist()


def test_boxes_are_as_few_as_whole_rows_allow() -> None:
    assert len(list(grid.boxes((10, 10), 30))) == 4
    assert len(list(grid.boxes((10, 10), 4))) == 30


@pytest.mark.parametrize(("size", "held"), [(0, []), (1, [0]), (8, [0])])
def test_a_node_has_a_replica_of_what_it_holds_and_another_writes(size: int, held: list[int]) -> None:
    """An array without bytes has none, and one of a single byte does."""
    leaf = Leaf(path=(("k", "w"),), name="w", kind="jax", dtype=np.dtype("int8"), shape=(size,), grid=0)
    item = ArrayItem("default", (leaf,), (Grid((), ((0, 1),)),), (), ())
    assert item.replicas(0).leaves.tolist() == []
    assert item.replicas(1).cells.tolist() == held
