"""What a run was configured with, as far as its directory tells. Reads small parts of records and small files."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from epochckpt._metrics import flat
from epochckpt.errors import EpochCheckpointError
from epochckpt.format import parsing, paths
from epochckpt.format import tree as tree_lib
from epochckpt.jobs.notes import NOTES, RunNotes
from epochckpt.manager import status
from epochckpt.options import SECRET

if TYPE_CHECKING:
    from epochckpt.directory import EpochDirectory
    from epochckpt.inspection.rows import EpochRow

_MAX_BYTES = 16_384  # of a file of JSON that counts as a config
_MAX_FILES = 20  # such files of an epoch that are read
_Values = dict[tuple[str, str], Any]  # by item (empty for metadata) and name


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The values of a run's config by name, and for how long it has trained as the runner noted."""

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trained_secs: float | None = None


def config_of(epoch_directory: EpochDirectory, first: EpochRow, newest: EpochRow) -> RunConfig:
    """The config of a run from two of its epochs: what both have alike, since what changes is no config.

    It comes from the metadata of the directory and of the epochs, from JSON items, and from items that have only Python
    values. A value in an inner mapping is named `outer/inner`. If items have a value of one name, the
    item's name stands before it. Values with names like secrets are left out, and so are values of items
    that cannot be read. Of a directory in a bucket nothing is read.
    """
    if not epoch_directory.has_cheap_reads:
        return RunConfig()
    ours = _of_epoch(epoch_directory, newest)
    earlier = ours if first is newest else _of_epoch(epoch_directory, first)
    same = {key: value for key, value in ours.items() if key in earlier and repr(earlier[key]) == repr(value)}
    with contextlib.suppress(EpochCheckpointError, OSError):  # the epochs tell the rest
        metadata = status.custom_metadata(epoch_directory.store, limit_bytes=_MAX_BYTES) or {}
        same |= _plain("", metadata)
    count = collections.Counter(name for _, name in same)
    values = {name if count[name] == 1 or not item else f"{item}/{name}": value for (item, name), value in same.items()}
    return RunConfig(values, RunNotes.read(newest.notes).total_secs)


def _plain(item: str, content: Mapping[str, Any]) -> _Values:
    """The values that a table may show: no secrets, and at most lists, since deeper values may be of any depth."""
    found = {(item, name): value for name, value in flat(content).items() if not _is_secret(item, name)}
    return {key: value for key, value in found.items() if not _is_nested(value)}


def _is_secret(item: str, name: str) -> bool:
    return SECRET.search(item) is not None or SECRET.search(name) is not None


def _is_nested(value: Any) -> bool:
    return any(isinstance(each, list | Mapping) for each in (value if isinstance(value, list) else [value]))


def _of_epoch(epoch_directory: EpochDirectory, row: EpochRow) -> _Values:
    """The values in an epoch, without those that cannot be read."""
    custom = {name: value for name, value in (row.custom_metadata or {}).items() if name != NOTES}
    found = _plain("", custom)
    with contextlib.suppress(EpochCheckpointError, OSError):
        path = paths.join(row.folder, paths.EPOCH_RECORD)
        small = parsing.read_record(epoch_directory.store, path, parsing.parse_small_items)
        if small is not None:
            found |= _python_values(small)
            for item, file in itertools.islice(_json_files(small, row.folder), _MAX_FILES):
                found |= _plain(item, _json(epoch_directory, file))
    return found


def _python_values(small: parsing.SmallItems) -> _Values:
    found: _Values = {}
    for item, entry in small.items.items():
        if entry.arrays is not None and len(entry.values) == len(entry.arrays.leaves):
            kinds = [leaf.kind for leaf in entry.arrays.leaves]
            values = [tree_lib.value_from_json(paths.EPOCH_RECORD, kinds[i], entry.values[i]) for i in entry.values]
            found |= _plain(item, dict(zip(entry.arrays.public_names, values, strict=True)))
    return found


def _json_files(small: parsing.SmallItems, folder: str) -> Iterator[tuple[str, str]]:
    """The paths of the files of JSON items that have one small file, by item."""
    for item, entry in small.items.items():
        files = [(node.folder, file) for node in small.nodes for file in node.files if file.item == item]
        if entry.handler.endswith("JsonCheckpointHandler") and len(files) == 1 and files[0][1].size <= _MAX_BYTES:
            yield item, paths.join(folder, files[0][0], files[0][1].path)


def _json(epoch_directory: EpochDirectory, path: str) -> Mapping[str, Any]:
    """The values in a file of JSON; none if it cannot be read, whatever it holds."""
    try:
        content = json.loads(epoch_directory.store.read(path, limit_bytes=_MAX_BYTES))
    except (EpochCheckpointError, OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, Mapping) else {}
