"""A job that stops itself (SIGSTOP) at a chosen call, and goes on, when it is let, as if nothing had happened."""

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

import epochckpt as ec
from tests.support import killjob
from tests.support.watching import Op, Watcher, watch

STOPPED = "STOPPED"
DONE = "DONE"
STORAGE = ec.StorageOptions(
    block_bytes=killjob.BLOCK_BYTES, save_timeout_secs=60, open_timeout_secs=60, restore_timeout_secs=60
)
ITEMS = ("state", "note")


class Stop(NamedTuple):
    """Where to stop.

    Attributes:
        name: of the call, see `watching.Op`.
        path: pattern of the whole path; HOME stands for the incarnation's folder.
        when: before, half (of a pwrite) or after.
        action: what the job does when it is stopped: save an epoch, or roll back.
        epoch: which epoch that is for.
    """

    name: str
    path: str
    when: str = "before"
    action: str = "save"
    epoch: int = 4


STOPS = {
    "before the staging folder is made": Stop("mkdir", r"HOME/4-\d+"),
    "after the staging folder was made": Stop("mkdir", r"HOME/4-\d+", "after"),
    "before a file is created": Stop("create", r"HOME/4-\d+/process_\d/state\.safetensors"),
    "in the middle of the data": Stop("pwrite", r"HOME/4-\d+/process_\d/state\.safetensors", "half"),
    "before the data are flushed": Stop("fsync", r"HOME/4-\d+/process_\d/state\.safetensors"),
    "before an item that is not an array": Stop("create", r"HOME/4-\d+/process_0/note/metadata"),
    "before node.json": Stop("create", r"HOME/4-\d+/process_\d/node\.json"),
    "before epoch.json": Stop("create", r"HOME/4-\d+/epoch\.json"),
    "in the middle of epoch.json": Stop("pwrite", r"HOME/4-\d+/epoch\.json", "half"),
    "just before the rename": Stop("rename", r"HOME/4-\d+"),
}
"""Places within a save of epoch 4, before it is committed."""

AFTER_RENAME = Stop("rename", r"HOME/4-\d+", "after")
BEFORE_DELETE = Stop("rename", "1")
BEFORE_REPLACING = Stop("(mkdir|rename)", r"damaged-\w+|HOME/damaged-\w+|3", epoch=3)
ROLLBACKS = {
    "before the record is drafted": Stop("create", r"HOME/draft-\w+", action="roll back"),
    "before the record is published": Stop("rename", r"HOME/draft-\w+", action="roll back"),
    "before the first epoch moves": Stop("rename", "3", action="roll back"),
    "before the second epoch moves": Stop("rename", "2", action="roll back"),
    "before the record is removed": Stop("(unlink|rename)", "rollback.json", action="roll back"),
}
"""Places within a rollback of 1, 2, 3 to 1."""


class Stopper(Watcher):
    """Stops this process, once, at a place."""

    def __init__(self, stop: Stop, case: int):
        self.armed = False
        self._lock = threading.Lock()
        self._name, self._when, self._case = re.compile(stop.name), stop.when, case
        self._path = re.compile(stop.path.replace("HOME", "incarnation-[^/]+"))

    def _at(self, op: Op) -> bool:
        return self.armed and bool(self._name.fullmatch(op.name) and self._path.fullmatch(op.path))

    def before(self, op: Op) -> None:
        if self._when == "before" and self._at(op):
            self._stop(op)

    def torn(self, op: Op) -> bool:
        return self._when == "half" and self._at(op)

    def half(self, op: Op) -> None:
        self._stop(op)

    def after(self, op: Op) -> None:
        if self._when == "after" and self._at(op):
            self._stop(op)

    def _stop(self, op: Op) -> None:
        with self._lock:  # two threads may have come here: one stop is what the other side waits for
            if not self.armed:
                return
            self.armed = False
        os.write(1, f"\n{STOPPED} {self._case}, {self._when} {op}\n".encode())
        # to this very thread: sent to the process, it would let this one run a moment longer
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def outcome(call: Callable[[], Any]) -> list[str]:
    """The class and the message of what a call raised; two empty strings if it returned."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def run(cases: list[dict[str, Any]], who: int = 0) -> list[dict[str, list[str]]]:
    """Runs `zombie` for each case, one after the other."""
    found = []
    for number, case in enumerate(cases):
        found.append(zombie(number, who, **case))
        os.write(1, f"\n{DONE} {number}.\n".encode())
    return found


def zombie(case: int, who: int, directory: str, stop: list[Any], options: dict[str, Any]) -> dict[str, list[str]]:
    """Stops at a place; when it goes on, tries everything that could do harm. Returns how each call ended."""
    where = Stop(*stop)
    stopper = Stopper(where, case)
    if jax.process_index() == who:
        watch(directory, stopper)
    manager = ec.CheckpointManager(
        directory, options=ocp.CheckpointManagerOptions(**options), storage=STORAGE, item_names=ITEMS
    )

    def save(epoch: int) -> None:
        manager.save(epoch, args=killjob.save_args(epoch), force=True)
        manager.wait_until_finished()

    stopper.armed = True
    action = (lambda: save(where.epoch)) if where.action == "save" else (lambda: manager.rollback_to(1))
    found = {"stopped": outcome(action)}
    found["save"] = outcome(lambda: save(9))
    found["delete"] = outcome(lambda: manager.delete(1))
    found["roll back"] = outcome(lambda: manager.rollback_to(1))
    found["close"] = outcome(manager.close)
    return found
