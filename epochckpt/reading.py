"""Everything that only reads: restoring, looking at records, verifying. Needs a directory, no other process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from epochckpt import items, layout, status
from epochckpt.commit import Commits
from epochckpt.errors import EpochCheckpointError, EpochNotFoundError, InvalidArgumentError
from epochckpt.node_reader import EpochReader
from epochckpt.records import EpochRecord
from epochckpt.restoring import read_leaves
from epochckpt.worker import Pool


class Reading:
    """Reads the epochs of one directory.

    Args:
        commits: the directory's epochs.
        pool: who reads.
        verify: check every block before its bytes are used.
    """

    def __init__(self, commits: Commits, pool: Pool, verify: bool):
        self.commits, self._pool, self._verify = commits, pool, verify

    def reader(self, epoch: int) -> EpochReader:
        """A reader of one epoch; its record is read now."""
        record = self.commits.read_record(epoch)
        return EpochReader(self.commits.store, self.commits.folder(epoch), record, self._pool, self._verify)

    def restore(self, epoch: int, args: Any) -> Any:
        """Restores the items that `args` names (None: all, as they were saved)."""
        reader = self.reader(epoch)
        if args is None:
            wanted: Mapping[str, Any] = dict.fromkeys(reader.record.items)
            single = reader.record.default_item
        else:
            wanted, single = items.named(args), not items.is_multi(args)
        values = {name: items.restore_item(reader, name, arg) for name, arg in wanted.items()}
        return values[layout.DEFAULT_ITEM] if single else ocp.args.Composite(**values)

    def leaves(self, epoch: int, patterns: str | Sequence[str], item: str | None) -> dict[str, Any]:
        """Single leaves; see `CheckpointManager.restore_leaves`."""
        reader = self.reader(epoch)
        arrays = [name for name, r in reader.record.items.items() if r.arrays is not None]
        if item is None and len(arrays) == 1:
            item = arrays[0]
        if item not in arrays:
            raise InvalidArgumentError(
                f"epoch {epoch} has no array item {item!r}; pass item=, one of: {', '.join(arrays)}"
            )
        return read_leaves(reader, item, [patterns] if isinstance(patterns, str) else patterns)

    def verify(self, epoch: int) -> status.Verification:
        """Reads every byte."""
        try:
            return status.verify(self.reader(epoch))
        except EpochNotFoundError:
            raise
        except EpochCheckpointError as error:
            return status.Verification(epoch, 0, (error,))

    def status(self, epoch: int) -> status.EpochStatus:
        """Committed, damaged or absent."""
        try:
            return status.committed(self.commits.read_record(epoch))
        except EpochNotFoundError:
            return status.EpochStatus(epoch, "absent")
        except EpochCheckpointError as error:
            return status.EpochStatus(epoch, "damaged", str(error))

    def node_path(self, node: str, epoch: int) -> epath.Path:
        """The folder of one node's files."""
        record = self.commits.read_record(epoch)
        names = [n.name for n in record.nodes]
        if node not in names:
            raise InvalidArgumentError(f"epoch {epoch} has no node {node!r}; it has: {', '.join(names)}")
        return self.path(record) / record.node_folder(names.index(node))

    def path(self, record: EpochRecord) -> epath.Path:
        """The folder of an epoch."""
        return shown_path(self.commits.store.root) / self.commits.folder(record.epoch)


def shown_path(root: str) -> epath.Path:
    """A store's root as a path; URLs that etils does not know lose a slash, and are for showing only."""
    scheme, found, rest = root.partition("://")
    if not found or scheme in ("gs", "s3"):
        return epath.Path(root)
    return epath.Path(f"/{rest.lstrip('/')}" if scheme == "file" else f"{scheme}:/{rest}")
