"""Agreement between the processes of a job, over the key-value service of `jax.distributed`.

Guarantees:
- no call waits longer than its timeout. Calls of JAX's client that honour none run where they can be abandoned;
- there are no barriers, and a key is written once, unless `again` is passed.

Values are put, got and gathered here, and nothing else: `collective` has how processes agree by them. Reports of saves
and of copies use these three directly: they arrive late, are collected in the background, and hold up no process.

The processes that take part are numbered here and nowhere else: the primary is number 0, the others follow in the order
of their JAX process indices. As a rule these numbers are those indices.
"""

import collections
import contextlib
import json
import random
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import orbax.checkpoint as ocp  # pyright: ignore[reportMissingTypeStubs]

from epochckpt import _threads, errors
from epochckpt._threads import Deadline

T = TypeVar("T")

_CALL_SECS = 30.0  # bound on calls that take a fraction of a millisecond
_LOOK_SECS = 15.0  # a gather looks for errors this often, also while the process that it waits for is silent
_openings_under = collections.Counter[str]()  # managers by group of processes, which count alike


class Coordinator:
    """How the processes of a job agree, by values (JSON) under keys. Every error is a CoordinationError.

    This class is for a job of one process, which agrees with itself.
    """

    process: int = 0  # number of this process
    nodes: Sequence[str] = ()  # name of each process's node, as soon as that is known; for messages

    def __init__(self, id: int = 0):
        self.ids: tuple[int, ...] = (id,)  # JAX process index of every process that takes part, by number

    def name_nodes(self, names: Sequence[str]) -> None:
        """Names the node of each process."""
        self.nodes = names

    def put(self, key: str, value: Any, again: bool = False) -> None:
        """Publishes a value under a new key; with `again` it may have a value, which this one replaces."""

    def get(self, key: str, timeout_secs: float) -> Any:
        """Waits for a value; CoordinationTimeoutError says that it did not come in time."""
        raise errors.CoordinationError(f"{key}: a single process has no other to wait for")

    def get_all(self, prefix: str) -> Mapping[str, Any]:
        """All values now under `prefix/`, by the rest of their key."""
        return {}

    def forget(self, prefix: str) -> None:
        """Deletes a key and everything under `prefix/`; failures are ignored, the keys only cost memory."""

    def next_opening(self, prefix: str) -> int:
        """The number of this opening under a prefix of keys. Every process that takes part gets the same number."""
        del prefix
        return 0  # a single process agrees by no keys

    @property
    def processes(self) -> int:
        return len(self.ids)

    def named(self, processes: Iterable[int]) -> str:
        """Some processes, for messages."""
        names = self.nodes or [f"process {index}" for index in self.ids]
        return ", ".join(names[process] for process in sorted(processes))

    @property
    def primary(self) -> bool:
        """Whether this process commits and deletes."""
        return self.process == 0

    def peek(self, key: str) -> Any:
        """The present value of a key; None if it has no value yet, or if the service does not answer at once."""
        with contextlib.suppress(errors.CoordinationError):
            return self.get(key, 0.001)

    def gather(self, prefix: str, missing: set[int], deadline: Deadline) -> tuple[dict[int, Any], set[int]]:
        """Waits until every process in `missing` has put `prefix/<process>`, or one of them an error, or the deadline.

        Returns the values by process, and the processes that are still missing.
        """
        answers: dict[int, Any] = {}
        while missing:
            # A process at random: in whatever order they come, the number of rounds grows with the logarithm of theirs.
            awaited = random.choice(tuple(missing))
            with contextlib.suppress(errors.CoordinationTimeoutError):
                answers[awaited] = self.get(f"{prefix}/{awaited}", max(min(deadline.left(), _LOOK_SECS), 0.001))
            present = self.get_all(prefix)
            answers.update({int(k): present[k] for k in present if int(k) in missing})
            missing = missing - answers.keys()
            if deadline.passed() or any(isinstance(v, dict) and "error" in v for v in answers.values()):
                break
        return answers, missing


class JaxCoordinator(Coordinator):
    """Over the `client` of the service that `jax.distributed.initialize` started; `id` is this process's in `ids`."""

    def __init__(self, client: Any, ids: Sequence[int], id: int):
        self._client = client
        self.process = ids.index(id)
        self.ids = tuple(ids)

    def put(self, key: str, value: Any, again: bool = False) -> None:
        text = json.dumps(value)
        options = {"allow_overwrite": True} if again else {}
        self._call(f"set {key}", lambda: self._client.key_value_set(key, text, **options))

    def get(self, key: str, timeout_secs: float) -> Any:
        millis = max(1, int(min(timeout_secs, 10**6) * 1000))
        text = self._call(f"give {key}", lambda: self._client.blocking_key_value_get(key, millis), timeout_secs)
        return json.loads(text)

    def get_all(self, prefix: str) -> Mapping[str, Any]:
        pairs = self._call(f"list {prefix}", lambda: self._client.key_value_dir_get(prefix + "/"))
        return _Decoded({key.rpartition("/")[2]: value for key, value in pairs})

    def forget(self, prefix: str) -> None:
        with contextlib.suppress(errors.CoordinationError):
            self._call(f"delete {prefix}", lambda: self._client.key_value_delete(prefix + "/"))

    def next_opening(self, prefix: str) -> int:
        _openings_under[prefix] += 1
        return _openings_under[prefix]

    def _call(self, what: str, fn: Callable[[], T], wait_secs: float | None = None) -> T:
        """Bounds a call that may wait, for a service that does not honour even its own deadline."""
        problem = f"the coordination service did not {what}"
        try:
            return _threads.start(fn).result((wait_secs or 0.0) + _CALL_SECS)
        except Exception as error:
            if isinstance(error, TimeoutError) or (wait_secs is not None and "DEADLINE_EXCEEDED" in str(error)):
                raise errors.CoordinationTimeoutError(f"{problem} within {wait_secs or _CALL_SECS:g} s") from None
            raise errors.CoordinationError(f"{problem}: {error}") from error


