"""The memory of this process, as Linux counts it: see proc_pid_status(5)."""

import pathlib


def nbytes(field: str) -> int:
    """`VmRSS`: in memory now. `VmHWM`: the most since `forget_peak`. `VmSize`: all that is mapped.

    Not `ru_maxrss`: that is inherited from the process that started this one.
    """
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def forget_peak() -> None:
    """See proc_pid_clear_refs(5)."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
