"""The coordination service of `jax.distributed` in memory: the processes of a job are threads of one process."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from epochckpt.agreement import coordination
from epochckpt.errors import CoordinationError, CoordinationTimeoutError


class Service:
    """What `jax.distributed` is to a real job: keys with values, and somebody who can wait for them."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()


class InMemory(coordination.Coordinator):
    """One process's view of a service.

    Args:
        service: shared by the processes.
        process: which one this is.
        processes: how many there are.
    """

    def __init__(self, service: Service, process: int, processes: int):
        self._service, self.process, self.ids = service, process, tuple(range(processes))
        self.opened = 0
        self.unheard: tuple[str, ...] = ()

    def put(self, key: str, value: Any, again: bool = False) -> None:
        with self._service.changed:
            if key in self._service.values and not again:
                raise CoordinationError(f"ALREADY_EXISTS: {key}")
            self._service.values[key] = json.dumps(value)
            self._service.changed.notify_all()

    def get(self, key: str, timeout_secs: float) -> Any:
        late = CoordinationTimeoutError(f"no answer under {key} within {timeout_secs:g} s")
        if key.endswith(self.unheard):  # an empty tuple matches nothing
            raise late
        with self._service.changed:
            if not self._service.changed.wait_for(lambda: key in self._service.values, timeout_secs):
                raise late
            return json.loads(self._service.values[key])

    def get_all(self, prefix: str) -> Mapping[str, Any]:
        with self._service.changed:
            found = {k: v for k, v in self._service.values.items() if k.startswith(f"{prefix}/")}
        return {key.rpartition("/")[2]: json.loads(value) for key, value in found.items()}

    def next_opening(self, prefix: str) -> int:
        self.opened += 1
        return self.opened

    def forget(self, prefix: str) -> None:
        with self._service.changed:
            for key in [k for k in self._service.values if k == prefix or k.startswith(f"{prefix}/")]:
                del self._service.values[key]
