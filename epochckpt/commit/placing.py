"""How a folder comes to its place, and what becomes of a folder that is out of sight: stores with rename.

Whoever writes has a folder of its own, its home. Everything on its way goes through there, because whoever takes over
moves the home away: from then on every rename out of it, and into it, fails. What lies in a home says by its name what
is to become of it, if its owner is killed:

| name | kind | whoever takes over |
| --- | --- | --- |
| `removed-<id>`, `removed-<id>-<what it was>` | being removed | removes it |
| `moving-<id>-<where to>` | on the move | moves it there; if something has come there meanwhile, removes it |
| the home of an owner before, under its own name | taken over | looks in it for what is on the move, then removes it |
| anything else: attempts, drafts | not finished | removes it |

What is to be *kept* out of sight lies in the directory itself: `rolled-back-<id>/`, `damaged-<id>/`, the folder that
`todelete_subdir` names. In names `/` is `%2F`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import re
import urllib.parse
from collections.abc import Iterator

from absl import logging

from epochckpt.errors import UncertainError
from epochckpt.format import paths
from epochckpt.storage import Store
from epochckpt.storage.store import check_path

_MOVING = re.compile(r"moving-[0-9a-f]{16}-(.+)\Z")
_REMOVED = re.compile(r"removed-[0-9a-f]{16}(?:-(.+))?\Z")


def removed(home: str, what: str = "") -> str:
    """A fresh name for something that is removed."""
    return paths.join(home, f"removed-{paths.new_id()}" + (f"-{_escaped(what)}" if what else ""))


def moving(home: str, where: str) -> str:
    """A fresh name for something that is on its way to a path of the directory."""
    return paths.join(home, f"moving-{paths.new_id()}-{_escaped(where)}")


def parse_moving(name: str) -> str | None:
    """Where something is on the way to, if it has such a name."""
    found = _MOVING.match(name)
    try:
        return check_path(urllib.parse.unquote(found[1]), root_allowed=False) if found else None
    except ValueError:  # somebody else's
        return None


def parse_removed(name: str) -> str | None:
    """What is being removed, if it has such a name; empty where that is not said."""
    found = _REMOVED.match(name)
    return urllib.parse.unquote(found[1] or "") if found else None


def _escaped(path: str) -> str:
    return urllib.parse.quote(path, safe="")


def immovable(error: OSError) -> bool:
    """Whether no rename can move it: overlayfs says so of folders in a lower layer."""
    return error.errno == errno.EXDEV


# -- to its place ------------------------------------------------------------------------------------------------------


def put(store: Store, home: str, staged: str, final: str, *, replace: bool = False) -> str | None:
    """Gives a staged folder its name, at once; `settle` then makes that durable.

    Args:
        store: the directory.
        home: the caller's folder.
        staged: a folder in it.
        final: its name from now on.
        replace: what has the name gives way. At any moment it is there, or the new one (without an exchange of folders,
            such as on NFS: is there again when whoever takes over has looked, see `rescue`).

    Returns:
        Where what it replaced lies now; None if nothing was.

    Raises:
        FileExistsError: something has the name, and is not to be replaced.
        FileNotFoundError: `staged` or `final` is gone; nothing has changed.
        OSError: it has not happened; over a network it may have.
    """
    if not replace:
        store.rename(staged, final)
        return None
    old, away = staged, removed(home, final)
    try:
        store.exchange(staged, final)
    except io.UnsupportedOperation:
        old = moving(home, final)
        store.rename(final, old)
        try:
            store.rename(staged, final)
        except BaseException:
            with contextlib.suppress(OSError):
                store.rename(old, final)
            raise
    with contextlib.suppress(OSError):  # the new one is in its place, and that counts
        store.rename(old, away)
        return away
    return old


def settle(store: Store, home: str, epoch: int, final: str, old: str | None) -> None:
    """Makes durable what `put` did; where that fails, takes it back.

    Raises:
        UncertainError: it failed: after a crash it may be there nevertheless.
    """
    parent = _parent(final)
    try:
        store.sync_folder(parent)
        if old is not None:
            store.sync_folder(home)
    except OSError as error:
        reason = f"{paths.join(store.root, parent)} could not be made durable after the rename ({error})"
        try:
            if old is None:
                store.rename(final, removed(home, final))
            else:
                put(store, home, old, final, replace=True)
        except OSError as problem:
            raise UncertainError(epoch, f"{reason}, and it could not be taken out of sight ({problem})") from error
        raise UncertainError(epoch, f"{reason}; it was taken out of sight") from error


def keep(store: Store, home: str, path: str, where: str) -> None:
    """Moves a folder to where it is kept, durably; killed on the way, it is moved there by whoever takes over.

    Args:
        store: the directory.
        home: the caller's folder.
        path: the folder.
        where: its new path, which nothing has; the folder above is made if it is missing.

    Raises:
        OSError: it is where it was, if it is not gone; with EXDEV (`immovable`): no rename moves it.
    """
    draft = moving(home, where)
    store.rename(path, draft)
    try:
        _make_parent(store, home, where)
        store.rename(draft, where)
    except OSError:
        with contextlib.suppress(OSError):  # else it is on the move
            store.rename(draft, path)
        raise
    store.sync_folder(_parent(where))
    store.sync_folder(_parent(path))


def make_folder(store: Store, home: str, folder: str) -> None:
    """Makes a folder of the directory unless it is there, by way of home."""
    if not store.exists(folder):
        draft = removed(home)
        store.make_folder(draft)
        with contextlib.suppress(FileExistsError):
            store.rename(draft, folder)


def _make_parent(store: Store, home: str, path: str) -> None:
    if folder := _parent(path):
        make_folder(store, home, folder)
        store.sync_folder(_parent(folder))


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def move(store: Store, home: str, src: str, dst: str) -> None:
    """Renames a folder; one that no rename moves is copied, and the original removed.

    What must not be seen meanwhile is hidden by a record. The copy goes by way of home.
    """
    try:
        store.rename(src, dst)
        return
    except OSError as error:
        if not immovable(error):
            raise
    draft = removed(home)
    store.copy_tree(src, draft)
    store.rename(draft, dst)
    store.sync_folder(_parent(dst))
    remove_here(store, home, src)


def remove_here(store: Store, home: str, path: str) -> None:
    """Removes a folder that no rename moves, unless somebody has taken over.

    Whoever takes over after that look, finishes all this, and saves an epoch of this name before we have come to the
    end, could lose that epoch: only where no rename is possible.
    """
    store.list(home)  # raises FileNotFoundError
    store.remove_tree(path)


# -- after a kill ------------------------------------------------------------------------------------------------------


def on_the_move(store: Store, home: str) -> Iterator[tuple[str, str]]:
    """(path, where to) of what is on the move in a home, and in the homes that it has taken over."""
    try:
        entries = store.list(home)
    except (FileNotFoundError, NotADirectoryError):  # gone by now
        return
    for entry in entries:
        path, where = paths.join(home, entry.name), parse_moving(entry.name)
        if where is not None:
            yield path, where
        elif entry.is_folder and entry.name.endswith(paths.TMP_SUFFIX):
            yield from on_the_move(store, path)


def rescue(store: Store, home: str, taken: str) -> None:
    """Finishes every move in a home that was taken over; only then may that be removed.

    Args:
        store: the directory.
        home: the caller's folder.
        taken: the home that was taken over.
    """
    for path, where in list(on_the_move(store, taken)):
        if store.exists(where):
            store.rename(path, removed(home, where))
            continue
        logging.warning("%s: %s is moved to its place: a run was killed on the way", store.root, where)
        _make_parent(store, home, where)
        move(store, home, path, where)
        store.sync_folder(_parent(where))


def take_over(store: Store, home: str, older: str) -> str | None:
    """Takes an older home: whatever its owner still tries there fails from now on. Finishes what was on the move.

    Returns:
        Where it is now, to be removed; None if nothing is left of it (or of home: then every further step fails).
    """
    away = paths.join(home, older)
    try:
        store.rename(older, away)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not immovable(error):
            raise
        rescue(store, home, older)  # where it lies: whoever left it in a lower layer is not at work
        store.remove_tree(older)
        return None
    rescue(store, home, away)
    return away


def leave(store: Store, home: str) -> None:
    """Removes the caller's own home at its end; something that could not be moved to its place stays in it."""
    rescue(store, home, home)
    store.remove_tree(home)
