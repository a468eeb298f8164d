"""What a path may be that is not the checkpoint directory that was expected. For error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from epochckpt import _text
from epochckpt.format import paths
from epochckpt.orbax import step_files, step_names
from epochckpt.storage import listing

if TYPE_CHECKING:
    from epochckpt.storage import Store

_LOOKED_INTO = 50  # folders, in search of checkpoint directories
_STEPS = 6  # looked into in each of them
_STEP_LIKE = re.compile(r"(?:\A|_)\d+\Z")


def no_folder(path: str) -> str:
    """What to say of a path that is a file, or does not exist."""
    if os.path.exists(path):
        levels = {paths.EPOCH_RECORD: "one level", paths.NODE_RECORD: "two levels"}.get(os.path.basename(path))
        record = f": a record of an epoch; pass the directory {levels} above its folder" if levels else ""
        return f"is a file{record or '; expected a directory of epochs'}"
    if os.path.islink(path):
        return f"is a broken link, to {os.readlink(path)}"
    above = path
    name = ""
    while not os.path.lexists(above):
        above, name = os.path.split(above)
    try:
        near = _text.near_names(name, os.listdir(above))
    except OSError:
        near = []
    hint = f"; near it: {', '.join(near)}" if near else ""
    return f"does not exist ({above} does{hint}); check the path"


def folder(store: Store, found: Mapping[str, bool]) -> str:
    """What to say of a folder that holds no epoch, but these names (with whether each is a folder)."""
    above = os.path.dirname(store.root.rstrip("/")) or store.root
    if not found:
        return "is empty: nothing was saved there yet, or it is another one; check the path"
    if paths.NODE_RECORD in found:
        return f"is the folder of one node of an epoch; pass the directory above the epoch, {os.path.dirname(above)}"
    if found.keys() & {paths.EPOCH_RECORD, step_files.STEP_RECORD}:
        return f"is the folder of a single epoch; pass its parent, {above}"
    if found.keys() & {step_files.TREE_RECORD, step_files.OCDBT, step_files.ARRAY_RECORDS}:
        return (
            f"is one item of a step of stock Orbax; pass the directory above the step, {os.path.dirname(above)}, or, "
            f"if a plain Checkpointer saved it, {above}"
        )
    if otherwise := step_names.named_otherwise(store, list(found.items())):
        return otherwise
    below = [n for n, is_folder in found.items() if is_folder and not n.startswith(".")][:_LOOKED_INTO]
    if inner := [f"{name}/" for name in below if holds_epochs(store, name)]:
        return f"holds checkpoint directories, but is not one itself: pass one of them ({step_names.few(inner)})"
    return f"holds no epochs but {step_names.few([f'{n}/' if is_folder else n for n, is_folder in found.items()])}"


def holds_epochs(store: Store, name: str) -> bool:
    """Whether a folder holds what looks like an epoch or a step."""
    try:
        inner = [n for n, is_folder in listing.names(store, name) if is_folder]
        if any(paths.parse_incarnation(n) or paths.parse_node_staging(n) for n in inner):
            return True
        below = [paths.join(name, n) for n in inner if _STEP_LIKE.search(n)][:_STEPS]
        return any(step_names.has_one(store, step, (*step_names.RECORDS, step_files.TREE_RECORD)) for step in below)
    except OSError:  # it may not be looked into
        return False
