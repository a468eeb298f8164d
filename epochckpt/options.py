"""`StorageOptions`: how bytes get to storage and how long anything may wait."""

from __future__ import annotations

import dataclasses

from epochckpt.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """How bytes get to storage, and how long anything may wait.

    What is saved, when, and what is kept is decided by `orbax.checkpoint.CheckpointManagerOptions`.

    >>> storage = ec.StorageOptions(io_threads=4, save_timeout_secs=1800)
    >>> with ec.CheckpointManager("run", storage=storage) as manager:
    ...     manager.save(0, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    True

    Attributes:
        io_threads: threads that write or read one node's files.
        block_bytes: unit of writing, hashing and verified reading; a checksum is kept per block.
        part_bytes: a node's data file is continued in another one past this size; None: the store's own preference
            (no limit on POSIX, 256 MiB on object stores).
        replica_split_bytes: replicated arrays larger than this are written in pieces by several of their holders.
        host_memory_limit_bytes: bound on host memory that snapshots hold until it is written (copies only, views of
            CPU arrays cost nothing). `save()` waits for older writes to stay under it, and refuses a single snapshot
            that is larger. None: half of the machine's memory (of the container's, if that is less); a single snapshot
            that is larger waits until no other is held.
        max_blocked_secs: how long `save()` may hold training because storage is behind: it waits for older saves to be
            written, and for the memory that they hold. A save that could not begin by then has failed
            (StorageBehindError). Copying what is saved does not count. None: until the older saves have ended.
        save_timeout_secs: how long the nodes have to report, from the start of a save; then the save fails and names
            the late nodes. A node that reported an older save late gets as much more time as it was late: nodes that
            do not compute in step stay behind after a pause.
        open_timeout_secs: how long construction, `reload`, `delete` and `rollback_to` wait for the other processes.
        restore_timeout_secs: how long `restore(None)` waits for the votes of the other processes.
        orbax_view: also write the small files that let stock Orbax read the epoch without epochckpt (POSIX only).
        verify: check the checksum of every block of an array before its bytes reach the caller, which costs little.
            The files of handlers, JSON among them, are always checked.
    """

    io_threads: int = 2
    block_bytes: int = 4 * 2**20
    part_bytes: int | None = None
    replica_split_bytes: int = 16 * 2**20
    host_memory_limit_bytes: int | None = None
    max_blocked_secs: float | None = 10.0
    save_timeout_secs: float = 600.0
    open_timeout_secs: float = 300.0
    restore_timeout_secs: float = 600.0
    orbax_view: bool = True
    verify: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if kind == "bool" and not isinstance(value, bool):
                raise InvalidArgumentError(f"StorageOptions.{field.name} must be a bool, got {value!r}")
            if kind == "bool" or (value is None and kind.endswith("None")):
                continue
            numbers = (int, float) if kind.startswith("float") else (int,)
            if isinstance(value, bool) or not isinstance(value, numbers) or not value > 0:
                raise InvalidArgumentError(f"StorageOptions.{field.name} must be a positive number, got {value!r}")
        if not 4096 <= self.block_bytes <= 256 * 2**20:
            raise InvalidArgumentError(
                f"StorageOptions.block_bytes must be between 4 KiB and 256 MiB, got {self.block_bytes}"
            )
