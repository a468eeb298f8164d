"""The size of the main memory that this process may use."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator

_GROUPS = pathlib.Path("/sys/fs/cgroup")


@functools.cache
def of_this_machine() -> int | None:
    """Bytes of main memory, or fewer where the process's control group (a container, a batch job) has a limit.

    None if the system does not say.
    """
    found = list(limits(_GROUPS, pathlib.Path("/proc/self/cgroup")))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min((size for size in found if size > 0), default=None)


def limits(groups: pathlib.Path, own: pathlib.Path) -> Iterator[int]:
    """The limits of this process's control group and of those around it, of both versions (see cgroups(7))."""
    lines = []
    with contextlib.suppress(OSError, ValueError):
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    for _, kinds, path in (line for line in lines if len(line) == 3):
        if kinds and "memory" not in kinds.split(","):
            continue
        top, name = (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
        group = top / path.lstrip("/")
        for place in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # not there in a container, or the word "max"
                yield int((place / name).read_text())
            if place == top:
                break
