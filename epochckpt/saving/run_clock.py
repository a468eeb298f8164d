"""How one run of a manager has spent its time: counted as it goes, and recorded with every commit.

There is no file for these figures. Each commit record contains the primary's (`format.records.RunEntry`), and the
figures of earlier runs, as the newest record gave them when the directory was opened.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from epochckpt.format import RunEntry

BLOCKED = "blocked"
RESTORING = "restoring"
WAITING = "waiting"
_KEPT = 100  # runs, the newest ones


class RunClock:
    """The run of one manager."""

    def __init__(self) -> None:
        self._began_ns = time.time_ns()
        self._spent: dict[str, float] = {}
        self._saves = 0
        self._earlier: Sequence[RunEntry] = ()  # oldest first; may end with this run itself

    def begin_after(self, runs: Sequence[RunEntry]) -> None:
        """Learns the runs before this one, the oldest first, as the newest record has them."""
        self._earlier = runs

    def spend(self, on: str, secs: float) -> None:
        """Counts seconds that training was held up: BLOCKED, RESTORING or WAITING."""
        self._spent[on] = self._spent.get(on, 0.0) + secs

    def restored(self, began: float) -> None:
        """Counts a restore that began at this moment of the monotonic clock."""
        self.spend(RESTORING, time.monotonic() - began)

    def so_far(self) -> Mapping[str, float]:
        """The seconds by what they were spent on, until now."""
        return dict(self._spent)

    def committed(self) -> None:
        """Counts a committed save. A save that fails after `committing` leaves its figures in no record."""
        self._saves += 1

    def committing(
        self,
        epoch: int,
        incarnation: str,
        spent: Mapping[str, float],
        times: tuple[int, int],
        killed: tuple[str, int] | None,
    ) -> tuple[RunEntry, ...]:
        """The runs as the record of an epoch has them, which is about to be committed.

        `spent`: `so_far` when its save began; `times`: when that was, and now, in Unix nanoseconds. `killed`: the
        incarnation before this one, and when it claimed the directory, if it did not close it.
        """
        earlier = [run for run in self._earlier if run.incarnation != incarnation]
        if killed is not None and killed[1] and killed[0] not in [run.incarnation for run in earlier]:
            # It has committed nothing. Whether the run before it was killed, it has told nobody.
            name, claimed_ns = killed
            entry = RunEntry(
                incarnation=name,
                began_ns=claimed_ns,
                saved_ns=claimed_ns,
                committed_ns=claimed_ns,
                saves=0,
                epoch=0,
                blocked_secs=0.0,
                restoring_secs=0.0,
                waiting_secs=0.0,
                killed=True,
            )
            earlier.append(entry)
        elif earlier and earlier[-1].killed is None:
            earlier[-1] = dataclasses.replace(earlier[-1], killed=killed is not None)
        saved_ns, committed_ns = times
        run = RunEntry(
            incarnation=incarnation,
            began_ns=self._began_ns,
            saved_ns=saved_ns,
            committed_ns=committed_ns,
            saves=self._saves + 1,
            epoch=epoch,
            blocked_secs=round(spent.get(BLOCKED, 0.0), 6),
            restoring_secs=round(spent.get(RESTORING, 0.0), 6),
            waiting_secs=round(spent.get(WAITING, 0.0), 6),
        )
        return (*earlier[1 - _KEPT :], run)
