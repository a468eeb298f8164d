"""A run in a bucket whose server refuses, loses, cuts and delays requests at random, and a model of what must be.

`FaultyRun.step` does something: a save, a replacement, a delete, a rollback, a kill in the middle of one … What is
acknowledged must stay; what failed must have left no trace; and nothing may fail because of faults that pass.
"""

import collections
import functools
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

import epochckpt as ec
from epochckpt import _patience
from epochckpt.errors import DamagedError, EpochCheckpointError, FencedError, FormatError, RemovalError, UncertainError
from epochckpt.inspection.gc import collect
from epochckpt.storage import ObjectStore, Store, opening_through
from tests.support.object_servers import Bucket, Fault, Proxy, Request

BOUND_SECS = 90.0  # of one step: far above what it needs
CHUNK = 5 << 20  # the least that S3 takes
SILENT_SECS = 4.0
OPEN_TRIES = 20
_SECS = {"save_timeout_secs": 60.0, "open_timeout_secs": 60.0, "restore_timeout_secs": 60.0}
IN_PARTS = ec.StorageOptions(**_SECS, block_bytes=4096, part_bytes=16384)
STREAMED = ec.StorageOptions(**_SECS)
Found = dict[int, int]  # epochs, and which save made each

PASSING: dict[str, tuple[float, Callable[[random.Random], Fault]]] = {
    "latency": (10, lambda rng: Fault(delay_secs=rng.uniform(0.001, 0.02))),
    "429": (8, lambda rng: Fault(status=429)),
    "500": (8, lambda rng: Fault(status=500)),
    "503": (10, lambda rng: Fault(status=503)),
    "408": (4, lambda rng: Fault(status=408)),
    "reset": (12, lambda rng: Fault(reset=True)),
    "lost": (25, lambda rng: Fault(lost=True)),
    "late": (8, lambda rng: Fault(late=functools.partial(threading.Event().wait, rng.uniform(0, 0.1)))),
    "slow": (6, lambda rng: Fault(slow_secs=rng.uniform(0.001, 0.02))),
    "cut": (12, lambda rng: Fault(cut=rng.randrange(40))),
    "silent": (0.2, lambda rng: Fault(delay_secs=1.5 * SILENT_SECS)),
}
"""Faults that pass when the request is repeated, by name, with how often they come."""

HARD = {"400": 400, "501": 501}
"""Refusals that are answers: what was asked fails, and says so."""

_NO_FAILED_SAVE = (UncertainError, RemovalError)  # the latter tells of what was deleted after a commit


