"""configs/: every file is loaded as a user would and used, and the examples take them."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import flags as absl_flags

import epochckpt as ec
from epochckpt.flags import Flags, define
from tests.support.processes import ROOT, start_processes

FOLDER = ROOT / "configs"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.is_file() and path.name != "README.md")
FLAGFILES = [name for name in FILES if name.endswith(".flags")]
READERS = ["evaluator.flags"]
IN_BUCKETS = ["tpu_pod.flags"]  # they name one, which has to be overridden


def load(name: str, *more: str) -> Flags:
    """A program's flags, given `--flagfile=configs/…` and what comes after."""
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_string("flagfile", "", "As absl defines it.", flag_values=values)
    found = define("ckpt", values)
    assert values(["program", f"--flagfile={FOLDER / name}", *more]) == ["program"]
    return found


def save(make: Callable[[], ec.CheckpointManager], epochs: int) -> list[int]:
    """So many epochs are saved, and the last one restored; which are left."""
    with make() as manager:
        for epoch in range(epochs):
            manager.save(
                epoch, args=ocp.args.StandardSave({"w": jnp.full((8, 3), epoch)}), metrics={"loss": 1 / (epoch + 1)}
            )
            manager.wait_until_finished()
        restored = manager.restore(None, args=ocp.args.StandardRestore({"w": jnp.zeros((8, 3), jnp.int32)}))
        np.testing.assert_array_equal(restored["w"], np.full((8, 3), epochs - 1))
        assert manager.verify(epochs - 1).ok
        return list(manager.all_steps())


def job() -> ec.Job:
    made = ec.Job()
    made.init(lambda ws: ws.update(w=jnp.zeros(3)))
    made.epoch(lambda ws: ws.update(w=ws["w"] + 1))
    made.stop_when(ec.stop.max_epochs(3))
    return made


def test_the_folder_is_what_its_readme_says() -> None:
    """Every file has its row, and no row is without a file."""
    rows = [line for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
    assert sorted(row[3 : row.index("]")] for row in rows) == FILES
    assert [name for name in FILES if name not in FLAGFILES] == ["config.py"]
    assert {*READERS, *IN_BUCKETS} < set(FLAGFILES)


@pytest.mark.parametrize("name", FLAGFILES)
def test_every_value_has_a_reason_above_it(name: str) -> None:
    """No flag without a comment, on it or on the flag right above."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    for above, line in itertools.pairwise(lines):
        assert not line.startswith("--") or above.startswith(("# ", "--"))
        assert line == line.strip()
        assert line.startswith(("#", "--ckpt_")) or not line


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FLAGFILES if name not in READERS])
def test_a_flagfile_saves_and_restores(name: str, tmp_path: pathlib.Path) -> None:
    """By its manager and by its runner, which goes on after the latest; on the kind of store that it is for."""
    where = f"memory://{uuid.uuid4().hex}/" if name in IN_BUCKETS else str(tmp_path / "run")
    assert (load(name).settings().directory is None) is (name not in IN_BUCKETS)
    found = load(name, f"--ckpt_directory={where}")
    left = save(found.manager, 12)
    keep, period = found.settings().max_to_keep, found.settings().keep_period
    latest = range(12) if keep is None else range(12 - keep, 12)
    expected = set(latest) | {epoch for epoch in range(12) if period and epoch % period == 0}
    # what an interval keeps depends on the clock: the first at least, and here no other
    assert set(left) == expected | ({0} if found.settings().keep_time_interval_secs else set())
    with load(name, f"--ckpt_directory={where}jobs/").manager() as manager:
        found = load(name, f"--ckpt_directory={where}jobs/", "--ckpt_resume=must")
        first = found.runner(job(), manager, resume="auto", progress=False)
        assert first.train(ec.LocalSession()) == 3
        again = found.runner(job(), manager, progress=False)
        assert again.train(ec.LocalSession()) == 3
        assert again.result.resumed_from == 3


@pytest.mark.parametrize("name", READERS)
def test_a_flagfile_reads_and_follows(name: str, tmp_path: pathlib.Path) -> None:
    """What another program saved; it writes nothing."""
    save(lambda: ec.CheckpointManager(tmp_path), 3)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    found = load(name, f"--ckpt_directory={tmp_path}")
    assert list(found.follow(timeout_secs=0)) == [0, 1, 2]
    with found.manager() as manager:
        assert manager.restore(2)["w"].tolist() == [[2] * 3] * 8
        assert not manager.save(3, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_a_bucket_that_was_not_named_fails_at_once() -> None:
    """The placeholder is no valid name: nobody writes into somebody's bucket by oversight."""
    assert load("tpu_pod.flags").settings().directory == "gs://YOUR-BUCKET/YOUR-RUN"


@pytest.mark.parametrize("name", FLAGFILES)
def test_stock_orbax_can_read_what_they_save(name: str) -> None:
    """On gs://, too: an epoch in a bucket has a view."""
    assert load(name, "--ckpt_directory=run").settings().orbax_view


CONFIG_MAIN = """
import json, sys
from absl import app
from ml_collections import config_flags
import jax.numpy as jnp
import orbax.checkpoint as ocp
import epochckpt as ec
CONFIG = config_flags.DEFINE_config_file("config")
def main(_):
    settings = ec.flags.from_config(CONFIG.value.checkpoint)
    with settings.manager() as manager:
        for epoch in range(8):
            manager.save(epoch, args=ocp.args.StandardSave({"w": jnp.full(3, epoch)}))
            manager.wait_until_finished()
        found = manager.restore(7)["w"].tolist()
        print(json.dumps([list(manager.all_steps()), found, settings.host_memory_limit_bytes, settings.keep_period]))
app.run(main)
"""


def run(program: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *program], env=env, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )


