"""Metrics that another job attached to a committed epoch: one small file per source beside the commit record.

The commit record never changes. A file names the attempt that it is about, so that metrics of an epoch that was
replaced, or quarantined and saved anew, are not taken for those of the new one. Its bytes are sealed as every record's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt.commit.protocol import Commits
from epochckpt.errors import (
    AccessError,
    DamagedError,
    EpochCheckpointError,
    EpochDeletedError,
    EpochNotFoundError,
    FormatError,
    InvalidArgumentError,
    StorageError,
    UnsupportedError,
    unreadable,
)
from epochckpt.format import EpochRecord, checksums
from epochckpt.format import paths as layout

MAX_BYTES = 2**20  # of one source's file: they are read again and again

Sources = Mapping[str, Mapping[str, Any]]  # metrics by source


def are_needed(options: ocp.CheckpointManagerOptions) -> bool:
    """Whether metrics decide which epochs are kept, or which is the best."""
    return options.best_fn is not None or options.preservation_policy is not None


@dataclasses.dataclass(frozen=True)
class _File:
    """One file: whose metrics of which attempt."""

    epoch: int
    attempt: str
    source: str
    metrics: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        fields = {"format": layout.FORMAT, "version": layout.VERSION, "record": "metrics", "written_ns": time.time_ns()}
        what = {"epoch": self.epoch, "attempt": self.attempt, "source": self.source}
        return checksums.seal({**fields, **what, "metrics": checksums.pack_json(dict(self.metrics), "metrics")})


def attach(commits: Commits, epoch: int, metrics: Mapping[str, Any], source: str, attempt: str | None = None) -> None:
    """Attaches metrics to a committed epoch, durably; see `epochckpt.attach_metrics`."""
    if not layout.is_name(source):
        raise InvalidArgumentError(
            f"source {source!r} is not usable: expected a letter or digit followed by letters, digits, '.', '_' or "
            f"'-', at most {layout.MAX_NAME}"
        )
    if not isinstance(metrics, Mapping):
        raise InvalidArgumentError(f"metrics are an object of names and numbers, got a {type(metrics).__name__}")
    record = commits.read_record(epoch)
    if record.stock:
        raise UnsupportedError(
            f"{commits.store.root}: epoch {epoch} was written by stock Orbax; metrics are attached to epochs of "
            "epochckpt only"
        )
    if attempt is not None and record.attempt != attempt:
        raise EpochDeletedError(epoch, commits.store.root, f"these metrics are about attempt {attempt}")
    _check_names(commits, record, metrics, source)
    data = _File(epoch, record.attempt, source, metrics).to_bytes()
    if len(data) > MAX_BYTES:
        raise InvalidArgumentError(f"metrics of {len(data)} bytes; at most {MAX_BYTES} can be attached")
    path = layout.join(commits.folder(epoch), layout.metrics_file(source))
    try:
        draft = f"{path}.{layout.new_id()}{layout.TMP_SUFFIX}"
        commits.store.put(path, data, draft=draft, replace=True)
    except FileNotFoundError as error:
        raise EpochDeletedError(epoch, commits.store.root, str(error)) from error
    except PermissionError as error:
        raise AccessError(f"{path}: {error}; attaching metrics needs write access to the epoch's folder") from error
    if not _is_still(commits, record):  # what was written is of no use to anybody
        with suppress(OSError, EpochCheckpointError):
            if _parse(path, commits.store.read(path, limit_bytes=MAX_BYTES)).attempt == record.attempt:
                commits.store.remove(path)
        raise EpochDeletedError(epoch, commits.store.root, "while metrics were being attached to it")


def _is_still(commits: Commits, record: EpochRecord) -> bool:
    """Whether an epoch is still the one that was looked at; that it cannot be said just now is an error."""
    try:
        return commits.read_head(record.epoch).attempt == record.attempt
    except (EpochNotFoundError, DamagedError, FormatError):
        return False


def _check_names(commits: Commits, record: EpochRecord, metrics: Mapping[str, Any], source: str) -> None:
    """Refuses a metric of a name that the epoch has already, from somebody else."""
    if record.metrics is not None and not isinstance(record.metrics, Mapping):
        raise InvalidArgumentError(
            f"epoch {record.epoch} was saved with metrics that are no object of names: none can be attached to them"
        )
    others = [(who, found) for who, found in of_epoch(commits, record).items() if who != source]
    owners = {name: f"source {who!r}" for who, found in others for name in found}
    owners |= dict.fromkeys(record.metrics or {}, "the save itself")
    taken = sorted(owners.keys() & metrics.keys())
    if taken:
        raise InvalidArgumentError(
            f"epoch {record.epoch} has the metric {taken[0]!r} already, from {owners[taken[0]]}: choose another name"
        )


def of_epoch(commits: Commits, record: EpochRecord) -> dict[str, Mapping[str, Any]]:
    """The metrics that were attached to an epoch, by source in the order of their names.

    What cannot be used is logged and left out. Nothing is attached to epochs of stock Orbax.
    """
    if record.stock:
        return {}
    paths = commits.store.find(layout.METRICS_PREFIX, commits.folder(record.epoch))
    return read(commits, paths, record.epoch, record.attempt)


def of_epochs(commits: Commits, epochs: Iterable[int], attempt_of: Callable[[int], str | None]) -> dict[int, Any]:
    """The metrics that were attached to some epochs, merged, by epoch; an epoch without any is left out.

    One listing: cheap where nothing is attached.

    Args:
        commits: the directory.
        epochs: their numbers.
        attempt_of: gives the attempt of one of them; called only where something is attached.
    """
    files = by_folder(commits)
    found: dict[int, Any] = {}

    def look(epoch: int) -> None:
        attempt = attempt_of(epoch)
        if attempt and (sources := read(commits, files[commits.folder(epoch)], epoch, attempt)):
            found[epoch] = merge(None, sources)

    commits.store.each(look, [epoch for epoch in epochs if files.get(commits.folder(epoch))])
    return found


def by_folder(commits: Commits) -> dict[str, list[str]]:
    """Paths of all files of attached metrics, by the folder that they lie in."""
    found: dict[str, list[str]] = {}
    for path in commits.store.find(layout.METRICS_PREFIX):
        found.setdefault(path.rpartition("/")[0], []).append(path)
    return found


def read(commits: Commits, paths: Iterable[str], epoch: int, attempt: str) -> dict[str, Mapping[str, Any]]:
    """The metrics of some files, by source; what is about another attempt, damaged or not permitted, is left out.

    Args:
        commits: the directory.
        paths: the files.
        epoch: the epoch that they lie beside.
        attempt: its attempt.

    Raises:
        StorageError: storage does not give one of them.
    """
    out: dict[str, Mapping[str, Any]] = {}
    for path in sorted(paths):
        source = layout.parse_metrics_file(path.rpartition("/")[2])
        if source is None:  # being written, or another's
            continue
        try:
            file = _parse(path, commits.store.read(path, limit_bytes=MAX_BYTES))
        except FileNotFoundError:
            continue
        except (EpochCheckpointError, ValueError, OSError) as error:
            shown = unreadable(path, error) if isinstance(error, OSError) else error
            if isinstance(shown, StorageError):
                raise shown from error
            logging.warning("%s: attached metrics are left out: %s", commits.store.root, shown)
            continue
        if (file.epoch, file.attempt, file.source) == (epoch, attempt, source):
            out[source] = file.metrics
    return out


def _parse(path: str, data: bytes) -> _File:
    record = checksums.unseal(path, data)
    head = tuple(record.get(name) for name in ("format", "version", "record"))
    if head != (layout.FORMAT, layout.VERSION, "metrics"):
        raise FormatError(path, "is not a record of attached metrics of this version")
    epoch, attempt, source = record.get("epoch"), record.get("attempt"), record.get("source")
    metrics = record.get("metrics")
    if type(epoch) is not int or not isinstance(attempt, str) or not isinstance(source, str):
        raise FormatError(path, "does not say which epoch, attempt and source it is about")
    if not isinstance(metrics, dict):
        raise FormatError(path, "metrics: expected an object")
    try:
        found = checksums.unpack_json(metrics)
        checksums.pack_json(found, "metrics")  # else it could not be told to the other processes
    except RecursionError:
        raise FormatError(path, "metrics are nested too deeply") from None
    except InvalidArgumentError as error:
        raise FormatError(path, str(error)) from None
    if not isinstance(found, dict):
        raise FormatError(path, "metrics: expected an object")
    return _File(epoch, attempt, source, found)


def merge(own: Any, attached: Sources) -> Any:
    """All metrics of an epoch: those it was saved with, and those that were attached; its own come first.

    Args:
        own: those it was saved with; None without.
        attached: by source; of two sources that attached one name at the same moment the first by name counts.

    Returns:
        An object of metrics by name, or what the epoch was saved with if nothing is attached.
    """
    if not attached or not (own is None or isinstance(own, Mapping)):
        return own
    out: dict[str, Any] = dict(own or {})
    for source in sorted(attached):
        for name, value in attached[source].items():
            out.setdefault(name, value)
    return out
