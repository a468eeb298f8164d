"""Metrics that another job attached to a committed epoch: one small file per source beside the commit record.

The commit record never changes. A file names the attempt that it is about, so that metrics of an epoch that was
replaced, or quarantined and saved anew, do not count for the new one. Its bytes are sealed as those of every record.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from absl import logging

from epochckpt import errors
from epochckpt.format import EpochRecord, checksums, codec, parsing, paths
from epochckpt.format.codec import stored

if TYPE_CHECKING:
    from epochckpt._lazy import ocp
    from epochckpt.directory.protocol import Commits
    from epochckpt.storage import Store

MAX_BYTES = 2**20  # of one source's file: they are read again and again
MAX_HEAD_BYTES = 2**14  # of the same on object stores, whose head has the metrics of all epochs


def are_needed(options: ocp.CheckpointManagerOptions) -> bool:
    """Whether metrics decide which epochs are kept, or which is the best."""
    return options.best_fn is not None or options.preservation_policy is not None


def _read_metrics(fields: codec.Fields, key: str) -> dict[str, Any]:
    metrics = codec.user_data(fields, key, dict)
    try:
        checksums.pack_json(metrics, key)  # the other processes get it as JSON
    except errors.InvalidArgumentError as error:
        raise errors.FormatError(fields.path, str(error)) from None
    return metrics


METRICS = codec.Codec(_read_metrics, lambda metrics: checksums.pack_json(dict(metrics), "metrics"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    """The metrics that one source gives for one attempt."""

    written_ns: int = stored("written_ns", codec.INTEGER)  # by the wall clock
    epoch: int = stored("epoch", codec.INTEGER)
    attempt: str = stored("attempt", codec.text())
    source: str = stored("source", codec.text())
    metrics: Mapping[str, Any] = stored("metrics", METRICS)


def attach(commits: Commits, epoch: int, metrics: Mapping[str, Any], source: str, attempt: str | None = None) -> None:
    """Attaches metrics to a committed epoch, durably; see `epochckpt.attach_metrics`."""
    if not paths.is_name(source):
        raise errors.InvalidArgumentError(
            f"source {source!r} is not usable: expected a letter or digit followed by letters, digits, '.', '_' or "
            f"'-', at most {paths.MAX_NAME}"
        )
    if not isinstance(metrics, Mapping):
        raise errors.InvalidArgumentError(f"metrics are an object of names and numbers, got a {type(metrics).__name__}")
    record = commits.read_record(epoch)
    if record.stock:
        problem = f"{commits.store.root}: checkpoint {epoch} was written by stock Orbax"
        raise errors.UnsupportedError(f"{problem}; metrics are attached to epochs of epochckpt only")
    if attempt is not None and record.attempt != attempt:
        raise errors.EpochDeletedError(epoch, commits.store.root, f"these metrics are about attempt {attempt}")
    _check_names(commits, record, metrics, source)
    file = _File(written_ns=time.time_ns(), epoch=epoch, attempt=record.attempt, source=source, metrics=metrics)
    data = codec.seal("metrics", file)
    in_head = commits.attached() is not None
    limit = MAX_HEAD_BYTES if in_head else MAX_BYTES
    if len(data) > limit:
        raise errors.InvalidArgumentError(f"metrics of {len(data)} bytes; at most {limit} can be attached")
    if in_head and not commits.attach(epoch, record.attempt, source, dict(metrics)):
        raise errors.EpochDeletedError(epoch, commits.store.root, "while metrics were being attached to it")
    path = paths.join(commits.folder(epoch), paths.metrics_file(source))
    try:
        draft = f"{path}.{paths.new_id()}{paths.TMP_SUFFIX}"
        commits.store.put(path, data, draft=draft, replace=True)
    except FileNotFoundError as error:
        raise errors.EpochDeletedError(epoch, commits.store.root, str(error)) from error
    except PermissionError as error:
        raise errors.AccessError(f"{path}: {error}; metrics need write access to the epoch's folder") from error
    # The epoch may have been deleted or replaced during the write: then the file is about no epoch any more.
    if commits.read_attempt(epoch) != record.attempt:
        with suppress(OSError, errors.EpochCheckpointError):
            file = parsing.read_record(commits.store, path, _parse, limit_bytes=MAX_BYTES)
            if file is not None and file.attempt == record.attempt:
                commits.store.remove(path)
        raise errors.EpochDeletedError(epoch, commits.store.root, "while metrics were being attached to it")


def _check_names(commits: Commits, record: EpochRecord, metrics: Mapping[str, Any], source: str) -> None:
    """Refuses a metric of a name that the epoch has already from the save or from another source."""
    if record.metrics is not None and not isinstance(record.metrics, Mapping):
        problem = f"checkpoint {record.epoch} was saved with metrics that are no object of names"
        raise errors.InvalidArgumentError(f"{problem}: none can be attached to them")
    attached = of_epoch(commits, record)
    owners = {name: f"source {other!r}" for other, found in attached.items() if other != source for name in found}
    owners |= dict.fromkeys(record.metrics or {}, "the save itself")
    taken = sorted(owners.keys() & metrics.keys())
    if taken:
        problem = f"checkpoint {record.epoch} has the metric {taken[0]!r} already, from {owners[taken[0]]}"
        raise errors.InvalidArgumentError(f"{problem}: choose another name")


def of_epoch(commits: Commits, record: EpochRecord) -> dict[str, Mapping[str, Any]]:
    """The metrics that were attached to an epoch, by source, as `read` gives them; none for steps of stock Orbax."""
    return {} if record.stock else of_attempt(commits, commits.folder(record.epoch), record.epoch, record.attempt)


def of_attempt(commits: Commits, folder: str, epoch: int, attempt: str) -> dict[str, Mapping[str, Any]]:
    """The metrics that were attached to an attempt, which is the epoch in a folder, by source."""
    known = commits.attached()
    if known is not None:
        about, found = known.get(epoch, ("", {}))
        return dict(found) if about == attempt else {}
    return in_folder(commits, folder, epoch, attempt)


def in_folder(commits: Commits, folder: str, epoch: int, attempt: str) -> dict[str, Mapping[str, Any]]:
    """The same from the files in a folder; on object stores those are copies."""
    return read(commits, commits.store.find(paths.METRICS_PREFIX, folder), epoch, attempt)


def of_epochs(commits: Commits, epochs: Iterable[int], attempt_of: Callable[[int], str | None]) -> dict[int, Any]:
    """The metrics that were attached to some epochs, merged, by epoch; an epoch without any is left out.

    It costs one listing, and for each epoch with attached metrics a call of `attempt_of`, which gives its attempt id.
    """
    known = commits.attached()
    if known is not None:
        return {epoch: merge(None, known[epoch][1]) for epoch in epochs if epoch in known}
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
    for path in commits.store.find(paths.METRICS_PREFIX):
        found.setdefault(path.rpartition("/")[0], []).append(path)
    return found


def read(commits: Commits, files: Iterable[str], epoch: int, attempt: str) -> dict[str, Mapping[str, Any]]:
    """The metrics in some files beside an epoch, by source in the order of their names.

    Files that are damaged, not permitted, or about another attempt are left out; a StorageError is raised.
    """
    out: dict[str, Mapping[str, Any]] = {}
    for path in sorted(files):
        source = paths.parse_metrics_file(path.rpartition("/")[2])
        if source is None:  # being written, or another's
            continue
        try:
            file = parsing.read_record(commits.store, path, _parse, limit_bytes=MAX_BYTES)
        except errors.StorageError:
            raise
        except errors.EpochCheckpointError as error:
            logging.warning("%s: attached metrics are left out: %s", commits.store.root, error)
            continue
        if file is not None and (file.epoch, file.attempt, file.source) == (epoch, attempt, source):
            out[source] = file.metrics
    return out


def _parse(path: str, data: bytes) -> _File:
    return codec.parse(_File, parsing.open_record(path, data, "metrics"))


def attempt_of(store: Store, path: str) -> str | None:
    """The attempt that a file is about; None if there is no such file, or it cannot be used."""
    try:
        file = parsing.read_record(store, path, _parse, limit_bytes=MAX_BYTES)
    except errors.EpochCheckpointError:
        return None
    return None if file is None else file.attempt


def merge(own: Any, attached: Mapping[str, Mapping[str, Any]]) -> Any:
    """All metrics of an epoch by name; its own come first, then those of the sources in the order of their names.

    Where nothing is attached, or its own metrics are no object of names, these are returned as they are.
    """
    if not attached or not (own is None or isinstance(own, Mapping)):
        return own
    out: dict[str, Any] = dict(own or {})
    for source in sorted(attached):
        for name, value in attached[source].items():
            out.setdefault(name, value)
    return out
