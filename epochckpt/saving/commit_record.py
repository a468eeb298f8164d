"""The commit record of a save, made of what all nodes have reported, once that was checked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from epochckpt.errors import SaveError
from epochckpt.format import EpochRecord, ItemKind, paths
from epochckpt.saving.reports import NodeReport
from epochckpt.saving.save import Save


def commit_record(save: Save, save_id: str, *, objects: bool, per_node: bool = False) -> EpochRecord:
    """The commit record of a save as of now.

    Args:
        save: the save, with the reports of all nodes.
        save_id: the save's id.
        objects: see `EpochDirectory.save_ids_in_paths`.
        per_node: this is the epoch of one node by itself.

    Raises:
        SaveError: two nodes wrote a file of one name, or one wrote a file where another has a folder, or hosts with
            disks of their own have different values of a leaf.
    """
    nodes = save.reports.nodes
    _check_file_names(save.epoch, nodes)
    _check_values(save.epoch, nodes)
    inlined: dict[str, dict[str, bytes]] = {}
    for local in filter(None, (node.local for node in nodes)):
        for item, contents in local.inlined.items():
            inlined[item] = {**inlined.get(item, {}), **contents}
    items = dict(save.snapshot.items)
    for name, item in items.items():
        if item.kind is ItemKind.NODE:
            digests = {node.own.get(name) for node in nodes}
            items[name] = dataclasses.replace(item, same=len(digests) == 1 and None not in digests)
    request = save.request
    return EpochRecord(
        epoch=request.epoch,
        save_id=save_id,
        objects=objects,
        plan=save.plan,
        nodes=tuple(node.entry for node in nodes),
        items=items,
        default_item=request.default_item,
        metrics=request.metrics,
        custom_metadata=request.custom_metadata,
        started_ns=request.started_ns,
        committed_ns=time.time_ns(),
        timings={"blocked_secs": round(request.blocked_secs, 6), "secs": round(save.elapsed_secs, 6)},
        per_node=per_node,
        inlined=inlined,
    )


def _check_values(epoch: int, nodes: Sequence[NodeReport]) -> None:
    """Where each host has a disk of its own, the hosts have the same values of large NumPy leaves."""
    first: dict[str, tuple[str, str]] = {}  # digest and node by leaf
    for node in nodes:
        if node.local is None:
            continue
        for leaf, digest in node.local.alike.items():
            expected, other = first.setdefault(leaf, (digest, node.entry.name))
            if digest != expected:
                raise SaveError(
                    epoch,
                    f"{leaf} is no jax array, and has other values on {node.entry.name} than on {other}. With "
                    "local_disks a large one must be the same on every process: make it a jax array of the whole "
                    "job, or save what differs with NodeSave",
                )


def _check_file_names(epoch: int, nodes: Sequence[NodeReport]) -> None:
    """Handlers' files of all nodes share one folder in the Orbax view."""
    writers: dict[str, str] = {}  # node by file
    folders: dict[str, str] = {}  # node by folder
    for node in (report.entry for report in nodes):
        for path in (file.path for file in node.files if file.name):
            parents = paths.parents(path)
            other = writers.get(path) or folders.get(path) or next(filter(None, map(writers.get, parents)), None)
            if other is not None:
                raise SaveError(epoch, f"nodes {other} and {node.name} both wrote {path}")
            writers[path] = node.name
            folders.update(dict.fromkeys(parents, node.name))
