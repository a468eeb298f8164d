"""Random rounds of runs with a mirror, see `tests.support.mirror_rounds`: nothing that the model forbids happens.

`SEED=… ROUNDS=…` repeats a round that was flagged, in the test that has flagged it:
`SEED=17 ROUNDS=1 python -m pytest tests/faults/test_random_mirrors.py -m slow`. What threads do at the same time is not
repeated exactly: try it a few times.
"""

from __future__ import annotations

import collections
import os
import pathlib
import random
import tempfile
import traceback
import uuid
from collections.abc import Iterator

import pytest

from tests.support import lives
from tests.support.lives import Killed
from tests.support.mirror_rounds import World, Wrong
from tests.support.object_servers import bucket

SEED, ROUNDS = (int(os.environ[name]) if name in os.environ else None for name in ("SEED", "ROUNDS"))
LIVES = 6  # of a round, at most


@pytest.fixture
def fast() -> Iterator[pathlib.Path]:
    """An empty folder in memory, where there is one."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield pathlib.Path(name)


def play(folder: pathlib.Path, mirror: str, seed: int) -> tuple[Wrong | None, World]:
    """One round; what is wrong."""
    folder.mkdir()
    rng = random.Random(seed)
    world = World(folder, mirror, rng)
    try:
        world.play(rng.randrange(1, LIVES))
    except Wrong as wrong:
        return wrong, world
    except (Exception, Killed) as error:
        wrong = Wrong(f"unexpected {type(error).__name__}", "".join(traceback.format_exception(error))[-3000:])
        return wrong, world
    return None, world


def rounds(folder: pathlib.Path, first: int, count: int, new_mirror: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """So many rounds; those that are wrong, in words."""
    lives.install(monkeypatch)
    first, count = first if SEED is None else SEED, count if ROUNDS is None else ROUNDS
    kinds, flagged, kills = collections.Counter[str](), list[str](), 0
    for seed in range(first, first + count):
        base = list(new_mirror.values())[seed % len(new_mirror)]
        place = folder / f"round-{seed}"
        mirror = str(place / "mirror") if not base else f"{base}/{uuid.uuid4().hex}"
        wrong, world = play(place, mirror, seed)
        kills += world.kills
        if wrong is not None:
            kinds[wrong.kind] += 1
            flagged.append(f"SEED={seed} ROUNDS=1: {wrong}\n" + "\n".join(f"    {event}" for event in world.events))
    print(f"{count} rounds, {kills} kills, {len(flagged)} flagged: {dict(kinds.most_common())}")
    assert not flagged, f"{len(flagged)} of {count} flagged: {dict(kinds.most_common())}\n" + "\n".join(flagged[:5])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_some_random_rounds_with_a_mirror(fast: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds(fast, 1, 40, {"posix": "", "memory": "memory://mirrors"}, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_random_rounds_with_a_mirror(fast: pathlib.Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """2,000 rounds."""
    rounds(fast, 10_000 + 250 * part, 250, {"posix": "", "memory": "memory://mirrors"}, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_random_rounds_with_a_mirror_on_a_server(
    fast: pathlib.Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with bucket(scheme) as made:
        rounds(fast, 50_000, 100, {scheme: made.new_url()}, monkeypatch)
