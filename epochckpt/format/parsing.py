"""Reads the records back. Everything in them may be damaged or hostile.

Parsing checks types, ranges and cross references, and raises FormatError with the path of the file. Memory is bounded
by the size of the record.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from epochckpt import _collector
from epochckpt.errors import FormatError, FormatVersionError, unreadable
from epochckpt.format import checksums, codec, paths
from epochckpt.format.codec import Fields
from epochckpt.format.codec import user_data as user_data
from epochckpt.format.items import ItemKind, ItemRecord, parse_item
from epochckpt.format.records import MAX_FEATURE, MAX_RECORD_BYTES, NODE_ROWS, EpochRecord, NodeEntry, NodeRecord
from epochckpt.storage import Store

T = TypeVar("T")

_MAX_BRACES = 2**16
_MAX_SMALL_ITEMS = 1000  # items among which short ones are searched for
_MAX_ITEM_TEXT = 65_536  # bytes of a short one
_ITEMS = b',"items":{'
_KIND = b'":{"kind":"'  # with which the text of an item begins, after its name
_ITEM_TEXTS = tuple(f'{{"kind":"{kind.value}","handler":"'.encode() for kind in ItemKind)
_SHOWN_FEATURES = 10  # in an error
_OPENING = ord("{")
_PLAIN = bytes(set(range(256)) - set(b'"{}'))  # bytes that neither begin nor end a string or an object
_STRING = re.compile(rb'"[^"]*"')


def read_record(
    store: Store, path: str, parse: Callable[[str, bytes], T], *, limit_bytes: int = MAX_RECORD_BYTES
) -> T | None:
    """Reads a small file and returns what `parse` makes of path and content; None if there is no such file.

    DamagedError or FormatError: the file cannot be used. AccessError or StorageError: storage does not give it.
    """

    def read() -> T | None:
        try:
            data = store.read(path, limit_bytes=limit_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise FormatError(path, str(error)) from None
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            return parse(path, data)
        except RecursionError:
            raise FormatError(path, "is nested too deeply") from None

    return store.confirming_damage(read)


def open_record(path: str, data: bytes, kind: str, trees: bool = True) -> Fields:
    """The fields of a sealed record of a kind, for typed access; raises like `parse_epoch`."""
    checksums.check_seal(path, data)
    fields = Fields(path, checksums.parse_sealed(path, data if trees else _without_items(data)))
    if fields.data.get("format") != paths.FORMAT:
        raise FormatError(path, f"is no epochckpt record (format {str(fields.data.get('format'))[:40]!r})")
    _check_understood(fields)
    if fields.data.get("record") != kind:
        raise FormatError(path, f"is a {str(fields.data.get('record'))[:40]!r} record, expected {kind!r}")
    return fields


def _check_understood(fields: Fields) -> None:
    """Raises FormatVersionError for a record that only a newer epochckpt can read, before its fields are looked at."""
    remedy = "install a newer epochckpt. Nothing is known to be wrong with the record"
    version = fields.data.get("version")
    if type(version) is not int or version != paths.VERSION:
        problem = f"has format version {str(version)[:40]!r}; this epochckpt reads version {paths.VERSION}"
        raise FormatVersionError(fields.path, f"{problem}: {remedy}")
    if "requires" not in fields.data:
        return
    required = fields.array("requires")
    if not all(isinstance(name, str) and len(name) <= MAX_FEATURE for name in required):
        raise fields.fail("requires", f"names of features, of at most {MAX_FEATURE} characters")
    unknown = [name for name in required if name not in paths.FEATURES]
    if unknown:
        shown = ", ".join(map(repr, unknown[:_SHOWN_FEATURES]))
        problem = f"needs a newer epochckpt: it requires {shown}, which this one does not know"
        raise FormatVersionError(fields.path, f"{problem}; {remedy}", unknown[:_SHOWN_FEATURES])


def parse_node(path: str, data: bytes) -> NodeRecord:
    """Parses `node.json`; raises like `parse_epoch`."""
    fields = open_record(path, data, "node")
    record = codec.parse(NodeRecord, fields)
    if any(item.arrays is None for item in record.items.values()):
        raise fields.fail("items", "pytrees")
    if any(file.name for file in record.replicas):
        raise fields.fail("also", "data files")
    return record


def parse_epoch(path: str, data: bytes) -> EpochRecord:
    """Parses `epoch.json`; raises DamagedError, FormatVersionError (of a newer epochckpt) or FormatError."""
    with _collector.paused():
        return _epoch_record(open_record(path, data, "epoch"), trees=True)


def parse_head(path: str, data: bytes) -> EpochRecord:
    """Parses `epoch.json` without its items, in a small part of the time, and does not notice faults in them."""
    return _epoch_record(open_record(path, data, "epoch", trees=False), trees=False)


class SmallItems(NamedTuple):
    """The nodes of an epoch, and its items whose description is short, by name."""

    nodes: tuple[NodeEntry, ...]
    items: Mapping[str, ItemRecord]


def parse_small_items(path: str, data: bytes) -> SmallItems:
    """The items in `epoch.json` that no node has arrays of and whose text is short, in a very small part of the time.

    A record of another writer, with its fields in another order, seems to have none. It raises like `parse_epoch`, but
    does not notice faults in the rest.
    """
    checksums.check_seal(path, data)
    start = data.find(_ITEMS)
    end = data.find(b',"default_item":')
    if not 0 <= start < end:
        return SmallItems((), {})
    fields = Fields(path, checksums.parse_sealed(path, data[:start] + b"}"))
    nodes = NODE_ROWS.codec().read(fields, "nodes")
    large = {file.item for node in nodes for file in node.files if file.cells}
    texts = itertools.islice(_item_texts(data, start, end), _MAX_SMALL_ITEMS)
    entries = {name: _decoded(text) for name, text in texts if name not in large}
    return SmallItems(
        nodes, {name: parse_item(path, name, entry, len(nodes)) for name, entry in entries.items() if entry is not None}
    )


def _item_texts(data: bytes, start: int, end: int) -> Iterator[tuple[str, bytes]]:
    """The names of items, and the beginnings of their texts. As quotes in strings are escaped, it finds keys only."""
    while (end_of_name := data.find(_KIND, start, end)) >= 0:
        text = end_of_name + 2
        if data.startswith(_ITEM_TEXTS, text):  # else it is in the metadata of an item
            name = data[data.rfind(b'"', start, end_of_name) + 1 : end_of_name]
            yield name.decode(errors="replace"), data[text : min(text + _MAX_ITEM_TEXT, end)]
        start = text


def _decoded(text: bytes) -> object | None:
    """The JSON value with which a text begins; None if it does not end there."""
    try:
        return json.JSONDecoder().raw_decode(text.decode(errors="ignore"))[0]
    except ValueError:
        return None


def _without_items(data: bytes) -> bytes:
    """The text of a record without its items; the whole text if they cannot be cut out without parsing.

    JSON has raw quotes only at the ends of strings. So `,"items":{` is always a key, and the braces outside of strings
    say how deep it lies and where its value ends.
    """
    start = data.find(_ITEMS)
    end = data.find(b',"default_item":')
    if not 0 <= start < end or data.count(b"{", 0, start) != 1 or b"}" in data[:start]:
        return data  # the key is not in the outermost object, or a name has a brace
    items = data[start:end]
    if b"\\" in items:
        items = items.replace(b"\\\\", b"").replace(b'\\"', b"")
    braces = items.translate(None, _PLAIN).replace(b'""', b"")  # an even number of quotes ends and begins no string
    if b'"' in braces:
        braces = _STRING.sub(b"", braces)
    if len(braces) > _MAX_BRACES:
        return data
    depth = list(itertools.accumulate(1 if brace == _OPENING else -1 for brace in braces))
    whole = data[end - 1 : end] == b"}" and depth[-1:] == [0] and 0 not in depth[:-1]
    return data[:start] + data[end:] if whole else data


def _epoch_record(fields: Fields, trees: bool) -> EpochRecord:
    record = codec.parse(EpochRecord, fields, **({} if trees else {"items": {}, "inlined": {}}))
    if not record.nodes or len({node.name for node in record.nodes}) != len(record.nodes):
        raise fields.fail("nodes", "at least one node, with distinct names")
    if trees and record.default_item and paths.DEFAULT_ITEM not in record.items:
        raise fields.fail("items", f"the item {paths.DEFAULT_ITEM!r}")
    if record.per_node and len(record.nodes) != 1:
        raise fields.fail("per_node", "one node")
    return record
