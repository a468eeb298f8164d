"""Files that changed after the commit: a flipped bit, a cut, a swap. No restore gives a wrong value."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import shutil
import struct
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt import errors
from tests.support.jobs import global_mesh, place
from tests.support.processes import run_worker

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore


BLOCK = 4096


def damage_values(epoch: int) -> dict[str, Any]:
    """What epoch `epoch` of the damage tests holds."""
    rng = np.random.default_rng(epoch + 1)
    return {
        "sharded": rng.normal(size=(16, 512)).astype(np.float32),
        "replicated": rng.normal(size=2048).astype(np.float32),
        "small": {"half": rng.normal(size=8).astype(jnp.bfloat16), "ints": rng.integers(0, 99, 4).astype(np.int32)},
        "numpy": rng.integers(0, 2**60, 5),
        "step": 10**30 + epoch,
        "text": f"epoch {epoch} " * 400,
        "nothing": None,
    }


def damage_state(epoch: int) -> dict[str, Any]:
    mesh = global_mesh((jax.device_count(), 1))
    rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    state = damage_values(epoch)
    state["sharded"] = place(state["sharded"], rows)
    state["replicated"] = place(state["replicated"], whole)
    state["small"] = {k: place(v, rows if k == "half" else whole) for k, v in state["small"].items()}
    return state


def write_damage_epochs(directory: str) -> None:
    """Two epochs by all processes of a job."""
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(block_bytes=BLOCK)) as m:
        for epoch in (0, 1):
            m.save(
                epoch,
                args=ocp.args.Composite(state=Save(damage_state(epoch)), extra=ocp.args.JsonSave({"epoch": epoch})),
            )
        m.wait_until_finished()
        assert m.verify(1).ok


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Epochs 0 and 1, written by two nodes."""
    directory = tmp_path_factory.mktemp("damage") / "run"
    run_worker("tests.faults.test_damage:write_damage_epochs", {"directory": str(directory)}, 2, 2)
    return directory


@pytest.fixture
def saved(pristine: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(pristine, tmp_path / "run", symlinks=True))


def reader(directory: pathlib.Path, **storage: Any) -> ec.CheckpointManager:
    options = ocp.CheckpointManagerOptions(read_only=True)
    return ec.CheckpointManager(directory, options=options, storage=ec.StorageOptions(**storage))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray):
        b = np.asarray(b)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


def is_epoch(got: Any, epoch: int) -> bool:
    return same(damage_values(epoch), dict(got.state)) and got.extra == {"epoch": epoch}


def tensors(path: pathlib.Path) -> list[tuple[int, int, str]]:
    """(start, end, leaf) of the tensors of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__")
    spans = ((*e["data_offsets"], name.partition("[")[0]) for name, e in entries.items())
    return sorted((8 + length + start, 8 + length + end, leaf) for start, end, leaf in spans)


def check_error(error: Exception, path: str, leaves: set[str] | None) -> None:
    """An error of ours that names the file, and one of the leaves."""
    assert isinstance(error, errors.DamagedError | errors.FormatError), error
    assert path in str(error), error
    assert error.path == path
    if leaves:
        assert isinstance(error, errors.DamagedError)
        assert error.leaf in leaves
        assert error.leaf in str(error)


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The value, or the project's error; anything else is a failure of the test."""
    try:
        return call(), None
    except errors.EpochCheckpointError as error:
        return None, error


@dataclasses.dataclass(frozen=True)
class Flip:
    """One bit of one file, and what an error about it must say."""

    kind: str
    path: str
    offset: int
    bit: int
    leaves: frozenset[str]


