"""The Orbax view as files and links in the folder of an epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Mapping
from functools import partial

from absl import logging

from epochckpt import layout
from epochckpt.orbax_view import View
from epochckpt.records import EpochRecord
from epochckpt.store import Store

Run = Callable[[list[Callable[[], None]]], None]
"""Runs calls, in parallel if it likes; raises the first error."""

NO_SYMLINKS: Mapping[str, Mapping[str, str]] = {"*": {"*": "the file system has no symlinks"}}
"""What a record says is left out of a view that the file system cannot hold: all of it."""

_told: set[str] = set()  # said once per directory and process


def link_node(store: Store, folder: str) -> None:
    """Shows a node's record as an item of JSON, see `orbax_view`; by the node itself."""
    with contextlib.suppress(io.UnsupportedOperation):  # `write` leaves the whole view out then
        store.link(layout.join(folder, layout.JSON_FILE), layout.NODE_RECORD)


def write(store: Store, folder: str, record: EpochRecord, view: View, run: Run) -> EpochRecord:
    """Writes a view into an epoch's folder, durably but for the names in that folder itself.

    Args:
        store: the directory.
        folder: of the epoch, with its nodes in it.
        record: what is about to be committed.
        view: of it.
        run: makes many files at once.

    Returns:
        The record with the note of what the view lacks: all of it where the file system has no symlinks.
    """
    try:
        if not _has_links(store, folder, record):
            raise io.UnsupportedOperation("see link_node")
        for name in view.folders:
            store.make_folder(layout.join(folder, name))
        for path, target in view.links.items():
            store.link(layout.join(folder, path), target)
    except io.UnsupportedOperation:
        for name in view.folders:
            store.remove_tree(layout.join(folder, name))
        if store.root not in _told:
            _told.add(store.root)
            logging.warning(
                "%s: the file system has no symlinks, which the Orbax view needs: stock Orbax cannot read the epochs "
                "that are saved there, epochckpt can. For stock Orbax export them, or copy them with CopyUpload to "
                "another file system; orbax_view=False saves this line",
                store.root,
            )
        return dataclasses.replace(record, orbax_left_out=NO_SYMLINKS)
    run([partial(store.create, layout.join(folder, path), data) for path, data in view.files.items()])
    run([partial(store.sync_folder, layout.join(folder, name)) for name in reversed(view.folders)])
    return dataclasses.replace(record, orbax_left_out=view.left_out)


def _has_links(store: Store, folder: str, record: EpochRecord) -> bool:
    """Whether the first node has the link that it made of its own accord, or has another file of that name."""
    return store.exists(layout.join(folder, record.node_folder(0), layout.JSON_FILE))
