"""What the primary tells the other processes of a mirror."""

import json

import pytest

from epochckpt.tiers.tasks import CopyTask, EndOfTasks, Task, task_from_wire


@pytest.mark.parametrize(
    "task",
    [
        CopyTask(epoch=3, mirror_id="0123456789abcdef-3-1", incarnation="0123456789abcdef", ledger="{}"),
        CopyTask(epoch=0, mirror_id="id", incarnation="1", ledger=""),
        EndOfTasks(ledger="{}"),
        EndOfTasks(),
    ],
)
def test_the_other_processes_read_the_task_that_was_published(task: Task) -> None:
    assert task_from_wire(json.loads(json.dumps(task.to_wire()))) == task
