"""Starts a training program as several JAX processes on this machine, and sees to it that none outlives the job.

    if __name__ == "__main__":
        app.run(lambda _: launch.main(train))

`main` starts the program again, once per process, with flags that say which one it is; there it calls `train`, whose
exit status is the process's: 0; 75 if it was preempted: start it again; 74 if its last epoch is not saved. On a
cluster its scheduler does all this.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import traceback

import jax
from absl import flags

import epochckpt as ec

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_processes", 2, "JAX processes to start on this machine.", lower_bound=1)
flags.DEFINE_integer("devices_per_process", 2, "CPU devices in each process.", lower_bound=1)
flags.DEFINE_list("child", None, "Internal, set by the launcher: process id, coordinator, launcher's pid.")


def say(text):
    """Prints once for the whole job, and at once, also into a pipe."""
    if jax.process_index() == 0:
        print(text, flush=True)


def main(train, refusal=lambda: None):
    """Starts the job, or is one process of it; does not return.

    Args:
        train: called in every process; returns its exit status.
        refusal: called before anything is started; returns why the flags make no sense, if so.
    """
    if FLAGS.child:
        run_child(train, *FLAGS.child)
    sys.exit(refusal() or launch())


def run_child(train, process_id, coordinator, launcher_pid):
    """What each of the started processes does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of us; the launcher acts on it
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux's PR_SET_PDEATHSIG: we die when the launcher does
    if os.getppid() != int(launcher_pid):
        sys.exit("the launcher is gone")  # it died before the line above
    # Gloo greets on descriptor 1, from C++ and in the middle of lines: it gets stderr instead.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        jax.distributed.initialize(coordinator, FLAGS.num_processes, int(process_id))
        code = train()
        jax.distributed.shutdown()
    except BaseException:
        # An ordinary exit would wait minutes in JAX's shutdown barrier for the others, and they wait for us.
        traceback.print_exc()
        os._exit(1)
    sys.exit(code)


def launch():
    """Starts the processes, passes on signals, and waits. Returns the exit status."""
    with socket.create_server(("localhost", 0)) as sock:  # any free port
        coordinator = f"localhost:{sock.getsockname()[1]}"
    devices = f"--xla_force_host_platform_device_count={FLAGS.devices_per_process}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}"}
    env.setdefault("PJRT_NPROC", "16")  # threads: with few cores, devices that wait for each other could hold them all
    # Quiet unless the caller says otherwise: of two equal flags the later one counts.
    command = [sys.executable, sys.argv[0], "--verbosity=-1", *sys.argv[1:]]
    children, asked = [], []

    def on_signal(signum, _):
        # Asked once (Ctrl-C or SIGTERM) the job saves what it has and ends; asked again, or a minute later, it dies.
        asked.append(signum)
        for child in children:
            child.send_signal(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)
        signal.alarm(60)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(signum, on_signal)
    try:
        for i in range(FLAGS.num_processes):
            children.append(subprocess.Popen([*command, f"--child={i},{coordinator},{os.getpid()}"], env=env))
        ended = 0, ec.PREEMPTED_EXIT_CODE
        while None in (codes := [child.poll() for child in children]) and not set(codes) - {None, *ended}:
            with contextlib.suppress(subprocess.TimeoutExpired):
                children[codes.index(None)].wait(0.1)  # then look at all of them again
    finally:
        for child in children:
            child.kill()
            child.wait()
    if set(codes) == {ec.PREEMPTED_EXIT_CODE}:
        return ec.PREEMPTED_EXIT_CODE
    if asked:
        return 128 + asked[0]
    for i, code in sorted(enumerate(codes), key=lambda item: item[1] or 0):  # a killed process makes others fail
        if code:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return f"process {i} failed ({how}), the others were ended; start again to go on"
    return 0
