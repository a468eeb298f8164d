"""How folders come to their places, and how they go out of sight, on stores with rename.

Every run that writes has a folder of its own, its home, and moves every folder through it. A newer run takes over by
moving the home away: from then on every rename out of it, and into it, fails. Names in a home say what the newer run
does with a folder whose owner was killed:

| name | state | the newer run |
| --- | --- | --- |
| `removed-<id>`, `removed-<id>-<former name>` | being removed | removes it |
| `moving-<id>-<destination>` | on the move | moves it there; if there is something by now, removes it |
| the home of an older run, under its own name | taken over | looks in it for what is on the move, then removes it |
| anything else: attempts, drafts | unfinished | removes it |

Epochs that are *kept* out of sight lie in the directory itself: in `rolled-back-<id>/`, in `damaged-<id>/`, or in the
folder that `todelete_subdir` names. In names `/` is `%2F`.

`unclaimed-<id>…` beside the homes is no home. A run makes its home under that name, and renames it once it holds the
owner. At its end the run gives its home that name again, and then removes it. A newer run removes what has such a name.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from absl import logging

from epochckpt.errors import UncertainError
from epochckpt.format import paths
from epochckpt.storage.store import check_path

if TYPE_CHECKING:
    from epochckpt.storage import Store

_MOVING = re.compile(r"moving-[0-9a-f]{16}-(.+)\Z")
_REMOVED = re.compile(r"removed-[0-9a-f]{16}(?:-(.+))?\Z")


def removed(home: str, former: str = "") -> str:
    """A fresh name for a folder that is removed."""
    return paths.join(home, f"removed-{paths.new_id()}" + (f"-{_escaped(former)}" if former else ""))


def moving(home: str, destination: str) -> str:
    """A fresh name for a folder that is on its way to a path of the directory."""
    return paths.join(home, f"moving-{paths.new_id()}-{_escaped(destination)}")


def _escaped(path: str) -> str:
    return urllib.parse.quote(path, safe="")


def parse_moving(name: str) -> str | None:
    """The destination of a folder on the move, by its name; None for other names."""
    found = _MOVING.match(name)
    try:
        return check_path(urllib.parse.unquote(found[1]), root_allowed=False) if found else None
    except ValueError:  # no name of ours
        return None


def parse_removed(name: str) -> str | None:
    """The former name of a folder that is being removed, perhaps empty; None for other names."""
    found = _REMOVED.match(name)
    return urllib.parse.unquote(found[1] or "") if found else None


def immovable(error: OSError) -> bool:
    """Whether no rename can move it: overlayfs says so of folders in a lower layer."""
    return error.errno == errno.EXDEV


# -- to its place ------------------------------------------------------------------------------------------------------


def put(store: Store, home: str, staged: str, final: str, *, replace: bool = False) -> str | None:
    """Gives a staged folder its final name, at once; `settle` then makes that durable.

    With `replace`, a folder of that name gives way, and its path is returned. At any moment one of the two is there (on
    a file system that cannot exchange folders, such as NFS: is there again after the next run's `rescue`).

    Raises:
        FileExistsError: something has the name, and does not give way.
        FileNotFoundError: `staged` or `final` is gone; nothing has changed.
        OSError: the folder has not moved; over a network it may have.
    """
    if not replace:
        store.rename(staged, final)
        return None
    old = staged
    away = removed(home, final)
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
    with contextlib.suppress(OSError):  # the commit does not depend on it
        store.rename(old, away)
        return away
    return old


def settle(store: Store, home: str, epoch: int, final: str, old: str | None) -> None:
    """Makes what `put` did durable; where that fails, takes it back and raises UncertainError."""
    parent = os.path.dirname(final)
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
    """Moves a folder, durably, to a new path that keeps it; after an OSError it is where it was, if it is not gone."""
    draft = moving(home, where)
    store.rename(path, draft)
    try:
        _make_parent(store, home, where)
        store.rename(draft, where)
    except OSError:
        with contextlib.suppress(OSError):  # else it is on the move
            store.rename(draft, path)
        raise
    store.sync_folder(os.path.dirname(where))
    store.sync_folder(os.path.dirname(path))


def make_folder(store: Store, home: str, folder: str) -> None:
    """Makes a folder of the directory, by way of home, unless it is there."""
    if not store.exists(folder):
        draft = removed(home)
        store.make_folder(draft)
        with contextlib.suppress(FileExistsError):
            store.rename(draft, folder)


def _make_parent(store: Store, home: str, path: str) -> None:
    if folder := os.path.dirname(path):
        make_folder(store, home, folder)
        store.sync_folder(os.path.dirname(folder))


def move(store: Store, home: str, src: str, dst: str) -> None:
    """Renames a folder that a record hides from readers; one that no rename moves is copied, by way of home."""
    try:
        store.rename(src, dst)
        return
    except OSError as error:
        if not immovable(error):
            raise
    draft = removed(home)
    store.copy_tree(src, draft)
    store.rename(draft, dst)
    store.sync_folder(os.path.dirname(dst))
    remove_here(store, home, src)


def remove_here(store: Store, home: str, path: str) -> None:
    """Removes a folder that no rename moves where it lies; FileNotFoundError if a newer run has taken over."""
    # A run that takes over after this look, and saves an epoch of this name before the removal has ended, could lose
    # that epoch. This is the price where no rename is possible, and only there.
    store.list(home)
    store.remove_tree(path)


# -- after a kill ------------------------------------------------------------------------------------------------------


def on_the_move(store: Store, home: str) -> Iterator[tuple[str, str]]:
    """(path, destination) of each folder on the move in a home, and in the homes that it has taken over."""
    try:
        entries = store.list(home)
    except (FileNotFoundError, NotADirectoryError):  # gone by now
        return
    for entry in entries:
        path = paths.join(home, entry.name)
        where = parse_moving(entry.name)
        if where is not None:
            yield path, where
        elif entry.is_folder and entry.name.endswith(paths.TMP_SUFFIX):
            yield from on_the_move(store, path)


def rescue(store: Store, home: str, taken: str) -> None:
    """Finishes every move in a home that was `taken` over; only then may that home be removed."""
    for path, where in list(on_the_move(store, taken)):
        if store.exists(where):
            store.rename(path, removed(home, where))
            continue
        logging.warning("%s: %s is moved to its place: a run was killed on the way", store.root, where)
        _make_parent(store, home, where)
        move(store, home, path, where)
        store.sync_folder(os.path.dirname(where))


def take_over(store: Store, home: str, older: str) -> str | None:
    """Takes an older home over, so that its owner's next step there fails, and finishes its moves.

    Returns its new path, to be removed; None if it is gone (or the caller's home is: then every further step fails).
    """
    away = paths.join(home, older)
    try:
        store.rename(older, away)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not immovable(error):
            raise
        rescue(store, home, older)  # where it lies: a run that left it in a lower layer has ended
        store.remove_tree(older)
        return None
    rescue(store, home, away)
    return away


def leave(store: Store, home: str, last_name: str | None = None) -> None:
    """Removes the caller's own home at its end, once every folder on the move in it is in its place.

    With a `last_name` it gets that name first: while it is being removed, it must not look like the home of a run.
    """
    rescue(store, home, home)
    if last_name is not None:
        with contextlib.suppress(FileNotFoundError):  # a newer run has taken over
            store.rename(home, last_name)
    store.remove_tree(last_name or home)
