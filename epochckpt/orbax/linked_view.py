"""The Orbax view of an epoch on a file system: written beside the nodes' folders before the commit, with symlinks."""

import contextlib
import dataclasses
import errno
import functools
import io
import os
from collections.abc import Collection, Iterable, Mapping

from absl import logging

from epochckpt._threads import Pool
from epochckpt.errors import AccessError, DamagedError, EpochDeletedError, UnsupportedError, unreadable
from epochckpt.format import EpochRecord, NodeEntry, checksums, paths
from epochckpt.orbax.view import WHOLE, Run, Views
from epochckpt.orbax.view_layouts import ALIAS_FILE, View, link_in
from epochckpt.storage import Store

_PREFIX = "view-"  # of folders that repairs work in
_warned: set[str] = set()  # directories; once per process


def link_node(store: Store, folder: str, node: str, record: bool, bases: Iterable[str]) -> None:
    """Makes a node's links in the folder of an epoch, see `orbax.view`; by the node itself.

    One link shows the node's `record` as an item of JSON. One link in each folder of a database (`bases`) leads to the
    node's folder. Nodes make their own links so that the primary need not make all of them before the commit.
    """
    with contextlib.suppress(io.UnsupportedOperation):  # `write` leaves the whole view out then
        if record:
            store.link(paths.join(folder, node, paths.JSON_FILE), paths.NODE_RECORD)
        for base in bases:
            path, target = link_in(base, node)
            for above in paths.parents(path):
                with contextlib.suppress(FileExistsError):
                    store.make_folder(paths.join(folder, above))
            store.link(paths.join(folder, path), target)


def write(store: Store, folder: str, record: EpochRecord, view: View | None, run: Run) -> EpochRecord:
    """Writes a view into an epoch's folder, which has its nodes; durably but for the names in that folder itself.

    The record, which notes the view, comes back, with another note where the file system has no symlinks.
    """
    for name, item in record.items.items():
        if item.arrays is not None and (view is None or name not in view.folders):  # nodes may have taken it for one
            store.remove_tree(paths.join(folder, name))
    if view is None:
        return record
    try:
        # The first node made this link of its own accord, or has another file of that name.
        if not store.exists(paths.join(folder, record.node_folder(0), paths.JSON_FILE)):
            raise io.UnsupportedOperation("see link_node")
        _make(store, view, folder, run)
    except io.UnsupportedOperation:
        for name in (*view.aliases, *view.folders):
            store.remove_tree(paths.join(folder, name))
        if store.root not in _warned:
            _warned.add(store.root)
            logging.warning(
                "%s: the file system has no symlinks, which the Orbax view needs: stock Orbax cannot read the epochs "
                "that are saved there, epochckpt can. For stock Orbax export them, or copy them with CopyUpload to "
                "another file system; orbax_view=False saves this line",
                store.root,
            )
        lost = {WHOLE: {WHOLE: "the file system has no symlinks"}}
        return dataclasses.replace(record, orbax_unsupported=lost, orbax_view=None)
    return record


def check(store: Store, folder: str, record: EpochRecord) -> dict[str, DamagedError] | None:
    """Compares the view of a committed epoch with its record; one that was never made has no damage.

    Returns an error per file or link that is not as it was written, by path in the epoch's folder; None if nothing of
    the view is there. A copy in which a link became what it led to is as good as the original.
    """
    if record.orbax_view is None:
        return {}
    view = _expected(record)
    links = view.links | view.node_links | view.aliases
    nodes = {record.node_folder(number): entry for number, entry in enumerate(record.nodes)}
    places = [os.path.join(store.root, folder, path) for path in (*record.orbax_view, *view.links, *view.aliases)]
    if not any(map(os.path.lexists, places)):
        return None
    damage = {}
    for path in sorted({*record.orbax_view, *links}):
        at = paths.join(folder, path)
        try:
            if path in record.orbax_view:
                problem = compare_file(store, at, record.orbax_view[path], view.files.get(path))
            else:
                problem = _compare_link(store, folder, nodes, path, links[path], view)
        except PermissionError as error:  # a link that leads out of the directory, for example
            problem = f"cannot be read: {error}"
        except OSError as error:
            problem = damage_of(at, error)
        if problem:
            damage[path] = DamagedError(at, problem)
    return damage


def _expected(record: EpochRecord) -> View:
    """The view of a committed epoch; without aliases where it was made when there were none."""
    view = Views().build(record)
    return view if ALIAS_FILE in (record.orbax_view or ()) else dataclasses.replace(view, aliases={})


def damage_of(path: str, error: OSError) -> str:
    """The damage that an error of storage tells of; raises the error if it tells of none."""
    found = unreadable(path, error)
    if not isinstance(found, DamagedError):
        raise error
    return found.problem


def compare_file(store: Store, path: str, recorded: tuple[int, str], fresh: bytes | None) -> str:
    """What is wrong with a file of the view; one made anew, maybe by another epochckpt, is as good as the first."""
    known = {recorded} if fresh is None else {recorded, (len(fresh), checksums.digest(fresh))}
    size = store.size(path)
    if size not in {length for length, _ in known}:
        return f"has {size} bytes, {recorded[0]} were written"
    if (size, checksums.digest(store.read(path, limit_bytes=size))) not in known:
        return "has other bytes than were written"
    return ""