class _Decoded(Mapping[str, Any]):
    """Values as JSON, which are decoded when they are asked for: of many, a caller knows most already."""

    def __init__(self, texts: Mapping[str, str]):
        self._texts = texts

    def __getitem__(self, key: str) -> Any:
        return json.loads(self._texts[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


class RecentKeys:
    """Keys that the primary has published: of more than `limit` of them it forgets the oldest."""

    def __init__(self, limit: int):
        self._limit = limit
        self._kept: collections.deque[tuple[Coordinator, str]] = collections.deque()

    def add(self, coordinator: Coordinator, *keys: str) -> None:
        """Keeps some keys, or prefixes of keys, as the newest."""
        self._kept.extend((coordinator, key) for key in keys)
        while len(self._kept) > self._limit:
            owner, old = self._kept.popleft()
            owner.forget(old)


_openings = RecentKeys(32)


def forget_opening(coordinator: Coordinator, *keys: str) -> None:
    """On the primary: forgets the keys of an opening, or of a closed manager, once some more have come."""
    if coordinator.primary and coordinator.processes > 1:
        _openings.add(coordinator, *keys)


class Preemption:
    """JAX's preemption notice, asked for with numbers that grow by one.

    JAX announces a sync point, a number that every process will pass. A caller that asks with the steps of a resumed
    run, or that skips some, may never meet it. So questions are counted here, for all managers of a process together.
    A manager gives one answer per step: `save` and the trainer must not disagree. Once True, the answer stays True.
    """

    _asked = 0
    _heard = False
    _feeds: ClassVar[list[Callable[[], bool]]] = []

    def __init__(self) -> None:
        self._step: int | None = None
        self._answer = False

    def reached(self, step: int) -> bool:
        """Whether the notice has reached every process; all of them must ask for the same steps."""
        if Preemption._feeds:
            return Preemption._feeds[-1]()
        if step != self._step:
            self._step = step
            self._answer = self.ask()
        return self._answer

    @classmethod
    def ask(cls) -> bool:
        """Asks once more; all processes must ask equally often."""
        Preemption._asked += 1
        Preemption._heard = bool(ocp.utils.reached_preemption(Preemption._asked)) or Preemption._heard
        return Preemption._heard

    @classmethod
    @contextlib.contextmanager
    def fed_by(cls, answer: Callable[[], bool]) -> Generator[None]:
        """Managers take this answer inside the context instead of asking JAX: the caller asks for all of them."""
        cls._feeds.append(answer)
        try:
            yield
        finally:
            cls._feeds.remove(answer)


Connect = Callable[[bool, int | None, Collection[int] | None], Coordinator]
_other_ways: list[Connect] = []  # of `connecting_by`; the last one counts


@contextlib.contextmanager
def connecting_by(connect: Connect) -> Generator[None]:
    """During the block, `connect` gives the coordinators of this process, for the arguments of the function below.

    It is for jobs whose processes are not those of `jax.distributed`, such as processes that threads play in tests.
    """
    _other_ways.append(connect)
    try:
        yield
    finally:
        _other_ways.remove(connect)


def connect(
    read_only: bool, primary_host: int | None = 0, active_processes: Collection[int] | None = None
) -> Coordinator:
    """The coordinator of this job, or of the part of it that Orbax's `MultiprocessingOptions` describe.

    A reader gets a coordinator of its own, because readers agree on nothing. So does each process if all of them are
    primaries (`primary_host` None).
    """
    if _other_ways:
        return _other_ways[-1](read_only, primary_host, active_processes)
    if read_only:
        return Coordinator()
    processes = jax.process_count()  # pyright: ignore[reportUnknownMemberType]
    me = jax.process_index()  # pyright: ignore[reportUnknownMemberType]
    hosts: set[int] = {each.process_index for each in jax.devices()}  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if processes == 1 and len(hosts) > 1:
        problem = "one process controls devices of several (a Pathways single controller)"
        raise errors.UnsupportedError(f"{problem}; epochckpt does not support that yet")
    active = range(processes) if active_processes is None else sorted(active_processes)
    if not set(active) <= set(range(processes)) or me not in active:
        raise errors.InvalidArgumentError(
            f"multiprocessing_options: active_processes={list(active)}, and this is process {me} of {processes}; "
            "construct the manager on those processes only, and name only processes of the job"
        )
    if primary_host is None:
        return Coordinator(me)
    if primary_host not in active:
        raise errors.InvalidArgumentError(
            f"multiprocessing_options: primary_host={primary_host} takes no part, here are processes {list(active)}; "
            "name one of them, or None if each process has a directory of its own"
        )
    ids = [primary_host, *(id for id in active if id != primary_host)]
    if len(ids) == 1:
        return Coordinator(me)
    return JaxCoordinator(ocp.multihost.get_jax_distributed_client(), ids, me)
