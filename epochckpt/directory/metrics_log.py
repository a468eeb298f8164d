"""The metrics of deleted epochs, `_epochckpt/metrics.jsonl`: a line for each, written when the epoch is deleted.

On a file system the line is appended before the epoch goes out of sight, and is not flushed: a power cut may lose the
last lines, or tear one. What is no whole line counts for nothing. In an object store the change of the head that
deletes the epoch adds the line to the head. Some lines at a time then move to a part of the log: an object that never
changes, `_epochckpt/metrics-<n>.jsonl`, where n is the number of its first line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from absl import logging

from epochckpt._metrics import numbers
from epochckpt.errors import DamagedError, FormatError
from epochckpt.format import checksums, codec, paths
from epochckpt.format.codec import stored

if TYPE_CHECKING:
    from epochckpt.storage import Store

COLLECTED = 100  # lines that the head of an object store collects, before they move to a part
COLLECTED_BYTES = 2**14  # of the same
MAX_BYTES = 2**26  # of the file: what is deleted beyond that leaves no line
MAX_LINES = 500_000  # the same, of all parts
_MAX_METRICS_BYTES = 4096  # of a line


def _read_numbers(fields: codec.Fields, key: str) -> dict[str, float]:
    return numbers(codec.user_data(fields, key, dict))


_NUMBERS = codec.Codec(_read_numbers, lambda metrics: checksums.pack_json(dict(metrics), "metrics"))


@dataclasses.dataclass(frozen=True)
class Line:
    """An epoch that was deleted; or, with `back`, that the epochs after this one in lines above count no more."""

    epoch: int = stored("epoch", codec.integer(-1, 2**63))
    save_id: str = stored("attempt", codec.text(80), optional=True, default="")
    committed_ns: int = stored("committed_ns", codec.INTEGER, optional=True, default=0)
    # Its numbers, by `flat` names.
    metrics: Mapping[str, float] = stored("metrics", _NUMBERS, optional=True, default_factory=dict)
    back: bool = stored("back", codec.BOOLEAN, optional=True, default=False)
    # In the parts of an object store, from 1.
    number: int = stored("line", codec.INTEGER, optional=True, default=0)

    @classmethod
    def of(cls, epoch: int, save_id: str, committed_ns: int, metrics: Any) -> Self | None:
        """The line of an epoch; None if no metric is a number. Of very many metrics it has the first ones."""
        kept = dict[str, float]()
        size = 0
        for name, value in numbers(metrics).items():
            size += len(json.dumps(name)) + max(len(repr(value)), len('{"$float":"-inf"}')) + 2
            if size > _MAX_METRICS_BYTES:
                break
            kept[name] = value
        return cls(epoch=epoch, save_id=save_id, committed_ns=committed_ns, metrics=kept) if kept else None

    def to_bytes(self) -> bytes:
        """The line in the file."""
        return checksums.seal(codec.pack(self)) + b"\n"


def read(store: Store) -> list[Line]:
    """The whole lines of the file, in their order; none without a file."""
    try:
        data = store.read(paths.METRICS_LOG, limit_bytes=2 * MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except ValueError as error:
        raise FormatError(paths.METRICS_LOG, str(error)) from None
    return parse(data)


def read_parts(store: Store) -> list[Line]:
    """The whole lines of all parts on an object store, by their numbers. One listing, and one request for each part."""
    parts = store.find(paths.METRICS_PART_PREFIX, paths.HEAD.rpartition("/")[0])
    found = dict[int, Line]()

    def read_part(path: str) -> None:
        with suppress(FileNotFoundError):
            found.update({line.number: line for line in parse(store.read(path, limit_bytes=MAX_BYTES))})

    store.each(read_part, parts)
    return [line for _, line in sorted(found.items())]


def parse(data: bytes) -> list[Line]:
    """The whole lines of the content of the file, or of a part."""
    found = list[Line]()
    broken = 0
    for line in filter(None, data.split(b"\n")):
        try:
            checksums.check_seal(paths.METRICS_LOG, line)
            fields = codec.Fields(paths.METRICS_LOG, checksums.parse_sealed(paths.METRICS_LOG, line))
            found.append(codec.parse(Line, fields))
        except (DamagedError, FormatError):
            broken += 1
    if broken:
        logging.warning("%s: %d lines are torn or damaged, and left out", paths.METRICS_LOG, broken)
    return found


def deleted(lines: Iterable[Line]) -> dict[int, Line]:
    """What the lines say of each deleted epoch, ascending: the last line of its number counts."""
    found = dict[int, Line]()
    for line in lines:
        if line.back:
            found = {epoch: known for epoch, known in found.items() if epoch <= line.epoch}
        else:
            found[line.epoch] = line
    return dict(sorted(found.items()))
