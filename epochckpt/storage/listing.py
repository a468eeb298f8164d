"""Listings of folders that others may remove meanwhile: what is gone has no names, and is no error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epochckpt.storage.store import Store


def names(store: Store, path: str) -> list[tuple[str, bool]]:
    """The names in a folder, with whether each is a folder; none if it is gone."""
    try:
        return [(entry.name, entry.is_folder) for entry in store.list(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def walk(store: Store, path: str) -> Iterator[tuple[str, bool]]:
    """Every path below a folder, parents first, with whether it is a folder."""
    for name, is_folder in names(store, path):
        below = f"{path}/{name}" if path else name
        yield below, is_folder
        if is_folder:
            yield from walk(store, below)