def flips(directory: pathlib.Path, count: int, seed: int) -> list[Flip]:
    """Random bits, so that every kind of file gets its share."""
    rng = random.Random(seed)
    nodes = ["1/process_0", "1/process_1"]
    out = []
    for _ in range(count):
        kind = rng.choices(["epoch", "node", "header", "data", "json"], [25, 25, 20, 35, 10])[0]
        path = {"epoch": "1/epoch.json", "node": f"{rng.choice(nodes)}/node.json", "json": "1/process_0/extra/metadata"}
        name = path.get(kind) or f"{rng.choice(nodes)}/state.safetensors"
        size = (directory / name).stat().st_size
        low, high, leaves = 0, size, frozenset()
        if kind in ("header", "data"):
            spans = tensors(directory / name)
            low, high = (0, spans[0][0]) if kind == "header" else (spans[0][0], size)
        offset = rng.randrange(low, high)
        if kind == "data":
            start, end, leaf = next(s for s in spans if s[0] <= offset < s[1])
            small = frozenset(name for a, b, name in spans if b - a < BLOCK)
            leaves = frozenset({leaf}) if end - start >= BLOCK else small
        out.append(Flip(kind, name, offset, rng.randrange(8), leaves))
    return out


def flip_bit(directory: pathlib.Path, flip: Flip) -> None:
    with open(directory / flip.path, "r+b") as file:
        file.seek(flip.offset)
        (byte,) = file.read(1)
        file.seek(flip.offset)
        file.write(bytes([byte ^ 1 << flip.bit]))


def check_flips(directory: pathlib.Path, count: int, seed: int) -> None:
    open_before = reader(directory)
    refused = dict.fromkeys(["epoch", "node", "header", "data", "json"], 0)
    for flip in flips(directory, count, seed):
        flip_bit(directory, flip)
        got, error = attempt(lambda: open_before.restore(1))
        if error is not None:
            check_error(error, flip.path, flip.leaves)
            refused[flip.kind] += 1
        else:
            assert is_epoch(got, 1), f"{flip} restored silently wrong"
        found = open_before.verify(1)
        assert not found.ok, f"{flip} not found by verify"
        for damage in found.damage:
            check_error(damage, flip.path, flip.leaves)
        fallen = reader(directory).restore(None)
        assert is_epoch(fallen, 1 if error is None else 0), f"{flip}: restore(None)"
        flip_bit(directory, flip)
    assert open_before.verify(1).ok
    for kind in ("epoch", "node", "data", "json"):
        assert refused[kind] > count // 30, refused


@pytest.mark.slow
def test_120_bit_flips_never_restore_silently_wrong(saved: pathlib.Path) -> None:
    """Every flip is found by verify, refused by an explicit restore (or harmless to it), and stepped over by
    restore(None); errors name the file and the leaf."""
    check_flips(saved, 120, seed=1)


@pytest.mark.long
@pytest.mark.timeout(800)
def test_10000_bit_flips_never_restore_silently_wrong(saved: pathlib.Path) -> None:
    """The same, many times more."""
    check_flips(saved, 10_000, seed=2)


@pytest.mark.slow
def test_without_verification_a_flip_does_restore_wrong(saved: pathlib.Path) -> None:
    """The control of the test above: it can see a wrong value."""
    wrong = 0
    for flip in (f for f in flips(saved, 40, seed=3) if f.kind == "data"):
        flip_bit(saved, flip)
        got, error = attempt(lambda: reader(saved, verify=False).restore(1))
        wrong += error is None and not is_epoch(got, 1)
        flip_bit(saved, flip)
    assert wrong > 5


