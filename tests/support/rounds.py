"""What random rounds against a model share: what is saved, how it is found again, and how a round is told."""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import os
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import orbax.checkpoint as ocp

import epochckpt as ec
from epochckpt.cli import main
from epochckpt.errors import EpochCheckpointError, say
from tests.support.disk_walk import Killed

Found = dict[int, int]  # tags by epoch: each save has a tag of its own
READER = ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0, create=False)
RETRIES = {"retries": 1, "first_retry_secs": 0.001, "longest_retry_secs": 0.001}
SEED, ROUNDS = (int(os.environ[name]) if name in os.environ else None for name in ("SEED", "ROUNDS"))
_SHOWN = 5


class Wrong(AssertionError):
    """What must not be. `kind` is a few words that are the same for the same class of errors."""

    def __init__(self, kind: str, details: str = ""):
        super().__init__(f"{kind}: {details}")
        self.kind = kind


def saved_as(tag: int) -> Any:
    return ocp.args.StandardSave({"w": np.full(5, tag, np.int32), "tag": tag})


def tag_in(tree: Any) -> int:
    if set(tree["w"].tolist()) != {tree["tag"]}:
        raise Wrong("a restored epoch is a mixture", str(tree))
    return int(tree["tag"])


class Tags:
    """The tags of epochs, each read and verified once.

    Args:
        read: how an epoch is restored; returns its tag.
    """

    def __init__(self, read: Callable[[ec.CheckpointManager, int], int] = lambda m, epoch: tag_in(m.restore(epoch))):
        self._known: dict[tuple[str, int, str], int] = {}
        self._read = read

    def of(self, manager: ec.CheckpointManager, epochs: Iterable[int]) -> Found:
        found = {}
        for epoch in epochs:
            try:
                key = manager.root, epoch, manager.save_id(epoch)
                if key not in self._known:
                    self._known[key] = self._read(manager, epoch)
            except EpochCheckpointError as error:
                where = f"{manager.root} {epoch}"
                raise Wrong("an epoch that is listed is not readable", f"{where}: {say(error)}") from error
            found[epoch] = self._known[key]
        return found

    @staticmethod
    def keep_common(tags: Sequence[Tags]) -> None:
        """Has the processes of a job know the same: they restore together, so each has to ask for the same epochs.

        A process that was killed may have read an epoch that another one has not.
        """
        common = set.intersection(*({*each._known} for each in tags))
        for each in tags:
            each._known = {key: each._known[key] for key in common}


def run_command(*args: str, expected: tuple[int, ...] | None = None) -> int:
    """The exit code of the command `epochckpt`."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main.main(list(args))
    if code == 70 or (expected is not None and code not in expected):
        raise Wrong(f"epochckpt {args[0]} ends with {code}", said.getvalue()[-1000:])
    return code


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings that are logged during the block."""
    handler, logger = _Heard(), logging.getLogger("absl")
    logger.addHandler(handler)
    try:
        yield handler.said
    finally:
        logger.removeHandler(handler)


class World(Protocol):
    """Where a round takes place."""

    events: list[str]
    kills: int

    def play(self, lives: int) -> None:
        """A round of so many lives at most; raises `Wrong`."""
        ...


def play(world: World, lives: int) -> Wrong | None:
    """One round; what is wrong."""
    try:
        world.play(lives)
    except Wrong as wrong:
        return wrong
    except (Exception, Killed) as error:
        return Wrong(f"unexpected {type(error).__name__}", "".join(traceback.format_exception(error))[-3000:])
    return None


def check_rounds(first: int, count: int, new_world: Callable[[int, random.Random], World], lives: int) -> None:
    """Plays rounds with seeds from `first` on, and fails if one of them is wrong. `SEED` and `ROUNDS` choose others."""
    first, count = first if SEED is None else SEED, count if ROUNDS is None else ROUNDS
    kinds, flagged, kills = collections.Counter[str](), list[str](), 0
    for seed in range(first, first + count):
        rng = random.Random(seed)
        world = new_world(seed, rng)
        wrong = play(world, rng.randrange(1, lives))
        kills += world.kills
        if wrong is not None:
            kinds[wrong.kind] += 1
            events = "\n".join(f"    {event}" for event in world.events)
            if len(flagged) < _SHOWN or kinds[wrong.kind] == 1:
                flagged.append(f"SEED={seed} ROUNDS=1: {wrong}\n{events}")
    summary = f"{count} rounds, {kills} kills, {kinds.total()} flagged: {dict(kinds.most_common())}"
    print(summary)
    assert not flagged, "\n".join([summary, *flagged])
