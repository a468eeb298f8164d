"""Copies of what lies on accelerators, in each mode of `StorageOptions.snapshot`.

On CPU the arrays pass for those of an accelerator, of which the memory kinds of jax's CPU devices are the memory. With
a GPU (`JAX_PLATFORMS=cuda`) the same tests run on it.
"""

import collections
import contextlib
import errno
import functools
import json
import os
import pathlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import epochckpt as ec
from epochckpt.arrays import snapshot, transfers
from epochckpt.arrays.save_items import TreeItem
from epochckpt.errors import InvalidArgumentError, SaveError
from epochckpt.storage import Store
from epochckpt.testing import Faults

MODES = ["auto", "device", "pinned_host", "host"]
PLENTY = {"bytes_limit": 2**40, "bytes_in_use": 2**20}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of this process count as an accelerator's, which has memory enough; pieces may be small."""
    monkeypatch.setattr(transfers, "WRITE_BYTES", 4096)
    monkeypatch.setattr(transfers, "HOST", frozenset())
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(type(jax.devices()[0]), "memory_stats", lambda device: PLENTY)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(-1), ("x",))


def placed(kind: str, memory: str | None = None) -> Any:
    memory = memory or jax.devices()[0].default_memory().kind
    if kind == "one device":
        return SingleDeviceSharding(jax.devices()[-1], memory_kind=memory)
    return NamedSharding(mesh(), PartitionSpec("x") if kind == "sharded" else PartitionSpec(), memory_kind=memory)


def state_of(kind: str) -> dict[str, Any]:
    """Arrays of many sizes, of which some lie in pinned host memory, as the optimizer's state may."""
    make = functools.partial(jax.device_put, device=placed(kind))
    found = {str(n): make(np.arange(n, dtype=np.float32)) for n in (4, 16_400, 1_000_000)}
    found["half"] = make(np.arange(4096).astype(jnp.bfloat16))
    found["offloaded"] = jax.device_put(np.arange(400_000, dtype=np.float32), placed(kind, "pinned_host"))
    return found


@functools.cache
def step_of(kind: str) -> Any:
    """A step that donates all of its state, and leaves each array in its memory."""
    near, far = placed(kind), placed(kind, "pinned_host")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(tree: Any) -> Any:
        moved = tree | {"offloaded": jax.device_put(tree["offloaded"], near)}
        new = {name: -x - 1 for name, x in moved.items()}
        return new | {"offloaded": jax.device_put(new["offloaded"], far)}

    def stepped(state: Any) -> Any:
        new = step(state)
        return new | {"offloaded": jax.device_put(new["offloaded"], far)}  # jax 0.8 leaves it near

    return stepped


def host_copy(state: Any) -> dict[str, np.ndarray]:
    """Copies which do not keep jax from donating the arrays."""
    return {name: np.array(jax.device_put(x, may_alias=False)) for name, x in state.items()}


def opened(path: pathlib.Path, mode: str, **options: Any) -> ec.CheckpointManager:
    return ec.CheckpointManager(path, storage=ec.StorageOptions(snapshot=mode, **options))  # type: ignore[arg-type]


def settings(mode: str, **options: Any) -> transfers.TransferSettings:
    return transfers.TransferSettings(ec.StorageOptions(snapshot=mode, **options), writers=2)  # type: ignore[arg-type]


def save(manager: ec.CheckpointManager, epoch: int, tree: Any) -> None:
    assert manager.save(epoch, args=ocp.args.StandardSave(tree))


