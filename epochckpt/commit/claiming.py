"""When a manager becomes the one writer of its directory: at its first write, never when it is opened.

Guarantees:
- a manager that only opens, lists, restores or looks claims nothing and needs no permission to write;
- the first save, delete, rollback or replacement claims the directory, on the primary, on the thread that writes. It
  fences off the run that claimed before, and logs which process that was;
- a manager that was fenced off stays so: it never claims again, and its next save raises;
- the other processes learn of the claim from the primary's answer to a common call, or from what the primary publishes
  for each save until every process has reported once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from absl import logging

from epochckpt import _units
from epochckpt.errors import AccessError, FencedError, InvalidArgumentError
from epochckpt.format import checksums

if TYPE_CHECKING:
    from epochckpt.commit.hosts import Hosts
    from epochckpt.commit.protocol import Commits
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
        said = owner if isinstance(owner, Mapping) else {}

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


def owner() -> dict[str, Any]:
    """The owner of a claim: the process that makes it now (see `Process`), and its wall clock."""
    return {**dataclasses.asdict(Process.this()), "claimed_ns": time.time_ns()}


def read_owner(store: Store, path: str) -> Any:
    """The owner that a file describes."""
    return json.loads(store.read(path, limit_bytes=_MAX_BYTES))


def check_idle(commits: Commits) -> None:
    """Raises InvalidArgumentError if a run that has not closed the directory may be alive."""
    for process in map(Process.parse, commits.owners()):
        if not process.has_ended:
            who = f" (process {process.pid} on host {process.host:.200})" if process.pid and process.host else ""
            raise InvalidArgumentError(
                f"{commits.store.root}: a run{who} has not closed it and may be alive. End it first; if it has ended, "
                "claim() of a manager that is opened there and closed lets go of it, or --take-over of the commands "
                "that have it"
            )


def report_takeover(root: str, read: Callable[[], Any]) -> int:
    """Logs that a run which has not closed the directory is fenced off from now on; `read` gives that run's owner.

    It is a warning, unless that run's process is known to have ended: then it was killed, and no live run is harmed.
    Returns when that run claimed the directory, in Unix nanoseconds; 0 if nothing tells.
    """
    who, ended, claimed_ns = "", False, 0
    try:  # it only serves the message, and may be anything
        found = read()
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


class Claim:
    """One manager's claim to its directory.

    `refused` says why this process may not write there, as far as the open could see that. `on_claim` is called once on
    every process, with the epochs that are committed when the directory is claimed: another run may have saved and
    deleted some since it was opened. The `root_files`, by (folder, name), are written with the claim unless they exist.
    """

    def __init__(
        self,
        commits: Commits,
        refused: AccessError | None,
        on_claim: Callable[[list[int]], None],
        root_files: Mapping[tuple[str, str], bytes],
        hosts: Hosts | None = None,
    ):
        self._commits, self._refused, self._on_claim, self._root_files = commits, refused, on_claim, root_files
        self._hosts = hosts
        self._lock = threading.Lock()
        self._taken: dict[str, Any] | None = None  # on the primary: a claim that the other hosts have yet to join
        self._known: dict[str, Any] | None = None
        self.may_take_over = True  # from a run that may be alive
        self.fenced: FencedError | None = None  # how this manager learned that a newer run has taken over

    @property
    def known(self) -> bool:
        """Whether this process knows of the claim, and so the incarnation."""
        return self._known is not None

    def check(self, epoch: int) -> None:
        """Raises the error that keeps this manager from saving, if any. No I/O, unless it was refused at open."""
        if self.fenced is not None:
            raise FencedError(epoch, self.fenced.reason) from self.fenced
        if self._refused is not None and not self.known:
            self._refused = self._commits.write_refusal()
            if self._refused is not None:
                raise self._refused

    def note(self, error: BaseException | None) -> None:
        """Remembers a failure that says that a newer run has taken over."""
        if isinstance(error, FencedError) and self.fenced is None:
            self.fenced = FencedError(error.epoch, error.reason)  # a new one: the traceback of `error` holds arrays
            logging.error(
                "%s: %s. Nothing more is saved by this manager: save() raises FencedError from now on",
                self._commits.store.root,
                error.reason,
            )

    def take(self, epoch: int) -> dict[str, Any]:
        """On the primary: claims the directory unless this manager has; returns the claim, for `learn`.

        With local disks it is complete only when the primary has learned it, too.
        """
        with self._lock:
            if (claim := self._known or self._taken) is not None:
                return claim
            if self.fenced is not None:
                raise FencedError(epoch, self.fenced.reason)
            try:
                if self.may_take_over:
                    self._commits.claim(epoch)
                else:
                    self._commits.claim(epoch, functools.partial(check_idle, self._commits))
                if self._hosts is not None:
                    self._taken = {"incarnation": self._commits.incarnation}
                    return self._taken
                self._write_root_files()
                claim = {"incarnation": self._commits.incarnation, "epochs": self._commits.list_epochs()}
            except BaseException as error:
                self.note(error)  # before another save may try: it would take over from the run that was the later one
                self._commits.incarnation = ""  # the next try is a new incarnation, which sweeps this one
                raise
            return self._adopt(claim)

    def learn(self, claim: dict[str, Any], wait_secs: float = 0.0) -> None:
        """Adopts the claim that the primary's `take` returned; with local disks, waits until all hosts have joined."""
        with self._lock:
            if self._known is not None:
                return
            if self._hosts is None:
                self._commits.incarnation = claim["incarnation"]
            else:
                try:
                    epochs = self._hosts.join(claim["incarnation"], self._write_root_files, wait_secs)
                except BaseException as error:
                    self.note(error)
                    self._commits.incarnation, self._taken = "", None
                    raise
                claim = {**claim, "epochs": epochs}
            self._adopt(claim)

    def _write_root_files(self) -> None:
        for parts, data in self._root_files.items():
            self._commits.write_once(parts, data)

    def _adopt(self, claim: dict[str, Any]) -> dict[str, Any]:
        self._on_claim(list(claim["epochs"]))
        self._known = claim
        return claim

    def release(self) -> None:
        """On the primary: ends the incarnation, if this manager ever claimed; failures are logged.

        With local disks every process does so on its own.
        """
        if self._known is None or self.fenced is not None:
            return
        try:
            self._commits.release()
        except OSError as error:  # the next run that writes sweeps it
            logging.warning("%s: the staging folder could not be removed: %s", self._commits.store.root, error)