def _truncate(size: Callable[[int], int]) -> Callable[[pathlib.Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


def _link_out(path: pathlib.Path) -> None:
    outside = next(folder for folder in path.parents if folder.name == "run").parent / "outside"
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)


def _folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


HARM: dict[str, Callable[[pathlib.Path], None]] = {
    "emptied": _truncate(lambda n: 0),
    "cut in half": _truncate(lambda n: n // 2),
    "one byte short": _truncate(lambda n: n - 1),
    "one byte long": _truncate(lambda n: n + 1),
    "a page long": _truncate(lambda n: n + 4096),
    "deleted": lambda path: path.unlink(),
    "a link out of the directory": _link_out,
    "a folder": _folder,
    "a pipe": _pipe,
}
FILES = [
    "1/epoch.json",
    "1/process_0/node.json",
    "1/process_1/node.json",
    "1/process_0/state.safetensors",
    "1/process_1/state.safetensors",
    "1/process_0/extra/metadata",
]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", HARM)
def test_a_file_that_is_not_what_was_written_is_refused(saved: pathlib.Path, harm: str, file: str) -> None:
    """Truncated, extended, deleted, replaced files: refused by name, the older epoch is taken; without its commit
    record, an epoch's folder is refused as foreign."""
    open_before = reader(saved)
    HARM[harm](saved / file)
    _, error = attempt(lambda: open_before.restore(1))
    assert error is not None
    assert file in str(error) or isinstance(error, errors.EpochNotFoundError)
    verification, error = attempt(lambda: open_before.verify(1))
    assert error is not None or not verification.ok
    got, error = attempt(lambda: reader(saved).restore(None))
    if error is None:
        assert is_epoch(got, 0)
    else:
        assert harm in ("deleted", "a link out of the directory")
        assert file in str(error) or file.rpartition("/")[0] in str(error)


SWAPS = [
    ("1/process_0/state.safetensors", "1/process_1/state.safetensors"),
    ("1/process_0/node.json", "1/process_1/node.json"),
    ("1/process_0", "1/process_1"),
    ("0/process_0/state.safetensors", "1/process_0/state.safetensors"),
    ("0/process_1/node.json", "1/process_1/node.json"),
    ("0/process_0/extra/metadata", "1/process_0/extra/metadata"),
    ("0/process_1", "1/process_1"),
    ("0/epoch.json", "1/epoch.json"),
    ("0", "1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), SWAPS)
def test_swapped_files_are_refused(saved: pathlib.Path, one: str, other: str) -> None:
    """Files of the right form from another node or another epoch: refused, never mixed."""
    open_before = reader(saved)
    (saved / one).rename(saved / "kept")
    (saved / other).rename(saved / one)
    (saved / "kept").rename(saved / other)
    both = one.startswith("0")
    for epoch in (0, 1) if both else (1,):
        _, error = attempt(lambda e=epoch: open_before.restore(e))
        assert isinstance(error, errors.DamagedError | errors.FormatError)
        assert error.path.startswith(f"{epoch}/")
        assert not open_before.verify(epoch).ok
    got, error = attempt(lambda: reader(saved).restore(None))
    if both:
        assert isinstance(error, errors.EpochCheckpointError)
    else:
        assert is_epoch(got, 0)


def restore_with_damage(directory: str) -> Any:
    """In every process: what an explicit restore says, what restore(None) gives, and a new save over the damage."""
    sharding = NamedSharding(global_mesh((jax.device_count(), 1)), PartitionSpec("x"))
    target = {"sharded": jax.ShapeDtypeStruct((16, 512), np.float32, sharding=sharding)}
    args = ocp.args.Composite(state=ocp.args.PyTreeRestore(target, partial_restore=True))
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(block_bytes=BLOCK)) as m:
        try:
            m.restore(1, args=args)
            explicit = None
        except errors.DamagedError as error:
            explicit = [error.path, error.leaf]
        got = m.restore(None, args=args).state["sharded"]
        gives = [
            epoch
            for epoch in (0, 1)
            if all(
                np.array_equal(np.asarray(s.data), damage_values(epoch)["sharded"][s.index])
                for s in got.addressable_shards
            )
        ]
        steps = list(m.all_steps())
        m.save(1, args=ocp.args.Composite(state=Save(damage_state(1))))
        m.wait_until_finished()
        return explicit, gives, steps, list(m.all_steps()), m.verify(1).ok


@pytest.mark.slow
def test_processes_agree_on_the_older_epoch_when_one_of_them_sees_damage(saved: pathlib.Path) -> None:
    """Only process 1 reads the damaged shard, and restore(1) raises on both; restore(None) gives both epoch 0, and
    epoch 1 can be saved again."""
    file = saved / "1/process_1/state.safetensors"
    start = next(start for start, _, leaf in tensors(file) if leaf == "sharded")
    flip_bit(saved, Flip("data", "1/process_1/state.safetensors", start + 100, 3, frozenset()))
    zero, one = run_worker("tests.faults.test_damage:restore_with_damage", {"directory": str(saved)}, 2, 2)
    assert zero[0] == one[0] == ["1/process_1/state.safetensors", "sharded"]
    assert zero[1:] == one[1:] == [[0], [0], [0, 1], True]
