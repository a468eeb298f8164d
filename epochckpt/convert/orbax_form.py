"""An epoch as a plain checkpoint of stock Orbax.

That is the Orbax view, with data files in place of its links to nodes' folders. `CopiedFiles` takes an epoch's own
files, `NewFiles` writes those of selected leaves.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from epochckpt.arrays import EpochReader
from epochckpt.arrays.user_json import root_metadata
from epochckpt.convert.leaf_files import FormOptions, LeafFile, LeftOut, check_expressible
from epochckpt.convert.selected_arrays import SelectedArrays
from epochckpt.format import DataFile, EpochRecord, ItemKind, NodeEntry, paths, safetensors
from epochckpt.manager import status
from epochckpt.orbax import Views, ocdbt
from epochckpt.orbax.view_layouts import Standalone
from epochckpt.storage import Store


class ItemFiles(Protocol):
    """Where the files of a checkpoint's items come from."""

    @property
    def record(self) -> EpochRecord:
        """What the checkpoint holds: its items, and the nodes with their data files."""
        ...

    def write(self, target: Store, base: str, links: Sequence[str]) -> None:
        """Writes the files, durably and verified: of arrays, in place of each of the view's links."""
        ...


class CopiedFiles:
    """The files of an epoch, as they are."""

    def __init__(self, reader: EpochReader, record: EpochRecord):
        self.record = record
        self._reader = reader

    def write(self, target: Store, base: str, links: Sequence[str]) -> None:
        for item in (name for name, entry in self.record.items.items() if entry.kind is ItemKind.FILES):
            for node, file in self._reader.item_files(item):
                self._reader.node_file(node, file).copy_to(target, paths.join(base, file.path))
        numbers = {entry.folder: i for i, entry in enumerate(self.record.nodes)}
        for path in links:
            for file in self._reader.files(path.split("/")[0], numbers[path.split("/")[-1]]):
                file.copy_to(target, paths.join(base, path, file.name))


class NewFiles:
    """Data files of the leaves that were selected, whole, and of one node."""

    def __init__(self, arrays: SelectedArrays, max_buffer_bytes: int):
        self._arrays = arrays
        self._max_buffer_bytes = max_buffer_bytes
        self._files = list[tuple[DataFile, LeafFile]]()
        item = arrays.arrays
        owned = item.owned(0)
        for number, part in enumerate(item.cut(owned, item.part_ends(owned, None))):
            leaves = part.leaves.tolist()
            head = safetensors.header([item.tensor(leaf, 0) for leaf in leaves])
            size = len(head) + int(part.offsets[-1])
            entry = DataFile(item=item.name, part=number, size=size, data_start=len(head), cells=len(leaves))
            self._files.append((entry, LeafFile(head, leaves)))
        node = NodeEntry("process_0", 0, 0, "", tuple(entry for entry, _ in self._files))
        self.record = dataclasses.replace(arrays.record, nodes=(node,))

    def write(self, target: Store, base: str, links: Sequence[str]) -> None:
        for path in links:
            for entry, file in self._files:
                file.write(self._arrays, target, paths.join(base, path, entry.path), self._max_buffer_bytes)


def write_orbax(
    files: ItemFiles, source: Store, target: Store, options: FormOptions, max_entries: int = ocdbt.MAX_ENTRIES
) -> LeftOut:
    """Writes items and the `source` directory's metadata, durably and verified; returns what was left out.

    That is also an item whose index would have more than `max_entries` entries.
    """
    record = files.record
    # nothing of ours is needed to read it: no attempts in paths, as object stores have them
    plain = dataclasses.replace(record, objects=False)
    view = Views(max_entries).build(plain, Standalone())
    check_expressible(record.epoch, "orbax", view.unsupported, options)
    base = str(record.epoch)
    links = [path for path in view.links if record.items[path.split("/")[0]].arrays is not None]
    custom = status.root_metadata(source).custom_metadata
    folders = [paths.join(base, folder) for folder in ("", *view.folders, *links)]
    folders += paths.ROOT_METADATA[:1] if custom else []
    for folder in folders:
        target.make_folder(folder)
    for path, data in view.files.items():
        target.create(paths.join(base, path), data)
    files.write(target, base, links)
    if custom:
        target.create(paths.join(*paths.ROOT_METADATA), root_metadata(custom))
    for folder in (*reversed(folders), ""):
        target.sync_folder(folder)
    return view.unsupported
