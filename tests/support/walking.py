"""An older run that is paused at one of its requests to an object store while a newer run takes the directory over.

`Walk.case` is one such meeting: an operation of the older run, the request and the form of the pause, and what the
newer run does. It notes what went wrong: an acknowledged epoch that is lost or changed, one that is listed and does not
restore, an older run that was told that it had saved, or remains of dead attempts that nothing removes.
"""

import dataclasses
import functools
import json
import pathlib
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import numpy as np
import orbax.checkpoint as ocp

import epochckpt as ec
from epochckpt.errors import EpochCheckpointError, FencedError, UncertainError
from epochckpt.format import paths
from epochckpt.inspection.gc import collect
from epochckpt.orbax import object_view
from epochckpt.orbax.step_files import COMMIT
from epochckpt.storage import open_store
from tests.support.walk_places import FORMS, KILLED, WAIT_SECS, Pause, Place, of_run

STORAGE = ec.StorageOptions(save_timeout_secs=60, open_timeout_secs=60, restore_timeout_secs=60)

# -- what is saved, and found again


def tag_of(epoch: int, who: int) -> int:
    """What a run saves as an epoch tells both."""
    return 10 * epoch + who


OLDER, NEWER, LAST, ANEW = 1, 2, 3, 4
BASE = {epoch: tag_of(epoch, OLDER) for epoch in (0, 1, 2)}
Found = dict[int, int]  # tags by epoch


def saved_as(tag: int) -> Any:
    return ocp.args.StandardSave({"w": np.full(5, tag, np.int32), "tag": tag})


def read(manager: ec.CheckpointManager) -> Found:
    """Every epoch that is listed, restored."""
    found = {}
    for epoch in manager.all_steps():
        tree = manager.restore(epoch)
        assert set(tree["w"].tolist()) == {tree["tag"]}, f"epoch {epoch} is a mixture: {tree}"
        found[epoch] = int(tree["tag"])
    return found


def open_run(url: str, **options: Any) -> ec.CheckpointManager:
    return ec.CheckpointManager(url, options=ocp.CheckpointManagerOptions(**options), storage=STORAGE)


def save(manager: ec.CheckpointManager, epoch: int, tag: int) -> None:
    assert manager.save(epoch, args=saved_as(tag), force=True)
    manager.wait_until_finished()


# -- the older run


class Older:
    """The older run: a manager, what it does, and how that ended. `source` holds epoch 7, for uploads."""

    def __init__(self, place: Place, url: str, operation: "Operation"):
        self.place, self.url, self.operation = place, url, operation
        self.source: ec.CheckpointManager | None = None
        self.manager: ec.CheckpointManager | None = None
        self.outcome: Exception | None = None
        self.save_id = ""  # of epoch 2

    def prepare(self) -> None:
        with open_run(self.url, read_only=True) as manager:
            self.save_id = manager.save_id(2)
        if self.operation.claimed:
            self.open().claim()

    def perform(self, pause: Pause) -> None:
        """On a thread of its own, to the end of what it does in the background."""
        of_run("older")
        try:
            self.operation.perform(self)
        except Exception as error:
            self.outcome = error
        finally:
            self.place.settle("older")
            pause.reached.set()

    def open(self) -> ec.CheckpointManager:
        """The manager, which may have to be opened."""
        if self.manager is None:
            keep, aside = self.operation.keep, self.operation.aside
            self.manager = open_run(self.url, max_to_keep=keep, todelete_subdir=aside)
        return self.manager


