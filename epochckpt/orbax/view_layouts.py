"""The layouts of an Orbax view: each place that has a view needs other files beside the data.

- `Linked`: in a file system, where links lead from the view to the folders of nodes.
- `InBucket`: in an object store. Data files lie below their item, so Orbax finds them there; what has to lie elsewhere
  is copied, and a stand-in of JSON shows each folder that holds nothing for Orbax.
- `Standalone`: a checkpoint of Orbax's own, as an export writes it: the data files take the places of the links.
"""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping

from epochckpt.format import EpochRecord, ItemKind, ItemRecord, paths
from epochckpt.orbax.handler_types import json_handler, key_folders
from epochckpt.orbax.step_files import COMMIT, OUR_COMMIT

METRICS_FILE = "metrics/metrics"  # where the view of an epoch has its metrics
ALIAS_FILE = f"{paths.DEFAULT_ITEM}/{paths.JSON_FILE}"  # where the view of an epoch has aliases


@dataclasses.dataclass
class View:
    """What lies in an epoch's folder for Orbax's sake; paths are relative to it."""

    folders: list[str] = dataclasses.field(default_factory=list)  # to be made, in this order
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)  # content by path
    links: dict[str, str] = dataclasses.field(default_factory=dict)  # target by path
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # item by other name, as a link in a file system
    node_links: dict[str, str] = dataclasses.field(default_factory=dict)  # the same; each node makes its own
    copies: dict[str, str] = dataclasses.field(default_factory=dict)  # in an object store: see `copies`
    handlers: dict[str, str] = dataclasses.field(default_factory=dict)  # of the folders that Orbax takes for items
    # Reasons by leaf name, by item; the leaf name `WHOLE` stands for the whole item.
    unsupported: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


class Layout(abc.ABC):
    """The differences between the places that a view may lie in. The methods add to a view."""

    commit_mark = OUR_COMMIT  # see `step_recognition`: so it is never taken for Orbax's own
    """The content of the file that marks a finished step."""

    def add_node(self, view: View, record: EpochRecord, number: int) -> None:
        """Shows a node's folder as an item of JSON: Orbax takes every folder for an item, if not told which to read."""
        return

    @abc.abstractmethod
    def add_files(self, view: View, record: EpochRecord, item: str) -> None:
        """Adds what handlers wrote for an item."""

    @abc.abstractmethod
    def add_data(self, view: View, item: str, base: str, nodes: Iterable[str]) -> None:
        """Adds what a database in the folder `base` needs to find the data files of nodes."""

    def add_lost_item(self, view: View, item: str, why: str) -> None:
        """Shows an item of arrays that Orbax cannot have."""
        return

    def add_aliases(self, view: View, record: EpochRecord) -> None:
        """Adds the other names of an unnamed tree."""
        return

    def data_path(self, record: EpochRecord) -> Callable[[str], str]:
        """Where `<node>/<data file>` lies, as the database of its item sees it."""
        del record
        return str


class Standalone(Layout):
    """A checkpoint without folders of nodes: `View.links` says where their data files have to be."""

    commit_mark = b"The checkpoint was committed.\n"

    def add_files(self, view: View, record: EpochRecord, item: str) -> None:
        _link_files(view, record, item)

    def add_data(self, view: View, item: str, base: str, nodes: Iterable[str]) -> None:
        _link_data(view, base, nodes)


class Linked(Layout):
    """A view beside the folders of nodes, in a file system."""

    def add_node(self, view: View, record: EpochRecord, number: int) -> None:
        node = record.nodes[number]
        if not any(file.name and file.item == paths.JSON_FILE for file in node.files):  # that link's name is taken
            view.handlers[node.folder] = json_handler()
            view.node_links[f"{node.folder}/{paths.JSON_FILE}"] = paths.NODE_RECORD

    def add_files(self, view: View, record: EpochRecord, item: str) -> None:
        _link_files(view, record, item)

    def add_data(self, view: View, item: str, base: str, nodes: Iterable[str]) -> None:
        _link_data(view, base, nodes)

    def add_aliases(self, view: View, record: EpochRecord) -> None:
        """Orbax v0, asked for all items, reads the small JSON in their place."""
        item = paths.DEFAULT_ITEM
        nodes = {node.folder for node in record.nodes}
        if record.default_item and ALIAS_FILE not in view.links and f"{item}/_METADATA" in view.files:
            view.aliases = {name: item for name in paths.UNNAMED if name != item and name not in nodes}
            view.handlers.update(dict.fromkeys(view.aliases, json_handler()))
            view.files[ALIAS_FILE] = _stand_in({"item": item, "also called": ", ".join(view.aliases)})


