"""Events of `jax.monitoring` under the names of stock Orbax, each where its meaning is the same here.

Durations are in seconds, moments in milliseconds since 1970, sizes in GiB, as Orbax has them. Events that tell of the
whole job come from the primary alone. See docs/monitoring.md.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orbax.checkpoint.checkpoint_managers import save_decision_policy as decide

from epochckpt import _monitoring
from epochckpt.storage import scheme_of

_GIB = 2**30
_CODEC = {"compression_algorithm": "none", "compression_level": "None"}

LOOKED = "/jax/checkpoint/read/load_all_step_metadata_duration_secs"
DELETED = "/jax/orbax/checkpoint_manager/standard_checkpoint_deleter/duration"
REMOVED_OLD = "/jax/checkpoint/write/remove_steps_duration_secs"
MADE_FOLDERS = (
    "/jax/orbax/write/directory_creation_secs",
    "/jax/orbax/write/async_directory_creation_secs",
    "/jax/orbax/write/background_directory_creation_secs",
)
SEALED = "/jax/checkpoint/write/async/metadata_write_duration_secs", "/jax/orbax/write/background_meta_write_secs"
FINALIZED = "/jax/orbax/write/background_finalize_secs"
FINALIZED_ITEMS = "/jax/orbax/write/background_item_finalize_secs"
WAITED = "/jax/checkpoint/write/wait_for_prev_duration_secs"
CHOSE_OLD = "/jax/checkpoint/write/get_old_steps_duration_secs"
EXAMINED_OLD = "/jax/checkpoint/write/old_steps_examined_count"

_last_committed = time.monotonic()  # when the newest committed save of this process began, or this module


def _storage(root: str) -> str:
    return scheme_of(root).orbax_name


class SaveEvents:
    """The events of one manager's saves and restores."""

    def __init__(self, root: str, policy: Any, primary: bool, asynchronous: bool):
        policies = policy.policies if isinstance(policy, decide.AnySavePolicy) else [policy]
        self._continuous = int(any(isinstance(each, decide.ContinuousCheckpointingPolicy) for each in policies))
        self._root, self._primary, self._asynchronous = root, primary, asynchronous
        self._write = "/jax/orbax/write/async" if asynchronous else "/jax/orbax/write"
        self._tags = {"storage_type": _storage(root)}
        _monitoring.event("/jax/orbax/checkpoint_manager/init")
        if asynchronous:
            _monitoring.event("/jax/orbax/async_checkpointer/init")
        _monitoring.number(self._continuous, "/jax/orbax/checkpoint_manager/continuous_checkpointing_enabled")

    def begun(self, moments: Sequence[float], nbytes: int, between: float | None) -> None:
        """A save is handed to the background now, by a call with steps that began at these monotonic moments.

        The steps: the call, the plan, the wait for older saves, the copy, handing over. `nbytes` is the size of what is
        saved, and `between` the seconds since the save before was asked for.
        """
        began, planned, ready, room, copied = moments
        if between is not None:
            name, continuous = "/jax/orbax/checkpoint_manager/time_between_consecutive_saves_secs", self._continuous
            _monitoring.secs(between, name, continuous_checkpointing_enabled=continuous)
        if self._primary:
            _monitoring.event(f"{self._write}/start")
            _monitoring.number(_milliseconds(began), f"{self._write}/start_time", **self._tags)
        _monitoring.event("/jax/orbax/write/storage_type", **self._tags)
        _monitoring.secs(planned - began, "/jax/orbax/write/blocking_val_duration_secs")
        _monitoring.secs(ready - planned, "/jax/orbax/write/blocking_tree_map_duration_secs")
        _monitoring.secs(room - ready, WAITED, "/jax/orbax/write/blocking_wait_prev_duration_secs")
        _monitoring.secs(copied - room, "/jax/orbax/write/blocking_d2h_duration_secs")
        if self._primary:
            rate = _rate(nbytes, ready - planned + copied - room)
            names = "/jax/orbax/write/blocking_gbytes_per_sec", "/jax/checkpoint/write/blocking_gbytes_per_sec"
            _monitoring.number(rate, *names)
        blocked = time.monotonic() - began
        _monitoring.secs(blocked, "/epochckpt/write/blocked_secs")
        if self._asynchronous:
            self._blocked(blocked)

    def _blocked(self, secs: float) -> None:
        if self._primary:
            if self._asynchronous:
                _monitoring.secs(secs, "/jax/checkpoint/write/async/blocking_duration_secs")
            _monitoring.secs(secs, f"{self._write}/blocking_duration_secs", **self._tags)
            _monitoring.number(time.time() * 1e3, f"{self._write}/blocking_end_time", **self._tags)

    def committed(self, secs: float, writing_secs: float, nbytes: int, nodes: Mapping[str, float]) -> None:
        """A save is committed, `secs` after it was asked for, and `writing_secs` after writing began.

        `nodes` are the seconds that each node wrote, and `nbytes` the bytes of all of them.
        """
        global _last_committed
        began = time.monotonic() - secs
        _monitoring.secs(
            writing_secs,
            "/jax/checkpoint/write/async/thread_duration_sec",
            "/jax/orbax/write/background_duration_secs",
        )
        if not self._primary:
            return
        # The older names are those of Orbax 0.11.
        _monitoring.number(nbytes / _GIB, "/jax/orbax/write/gbytes", "/jax/checkpoint/write/gbytes")
        rates = "/jax/orbax/write/gbytes_per_sec", "/jax/checkpoint/write/gbytes_per_sec"
        _monitoring.number(_rate(nbytes, secs), *rates)
        _monitoring.secs(began - _last_committed, "/jax/checkpoint/write/duration_since_last_checkpoint_secs")
        _last_committed = began
        for node, wrote_secs in nodes.items():
            _monitoring.secs(wrote_secs, "/epochckpt/write/node_secs", node=node)
        _monitoring.event("/jax/orbax/write/success")
        if self._asynchronous:
            _monitoring.secs(secs, "/jax/checkpoint/write/async/total_duration_secs", **self._tags)
        else:  # it held training until now
            self._blocked(secs)
        _monitoring.secs(secs, f"{self._write}/total_duration_secs", **self._tags)

    def waited(self, wait: Callable[[], None]) -> None:
        """Waits for the saves in flight."""
        began = time.monotonic()
        wait()
        _monitoring.secs(time.monotonic() - began, WAITED, "/epochckpt/wait_secs")
        _monitoring.deliver()

    def restoring(self) -> None:
        """A restore begins."""
        if self._primary:
            _monitoring.event("/jax/orbax/read/start")
        _monitoring.event("/jax/orbax/read/storage_type", **self._tags)

    def restored(self, secs: float, nbytes: int | None) -> None:
        """A restore has ended, after so many seconds, with arrays of so many bytes in all processes together."""
        if self._primary:
            if nbytes is not None:
                _monitoring.number(_rate(nbytes, secs), "/jax/checkpoint/read/gbytes_per_sec")
                _monitoring.number(nbytes / _GIB, "/jax/checkpoint/read/gbytes")
            _monitoring.event("/jax/orbax/read/success")
            whole = "/jax/orbax/read/blocking_duration_secs", "/jax/orbax/read/total_duration_secs"  # all of it blocks
            _monitoring.secs(secs, *whole, **self._tags)
        _monitoring.deliver()