@dataclasses.dataclass(frozen=True)
class Operation:
    """Something that an older run does to the epochs `BASE`.

    Attributes:
        perform: does it, and returns when it is acknowledged.
        may_find: whether a newer run may find this in the middle of it, or after it.
        done: whether what was found has all that it does; what is acknowledged must be found.
        claimed: the run is the directory's writer already.
        keep: `max_to_keep`.
        adds: the epoch that it saves, and what that holds.
        uploads: it needs a directory to upload from.
        dead: an attempt of a run that was killed lies in the directory.
        aside: the subfolder that keeps what is deleted.
        stock: the epochs that stock Orbax has written.
        leaving: epoch 3 of stock Orbax was deleted by a run that was killed in the middle of removing it.
        headless: the head is lost, and both runs make it anew before they do anything else.
    """

    perform: Callable[[Older], object]
    may_find: Callable[[Found], bool] = lambda found: found == BASE
    done: Callable[[Found], bool] = lambda found: True
    claimed: bool = True
    keep: int | None = None
    adds: tuple[int, int] = (3, 31)
    uploads: bool = False
    dead: bool = False
    aside: str | None = None
    stock: tuple[int, ...] = ()
    leaving: bool = False
    headless: bool = False


WITH_3 = BASE | {3: tag_of(3, OLDER)}


def without(found: Found, *epochs: int) -> Found:
    return {epoch: tag for epoch, tag in found.items() if epoch not in epochs}


def _save_3(older: Older) -> None:
    save(older.open(), 3, WITH_3[3])


def _replace_2(older: Older) -> None:
    manager = older.open()
    manager.allow_overwrite(2)
    save(manager, 2, tag_of(2, ANEW))


def _repair_and_save(older: Older) -> None:
    ec.repair_head(older.url)
    _save_3(older)


def _kept(count: int) -> Callable[[Found], bool]:
    """Retention removes all but the newest, one after the other."""
    stay = set(sorted(WITH_3)[-count:])
    return lambda found: found == BASE or (found.items() <= WITH_3.items() and stay <= found.keys())


ATTACHED = {"accuracy": 0.5}


def _attach(older: Older) -> None:
    ec.attach_metrics(older.url, 2, ATTACHED, "evaluator", save_id=older.save_id)


UPLOADED = tag_of(7, OLDER)


def upload(url: str, source: ec.CheckpointManager | None) -> None:
    """Copies epoch 7 of another directory."""
    ec.LocalSession().run(ec.CopyUpload(url).build(7, source))


@functools.cache
def stock_files() -> dict[str, bytes]:
    """What stock Orbax writes as the epochs 0 to 3, by path."""
    with tempfile.TemporaryDirectory() as name:
        with ocp.CheckpointManager(name) as manager:
            for epoch, tag in WITH_3.items():
                manager.save(epoch, args=saved_as(tag))
        files = [path for path in pathlib.Path(name).rglob("*") if path.is_file()]
        return {str(path.relative_to(name)): path.read_bytes() for path in sorted(files)}


def upload_stock(url: str, epochs: Iterable[int]) -> None:
    """Writes epochs as stock Orbax would have."""
    store = open_store(url)
    for epoch in epochs:
        for path, data in stock_files().items():
            if path.startswith(f"{epoch}/") and path != f"{epoch}/{COMMIT}":
                store.create(path, data)
        store.create(f"{epoch}/{COMMIT}", b"")


