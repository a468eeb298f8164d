"""Random rounds of runs on one directory, see `tests.support.run_rounds`: nothing that the model forbids happens.

`SEED=… ROUNDS=…` repeats a round that was flagged, as in `test_random_mirrors`.
"""

from __future__ import annotations

import pathlib
import random
import uuid
from collections.abc import Iterator

import pytest

from tests.support import lives, rounds
from tests.support.object_servers import bucket
from tests.support.run_rounds import World

LIVES = 6  # of a round, at most


def check(folder: pathlib.Path, first: int, count: int, processes: int, *places: str) -> None:
    """Rounds in these places in turn; an empty one is the round's own folder."""

    def new_world(seed: int, rng: random.Random) -> World:
        place, root = places[seed % len(places)], folder / f"round-{seed}"
        root.mkdir()
        return World(root, f"{place}/{uuid.uuid4().hex}" if place else str(root / "run"), rng, processes)

    rounds.check_rounds(first, count, new_world, LIVES)


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with lives.installed():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_some_random_rounds(in_memory: pathlib.Path, processes: int) -> None:
    check(in_memory, 1, 30, processes, "", "memory://runs")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("processes", [1, 2])
def test_random_rounds(in_memory: pathlib.Path, processes: int, part: int) -> None:
    """2,000 rounds of jobs in one process, and as many in two."""
    check(in_memory, 10_000 + 500 * part, 500, processes, "", "memory://runs")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_random_rounds_on_a_server(in_memory: pathlib.Path, scheme: str, processes: int) -> None:
    with bucket(scheme) as made:
        check(in_memory, 50_000, 100, processes, made.new_url())
