"""Memory that changes while it is being saved: what is committed is what was passed, or nothing is."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt import errors
from epochckpt.storage import Store, Writer
from epochckpt.testing import Faults, StoreCall
from epochckpt.testing.faults import Hold
from tests.support.taps import is_data

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore


def hold_writes(faults: Faults) -> Hold:
    """Until it is let go, no byte of any array is read."""
    return faults.hold(Store.open_writer, where=lambda call: is_data(call.path))


SIZES = [7, 1000, 16_384, 16_388, 3_000_000]


@pytest.mark.parametrize("size", SIZES)
def test_a_numpy_leaf_may_be_changed_right_after_save(tmp_path: pathlib.Path, faults: Faults, size: int) -> None:
    """What is saved is what the array held when save() was called."""
    hold = hold_writes(faults)
    x, scalar = np.arange(size, dtype=np.float32), np.zeros((), np.int64)
    with ec.CheckpointManager(tmp_path) as m:
        m.save(0, args=Save({"x": x, "scalar": scalar, "view": x[::-1][::2]}))
        x[...] = -1
        scalar[...] = 9
        hold.let_go()
        m.wait_until_finished()
        got = m.restore(0)
    expected = np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(got["x"], expected)
    np.testing.assert_array_equal(got["view"], expected[::-1][::2])
    assert got["scalar"] == 0


def shardings() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(4), ("x",))
    return {
        "one device": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        "sharded": NamedSharding(mesh, PartitionSpec("x")),
        "replicated": NamedSharding(mesh, PartitionSpec()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one device", "sharded", "replicated"])
def test_a_jax_array_may_be_donated_right_after_save(tmp_path: pathlib.Path, faults: Faults, kind: str) -> None:
    """Donated to jit before a byte is written, with new arrays over its memory: what is saved does not change, also
    not by the next saves. For accelerators `tests/arrays/test_transfers.py` has the same."""
    hold = hold_writes(faults)
    sharding = shardings()[kind]
    step = jax.jit(lambda tree: jax.tree.map(lambda x: -x - 1, tree), donate_argnums=0)
    values = {str(n): np.arange(n, dtype=np.float32) for n in (4, 1000, 16_384, 16_400, 1_000_000)}
    state = jax.jit(lambda t: jax.tree.map(lambda x: x + 0, t), out_shardings=sharding)(values)
    with ec.CheckpointManager(tmp_path) as m:
        for epoch in range(4):  # two that wait at once, and two that may use their memory
            m.save(epoch, args=Save(state))
            new = step(state)
            deleted = [x.is_deleted() for x in jax.tree.leaves(state)]
            assert any(deleted)  # jax keeps what is being looked at
            state = jax.block_until_ready(step(step(new)))
            if epoch:
                hold.let_go()
                m.wait_until_finished()
        for epoch in range(4):
            got = m.restore(epoch)
            for name, value in values.items():
                np.testing.assert_array_equal(got[name], -value - 1 if epoch % 2 else value)


def test_a_jax_array_donated_before_save_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    """Nothing is begun."""
    x = jnp.arange(10.0)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with ec.CheckpointManager(tmp_path) as m:
        with pytest.raises(errors.InvalidArgumentError, match="'gone'"):
            m.save(0, args=Save({"gone": x}))
        assert not m.is_saving_in_progress()
        m.save(0, args=Save({"here": jnp.arange(3.0)}))
        m.wait_until_finished()
        assert m.all_steps() == [0]


def aliased(size: int) -> tuple[np.ndarray, jax.Array]:
    """A NumPy array, and a jax array over the same memory."""
    raw = np.zeros(size * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    buffer = raw[start : start + size * 4].view(np.float32)
    buffer[:] = np.arange(size)
    array = jax.device_put(buffer, jax.devices()[0])
    assert array.unsafe_buffer_pointer() == buffer.ctypes.data, "this jax does not alias; the test needs another way"
    return buffer, array


def test_aliased_memory_changed_after_save_fails_the_attempt(tmp_path: pathlib.Path, faults: Faults) -> None:
    """A jax array over NumPy memory that the caller changes after save(): BufferChangedError naming the leaf, and
    nothing is committed."""
    buffer, array = aliased(5_000_000)
    with ec.CheckpointManager(tmp_path) as m:
        m.save(0, args=Save({"good": np.ones(3)}))
        m.wait_until_finished()
        with hold_writes(faults) as hold:
            m.save(1, args=Save({"inner": {"aliased": array}}))
            assert hold.reached.wait(60)
            buffer += 1
            hold.let_go()
            with pytest.raises(errors.SaveError, match="inner/aliased") as caught:
                m.wait_until_finished()
        assert isinstance(caught.value, errors.BufferChangedError)
        assert caught.value.leaf == "inner/aliased"
        assert m.all_steps() == [0]
        assert not (tmp_path / "1").exists()
        m.save(1, args=Save({"inner": {"aliased": array}}))
        m.wait_until_finished()
        np.testing.assert_array_equal(m.restore(1)["inner"]["aliased"], buffer)


def test_what_is_written_is_what_was_hashed(tmp_path: pathlib.Path, faults: Faults) -> None:
    """One element that changes when its checksum is taken and its bytes are not written yet: neither sees it."""
    buffer, array = aliased(5_000_000)
    before = buffer.copy()

    def has_the_element(call: StoreCall) -> bool:
        return before[1230:1240].tobytes() in bytes(call.content or b"")

    with ec.CheckpointManager(tmp_path) as m:
        with faults.hold(Writer.write, where=has_the_element) as hold:
            m.save(1, args=Save({"aliased": array}))
            assert hold.reached.wait(60)
            buffer[1234] += 1
            hold.let_go()
            m.wait_until_finished()
        np.testing.assert_array_equal(m.restore(1)["aliased"], before)


def test_aliased_memory_changed_at_any_time_never_commits_a_mixture(tmp_path: pathlib.Path) -> None:
    """The same without holding anything back: the attempt fails, or commits exactly what save() was given."""
    buffer, array = aliased(2_000_000)
    with ec.CheckpointManager(tmp_path) as m:
        for epoch in range(12):
            before = buffer.copy()
            m.save(epoch, args=Save({"aliased": array}))
            for _ in range(epoch):
                np.sqrt(before[:200_000])  # another moment each time
            buffer += 1
            try:
                m.wait_until_finished()
            except errors.BufferChangedError:
                assert epoch not in m.all_steps()
            else:
                np.testing.assert_array_equal(m.restore(epoch)["aliased"], before)