OPERATIONS = {
    "save": Operation(_save_3, lambda found: found in (BASE, WITH_3), lambda found: 3 in found),
    "save, keep 1": Operation(_save_3, _kept(1), lambda found: 3 in found, keep=1),
    "save, keep 2": Operation(_save_3, _kept(2), lambda found: 3 in found, keep=2),
    "delete 2": Operation(
        lambda older: older.open().delete(2),
        lambda found: found in (BASE, without(BASE, 2)),
        lambda found: 2 not in found,
    ),
    "set 2 aside": Operation(
        lambda older: older.open().delete(2),
        lambda found: found in (BASE, without(BASE, 2)),
        lambda found: 2 not in found,
        aside="trash",
    ),
    "delete 0": Operation(
        lambda older: older.open().delete(0),
        lambda found: found in (BASE, without(BASE, 0)),
        lambda found: 0 not in found,
    ),
    "rollback": Operation(
        lambda older: older.open().rollback_to(0),
        lambda found: found in (BASE, without(BASE, 1, 2)),
        lambda found: not {1, 2} & found.keys(),
    ),
    "replace": Operation(
        _replace_2,
        lambda found: found in (BASE, BASE | {2: tag_of(2, ANEW)}),
        lambda found: found[2] == tag_of(2, ANEW),
    ),
    "attach metrics": Operation(_attach, claimed=False),
    "close": Operation(lambda older: older.open().close()),
    "collect garbage": Operation(
        lambda older: collect(older.url, delete=True, clock=lambda: time.time() + 1e7), claimed=False, dead=True
    ),
    "repair": Operation(lambda older: ec.repair_head(older.url), claimed=False, headless=True),
    "repair and save": Operation(
        _repair_and_save, lambda found: found in (BASE, WITH_3), lambda found: 3 in found, claimed=False, headless=True
    ),
    "first save": Operation(_save_3, lambda found: found in (BASE, WITH_3), lambda found: 3 in found, claimed=False),
    "first save, keep 1": Operation(_save_3, _kept(1), lambda found: 3 in found, claimed=False, keep=1),
    "first save, sweeping": Operation(
        _save_3, lambda found: found in (BASE, WITH_3), lambda found: 3 in found, claimed=False, dead=True
    ),
    "upload": Operation(
        lambda older: upload(older.url, older.source),
        lambda found: found in (BASE, BASE | {7: UPLOADED}),
        lambda found: 7 in found,
        claimed=False,
        adds=(7, UPLOADED),
        uploads=True,
    ),
}
OPERATIONS |= {
    f"{name}, stock": dataclasses.replace(OPERATIONS[name], stock=epochs)
    for name, epochs in {
        "delete 2": (1, 2),
        "set 2 aside": (2,),
        "rollback": (1, 2),
        "save, keep 1": (0, 1),
        "save, keep 2": (0, 1, 2),
    }.items()
}
OPERATIONS |= {
    "first save, stock leaving": dataclasses.replace(OPERATIONS["first save"], stock=(1,), leaving=True),
    "save, stock leaving": dataclasses.replace(OPERATIONS["save"], stock=(2,), leaving=True),
}


# -- the newer run


class Newer:
    """The newer run: a manager, and what its acknowledged calls leave in the directory."""

    def __init__(self, older: Older, **options: Any):
        self.manager, self._url, self._source = open_run(older.url, **options), older.url, older.source
        self.found: Found = {}
        self.there: Found = {}

    def look(self) -> None:
        """Resumes, as a job does."""
        self.found = read(self.manager)
        self.there = dict(self.found)
        newest = self.manager.restore(None)
        assert int(newest["tag"]) == self.found[max(self.found)]

    @property
    def last(self) -> int:
        return max(self.there)

    def save(self, *epochs: int, who: int = NEWER) -> None:
        for epoch in epochs:
            save(self.manager, epoch, tag_of(epoch, who))
            self.there[epoch] = tag_of(epoch, who)

    def goes_on(self) -> None:
        self.save(self.last + 1, self.last + 2)

    def deletes(self) -> None:
        self.save(self.last + 1)
        for epoch in {self.last - 1, min(self.there)}:
            self.manager.delete(epoch)
            del self.there[epoch]

    def rolls_back(self) -> None:
        first = min(self.there)
        self.manager.rollback_to(first)
        self.there = {first: self.there[first]}
        self.save(*range(first + 1, 5))

    def keeps_one(self) -> None:
        for epoch in (self.last + 1, self.last + 2):
            self.save(epoch)
            self.there = {epoch: self.there[epoch]}

    def replaces(self) -> None:
        if paths.save_id_in(self.manager.save_id(self.last)) is None:  # of stock Orbax
            self.deletes_and_saves_again()
            return
        self.manager.allow_overwrite(self.last)
        self.save(self.last)

    def uploads(self) -> None:
        self.manager.close()
        upload(self._url, self._source)
        self.there[7] = UPLOADED
        self.manager.reload()

    def deletes_and_saves_again(self) -> None:
        last = self.last
        self.manager.delete(last)
        self.save(last)


