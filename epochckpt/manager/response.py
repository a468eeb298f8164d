"""What is done in the background, as its caller sees it: Orbax's `AsyncResponse`."""

from __future__ import annotations

import abc
import contextlib
import contextvars
from collections.abc import Callable
from typing import Generic, TypeVar

import jax

from epochckpt import _threads, errors
from epochckpt._threads import Future

T = TypeVar("T")
S = TypeVar("S")


class Response(abc.ABC, Generic[T]):
    """What is done in the background: Orbax's `AsyncResponse`."""

    @abc.abstractmethod
    def _wait(self, timeout: float | None) -> T:
        """Waits for the result for so many seconds, or as long as it takes; raises what happened."""

    def _watch(self) -> T:
        """Waits for the result as long as it takes, and does nothing else."""
        return self._wait(None)

    def _told(self, failure: errors.SaveError | errors.RemovalError) -> None:
        """The caller knows of a failure."""

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result, and raises what happened; TimeoutError: it has not ended within `timeout` seconds."""
        try:
            return self._wait(timeout)
        except (errors.SaveError, errors.RemovalError) as failure:
            self._told(failure)
            raise

    def then(self, use: Callable[[T], S]) -> Response[S]:
        """The response that gives what `use` makes of this one's result."""
        return _Used(self, use)

    def on_complete(self, callback: Callable[[T], None]) -> None:
        """Calls `callback` with the result, in another thread, if it ends well."""

        def call() -> None:
            with contextlib.suppress(Exception):  # `result` raises it
                value = self._watch()
                _threads.logged("a callback of on_complete failed", lambda: callback(value))

        _threads.start(call)


class _Used(Response[S], Generic[T, S]):
    """Gives what `use` makes of the result of another response."""

    def __init__(self, first: Response[T], use: Callable[[T], S]):
        self._first = first
        self._use = use

    def _wait(self, timeout: float | None) -> S:
        return self._use(self._first._wait(timeout))

    def _watch(self) -> S:
        return self._use(self._first._watch())

    def _told(self, failure: errors.SaveError | errors.RemovalError) -> None:
        self._first._told(failure)


class FutureResponse(Response[T]):
    """Gives the result of a future."""

    def __init__(self, future: Future[T]):
        self._future = future

    def _wait(self, timeout: float | None) -> T:
        return self._future.result(timeout)


class FinishedByCaller(Response[T]):
    """Calls `finish`, once, in the thread that asks first for the result, when what is `after` has ended."""

    def __init__(self, finish: Callable[[], T], after: Future[T] | None):
        self._finish = finish
        self._after = after
        self._found = Future[T]()
        self._once = _threads.Once()

    def _wait(self, timeout: float | None) -> T:
        if self._after is not None and not self._after.wait(timeout):
            raise TimeoutError(f"no result within {timeout} s")
        if self._once.first():
            self._found.run(self._finish)
        return self._found.result(timeout)

    def _watch(self) -> T:
        return self._found.result()


def in_background(fn: Callable[[], T]) -> Future[T]:
    """Calls a function in another thread, in the context variables of this one, and with its 64-bit types and mesh."""
    surroundings = contextvars.copy_context()
    x64: bool = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    mesh = jax.sharding.get_mesh()

    def run() -> T:
        with jax.enable_x64(x64), contextlib.nullcontext() if mesh.empty else jax.set_mesh(mesh):
            return surroundings.run(fn)

    return _threads.start(run)
