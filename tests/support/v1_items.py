"""Checkpointables of a user's own, for tests of Orbax's v1 style: two with handlers, and one that saves itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable
from typing import Any

import jax


@dataclasses.dataclass
class Pair:
    number: int
    text: str


class Left(Pair):
    pass


class Right(Pair):
    pass


@dataclasses.dataclass
class Abstract:
    kind: type[Pair]


class PairHandler:
    """Writes JSON in the background."""

    kind: type[Pair] = Pair

    async def save(self, directory: Any, checkpointable: Pair) -> Awaitable[None]:
        content = json.dumps(dataclasses.asdict(checkpointable))

        async def write() -> None:
            folder = await directory.await_creation()
            if jax.process_index() == 0:
                (folder / "pair.json").write_text(content)

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Pair]:
        async def read() -> Pair:
            return self.kind(**json.loads((directory / "pair.json").read_text()))

        return read()

    async def metadata(self, directory: Any) -> Abstract:
        assert (directory / "pair.json").exists()
        return Abstract(self.kind)

    def is_handleable(self, checkpointable: Any) -> bool:
        return type(checkpointable) is self.kind

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return isinstance(abstract_checkpointable, Abstract) and abstract_checkpointable.kind is self.kind


class LeftHandler(PairHandler):
    kind = Left


class RightHandler(PairHandler):
    kind = Right


class Position:
    """Saves and loads itself."""

    def __init__(self, value: int):
        self.value = value

    async def save(self, directory: Any) -> Awaitable[None]:
        value = self.value

        async def write() -> None:
            ((await directory.await_creation()) / "position").write_text(str(value))

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        async def read() -> None:
            self.value = int((directory / "position").read_text())

        return read()
