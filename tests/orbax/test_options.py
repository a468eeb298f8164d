"""Every field of Orbax's CheckpointManagerOptions is honoured, a hint, or refused: none is silently ignored."""

import dataclasses
import logging
import pathlib
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_managers import ContinuousCheckpointingPolicy

import epochckpt as ec
from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.orbax import options as checks
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.orbax_options import NESTED, fields_of, option
from tests.support.processes import run_worker

Options = ocp.CheckpointManagerOptions
DOCS = pathlib.Path(__file__).parent.parent.parent / "docs" / "orbax.md"
WAIT_SECS = 30.0


def save(manager: ec.CheckpointManager, epoch: int, **kwargs: Any) -> bool:
    return manager.save(epoch, args=ocp.args.StandardSave({"a": jnp.full(3, epoch)}), **kwargs)


def test_every_field_is_known() -> None:
    """A new Orbax cannot add an option that we ignore without a word, also not in the options that are in options."""
    fields = fields_of(Options)
    kinds = [checks.HONOURED, set(checks.HINTS), set(checks.REFUSED)]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert fields <= set().union(*kinds)


def is_policy(kind: Any) -> bool:
    """Whether it is one of Orbax's policies, of either kind."""
    kinds = (ocp.checkpoint_managers.PreservationPolicy, ocp.checkpoint_managers.SaveDecisionPolicy)
    return isinstance(kind, type) and any(base in kind.__mro__[1:] for base in kinds)


def test_the_docs_name_every_option_argument_and_member() -> None:
    """docs/orbax.md leaves none out."""
    text = DOCS.read_text(encoding="utf-8")
    text = text.replace("Save/Restore`", "Save` `Restore`")
    members = {name for name in dir(ocp.AbstractCheckpointManager) if not name.startswith("_")}
    words = {name.rpartition(".")[2] for name in fields_of(Options)} | NESTED.keys() | members
    words |= {name for name in dir(ocp.checkpoint_managers) if is_policy(getattr(ocp.checkpoint_managers, name))}
    words |= {name.removesuffix("Save") for name in dir(ocp.args) if name.endswith("Save")}
    assert [w for w in sorted(words) if w not in text] == []


def test_an_option_of_a_newer_orbax_is_refused(tmp_path: pathlib.Path) -> None:
    """Unless it is left alone."""

    @dataclasses.dataclass
    class Newer(Options):
        fancy: bool = False

    ec.CheckpointManager(tmp_path / "a", options=Newer()).close()

    @dataclasses.dataclass(frozen=True)
    class NewerFiles(ocp.options.FileOptions):
        quick: bool = False

    ec.CheckpointManager(tmp_path / "a", options=Options(file_options=NewerFiles())).close()
    for options, name in (
        (Newer(fancy=True), "fancy"),
        (Options(file_options=NewerFiles(quick=True)), r"file_options\.quick"),
    ):
        with pytest.raises(UnsupportedError, match=f"{name} is an option of a newer Orbax"):
            ec.CheckpointManager(tmp_path / "b", options=options)
        assert not (tmp_path / "b").exists()


HINTS: dict[str, Any] = {
    "cleanup_tmp_directories": True,
    "enable_background_delete": True,
    "num_deletion_threads": 4,
    "atomicity_options": object(),
    "temporary_path_class": object,
    "lightweight_initialize": True,
    "enable_per_process_directory_creation": True,
    "async_options.barrier_sync_fn": lambda **_: None,
    "async_options.create_directories_asynchronously": False,
    "file_options.skip_sync_file_validations": True,
}


