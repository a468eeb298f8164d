"""A job of up to 10,000 nodes in one process: the real plan, records, messages, commit and reads, with tiny leaves.

JAX is given meshes of devices that do not exist, and each leaf a few bytes per device; all the rest is epochckpt's own
code on a real directory, over the coordination service of `jax.distributed`. The primary, node 1 and the last node are
`CheckpointManager`s. The rest is a crowd: its nodes are written by `write_nodes`, one after the other, as far as the
restores here read them, and report. The table has one row per number of nodes, of 4 devices each:

- "first" and "again": the training thread's CPU time in the first `save()`, which plans, and in later ones;
- "commit": from the last report until the primary has committed; "CPU": its CPU time; "busy": beside a thread that
  counts; "stall": the most CPU time between two of its counts; "parse": CPU time of a reader for `epoch.json`;
- messages, with the bytes of their values, of an opening and of a save at the last node, and of a save at the primary;
- sizes of `epoch.json`, of the head of a bucket with this one epoch, and of the Orbax view;
- files (and bytes) that one process reads in a restore, on the same mesh and on one of half as many nodes; and the
  bytes, with the record, that all nodes together read from shared storage on the same mesh.

    python benchmarks/simulate_pod.py                # up to 1,000 nodes
    python benchmarks/simulate_pod.py --full --json=pod.json
"""

import dataclasses
import json
import os
import pathlib
import queue
import socket
import tempfile
import threading
import time
import timeit
import types
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt import _threads
from epochckpt.agreement import coordination
from epochckpt.arrays import plan as plan_lib
from epochckpt.arrays.reader import EpochReader, Request
from epochckpt.arrays.sharding_grids import device_cells
from epochckpt.arrays.snapshot import Buffer, Snapshot, TreeSnapshot
from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_record import Head
from epochckpt.format import EpochRecord, parsing
from epochckpt.format.grid import box_shape, cell_box
from epochckpt.orbax import linked_view, view
from epochckpt.saving import opening
from epochckpt.saving.node_writer import write_nodes
from epochckpt.saving.reports import ProcessReport
from epochckpt.saving.save import Save
from epochckpt.storage import PosixStore

NODES = flags.DEFINE_list("nodes", ["1", "4", "16", "64", "256", "1000"], "Numbers of nodes.")
FULL = flags.DEFINE_bool("full", False, "4,000 and 10,000 nodes, too: some minutes each.")
LEAVES = flags.DEFINE_integer("leaves", 5000, "Leaves of the state.")
DIRECTORY = flags.DEFINE_string("directory", None, "Where to write; default: the system's temporary folder.")
JSON = flags.DEFINE_string("json", None, "Also write the measurements to this file.")

DEVICES = 4  # of a node


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


class Leaf(jax.Array):
    """The interface of a jax array that a save uses: of an array on many processes' devices, as one of them sees it."""

    def __init__(self, process: int, shape: tuple[int, ...], sharding: NamedSharding):
        self._process, self._shape, self._sharding = process, shape, sharding
        self._data = np.full(sharding.shard_shape(shape), 1.5, np.float32)

    shape = property(lambda self: self._shape)
    ndim = property(lambda self: len(self._shape))
    dtype = property(lambda self: np.dtype(np.float32))
    sharding = property(lambda self: self._sharding)
    committed = property(lambda self: True)
    weak_type = property(lambda self: False)
    devices = property(lambda self: self._sharding.mesh.devices[self._process])  # pyright: ignore[reportAssignmentType]
    addressable_shards = property(lambda self: [types.SimpleNamespace(device=device) for device in self.devices])

    def is_deleted(self) -> bool:
        return False

    def addressable_data(self, index: int) -> np.ndarray:
        return self._data


