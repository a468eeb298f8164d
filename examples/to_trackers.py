"""Send the metrics of a run to TensorBoard, Weights & Biases and MLflow, beside the run or after it.

    python examples/to_trackers.py --directory=/runs/my_run --folder=/runs/trackers/my_run

sends a point per epoch and metric to each tracker whose library is installed (`--to=tensorboard,wandb,mlflow`). It
sends the metrics that the run saved, also those of epochs that were deleted since, and the metrics that an evaluator
attached later. It only reads the directory. A note in `--folder` lists the points that were sent. Started again, the
program goes on from there. (If it was killed between a point and the note, it sends the point again: the same value at
the same place.)

Everything stays on this machine, unless the trackers' own variables say otherwise. To look at it:

    tensorboard --logdir FOLDER/tensorboard
    wandb sync FOLDER/wandb/offline-run-*          (or, from the start, WANDB_MODE=online)
    MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri FOLDER/mlflow    (or MLFLOW_TRACKING_URI=…)
"""

import copy
import importlib.util
import json
import os
import pathlib
import signal
import sys
import time
import uuid

from absl import app, flags

import epochckpt as ec

FLAGS = flags.FLAGS
flags.DEFINE_string("directory", None, "The checkpoint directory: a path or a URL.", required=True)
flags.DEFINE_string("folder", None, "Where the trackers keep their files: one folder per run.", required=True)
flags.DEFINE_list("to", None, "tensorboard, wandb, mlflow; not given: those that are installed.")
flags.DEFINE_float("timeout_secs", 3600, "End when no epoch came for so long; 0: send what is there.", lower_bound=0)
flags.DEFINE_float("interval_secs", 10, "How often to look.", lower_bound=0.01)


class TensorBoard:
    LIBRARY = "tensorboardX"

    def __init__(self, folder, run):
        self.folder, self.writer = folder, None
        self.go_back_to(None)

    def go_back_to(self, epoch):
        """TensorBoard leaves out what older files have about this epoch and later ones."""
        from tensorboardX import SummaryWriter

        self.close()
        self.writer = SummaryWriter(str(self.folder), purge_step=epoch)

    def send(self, epoch, secs, metrics):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, epoch, walltime=secs)

    def flush(self):
        self.writer.flush()

    def close(self):
        if self.writer:
            self.writer.close()


class WeightsAndBiases:
    LIBRARY = "wandb"

    def __init__(self, folder, run):
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(project="epochckpt", id=run, dir=str(folder.parent), mode=mode, resume="allow")
        # Epochs are the axis, not W&B's own count of calls, which cannot go back when a run does.
        self.run.define_metric("*", step_metric="epoch")

    def go_back_to(self, epoch):
        """Does nothing: W&B deletes no points, and shows both branches."""

    def send(self, epoch, secs, metrics):
        self.run.log({**metrics, "epoch": epoch})

    def flush(self):
        """W&B writes in a process of its own."""

    def close(self):
        self.run.finish()


class MLflow:
    LIBRARY = "mlflow"

    def __init__(self, folder, run):
        from mlflow.tracking import MlflowClient

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else MLflow 3 wants a database
        self.client = client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or folder.as_uri())
        found = client.get_experiment_by_name("epochckpt")
        experiment = found.experiment_id if found else client.create_experiment("epochckpt")
        runs = client.search_runs([experiment], f"tags.epochckpt = '{run}'")
        made = runs[0] if runs else client.create_run(experiment, tags={"epochckpt": run}, run_name=folder.parent.name)
        self.run = made.info.run_id
        client.update_run(self.run, status="RUNNING")

    def go_back_to(self, epoch):
        """Does nothing: MLflow keeps all values, and shows the last one of an epoch."""

    def send(self, epoch, secs, metrics):
        from mlflow.entities import Metric

        points = [Metric(name, value, int(secs * 1000), epoch) for name, value in metrics.items()]
        self.client.log_batch(self.run, points)

    def flush(self):
        """Every call is written when it returns."""

    def close(self):
        self.client.set_terminated(self.run)


