"""examples/evaluate_digits.py: scores what another job saves, and the scores decide what that job keeps."""

import os
import pathlib
import re

import pytest

from epochckpt.inspection import scan
from tests.support.digits import start as start_training
from tests.support.processes import ROOT, Processes, start_processes

EVALUATOR = ROOT / "examples" / "evaluate_digits.py"
TIMEOUT = 110.0
KEEP_BEST = ["--ckpt_best_metric=robust_accuracy", "--ckpt_max_to_keep=1"]


def start_evaluating(workdir: pathlib.Path, *flags: str) -> Processes:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    given = [f"--workdir={workdir}", f"--flagfile={ROOT}/configs/evaluator.flags", "--ckpt_follow_interval_secs=0.1"]
    return start_processes([str(EVALUATOR), *given, *flags], 1, env={"PYTHONPATH": path})


def scores_in(output: str) -> dict[int, float]:
    return {int(epoch): float(score) for epoch, score in re.findall(r"epoch +(\d+)  robust_accuracy (\S+)", output)}


@pytest.mark.slow
def test_an_evaluator_beside_a_run_decides_which_epoch_is_kept(tmp_path: pathlib.Path) -> None:
    """It begins first, survives epochs that are deleted under it, and the best one that it found is still there."""
    with start_evaluating(tmp_path, "--ckpt_follow_timeout_secs=600") as (evaluator,):
        with start_training(tmp_path, 12, processes=1, devices=4, more=KEEP_BEST) as (training,):
            assert training.wait_for_exit(TIMEOUT), training.output()
        assert training.returncode == 0, training.output()
        evaluator.wait_for_output("epoch  12  robust_accuracy", TIMEOUT)
    scores = scores_in(evaluator.output())
    rows = {row.epoch: row for row in scan.look(tmp_path / "checkpoints", metric="robust_accuracy").epochs}
    (best,) = [row for row in rows.values() if row.best]
    assert round(best.metrics["robust_accuracy"], 4) == max(scores.values()), scores
    assert rows[12].sources == {"robust_accuracy": "evaluator"}
    assert rows[12].metrics.keys() == {"loss", "accuracy", "robust_accuracy"}


@pytest.mark.long
def test_both_go_on_when_they_are_started_again(tmp_path: pathlib.Path) -> None:
    """What was scored and is not the best goes with the next commit; nothing is scored twice."""
    with start_training(tmp_path, 3, processes=1, devices=4, more=KEEP_BEST) as (training,):
        assert training.wait_for_exit(TIMEOUT), training.output()
    with start_evaluating(tmp_path, "--ckpt_follow_timeout_secs=1") as (evaluator,):
        assert evaluator.wait_for_exit(TIMEOUT), evaluator.output()
    assert evaluator.returncode == 0, evaluator.output()
    scores = scores_in(evaluator.output())
    (best,) = [row.epoch for row in scan.look(tmp_path / "checkpoints", metric="robust_accuracy").epochs if row.best]
    with start_training(tmp_path, 4, processes=1, devices=4, more=KEEP_BEST) as (training,):
        assert training.wait_for_exit(TIMEOUT), training.output()
    left = [row.epoch for row in scan.look(tmp_path / "checkpoints").epochs]
    assert left == [best, 4], (left, scores)
    with start_evaluating(tmp_path, "--ckpt_follow_timeout_secs=1") as (again,):
        assert again.wait_for_exit(TIMEOUT), again.output()
    assert again.returncode == 0, again.output()
    assert scores_in(again.output()).keys() == {4}


@pytest.mark.long
def test_epochs_that_are_trained_anew_are_scored_anew(tmp_path: pathlib.Path) -> None:
    """A run that goes back to an earlier epoch brings other epochs of the same numbers, with scores of their own."""
    with start_evaluating(tmp_path, "--ckpt_follow_timeout_secs=60") as (evaluator,):
        with start_training(tmp_path, 3) as (training,):
            assert training.wait_for_exit(TIMEOUT), training.output()
        evaluator.wait_for_output("epoch   3  robust_accuracy", TIMEOUT)
        with start_training(tmp_path, 4, more=["--ckpt_resume=1"]) as (training,):
            assert training.wait_for_exit(TIMEOUT), training.output()
        assert training.returncode == 0, training.output()
        evaluator.wait_for_output("epoch   4  robust_accuracy", TIMEOUT)
    scored = [int(epoch) for epoch in re.findall(r"epoch +(\d+)  robust_accuracy", evaluator.output())]
    assert scored == [0, 1, 2, 3, 2, 3, 4]
    rows = {row.epoch: row.metrics for row in scan.look(tmp_path / "checkpoints").epochs}
    assert all("robust_accuracy" in metrics for metrics in rows.values()), rows