class FaultyRun:
    """One directory, from its first run on.

    Args:
        bucket: where it lies.
        seed: of the choices.
        rate: of all requests, how many meet a fault.
        hard_rate: the same for refusals that are not repeated.
    """

    def __init__(self, bucket: Bucket, seed: int, rate: float = 0.25, hard_rate: float = 0.002):
        self._bucket, self._rng, self._fault_rng = bucket, random.Random(seed), random.Random(seed + 1)
        self._rate, self._hard_rate, self._lock = rate, hard_rate, threading.Lock()
        self.faults: collections.Counter[str] = collections.Counter()
        self.steps: collections.Counter[str] = collections.Counter()
        self.violations: list[str] = []
        self.url = bucket.new_url()
        self.model: Found = {}
        self.metrics: dict[int, dict[str, float]] = {}  # attached, by save
        self._saves = 0
        self._hard = 0
        self._dies_at = -1  # requests from now on
        self._keep: int | None = None
        self._proxies: list[Proxy] = []
        self._what = ""
        (found,) = ((n, v) for n, v in bucket.environment.items() if v.startswith(bucket.proxy.url))
        self._endpoint, self._at = found[0], found[1].removeprefix(bucket.proxy.url)
        self._open()

    # -- the way to the store

    def _decide(self, proxy: Proxy, request: Request) -> Fault | None:
        rng = self._fault_rng
        with self._lock:
            if proxy is not self._proxies[-1] or self._dies_at == 0:
                return Fault(status=400)  # of a run that is dead
            self._dies_at -= self._dies_at > 0
            if rng.random() < self._hard_rate:
                return self._refuse(*rng.choice(list(HARD.items())))
            if request.kind == "LIST" and rng.random() < 5 * self._hard_rate:
                return self._refuse("403", 403)
            if rng.random() >= self._rate:
                return None
            (name,) = rng.choices(list(PASSING), [weight for weight, _ in PASSING.values()])
            if name == "429" and self._bucket.scheme == "s3" and {"if-match", "if-none-match"} & request.headers.keys():
                self.faults["409"] += 1
                return Fault(status=409)
            self.faults[name] += 1
            return PASSING[name][1](rng)

    def _refuse(self, name: str, status: int) -> Fault:
        self.faults[name] += 1
        self._hard += 1
        return Fault(status=status)

    @contextmanager
    def _quietly(self) -> Any:
        """What is opened in the block meets no faults."""
        before, os.environ[self._endpoint] = os.environ[self._endpoint], self._bucket.proxy.url + self._at
        try:
            yield
        finally:
            os.environ[self._endpoint] = before

    def _connect(self) -> None:
        """A new way, which a new process has."""
        proxy = Proxy(self._bucket.proxy.upstream)
        proxy.decide = lambda request: self._decide(proxy, request)
        with self._lock:
            self._proxies.append(proxy)
            self._dies_at = -1
        os.environ[self._endpoint] = proxy.url + self._at

    def _open(self) -> None:
        """A new process opens the directory; it may need several tries, because of refusals."""
        self._connect()
        self._keep = self._rng.choice([None, 2, 4])
        node = self._rng.choice([None, None, ["a", "b"]])
        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep)
        self._storage = self._rng.choice([IN_PARTS, IN_PARTS, STREAMED])
        self._manager = self._patiently(
            lambda: ec.CheckpointManager(self.url, options=options, storage=self._storage, node=node)
        )
        self._compare("opened", list(self._manager.all_steps()), sorted(self.model))

    def _patiently(self, call: Callable[[], Any]) -> Any:
        for number in range(OPEN_TRIES):
            hard = self._hard
            try:
                return call()
            except Exception as error:
                self._judge(error, hard)
                if number == OPEN_TRIES - 1:
                    raise
        raise AssertionError

    # -- judging

    def _say(self, text: str) -> None:
        self.violations.append(f"step {self.steps.total()}, {self._what}: {text}"[:700])

    def _compare(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            self._say(f"{what}: expected {expected}, found {found}")

    def _judge(self, error: Exception, hard: int) -> None:
        """An error is ours, has a reason, and calls nothing damaged that is not."""
        kinds = (DamagedError, FormatError, FencedError)
        if not isinstance(error, EpochCheckpointError) or isinstance(error, kinds):
            self._say(f"raised {type(error).__name__}: {error}")
        elif self._hard == hard and self._dies_at != 0 and not self._is_late(error):
            self._say(f"failed by faults that pass: {type(error).__name__}: {error}")

    def _is_late(self, error: Exception) -> bool:
        """Whether it may tell of a fault of an earlier step: files of deleted epochs are removed after the step."""
        return isinstance(error, RemovalError) and self._hard > 0

    def look(self) -> Found:
        """What another process finds, undisturbed: every epoch is whole."""
        options = ocp.CheckpointManagerOptions(read_only=True)
        with self._quietly(), ec.CheckpointManager(self.url, options=options, storage=STREAMED) as manager:
            found = {}
            for epoch in manager.all_steps():
                found[epoch] = self._read(manager, epoch)
                attached = self.metrics.get(found[epoch])
                if attached is not None:
                    self._compare(f"metrics of {epoch}", manager.metrics(epoch), attached)
            self._compare("damaged", manager.damaged_epochs(), [])
            return found

    def _read(self, manager: ec.CheckpointManager, epoch: int) -> int:
        tree = manager.restore(epoch)
        if not (tree["w"] == tree["tag"]).all():
            self._say(f"epoch {epoch} is a mixture")
        return int(tree["tag"])

    def _save_id(self, call: Callable[[], object], after: Found, new: Found | None = None) -> None:
        """Calls what makes the directory `after`; `new`: the epoch that it saves, which retention may delete."""
        before, hard, began, error = self.model, self._hard, time.monotonic(), None
        try:
            call()
        except Exception as caught:
            error = caught
            self._judge(error, hard)
        if (took := time.monotonic() - began) > BOUND_SECS:
            self._say(f"took {took:.0f} s")
        if error is None and self._hard == hard and self._dies_at != 0:
            self.model = after
            return
        self._proxies[-1].settle(BOUND_SECS)  # what arrives late has arrived
        found = self.look()
        # Retention may have deleted less than it should.
        done = found == after or (new is not None and after.items() <= found.items() <= {**before, **new}.items())
        if not done and (found != before or error is None):
            self._say(f"{error!r}: before {before}, after {after}, found {found}")
        died = self._dies_at == 0
        listed = new is not None and new.items() <= found.items()
        if listed and error is not None and not died and not isinstance(error, _NO_FAILED_SAVE):
            self._say(f"a save that failed is listed: {error!r}")
        self.model = found
        if died:
            self._open()
            return
        with self._lock:  # a kill is not for what follows
            self._dies_at = -1
        self._patiently(self._manager.reload)
        self._compare("reloaded", list(self._manager.all_steps()), sorted(self.model))

    # -- steps

    def _tree(self, tag: int) -> Any:
        size = 10_000  # of int32, in three files
        if self._storage is STREAMED and self._rng.random() < 0.1:
            size = CHUNK // 4 + 1000  # in one file, uploaded in two parts
        return ocp.args.StandardSave({"w": np.full(size, tag, np.int32), "tag": tag})

    def _save(self, epoch: int) -> None:
        self._saves += 1
        tag = self._saves
        after = {**self.model, epoch: tag}
        if self._keep:
            after = {**dict(sorted(after.items())[-self._keep :]), epoch: tag}  # never what was saved just now
        tree = self._tree(tag)

        def save() -> None:
            assert self._manager.save(epoch, args=tree, force=True)
            self._manager.wait_until_finished()

        self._save_id(save, after, {epoch: tag})

    def save_next(self) -> None:
        self._save(max(self.model, default=-1) + 1)

    def replace(self) -> None:
        if self.model:
            epoch = self._any()
            hard = self._hard
            try:
                self._manager.allow_overwrite(epoch)
            except Exception as error:
                self._judge(error, hard)
                return
            self._save(epoch)

    def delete(self) -> None:
        if len(self.model) > 1:
            epoch = self._any()
            after = {e: tag for e, tag in self.model.items() if e != epoch}
            self._save_id(lambda: self._manager.delete(epoch), after)

    def roll_back(self) -> None:
        if len(self.model) > 1:
            epoch = self._any()
            after = {e: tag for e, tag in self.model.items() if e <= epoch}
            self._save_id(lambda: self._manager.rollback_to(epoch), after)

    def attach(self) -> None:
        if self.model:
            epoch, value = self._any(), self._rng.random()
            hard = self._hard
            try:
                ec.attach_metrics(self.url, epoch, {"accuracy": value}, "evaluator")
                self.metrics[self.model[epoch]] = {"accuracy": value}
            except Exception as error:
                self._judge(error, hard)
                self.metrics.pop(self.model[epoch], None)  # it may be either

    def restore(self) -> None:
        if self.model:
            epoch = self._any()
            hard = self._hard
            try:
                self._compare(f"restored {epoch}", self._read(self._manager, epoch), self.model[epoch])
                newest = int(self._manager.restore(None)["tag"])
                self._compare("restored the newest", newest, self.model[max(self.model)])
            except Exception as error:
                self._judge(error, hard)
            self._compare("damaged", self._manager.damaged_epochs(), [])

    def verify(self) -> None:
        if self.model:
            epoch, hard = self._any(), self._hard
            try:
                if not (found := self._manager.verify(epoch)).ok and self._hard == hard:
                    self._say(f"verify: {found}")
            except Exception as error:
                self._judge(error, hard)

    def reopen(self) -> None:
        hard = self._hard
        try:
            self._manager.close()
        except Exception as error:
            self._judge(error, hard)
        self._open()

    def collect(self) -> None:
        if not self.model:
            return
        hard = self._hard
        try:
            collect(self.url, delete=True, storage=STREAMED)
        except Exception as error:
            self._judge(error, hard)

    def look_beside(self) -> None:
        self._compare("another process finds", self.look(), self.model)

    def kill(self) -> None:
        """The process ends at some request of a step."""
        with self._lock:
            self._dies_at = self._rng.randrange(1, 14)
        victims = [self.save_next, self.save_next, self.replace, self.delete, self.roll_back]
        self._rng.choice(victims)()
        if self._dies_at != -1:  # the step ended before, or did nothing: it is killed all the same, without a word
            self._open()

    def _any(self) -> int:
        return self._rng.choice(sorted(self.model))

    def step(self) -> None:
        steps = {
            self.save_next: 10, self.replace: 3, self.delete: 3, self.roll_back: 2, self.attach: 2, self.restore: 4,
            self.verify: 1, self.reopen: 2, self.collect: 1, self.look_beside: 1, self.kill: 3,
        }  # fmt: skip
        (chosen,) = self._rng.choices(list(steps), list(steps.values()))
        self._what = chosen.__name__
        self.steps[self._what] += 1
        chosen()

    def end(self) -> None:
        """Ends the last run, and looks at everything once more."""
        self._what = "end"
        with suppress(EpochCheckpointError):
            self._manager.close()
        self._compare("in the end", self.look(), self.model)
        for proxy in self._proxies:
            proxy.settle(BOUND_SECS)
            proxy.close()
        os.environ[self._endpoint] = self._bucket.proxy.url + self._at


def run(bucket: Bucket, seed: int, faults: int, retries: int = 12) -> FaultyRun:
    """Steps until so many faults were met. The pauses before retries are short."""

    def in_small_chunks(store: Store) -> Store:
        return ObjectStore(store.address, chunk_bytes=CHUNK)

    pauses = (0.001,) * retries
    patience = _patience.use(request_pauses_secs=pauses, request_silent_secs=SILENT_SECS)
    with patience, opening_through(in_small_chunks):
        found = FaultyRun(bucket, seed)
        try:
            while found.faults.total() < faults and len(found.violations) < 20:
                found.step()
        finally:
            found.end()
    return found
