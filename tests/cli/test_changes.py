"""The commands that change a directory: what they say they would do, what they do, and when they refuse."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors import numpy

import epochckpt as ec
from epochckpt.cli import main
from epochckpt.directory import directory_of
from epochckpt.format import paths
from epochckpt.orbax import StepNames
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, StoreCall
from epochckpt.tiers import host_record

Save, Options = ocp.args.StandardSave, ocp.CheckpointManagerOptions
EPOCHS = [0, 1, 2, 3]


def save(directory: Any, epochs: Sequence[int] = EPOCHS, mirror: str | None = None) -> None:
    storage = ec.StorageOptions(mirror=mirror)
    with ec.CheckpointManager(directory, metadata={"model": "a"}, storage=storage) as manager:
        for epoch in epochs:
            manager.save(epoch, args=Save({"w": np.arange(1000.0) + epoch}), metrics={"loss": abs(epoch - 2.0)})


def steps(directory: Any) -> list[int]:
    """The epochs of a directory, all of which are whole."""
    with ec.CheckpointManager(directory, options=Options(read_only=True)) as manager:
        assert all(manager.verify(epoch).ok for epoch in manager.all_steps())
        return list(manager.all_steps())


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process; gives its exit code, its answer and its remarks."""

    def run(*argv: object, json_too: bool = True) -> tuple[int, Any, str]:
        capsys.readouterr()
        code = main.main([*map(str, argv), *(["--json"] if json_too else [])])
        out, err = capsys.readouterr()
        return code, json.loads(out) if json_too and out else out, err

    return run


def test_epochs_are_deleted_and_rolled_back_when_it_is_asked_for(said: Any, directory: str) -> None:
    """Without --yes nothing changes, and the answers are the same; the next run goes on from there."""
    save(directory)
    best = "--metric", "loss", "--mode", "min"
    code, plan, _ = said("rm", directory, 1, "best", 1, *best)
    assert (code, plan["done"], [c["epoch"] for c in plan["changes"]]) == (0, False, [1, 2])
    assert steps(directory) == EPOCHS
    code, done, _ = said("rm", directory, 1, "best", *best, "--yes")
    assert (code, done) == (0, {**plan, "done": True})
    assert steps(directory) == [0, 3]
    code, plan, _ = said("rollback", directory, 0)
    assert [(c["epoch"], "rolled-back-" in c["destination"]) for c in plan["changes"]] == [(3, True)]
    assert plan["nbytes"] >= 8000
    assert steps(directory) == [0, 3]
    assert said("rollback", directory, 0, "--yes")[0] == 0
    assert steps(directory) == [0]
    code, text, _ = said("rollback", directory, 0, "--yes", json_too=False)
    assert "the newest epoch is 0 already" in text
    save(directory, [1])
    assert steps(directory) == [0, 1]
    text = said("rm", directory, 0, 1, json_too=False)[1]
    assert "delete 2 epochs" in text
    assert "no epoch is left then" in text
    assert "Nothing was changed; --yes does it." in text


@pytest.fixture(params=["rm", "rollback", "cp"])
def line(request: pytest.FixtureRequest, directory: str) -> list[Any]:
    """A command that changes the directory, which has the epochs; without --yes."""
    save(directory)
    if request.param != "cp":
        return [request.param, directory, 1]
    source = f"memory://{uuid.uuid4().hex}/"
    save(source, [70])
    return ["cp", source, directory]


def test_a_live_run_is_not_harmed(said: Any, directory: str, line: list[Any]) -> None:
    """The command is refused, as a dry run, too; --take-over fences the run off."""
    run = ec.CheckpointManager(directory)
    run.claim()
    for more in ([], ["--yes"]):
        code, _, err = said(*line, *more)
        assert code == 2
        assert "may be alive" in err
    run.save(4, args=Save({"w": np.zeros(3)}))
    run.wait_until_finished()
    assert steps(directory) == [*EPOCHS, 4]
    assert said(*line, "--yes", "--take-over")[0] == 0
    run.save(5, args=Save({"w": np.zeros(3)}))
    with pytest.raises(ec.errors.FencedError):
        run.close()


def begin_run(faults: Faults, directory: str, is_time: Callable[[], bool]) -> list[ec.CheckpointManager]:
    """Has a run begin before a command looks whether there is one, once it `is_time`; gives the run that has begun."""
    root = open_store(directory).root
    asking = threading.Lock()
    begun: list[ec.CheckpointManager] = []

    def look(call: StoreCall) -> None:
        if begun or not asking.acquire(blocking=False):
            return
        try:  # what it asks for itself is no look of the command
            if is_time():
                run = ec.CheckpointManager(directory)
                run.claim()
                begun.append(run)
        finally:
            asking.release()

    def is_look(path: str) -> Callable[[StoreCall], bool]:
        return lambda call: (call.store.root, call.path) == (root, path)

    faults.before(Store.list, look, where=is_look(""))
    faults.before(Store.read, look, where=is_look(paths.HEAD))
    return begun


