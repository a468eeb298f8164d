"""Attaching metrics to a committed epoch, which needs no claim.

Any job may do it, evaluators mostly, and it never takes a run's right to write. What is attached is read by
`attached_metrics`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from epochckpt import errors
from epochckpt.directory import attached_metrics, head_turns
from epochckpt.directory.bucket import BucketDirectory
from epochckpt.directory.head_changes import Attachment, AttachMetrics
from epochckpt.format import EpochRecord, codec, json_kinds, paths

if TYPE_CHECKING:
    from epochckpt.directory.epoch_directory import EpochDirectory

MAX_HEAD_BYTES = 2**14  # of one source's file on object stores, whose head has the metrics of all epochs


def attach(
    epoch_directory: EpochDirectory, epoch: int, metrics: object, source: str, save_id: str | None = None
) -> None:
    """Attaches metrics, an object of names, to a committed epoch, durably; see `epochckpt.attach_metrics`."""
    if not paths.is_name(source):
        raise errors.InvalidArgumentError(
            f"source {source!r} is not usable: expected a letter or digit followed by letters, digits, '.', '_' or "
            f"'-', at most {paths.MAX_NAME}"
        )
    if not json_kinds.is_mapping(metrics):
        raise errors.InvalidArgumentError(f"metrics are an object of names and numbers, got a {type(metrics).__name__}")
    record = epoch_directory.read_record(epoch)
    if record.stock:
        problem = f"{epoch_directory.store.root}: checkpoint {epoch} was written by stock Orbax"
        raise errors.UnsupportedError(f"{problem}; metrics are attached to epochs of epochckpt only")
    if save_id is not None and record.save_id != save_id:
        raise errors.EpochDeletedError(epoch, epoch_directory.store.root, f"these metrics are about attempt {save_id}")
    _check_names(epoch_directory, record, metrics, source)
    file = attached_metrics.MetricsFile(
        written_ns=time.time_ns(), epoch=epoch, save_id=record.save_id, source=source, metrics=metrics
    )
    data = codec.seal("metrics", file)
    in_head = epoch_directory.attached() is not None
    limit = MAX_HEAD_BYTES if in_head else attached_metrics.MAX_BYTES
    if len(data) > limit:
        raise errors.InvalidArgumentError(f"metrics of {len(data)} bytes; at most {limit} can be attached")
    if (
        isinstance(epoch_directory, BucketDirectory)
        and in_head
        and not _attach_in_head(epoch_directory, record, source, dict(metrics))
    ):
        raise errors.EpochDeletedError(epoch, epoch_directory.store.root, "while metrics were being attached to it")
    path = paths.join(epoch_directory.folder(epoch), paths.metrics_file(source))
    try:
        draft = f"{path}.{paths.new_id()}{paths.TMP_SUFFIX}"
        epoch_directory.store.put(path, data, draft=draft, replace=True)
    except FileNotFoundError as error:
        raise errors.EpochDeletedError(epoch, epoch_directory.store.root, str(error)) from error
    except PermissionError as error:
        raise errors.AccessError(f"{path}: {error}; metrics need write access to the epoch's folder") from error
    # The epoch may have been deleted or replaced during the write: then the file is about no epoch any more.
    if epoch_directory.read_save_id(epoch) != record.save_id:
        with suppress(OSError, errors.EpochCheckpointError):
            if attached_metrics.save_id_of(epoch_directory.store, path) == record.save_id:
                epoch_directory.store.remove(path)
        raise errors.EpochDeletedError(epoch, epoch_directory.store.root, "while metrics were being attached to it")


def _attach_in_head(directory: BucketDirectory, record: EpochRecord, source: str, metrics: Mapping[str, Any]) -> bool:
    """Adds metrics to an epoch's entry; False if another attempt, or none, is there by now."""
    folder = directory.folder(record.epoch)
    attachment = Attachment(folder, record.save_id, source, metrics)
    with directory.head.turns.waits(attachment):
        written = directory.head.write(AttachMetrics((attachment,)), head_turns.ATTACHMENTS)
    return written.head.has(folder, record.save_id)


def _check_names(epoch_directory: EpochDirectory, record: EpochRecord, metrics: Mapping[str, Any], source: str) -> None:
    """Refuses a metric of a name that the epoch has already from the save or from another source."""
    if record.metrics is not None and not json_kinds.is_mapping(record.metrics):
        problem = f"checkpoint {record.epoch} was saved with metrics that are no object of names"
        raise errors.InvalidArgumentError(f"{problem}: none can be attached to them")
    attached = attached_metrics.of_epoch(epoch_directory, record)
    owners = {name: f"source {other!r}" for other, found in attached.items() if other != source for name in found}
    owners |= dict.fromkeys(record.metrics or (), "the save itself")
    taken = sorted(owners.keys() & metrics.keys())
    if taken:
        problem = f"checkpoint {record.epoch} has the metric {taken[0]!r} already, from {owners[taken[0]]}"
        raise errors.InvalidArgumentError(f"{problem}: choose another name")
