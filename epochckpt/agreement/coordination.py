"""Agreement between the processes of a job, over the key-value service of `jax.distributed`.

Guarantees:
- no call waits longer than its timeout. Calls of JAX's client that honour none run where they can be abandoned;
- there are no barriers, and a key is written once;
- a process that makes a common call alone (see `Calls`) raises in the end, and is in step again with the next one.

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
import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _threads, errors
from epochckpt._threads import Deadline

T = TypeVar("T")

_CALL_SECS = 30.0  # bound on calls that take a fraction of a millisecond
_LOOK_SECS = 15.0  # a gather looks for errors this often, also while the process that it waits for is silent


class Coordinator:
    """How the processes of a job agree, by values (JSON) under keys. Every error is a CoordinationError.

    This class is for a job of one process, which agrees with itself.
    """

    process: int = 0  # number of this process
    nodes: Sequence[str] = ()  # name of each process's node, as soon as that is known; for messages

    def __init__(self, id: int = 0):
        self.ids: tuple[int, ...] = (id,)  # JAX process index of every process that takes part, by number

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
        """A value that is there now; None if there is none, or if the service does not answer at once."""
        with contextlib.suppress(errors.CoordinationError):
            return self.get(key, 0.001)

    def agree(self, key: str, decide: Callable[[], T], timeout_secs: float) -> T:
        """The primary decides, and every process returns its answer (JSON), or raises its error."""
        if self.processes == 1:
            return decide()
        if not self.primary:
            return value_of(self.get(key, timeout_secs))
        return _answered(decide, lambda answer: self.put(key, answer))

    def gather_all(self, prefix: str, own: Any, timeout_secs: float) -> list[Any]:
        """On the primary: the values of all processes, in their order, of which the primary's is given.

        Raises the error of a process that has put one, or a CoordinationTimeoutError that names late processes.
        """
        if "error" in own:
            raise errors.from_wire(own["error"])
        found, missing = self.gather(prefix, set(range(1, self.processes)), Deadline(timeout_secs))
        for process, value in sorted(found.items()):
            if "error" in value:
                logging.error("%s: %s", self.named([process]), value["error"].get("message"))
                raise errors.from_wire(value["error"])
        if missing:
            raise errors.CoordinationTimeoutError(f"{self.named(missing)} did not answer within {timeout_secs:g} s")
        return [own, *(found[process] for process in range(1, self.processes))]

    def gather(self, prefix: str, missing: set[int], deadline: Deadline) -> tuple[dict[int, Any], set[int]]:
        """Waits until every process in `missing` has put `prefix/<process>`, or one of them an error, or the deadline.

        Returns the values by process, and the processes that are still missing.
        """
        found: dict[int, Any] = {}
        while missing:
            # A process at random: in whatever order they come, the number of rounds grows with the logarithm of theirs.
            awaited = random.choice(tuple(missing))
            with contextlib.suppress(errors.CoordinationTimeoutError):
                found[awaited] = self.get(f"{prefix}/{awaited}", max(min(deadline.left(), _LOOK_SECS), 0.001))
            present = self.get_all(prefix)
            found.update({int(k): present[k] for k in present if int(k) in missing})
            missing = missing - found.keys()
            if deadline.passed() or any(isinstance(v, dict) and "error" in v for v in found.values()):
                break
        return found, missing


def value_of(answer: Mapping[str, Any]) -> Any:
    """The value in an answer; raises the error if the answer is one."""
    if "error" in answer:
        raise errors.from_wire(answer["error"])
    return answer["value"]


def _answered(decide: Callable[[], T], publish: Callable[[dict[str, Any]], None]) -> T:
    """Publishes the result of `decide`, or its error, and returns or raises it."""
    try:
        value = decide()
    except BaseException as error:  # Ctrl-C, too
        publish({"error": errors.to_wire(error)})
        raise
    publish({"value": value})
    return value


def answered(act: Callable[[], Any], prefix: str, coordinator: Coordinator, again: bool = False) -> None:
    """On another process than the primary: puts what `act` returns (an object as JSON), or its error, for a gather.

    An error of `act` is raised. With `again` this replaces what was put there before.
    """
    key = f"{prefix}/{coordinator.process}"
    _answered(act, lambda answer: coordinator.put(key, answer.get("value", answer), again))


class JaxCoordinator(Coordinator):
    """Over the `client` of the service that `jax.distributed.initialize` started; `id` is this process's in `ids`."""

    def __init__(self, client: Any, ids: Sequence[int], id: int):
        self._client, self.process, self.ids = client, ids.index(id), tuple(ids)

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


