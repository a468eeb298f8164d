"""The Orbax view: small files beside the data that let stock Orbax read an epoch without epochckpt.

Built from an epoch's record without I/O:

    <item>/manifest.ocdbt index.0 _METADATA _sharding _strings.json array_metadatas/process_0
    <item>/<node> -> ../<node>                (1) for items of arrays: a database takes only paths below its folder.
    <item>/<file> -> ../<node>/<item>/<file>  for files of handlers, JSON included.
    state, pytree -> default                  for the unnamed item: Orbax's v1 looks for these names.
    <node>/metadata -> node.json              (1) lets Orbax take a node's folder for an item.
    metrics/metrics  _CHECKPOINT_METADATA  commit_success.txt

(1) In a job of several processes, each node makes these links itself.

`parameters` makes the databases, and `view_layouts` knows what differs in an object store. `linked_view` and
`object_view` write the view.

What Orbax cannot express is left out, never wrong, and named in `View.unsupported`; in a sequence a None replaces it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from absl import logging

from epochckpt._text import readable
from epochckpt._units import several
from epochckpt.errors import say
from epochckpt.format import ArrayItem, DataFile, EpochRecord, ItemKind, ItemRecord, checksums, paths
from epochckpt.format import tree as tree_lib
from epochckpt.orbax import parameters
from epochckpt.orbax.handler_types import jax_key_handler, json_handler, key_folders, takes_array, tree_handler
from epochckpt.orbax.parameters import Basis, Parameters, Scalars
from epochckpt.orbax.step_files import COMMIT, STEP_RECORD
from epochckpt.orbax.view_layouts import METRICS_FILE, Layout, View, copies, database_folder, layout_of

WHOLE = "*"
"""In place of a leaf: the whole item, or the number of further leaves. In place of an item: the whole epoch."""

_MAX_NOTED = 100  # leaves that a record names as unsupported
_FEW = 3

Run = Callable[[list[Callable[[], None]]], None]  # runs calls, in parallel if it likes; raises the first error


class Views:
    """Builds the views of one manager's epochs; what does not change from epoch to epoch is built once."""

    def __init__(self, max_entries: int | None = None) -> None:
        self._built: dict[str, Parameters] = {}  # of the last epoch, by item
        self._said: set[tuple[str, str]] = set()  # items, and the messages already logged for them
        self._max_entries = max_entries

    def note(self, record: EpochRecord) -> tuple[View | None, EpochRecord]:
        """The view of an epoch that is about to be committed, or None, and the record with the note of it.

        What stock Orbax will not see is logged, for the first such epoch.
        """
        try:
            view = self.build(record)
        except Exception as error:  # Orbax's form cannot take it: the epoch itself is not in danger
            if self._is_new(WHOLE, say(error)):
                logging.exception("checkpoint %d: stock Orbax will not be able to read it", record.epoch)
            return None, dataclasses.replace(record, orbax_unsupported={WHOLE: {WHOLE: say(error)}}, orbax_view=None)
        for item, leaves in view.unsupported.items():
            text = "item %s: stock Orbax will not see %d of its leaves: %s"
            goes_without_saying = record.items[item].kind is ItemKind.NODE
            level = logging.INFO if goes_without_saying else logging.WARNING
            if self._is_new(item, few(leaves)):
                logging.log(level, text, item, len(leaves), few(leaves))
        files = {path: (len(data), checksums.digest(data)) for path, data in view.files.items()}
        return view, dataclasses.replace(record, orbax_unsupported=view.unsupported, orbax_view=files)

    def _is_new(self, item: str, what: str) -> bool:
        """Whether this has not been logged yet; a long run would repeat it with every commit."""
        known = (item, what) in self._said
        self._said.add((item, what))
        return not known

    def build(self, record: EpochRecord, layout: Layout | None = None) -> View:
        """The view of an epoch; by default as it lies beside the epoch."""
        layout = layout or layout_of(record)
        view = View()
        for number in range(len(record.nodes)):
            layout.add_node(view, record, number)
        for name, item in record.items.items():
            self._add_item(view, record, layout, name, item)
        layout.add_aliases(view, record)
        if record.metrics is not None:
            view.folders.append("metrics")
            view.files[METRICS_FILE] = json.dumps(record.metrics).encode()
            view.handlers["metrics"] = json_handler()
        step = {
            "item_handlers": view.handlers,
            "metrics": record.metrics or {},
            "performance_metrics": {},
            "init_timestamp_nsecs": record.started_ns,
            "commit_timestamp_nsecs": record.committed_ns,
            "custom_metadata": dict(record.custom_metadata),
        }
        view.files[STEP_RECORD] = json.dumps(step).encode()
        view.files[COMMIT] = layout.commit_mark
        view.copies = copies(record)
        return view

    def _add_item(self, view: View, record: EpochRecord, layout: Layout, name: str, item: ItemRecord) -> None:
        if item.kind is ItemKind.FILES:
            layout.add_files(view, record, name)
            view.handlers[name] = item.handler
            return
        if item.arrays is None:
            why = "it differs per node, which Orbax has no form for"
        else:
            why = self._add_arrays(view, record, layout, name, item.arrays)
        if why:
            view.unsupported[name] = {WHOLE: why}
            layout.add_lost_item(view, name, why)
        elif item.arrays is not None and item.arrays.is_bare and not takes_array(item.handler):
            view.handlers[name] = tree_handler()  # Orbax 0.11.33's standard one reads no such item without a target
        else:
            view.handlers[name] = item.handler

    def _add_arrays(self, view: View, record: EpochRecord, layout: Layout, name: str, arrays: ArrayItem) -> str:
        """Adds an item of arrays; returns why Orbax can have none of it, if so."""
        item = record.items[name]
        leaves = arrays.leaves
        values = {i: tree_lib.value_from_json(leaves[i].name, leaves[i].kind, v) for i, v in item.values.items()}
        scalars = {i: parameters.scalar_of(value) for i, value in values.items()}
        basis = Basis.of(record, name, arrays, scalars)
        built = self._built.get(name)
        if built is None or not built.basis.is_that_of(basis):
            if reason := parameters.reason_against(item, arrays, self._max_entries or parameters.MAX_ENTRIES):
                return reason
            built = self._built[name] = Parameters(basis, record, name, scalars)
        if not built.tree:
            return _none_of_its_leaves(built.unsupported)
        base = database_folder(name, item)
        view.folders.append(name)
        if item.handler in key_folders():
            view.folders += [base, f"{base}_metadata"]
            metadata = _key_metadata(arrays, item.handler)
            view.files[f"{base}_metadata/{paths.JSON_FILE}"] = parameters.to_json(metadata)
        view.folders.append(f"{base}/array_metadatas")
        files = _database(built, record, name, layout, scalars, values)
        view.files.update({f"{base}/{path}": data for path, data in files.items()})
        layout.add_data(view, name, base, built.nodes)
        if built.unsupported:
            view.unsupported[name] = _noted(built.unsupported)
        return ""


