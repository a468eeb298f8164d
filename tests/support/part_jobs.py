"""What the processes of a job do in `tests/orbax/test_options.py`, in managers of a part of them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt.errors import InvalidArgumentError, UnsupportedError

STORAGE = ec.StorageOptions(save_timeout_secs=30, open_timeout_secs=30, restore_timeout_secs=30)
Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore


def spread(processes: Any, spec: str | None) -> jax.Array:
    """An array over the devices of some processes, in as many parts, or whole on each."""
    devices = [d for d in jax.devices() if d.process_index in processes]
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec(spec))
    values = np.arange(12.0, dtype=np.float32)
    return jax.make_array_from_callback((12,), sharding, lambda index: values[index])


def right(found: dict[str, Any], primary: int) -> bool:
    """Whether arrays have their values on this process, and what is not spread is the primary's."""
    arrays = [x for x in found.values() if isinstance(x, jax.Array)]
    values = all(np.array_equal(s.data, np.arange(12.0)[s.index]) for x in arrays for s in x.addressable_shards)
    return values and found["host"].tolist() == [primary] * 3


def manager(directory: str, **asked: Any) -> ec.CheckpointManager:
    options = ocp.CheckpointManagerOptions(multiprocessing_options=ocp.options.MultiprocessingOptions(**asked))
    return ec.CheckpointManager(directory, options=options, storage=STORAGE)


def some(directory: str) -> dict[str, Any]:
    """Another primary; a part of the processes; again all of them; each by itself."""
    me, out = jax.process_index(), {}

    def use(name: str, tree: Any, primary: int, **asked: Any) -> None:
        with manager(f"{directory}/{name}", **asked) as m:
            for epoch in (1, 2, 3):
                assert m.save(epoch, args=Save(tree))
                m.wait_until_finished()
            m.delete(2)
            m.reload()
            fits = [right(m.restore(step, args=Restore(tree)), primary) for step in (3, None)]
            out[name] = [list(m.processes or ()), m.nodes(3), list(m.all_steps()), *fits]

    host = np.full(3, me)
    everywhere = {"host": host, "parts": spread(range(3), "x"), "whole": spread(range(3), None)}
    use("another primary", everywhere, 1, primary_host=1)
    if me == 1:
        with pytest.raises(InvalidArgumentError, match=r"active_processes=\[0, 2\], and this is process 1 of 3"):
            manager(f"{directory}/some", active_processes={0, 2})
    else:
        part = {"host": host, "parts": spread({0, 2}, "x"), "whole": spread(range(3), None)}
        use("some", part, 2, primary_host=2, active_processes={2, 0}, barrier_sync_key_prefix="a/b")
        with (
            manager(f"{directory}/some", active_processes={0, 2}) as m,
            pytest.raises(InvalidArgumentError, match="no node of"),
        ):
            m.save(9, args=Save(everywhere))
        with pytest.raises(InvalidArgumentError, match="primary_host=1 takes no part"):
            manager(f"{directory}/some", primary_host=1, active_processes={0, 2})
    use("all", everywhere, 0)
    own = {"host": host, "mine": jax.device_put(np.arange(12.0, dtype=np.float32), jax.local_devices()[0])}
    use(f"own {me}", {**own, "whole": spread(range(3), None)}, me, primary_host=None)
    job = ec.Job()
    job.init(lambda ws: ws.update(w=1))
    with (
        manager(f"{directory}/job", primary_host=2) as m,
        pytest.raises(UnsupportedError, match=r"processes \[2, 0, 1\]"),
    ):
        ec.JobRunner(job, m).train(ec.DistributedSession())
    return out