@pytest.mark.parametrize("name", sorted(checks.HINTS.keys() & fields_of(Options)))
def test_hints_are_accepted_with_one_line(name: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """They change nothing, and the log says so."""
    beside = {"multiprocessing_options": ocp.options.MultiprocessingOptions(primary_host=None)}
    options = Options(
        **option(name, HINTS[name]), **(beside if name == "enable_per_process_directory_creation" else {})
    )
    with caplog.at_level(logging.INFO, "absl"), ec.CheckpointManager(tmp_path, options=options) as m:
        save(m, 1)
        m.wait_until_finished()
        assert m.all_steps() == [1]
    assert sum(name in r.getMessage() for r in caplog.records) == 1


def test_what_would_change_the_data_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    """Before anything is written."""
    with pytest.raises(UnsupportedError, match="todelete_full_path"):
        ec.CheckpointManager(tmp_path / "run", options=Options(todelete_full_path="away"))
    assert not (tmp_path / "run").exists()


def test_post_finalization_callback(tmp_path: pathlib.Path) -> None:
    """Called once for each commit, after it; what it raises harms nothing."""
    seen: list[list[int]] = []

    def callback() -> None:
        seen.append(list(manager.all_steps()))
        raise RuntimeError("the user's own")

    options = Options(async_options=ocp.AsyncOptions(post_finalization_callback=callback))
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        for epoch in range(3):
            save(manager, epoch)
            manager.wait_until_finished()
    assert seen == [[0], [0, 1], [0, 1, 2]]


def test_async_timeout(tmp_path: pathlib.Path) -> None:
    """`async_options.timeout_secs` bounds a save, also beside StorageOptions; two bounds contradict each other."""
    asked = Options(async_options=ocp.AsyncOptions(timeout_secs=7))
    assert checks.storage_options(asked, None).save_timeout_secs == 7
    beside = ec.StorageOptions(io_threads=3)
    assert checks.storage_options(asked, beside) == ec.StorageOptions(io_threads=3, save_timeout_secs=7)
    assert checks.storage_options(asked, ec.StorageOptions(save_timeout_secs=7)).save_timeout_secs == 7
    with pytest.raises(InvalidArgumentError, match=r"AsyncOptions\.timeout_secs=7 contradicts.*save_timeout_secs=9"):
        checks.storage_options(asked, ec.StorageOptions(save_timeout_secs=9))
    assert checks.storage_options(Options(), ec.StorageOptions(save_timeout_secs=9)).save_timeout_secs == 9
    assert checks.storage_options(Options(), None) == ec.StorageOptions()


@pytest.mark.parametrize("keep", [True, False])
def test_keep_checkpoints_without_metrics(tmp_path: pathlib.Path, keep: bool) -> None:
    """With best_fn, epochs without metrics stay or go."""
    options = Options(max_to_keep=1, best_fn=lambda m: m["x"], keep_checkpoints_without_metrics=keep)
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        for epoch, metrics in enumerate([None, {"x": 3}, {"x": 1}]):
            save(manager, epoch, metrics=metrics)
            manager.wait_until_finished()
        assert manager.all_steps() == ([0, 1, 2] if keep else [1, 2])  # the newest is never deleted


@pytest.mark.parametrize("check", [True, False])
def test_continuous_checkpointing(tmp_path: pathlib.Path, check: bool, faults: Faults) -> None:
    """The policy skips while a save is in flight, unless the check is turned off."""
    options = Options(
        save_decision_policy=ContinuousCheckpointingPolicy(), enable_should_save_is_saving_in_progress_check=check
    )
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        with faults.hold(Store.rename, where=lambda call: call.target == "0") as held:
            assert save(manager, 0)
            assert held.reached.wait(WAIT_SECS)
            assert save(manager, 1) is not check
        manager.wait_until_finished()
        assert manager.all_steps() == ([0] if check else [0, 1])


@pytest.mark.slow
def test_a_part_of_the_processes_may_save_and_another_may_be_the_primary(tmp_path: pathlib.Path) -> None:
    """`multiprocessing_options`, in one job of three processes; `primary_host=None` is a directory for each."""
    for me, found in enumerate(run_worker("tests.support.part_jobs:some", {"directory": str(tmp_path)}, 3)):
        assert found.pop("another primary") == [[1, 0, 2], ["process_1", "process_0", "process_2"], [1, 3], True, True]
        assert found.pop("all") == [[0, 1, 2], [f"process_{i}" for i in range(3)], [1, 3], True, True]
        assert found.pop(f"own {me}") == [[me], [f"process_{me}"], [1, 3], True, True]
        expected = {} if me == 1 else {"some": [[2, 0], ["process_2", "process_0"], [1, 3], True, True]}
        assert found == expected
    with ocp.CheckpointManager(tmp_path / "some") as stock:
        target = {"host": np.zeros(3, int), "parts": np.zeros(12, np.float32), "whole": np.zeros(12, np.float32)}
        found = stock.restore(3, args=ocp.args.StandardRestore(target))
    assert [x.tolist() for x in found.values()] == [[2, 2, 2], list(range(12)), list(range(12))]


def test_multiprocessing_options_of_a_single_process(tmp_path: pathlib.Path) -> None:
    """It is process 0, and may be the primary for itself alone; another one there is not."""
    for fits in ({"primary_host": None}, {"active_processes": {0}}, {"barrier_sync_key_prefix": "x"}):
        options = Options(multiprocessing_options=ocp.options.MultiprocessingOptions(**fits))
        with ec.CheckpointManager(tmp_path, options=options) as manager:
            assert manager.processes == (0,)
    for wrong in ({"primary_host": 1}, {"active_processes": {0, 1}}, {"active_processes": set()}):
        options = Options(multiprocessing_options=ocp.options.MultiprocessingOptions(**wrong))
        with pytest.raises(InvalidArgumentError, match="multiprocessing_options"):
            ec.CheckpointManager(tmp_path, options=options)
        with ec.CheckpointManager(tmp_path, options=dataclasses.replace(options, read_only=True)) as reader:
            assert reader.processes is None


@pytest.mark.slow
def test_what_isinstance_says(tmp_path: pathlib.Path) -> None:
    """It is Orbax's abstract class, not its manager; docs/orbax.md has the line that changes this, for a process."""
    with ec.CheckpointManager(tmp_path) as manager:
        assert ocp.AbstractCheckpointManager in type(manager).__mro__
        assert not isinstance(manager, ocp.CheckpointManager)
    (line,) = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if "CheckpointManager.register(" in line]
    script = f"""
import epochckpt
import orbax.checkpoint as ocp
{line.strip(".`")}
job = epochckpt.Job()
job.init(lambda ws: ws.update(w=1))
job.epoch(lambda ws: ws.update(w=ws["w"] + 1))
job.stop_when(epochckpt.stop.max_epochs(1))
with epochckpt.CheckpointManager({str(tmp_path / "job")!r}) as manager:
    assert isinstance(manager, ocp.CheckpointManager)
    epochckpt.JobRunner(job, manager, progress=False).train(epochckpt.LocalSession())
    assert manager.all_steps() == [0, 1]
    assert manager.nodes(1) == ["process_0"]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
