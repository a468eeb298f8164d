"""What a process does in a directory of another user."""

import os

import orbax.checkpoint as ocp

import epochckpt as ec


def as_another_user(directory: str, what: str, user: int) -> tuple[str, bool, str] | None:
    """Becomes this user, then reads, restores or writes; returns the error: its class, whether it is a
    PermissionError, and its text."""
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        manager.restore(0)  # whatever is imported late, from an interpreter that the other user may not read
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    options = ocp.CheckpointManagerOptions(read_only=what in ("read", "restore"))
    try:
        manager = ec.CheckpointManager(directory, options=options)
        if what == "restore":
            manager.restore(1)
        elif what == "write":
            assert manager.all_steps() == [0, 1]
            manager.save(9, args=ocp.args.StandardSave({"x": 1}))
    except ec.errors.EpochCheckpointError as error:
        return type(error).__name__, isinstance(error, PermissionError), str(error)
    return None
