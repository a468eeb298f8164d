"""How long the work on a mirror goes on."""

from __future__ import annotations

import enum


class WorkPhase(enum.IntEnum):
    """Where the work is. It moves forward only.

        OPEN ──► CLOSING ──► ENDED
        OPEN ──► ENDED

    | move to | made by |
    | --- | --- |
    | CLOSING | the manager that closes: the work ends when nothing is left to do, or the mirror refuses once more |
    | ENDED | the manager that waits no longer, after the step that is being done; or the work itself |
    """

    OPEN = 0
    CLOSING = 1
    ENDED = 2


class WorkLife:
    """The phase of the work on one mirror. Any thread may look or move it, without a lock."""

    def __init__(self) -> None:
        self._moves: dict[WorkPhase, WorkPhase] = {}  # each is made once, by whoever is first

    @property
    def phase(self) -> WorkPhase:
        """The phase now."""
        phase = WorkPhase.OPEN
        while phase in self._moves:
            phase = self._moves[phase]
        return phase

    def advance(self, to: WorkPhase) -> None:
        """Moves to a phase, unless that is reached."""
        while (now := self.phase) < to:
            self._moves.setdefault(now, to)