class InBucket(Layout):
    """A view beside the folders of attempts, in an object store."""

    def add_node(self, view: View, record: EpochRecord, number: int) -> None:
        node = record.nodes[number]
        view.handlers[node.folder] = json_handler()
        content = {"node": node.name, "see": record.path(number)}
        view.files[f"{node.folder}/{paths.JSON_FILE}"] = _stand_in(content)

    def add_files(self, view: View, record: EpochRecord, item: str) -> None:
        _handler_files(view, record, item)  # see `copies`

    def add_data(self, view: View, item: str, base: str, nodes: Iterable[str]) -> None:
        view.files[f"{item}/{COMMIT}"] = self.commit_mark  # Orbax asks for it where it is given an item's path

    def add_lost_item(self, view: View, item: str, why: str) -> None:
        view.handlers[item] = json_handler()  # its data files are in a folder that Orbax sees
        view.files[f"{item}/{paths.JSON_FILE}"] = _stand_in({"item": item, "not for Orbax": why})

    def data_path(self, record: EpochRecord) -> Callable[[str], str]:
        def in_attempt(path: str) -> str:
            node, _, file = path.partition("/")
            return paths.join(paths.part_folder(node, record.save_id), file)

        return in_attempt


def layout_of(record: EpochRecord) -> Layout:
    """The layout of the view that lies beside an epoch."""
    return InBucket() if record.objects else Linked()


def database_folder(name: str, item: ItemRecord) -> str:
    """The folder of an item's database."""
    return f"{name}/{key_folders()[item.handler]}" if item.handler in key_folders() else name


def link_in(base: str, node: str) -> tuple[str, str]:
    """The link to a node's folder in the folder of a database, and its target."""
    return f"{base}/{node}", f"../{'../' * base.count('/')}{node}"


def copies(record: EpochRecord) -> dict[str, str]:
    """In place of links, in an object store: the files' originals, by path; all paths are in the epoch's folder.

    They are what handlers wrote, and the data files of random keys, whose database lies deeper than other items'.
    """
    if not record.objects:
        return {}
    originals = {}
    for number, node in enumerate(record.nodes):
        for file in node.files:
            item = record.items[file.item]
            original = record.path(number, file)
            if item.kind is ItemKind.FILES:
                originals[file.path] = original
            elif item.kind is ItemKind.ARRAYS and item.handler in key_folders():
                originals[original.replace("/", f"/{key_folders()[item.handler]}/", 1)] = original
    return originals


def _link_files(view: View, record: EpochRecord, item: str) -> None:
    """Adds a link for each file that handlers wrote."""
    for path, original in _handler_files(view, record, item).items():
        view.links[path] = f"{'../' * path.count('/')}{original}"


def _link_data(view: View, base: str, nodes: Iterable[str]) -> None:
    """Adds a link to each node's folder, in the folder of a database."""
    view.links.update(link_in(base, node) for node in sorted(nodes))


def _handler_files(view: View, record: EpochRecord, item: str) -> dict[str, str]:
    """Where the files of handlers lie in an epoch, by their paths in the view, whose folders are added."""
    folders = {item}
    originals = {}
    for number, node in enumerate(record.nodes):
        for file in (file for file in node.files if file.item == item):
            folders.update(paths.parents(file.path))
            originals[file.path] = record.path(number, file)
    view.folders += sorted(folders)  # parents first
    return originals


def _stand_in(content: Mapping[str, str]) -> bytes:
    """What Orbax reads, as an item of JSON, in a folder that holds nothing for it."""
    return json.dumps({"format": paths.FORMAT, **content}, separators=(",", ":")).encode()