@dataclasses.dataclass(frozen=True)
class Newcomer:
    """How a newer run comes, what it does, and whether it closes the directory."""

    acts: Callable[[Newer], None]
    early: bool = False  # it has opened the directory before the older run's operation
    claims: bool = False  # in a call of its own
    closes: bool = True
    keep: int | None = None


NEWCOMERS = {
    "goes on": Newcomer(Newer.goes_on),
    "keeps one": Newcomer(Newer.keeps_one, keep=1),
    "rolls back": Newcomer(Newer.rolls_back, claims=True),
    "deletes": Newcomer(Newer.deletes, closes=False),
    "deletes and saves again": Newcomer(Newer.deletes_and_saves_again),
    "replaces": Newcomer(Newer.replaces),
    "was open before": Newcomer(Newer.goes_on, early=True, claims=True),
    "uploads": Newcomer(Newer.uploads),
    "only claims": Newcomer(lambda newer: None, claims=True, closes=False),
}


# -- the walk


class Walk:
    """Meetings of an older and a newer run in a place.

    Args:
        place: where.
        release: called when the older run goes on.
        repairs: the head is lost at last, and made anew.
    """

    def __init__(self, place: Place, release: Callable[[], object] = lambda: None, *, repairs: bool = False):
        self._place, self._release, self._repairs = place, release, repairs
        self.cases = 0
        self.violations: list[str] = []

    def along(self, operation: str, newcomer: str, forms: Sequence[str] = FORMS, step: int = 1) -> None:
        """Pauses the operation at each request (or each `step`-th), in each form, until it makes no more of them."""
        for form in forms:
            number = 1
            while self.case(operation, newcomer, Pause(form, number)):
                number += step

    def case(self, operation: str, newcomer: str, pause: Pause) -> bool:
        """One meeting; False if the operation makes fewer requests."""
        meeting = _Meeting(self._place, OPERATIONS[operation], NEWCOMERS[newcomer], pause, self._release, self._repairs)
        try:
            there = meeting.run()
        except Exception as error:
            there = True
            meeting.problems.append(f"{type(error).__name__}: {error}"[:600])
        finally:
            meeting.end()
        request = pause.request and f"{pause.request.method} {pause.request.target}"
        where = f"{self._place.scheme}: {operation}, {pause.form} request {pause.number} ({request}), {newcomer}"
        self.violations += [f"{where}: {problem}" for problem in meeting.problems]
        self.cases += there
        return there and pause.request is not None


