"""Block checksums: a kind is one row of a table. Records name the kind, writers use it, readers take every kind."""

import json
import pathlib
import sys
import threading
import zlib

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import xxhash

import epochckpt as ec
from epochckpt.errors import DamagedError, FormatError
from epochckpt.format import checksums

CRC32 = checksums.BlockChecksum(name="crc32", about="CRC-32", digits=8, compute=zlib.crc32)


@pytest.fixture
def crc32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second kind of the table."""
    monkeypatch.setitem(checksums.BLOCK_CHECKSUMS, CRC32.name, CRC32)


def save(directory: pathlib.Path, epoch: int, written: checksums.BlockChecksum) -> None:
    """Saves an epoch whose files get checksums of a kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "WRITTEN", written)
        _save(directory, epoch)


def _save(directory: pathlib.Path, epoch: int) -> None:
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(block_bytes=4096)) as manager:
        state = {"small": jnp.arange(3), "large": jnp.arange(5000.0)}
        manager.save(epoch, args=ocp.args.StandardSave(state))


def files(directory: pathlib.Path, epoch: int) -> list[dict[str, object]]:
    return json.loads((directory / str(epoch) / "process_0" / "node.json").read_bytes())["files"]


@pytest.mark.usefixtures("crc32")
def test_a_new_kind_is_a_row_of_the_table(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written with it and read with whatever their record names; an unknown kind is an error, no silence."""
    save(tmp_path, 0, checksums.BLOCK_CHECKSUMS["xxh3"])
    save(tmp_path, 1, CRC32)
    (old,), (new,) = files(tmp_path, 0), files(tmp_path, 1)
    assert old.keys() ^ new.keys() == {"xxh3", "crc32"}
    data = (tmp_path / "1" / "process_0" / "default.safetensors").read_bytes()
    sums = new["crc32"]
    assert isinstance(sums, list)
    assert len(sums) > 4  # the header, and the blocks of the large leaf
    assert {len(each) for each in sums} == {8}
    assert sums[-1] in {f"{zlib.crc32(data[start:]):08x}" for start in range(len(data) - 4096, len(data))}
    with ec.CheckpointManager(tmp_path) as manager:
        assert [manager.verify(epoch).ok for epoch in (0, 1)] == [True, True]
        np.testing.assert_array_equal(manager.restore(1)["large"], np.arange(5000.0))
    monkeypatch.delitem(checksums.BLOCK_CHECKSUMS, "crc32")
    with ec.CheckpointManager(tmp_path) as manager:
        np.testing.assert_array_equal(manager.restore(0)["large"], np.arange(5000.0))
        with pytest.raises(FormatError, match="xxh3: expected checksums of blocks, as one of xxh3, found 'None'"):
            manager.restore(1)


@pytest.mark.usefixtures("crc32")
def test_damage_is_told_by_the_kind_that_was_written(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 0, CRC32)
    (path,) = tmp_path.glob("0/process_0/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with (
        ec.CheckpointManager(tmp_path) as manager,
        pytest.raises(DamagedError, match=r"differ from what was written \(crc32 \w{8}, found \w{8}\)"),
    ):
        manager.restore(0)


@pytest.mark.parametrize("kind", checksums.BLOCK_CHECKSUMS.values(), ids=lambda kind: kind.name)
def test_a_checksum_has_its_digits_and_sees_every_flipped_bit(kind: checksums.BlockChecksum) -> None:
    """Of every kind in the table: as many digits as it says, the same for the same bytes however they lie in memory."""
    block = bytes(range(64))
    expected = kind.of(block)
    assert len(expected) == len(kind.of(b"")) == kind.digits
    assert int(expected, 16) == kind.compute(memoryview(block)) == kind.compute(bytearray(block))
    flipped = {
        kind.of(bytes(b ^ (1 << bit) if i == place else b for i, b in enumerate(block)))
        for place in range(64)
        for bit in range(8)
    }
    assert len(flipped - {expected}) == 64 * 8


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 65_537, 1_000_000])
def test_a_checksum_is_that_of_all_bytes(nbytes: int) -> None:
    """However many of them are hashed at once."""
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert checksums.xxh3(data) == xxhash.xxh3_64_intdigest(data)
    assert checksums.xxh3(memoryview(data)) == checksums.xxh3(bytearray(data)) == checksums.xxh3(data)


def test_a_checksum_gives_no_turn_to_other_threads() -> None:
    """A thread that runs Python all the time would give it back only after an interval, here of ten minutes."""
    data = bytes(4 * 2**20)
    began = threading.Event()
    turns: list[int] = []

    def run() -> None:
        began.wait()
        turns.extend(range(100))

    thread = threading.Thread(target=run)
    thread.start()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        began.set()
        checksums.xxh3(data)
        seen = len(turns)
    finally:
        sys.setswitchinterval(usual)
        thread.join()
    assert not seen
