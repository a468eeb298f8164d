"""What one node or process of a run does, and what the others make of it."""

from __future__ import annotations

import os
import pathlib
import re
import signal

import pytest

import epochckpt as ec
from tests.support.processes import run_worker
from tests.support.short_jobs import run


def test_nodes_of_one_process_leave_an_epoch_together(tmp_path: pathlib.Path) -> None:
    """A notice that comes when one node has finished the epoch does not make another leave it: it would be trained
    twice by the first."""
    job, sent = ec.Job(), list[int]()

    def train(ws: ec.Workspace) -> None:
        while ws["step"] < 4:
            if ws.should_stop():
                return
            ws["total"], ws["step"] = ws["total"] + 1, ws["step"] + 1
            if (ws.node, ws["step"]) == ("b", 2) and not sent:
                sent.append(1)
                os.kill(os.getpid(), signal.SIGTERM)
        ws["step"] = 0

    for node in "ab":
        ec.Task(lambda ws: ws.update(step=0, total=0), group=job.init_group, node=node)
        ec.Task(train, group=job.epoch_group, node=node)
    job.resumable = True
    ec.epoch_limiter(job, 2)
    for epoch in (1, 2):
        with ec.CheckpointManager(tmp_path) as manager:
            result, session = run(job, manager)
        assert (result.epoch, result.partial) == (epoch, False)
        assert [session.workspace(node)["total"] for node in "ab"] == [4 * epoch] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("state_of_a_condition_fails", "OSError.*no state today"),
        ("handler_refuses", "this directory is not for me"),
        ("spread_on_some", "arrays of the whole job on one node, and on another"),
    ],
)
def test_what_fails_on_one_process_is_raised_on_all_at_once(tmp_path: pathlib.Path, what: str, message: str) -> None:
    """Nobody waits for the timeout, and everybody says what it was."""
    for end in run_worker(f"tests.support.several_nodes_jobs:{what}", {"directory": str(tmp_path / "c")}, 2):
        assert re.search(message, end["error"])
        assert end["secs"] < 100.0  # the timeout is 120 s


@pytest.mark.slow
def test_a_blob_may_be_a_reader_on_one_node_and_nothing_on_another(tmp_path: pathlib.Path) -> None:
    """Only arrays of the whole job have to be alike everywhere."""
    for end in run_worker("tests.support.several_nodes_jobs:reader_on_one", {"directory": str(tmp_path / "c")}, 2):
        assert end == {"error": "", "failed": [], "epochs": [0, 1]}


@pytest.mark.slow
def test_a_task_that_exits_one_process_is_heard_of_by_the_others(tmp_path: pathlib.Path) -> None:
    """`sys.exit` is no Exception; nobody waits for the one that left."""
    found = run_worker("tests.support.several_nodes_jobs:one_exits", {"directory": str(tmp_path)}, 2)
    assert found == ["SystemExit: 3", "CoordinationError: SystemExit in another process: 3"]


@pytest.mark.parametrize(("kept", "order"), [(None, "ab"), (["a"], "ab"), (["b"], "ab"), (["b", "a"], "ba")])
def test_which_nodes_are_saved_does_not_change_their_order(kept: list[str] | None, order: str) -> None:
    """In a job of several processes it says which process is which node, and the metrics of the first node count."""
    with ec.Job(nodes_to_checkpoint=kept) as job:
        for number, node in enumerate("ab"):
            with ec.Node(node):
                ec.Task(lambda ws: ws.update(sum=0), group=job.init_group)
                ec.Task(lambda ws, n=number: {"number": n})
    job.stop_when(lambda ctx: [*"ab"][ctx.metrics["number"]] == order[0])
    ec.epoch_limiter(job, 5)
    result, session = run(job)
    assert job.nodes() == list(session.nodes) == [*order]
    assert result.epoch == 1
