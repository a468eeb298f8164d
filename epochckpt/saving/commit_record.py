"""The commit record of a save, made of what all nodes have reported, once that was checked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from epochckpt._text import readable
from epochckpt.errors import SaveError
from epochckpt.format import EpochRecord, ItemKind, ItemRecord, Leaf, paths
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
        SaveError: two nodes wrote a file of one name, or one wrote a file where another has a folder. Or the processes
            have different values of what each of them has for itself, and must be alike (`NodeReport.alike`).
    """
    nodes = save.reports.nodes
    _check_file_names(save.epoch, nodes)
    items = dict(save.snapshot.items)
    _check_values(save.epoch, nodes, items)
    inlined: dict[str, dict[str, bytes]] = {}
    for node in nodes:
        for item, contents in node.inlined.items():
            inlined[item] = {**inlined.get(item, {}), **contents}
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


def _check_values(epoch: int, nodes: Sequence[NodeReport], items: Mapping[str, ItemRecord]) -> None:
    """What each process has for itself, and must be alike, has the same values on all of them."""
    first: dict[tuple[str, str], tuple[str, str]] = {}  # digest and node by item and leaf
    for node in nodes:
        reported = ((name, number, found) for name, leaves in node.alike.items() for number, found in leaves.items())
        for name, number, found in reported:
            expected, other = first.setdefault((name, number), (found, node.entry.name))
            if found != expected:
                arrays = items[name].arrays
                assert arrays is not None, "it has leaves"
                raise SaveError(epoch, _differ(name, arrays.leaves[int(number)], node.entry.name, other))


def _differ(item: str, leaf: Leaf, node: str, other: str) -> str:
    """The error about a leaf that has other values on one node than on another, and what to do."""
    where = f"item {item!r}, leaf {readable(leaf.name)!r}"
    on_nodes = f"on {node} than on {other}"
    if leaf.is_jax:
        return (
            f"{where} lies on no device, so each process has its own, and it has other values {on_nodes}. Make it one "
            "array of the whole job, for example under jax.jit with out_shardings, or save what differs with NodeSave"
        )
    return (
        f"{where} is no jax array, and has other values {on_nodes}. With local_disks a large one must be the same on "
        "every process: make it a jax array of the whole job, or save what differs with NodeSave"
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
