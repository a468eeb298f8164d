"""Saves of one small array, and calls that must end; for tests of what goes wrong once."""

from __future__ import annotations

import errno
import os
import pathlib
import threading
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

import epochckpt as ec
from epochckpt.directory import directory_of, head_record
from epochckpt.format import checksums, paths
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store
from epochckpt.testing import StoreCall
from epochckpt.testing.faults import Hold

WAIT_SECS = 30.0
MOMENT_SECS = 0.2  # how long something that must not happen is waited for
Options = ocp.CheckpointManagerOptions
Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore


def new_memory() -> str:
    return f"memory://{uuid.uuid4().hex}/"


def state(value: float) -> dict[str, Any]:
    return {"a": np.full(400, float(value))}


def value_of(restored: Any) -> float:
    """What `state` was made from."""
    (value,) = set(restored["a"].tolist())
    return value


def save_all(manager: ec.CheckpointManager, epochs: Any, **kwargs: Any) -> None:
    for epoch in epochs:
        assert manager.save(epoch, args=Save(state(epoch)), **kwargs)
        manager.wait_until_finished()


def fill(directory: str, *epochs: int, options: Options | None = None) -> None:
    """Saves these epochs, and closes."""
    with ec.CheckpointManager(directory, options=options) as manager:
        save_all(manager, epochs)


def on_storage(directory: str, options: Options | None = None) -> list[int]:
    """What somebody who only reads sees now."""
    epoch_directory = directory_of(open_store(directory), StepNames.of(options or Options()))
    return epoch_directory.list_epochs()


def data_path(manager: ec.CheckpointManager, epoch: int) -> str:
    record = manager.components.directory.epoch_directory.read_record(epoch)
    return f"{manager.components.directory.epoch_directory.folder(epoch)}/{record.path(0, record.nodes[0].files[0])}"


def cut(manager: ec.CheckpointManager, epoch: int) -> None:
    """Removes the last byte of an epoch's data."""
    store, path = manager.components.directory.store, data_path(manager, epoch)
    with store.open_reader(path) as reader:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
    store.remove(path)
    store.create(path, bytes(data[:-1]))


def edit_record(path: pathlib.Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes a sealed record, with a seal that fits."""
    body = checksums.parse_sealed(path.name, path.read_bytes())
    edit(body)
    path.write_bytes(checksums.seal(body))


def hiding(manager: ec.CheckpointManager, epoch: int) -> tuple[Callable[..., Any], Callable[[StoreCall], bool]]:
    """For a rule: the store's method that takes a listed epoch out of sight, and which calls of it do."""
    if manager.components.directory.store.atomic_folder_rename:
        return Store.rename, lambda call: call.path == str(epoch)
    return Store.replace, lambda call: call.path == paths.HEAD and str(epoch) not in listed_by(call)


def listed_by(call: StoreCall) -> set[str]:
    """The folders of the epochs that a small head lists when a call has written it."""
    assert call.content is not None
    return set(head_record.parse(call.path, bytes(call.content)).listed)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Event, list[Any]]:
    """Runs a call beside the test; the event is set when it has ended, the list holds its result or error."""
    done, out = threading.Event(), []

    def job() -> None:
        try:
            out.append(call())
        except BaseException as error:  # the test looks at it
            out.append(error)
        finally:
            done.set()

    threading.Thread(target=job, daemon=True).start()
    return done, out


def bounded(call: Callable[[], Any]) -> Any:
    """The result of a call that must end."""
    done, out = in_thread(call)
    assert done.wait(WAIT_SECS), "it hangs"
    if isinstance(out[0], BaseException):
        raise out[0]
    return out[0]


def waits_for(hold: Hold, call: Callable[[], Any]) -> list[Any]:
    """A call does not end before the hold is let go, and does then; returns what `in_thread` got of it."""
    assert hold.reached.wait(WAIT_SECS)
    done, out = in_thread(call)
    assert not done.wait(MOMENT_SECS)
    hold.let_go()
    assert done.wait(WAIT_SECS)
    return out


def timed_out() -> OSError:
    return OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