def mesh_of(nodes: int) -> Mesh:
    devices = [Device(i, i // DEVICES) for i in range(nodes * DEVICES)]
    return Mesh(np.array(devices, dtype=object).reshape(nodes, DEVICES), ("data", "model"))


def state(process: int, mesh: Mesh, nodes: int) -> dict[str, Any]:
    """60 % of the leaves cut along both axes, 20 % along one and the same on all nodes, 20 % the same everywhere."""
    cut, rows, alike = PartitionSpec("data", "model"), PartitionSpec(None, "model"), PartitionSpec()
    kinds = [((2 * nodes, 8), cut)] * 3 + [((8, 8), rows), ((8,), alike)]
    shardings = [(shape, NamedSharding(mesh, spec)) for shape, spec in kinds]
    return {"step": 7, "w": {f"layer_{i}": Leaf(process, *shardings[i % 5]) for i in range(LEAVES.value)}}


class Client:
    """One process's client of the coordination service; notes all its requests."""

    def __init__(self, client: Any, heard: Callable[[str, str], None] = lambda key, text: None):
        self._client, self._heard, self.messages = client, heard, list[tuple[str, int]]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(key: str, *args: Any, **options: Any) -> Any:
            found = getattr(self._client, name)(key, *args, **options)
            text = args[0] if name == "key_value_set" else found or ""
            self.messages.append((key, len(text) if isinstance(text, str) else sum(len(value) for _, value in text)))
            if name == "key_value_set":
                self._heard(key, text)
            return found

        return call

    def count(self, word: str) -> tuple[int, int]:
        return (len(sizes := [size for key, size in self.messages if word in key]), sum(sizes))


class CountingStore(PosixStore):
    """A directory that counts opened files and read bytes."""

    opened = nbytes = 0

    def open_reader(self, path: str, size: int | None = None) -> Any:
        reader = super().open_reader(path, size)
        read, self.opened = reader.read_parts, self.opened + 1

        def read_parts(offset: int, parts: Sequence[memoryview]) -> None:
            read(offset, parts)
            self.nbytes += sum(map(len, parts))

        reader.read_parts = read_parts
        return reader


def count(longest: list[float], ended: threading.Event) -> None:
    before = time.process_time()  # not what other programs take
    while not ended.is_set():
        now = time.process_time()
        longest[0], before = max(longest[0], now - before), now


class Pod:
    """A job of so many nodes."""

    def __init__(self, nodes: int, directory: str, client: Any):
        self.nodes, self.directory, self.client, self.mesh = nodes, directory, client, mesh_of(nodes)
        self.real = sorted({0, min(1, nodes - 1), nodes - 1})
        self.crowd = [node for node in range(nodes) if node not in self.real]
        self.reported = queue.SimpleQueue[str]()  # where node 1 has put its report
        self.clients = {node: Client(client, self.hear if node == 1 else lambda *_: None) for node in self.real}
        self.states = {node: state(node, self.mesh, nodes) for node in self.real}
        self.reports = list[str]()

    def hear(self, key: str, text: str) -> None:
        """Node 1 has put something. The crowd tells the same at once, as it opens the directory."""
        if "/report/" in key:
            self.reported.put(key)
        elif "/told/" in key:
            for node in self.crowd:
                self.client.key_value_set(f"{key[:-1]}{node}", text.replace("process_1", f"process_{node}"))

    def each(self, call: Callable[[int], Any]) -> dict[int, Any]:
        futures = {node: _threads.start(lambda node=node: call(node)) for node in self.real}
        return {node: future.result() for node, future in futures.items()}

    def open(self) -> dict[int, ec.CheckpointManager]:
        storage, local = ec.StorageOptions(open_timeout_secs=3600, save_timeout_secs=3600), threading.local()
        coordination.connect = lambda *_: local.coordinator  # what `jax.distributed` says in a job of many processes
        opening.keys_prefix = lambda coordinator, _: f"pod/{id(self)}"

        def opened(node: int) -> ec.CheckpointManager:
            local.coordinator = coordination.JaxCoordinator(self.clients[node], range(self.nodes), node)
            return ec.CheckpointManager(self.directory, storage=storage)

        return self.each(opened)

    def write_crowd(self, manager: ec.CheckpointManager) -> None:
        """Writes the nodes that are read of the save that node 1 has written, and the view's links of the others."""
        (save,) = manager.components.saves.queue.pending()
        item, staging = save.snapshot.items["default"].arrays, manager.components.saves.queue._side.staging(save)
        assert item is not None
        report = ProcessReport(save.plan, tuple(save.reports.nodes))
        again = len(self.reports) == len(self.crowd)
        bases = view.bases(save.snapshot.items, report.nodes[0].entry.files)
        for node in self.crowd:
            unread = min(node, abs(node - self.nodes // 2)) > 24
            if unread or again:
                linked_view.link_node(staging.store, staging.folder, f"process_{node}", False, bases)
            if again:
                continue
            if unread:
                entry = dataclasses.replace(report.nodes[0].entry, name=f"process_{node}", process=node)
                report = dataclasses.replace(report, nodes=(dataclasses.replace(report.nodes[0], entry=entry),))
            else:
                cells, source = item.owned(node), plan_lib.ShardSource(leaf=0, shard=0, cut=None)
                plan = plan_lib.ItemPlan(item, cells, (source,) * len(cells[0]), tuple(item.part_ends(cells, None)))
                buffers = [Buffer(np.full(span.nbytes // 4, 1.5, np.float32)) for span in plan.cell_ranges]
                part = Snapshot([TreeSnapshot(plan, node, buffers)], plan_digest=save.snapshot.plan_digest)
                report = write_nodes(
                    staging=staging,
                    nodes=dataclasses.replace(manager.components.saves.nodes, process=node),
                    save=Save(save.request, part, save.deadline),
                    options=ec.StorageOptions(),
                    pool=_threads.Pool(1),
                )
            self.reports.append(json.dumps(report.to_wire()))

    def save(self, managers: dict[int, ec.CheckpointManager], epoch: int, busy: bool = False) -> dict[str, float]:
        """One save by all nodes; the times of it. `busy`: beside a thread that counts."""

        def begin(node: int) -> float:
            began = time.thread_time()
            assert managers[node].save(epoch, args=ocp.args.StandardSave(self.states[node]))
            return time.thread_time() - began

        blocked = self.each(begin)[0]
        longest, ended = [0.0], threading.Event()
        if busy:
            _threads.start(lambda: count(longest, ended))
        if self.nodes > 1:
            key = self.reported.get()
            for other in (0, self.nodes - 1):
                for save in managers[other].components.saves.queue.pending():
                    save.written.wait()
            self.write_crowd(managers[1])
            for node, report in zip(self.crowd, self.reports, strict=True):
                self.client.key_value_set(f"{key[:-1]}{node}", report)
        reported, cpu = time.perf_counter(), time.process_time()
        managers[0].wait_until_finished()
        commit, cpu = time.perf_counter() - reported, time.process_time() - cpu
        ended.set()
        self.each(lambda node: managers[node].wait_until_finished())
        return {"blocked": blocked, "commit": commit, "cpu": cpu, "stall": longest[0]}

    def read(self, record: EpochRecord, process: int, nodes: int) -> tuple[int, int]:
        """What one process of a job of so many nodes reads of epoch 0: how many files and bytes."""
        store, requests, mesh = CountingStore(self.directory), list[Request](), mesh_of(nodes)
        arrays = record.items["default"].arrays
        assert arrays is not None
        for name, leaf in self.states[0]["w"].items():
            number = arrays.by_name[f"w/{name}"]
            counts, cells = device_cells(NamedSharding(mesh, leaf.sharding.spec), leaf.shape)
            side = [d // c for d, c in zip(leaf.shape, counts, strict=True)]
            for cell in {cells[device] for device in mesh.devices[process]}:
                box = cell_box(cell, counts, side)
                requests.append(Request("default", number, box, np.empty(box_shape(box), np.float32)))
        EpochReader(store, "0", record, _threads.Pool(1)).read(requests)
        assert all((request.out == 1.5).all() for request in requests)
        return store.opened, store.nbytes


def measure(nodes: int, directory: str, client: Any) -> dict[str, Any]:
    """One row of the table: milliseconds, counts, bytes, and counts with their bytes."""
    pod, cpu = Pod(nodes, directory, client), time.process_time()
    managers = pod.open()
    primary, last, opening_secs = pod.clients[0], pod.clients[nodes - 1], time.process_time() - cpu
    asked = last.count("")
    first, *later = [pod.save(managers, epoch) for epoch in range(4)]
    busy = pod.save(managers, 4, busy=True)
    pod.each(lambda node: managers[node].close())
    data = pathlib.Path(directory, "0", "epoch.json").read_bytes()
    record = parsing.parse_epoch("epoch.json", data)
    parse = timeit.repeat(lambda: parsing.parse_epoch("epoch.json", data), timer=time.thread_time, repeat=3, number=1)
    assert nodes > 48 or not linked_view.check(PosixStore(directory), "0", record), "the view is not whole"
    same, half = pod.read(record, nodes // 2, nodes), pod.read(record, nodes // 4, max(nodes // 2, 1))
    view_bytes = sum(size for size, _ in (record.orbax_view or {}).values())
    row, columns = {"nodes": nodes}, {"again ms": "blocked", "commit ms": "commit", "CPU ms": "cpu"}
    row |= {"first ms": first["blocked"] * 1e3} | {
        column: min(each[name] for each in later) * 1e3 for column, name in columns.items()
    }
    row |= {"busy ms": busy["commit"] * 1e3, "stall ms": busy["stall"] * 1e3, "parse ms": min(parse) * 1e3}
    row |= {"opening ms": opening_secs * 1e3, "opening's messages": asked}
    row |= {"a save's": last.count("/3-0"), "the primary's": primary.count("/3-0"), "record": len(data)}
    row |= {"head": len(Head(epochs={"0": EpochSummary.for_head(record)}).to_bytes())}
    row |= {"view": None if record.orbax_unsupported else view_bytes, "files on the same mesh": same}
    return row | {"on half the nodes": half, "all nodes' bytes": nodes * (len(data) + same[1])}


def shown(value: Any) -> str:
    form = {tuple: "{0[0]:,} ({0[1]:,})", float: "{:.1f}", type(None): "none"}.get(type(value), "{:,}")
    return form.format(value)


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    jax.distributed.initialize(f"localhost:{port}", num_processes=1, process_id=0)
    client, rows = ocp.multihost.get_jax_distributed_client(), list[dict[str, Any]]()
    for nodes in [*map(int, NODES.value), *([4000, 10000] if FULL.value else [])]:
        with tempfile.TemporaryDirectory(prefix="pod-", dir=DIRECTORY.value, ignore_cleanup_errors=True) as directory:
            rows.append(measure(nodes, directory, client))
            head = f"| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}\n" if len(rows) == 1 else ""
            print(f"{head}| {' | '.join(map(shown, rows[-1].values()))} |", flush=True)
    if JSON.value:
        pathlib.Path(JSON.value).write_text(
            json.dumps({"leaves": LEAVES.value, "nodes": {str(row["nodes"]): row for row in rows}}, indent=1)
        )


if __name__ == "__main__":
    app.run(main)