@pytest.mark.slow
def test_a_run_that_begins_after_the_command_has_looked_is_not_harmed(
    said: Any, directory: str, line: list[Any], faults: Faults
) -> None:
    """Whenever it begins, up to the last look that the command makes before it claims the directory."""
    root = open_store(directory).root
    for moment in itertools.count():
        looks = iter(range(moment))
        changes: list[StoreCall] = []

        def is_time(looks: Iterator[int] = looks, changes: list[StoreCall] = changes) -> bool:
            return not changes and next(looks, None) is None

        begun = begin_run(faults, directory, is_time)
        for method in (Store.make_folder, Store.replace):
            faults.before(method, changes.append, where=lambda call: call.store.root == root)
        code, _, err = said(*line, "--yes")
        faults.clear()
        if not begun:  # the command has made fewer looks
            break
        assert code == 2
        assert "may be alive" in err
        (run,) = begun
        run.save(4 + moment, args=Save({"w": np.zeros(3)}))
        run.close()
        assert steps(directory) == [*EPOCHS, *range(4, 5 + moment)]
    assert code == 0
    assert moment > 3


def test_a_run_that_begins_during_a_change_stops_it(said: Any, directory: str, faults: Faults) -> None:
    """What was deleted before is named; the run has every other epoch."""
    save(directory)
    epoch_directory = directory_of(open_store(directory), StepNames.of(Options()))
    runs = begin_run(faults, directory, lambda: 0 not in epoch_directory.list_epochs())
    code, _, err = said("rm", directory, 0, 1, "--yes")
    assert code == 4
    assert "deleted before that: epoch 0" in err
    assert "a newer run" in err
    runs[0].save(9, args=Save({"w": np.zeros(3)}))
    runs[0].close()
    assert steps(directory) == [1, 2, 3, 9]


def test_epochs_are_copied_between_disks_and_buckets(said: Any, directory: str, tmp_path: pathlib.Path) -> None:
    """With what is attached to them, the metadata of the whole, and the metrics of epochs that were deleted. A second
    time nothing is left to be done."""
    save(directory)
    assert said("rm", directory, 1, "--yes")[0] == 0
    ec.attach_metrics(directory, 2, {"accuracy": 0.5}, source="evaluator")
    there = f"memory://{uuid.uuid4().hex}/" if directory.startswith("/") else str(tmp_path / "copy")
    code, plan, _ = said("cp", directory, there)
    assert (code, [c["epoch"] for c in plan["changes"]]) == (0, [0, 2, 3])
    assert not (tmp_path / "copy").exists()
    code, done, _ = said("cp", directory, there, "--yes")
    assert (code, done) == (0, {**plan, "done": True})
    assert steps(there) == [0, 2, 3]
    with ec.CheckpointManager(there, options=Options(read_only=True)) as copy:
        np.testing.assert_array_equal(copy.restore(2)["w"], np.arange(1000.0) + 2)
        assert copy.metrics(2) == {"loss": 0.0, "accuracy": 0.5}
        assert copy.metadata().custom_metadata == {"model": "a"}
    runs = [ec.inspect(place).metrics().to_json() for place in (directory, there)]
    assert runs[0]["rows"] == runs[1]["rows"]
    assert [row["epoch"] for row in runs[1]["rows"]] == EPOCHS
    ec.attach_metrics(directory, 3, {"accuracy": 0.25}, source="evaluator")
    again = said("cp", directory, there, "--yes")[1]
    assert (again["changes"], again["remark"]) == ([], "3 epochs are there already")
    with ec.CheckpointManager(there, options=Options(read_only=True)) as copy:
        assert copy.metrics(3) == {"loss": 1.0, "accuracy": 0.25}
    # One epoch, into a directory that has others; its number is taken once there is another one of it.
    other = tmp_path / "other"
    save(other, [0])
    assert said("cp", directory, other, "best", "--metric", "loss", "--mode", "min", "--yes")[0] == 0
    assert steps(other) == [0, 2]
    code, _, err = said("cp", directory, other, "--yes")
    assert code == 4
    assert "which is another one" in err
    assert steps(other) == [0, 2]