def sizes_of_arrays(sizes: Iterable[tuple[int, bool]]) -> list[tuple[str, float]]:
    """The figures of arrays of so many bytes each; True: several devices hold the same part of one."""
    names = {True: "/jax/orbax/write/replicated_array_gb", False: "/jax/orbax/write/sharded_array_gb"}
    return [(names[replicated], size / _GIB) for size, replicated in sizes]


def wrote(root: str, secs: float, nbytes: int, raw_nbytes: int) -> None:
    """This process has written the arrays of a save: so many bytes of them, in files of so many bytes."""
    _monitoring.number(raw_nbytes, "/epochckpt/write/bytes")
    _monitoring.secs(
        secs, "/jax/checkpoint/write/async/commit_duration_sec", "/jax/orbax/write/background_ts_duration_secs"
    )
    _transferred("/jax/orbax/write/worker", root, secs, nbytes, raw_nbytes)


def read(root: str, secs: float, nbytes: int, raw_nbytes: int, verify_secs: float) -> None:
    """This process has read parts of arrays, of so many bytes, for which it read so many bytes of files."""
    _transferred("/jax/orbax/read/worker", root, secs, nbytes, raw_nbytes)
    _monitoring.number(raw_nbytes, "/epochckpt/read/bytes")
    _monitoring.secs(verify_secs, "/epochckpt/read/verify_secs")


def _transferred(prefix: str, root: str, secs: float, nbytes: int, raw_nbytes: int) -> None:
    """Arrays went to storage, or came from there, in files of `raw_nbytes`."""
    tags = {"storage_type": _storage(root), "custom_prefix": ""}
    _monitoring.secs(secs, f"{prefix}/total_duration_secs", **tags)
    for kind, size, codec in (("requested", nbytes, {}), ("raw", raw_nbytes, _CODEC)):
        _monitoring.number(size / _GIB, f"{prefix}/io/{kind}/gbytes", **tags, **codec)
        _monitoring.number(_rate(size, secs), f"{prefix}/io/{kind}/throughput/gbytes_per_sec", **tags)
    if nbytes and raw_nbytes:
        _monitoring.number(nbytes / raw_nbytes, f"{prefix}/io/compression_ratio", **tags, **_CODEC)


def _rate(nbytes: int, secs: float) -> float:
    """GiB per second; a coarse clock may have seen no time pass."""
    return nbytes / _GIB / max(secs, 1e-9)


def _milliseconds(moment: float) -> float:
    """A moment of the monotonic clock, as milliseconds since 1970."""
    return (time.time() - (time.monotonic() - moment)) * 1e3
