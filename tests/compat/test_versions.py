"""Who reads what whom has written: both of our interfaces, and both of stock Orbax's, of the installed version.

`.ci/run` runs it with the newest and with the oldest supported Orbax. What cannot work is listed in docs/orbax.md.

`data` has what each of these versions, and ours with it installed, has really written, for the other one to read. With
that version installed, `python -m tests.compat.test_versions` makes its file.
"""

from __future__ import annotations

import os
import pathlib
import tarfile
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import epochckpt as ec
from tests.support import stock_states
from tests.support.managers import sharding

IS_NEW = hasattr(v1, "load")  # else v1 has older names, for the unnamed item, too
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DATA = pathlib.Path(__file__).parent / "data"
STEP = 3


def tree() -> dict[str, Any]:
    w = jax.device_put(jnp.arange(16.0).reshape(8, 2), sharding("model"))
    return {"params": {"w": w, "half": jnp.ones(3, jnp.bfloat16)}, "rng": np.arange(3), "step": 7, "rate": 0.5}


def v0_save(manager_class: Any) -> Callable[[pathlib.Path], Any]:
    def save(directory: pathlib.Path) -> None:
        with manager_class(directory) as manager:
            manager.save(STEP, args=ocp.args.StandardSave(tree()))

    return save


def v1_save(trainer: Any) -> Callable[[pathlib.Path], Any]:
    def save(directory: pathlib.Path) -> None:
        with trainer(directory) as checkpointer:
            assert getattr(checkpointer, "save", None) or checkpointer.save_pytree
            (checkpointer.save if hasattr(trainer, "save") else checkpointer.save_pytree)(STEP, tree())

    return save


def v0_load(manager_class: Any) -> Callable[[pathlib.Path], Any]:
    def load(directory: pathlib.Path) -> Any:
        with manager_class(directory) as manager:
            assert manager.latest_step() == STEP
            return manager.restore(STEP, args=ocp.args.StandardRestore(stock_states.abstract(tree())))

    return load


def v1_load(trainer: Any) -> Callable[[pathlib.Path], Any]:
    def load(directory: pathlib.Path) -> Any:
        with trainer(directory) as checkpointer:
            assert checkpointer.latest.step == STEP
            target = stock_states.abstract(tree())
            return (checkpointer.load if hasattr(trainer, "load") else checkpointer.load_pytree)(STEP, target)

    return load


def by_path(directory: pathlib.Path) -> Any:
    return (v1.load if IS_NEW else v1.load_pytree)(directory / str(STEP), stock_states.abstract(tree()))


def exported(directory: pathlib.Path) -> None:
    v0_save(ec.CheckpointManager)(directory.parent / "source")
    ec.export(directory.parent / "source", STEP, directory)


WRITERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "ours v0": v0_save(ec.CheckpointManager),
    "ours v1": v1_save(ec.training.Checkpointer),
    "Orbax v0": v0_save(ocp.CheckpointManager),
    "Orbax v1": v1_save(v1.training.Checkpointer),
    "our export": exported,
    "Orbax v1 save": lambda directory: (v1.save if IS_NEW else v1.save_pytree)(directory / str(STEP), tree()),
    "Orbax v1 of 2025": lambda directory: v1.save_checkpointables(directory / str(STEP), {"pytree": tree()}),
    "Orbax v1 of 2026": lambda directory: v1.save_checkpointables(directory / str(STEP), {"state": tree()}),
}
KEPT = "ours v0", "ours v1", "Orbax v0", "Orbax v1"
"""Whose directories are in `data`."""

READERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "ours v0": v0_load(ec.CheckpointManager),
    "ours v1": v1_load(ec.training.Checkpointer),
    "Orbax v0": v0_load(ocp.CheckpointManager),
    "Orbax v1": v1_load(v1.training.Checkpointer),
    "Orbax v1 load": by_path,
}

_COMPOSITE = "Must provide `args` of type `Composite` when dealing with multiple checkpointable objects"
_SINGLE = (
    "Cannot provide `args` of type `Composite` when dealing with a single, unnamed (default) checkpointable object"
)
_NEW_NAME, _OLD_NAME = "dict_keys(['state']) for loading were not found", 'Checkpointable "pytree" was not found'
_OLD_LOAD = "Failed to interpret path"
_OF_V1 = [name for name in WRITERS if name.startswith("Orbax v1")]

NEW: dict[tuple[str, str], str] = {
    **{(writer, "Orbax v0"): _COMPOSITE for writer in _OF_V1},
    **{(writer, "Orbax v1"): _NEW_NAME for writer in ("Orbax v0", "our export")},
    ("Orbax v1 of 2025", "Orbax v1"): _NEW_NAME,
}
"""What cannot work with the newest Orbax: (writer, reader), and a part of the error."""