@pytest.mark.slow
def test_a_config_file_of_ml_collections(tmp_path: pathlib.Path) -> None:
    """Loaded by `DEFINE_config_file`, values overridden on the command line; references follow."""
    given = [
        f"--config.checkpoint.directory={tmp_path}/run",
        "--config.checkpoint.max_to_keep=2",
        "--config.eval_every=3",
    ]
    done = run(["-c", CONFIG_MAIN, "--config=configs/config.py", *given])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[0, 3, 6, 7], [7, 7, 7], 8 * 10**9, 3]
    wrong = run(["-c", CONFIG_MAIN, "--config=configs/config.py", given[0], "--config.checkpoint.resume=always"])
    assert wrong.returncode == 1
    assert "resume: expected auto, never, must, or the number of an epoch" in wrong.stderr
    assert not (tmp_path / "run" / "8").exists()


def example(name: str, workdir: pathlib.Path, *arguments: str) -> tuple[int, str]:
    """Runs an example on one process to its end; returns its exit status and what it printed."""
    program = [str(ROOT / "examples" / name), f"--workdir={workdir}", "--num_processes=1", *arguments]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    with start_processes(program, 1, env={"PYTHONPATH": path}) as started:
        ((code, output),) = started.wait(100)
    return code, output


def newest(directory: pathlib.Path, **options: Any) -> list[int]:
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True, **options)) as manager:
        return list(manager.all_steps())


@pytest.mark.long
def test_the_digits_take_a_flagfile(tmp_path: pathlib.Path) -> None:
    """Through the launcher to its processes, over the example's own defaults; and a directory elsewhere."""
    given = ["--epochs=4", f"--flagfile={FOLDER}/one_host.flags", f"--ckpt_directory={tmp_path}/elsewhere"]
    code, output = example("train_digits.py", tmp_path / "work", *given, "--ckpt_max_to_keep=2", "--ckpt_keep_period=2")
    assert code == 0, output
    assert f"checkpoints in {tmp_path}/elsewhere" in output
    assert newest(tmp_path / "elsewhere") == [0, 2, 3, 4]
    assert not (tmp_path / "work" / "checkpoints").exists()
    rows = ec.metadata.SqliteMetadataHandler(tmp_path / "work" / "runs.sqlite").epochs()
    assert [row.epoch for row in rows if row.outcome == "written"] == list(range(5))


@pytest.mark.long
def test_the_language_model_takes_a_flagfile(tmp_path: pathlib.Path) -> None:
    """A wrong flag is refused before any process is started."""
    tiny = ["--width=32", "--context=32", "--batch_size=16", "--layers=1", "--epochs=1", "--steps=2"]
    given = [*tiny, f"--flagfile={FOLDER}/debug.flags"]
    code, output = example("train_lm.py", tmp_path, *given)
    assert code == 0, output
    assert newest(tmp_path / "checkpoints") == [0, 1]
    code, output = example("train_lm.py", tmp_path, *given, "--ckpt_resume=-1")
    assert code == 1
    assert output.count("flag --ckpt_resume=-1: expected auto, never, must, or the number of an epoch") == 1
