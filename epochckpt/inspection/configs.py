"""What a run was configured with, as far as its directory tells. Reads records and small files, no arrays."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from epochckpt._metrics import flat
from epochckpt.errors import EpochCheckpointError
from epochckpt.format import EpochRecord, paths
from epochckpt.format import tree as tree_lib
from epochckpt.jobs.notes import NOTES
from epochckpt.manager import status

if TYPE_CHECKING:
    from epochckpt.directory import Commits

_MAX_BYTES = 16_384  # of a file of JSON that counts as a config
_MAX_VALUES = 1000  # of an item of Python values that does


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The values of a run's config by name, and for how long it has trained as the runner noted."""

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trained_secs: float | None = None


def config_of(commits: Commits, first: int, newest: int) -> RunConfig:
    """The config of a run from two of its epochs: what both have alike, since what changes is no config.

    It comes from the metadata of the directory and of the epochs, from JSON items, and from items that have only Python
    values. A value in an inner mapping is named `outer/inner`. If items have a value of one name, the
    item's name stands before it.
    """
    ours = _of_epoch(commits, newest)
    earlier = ours if first == newest else _of_epoch(commits, first)
    same = {key: value for key, value in ours.items() if key in earlier and repr(earlier[key]) == repr(value)}
    with contextlib.suppress(EpochCheckpointError, OSError):  # the epochs tell the rest
        same |= {("", name): value for name, value in flat(status.custom_metadata(commits.store) or {}).items()}
    count = collections.Counter(name for _, name in same)
    values = {name if count[name] == 1 or not item else f"{item}/{name}": value for (item, name), value in same.items()}
    return RunConfig(values, _trained(ours.get((NOTES, "total_secs"))))


def _trained(secs: Any) -> float | None:
    is_number = isinstance(secs, int | float) and not isinstance(secs, bool)
    return float(secs) if is_number and math.isfinite(secs) else None


def _of_epoch(commits: Commits, epoch: int) -> dict[tuple[str, str], Any]:
    """The values in an epoch by item (empty for its metadata) and name; nothing if it cannot be read."""
    try:
        record = commits.read_record(epoch)
        found = dict(_values(commits, record))
        custom = {name: value for name, value in record.custom_metadata.items() if name != NOTES}
        notes = record.custom_metadata.get(NOTES)
        found |= {("", name): value for name, value in flat(custom).items()}
        return found | ({(NOTES, "total_secs"): notes.get("total_secs")} if isinstance(notes, Mapping) else {})
    except (EpochCheckpointError, OSError, ValueError):
        return {}


def _values(commits: Commits, record: EpochRecord) -> Iterator[tuple[tuple[str, str], Any]]:
    for item, entry in record.items.items():
        if entry.arrays is not None and 0 < len(entry.arrays.leaves) <= _MAX_VALUES:
            leaves = entry.arrays.leaves
            if all(leaf.kind in tree_lib.VALUE_KINDS for leaf in leaves):
                for number, name in enumerate(entry.arrays.public_names):
                    kind = leaves[number].kind
                    yield (item, name), tree_lib.value_from_json(paths.EPOCH_RECORD, kind, entry.values[number])
        elif entry.handler.endswith("JsonCheckpointHandler"):
            yield from (((item, name), value) for name, value in _json(commits, record, item).items())


def _json(commits: Commits, record: EpochRecord, item: str) -> dict[str, Any]:
    files = [(number, file) for number, node in enumerate(record.nodes) for file in node.files if file.item == item]
    if len(files) != 1 or files[0][1].size > _MAX_BYTES:
        return {}
    path = paths.join(commits.folder(record.epoch), record.path(*files[0]))
    content = json.loads(commits.store.read(path, limit_bytes=_MAX_BYTES))
    return flat(content) if isinstance(content, Mapping) else {}
