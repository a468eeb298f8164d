"""An epoch as a plain checkpoint of stock Orbax: the Orbax view, with copies of the data files in place of its links.

The index of an item names files below the item's folder, `<node>/<item>.safetensors`. In an epoch those are reached
through a symlink per node; here the files themselves lie there, so the index stays the same.
"""

from __future__ import annotations

import dataclasses

from epochckpt import layout, orbax_view, status
from epochckpt.errors import UnsupportedError
from epochckpt.node_reader import EpochReader
from epochckpt.orbax_view import Views
from epochckpt.records import EpochRecord
from epochckpt.saving import root_metadata
from epochckpt.store import Store, writing

LeftOut = dict[str, dict[str, str]]


def write_orbax(reader: EpochReader, record: EpochRecord, target: Store, allow_left_out: bool) -> LeftOut:
    """Writes `<epoch>/…` and the directory's own metadata, durably; every byte is verified on its way.

    Args:
        reader: the epoch.
        record: its record, with the items to export.
        target: an empty folder.
        allow_left_out: leave out what Orbax cannot express.

    Returns:
        What was left out: reasons by leaf name, by item.

    Raises:
        UnsupportedError: Orbax cannot express some of it, by name; or a kind of item that is not known here.
        DamagedError: bytes differ from what was written.
    """
    # nothing of ours is needed to read it: no attempts in paths, as object stores have them
    plain = dataclasses.replace(record, objects=False)
    view = Views(orbax_view.MAX_EXPORT_CHUNKS).build(plain, beside_nodes=False)
    if view.left_out and not allow_left_out:
        raise UnsupportedError(refusal(record.epoch, "orbax", view.left_out))
    base = str(record.epoch)
    folders = _Folders(target)
    for folder in ("", *view.folders):
        folders.make(layout.join(base, folder))
    for path, data in view.files.items():
        target.create(layout.join(base, path), data)
    for item in (name for name, entry in record.items.items() if entry.kind == "files"):
        for node, file in reader.item_files(item):
            with writing(target, layout.join(base, file.path), file.size) as writer:
                start = 0
                for block in reader.blocks(node, file):
                    writer.write(start, block)
                    start += len(block)
    numbers = {entry.folder: i for i, entry in enumerate(record.nodes)}
    for path in view.links:
        item, name = path.split("/")[0], path.split("/")[-1]
        if record.items[item].arrays is None:
            continue
        folders.make(layout.join(base, path))
        for file in reader.files(item, numbers[name]):
            with writing(target, layout.join(base, path, file.path.rpartition("/")[2]), file.size) as writer:
                file.stream(reader, writer.write)
    custom = status.root_metadata(reader.store).custom_metadata
    if custom:
        folders.make(layout.ROOT_METADATA[0])
        target.create(layout.join(*layout.ROOT_METADATA), root_metadata(custom))
    folders.sync()
    return view.left_out


def refusal(epoch: int, format: str, left_out: LeftOut) -> str:
    """The message for leaves that a format cannot express."""
    rows = [
        f"  {item if leaf == '*' else f'{item}: {leaf}'}: {why}"
        for item in left_out
        for leaf, why in left_out[item].items()
    ]
    more = [f"  … and {len(rows) - 50} more"] if len(rows) > 50 else []
    head = f"epoch {epoch} holds what the format {format!r} cannot express:"
    return "\n".join([head, *rows[:50], *more, "allow_left_out=True (--allow-left-out) exports the rest"])


class _Folders:
    """The folders of an export: made once each, synced at the end."""

    def __init__(self, store: Store):
        self._store = store
        self._made = [""]

    def make(self, path: str) -> None:
        self._store.make_folder(path)
        self._made.append(path)

    def sync(self) -> None:
        for path in reversed(self._made):
            self._store.sync_folder(path)
