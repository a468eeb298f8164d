"""Runs the scripts that the goals are about, one after the other, on a machine that does nothing else.

Each writes a file of JSON to `--folder`, and `goals.py` then prints the table of goals and all others from these. What
a script printed is beside its JSON. A script that fails does not keep the others from running.

    python benchmarks/all.py --folder=measured
    python benchmarks/goals.py measured
"""

import pathlib
import subprocess
import sys
import time

from absl import app, flags

FOLDER = flags.DEFINE_string("folder", None, "Where the JSON goes.", required=True)
ONLY = flags.DEFINE_list("only", [], "Names of those to run; default: all.")
DIRECTORY = flags.DEFINE_string("directory", None, "Where the scripts write; default: the system's temporary folder.")

RUNS = {
    "large": ["save_restore", "--cases=100x10MB,adam401"],
    "small": ["save_restore", "--cases=2000x1KB,adam5001,1x4B"],
    "restart": ["restart"],
    "first_step": ["first_step"],
    "beside_training": ["beside_training"],
    "beside_compilation": ["beside_compilation"],
    "memory": ["memory", "--rounds=3", "--without=orbax uncompressed,orbax plain files,orbax zarr3"],
    "many_epochs": ["many_epochs"],
    "processes": ["processes"],
    "reshard": ["reshard"],
    "broadcast_restore": ["broadcast_restore", "--processes=8", "--megabytes=100"],
    "simulate_pod": ["simulate_pod"],
}
"""Script and arguments of each; the number of rounds is the script's own unless it is here."""


def main(_: list[str]) -> None:
    folder = pathlib.Path(FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    failed, beginning = list[str](), time.monotonic()
    for name in ONLY.value or RUNS:
        script, *arguments = RUNS[name]
        place = [f"--directory={DIRECTORY.value}"] if DIRECTORY.value else []
        command = [sys.executable, str(pathlib.Path(__file__).with_name(f"{script}.py")), *arguments, *place]
        began = time.monotonic()
        with (folder / f"{name}.txt").open("w") as out:
            done = subprocess.run([*command, f"--json={folder / name}.json"], stdout=out, stderr=subprocess.STDOUT)
        if done.returncode:
            failed.append(name)
        said = f"failed, see {folder / name}.txt" if done.returncode else "done"
        print(f"{name:20} {(time.monotonic() - began) / 60:5.1f} minutes, {said}", flush=True)
    print(f"{'all':20} {(time.monotonic() - beginning) / 60:5.1f} minutes")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    app.run(main)
