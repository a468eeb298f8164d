"""examples/to_trackers.py sends the metrics of a live run, and of what became of it, to the trackers that are there."""

import importlib.util
import json
import os
import pathlib
import signal
import struct
from collections.abc import Callable

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from tests.support.processes import ROOT, Processes, start_processes

pytestmark = pytest.mark.slow

TIMEOUT = 110.0
LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
# What every tracker has been sent at the end: (epoch, name, value), in this order.
FIRST = [(0, "loss", 1.0), (1, "loss", 0.5), (2, "loss", 0.25), (3, "loss", 0.125), (3, "val/accuracy", 0.75)]
SECOND = [(3, "loss", 8.0), (4, "loss", 4.0)]  # epoch 3 of another branch, and the one after it


def start(directory: pathlib.Path, folder: pathlib.Path, *flags: str) -> Processes:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    env = {"PYTHONPATH": path, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_TRACKING_URI": ""}
    where = [f"--directory={directory}", f"--folder={folder}"]
    return start_processes([str(ROOT / "examples" / "to_trackers.py"), *where, *flags], 1, env=env)


def sent_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if ": epoch " in line]


def tensorboard(folder: pathlib.Path) -> list[tuple[int, str, float]]:
    """The points in the event files, of which each record is a length, a checksum, a message and another checksum."""
    from tensorboardX.proto.event_pb2 import Event

    points, purged = [], []
    for path in sorted((folder / "tensorboard").glob("events*"), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            points += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            if event.HasField("session_log"):
                purged.append(event.step)
            at += size + 16
    assert purged == [3]  # the display leaves out the old branch
    return points


def wandb(folder: pathlib.Path) -> list[tuple[int, str, float]]:
    """The points in the files of the offline runs: blocks as LevelDB's log has them, after seven bytes of W&B's."""
    from wandb.proto.wandb_internal_pb2 import Record

    points, runs = [], sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.name for path in runs}) == 1  # two starts, one run
    for path in runs:
        data, at = path.read_bytes(), 7
        assert len(data) < 1 << 15  # one block
        while at < len(data):
            size, kind = struct.unpack_from("<HB", data, at + 4)
            assert kind == 1  # a whole record
            history = Record.FromString(data[at + 7 : at + 7 + size]).history
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
            names = [name for name in row if name != "epoch" and not name.startswith("_")]
            points += [(row["epoch"], name, row[name]) for name in names]
            at += 7 + size
    return points


def mlflow(folder: pathlib.Path) -> list[tuple[int, str, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((folder / "mlflow").as_uri())
    (experiment,) = (each for each in client.search_experiments() if each.name == "epochckpt")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    found = [point for name in run.data.metrics for point in client.get_metric_history(run.info.run_id, name)]
    return [(point.step, point.key, point.value) for point in found]


READERS: dict[str, Callable[[pathlib.Path], list[tuple[int, str, float]]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the program has sent a run to: beside it, from before it began, and again after it was rolled back."""
    place = tmp_path_factory.mktemp("trackers")
    directory, folder = place / "run", place / "folder"

    def save(manager: ec.CheckpointManager, epoch: int, loss: float) -> None:
        metrics = {"loss": loss, "note": "text is no point"}
        manager.save(epoch, args=ocp.args.StandardSave({"w": jnp.full(3, epoch)}), metrics=metrics)
        manager.wait_until_finished()

    keep_two = ocp.CheckpointManagerOptions(max_to_keep=2)
    with start(directory, folder, "--interval_secs=0.05") as (program,):
        with ec.CheckpointManager(directory, options=keep_two) as manager:
            for epoch in range(4):
                save(manager, epoch, 0.5**epoch)
            assert manager.all_steps() == [2, 3]
        program.wait_for_output("epoch 3  loss", TIMEOUT)
        ec.attach_metrics(directory, 3, {"val": {"accuracy": 0.75}}, source="evaluator")
        for name, library in LIBRARIES.items():
            if importlib.util.find_spec(library):
                program.wait_for_output(f"{name}: epoch 3  val/accuracy", TIMEOUT)
        program.send_signal(signal.SIGTERM)
        assert program.wait_for_exit(TIMEOUT), program.output()
        assert program.returncode == 0, program.output()

    with ec.CheckpointManager(directory, options=keep_two) as manager:
        manager.rollback_to(2)
        save(manager, 3, 8.0)
        save(manager, 4, 4.0)
    with start(directory, folder, "--timeout_secs=0") as (program,):
        assert program.wait_for_exit(TIMEOUT), program.output()
        assert program.returncode == 0, program.output()
        (name, *_) = (name for name, library in LIBRARIES.items() if importlib.util.find_spec(library))
        of_one = [line for line in sent_in(program.output()) if line.startswith(name)]
        assert of_one == [f"{name}: epoch 3  loss", f"{name}: epoch 4  loss"]
    return folder


@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_has_every_point_of_a_run_once(
    tracker: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of epochs that were deleted, and that another job attached, too; and of what was trained anew, those."""
    pytest.importorskip(LIBRARIES[tracker])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    found = READERS[tracker](request.getfixturevalue("folder"))
    if tracker == "mlflow":  # by name there
        assert sorted(found) == sorted(FIRST + SECOND)
    else:
        assert found == FIRST + SECOND


def test_two_runs_are_not_mixed(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> None:
    """A folder that has another run's note is refused, and both are named."""
    if not any(importlib.util.find_spec(library) for library in LIBRARIES.values()):
        pytest.skip("no tracker is installed")
    folder = request.getfixturevalue("folder")
    with start(tmp_path / "other", folder) as (program,):
        assert program.wait_for_exit(TIMEOUT), program.output()
    assert program.returncode == 1
    assert f"is about {folder.parent}/run: give {tmp_path}/other a --folder of its own" in program.output()