def test_what_cannot_be_copied_is_left_out_or_refused(said: Any, tmp_path: pathlib.Path) -> None:
    """A damaged epoch and one of stock Orbax are named, the others are copied; folders of something else are safe."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    save(run)
    with ocp.CheckpointManager(run) as stock:
        stock.save(8, args=Save({"w": np.zeros(3)}))
    file = run / "1" / "process_0" / "default.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, done, _ = said("cp", run, copy, "--yes")
    assert code == 1
    assert "differ" in done["problems"]["1"]
    assert "stock Orbax" in done["problems"]["8"]
    assert [c["epoch"] for c in done["changes"]] == [0, 2, 3] == steps(copy)
    # The folder of one epoch can be copied; it is no directory to delete from.
    assert said("cp", run / "3", tmp_path / "one", "--yes")[0] == 0
    assert steps(tmp_path / "one") == [3]
    assert said("rm", run / "3", 3, "--yes")[0] == 3
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    for where in (tmp_path / "photos", tmp_path / "photos" / "cat.jpg"):
        assert said("cp", run, where, "--yes")[0] == 3
    assert [each.name for each in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    code, _, err = said("cp", run, run / "inside", "--yes")
    assert code == 2
    assert "lies in" in err
    assert said("rollback", run, 1, "--yes")[0] == 0  # its damage is seen only when it is read
    (run / "1" / "process_0" / "default.safetensors").unlink()
    code, _, err = said("rollback", run, 1, "--yes")
    assert code == 2
    assert "is damaged" in err


def test_weights_are_imported(said: Any, tmp_path: pathlib.Path) -> None:
    """Under the next number, with other names and in another precision; beside a live run they are not."""
    file, run = tmp_path / "weights.safetensors", tmp_path / "run"
    numpy.save_file({"model.w": np.ones((3, 4), np.float32), "model.b": np.zeros(4, np.float32)}, file)
    line = ["import", file, run, "--rename", "model=params", "--dtype", "bfloat16", "--exclude", "*/b"]
    code, plan, _ = said(*line)
    assert (code, plan["epoch"], plan["nbytes"], plan["done"]) == (0, 0, 24, False)
    assert [(leaf["name"], leaf["source"], leaf["dtype"]) for leaf in plan["leaves"]] == [
        ("params/w", "model/w", "bfloat16")
    ]
    assert not run.exists()
    assert said(*line, "--yes")[:2] == (0, {**plan, "done": True})
    with ec.CheckpointManager(run) as manager:
        restored = manager.restore(0)
        assert restored["params"]["w"].dtype.name == "bfloat16"
        manager.claim()
        assert "may be alive" in said("import", file, run, "--yes")[2]
    text = said("import", file, run, "--yes", json_too=False)[1]
    assert "import epoch 1" in text
    assert steps(run) == [0, 1]
    code, _, err = said("import", file, run, "--epoch", 1, "--yes")
    assert (code, "checkpoint 1 exists" in err) == (4, True)
    assert said("import", file, run, "--rename", "model")[0] == 2
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    assert said("import", file, tmp_path / "photos", "--yes")[0] == 3


def test_a_mirror_follows_and_a_disk_of_one_host_is_left_alone(said: Any, tmp_path: pathlib.Path) -> None:
    """What is deleted or rolled back does not come back from the mirror; an epoch only the mirror has can be copied."""
    run, mirror = tmp_path / "run", f"memory://{uuid.uuid4().hex}"
    save(run, mirror=mirror)
    with ec.CheckpointManager(run, options=Options(max_to_keep=1), storage=ec.StorageOptions(mirror=mirror)) as manager:
        manager.save(4, args=Save({"w": np.arange(1000.0)}))
    assert (steps(run), steps(mirror)) == ([4], [*EPOCHS, 4])
    code, done, _ = said("rm", run, 1, "--mirror", mirror, "--yes")
    assert (code, done["mirror"], done["changes"][0]["source"]) == (0, mirror, f"{mirror}/1")
    assert (steps(run), steps(mirror)) == ([4], [0, 2, 3, 4])
    assert said("cp", run, tmp_path / "copy", 3, 4, "--mirror", mirror, "--yes")[0] == 0
    assert steps(tmp_path / "copy") == [3, 4]
    assert said("rollback", run, 2, "--mirror", mirror, "--yes")[0] == 0
    assert (steps(run), steps(mirror)) == ([], [0, 2])
    with ec.CheckpointManager(run, storage=ec.StorageOptions(mirror=mirror)) as manager:
        assert manager.all_steps() == [0, 2]
    local = tmp_path / "local"
    save(local)
    epoch_directory = directory_of(open_store(local), StepNames.of(Options()))
    host = host_record.introduce(epoch_directory, "process_0", mirror)
    assert dataclasses.replace(host, disks=()) == host_record.read_host_record(epoch_directory.store)
    for line in (["rm", local, 1], ["rollback", local, 1], ["cp", local, tmp_path / "away"]):
        code, _, err = said(*line, "--yes")
        assert code == 2
        assert "disk of one host" in err
