"""The ledger of a directory: what its runs have spent their time on, from the records of its epochs.

The newest record has the runs until then. What no record tells stays unknown: a process that is killed
writes nothing, so how much it had trained since its newest commit has a lower and an upper bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochckpt.errors import EpochCheckpointError
from epochckpt.inspection import opening
from epochckpt.inspection.rows import Goodput, RunGoodput

if TYPE_CHECKING:
    from epochckpt.directory import EpochDirectory
    from epochckpt.format import RunEntry


def measure(epoch_directory: EpochDirectory) -> Goodput:
    """The ledger of a directory; reads the records of a few epochs, and no arrays."""
    with opening.access(epoch_directory.store):
        problems: dict[str, str] = {}
        for epoch in sorted(epoch_directory.list_epochs(), reverse=True):
            try:
                runs = epoch_directory.read_head(epoch).runs
            except EpochCheckpointError as error:
                problems[epoch_directory.folder(epoch)] = str(error)
                continue
            if runs:
                return Goodput(epoch_directory.place, _rows(runs), problems)
    return Goodput(epoch_directory.place, (), problems)


def _rows(runs: tuple[RunEntry, ...]) -> tuple[RunGoodput, ...]:
    found = []
    for number, run in enumerate(runs):
        following = runs[number + 1].began_ns if number + 1 < len(runs) else run.committed_ns
        # The training since the newest save began is lost if the run was killed; a run that was closed has waited.
        held = run.blocked_secs + run.restoring_secs + run.waiting_secs
        saving = _secs(run.saved_ns, run.committed_ns)
        row = RunGoodput(
            run.incarnation,
            run.began_ns,
            run.committed_ns,
            run.epoch,
            run.saves,
            run.killed,
            trained_secs=max(_secs(run.began_ns, run.saved_ns) - held, 0.0),
            blocked_secs=run.blocked_secs,
            restoring_secs=run.restoring_secs,
            waiting_secs=run.waiting_secs + (saving if run.killed is False else 0.0),
            lost_secs=saving if run.killed else 0.0,
            unknown_secs=_secs(run.saved_ns if run.killed is None else run.committed_ns, following),
        )
        found.append(row)
    return tuple(found)


def _secs(begin_ns: int, end_ns: int) -> float:
    return max(end_ns - begin_ns, 0) / 1e9