class _Meeting:
    """One case of a walk."""

    def __init__(
        self,
        place: Place,
        operation: Operation,
        newcomer: Newcomer,
        pause: Pause,
        release: Callable[[], object],
        repairs: bool,
    ):
        self._place, self._operation, self._newcomer = place, operation, newcomer
        self._pause, self._release, self._url = pause, release, place.new_url()
        self._older, self._repairs = Older(place, self._url, operation), repairs
        self.problems: list[str] = []

    def run(self) -> bool:
        place, pause, older, newcomer = self._place, self._pause, self._older, self._newcomer
        self._prepare()
        keep = {} if newcomer.keep is None else {"max_to_keep": newcomer.keep}
        early = self._newer(keep) if newcomer.early else None
        place.go_by("older")
        place.decide_by(pause.decide)
        thread = threading.Thread(target=older.perform, args=(pause,), daemon=True)
        thread.start()
        assert pause.reached.wait(WAIT_SECS), "the older run neither ended nor paused"
        if pause.request is None:
            self._note("it failed though nobody disturbed it", older.outcome)
            return False
        if pause.form in KILLED:  # what it still does changes nothing
            thread.join(WAIT_SECS)
        place.go_by("newer")
        newer = early or self._newer(keep)
        self._act(newer)
        place.settle("newer")
        place.go_by("older")
        self._release()
        pause.go.set()
        thread.join(WAIT_SECS)
        assert not thread.is_alive(), "the older run does not come to an end"
        assert place.requests_end(), "a request does not come to an end"
        expected = self._expect(newer)
        if pause.form not in KILLED:
            expected = self._go_on(expected)
        place.go_by("last")
        place.decide_by(lambda request: None)
        self._check("afterwards", expected, newer)
        last = max(expected) + 1
        with open_run(self._url) as manager:
            save(manager, last, tag_of(last, LAST))
        place.settle("last")
        collect(self._url, delete=True, clock=lambda: time.time() + 1e7)
        self._check("after a third run and gc", expected | {last: tag_of(last, LAST)}, newer)
        self._check_remains()
        if self._repairs:
            open_store(self._url).remove(paths.HEAD)
            ec.repair_head(self._url)
            self._check("after its head was lost and made anew", expected | {last: tag_of(last, LAST)}, newer)
        return True

    def _newer(self, keep: dict[str, int]) -> Newer:
        if self._operation.headless:
            ec.repair_head(self._url)
        return Newer(self._older, **keep)

    def end(self) -> None:
        """Lets go of everything, whatever happened."""
        self._pause.go.set()
        self._place.decide_by(lambda request: None)
        self._place.go_by("")

    def _prepare(self) -> None:
        """The epochs `BASE`, of a run that has ended; with a dead attempt of another one."""
        place = self._place
        place.go_by("first")
        stock = self._operation.stock
        upload_stock(self._url, stock)
        with open_run(self._url) as manager:
            manager.claim()
            ours = [epoch for epoch in BASE if epoch not in stock]
            for epoch in ours:
                save(manager, epoch, BASE[epoch])
        for epoch in ours[-1:]:
            ec.attach_metrics(self._url, epoch, {"loss": 0.0}, "trainer")
        place.settle("first")
        place.go_by("older")
        if self._operation.dead:
            dying = Pause("killed", 1)
            manager = open_run(self._url)
            manager.claim()
            place.decide_by(
                lambda request: (
                    dying.decide(request) if dying.request or "node.json" in unquote(request.target) else None
                )
            )
            with suppress(EpochCheckpointError):
                save(manager, 3, tag_of(3, LAST))
            place.settle("older")
            assert dying.request is not None
            place.decide_by(lambda request: None)
        if self._operation.leaving:
            self._leave_half()
        self._older.prepare()
        place.settle("older")
        place.go_by("newer")
        if self._operation.uploads or self._newcomer.acts is Newer.uploads:
            self._older.source = open_run(f"memory://{uuid.uuid4().hex}")
            save(self._older.source, 7, UPLOADED)
        if self._operation.headless:
            open_store(self._url).remove(paths.HEAD)

    def _leave_half(self) -> None:
        """A run deletes epoch 3, of stock Orbax, and is killed when it has removed something of it."""
        place, dying = self._place, Pause("killed", 2)
        upload_stock(self._url, [3])
        place.settle("first")
        manager = open_run(self._url)
        manager.claim()
        place.settle("older")
        place.decide_by(lambda request: dying.decide(request) if request.kind == "DELETE" or dying.request else None)
        with suppress(EpochCheckpointError):
            manager.delete(3)
            manager.wait_until_finished()
        with suppress(EpochCheckpointError):
            manager.close()
        place.settle("older")
        assert dying.request is not None
        place.decide_by(lambda request: None)

    def _act(self, newer: Newer) -> None:
        """The newer run, from its first look to its end; it is disturbed by nothing."""
        if self._newcomer.claims:
            newer.manager.claim()
        if self._newcomer.early:
            newer.manager.reload()
        newer.look()
        if not self._operation.may_find(newer.found):
            self.problems.append(f"the newer run finds {newer.found}")
        self._newcomer.acts(newer)
        if sorted(newer.there) != list(newer.manager.all_steps()):
            self.problems.append(f"the newer run lists {newer.manager.all_steps()}, did {newer.there}")
        if self._newcomer.closes:
            newer.manager.close()

    def _expect(self, newer: Newer) -> Found:
        """What the directory must hold when both are done."""
        older, operation, expected = self._older, self._operation, dict(newer.there)
        self._note("no honest error", older.outcome)
        if older.outcome is not None or (operation.done(newer.found) and newer.found != BASE):
            return expected
        if operation.claimed and not operation.done(newer.found) and not operation.done(newer.there):
            self.problems.append(f"acknowledged to the older run though the newer one had found {newer.found}")
        elif not operation.claimed and not operation.done(newer.found):  # it has claimed later, and is the newest
            epoch, tag = operation.adds
            if expected.setdefault(epoch, tag) != tag:
                self.problems.append(f"both runs were told that they had saved epoch {epoch}")
            if operation.keep:
                expected = dict(sorted(expected.items())[-operation.keep :])
        return expected

    def _go_on(self, expected: Found) -> Found:
        """The older run saves once more, which it may only if it has claimed last, and closes."""
        manager, outcome = self._older.manager, None
        if manager is None or self._operation.perform is OPERATIONS["close"].perform:
            return expected
        try:
            save(manager, 9, tag_of(9, OLDER))
        except Exception as error:
            outcome = error
        if outcome is None and self._operation.claimed:
            self.problems.append("the older run could save once more")
        if outcome is None:
            expected = expected | {9: tag_of(9, OLDER)}
            if self._operation.keep:
                expected = dict(sorted(expected.items())[-self._operation.keep :])
        elif not isinstance(outcome, FencedError):
            self.problems.append(f"saved once more: {type(outcome).__name__} is no FencedError: {outcome}"[:400])
        with suppress(EpochCheckpointError):
            manager.close()
        self._place.settle("older")
        return expected

    def _note(self, what: str, error: Exception | None) -> None:
        """Only an error of ours says what happened."""
        disturbed = self._pause.request is not None
        if error is not None and not (disturbed and isinstance(error, EpochCheckpointError)):
            self.problems.append(f"{what}: {type(error).__name__}: {error}"[:400])

    def _check(self, when: str, expected: Found, newer: Newer) -> None:
        """Everybody finds what was acknowledged, whole, and nothing else."""
        uncertain = isinstance(self._older.outcome, UncertainError)
        with open_run(self._url, read_only=True) as manager:
            try:
                found = read(manager)
            except Exception as error:
                listed = list(manager.all_steps())
                self.problems.append(f"{when}: of {listed} one is not readable: {type(error).__name__}: {error}"[:500])
                return
            if found != expected and not (uncertain and without(found, self._operation.adds[0]) == expected):
                self.problems.append(f"{when}: acknowledged were {expected}, found {found}")
            for epoch in found:
                if not (verified := manager.verify(epoch)).ok:
                    self.problems.append(f"{when}: epoch {epoch} is damaged: {verified}"[:400])
            if self._operation is OPERATIONS["attach metrics"] and 2 in found:
                metrics, ours = manager.metrics(2) or {}, found[2] == BASE[2]
                if metrics and not ours:
                    self.problems.append(f"{when}: an epoch has the metrics of another: {metrics}")
                if metrics.keys() & ATTACHED.keys() != ATTACHED.keys() and ours and self._older.outcome is None:
                    self.problems.append(f"{when}: attached metrics are lost: {metrics}")

    def _check_remains(self) -> None:
        """Nothing is left of attempts that are neither epochs nor set aside."""
        with open_run(self._url, read_only=True) as manager:
            epochs = list(manager.all_steps())
            kept = {manager.save_id(epoch) for epoch in epochs}
        keys = self._place.keys(self._url)
        for key, data in keys.items():
            if key == paths.HEAD:  # set aside by a rollback
                kept |= {entry["attempt"] for entry in json.loads(data)["aside"].values()}
        for key in keys:
            folder, _, rest = key.partition("/")
            if not folder.isdigit() or not rest:
                continue
            save_id = paths.save_id_in(rest)
            if save_id is None and object_view.is_small(rest):  # what comes late of a view has no mark, and stays
                continue
            if save_id not in kept if save_id else int(folder) not in epochs:
                self.problems.append(f"remains for ever: {key}")