def assert_same(found: Any, expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), value)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["sharded", slow("one device"), slow("replicated")])
def test_donation_right_after_save_is_safe(tmp_path: pathlib.Path, faults: Faults, mode: str, kind: str) -> None:
    """Steps that donate what is saved run before a byte of it is written, and the steps' new arrays take its memory.
    What is saved is what there was, in the memory where it was.
    """
    state, kept, step = state_of(kind), {}, step_of(kind)
    places = {name: x.sharding for name, x in state.items()}
    with opened(tmp_path, mode) as manager:
        with faults.hold(Store.open_writer):
            for epoch in range(2):
                kept[epoch], before = host_copy(state), state
                save(manager, epoch, state)
                for _ in range(4):
                    state = step(state)
                assert all(x.is_deleted() for x in before.values())
            jax.block_until_ready(state)
        manager.wait_until_finished()
        for epoch, expected in kept.items():
            found = manager.restore(epoch)
            assert_same(found, expected)
            assert {name: x.sharding for name, x in found.items()} == places
        assert_same(step(found), {name: -x - 1 for name, x in kept[1].items()})  # and may be donated, too


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize(("mode", "what"), [("device", "copied"), ("pinned_host", "moved"), ("device", "offloaded")])
def test_without_the_copies_donation_harms_what_is_saved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, faults: Faults, mode: str, what: str
) -> None:
    """The test above can fail: here saves hold what they are to save itself."""
    if what == "copied":
        monkeypatch.setattr(transfers, "_copy_parts", lambda arrays, parts: [[x] for x in arrays])
    state = state_of("sharded")
    if what != "offloaded":
        state |= {"offloaded": jax.device_put(np.arange(8, dtype=np.float32), placed("sharded"))}
    real = jax.device_put
    if what == "moved":
        monkeypatch.setattr(jax, "device_put", lambda x, *args, **rest: x if isinstance(x, list) else real(x, *args))
    elif what == "offloaded":
        monkeypatch.setattr(jax, "device_put", lambda *args, may_alias=None, **rest: real(*args, **rest))
    with opened(tmp_path, mode) as manager:
        with faults.hold(Store.open_writer):
            save(manager, 0, state)
            jax.block_until_ready(step_of("sharded")(state))
        with pytest.raises(SaveError, match="deleted"):
            manager.wait_until_finished()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_cells_are_the_parts_of_arrays_that_they_stand_for(mode: str) -> None:
    """Whole shards, single parts of shards, and all parts of one; in pieces and not; while training has set a mesh."""
    device = jax.devices()[-1]
    values = [np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape) for shape, dtype in SHAPES]
    arrays = [jax.device_put(value, device) for value in values]
    offloaded = jax.device_put(values[2], SingleDeviceSharding(device, memory_kind="pinned_host"))
    cells = [transfers.AcceleratorCell(x, None) for x in [*arrays, offloaded]]
    expected = [*values, values[2]]
    part, rows = (slice(1, 2), slice(3, 40)), [(slice(i, i + 1), slice(0, 50)) for i in range(3)]
    cells += [transfers.AcceleratorCell(arrays[2], part), transfers.AcceleratorCell(offloaded, part)]
    expected += [values[2][part]] * 2
    cells += [transfers.AcceleratorCell(x, cut, "all") for x in [arrays[2]] for cut in rows]
    expected += [values[2][cut] for cut in rows]
    copies = transfers.Copies(settings(mode, host_memory_limit_bytes=1, block_bytes=4096), cells)
    with jax.set_mesh(mesh()):
        found = copies.start()
    for each, value in zip(found, expected, strict=True):
        assert each.array.tobytes() == value.tobytes()
        for start, stop in (
            (0, value.nbytes),
            (value.nbytes // 3, value.nbytes // 2 + 1),
            (value.nbytes, value.nbytes),
        ):
            assert bytes(each.data(start, stop)) == value.tobytes()[start:stop]
        assert each.unchanged()


SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((), np.float32),
    ((0, 5), np.float32),
    ((3, 50), np.int32),
    ((7, 3, 100), jnp.bfloat16),
    ((2, 2, 3000), np.uint8),
    ((100_001,), np.bool_),
    ((1, 1, 999, 2), np.complex64),
]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("piece_bytes", [1, 7, 1000, 10**9])
def test_pieces_are_contiguous_small_and_all_there_is(shape: tuple[int, ...], dtype: Any, piece_bytes: int) -> None:
    value = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    if value.nbytes > 1000 * piece_bytes:
        value = value[..., :100]
    parts = transfers._parts(transfers.AcceleratorCell(jnp.asarray(value), None), piece_bytes)
    cut = [value if part is None else value[tuple(map(slice, *part))] for part in parts]
    assert b"".join(each.tobytes() for each in cut) == value.tobytes()
    assert max(each.nbytes for each in cut) <= max(piece_bytes, value.itemsize)
    assert len(cut) <= max(1, 2 * value.nbytes // piece_bytes) or piece_bytes < 2 * value.itemsize


class Device:
    """A device that says this of its memory."""

    def __init__(self, stats: dict[str, int]):
        self._stats = stats

    def memory_stats(self) -> dict[str, int]:
        return self._stats


def test_a_copy_leaves_training_the_memory_that_it_needs() -> None:
    """A margin, what a step has needed at the peak, and not what the copies themselves did; or what is not known."""
    stats: dict[str, int] = {}
    a, b = Device(stats), Device(stats)
    auto, device = settings("auto"), settings("device")
    assert (auto.has_room(a, 1), device.has_room(a, 1)) == (False, True)
    stats |= {"bytes_limit": 1600, "bytes_in_use": 500}
    assert [auto.has_room(a, n) for n in (1000, 1001)] == [True, False]  # a sixteenth stays free
    stats |= {"peak_bytes_in_use": 800}  # a step took 300 more
    assert [auto.has_room(b, n) for n in (800, 801)] == [True, False]
    auto.note_copy(b, 800)
    stats |= {"peak_bytes_in_use": 1600}  # the same step, beside that copy of 800
    assert [auto.has_room(b, n) for n in (800, 801)] == [True, False]
    stats |= {"peak_bytes_in_use": 1500, "bytes_in_use": 500}  # less again: what steps once needed counts
    assert [auto.has_room(b, n) for n in (800, 801)] == [True, False]
    stats |= {"peak_bytes_in_use": 1600, "bytes_in_use": 1300}  # an older copy is still there
    assert not auto.has_room(b, 200)


@pytest.mark.usefixtures("faults")
def test_a_device_without_room_is_copied_to_host_memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    """Each device for itself, and before anything is copied: the host's memory is asked for what it then holds."""
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    full = jax.devices()[1]
    asked = collections.Counter[Any]()

    def stats(device: Any) -> dict[str, int]:
        """Of devices with room for just their own shards, and of one that lacks one byte."""
        asked[device] += 1
        limit = 2**26
        return {"bytes_limit": limit, "bytes_in_use": limit - limit // 16 - 1_600_000 + (device == full)}

    monkeypatch.setattr(type(full), "memory_stats", stats)
    value = np.arange(400_000 * len(jax.devices()), dtype=np.float32)
    state = {"a": jax.device_put(value, placed("sharded"))}
    sizes = {"host_memory_limit_bytes": 6 * 10**6, "block_bytes": 2**16}
    with moves_watched(monkeypatch) as moves, opened(tmp_path, "auto", **sizes) as manager:
        with faults.hold(Store.open_writer):
            save(manager, 0, state)
            assert set(moves.devices) == {full}
            assert asked == dict.fromkeys(jax.devices(), 1)
        manager.wait_until_finished()
        assert set(moves.devices) == set(jax.devices())
    with opened(tmp_path, "auto") as manager:
        assert_same(manager.restore(0), {"a": value})


@pytest.mark.parametrize("why", ["refused", "full"])
def test_a_copy_that_was_not_made_is_no_part_of_the_peak(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """A save that is refused before its copies begin, or finds the device full: the peak is all that of training."""
    array = jax.device_put(np.arange(100_003, dtype=np.float32), placed("one device"))  # of a size that only it has
    stats = {"bytes_limit": 1_600_000, "bytes_in_use": 500_000}
    monkeypatch.setattr(type(jax.devices()[0]), "memory_stats", lambda device: stats)

    def full(array: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(jnp, "copy", full)
    how = settings("auto")
    (device,) = array.devices()
    copies = transfers.Copies(how, [transfers.AcceleratorCell(array, None)])
    if why == "full":
        copies.start()
    stats |= {"peak_bytes_in_use": 1_500_000}  # a step needs 1,000,000 bytes for a moment
    assert [how.has_room(device, n) for n in (100_000, 100_001)] == [True, False]


def test_a_device_that_turns_out_to_be_full_is_copied_to_host_memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    def full(array: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1600000 bytes.")

    value = np.arange(400_007, dtype=np.float32)  # of a size for which no other test has compiled the copy
    state = {"a": jax.device_put(value, placed("one device"))}
    monkeypatch.setattr(jnp, "copy", full)
    with moves_watched(monkeypatch) as moves, opened(tmp_path, "device") as manager:
        with faults.hold(Store.open_writer):
            save(manager, 0, state)
            assert set(moves.devices) == {jax.devices()[-1]}
        manager.wait_until_finished()
        assert_same(manager.restore(0), {"a": value})


def buffers() -> set[int]:
    """The addresses of all arrays that lie on one device."""
    arrays = [x for x in jax.live_arrays() if len(x.devices()) == 1 and not x.is_deleted()]
    return {x.unsafe_buffer_pointer() for x in arrays}


class Moves:
    """What moves to pinned host memory.

    Attributes:
        devices: how many arrays came from each device.
        held, peak: the bytes that lie there, now and at most.
    """

    def __init__(self) -> None:
        self.devices = collections.Counter[Any]()
        self.held = self.peak = 0
        self._lock = threading.RLock()  # memory may be given back at any moment

    def add(self, arrays: Any, copies: Any) -> None:
        with self._lock:
            self.devices.update(device for x in arrays for device in x.devices())
            for each in copies:
                self.held += each.nbytes
                weakref.finalize(each, self._gone, each.nbytes)
            self.peak = max(self.peak, self.held)

    def _gone(self, nbytes: int) -> None:
        with self._lock:
            self.held -= nbytes


@contextlib.contextmanager
def moves_watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moves]:
    """What jax moves to pinned host memory in lists of arrays."""
    moves = Moves()
    put = jax.device_put

    def noted(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = put(x, *args, **kwargs)
        if isinstance(x, list) and all(each.sharding.memory_kind == "pinned_host" for each in found):
            moves.add(x, found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", noted)
        yield moves


@pytest.mark.slow
@pytest.mark.parametrize("place", ["posix", "memory"])
def test_copies_on_a_device_pass_through_bounded_host_memory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A state five times as large as what the host may hold; its pieces leave device and host as they are written."""
    value = {"large": np.arange(1_000_000, dtype=np.float32), "other": np.arange(250_000, dtype=np.float32)}
    value |= {f"small{i}": np.full(100, i, np.float32) for i in range(20)}
    state = {name: jax.device_put(x, placed("one device")) for name, x in value.items()}
    alive = buffers()
    path: Any = tmp_path if place == "posix" else "memory://transfers/?concurrency=2"
    sizes = {"host_memory_limit_bytes": 2**20, "block_bytes": 2**15}
    with moves_watched(monkeypatch) as moves, opened(path, "device", **sizes) as manager:
        save(manager, 0, state)
        manager.wait_until_finished()
        assert buffers() <= alive
        assert 2**18 <= moves.peak <= 2**20
        assert moves.held == 0
        assert_same(manager.restore(0), value)
    host = opened(tmp_path / "host", "host", host_memory_limit_bytes=2**20)
    with host, pytest.raises(InvalidArgumentError, match=r"copies 5\.0 MB to host memory"):
        save(host, 0, state)


@pytest.mark.usefixtures("faults")
def test_a_failed_save_gives_the_devices_memory_back(tmp_path: pathlib.Path, faults: Faults) -> None:
    state = {"a": jax.device_put(np.arange(100_000.0, dtype=np.float32), placed("one device"))}
    alive = buffers()
    with opened(tmp_path, "device") as manager:
        faults.fail(Store.open_writer, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        save(manager, 0, state)
        with pytest.raises(SaveError, match="No space left"):
            manager.wait_until_finished()
        assert buffers() <= alive


def test_where_donation_may_not_wait_save_does() -> None:
    """On backends of which nothing is known the copies are in this process's memory before training goes on."""
    array = jnp.arange(1000.0)
    for ordered, there in ((frozenset(), True), (frozenset({jax.default_backend()}), False)):
        how = transfers.TransferSettings(ec.StorageOptions(snapshot="pinned_host"), writers=2, ordered=ordered)
        (found,) = transfers.Copies(how, [transfers.AcceleratorCell(array, None)]).start()
        assert isinstance(found._pieces[0].data, np.ndarray) == there


def test_cpu_arrays_are_viewed_in_every_mode(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("about CPU arrays")
    monkeypatch.undo()
    large = jnp.arange(1_000_000.0)
    for mode in MODES:
        with opened(tmp_path / mode, mode) as manager:
            (tree,) = manager.components.saves.planner.plan(items_of({"a": large})).snapshot().trees
        (buffer,) = tree.buffers
        assert isinstance(buffer, snapshot.Buffer)
        assert buffer.array.ctypes.data == large.unsafe_buffer_pointer()


def items_of(tree: Any) -> Any:
    return [TreeItem("default", tree=tree)]


def test_another_word_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"snapshot must be one of 'auto', 'device', .* got 'gpu'"):
        ec.StorageOptions(snapshot="gpu")  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: pathlib.Path) -> None:
    """benchmarks/accelerator.py, on what is there: in every mode and for stock Orbax, what is restored is exact."""
    script = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "accelerator.py"
    sizes = ["--gb=0.001", "--leaves=3", "--rounds=1", "--work=0"]
    command = [sys.executable, str(script), *sizes, f"--directory={tmp_path}", f"--json={tmp_path / 'found.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["medians"]) == [*MODES, "stock Orbax"]
    assert all(value > 0 for row in found["medians"].values() for value in row.values())
    assert ("no accelerator" in done.stdout) == (jax.default_backend() == "cpu")
