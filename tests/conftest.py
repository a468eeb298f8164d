"""What the tests share, and, set before anything imports jax, the platform that they see: four CPU devices."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from epochckpt.testing import Faults

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA's threads. As many as a small machine has cores are too few: devices that wait for each other in a collective can
# hold them all, and after a minute XLA aborts the process.
os.environ.setdefault("PJRT_NPROC", "16")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

# An example may take as long as a busy machine makes it.
slowly = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("busy", **slowly)
hypothesis.settings.load_profile("busy")


MEMORY = pathlib.Path("/dev/shm")
ROOM_BYTES = 2 << 30


def pytest_configure(config: pytest.Config) -> None:
    """A shell's `&` has the suite ignore Ctrl-C, and with it all that the tests start: their own must hear it.

    The default level keeps its temporary files in memory where there is room, which saves a quarter of its time. Tests
    whose subject is the disk use the fixture `on_disk`; the other levels are on the disk as a whole.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = config.option.basetemp is not None or "TMPDIR" in os.environ
    by_default = not chosen and config.option.markexpr in config.getini("addopts")
    if by_default and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
        os.environ["TMPDIR"] = str(MEMORY)  # what the tests start inherits it
        tempfile.tempdir = None  # it is looked up anew


def pytest_sessionstart(session: pytest.Session) -> None:
    """Shares the first compilation of the tests, in a fresh clone, among the workers of pytest-xdist.

    pytest rewrites the asserts of each file when a process imports it first, and keeps the result for the others. All
    workers collect in the same order, so each would compile all files. Here each starts at another file, and finds
    what the others have compiled when it gets there.
    """
    whole = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not whole or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    folder = pathlib.Path(__file__).parent
    files = sorted(folder.rglob("test_*.py"))
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    start = len(files) * worker // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in files[start:] + files[:start]:
        module = ".".join(file.relative_to(folder.parent).with_suffix("").parts)
        # The collection imports what fails here again, and reports it.
        with warnings.catch_warnings(action="error"), contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(module)


@pytest.fixture(params=["posix", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """A directory that does not exist yet."""
    return str(tmp_path / "run") if request.param == "posix" else f"memory://{uuid.uuid4().hex}/"


@pytest.fixture
def on_disk() -> Iterator[pathlib.Path]:
    """A folder on a disk; `tmp_path` may lie in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="epochckpt-test-") as folder:
        yield pathlib.Path(folder)


@pytest.fixture
def public_folder() -> Iterator[pathlib.Path]:
    """A folder that every user may enter; pytest closes its own to other users whenever it starts."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder).chmod(0o755)
        yield pathlib.Path(folder)


@pytest.fixture
def faults() -> Iterator[Faults]:
    """The rules that every store follows which is opened during the test; there are none at first."""
    from epochckpt.testing import Faults

    with Faults().everywhere() as rules:
        yield rules


@pytest.fixture
def patience() -> Iterator[Callable[..., None]]:
    """Sets times that epochckpt waits, attributes of `Patience`, until the end of the test."""
    from epochckpt import _patience

    with contextlib.ExitStack() as stack:

        def set_until_the_end(**changes: object) -> None:
            stack.enter_context(_patience.use(**changes))

        yield set_until_the_end


@pytest.fixture(autouse=True)
def _not_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that plays JAX's preemption notice leaves the process, which hears it once and for all, as it was."""
    from epochckpt.agreement import coordination

    monkeypatch.setattr(coordination.Preemption, "_asked", 0)
    monkeypatch.setattr(coordination.Preemption, "_heard", False)


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A small file system of its own."""
    point = tmp_path / "disk"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "epochckpt-test", str(point)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        if subprocess.run(["umount", str(point)], timeout=30, check=False).returncode:
            subprocess.run(["umount", "--lazy", str(point)], timeout=30, check=True)