OLD: dict[tuple[str, str], str] = {
    **{(writer, "Orbax v0"): _COMPOSITE for writer in _OF_V1},
    **{(writer, "Orbax v1"): _SINGLE for writer in ("ours v0", "ours v1")},
    **{(writer, "Orbax v1"): _OLD_NAME for writer in ("Orbax v0", "our export", "Orbax v1 of 2026")},
    **{(writer, "Orbax v1 load"): _OLD_LOAD for writer in ("Orbax v0", "our export", "Orbax v1 of 2026")},
}
"""The same with the oldest supported one."""


def read_by_all(directory: pathlib.Path, writer: str) -> None:
    """Our interfaces read everything; Orbax's read ours, as far as they read anything under that name."""
    known = NEW if IS_NEW else OLD
    assert not any(reader.startswith("ours") for _, reader in (*NEW, *OLD))
    for reader, load in READERS.items():
        if (problem := known.get((writer, reader))) is None:
            assert stock_states.differences(load(directory), tree()) == [], reader
            continue
        with pytest.raises((KeyError, ValueError)) as caught:
            load(directory)
        assert problem in str(caught.value).replace("\\'", "'"), reader


quiet = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of coroutines of Orbax's errors


@quiet
@pytest.mark.parametrize("writer", list(WRITERS))
def test_who_reads_what(tmp_path: pathlib.Path, writer: str) -> None:
    WRITERS[writer](tmp_path / "run")
    read_by_all(tmp_path / "run", writer)


@quiet
@pytest.mark.parametrize("writer", KEPT)
def test_what_the_other_version_wrote_is_read(tmp_path: pathlib.Path, writer: str) -> None:
    """And continued by ours."""
    other = "0.11.33" if IS_NEW else "0.12.8"
    with tarfile.open(DATA / f"orbax-{other}.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    alike = ("Orbax v1 of 2025" if IS_NEW else "Orbax v1 of 2026") if writer == "Orbax v1" else writer
    read_by_all(tmp_path / writer, alike)
    with ec.training.Checkpointer(tmp_path / writer) as checkpointer:
        (checkpointer.save if IS_NEW else checkpointer.save_pytree)(STEP + 1, tree())
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [STEP, STEP + 1]


def test_what_cannot_work_is_listed() -> None:
    """With its error."""
    text = " ".join((ROOT / "docs" / "orbax.md").read_text(encoding="utf-8").split())
    for problem in {*NEW.values(), *OLD.values()}:
        assert problem in text


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")  # stock Orbax, where it is told nothing
def test_where_there_are_several_items_each_has_its_own_name(tmp_path: pathlib.Path) -> None:
    """A tree beside JSON, of either style, ours and Orbax's."""
    config = [1, None, {"a": 2}]
    args = ocp.args.Composite(state=ocp.args.StandardSave(tree()), config=ocp.args.JsonSave(config))
    for number, manager_class in enumerate((ec.CheckpointManager, ocp.CheckpointManager)):
        with manager_class(tmp_path / str(number)) as manager:
            manager.save(STEP, args=args)
        with ec.training.Checkpointer(tmp_path / str(number)) as checkpointer:
            found = checkpointer.load_checkpointables(STEP)
            assert found.keys() == {"state", "config"}
            assert found["config"] == config
            assert stock_states.differences(found["state"], tree()) == []
            assert checkpointer.checkpointables_metadata().metadata["state"]["rng"].shape == (3,)
    name = next(n for n in v1.handlers.local_registry().add.__annotations__ if n.startswith("checkpointable"))
    registry = v1.handlers.local_registry()
    registry.add(v1.handlers.JsonHandler, **{name: "config"})
    context = v1.Context(checkpointables_options=v1.options.CheckpointablesOptions(registry=registry))
    with context:
        v1.save_checkpointables(tmp_path / "2" / str(STEP), {"state": tree(), "config": config})
    with ec.CheckpointManager(tmp_path / "2") as manager:
        assert manager.restore(STEP)["config"] == config
        assert manager.verify(STEP).ok
    with ec.training.Checkpointer(tmp_path / "2") as checkpointer:
        found = checkpointer.load_checkpointables(STEP)
        assert found["config"] == config
        assert stock_states.differences(found["state"], tree()) == []
    with ec.training.Checkpointer(tmp_path / "3") as checkpointer, context:
        checkpointer.save_checkpointables(STEP, {"state": tree(), "config": config})
    with ec.CheckpointManager(tmp_path / "3") as manager:
        assert manager.restore(STEP)["config"] == config
    with ocp.CheckpointManager(tmp_path / "3") as manager:
        assert manager.restore(STEP)["config"] == config
    if IS_NEW:
        assert v1.load_checkpointables(tmp_path / "3" / str(STEP), {"config": None}) == {"config": config}


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    archive = DATA / f"orbax-{ocp.__version__}.tar.xz"
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive, "w:xz") as file:
        for name in KEPT:
            WRITERS[name](pathlib.Path(folder, name))
            file.add(os.path.join(folder, name), name)
