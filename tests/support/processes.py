"""Runs real processes that form one `jax.distributed` job on this machine.

    results = run_worker("tests.test_x:body", {"directory": str(tmp_path)}, num_processes=2)

    with start_processes(["-m", "tests.support.worker", "tests.test_x:body", "{}"], num_processes=2) as job:
        job[1].wait_for_output("before the rename", timeout=60)
        job[1].send_signal(signal.SIGSTOP)
        outcomes = job.wait(timeout=60)

Guarantees:

* No child outlives its `Processes`: leaving the `with` block kills what still runs, so does the end of this
  interpreter.
* Every wait is bounded and wakes by events, none polls.
* A child that is late is made to print the stacks of all its Python threads before it is killed.
* A module (`-m`) starts with jax, Orbax and epochckpt imported, see `tests.support.prepared`, unless other imports
  are named; all other programs start with nothing imported.
* stdout and stderr of a child come together, in order, in one file; both are unbuffered.

The children find their place in the job in `EPOCHCKPT_TEST_{PROCESS_ID,NUM_PROCESSES,COORDINATOR}`.
"""

import atexit
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tests.support import prepared

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULT_PREFIX = "RESULT "

_DUMP_SECS = 5.0  # what a late child gets to print its stacks
_KILL_SECS = 30.0  # SIGKILL takes effect at once unless the kernel itself is stuck


class Outcome(NamedTuple):
    """How one process ended: its exit status (negative: the signal that ended it) and all that it printed."""

    returncode: int
    stdout: str


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of localhost that the system gives to nobody else within the block.

    gRPC's servers, and so JAX's coordinator, listen on it all the same: they share ports of their user.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("localhost", 0))
        yield holder.getsockname()[1]


class Process:
    """One running child.

    Attributes:
        index: its process id in the job.
        pid: its pid, which is its process group's id too.
        output_path: the file that collects what it prints.
        returncode: its exit status, None while it, or anything it started that has its output, still runs.
    """

    def __init__(
        self,
        index: int,
        started: prepared.Prepared | subprocess.Popen[bytes],
        output_path: pathlib.Path,
        changed: threading.Condition,
    ):
        self.index = index
        self.output_path = output_path
        self.returncode: int | None = None
        self._changed = changed  # the job's: notified whenever a process prints or ends
        self._output = bytearray()
        self._popen = started
        self.pid = self._popen.pid
        self._pump = threading.Thread(target=self._read, name=f"output of process {index}", daemon=True)
        self._pump.start()

    def _read(self) -> None:
        # The child is reaped only here, after the last writer of its pipe is gone: until then its pid and its
        # group cannot be another's, so that signals to them are safe.
        assert self._popen.stdout is not None
        with self._popen.stdout as pipe, self.output_path.open("ab", buffering=0) as file:
            while chunk := pipe.read(1 << 16):
                file.write(chunk)
                with self._changed:
                    self._output += chunk
                    self._changed.notify_all()
        returncode = self._popen.wait()
        with self._changed:
            self.returncode = returncode
            self._changed.notify_all()

    def output(self) -> str:
        """What it printed so far."""
        with self._changed:
            return self._output.decode(errors="replace")

    def send_signal(self, signum: int) -> None:
        """Sends a signal to the process alone; nothing happens if it has ended."""
        with self._changed:
            if self.returncode is None:
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kills the process and all that it started, and returns at once."""
        with self._changed:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # only zombies are left in the group
                    os.killpg(self.pid, signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Makes faulthandler print every thread's stack, which ends the process with SIGABRT."""
        self.send_signal(signal.SIGABRT)
        self.send_signal(signal.SIGCONT)  # a stopped process handles no signal

    def wait_for_exit(self, timeout: float) -> bool:
        """Waits until the process has ended; returns whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self.returncode is not None, timeout)

    def wait_for_output(self, text: str, timeout: float) -> None:
        """Waits until the process has printed `text`.

        Raises:
            AssertionError: it ended or `timeout` seconds passed without it; names all that was printed.
        """
        wanted = text.encode()
        with self._changed:
            self._changed.wait_for(lambda: wanted in self._output or self.returncode is not None, timeout)
            if wanted in self._output:
                return
        state = "still runs" if self.returncode is None else f"ended with {self.returncode}"
        raise AssertionError(f"process {self.index} {state}, it never printed {text!r}:\n{self.output()}")


def _start_anew(program: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts `python *program` in a session, and so a process group, of its own: grandchildren are killed with it."""
    return subprocess.Popen(
        [sys.executable, *program],
        env=dict(env),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        bufsize=0,
    )


