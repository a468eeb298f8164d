"""An older run that is paused, or dies, at any of its requests while a newer one takes over: see `support.walking`."""

import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import obstore
import pytest

from tests.support.mirror_walk import OPERATIONS as MIRROR_OPERATIONS
from tests.support.mirror_walk import MirrorWalk
from tests.support.object_servers import bucket
from tests.support.other_processes import as_another_process
from tests.support.walk_places import FORMS, MemoryPlace, Place, ServerPlace
from tests.support.walking import NEWCOMERS, OPERATIONS, Walk


@contextmanager
def opened(scheme: str, operation: str = "") -> Iterator[Place]:
    """A place of this kind, ready for walks."""
    if scheme == "memory":
        place = MemoryPlace(stock=bool(operation and OPERATIONS[operation].stock))
        with place.watched():
            yield place
        return
    with bucket(scheme) as made:
        there = ServerPlace(made)
        try:
            with there.watched():
                yield there
        finally:
            there.close()


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """The two runs share a process here; the turns at a head are those of two."""
    with as_another_process():
        yield


def check(walk: Walk | MirrorWalk, least: int) -> None:
    print(f"{walk.cases} meetings, {len(walk.violations)} violations")
    assert not walk.violations, "\n".join(walk.violations[:20])
    assert walk.cases >= least


@pytest.mark.parametrize(
    ("operation", "newcomer", "step"),
    [
        ("save", "rolls back", 1),
        ("delete 2", "deletes and saves again", 1),
        pytest.param("set 2 aside, stock", "goes on", 3, marks=pytest.mark.slow),
    ],
)
def test_an_older_run_that_was_paused_harms_nothing(operation: str, newcomer: str, step: int) -> None:
    """Paused, or killed and its request late, at each of its requests, or at each of so many."""
    with opened("memory", operation) as place:
        walk = Walk(place)
        walk.along(operation, newcomer, ("before", "late"), step)
        check(walk, 5)


@pytest.mark.long
def test_an_older_run_that_was_paused_harms_nothing_on_a_server() -> None:
    with opened("s3") as place:
        walk = Walk(place)
        walk.along("delete 2", "goes on", ("before", "lost", "again"))
        check(walk, 6)


@pytest.mark.long
@pytest.mark.timeout(850)
@pytest.mark.parametrize("newcomer", NEWCOMERS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("scheme", ["memory", "gs", "s3"])
def test_no_older_run_ever_harms_a_newer_one(scheme: str, operation: str, newcomer: str) -> None:
    """Each operation, each request, each newer run, in each form of the pause. On a server, where a meeting takes
    several times as long, every third request in one form, so that each operation meets each form and each newer run.
    """
    if scheme == "s3" and OPERATIONS[operation].stock:
        pytest.skip("stock Orbax saves nothing there")
    turn = list(OPERATIONS).index(operation) + list(NEWCOMERS).index(newcomer)
    forms = FORMS if scheme == "memory" else (FORMS[turn % len(FORMS)],)
    with opened(scheme, operation) as place:
        walk = Walk(place, repairs=True)
        step = 1 if scheme == "memory" else 3
        walk.along(operation, newcomer, forms, step)
        if not walk.cases:  # the operation has nothing left to write: only the forms of every request meet it
            walk.along(operation, newcomer, ("before",), step)
        check(walk, len(forms) if operation != "close" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "form"), [("copies", "late"), ("withdraws 1", "before")])
def test_a_run_that_was_paused_at_its_mirror_harms_nothing(tmp_path: pathlib.Path, operation: str, form: str) -> None:
    with opened("memory") as place:
        walk = MirrorWalk(place, tmp_path)
        walk.along(operation, form)
        check(walk, 5)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", MIRROR_OPERATIONS)
@pytest.mark.parametrize("scheme", ["memory", "gs", "s3"])
def test_no_older_owner_of_a_mirror_ever_harms_a_newer_one(scheme: str, operation: str, tmp_path: pathlib.Path) -> None:
    """Each operation, each request to the mirror, each form of the pause."""
    with opened(scheme) as place:
        walk = MirrorWalk(place, tmp_path)
        for form in FORMS:
            walk.along(operation, form)
        check(walk, len(FORMS))


@contextmanager
def conditions_off() -> Iterator[Callable[[], None]]:
    """The returned call has the store take every write from then on, whatever its condition; `off(False)` ends that."""
    put, unconditional = obstore.put, [False]

    def put_anyway(*args: Any, mode: Any = None, **kwargs: Any) -> Any:
        return put(*args, mode="overwrite" if unconditional[0] else mode, **kwargs)

    def off() -> None:
        unconditional[0] = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obstore, "put", put_anyway)
        yield off
        unconditional[0] = False


@pytest.mark.parametrize("operation", ["save", "delete 2"])
def test_without_conditions_the_same_walk_finds_harm(operation: str) -> None:
    """Negative control: from the moment that the older run goes on, its conditional writes always succeed."""
    with opened("memory") as place, conditions_off() as off:
        walk = Walk(place, off)
        walk.along(operation, "goes on", ("before",))
        assert walk.violations
