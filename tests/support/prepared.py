"""Processes that have jax, Orbax and epochckpt imported when they start: they are forked from one that has.

    child = start("tests.support.worker", ["module:function", "{}"], environment, imported=OURS, index=0)
    text = child.stdout.read()
    returncode = child.wait()

These imports take two seconds of a processor, and the suite starts hundreds of processes. A fork takes 20 ms.

Such a process is in all else what `python -m MODULE ARGUMENTS` would be: it has its own session, environment and exit
through the end of the interpreter, and no backend or thread was there before it. Neighbours in a job are forked from
two servers, so that they hash strings differently: what depends on the order of a set shows. Variables that Python or
jax read as they start need a server of their own, see `_EARLY`.
"""

import atexit
import contextlib
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NamedTuple

OURS = ("jax.numpy", "orbax.checkpoint", "epochckpt.manager.manager", "epochckpt.jobs.runner")
STOCK = ("jax.numpy", "orbax.checkpoint", "flax.linen", "flax.nnx", "optax")
"""For a process that cannot import epochckpt."""

POSSIBLE = hasattr(os, "pidfd_open")  # on Linux
_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_EARLY = ("JAX_", "PYTHON", "LD_")  # prefixes of variables that are read as Python starts, or as jax is imported
_SERVERS = 2  # for each set of such variables, and of imports
_REQUEST_BYTES = 1 << 20
_STATUS_BYTES = 16


class Prepared:
    """One such process, as `subprocess.Popen` would have it.

    Attributes:
        pid: its pid, which is its process group's id too. No other process gets it before `wait` has returned.
        stdout: what it prints to stdout and stderr, unbuffered.
    """

    def __init__(self, server: socket.socket, request: Mapping[str, object]):
        read_end, write_end = os.pipe()
        self.stdout: BinaryIO = os.fdopen(read_end, "rb", buffering=0)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(server, [json.dumps(request).encode()], [write_end, theirs.fileno()])
            finally:
                os.close(write_end)
        self.pid = self._next_number()

    def wait(self) -> int:
        """Waits until it has ended; returns its exit status, negative: the signal that ended it. For one call."""
        with self._connection:  # the server reaps it once this is closed
            return self._next_number()

    def _next_number(self) -> int:
        found = self._connection.recv(_STATUS_BYTES)
        assert found, "the server that it was to be forked from has ended"
        return int(found)


def start(
    module: str, arguments: Sequence[str], env: Mapping[str, str], *, imported: Sequence[str], index: int
) -> Prepared:
    """Starts `python -m module *arguments` in the root of the repository, with `env` as its whole environment.

    Args:
        module: what to run.
        arguments: of its command line.
        env: all of its environment.
        imported: the modules that it has imported when it starts, `OURS` or `STOCK`.
        index: its process id in the job.
    """
    early = tuple(sorted((name, value) for name, value in env.items() if name.startswith(_EARLY)))
    request = {"module": module, "arguments": list(arguments), "env": dict(env)}
    with _lock:
        place = (early, tuple(imported), index % _SERVERS)
        if place not in _servers:
            _servers[place] = _start_server(env, imported)
        try:
            return Prepared(_servers[place], request)
        except BrokenPipeError:  # a test that took too long has taken its server with it
            _servers[place] = _start_server(env, imported)
            return Prepared(_servers[place], request)


_lock = threading.Lock()
_servers: dict[object, socket.socket] = {}


def _start_server(env: Mapping[str, str], imported: Sequence[str]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.prepared", str(theirs.fileno()), *imported],
            env=dict(env),
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # or a Ctrl-C at the terminal would end it
        )
    atexit.register(_end_server, ours, server)
    return ours


def _end_server(connection: socket.socket, server: subprocess.Popen[bytes]) -> None:
    connection.close()
    server.wait()


class _Request(NamedTuple):
    """What a forked process is to run."""

    module: str
    arguments: list[str]
    env: dict[str, str]


class _Child(NamedTuple):
    """One process that was forked, in its server.

    Attributes:
        pid: its pid.
        ended: a file descriptor of the process, which can be read once it has ended.
        starter: the connection to whoever asked for it.
    """

    pid: int
    ended: int
    starter: socket.socket

    def forget(self) -> None:
        os.close(self.ended)
        self.starter.close()


class _Server:
    """Forks a process for each request that comes, and tells whoever asked for it how it ended.

    Args:
        control: where requests come from. Its end is the end of the server and of all that it has forked.
    """

    def __init__(self, control: socket.socket):
        self._control = control
        self._running: dict[int, _Child] = {}  # by `ended`
        self._reported: dict[int, _Child] = {}  # those that have ended, by the number of `starter`

    def serve(self) -> _Request | None:
        """Returns in each forked process with its request, and with None at the server's end."""
        while True:
            readable, _, _ = select.select([self._control, *self._running, *self._reported], [], [])
            for fd in readable:
                if fd in self._running:
                    self._report(self._running.pop(fd))
                elif fd in self._reported:
                    self._reap(self._reported.pop(fd))
                else:
                    message, fds, _, _ = socket.recv_fds(self._control, _REQUEST_BYTES, 2)
                    if not message:
                        self._kill()
                        return None
                    request = _Request(**json.loads(message))
                    if self._fork(request, output=fds[0], starter=socket.socket(fileno=fds[1])):
                        return request

    def _fork(self, request: _Request, output: int, starter: socket.socket) -> bool:
        """Whether this is the forked process."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jax and Python warn of forks; no thread of theirs runs yet
            pid = os.fork()
        if pid:
            os.close(output)
            child = _Child(pid=pid, ended=os.pidfd_open(pid), starter=starter)
            self._running[child.ended] = child
            return False
        self._control.close()
        for child in [*self._running.values(), *self._reported.values()]:
            child.forget()
        _become(request, output)
        with starter:
            starter.send(str(os.getpid()).encode())  # now it has a group of its own, which can be killed
        return True

    def _report(self, child: _Child) -> None:
        found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        with contextlib.suppress(OSError):  # whoever asked for it has given up
            child.starter.send(str(status).encode())
        self._reported[child.starter.fileno()] = child

    def _reap(self, child: _Child) -> None:
        """Its pid may be another's from now on."""
        os.waitpid(child.pid, 0)
        child.forget()

    def _kill(self) -> None:
        for child in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):  # only zombies are left in the group
                os.killpg(child.pid, signal.SIGKILL)


def _become(request: _Request, output: int) -> None:
    """Makes this process, which was forked a moment ago, what `subprocess.Popen` would have started."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.env)
    sys.argv[1:] = request.arguments


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    wanted = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if wanted is not None:
        runpy.run_module(wanted.module, run_name="__main__", alter_sys=True)