class Processes(Sequence[Process]):
    """The processes of one job, by process id. A context manager: leaving it kills what still runs.

    Attributes:
        timed_out: whether the last `wait` had to kill a process.
    """

    def __init__(self, program: Sequence[str], num_processes: int, env: Mapping[str, str], imported: Sequence[str]):
        self.timed_out = False
        self._imported = imported if program[0] == "-m" and prepared.POSSIBLE else ()
        self._program = program
        self._port = contextlib.ExitStack()
        coordinator = f"localhost:{self._port.enter_context(reserved_port())}"
        self._env = {"EPOCHCKPT_TEST_COORDINATOR": coordinator, **env}
        self._folder = tempfile.TemporaryDirectory(prefix="epochckpt-test-")
        self._processes: list[Process] = []
        self._starts = 0
        self._changed = threading.Condition()
        _alive.add(self)
        try:
            for index in range(num_processes):
                self._processes.append(self._start(index))
        except BaseException:
            self.close()
            raise

    def _start(self, index: int) -> Process:
        env = {**self._env, "EPOCHCKPT_TEST_PROCESS_ID": str(index)}
        self._starts += 1
        path = pathlib.Path(self._folder.name) / f"{self._starts}-process-{index}.txt"
        if not self._imported:
            return Process(index, _start_anew(self._program, env), path, self._changed)
        module, arguments = self._program[1], self._program[2:]
        started = prepared.start(module, arguments, env, imported=self._imported, index=index)
        return Process(index, started, path, self._changed)

    def __len__(self) -> int:
        return len(self._processes)

    def __getitem__(self, index: Any) -> Any:
        return self._processes[index]

    def __iter__(self) -> Iterator[Process]:
        return iter(self._processes)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def relaunch(self, index: int) -> Process:
        """Starts the program again in the place of a process that has ended."""
        assert self._processes[index].returncode is not None, f"process {index} still runs"
        self._processes[index] = self._start(index)
        return self._processes[index]

    def kill(self) -> None:
        """Kills every process that still runs, and waits until they are gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            assert process.wait_for_exit(_KILL_SECS), f"process {process.index} (pid {process.pid}) survived SIGKILL"

    def close(self) -> None:
        """Kills what still runs and removes the output files. May be called again."""
        self.kill()
        self._port.close()
        self._folder.cleanup()
        _alive.discard(self)

    def wait(self, timeout: float, after_failure_secs: float | None = None) -> list[Outcome]:
        """Waits until all processes have ended; those that do not print their stacks and are killed.

        Args:
            timeout: seconds for all of them together.
            after_failure_secs: seconds that the others have left once one has failed. None: no such limit;
                a test of failures wants to see the survivors run on.

        Returns:
            How each process ended, by process id; -6 or -9 for one that was late, whose output then says so.
        """

        def finished() -> bool:
            return all(process.returncode is not None for process in self._processes)

        def failed() -> bool:
            return after_failure_secs is not None and any(process.returncode for process in self._processes)

        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: finished() or failed(), timeout)
            if after_failure_secs is not None:
                left = min(after_failure_secs, deadline - time.monotonic())
                self._changed.wait_for(finished, max(0.0, left))
        late = [process for process in self._processes if process.returncode is None]
        self.timed_out = bool(late)
        for process in late:
            process.dump_stacks()
        dumped_by = time.monotonic() + _DUMP_SECS
        for process in late:
            process.wait_for_exit(max(0.0, dumped_by - time.monotonic()))
        self.kill()
        outcomes = []
        for process in self._processes:
            assert process.returncode is not None
            note = (
                "\n[tests.support.processes] was late: told to print its stacks, then killed\n"
                if process in late
                else ""
            )
            outcomes.append(Outcome(process.returncode, process.output() + note))
        return outcomes


_alive: "weakref.WeakSet[Processes]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for processes in list(_alive):
        processes.close()


def start_processes(
    program: Sequence[str],
    num_processes: int,
    *,
    devices_per_process: int = 1,
    env: Mapping[str, str] | None = None,
    imported: Sequence[str] = prepared.OURS,
) -> Processes:
    """Starts `python *program` once per process of a job.

    Args:
        program: what follows `python` on the command line: `["path/script.py", "arg"]`, `["-m", "module"]` or
            `["-c", code]`. It runs in the root of the repository.
        num_processes: how many processes the job has. Calling `jax.distributed.initialize` is left to the
            program; `tests.support.worker` does it.
        devices_per_process: how many CPU devices each of them sees.
        env: variables to set over those that this helper sets and those of this process.
        imported: what a module (`-m`) has imported when it starts. `prepared.STOCK` has nothing of ours. `()` starts
            Python itself, which a test can wait for as its parent.
    """
    own = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_process}",
        "PYTHONFAULTHANDLER": "1",  # SIGABRT then prints the stacks of all threads
        "PYTHONUNBUFFERED": "1",
        "EPOCHCKPT_TEST_NUM_PROCESSES": str(num_processes),
    }
    return Processes(program, num_processes, {**os.environ, **own, **(env or {})}, imported=imported)


def parse_result(stdout: str) -> Any:
    """The value that `tests.support.worker` printed.

    Raises:
        AssertionError: there is none.
    """
    lines = [line for line in stdout.splitlines() if line.startswith(RESULT_PREFIX)]
    assert lines, "the process printed no result"
    return json.loads(lines[-1].removeprefix(RESULT_PREFIX))


def run_worker(
    fn_path: str,
    args: Mapping[str, Any] | None = None,
    num_processes: int = 1,
    devices_per_process: int = 1,
    timeout: float = 180.0,
    *,
    env: Mapping[str, str] | None = None,
    imported: Sequence[str] = prepared.OURS,
    after_failure_secs: float = 40.0,
) -> list[Any]:
    """Calls a function in every process of a job and returns what each call returned.

    Args:
        fn_path: `"module:function"`, importable from the root of the repository.
        args: keyword arguments, the same for every process; JSON values.
        num_processes: how many processes; if several, `jax.distributed` is initialized before the import.
        devices_per_process: how many CPU devices each of them sees.
        timeout: seconds for all of them together.
        env: as in `start_processes`.
        imported: as in `start_processes`.
        after_failure_secs: seconds that the others have left once one has failed.

    Returns:
        The functions' return values (JSON values), by process id.

    Raises:
        AssertionError: a process failed or was late; names every process's exit status and output.
    """
    program = ["-m", "tests.support.worker", fn_path, json.dumps(dict(args or {}))]
    with start_processes(
        program, num_processes, devices_per_process=devices_per_process, env=env, imported=imported
    ) as job:
        outcomes = job.wait(timeout, after_failure_secs)
        if any(outcome.returncode for outcome in outcomes):
            raise AssertionError(
                f"{fn_path} failed in a job of {num_processes} processes\n"
                + "\n".join(
                    f"---- process {index}: exit status {outcome.returncode} ----\n{outcome.stdout}"
                    for index, outcome in enumerate(outcomes)
                )
            )
        return [parse_result(outcome.stdout) for outcome in outcomes]
