"""The mirror of a directory: its committed epochs, copied to another directory (a bucket) in order, in the background.

Guarantees:
- nothing here runs on the training thread, and no commit waits for the mirror;
- an epoch appears in the mirror whole, by a commit there, and in the order of the commits here. The copy is made under
  the id of an attempt of the mirror, so that nothing that is left of a killed copy is ever mistaken for a part of it;
- what the mirror is about to get, and what it has yet to give up, is recorded here first (see `mirror_record`);
- a mirror that does not answer is asked again, for as long as the manager is open. A bounded number of epochs waits.

Each process copies the folders of its own nodes. The primary publishes each copy as a task, under `task/<number>`, for
all processes; they answer under `report/<number>/<process>`, and the primary commits when all have. The other processes
do the newest task that there is; the last one says that there will be no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _threads
from epochckpt._threads import Deadline
from epochckpt.arrays import EpochReader
from epochckpt.commit import Commits, Coordinator, attached_metrics, commits_of
from epochckpt.commit.attempt import NodeReport, ProcessReport
from epochckpt.commit.coordination import RecentKeys
from epochckpt.commit.opening import Survey
from epochckpt.commit.protocol import ReplaceCondition, Rollback
from epochckpt.errors import (
    CoordinationError,
    CoordinationTimeoutError,
    DamagedError,
    EpochNotFoundError,
    FencedError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
    LateNodesError,
    StorageError,
    UncertainError,
    UnsupportedError,
    kept,
    say,
)
from epochckpt.format import NodeEntry, paths
from epochckpt.manager import mirror_record
from epochckpt.manager.epoch_copy import EpochCopy
from epochckpt.manager.mirror_record import MirrorRecord, Withdrawal, read_mirror_record
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store

_PAUSES_SECS = (1.0, 60.0)  # the first and the longest, before the mirror is asked again
_LISTEN_SECS = 60.0  # one question of another process for the next task
_MARGIN_SECS = 60.0  # by how much the other processes wait longer for the end than the primary
_KEPT_TASKS = 8  # in the coordination service
_END = {"end": True}


class Mirror:
    """The mirror of one manager's directory, on one process."""

    def __init__(
        self,
        url: str,
        options: StorageOptions,
        policies: ocp.CheckpointManagerOptions,
        hosted: Callable[[], Sequence[str]],
    ):
        """`hosted` gives the names of this process's nodes, which are known once the directory is open."""
        store, names = open_store(url, settings=options.store), StepNames.of(policies)
        self.url, self._address = store.root, store.address
        self._there = commits_of(store, names)  # to read
        self._copies = commits_of(store, names)  # to write, in the background
        self._options, self._policies, self._hosted = options, policies, hosted
        self._epochs: frozenset[int] = frozenset()  # that the mirror has, as far as known
        self._answered = False  # whether the mirror said so when the directory was opened
        self._removed: list[int] = []
        self._record = MirrorRecord(self.url, self._address)
        # The lock is taken by background threads only. It guards the record, and which epochs wait.
        self._lock = threading.Lock()
        self._due: list[int] = []  # epochs to be copied, in order
        self._copying: int | None = None  # the one of them that is being copied
        self._since = 0  # epochs that were committed since the last that is to be copied
        self._newest: int | None = None  # the last epoch that was committed here
        self._work: _threads.Future[None] | None = None
        self._bell: _threads.Future[None] = _threads.Future()
        self._metrics_changed = self._claimed = self._closing = self._ended = False
        self._failures = 0  # in a row
        self._attempts = self._tasks = 0  # how many there have been
        self._dead: list[tuple[int, str]] = []  # attempts in the mirror that failed
        self._attached: dict[tuple[int, str], Any] = {}

    # -- reading -------------------------------------------------------------------------------------------------

    def complete(self, local: Commits, survey: Survey, texts: Sequence[str] | None = None) -> Survey:
        """On the primary: a survey of the directory, with what the mirror has; see `opening.Completing`.

        Raises:
            StorageError: the mirror does not answer, and there is nothing here to go on with.
            InvalidArgumentError: the mirror has the epochs of another directory.
        """
        if not local.store.renames:
            problem = f"only a directory on a file system has a mirror, not {local.store.root}"
            raise UnsupportedError(f"mirror={self.url}: {problem}")
        if local.store.root.rstrip("/") == self.url.rstrip("/"):
            raise InvalidArgumentError(f"mirror={self.url} is the directory itself; choose another")
        if self._work is None:
            record = read_mirror_record(local.store) if texts is None else mirror_record.newest(texts, local.store.root)
            self._look(local, survey, record)
        there = self._epochs - self._record.hidden if texts is None or self._answered else frozenset[int]()
        damaged = dict(survey.damaged)
        for epoch in there & damaged.keys() if self._answered else ():
            if self._copy_exists(epoch, damaged[epoch].attempt):
                logging.warning("%s: checkpoint %d is read from its mirror %s", local.store.root, epoch, self.url)
                del damaged[epoch]
        remote = sorted(there - {*survey.epochs} - damaged.keys())
        attached = survey.attached
        if remote and attached_metrics.are_needed(self._policies):
            attached = attached | attached_metrics.of_epochs(self._there, remote, self._there.read_attempt)
        epochs = sorted({*survey.epochs, *remote})
        return dataclasses.replace(survey, epochs=epochs, damaged=damaged, attached=attached, remote=tuple(remote))

    def _look(self, local: Commits, survey: Survey, record: MirrorRecord | None) -> None:
        """Asks the mirror which epochs it has, before this manager writes."""
        if record is not None and record.url != self.url:
            logging.warning("%s: its mirror was %s, and is %s from now on", local.store.root, record.url, self.url)
            record = None
        self._record = self._addressed(record)
        try:
            self._epochs, self._answered = frozenset(self._there.list_epochs()), True
        except StorageError as error:
            if record is None or not survey.epochs:
                raise
            text = "%s: its mirror does not answer, so that epochs which only the mirror has cannot be read: %s"
            logging.warning(text, local.store.root, say(error))
            self._epochs, self._answered = frozenset(record.copies), False
            return
        if record is None and self._epochs and (survey.epochs or survey.damaged):
            common = [epoch for epoch in reversed(survey.epochs) if epoch in self._epochs]
            if not any(self._there.read_attempt(epoch) == local.read_attempt(epoch) for epoch in common):
                raise InvalidArgumentError(
                    f"mirror={self.url} holds {len(self._epochs)} epochs, the newest is {max(self._epochs)}, and none "
                    f"of them is one of the epochs in {local.store.root}. Choose an empty mirror for this directory, "
                    "or open an empty directory to go on from the mirror"
                )

    def _addressed(self, record: MirrorRecord | None) -> MirrorRecord:
        """The record, or an empty one, with the settings of today."""
        if record is None:
            return MirrorRecord(self.url, self._address)
        return dataclasses.replace(record, address=self._address)

    def _copy_exists(self, epoch: int, attempt: str | None) -> bool:
        there = self._there.read_attempt(epoch)
        return there is not None and self._record.is_copy(epoch, attempt, there)

    def copy_of(self, epoch: int, commits: Commits) -> Commits | None:
        """See `readers.MirrorCopies`. Any process may ask, at any time; storage is looked at."""
        record = self._addressed(read_mirror_record(commits.store))
        if record.url != self.url or epoch in record.hidden:
            return None
        there = self._there.read_attempt(epoch)
        if there is None:
            return None
        lost, here = epoch not in commits.list_epochs(), commits.read_attempt(epoch)
        if lost or record.is_copy(epoch, here, there):
            return self._there
        # The record on another disk than the primary's may be older than the copy.
        same = self._options.local_disks and here is not None and self._there.read_head(epoch).origin == here
        return self._there if same else None

    def newest(self, texts: Sequence[str]) -> str:
        """See `opening.Completing`."""
        record = mirror_record.newest(texts, self.url)
        return self._addressed(record if record is not None and record.url == self.url else None).to_bytes().decode()

    def text(self) -> str:
        """See `opening.Completing`."""
        with self._lock:
            return self._record.to_bytes().decode()

    def adopt(self, text: str) -> None:
        """See `opening.Completing`."""
        with self._lock:
            record = mirror_record.newest([text], self.url)
            if record is not None and record.serial > self._record.serial:
                self._local.overwrite(paths.MIRROR_RECORD, text.encode())
                self._record = record

    def origin_of(self, epoch: int) -> str | None:
        """See `opening.Completing`."""
        there = self._there.read_attempt(epoch)
        here, copy = self._record.copies.get(epoch, ("", ""))
        if there is None or there == copy:
            return here or None
        return self._there.read_head(epoch).origin

    def epochs(self) -> list[int]:
        """On the primary: the epochs that the mirror has, as far as known, without those that no longer count."""
        return sorted(self._epochs - self._record.hidden)

    # -- what the manager tells ----------------------------------------------------------------------------------

    def claimed(self, local: Commits, coordinator: Coordinator, prefix: str, epochs: Sequence[int]) -> None:
        """On every process, when the directory is claimed and has these epochs: begins to work."""
        self._local, self._coordinator, self._prefix = local, coordinator, f"{prefix}/mirror"
        self._keys = RecentKeys(_KEPT_TASKS)
        with self._lock:
            record = read_mirror_record(local.store)  # of a run that was alive until now, perhaps
            if not coordinator.primary:
                self._record = self._addressed(record)
                self._work = _threads.start(self._serve)
                return
            self._write(self._addressed(record) if record is not None and record.url == self.url else self._record)
            there = self._epochs - self._record.hidden
            newest = max(there, default=-1)
            self._due = [e for e in epochs if e in there and self._is_stale(e)]
            missing = [e for e in epochs if e > newest]
            every = self._options.mirror_every
            self._due += missing[every - 1 :: every]
            self._since, self._newest = len(missing) % every, max(epochs, default=None)
            self._bound()
        self._metrics_changed = True
        self._work = _threads.start(self._run)

    def _is_stale(self, epoch: int) -> bool:
        here = self._local.read_attempt(epoch)  # None: this disk does not have it
        return here is not None and self._record.copies.get(epoch, ("", ""))[0] != here

    def committed(self, epoch: int) -> None:
        """On the primary: an epoch was committed here."""
        if self._work is None:
            return
        with self._lock:
            self._newest = epoch
            self._since += 1
            if self._since >= self._options.mirror_every or epoch in self._epochs:
                self._since = 0
                self._due = [*(e for e in self._due if e != epoch or e == self._copying), epoch]
                self._bound()
        self._metrics_changed = True
        self._ring()

    def _bound(self) -> None:
        """Keeps the backlog within its bound, under the lock: the oldest epochs are not mirrored."""
        waiting = [e for e in self._due if e != self._copying and e not in self._epochs]
        skipped = waiting[: max(0, len(waiting) - self._options.mirror_backlog)]
        if skipped and not self._ended:
            self._due = [epoch for epoch in self._due if epoch not in skipped]
            names, bound = ", ".join(map(str, skipped)), self._options.mirror_backlog
            text = "%s: it is behind, and checkpoint %s is left out: at most %d may wait (mirror_backlog)"
            logging.warning(text, self.url, names, bound)

    def withdraw(self, to: int | None, epochs: Sequence[int]) -> None:
        """On the primary: epochs are being deleted here, or rolled back, and are to leave the mirror, too."""
        with self._lock:
            self._due = [epoch for epoch in self._due if epoch not in epochs]
            copies = {e: attempts for e, attempts in self._record.copies.items() if e not in epochs}
            withdrawn = (*self._record.withdrawn, Withdrawal(to, tuple(epochs)))
            self._write(dataclasses.replace(self._record, copies=copies, withdrawn=withdrawn))
            if self._newest in epochs:
                self._newest = None
        self._ring()

    def waiting(self) -> frozenset[int]:
        """See `commit.retention.Mirrored`."""
        with self._lock:
            return frozenset(() if self._ended else self._due)

    def has(self, epoch: int) -> bool:
        """See `commit.retention.Mirrored`."""
        return epoch in self._epochs and epoch not in self._record.hidden

    def pop_removed(self) -> list[int]:
        """See `commit.retention.Mirrored`."""
        popped, self._removed = self._removed, []
        return popped

    def close(self, timeout_secs: float) -> None:
        """Waits until the newest epoch is mirrored, at most so long, and logs what is not."""
        if self._work is None:
            return
        self._closing = True
        self._ring()
        primary = self._coordinator.primary
        if not self._work.wait(timeout_secs if primary else timeout_secs + _MARGIN_SECS):
            logging.warning("%s: the mirror is not done within %g s, which nothing waits for", self.url, timeout_secs)
        left = self._unmirrored() if primary else []
        self._ended = True
        if left:
            text = "%s: not mirrored: checkpoint %s. The next run that saves to %s goes on with that"
            logging.warning(text, self.url, ", ".join(map(str, left)), self._local.store.root)

    def _ring(self) -> None:
        self._bell.set(None)

    def _write(self, record: MirrorRecord) -> None:
        """Writes the record, under the lock."""
        if self._options.local_disks:
            record = dataclasses.replace(record, serial=record.serial + 1)
        self._local.overwrite(paths.MIRROR_RECORD, record.to_bytes())
        self._record = record

    # -- on the primary, in the background -----------------------------------------------------------------------

    def _run(self) -> None:
        """Does one step after the other, until the manager is closed or a newer run has taken over."""
        pause, longest = _PAUSES_SECS
        while not self._ended:
            self._bell = _threads.Future()
            try:
                busy = self._step()
                if self._failures and busy:
                    logging.info("%s: the mirror goes on, after %d failures", self.url, self._failures)
                    self._failures, pause = 0, _PAUSES_SECS[0]
            except FencedError as error:
                if not self._ended:
                    logging.error("%s: nothing more is mirrored: %s", self.url, error.reason)
                break
            except Exception as error:  # whatever it is, training does not depend on it
                if not self._failures:
                    text = "%s: the mirror is behind, and tries again; saving to %s goes on: %s"
                    logging.warning(text, self.url, self._local.store.root, say(error))
                kept(error)
                self._failures += 1
                if self._closing:
                    break
                self._bell.wait(pause)
                pause = min(2 * pause, longest)
                continue
            if not busy:
                if self._closing:
                    break
                self._bell.wait()
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._ended = True
        if self._coordinator.processes > 1:
            _threads.logged(f"{self.url}: the other processes do not hear of its end", lambda: self._publish(_END))
        if self._claimed:
            _threads.logged(f"{self.url}: at its end", self._copies.release)

    def _step(self) -> bool:
        """The next piece of work; False if there is none."""
        if not self._claimed:
            self._claim()
        elif self._record.withdrawn:
            self._follow(self._record.withdrawn[0])
        elif self._dead:
            self._copies.discard(*self._dead[-1])
            self._dead.pop()
        elif (epoch := self._take()) is not None:
            self._copy(epoch)
        elif len(self.epochs()) > (self._options.mirror_keep or math.inf):
            self._remove(self.epochs()[0])
        elif self._metrics_changed:
            self._follow_metrics()
            self._metrics_changed = False
        else:
            return False
        return True

    def _claim(self) -> None:
        """Claims the mirror: whatever an earlier run left there unfinished is removed."""
        self._copies.claim(check=self._check_claim)
        self._claimed = True
        found = frozenset(self._copies.list_epochs())
        known = self._epochs | self._record.hidden | self._record.copies.keys()
        if strangers := sorted(found - known):
            self._check_claim()
            names = ", ".join(map(str, strangers[-20:]))
            since = "since this manager was opened" if self._answered else "from before; it did not answer then"
            raise FencedError(
                strangers[-1],
                f"it has epochs that {self._local.store.root} does not know of ({names}), {since}. Nothing is changed "
                "there: open the directory again to go on from them",
            )
        self._epochs = found

    def _check_claim(self) -> None:
        """Raises FencedError if a newer run has taken over the directory: it has the mirror, too, or soon will."""
        with self._lock:
            self._write(self._record)

    def _follow(self, withdrawal: Withdrawal) -> None:
        """Gives up in the mirror what was deleted or rolled back here."""
        found = set(self._copies.list_epochs())
        there = tuple(epoch for epoch in withdrawal.epochs if epoch in found)
        if withdrawal.to is None:
            for epoch in there:
                self._copies.hide(epoch, logged=True)()
        elif there:
            self._copies.finish_rollback()
            self._copies.roll_back(Rollback(withdrawal.to, there, paths.new_id()))
        with self._lock:
            self._epochs -= {*withdrawal.epochs}
            self._write(dataclasses.replace(self._record, withdrawn=self._record.withdrawn[1:]))

    def _take(self) -> int | None:
        """The next epoch to be copied, if there is one."""
        with self._lock:
            if self._closing:
                self._due, self._newest = self._unmirrored(), None
            self._copying = self._due[0] if self._due else None
            return self._copying

    def _unmirrored(self) -> list[int]:
        """The epochs that the mirror is to have at the end, and has not."""
        newest = self._newest
        return self._due if newest is None or newest in {*self._due, *self._epochs} else [*self._due, newest]

    def _copy(self, epoch: int) -> None:
        """Copies an epoch, unless it is there; one that cannot be copied is left out."""
        try:
            self._copy_now(epoch)
        except (DamagedError, FormatError, FormatVersionError, EpochNotFoundError, UnsupportedError) as error:
            logging.error("%s: checkpoint %d is not mirrored: %s", self.url, epoch, error)
        except BaseException:
            self._copying = None
            raise
        with self._lock:
            self._copying = None
            if epoch in self._due:
                self._due.remove(epoch)

    def _copy_now(self, epoch: int) -> None:
        record = self._local.read_record(epoch)
        if record.stock:
            raise UnsupportedError("stock Orbax wrote it, whose steps are not copied")
        there = self._copies.read_attempt(epoch)
        if there is None or not self._record.is_copy(epoch, record.attempt, there):
            replaces = None
            if epoch in self._epochs:
                replaces = ReplaceCondition(there, "" if there else "its record cannot be used")
            self._attempts += 1
            there = f"{self._copies.incarnation}-{epoch}-{self._attempts}"
            with self._lock:
                if epoch not in self._due:  # withdrawn just now
                    return
                self._write(self._with_copy(epoch, record.attempt, there))
            self._copy_as(there, epoch, replaces)
        elif self._record.copies.get(epoch) != (record.attempt, there):
            with self._lock:
                self._write(self._with_copy(epoch, record.attempt, there))
        self._epochs |= {epoch}

    def _with_copy(self, epoch: int, here: str, there: str) -> MirrorRecord:
        return dataclasses.replace(self._record, copies={**self._record.copies, epoch: (here, there)})

    def _copy_as(self, attempt: str, epoch: int, replaces: ReplaceCondition | None) -> None:
        """Copies an epoch under the id of an attempt of the mirror."""
        copy = self._epoch_copy(epoch, attempt)
        copy.make_room(replaces)
        try:
            copy.publish(self._copy_together(copy, epoch, attempt))
        except (UncertainError, LateNodesError):  # it may be there; or a node may still write
            raise
        except BaseException:
            self._dead.append((epoch, attempt))
            raise

    def _epoch_copy(self, epoch: int, attempt: str) -> EpochCopy:
        record = self._local.read_record(epoch)
        reader = EpochReader(self._local.store, self._local.folder(epoch), record, _threads.Pool(1))
        return EpochCopy(reader, self._copies, attempt)

    def _copy_together(self, copy: EpochCopy, epoch: int, attempt: str) -> list[NodeEntry]:
        """Has every process copy its nodes; returns the entries of the copies."""
        if self._coordinator.processes == 1:
            return copy.copy_nodes(self._hosted())
        number = self._publish({"epoch": epoch, "attempt": attempt, "incarnation": self._copies.incarnation})
        deadline, others = Deadline(self._options.save_timeout_secs), set(range(1, self._coordinator.processes))
        error: Exception | None = None
        entries: list[NodeEntry] = []
        try:
            entries = copy.copy_nodes(self._hosted())
        except Exception as caught:
            error = caught
        found, missing = self._coordinator.gather(f"{self._prefix}/report/{number}", others, deadline)
        reports = [ProcessReport.from_wire(wire) for _, wire in sorted(found.items())]
        failures = [*filter(None, [error, *(report.error for report in reports)])]
        if missing:
            late = self._coordinator.named(missing).split(", ")
            raise LateNodesError(epoch, late, deadline.secs) from next(iter(failures), None)
        for failure in failures:
            raise failure
        return [*entries, *(node.entry for report in reports for node in report.nodes)]

    def _publish(self, task: dict[str, Any]) -> int:
        """Publishes a task for the other processes; returns its number."""
        self._tasks += 1
        if self._options.local_disks:
            task = {**task, "record": self.text()}
        task_key, report_key = f"{self._prefix}/task/{self._tasks}", f"{self._prefix}/report/{self._tasks}"
        self._coordinator.put(task_key, task)
        self._keys.add(self._coordinator, task_key, report_key)
        return self._tasks

    def _remove(self, epoch: int) -> None:
        """Removes an epoch that the mirror keeps no longer."""
        self._copies.hide(epoch, logged=True)()
        with self._lock:
            self._epochs -= {epoch}
            self._removed = [*self._removed, epoch]
            copies = {e: attempts for e, attempts in self._record.copies.items() if e != epoch}
            self._write(dataclasses.replace(self._record, copies=copies))

    def _follow_metrics(self) -> None:
        """Attaches in the mirror what was attached here."""
        for folder, files in attached_metrics.by_folder(self._local).items():
            epoch = self._local.names.parse(folder)
            here, there = self._record.copies.get(-1 if epoch is None else epoch, ("", ""))
            if epoch is None or epoch not in self._epochs or not there:
                continue
            for source, metrics in attached_metrics.read(self._local, files, epoch, here).items():
                if self._attached.get((epoch, source)) != metrics:
                    try:
                        attached_metrics.attach(self._copies, epoch, metrics, source, there)
                    except (EpochNotFoundError, InvalidArgumentError) as error:
                        logging.warning("%s: metrics of %s are left out: %s", self.url, source, error)
                    self._attached[epoch, source] = metrics

    # -- on the other processes ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Does the tasks of the primary, until it says that there are no more."""
        done = 0
        while not self._ended:
            try:
                task, done = self._newest_task(done)
            except CoordinationTimeoutError:
                continue
            except CoordinationError as error:
                logging.warning("%s: this process takes no more part in mirroring: %s", self.url, error)
                return
            if "record" in task:
                adopt = functools.partial(self.adopt, task["record"])
                _threads.logged(f"{self.url}: this disk's record of it is old", adopt)
            if task.get("end"):
                return
            key, report = f"{self._prefix}/report/{done}/{self._coordinator.process}", self._report_of(task)
            tell = functools.partial(self._coordinator.put, key, report.to_wire())
            _threads.logged(f"{self.url}: the primary may not hear of this node", tell)

    def _newest_task(self, done: int) -> tuple[dict[str, Any], int]:
        """The newest task after those that are done, and its number."""
        found: dict[int, Any] = {}
        with contextlib.suppress(CoordinationTimeoutError):
            found[done + 1] = self._coordinator.get(f"{self._prefix}/task/{done + 1}", _LISTEN_SECS)
        found |= {int(number): task for number, task in self._coordinator.get_all(f"{self._prefix}/task").items()}
        newest = max(found, default=0)
        if newest <= done:
            raise CoordinationTimeoutError(f"there is no task after {done}")
        return found[newest], newest

    def _report_of(self, task: dict[str, Any]) -> ProcessReport:
        """Copies this process's nodes for a task."""
        try:
            self._copies.incarnation = task["incarnation"]
            copy = self._epoch_copy(task["epoch"], task["attempt"])
            return ProcessReport(nodes=tuple(NodeReport(entry, {}) for entry in copy.copy_nodes(self._hosted())))
        except Exception as error:
            return ProcessReport(error=kept(error))
