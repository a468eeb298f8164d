"""Metrics that another job attached to a committed epoch: one small file per source beside the commit record.

The commit record never changes. A file names the attempt that it is about, so that metrics of an epoch that was
replaced, or quarantined and saved anew, do not count for the new one. Its bytes are sealed as those of every record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from absl import logging

from epochckpt import errors
from epochckpt.format import EpochRecord, checksums, codec, json_kinds, parsing, paths
from epochckpt.format.codec import stored

if TYPE_CHECKING:
    from epochckpt._lazy import ocp
    from epochckpt.directory.epoch_directory import EpochDirectory
    from epochckpt.storage import Store

MAX_BYTES = 2**20  # of one source's file: they are read again and again


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
class MetricsFile:
    """The metrics that one source gives for one attempt."""

    written_ns: int = stored("written_ns", codec.INTEGER)  # by the wall clock
    epoch: int = stored("epoch", codec.INTEGER)
    save_id: str = stored("attempt", codec.text())
    source: str = stored("source", codec.text())
    metrics: Mapping[str, Any] = stored("metrics", METRICS)


def of_epoch(epoch_directory: EpochDirectory, record: EpochRecord) -> dict[str, Mapping[str, Any]]:
    """The metrics that were attached to an epoch, by source, as `read` gives them; none for steps of stock Orbax."""
    return (
        {}
        if record.stock
        else of_save(epoch_directory, epoch_directory.folder(record.epoch), record.epoch, record.save_id)
    )


def of_save(epoch_directory: EpochDirectory, folder: str, epoch: int, save_id: str) -> dict[str, Mapping[str, Any]]:
    """The metrics that were attached to an attempt, which is the epoch in a folder, by source."""
    known = epoch_directory.attached()
    if known is not None:
        about, found = known.get(epoch, ("", {}))
        return dict(found) if about == save_id else {}
    return in_folder(epoch_directory, folder, epoch, save_id)


def in_folder(epoch_directory: EpochDirectory, folder: str, epoch: int, save_id: str) -> dict[str, Mapping[str, Any]]:
    """The same from the files in a folder; on object stores those are copies."""
    return read(epoch_directory, epoch_directory.store.find(paths.METRICS_PREFIX, folder), epoch, save_id)


def of_epochs(
    epoch_directory: EpochDirectory, epochs: Iterable[int], save_id_of: Callable[[int], str | None]
) -> dict[int, Any]:
    """The metrics that were attached to some epochs, merged, by epoch; an epoch without any is left out.

    It costs one listing, and for each epoch with attached metrics a call of `save_id_of`, which gives its save id.
    """
    known = epoch_directory.attached()
    if known is not None:
        return {epoch: merge(None, known[epoch][1]) for epoch in epochs if epoch in known}
    files = by_folder(epoch_directory)
    found: dict[int, Any] = {}

    def look(epoch: int) -> None:
        save_id = save_id_of(epoch)
        if save_id and (sources := read(epoch_directory, files[epoch_directory.folder(epoch)], epoch, save_id)):
            found[epoch] = merge(None, sources)

    epoch_directory.store.each(look, [epoch for epoch in epochs if files.get(epoch_directory.folder(epoch))])
    return found


def by_folder(epoch_directory: EpochDirectory) -> dict[str, list[str]]:
    """Paths of all files of attached metrics, by the folder that they lie in."""
    found: dict[str, list[str]] = {}
    for path in epoch_directory.store.find(paths.METRICS_PREFIX):
        found.setdefault(path.rpartition("/")[0], []).append(path)
    return found


def read(
    epoch_directory: EpochDirectory, files: Iterable[str], epoch: int, save_id: str
) -> dict[str, Mapping[str, Any]]:
    """The metrics in some files beside an epoch, by source in the order of their names.

    Files that are damaged, not permitted, or about another attempt are left out; a StorageError is raised.
    """
    out: dict[str, Mapping[str, Any]] = {}
    for path in sorted(files):
        source = paths.parse_metrics_file(path.rpartition("/")[2])
        if source is None:  # being written, or another's
            continue
        try:
            file = parsing.read_record(epoch_directory.store, path, parse, limit_bytes=MAX_BYTES)
        except errors.StorageError:
            raise
        except errors.EpochCheckpointError as error:
            logging.warning("%s: attached metrics are left out: %s", epoch_directory.store.root, error)
            continue
        if file is not None and (file.epoch, file.save_id, file.source) == (epoch, save_id, source):
            out[source] = file.metrics
    return out


def parse(path: str, data: bytes) -> MetricsFile:
    """Parses such a file; raises DamagedError, FormatError or FormatVersionError."""
    return codec.parse(MetricsFile, parsing.open_record(path, data, "metrics"))


def save_id_of(store: Store, path: str) -> str | None:
    """The attempt that a file is about; None if there is no such file, or it cannot be used."""
    try:
        file = parsing.read_record(store, path, parse, limit_bytes=MAX_BYTES)
    except errors.EpochCheckpointError:
        return None
    return None if file is None else file.save_id


def merge(own: Any, attached: Mapping[str, Mapping[str, Any]]) -> Any:
    """All metrics of an epoch by name; its own come first, then those of the sources in the order of their names.

    Where nothing is attached, or its own metrics are no object of names, these are returned as they are.
    """
    if not attached or not (own is None or json_kinds.is_mapping(own)):
        return own
    out: dict[str, Any] = dict(own or {})
    for source in sorted(attached):
        for name, value in attached[source].items():
            out.setdefault(name, value)
    return out
