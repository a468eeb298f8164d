"""Which process has claimed a directory, and whether that process is known to have ended.

Guarantees:
- a process has ended only if that is proved: it is gone from this machine, or its machine has booted since;
- a record of an owner may contain anything. It serves messages and this question alone, and makes nothing fail.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from absl import logging

from epochckpt import _units
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import checksums, json_kinds

if TYPE_CHECKING:
    from epochckpt.directory.epoch_directory import EpochDirectory
    from epochckpt.storage import Store

_MAX_BYTES = 4096
_INITIAL = "pid:[4026531836]"  # the PID namespace of the machine itself, PROC_PID_INIT_INO of Linux
_NAMESPACES = ("pid", "time")  # in which a PID and a start time mean the same
_STATE, _THREADS, _STARTED = 0, 17, 19  # fields of /proc/<pid>/stat after the name, which are 3, 20 and 22 in proc(5)


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of some machine, and what proves that it has ended. Empty fields are not known."""

    host: str = ""
    pid: int = 0
    boot: str = ""  # the id of the boot of its kernel: all containers of a machine have the same
    machine: str = ""  # a digest of the machine's id; containers, whose images may share one, have none
    namespace: str = ""  # where its PID and its start time hold
    started: int = 0  # in clock ticks since the boot

    @classmethod
    def this(cls) -> Self:
        """The process that calls."""
        boot = _line("/proc/sys/kernel/random/boot_id")
        namespace = " ".join(_link(f"/proc/self/ns/{kind}") for kind in _NAMESPACES).strip()
        machine = _line("/etc/machine-id") if namespace.startswith(_INITIAL) else ""
        status = _status(os.getpid())
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            boot=boot,
            machine=checksums.digest(machine.encode()) if machine else "",
            namespace=namespace,
            started=int(status[_STARTED]) if status else 0,
        )

    @classmethod
    def parse(cls, owner: Any) -> Self:
        """The process that an owner describes, which may be anything; what cannot be used is not known."""
        said = owner if json_kinds.is_mapping(owner) else dict[str, Any]()

        def text(name: str) -> str:
            value = said.get(name)
            return value if isinstance(value, str) else ""

        def number(name: str) -> int:
            value = said.get(name)
            return value if type(value) is int else 0

        return cls(
            host=text("host"),
            pid=number("pid"),
            boot=text("boot"),
            machine=text("machine"),
            namespace=text("namespace"),
            started=number("started"),
        )

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended. It is not known of a process of another machine or container."""
        here = Process.this()
        if not (self.boot and here.boot):  # no kernel of Linux: there are no containers either
            return self.boot == here.boot and self.host == here.host and _is_free(self.pid)
        if self.boot != here.boot:
            return bool(self.machine) and self.machine == here.machine  # that machine has booted since
        if self.namespace != here.namespace:
            return False
        status = _status(self.pid)
        if not status:  # it has ended, or /proc does not show the processes of other users
            return _is_free(self.pid)
        is_other = self.started > 0 and int(status[_STARTED]) != self.started
        return is_other or (status[_STATE] == "Z" and status[_THREADS] in ("0", "1"))  # nobody has waited for it yet


def _status(pid: int) -> list[str]:
    """The fields of a process after its name; none if there is no such process, or it is not shown."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (OSError, ValueError):
        return []
    return text.rpartition(") ")[2].split()


def _is_free(pid: int) -> bool:
    """Whether no process has a PID, as far as this process may know."""
    try:
        os.kill(pid, 0) if pid > 0 else None
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def _line(path: str) -> str:
    try:
        return pathlib.Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def current() -> dict[str, Any]:
    """The owner of a claim: the process that makes it now (see `Process`), and its wall clock."""
    return {**dataclasses.asdict(Process.this()), "claimed_ns": time.time_ns()}


def read(store: Store, path: str) -> Any:
    """The owner that a file describes."""
    return json.loads(store.read(path, limit_bytes=_MAX_BYTES))


def check_idle(epoch_directory: EpochDirectory) -> None:
    """Raises InvalidArgumentError if a run that has not closed the directory may be alive."""
    for process in map(Process.parse, epoch_directory.owners()):
        if not process.has_ended:
            who = f" (process {process.pid} on host {process.host:.200})" if process.pid and process.host else ""
            raise InvalidArgumentError(
                f"{epoch_directory.store.root}: a run{who} has not closed it and may be alive. End it first; if it has "
                "ended, claim() of a manager that is opened there and closed lets go of it, or --take-over of the "
                "commands that have it"
            )


def report_takeover(root: str, read_owner: Callable[[], Any]) -> int:
    """Logs that a run which has not closed the directory is fenced off from now on; `read_owner` gives its owner.

    It is a warning, unless that run's process is known to have ended: then it was killed, and no live run is harmed.
    Returns when that run claimed the directory, in Unix nanoseconds; 0 if nothing tells.
    """
    who = ""
    ended = False
    claimed_ns = 0
    try:  # it only serves the message, and may be anything
        found = read_owner()
        process = Process.parse(found)
        ended = process.has_ended
        ago = _units.secs(max(time.time_ns() - found["claimed_ns"], 0) / 1e9)
        claimed_ns = max(int(found["claimed_ns"]), 0)
        who = f" (process {found['pid']:d} on host {found['host']:.200}, which claimed it {ago} ago)"
        if process == Process.this():
            who += ", which is this process"
    except (OSError, ValueError, ArithmeticError, RecursionError, LookupError, TypeError):
        logging.debug("%s: nothing tells whether the run before is alive", root, exc_info=True)
    if ended:
        logging.info("%s: takes over from a run that has ended without closing it%s", root, who)
        return claimed_ns
    logging.warning(
        "%s: this process takes over from a run that did not close the directory%s. If it is alive, its next save "
        "fails with FencedError: only the newest run that writes may save here. To look at a run, write nothing",
        root,
        who,
    )
    return claimed_ns
