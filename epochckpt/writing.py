"""Writes what one process has to write for one attempt: the folder of every node that it hosts."""

from __future__ import annotations

import time
from typing import Any

from epochckpt import checksum, layout, node_writer
from epochckpt.attempt import Attempt
from epochckpt.commit import Commits
from epochckpt.hosting import Nodes
from epochckpt.options import StorageOptions
from epochckpt.records import DataFile, NodeRecord, tree_digest
from epochckpt.worker import Pool


def write_nodes(
    commits: Commits, nodes: Nodes, attempt: Attempt, identity: str, options: StorageOptions, pool: Pool
) -> dict[str, Any]:
    """Writes and seals the folders of this process's nodes.

    Args:
        commits: where.
        nodes: of the job.
        attempt: the snapshot; its buffers are let go as soon as they are written.
        identity: the attempt's id.
        options: sizes.
        pool: who writes.

    Returns:
        What this process reports: the digest of its plan, and, node by node, what `epoch.json` says of it.
    """
    try:
        parts = [_Part(commits, nodes, number, attempt, identity, options) for number in nodes.hosted]
        for part in parts:
            part.write_arrays(pool)
        attempt.buffers = []  # what the snapshot holds need not wait for handlers
        parts[0].write_files()
    except FileNotFoundError as missing:
        raise commits.lost(attempt.epoch) from missing
    return {"plan": attempt.plan, "nodes": [part.seal() for part in parts]}


class _Part:
    """One node's folder."""

    def __init__(
        self,
        commits: Commits,
        nodes: Nodes,
        number: int,
        attempt: Attempt,
        identity: str,
        options: StorageOptions,
    ):
        self._commits, self._store, self._options = commits, commits.store, options
        self._nodes, self._number, self._attempt, self._identity = nodes, number, attempt, identity
        self._name, self._process = nodes.rows[number]
        self._folder = commits.make_node_folder(attempt.epoch, identity, self._name)
        self._files: list[DataFile] = []
        self._folders: list[str] = []
        self._secs = 0.0

    def write_arrays(self, pool: Pool) -> None:
        """The data files."""
        began, attempt, block_bytes = time.monotonic(), self._attempt, self._options.block_bytes
        for plan, buffers, number in zip(attempt.plans, attempt.buffers, attempt.places, strict=True):
            if number == self._number:
                self._files += node_writer.write_arrays(
                    self._store, self._folder, attempt.epoch, plan, buffers, block_bytes, pool
                )
        self._secs += time.monotonic() - began

    def write_files(self) -> None:
        """What handlers have written, or still write."""
        began, found = time.monotonic(), self._attempt.collect()
        self._folders = node_writer.folders(found)
        for path in self._folders:
            self._store.make_folder(layout.join(self._folder, path))
        for (item, path), source in found.items():
            block_bytes = self._options.block_bytes
            self._files.append(node_writer.write_file(self._store, self._folder, item, path, source, block_bytes))
        self._secs += time.monotonic() - began

    def seal(self) -> dict[str, Any]:
        """`node.json`, and what is reported of this node."""
        began, attempt, me = time.monotonic(), self._attempt, self._identity
        timings = {"write_secs": round(self._secs, 6), "held_secs": round(attempt.held_secs, 6)}
        own = attempt.own.get(self._number, {})
        record = NodeRecord(
            attempt.epoch,
            me,
            self._name,
            self._process,
            self._nodes.processes,
            attempt.plan,
            tuple(self._files),
            timings,
            own,
        ).to_bytes()
        view = self._options.orbax_view
        self._commits.seal_node(attempt.epoch, me, self._name, self._folders, record, view)
        return {
            "size": len(record),
            "digest": checksum.digest(record),
            "secs": self._secs + time.monotonic() - began,
            "files": [f.row() for f in self._files],
            "own": {name: tree_digest(item, [f for f in self._files if f.item == name]) for name, item in own.items()},
        }
