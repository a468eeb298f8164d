"""A run that is paused, or dies, at a request to its mirror, while a run on another disk goes on from the mirror.

See `walking` for runs on one directory. What the mirror has when the newer run has ended stays, whatever the older one
still sends, and is what the older run finds when its disk is opened again.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable
from contextlib import suppress

import orbax.checkpoint as ocp

import epochckpt as ec
from epochckpt.errors import EpochCheckpointError
from tests.support.walk_places import KILLED, WAIT_SECS, Pause, Place, of_run
from tests.support.walking import Found, read, save, saved_as, tag_of

OLDER, NEWER = 1, 2
BASE = (0, 1, 2)


def _replace(manager: ec.CheckpointManager) -> None:
    manager.allow_overwrite(2)
    assert manager.save(2, args=saved_as(tag_of(2, 5)), force=True)
    manager.wait_until_finished()


def _save_two(manager: ec.CheckpointManager) -> None:
    save(manager, 3, tag_of(3, OLDER))
    save(manager, 4, tag_of(4, OLDER))


OPERATIONS: dict[str, Callable[[ec.CheckpointManager], object]] = {
    "claims": lambda manager: manager.claim(),
    "copies": _save_two,
    "replaces": _replace,
    "withdraws 1": lambda manager: manager.delete(1),
    "rolls back": lambda manager: manager.rollback_to(0),
    "keeps two": lambda manager: save(manager, 3, tag_of(3, OLDER)),
}


class MirrorWalk:
    """Meetings of an older and a newer owner of a mirror.

    Args:
        place: where the mirrors are.
        root: for the disks of the runs.
    """

    def __init__(self, place: Place, root: pathlib.Path):
        self._place, self._root = place, root
        self.cases = 0
        self.violations: list[str] = []

    def along(self, operation: str, form: str, step: int = 1) -> None:
        """Pauses the operation at each request (or each `step`-th), until it makes no more of them."""
        number = 1
        while self.case(operation, Pause(form, number)):
            number += step

    def case(self, operation: str, pause: Pause) -> bool:
        """One meeting; False if the operation makes fewer requests."""
        self.cases += 1
        problems = list[str]()
        try:
            problems += self._meet(operation, pause)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}"[:600])
        finally:
            pause.go.set()
            self._place.decide_by(lambda request: None)
            self._place.go_by("")
        request = pause.request and f"{pause.request.method} {pause.request.target}"
        where = f"{self._place.scheme}: {operation}, {pause.form} request {pause.number} ({request})"
        self.violations += [f"{where}: {problem}" for problem in problems]
        return pause.request is not None

    def _open(self, disk: pathlib.Path, url: str, operation: str) -> ec.CheckpointManager:
        keep = 2 if operation == "keeps two" else None
        storage = ec.StorageOptions(mirror=url, mirror_keep=keep, orbax_view=False)
        return ec.CheckpointManager(disk, options=ocp.CheckpointManagerOptions(max_to_keep=3), storage=storage)

    def _look(self, url: str) -> Found:
        options = ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0, create=False)
        with ec.CheckpointManager(url, options=options) as manager:
            return read(manager)

    def _meet(self, operation: str, pause: Pause) -> list[str]:
        place, url, root = self._place, self._place.new_url(), self._root / str(self.cases)
        place.go_by("first")
        with self._open(root / "old" / "run", url, "") as manager:
            for epoch in BASE:
                save(manager, epoch, tag_of(epoch, OLDER))
        place.settle("first")
        errors = list[BaseException]()

        place.go_by("older")
        older = self._open(root / "old" / "run", url, operation)  # else it would find what the newer run has done

        def perform() -> None:
            of_run("older")
            try:
                with older:
                    OPERATIONS[operation](older)
            except BaseException as error:
                errors.append(error)
            finally:
                place.settle("older")
                pause.reached.set()

        place.decide_by(pause.decide)
        thread = threading.Thread(target=perform, daemon=True)
        thread.start()
        assert pause.reached.wait(WAIT_SECS), "the older run neither ended nor paused"
        if pause.form in KILLED:
            thread.join(WAIT_SECS)
        place.go_by("newer")
        problems = list[str]()
        before = self._look(url)
        with self._open(root / "new" / "run", url, "") as newer:
            if (found := read(newer)) != before:
                problems.append(f"the newer run finds {found}, and the mirror has {before}")
            last = max(found, default=-1)
            for epoch in (last + 1, last + 3):
                save(newer, epoch, tag_of(epoch, NEWER))
        place.settle("newer")
        mirrored = self._look(url)
        if not {(last + 3, tag_of(last + 3, NEWER)), *found.items()} <= {*mirrored.items()}:
            problems.append(f"the newer run found {found}, and mirrored {mirrored}")
        place.go_by("older")
        pause.go.set()
        thread.join(WAIT_SECS)
        assert not thread.is_alive(), "the older run does not come to an end"
        assert place.requests_end(), "a request does not come to an end"
        problems += [f"no honest error: {e!r}"[:300] for e in errors if not isinstance(e, EpochCheckpointError)]
        place.go_by("last")
        place.decide_by(lambda request: None)
        if (after := self._look(url)) != mirrored:
            problems.append(f"the older run changed the mirror: {mirrored} became {after}")
        if pause.request is not None:
            with suppress(EpochCheckpointError), self._open(root / "old" / "run", url, "") as back:
                if not {*mirrored.items()} <= {*(listed := read(back)).items()}:
                    problems.append(f"the older run's disk lists {listed}, and the mirror has {mirrored}")
                elif strangers := {e: tag for e, tag in listed.items() if e not in mirrored and e > max(BASE)}:
                    problems.append(f"the older run's disk lists {strangers} beside {mirrored}")
        return problems