TRACKERS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def numbers(metrics, prefix=""):
    """The numbers among metrics, those of inner mappings by `outer/inner` names."""
    found = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{name}"] = float(value)
    return found


class Forwarder:
    """A tracker, and the note of the points that it was sent: by epoch the time of the commit, and the names."""

    def __init__(self, name, folder, directory):
        self.name, self.note = name, folder / f"sent-to-{name}.json"
        new = {"directory": directory, "run": uuid.uuid4().hex, "sent": {}}
        self.known = json.loads(self.note.read_text()) if self.note.exists() else new
        if self.known["directory"] != directory:
            sys.exit(f"{self.note} is about {self.known['directory']}: give {directory} a --folder of its own")
        self.sent = {int(epoch): sent for epoch, sent in self.known["sent"].items()}
        self.noted = None
        self.tracker = TRACKERS[name](folder / name, self.known["run"])

    def send(self, rows, unit):
        """Sends what is new in these rows, whose numbers count epochs or steps."""
        replaced = [row.epoch for row in rows if self.sent.get(row.epoch, [row.committed_ns])[0] != row.committed_ns]
        if replaced:  # the run was rolled back, and these were trained anew
            self.tracker.go_back_to(min(replaced))
            self.sent = {epoch: sent for epoch, sent in self.sent.items() if epoch < min(replaced)}
        try:
            for row in rows:
                _, names = self.sent.setdefault(row.epoch, [row.committed_ns, []])
                new = {name: value for name, value in numbers(row.metrics).items() if name not in names}
                if new:
                    self.tracker.send(row.epoch, (row.committed_ns or time.time_ns()) / 1e9, new)
                    names.extend(new)
                    print(f"{self.name}: {unit} {row.epoch}  {', '.join(new)}", flush=True)
        finally:  # also when this program is asked to end, or a tracker refuses something
            self.tracker.flush()
            if self.sent != self.noted:
                partial = self.note.with_suffix(".tmp")
                partial.write_text(json.dumps({**self.known, "sent": self.sent}))
                partial.replace(self.note)  # never half a note
                self.noted = copy.deepcopy(self.sent)


def main(_):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # like Ctrl-C: notes, and closes the trackers
    wanted = FLAGS.to or [name for name, each in TRACKERS.items() if importlib.util.find_spec(each.LIBRARY)]
    for name in wanted:
        if name not in TRACKERS:
            sys.exit(f"--to={name} is not known; choose from {', '.join(TRACKERS)}")
        if not importlib.util.find_spec(TRACKERS[name].LIBRARY):
            sys.exit(f"--to={name} needs a library: pip install {TRACKERS[name].LIBRARY}")
    if not wanted:
        sys.exit("no tracker is installed: pip install tensorboardX, wandb or mlflow")
    directory = FLAGS.directory if "://" in FLAGS.directory else os.path.abspath(FLAGS.directory)
    folder = pathlib.Path(FLAGS.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    forwarders = []

    def look():
        run = ec.inspect(directory)
        rows, unit = run.metrics().rows, run.unit
        for forwarder in forwarders:
            forwarder.send(rows, unit)

    try:
        for name in wanted:
            forwarders.append(Forwarder(name, folder, directory))
        epochs = []  # a directory without any may not be one yet
        how = {"timeout_secs": FLAGS.timeout_secs, "interval_secs": FLAGS.interval_secs}
        for epoch in ec.follow(directory, stop=lambda: epochs and look(), **how):
            epochs.append(epoch)  # it is sent after the look; so is what is attached to any epoch later
        if not epochs:
            sys.exit(f"no epoch has come to {directory} in {FLAGS.timeout_secs:g} seconds")
        look()
    finally:
        for forwarder in forwarders:
            forwarder.tracker.close()


if __name__ == "__main__":
    app.run(main)
