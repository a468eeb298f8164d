"""What a path is that was given for a checkpoint directory and is none: for the error that says so."""

from __future__ import annotations

import os
import re

from epochckpt._text import near_names
from epochckpt.format import paths
from epochckpt.inspection import leftovers
from epochckpt.orbax import marks, step_names
from epochckpt.orbax import steps as orbax_steps
from epochckpt.storage import Store

_SHOWN = 6
_RECORDS = step_names.RECORDS
_LOOKED_INTO = 50
_STEP_LIKE = re.compile(r"(?:\A|_)\d+\Z")
_PROJECTS = {
    ".git": "a Git repository",
    "pyproject.toml": "a Python project",
    "saved_model.pb": "a SavedModel of TensorFlow",
    "model.safetensors.index.json": "a model in Hugging Face's form",
    "model.safetensors": "a model in Hugging Face's form",
    "checkpoint": "a checkpoint of TensorFlow, or an item of old Flax",
}
_SUFFIXES = {
    ".safetensors": "a safetensors file: the directory is two levels up, if it is a node's of an epoch",
    ".json": "a JSON file",
    ".npz": "a file of NumPy arrays",
    ".npy": "a NumPy array",
    ".pt": "a file of PyTorch",
    ".pth": "a file of PyTorch",
    ".ckpt": "a file of TensorFlow or PyTorch",
    ".zip": "an archive: unpack it",
    ".tar": "an archive: unpack it",
    ".gz": "an archive: unpack it",
    ".msgpack": "a file of Flax",
    ".sqlite": "a database of runs",
    ".db": "a database of runs",
}


def missing(path: str) -> str:
    """What to say of a path that does not exist."""
    if os.path.islink(path):
        return f"is a broken link, to {os.readlink(path)}"
    above = path
    while not os.path.lexists(above):
        above, name = os.path.split(above)
    try:
        near = near_names(name, os.listdir(above))[:3]
    except OSError:
        near = []
    hint = f"; near it: {', '.join(near)}" if near else ""
    return f"does not exist ({above} does{hint}); check the path"


def file(path: str) -> str:
    """What a file is that was given for a directory."""
    name = os.path.basename(path)
    if name in (paths.EPOCH_RECORD, paths.NODE_RECORD):
        levels = "one level" if name == paths.EPOCH_RECORD else "two levels"
        return f"is a file: a record of an epoch; pass the directory that holds the epochs, {levels} above its folder"
    found = next((text for suffix, text in _SUFFIXES.items() if name.lower().endswith(suffix)), "")
    return f"is a file{f', by its name {found}' if found else ''}; expected a directory of epochs"


def folder(store: Store, found: list[tuple[str, bool]]) -> str:
    """What a folder is that holds no epoch.

    Args:
        store: the folder.
        found: its entries, with whether each is a folder.
    """
    names = {name for name, _ in found}
    above = os.path.dirname(store.root.rstrip("/")) or store.root
    if not names:
        other = "is empty" if store.renames else "holds nothing that this user can see"
        return f"{other}: nothing was saved there yet, or it is another one; check the path"
    if paths.EPOCH_RECORD in names and paths.NODE_RECORD not in names:
        return f"is the folder of a single epoch; pass its parent, {above}"
    if paths.NODE_RECORD in names:
        return f"is the folder of one node of an epoch; pass the directory above the epoch, {os.path.dirname(above)}"
    if marks.STEP_RECORD in names:
        return f"is a single step of stock Orbax; pass its parent, {above}"
    if names & {marks.TREE_RECORD, marks.OCDBT, orbax_steps.ARRAY_RECORDS}:
        return (
            f"is one item of a step of stock Orbax; pass the directory above the step, {os.path.dirname(above)}, or, "
            f"if a plain Checkpointer saved it, {above}"
        )
    if names & {".zarray", ".zattrs", "zarr.json"}:
        return "is an array of zarr, such as an item of stock Orbax is made of; pass the directory above the step"
    below = [n for n, is_folder in found if is_folder and not n.startswith(".")][:_LOOKED_INTO]
    otherwise = step_names.named_otherwise(store, found)
    if otherwise:
        return otherwise
    inner = [name for name in below if _holds_epochs(store, name)]
    if inner:
        return f"holds checkpoint directories and is none itself: pass one of them ({_few(inner, '/')})"
    known = next((text for name, text in _PROJECTS.items() if name in names), "")
    what = f"looks like {known}" if known else "is nothing that is known here"
    return f"{what}; it holds {_few([f'{n}/' if is_folder else n for n, is_folder in found])}"


def _holds_epochs(store: Store, name: str) -> bool:
    """Whether a folder holds what looks like an epoch or a step."""
    try:
        inner = [n for n, is_folder in leftovers.names(store, name) if is_folder]
        if any(paths.parse_incarnation(n) or paths.parse_node_staging(n) for n in inner):
            return True
        steps = [paths.join(name, n) for n in inner if _STEP_LIKE.search(n)][:_SHOWN]
        return any(step_names.has_one(store, step, (*_RECORDS, marks.TREE_RECORD)) for step in steps)
    except OSError:  # it may not be looked into
        return False


def _few(names: list[str], suffix: str = "") -> str:
    shown = ", ".join(f"{name}{suffix}" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, … ({len(names)} in all)"