def _database(
    built: Parameters,
    record: EpochRecord,
    name: str,
    layout: Layout,
    scalars: Scalars,
    values: Mapping[int, Any],
) -> dict[str, bytes]:
    """The files of an item's database, by path in its folder; the values of Python are those of this epoch."""
    numbers = dict[bytes, bytes]()
    strings = dict[str, Any]()
    for number, scalar in scalars.items():
        if scalar is None or number not in built.names:
            continue
        path = built.names[number]
        kind, data = scalar
        if kind == parameters.TEXT:
            strings[path] = values[number]
        else:
            numbers[parameters.parameter_key(path, "0")] = data
    token = bytes.fromhex(checksums.digest(f"{record.save_id} {name}".encode()))
    files = {**built.index.files(numbers, token, record.committed_ns, layout.data_path(record)), **built.files}
    if strings:
        files["_strings.json"] = parameters.to_json(strings)
    return files


def _noted(unsupported: Mapping[str, str]) -> dict[str, str]:
    """What a record says of leaves that Orbax cannot have: not all of many, so that the record stays small."""
    noted = dict(list(unsupported.items())[:_MAX_NOTED])
    if more := len(unsupported) - len(noted):
        noted[WHOLE] = f"and {several(more, 'leaf', 'leaves')} more"
    return noted


def _none_of_its_leaves(unsupported: Mapping[str, str]) -> str:
    if not unsupported:
        return "it has no leaves"
    more = f" and {len(unsupported) - _FEW} more" if len(unsupported) > _FEW else ""
    return f"Orbax has no form for any of its leaves: {few(unsupported)}{more}"


def _key_metadata(arrays: ArrayItem, handler: str) -> dict[str, bool]:
    """What Orbax's handlers of random keys put beside the key."""
    if handler == jax_key_handler():
        return {"typed": arrays.leaves[0].kind == "prng"}
    return {"legacy": all(leaf.path[0][0] == "s" for leaf in arrays.leaves)}


def bases(items: Mapping[str, ItemRecord], files: Iterable[DataFile]) -> list[str]:
    """The folders of the databases that point into a node's data files, as a rule: see `view_layouts.link_in`."""
    named = {file.item for file in files if file.data_start}
    folders = list[str]()
    for name, item in items.items():
        arrays = item.arrays
        if name in named and arrays and not parameters.reason_against(item, arrays, parameters.MAX_ENTRIES):
            folders.append(database_folder(name, item))
    return folders


def few(unsupported: Mapping[str, str]) -> str:
    """The first of them with their reasons, for messages."""
    return ", ".join(f"{readable(leaf)} ({why})" for leaf, why in list(unsupported.items())[:_FEW])


def reasons(item: str, unsupported: Mapping[str, str]) -> list[str]:
    """A line for each of an item's leaves that are left out, for messages."""
    return [f"{item if leaf == WHOLE else f'{item}: {leaf}'}: {why}" for leaf, why in unsupported.items()]