_KEPT_ANSWERS = 128  # answers and votes that are kept for a process that is behind
_openings = RecentKeys(_KEPT_ANSWERS // 4)


def forget_opening(coordinator: Coordinator, *keys: str) -> None:
    """On the primary: forgets the keys of an opening, or of a closed manager, once some more have come."""
    if coordinator.primary and coordinator.processes > 1:
        _openings.add(coordinator, *keys)


class Calls:
    """The common calls of one manager: the primary acts, and the other processes take its answer.

    The key of an answer is `call/<save>/<call>/<count>`: the last common save (`after`), the call's text (`reload()`),
    and how often the call was made since that save. So a process that makes a common call alone is out of step for that
    call only, and the next common save starts all counts anew:

    - another process than the primary waits in vain, raises, and does not count the call;
    - the primary answers at once. Another process that makes this call next takes that answer, unless it has received
      a later one: the primary numbers all its answers, and calls are made in one order everywhere.
    """

    def __init__(self, coordinator: Coordinator, prefix: str, after: Callable[[], str]):
        self._coordinator, self._prefix, self._after = coordinator, prefix, after
        self._save, self._counts = "", collections.Counter[str]()
        self._serial = 0  # of the last answer that the primary has given, or that this process has received
        self._votes, self._voting = 0, ""
        self._kept = RecentKeys(_KEPT_ANSWERS)

    def answer(self, call: str, decide: Callable[[], Any], timeout_secs: float) -> Any:
        """The result of `decide` on the primary (JSON), or its error, on every process that makes this call."""
        if self._coordinator.processes == 1:
            return decide()
        if not self._coordinator.primary:
            return value_of(self._receive(call, timeout_secs)[1])
        base, key = self._next(call)
        return _answered(decide, lambda answer: self._publish(base, key, answer))

    def poll(self, call: str, tell: Callable[[], Any], decide: Callable[[list[Any]], Any], timeout_secs: float) -> Any:
        """The same, where the primary decides from what every process tells (an object as JSON)."""
        if not self._coordinator.primary:
            return value_of(self._receive(call, timeout_secs, tell)[1])
        told = f"{self._next(call)[1]}/told"

        def decided() -> Any:
            return decide(self._coordinator.gather_all(told, tell(), timeout_secs / 2))

        return self.answer(call, decided, timeout_secs)

    @contextlib.contextmanager
    def vote(self, call: str, candidates: Sequence[int], timeout_secs: float) -> Generator[tuple[list[int], str]]:
        """A vote on epochs, see `restore_vote`: gives the primary's candidates, and the prefix of this vote's keys.

        A vote that ends because a process did not come does not count as a call.
        """
        if self._coordinator.processes == 1:
            yield list(candidates), ""
            return
        key = ""
        if self._coordinator.primary:
            self._votes += 1
            base, key = self._next(call)
            answer = {"candidates": list(candidates), "vote": f"{self._prefix}/vote/{self._votes}"}
            self._publish(base, key, answer)
            self._kept.add(self._coordinator, answer["vote"])
        else:
            base, answer = self._receive(call, timeout_secs)
        self._voting = answer["vote"].rpartition("/")[2]
        try:
            yield answer["candidates"], answer["vote"]
        except errors.CoordinationTimeoutError:
            self._counts[base] -= 1
            if self._coordinator.primary:
                self._coordinator.forget(key)  # a process that comes now waits for the next vote
            raise
        finally:
            self._voting = ""

    def _next(self, call: str) -> tuple[str, str]:
        """The name that a call is counted under, and the key of its answer."""
        if self._save != self._after():
            self._save = self._after()
            self._counts.clear()
        base = f"{self._save or 'start'}/{call}{self._voting and f'-in-vote-{self._voting}'}"
        return base, f"{self._prefix}/call/{base}/{self._counts[base]}"

    def _publish(self, base: str, key: str, answer: dict[str, Any]) -> None:
        """On the primary: answers a call."""
        self._serial += 1
        self._counts[base] += 1
        self._kept.add(self._coordinator, key)
        self._coordinator.put(key, {**answer, "serial": self._serial})

    def _receive(self, call: str, timeout_secs: float, tell: Callable[[], Any] | None = None) -> tuple[str, Any]:
        """On the other processes: counts a call; returns the name that it is counted under, and its answer."""
        while True:
            base, key = self._next(call)
            if tell is not None:
                answered(tell, f"{key}/told", self._coordinator, again=True)
            try:
                answer = self._coordinator.get(key, timeout_secs)
            except errors.CoordinationTimeoutError:
                raise errors.CoordinationTimeoutError(
                    f"the primary, {self._coordinator.named([0])}, did not answer {call} within {timeout_secs:g} s: it "
                    "did not make this call, or does not answer at all. In a job of several processes all make it. "
                    "Nothing has changed here; status(epoch) looks at storage from this process alone"
                ) from None
            self._counts[base] += 1
            if answer["serial"] > self._serial:
                self._serial = answer["serial"]
                return base, answer
            # Else the primary made this call alone, before one that this process has received the answer of.


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


def connect(
    read_only: bool, primary_host: int | None = 0, active_processes: Collection[int] | None = None
) -> Coordinator:
    """The coordinator of this job, or of the part of it that Orbax's `MultiprocessingOptions` describe.

    Readers agree on nothing, nor do processes of which each is a primary (`primary_host` None).
    """
    if read_only:
        return Coordinator()
    processes, me = jax.process_count(), jax.process_index()
    if processes == 1 and len({d.process_index for d in jax.devices()}) > 1:
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
