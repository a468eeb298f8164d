"""Starts the example that trains on digits."""

import os
import pathlib
from collections.abc import Sequence

from tests.support.processes import ROOT, Processes, start_processes

EXAMPLE = ROOT / "examples" / "train_digits.py"


EPOCHS = 10  # the example's default, for which it states its tolerance


def start(
    workdir: pathlib.Path,
    epochs: int = EPOCHS,
    processes: int = 2,
    devices: int = 2,
    *,
    patience: int = 0,
    more: Sequence[str] = (),
) -> Processes:
    flags = [f"--workdir={workdir}", f"--epochs={epochs}", f"--patience={patience}", *more]
    topology = [f"--num_processes={processes}", f"--devices_per_process={devices}"]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return start_processes([str(EXAMPLE), *flags, *topology], 1, env={"PYTHONPATH": path})