def _compare_link(store: Store, folder: str, nodes: Mapping[str, NodeEntry], path: str, target: str, view: View) -> str:
    """The damage of a link, or of a copy in its place, in words; empty if it is whole. `nodes` by folder."""
    place = os.path.join(store.root, folder, path)
    itself = os.path.normpath(os.path.join(os.path.dirname(path), target))
    if os.path.realpath(place) == os.path.realpath(os.path.join(store.root, folder, itself)):
        return ""
    if not os.path.lexists(place):
        return "is missing"
    # A link to a node stands for the node's data files of the item, an alias for an item, any other one for a file.
    files = [""]
    item = path.split("/")[0]
    if itself in nodes:
        files = _data_files(nodes[itself], item)
    elif path in view.aliases:
        below = f"{itself}/"
        files = [at.removeprefix(below) for at in view.files if at.startswith(below)]
        linked = (at.removeprefix(below) for at in view.links if at.startswith(below))
        files += [paths.join(node, file) for node in linked for file in _data_files(nodes[node], itself)]
    for file in files:
        original = paths.join(itself, file)
        if not same(store, paths.join(folder, path, file), paths.join(folder, original)):
            return f"does not lead to {target}" if os.path.islink(place) else f"is no copy of {original}"
    return ""


def _data_files(node: NodeEntry, item: str) -> list[str]:
    return [file.path for file in node.files if file.item == item and file.data_start]


def same(store: Store, one: str, other: str) -> bool:
    """Whether two files have the same bytes."""
    with store.open_reader(one) as a, store.open_reader(other) as b:
        return a.size == b.size and all(one == other for one, other in zip(a.pieces(), b.pieces(), strict=True))


def repair(store: Store, folder: str, record: EpochRecord) -> list[str]:
    """Makes anew what is damaged or missing of a view, and nothing else; returns its paths in the epoch's folder.

    Each file, and each item's folder as a whole, is exchanged for a new one. They are made in a folder within the
    epoch's, so that a view never comes to an epoch that has taken this one's place meanwhile.
    """
    where = f"{store.root}/{folder}"
    damage = check(store, folder, record)
    view = _expected(record)
    links = view.links | view.node_links | view.aliases
    wrong = {*(record.orbax_view or ()), *links} if damage is None else damage.keys()
    by_node = view.node_links.keys()  # in a node's folder, of which nothing else is exchanged
    parts = sorted(wrong & by_node | {path.split("/")[0] for path in wrong - by_node})
    if not parts:
        return []
    ours = {path.split("/")[0] for path in (*view.folders, *view.files, *view.aliases)} - {
        entry.folder for entry in record.nodes
    }
    check_known(where, parts, ours | by_node)
    staging = paths.join(folder, f"{_PREFIX}{paths.new_id()}{paths.TMP_SUFFIX}")
    try:
        for entry in store.list(folder):  # of a repair that was killed
            if entry.is_folder and entry.name.startswith(_PREFIX) and entry.name.endswith(paths.TMP_SUFFIX):
                store.remove_tree(paths.join(folder, entry.name))
        store.make_folder(staging)
        try:
            for number, part in enumerate(parts):
                draft = paths.join(staging, f"new-{number}")
                _make(store, view, draft, Pool(1).run, part)
                _exchange(store, draft, paths.join(folder, part), paths.join(staging, f"old-{number}"))
                store.sync_folder(paths.join(folder, part.rpartition("/")[0]))
        finally:
            store.remove_tree(staging)
    except io.UnsupportedOperation as error:
        raise UnsupportedError(f"{where}: the Orbax view needs symlinks: {error}. An export does without") from error
    except FileNotFoundError as error:
        raise EpochDeletedError(record.epoch, store.root, "while its Orbax view was being repaired") from error
    except PermissionError as error:
        raise AccessError(f"{where}: {error}; repairing the Orbax view needs write access to it") from error
    return parts


def check_known(where: str, wrong: Iterable[str], ours: Collection[str]) -> None:
    """Refuses to repair what this epochckpt does not make."""
    if unknown := [path for path in wrong if path not in ours]:
        raise UnsupportedError(
            f"{where}: this epochckpt makes no {', '.join(unknown)}, which belongs to the epoch's Orbax view: another "
            "version wrote it. An export has a view of its own"
        )


def _make(store: Store, view: View, folder: str, run: Run, part: str = "") -> None:
    """Makes a view below a folder, or a part of it in the folder's place, durably but for the names in the folder."""

    def place(path: str) -> str:
        return paths.join(folder, path.removeprefix(part).strip("/"))

    def of(found: Iterable[str]) -> list[str]:
        return [path for path in found if not part or path == part or path.startswith(f"{part}/")]

    existing = set[str]()
    for path in of(view.folders):
        try:
            store.make_folder(place(path))
        except FileExistsError:  # the nodes have made it, see `link_node`
            existing |= {paths.join(path, entry.name) for entry in store.list(place(path))}
    links = view.links | view.aliases | (view.node_links if part else {})
    made = [functools.partial(store.link, place(path), links[path]) for path in of(links) if path not in existing]
    run(made + [functools.partial(store.create, place(path), view.files[path]) for path in of(view.files)])
    run([functools.partial(store.sync_folder, place(path)) for path in reversed(of(view.folders))])


def _exchange(store: Store, new: str, final: str, old: str) -> None:
    """Puts a part in its place; what was there is at `old` or `new` then, or gone."""
    if os.path.lexists(os.path.join(store.root, final)):
        try:
            store.exchange(new, final)
            return
        except io.UnsupportedOperation:
            store.rename(final, old)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            store.remove_tree(final)  # overlayfs: no rename moves it
    store.rename(new, final)
