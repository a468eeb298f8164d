"""What the tests share, and, set before anything imports jax, the platform that they see: four CPU devices."""

import os
import pathlib
import uuid

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()


@pytest.fixture(params=["posix", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """A directory that does not exist yet."""
    return str(tmp_path / "run") if request.param == "posix" else f"memory://{uuid.uuid4().hex}/"


@pytest.fixture(autouse=True)
def _not_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that plays JAX's preemption notice leaves the process, which hears it once and for all, as it was."""
    from epochckpt import coordination

    monkeypatch.setattr(coordination.Preemption, "_asked", 0)
    monkeypatch.setattr(coordination.Preemption, "_heard", False)
