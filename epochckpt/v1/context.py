"""Orbax's `Context`: which of its options are honoured, accepted as a hint, or refused by name; and what they ask for.

As in Orbax an active context (`with Context():`) goes before the one that a Checkpointer was made with.
"""

import contextlib
import contextvars
import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from epochckpt.args import RenamedRestore
from epochckpt.errors import UnsupportedError
from epochckpt.orbax.options import REFUSED as REFUSED_OF_V0

HONOURED = {
    *("async_options.timeout_secs", "async_options.post_finalization_callback", "file_options.path_permission_mode"),
    *("multiprocessing_options.primary_host", "multiprocessing_options.active_processes"),
    *("multiprocessing_options.barrier_sync_key_prefix", "checkpointables_options.registry"),
    *("pytree_options.loading.partial_load", "array_options.loading.enable_padding_and_truncation"),
    *("array_options.saving.storage_options.dtype", "array_options.saving.scoped_storage_options_creator"),
    *("array_options.loading.use_load_and_broadcast",),
    *("pytree_options.saving.create_array_storage_options_fn",),  # of older Orbax
}
"""Options that do here what they do in Orbax."""

HINTS = {
    "array_options.saving": "it is about Orbax's own files",
    "array_options.loading": "every process reads what it needs, and what is missing is damage",
    "pytree_options.saving": "it is about Orbax's own files",
    "memory_options": "see StorageOptions.host_memory_limit_bytes",
    "safetensors_options": "ec.import_ reads such files",
    "atomicity_options": "an epoch is always committed atomically, in our own way",
    "async_options.create_directories_asynchronously": "folders are always made in the background",
    "file_options.skip_sync_file_validations": "save() never looks at files before it returns",
    "file_options.temporary_path_class": "an epoch is always committed atomically, in our own way",
    "file_options.path_class": "paths are etils.epath.Path",
}
"""Options, and groups of them, that concern Orbax's own engine and change nothing here, and why."""

REFUSED = {
    "memory_options.serialization_status_callback": "epochckpt's engine would never call it",
    "pytree_options.leaf_handler_registry": "save such leaves as a checkpointable of their own, with a handler",
    "pathways_options": "epochckpt does not run on Pathways",
    "deletion_options.gcs_deletion_options.todelete_full_path": REFUSED_OF_V0["todelete_full_path"],
}
"""Options, and groups of them, that would change what is saved or kept, and are not supported."""

_PATHWAYS = "pathways_options.checkpointing_impl"
_PLAIN = (bool, int, float, str, bytes, tuple, list, set, frozenset, dict, type, enum.Enum)
_IN_CONTEXT = "orbax_context"  # how Orbax calls the variable that holds the active context


def active() -> Any:
    """The context of the `with` block that this thread is in; None if it is in none."""
    return next((value for name, value in contextvars.copy_context().items() if name.name == _IN_CONTEXT), None)


def now(own: Any) -> Any:
    """The context that counts now: an active one, else `own`, which was checked before."""
    context = active()
    return own if context is None else check(context)


def entered(context: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes a context the active one, for a handler."""
    return contextlib.nullcontext() if active() is context else ocp.v1.Context(context)  # one is entered once at a time


def check(context: Any) -> Any:
    """Refuses what is not supported, and logs hints; returns the context."""
    hints = []
    for name in _changed(context, defaults()):
        if (why := _of(REFUSED, name)) is not None and not _asks_for_nothing(name, context):
            raise UnsupportedError(f"Context: {name} is not supported: {why}")
        if name == "checkpoint_layout":
            if context.checkpoint_layout.name not in ("ORBAX", "AUTO"):
                raise UnsupportedError(
                    f"Context: checkpoint_layout {context.checkpoint_layout.name} is not supported: ec.import_ and "
                    "ec.export read and write other formats"
                )
        elif name in HONOURED or name == _PATHWAYS:
            continue
        elif (why := _of(HINTS, name)) is not None:
            hints.append(f"{name} ({why})")
        else:
            raise UnsupportedError(f"Context: {name} is an option of a newer Orbax, which this epochckpt does not know")
    if hints:
        logging.log_first_n(logging.INFO, "options that change nothing here: %s", 3, "; ".join(hints))
    return context


def _asks_for_nothing(name: str, context: Any) -> bool:
    """Whether the value of a refused option leaves Orbax's behaviour as it is: no Pathways."""
    return name == _PATHWAYS and context.pathways_options.checkpointing_impl.name == "NO_DISPATCHER"


@functools.cache
def defaults() -> Any:
    """The context of Orbax's in which nothing is set."""
    return ocp.v1.Context()


def _of(table: Mapping[str, str], name: str) -> str | None:
    """The entry of an option, or of a group that it is in."""
    parts = name.split(".")
    groups = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((table[group] for group in groups if group in table), None)


def _changed(value: Any, default: Any, name: str = "") -> list[str]:
    """Names of the options that are not at their defaults, such as `array_options.saving.use_ocdbt`."""
    if isinstance(value, ocp.v1.Context):
        pairs = [(key.removeprefix("_"), getattr(value, key), other) for key, other in vars(default).items()]
    elif dataclasses.is_dataclass(value) and type(value) is type(default):
        fields = [field.name for field in dataclasses.fields(value)]
        pairs = [(f"{name}.{field}", getattr(value, field), getattr(default, field)) for field in fields]
    else:
        same = type(value) is type(default) and not isinstance(value, _PLAIN)  # a registry is made anew by each context
        return [] if same or value == default else [name]
    return [change for path, mine, other in pairs for change in _changed(mine, other, path)]


def v0_options(context: Any) -> dict[str, Any]:
    """The options of Orbax's v0 manager that a context asks for."""
    groups = {
        "async_options": ocp.options.AsyncOptions,
        "file_options": ocp.options.FileOptions,
        "multiprocessing_options": ocp.options.MultiprocessingOptions,
    }
    options = {}
    for group, kind in groups.items():
        given = getattr(context, group)
        fields = {field.name for field in dataclasses.fields(kind)}
        default = getattr(defaults(), group)
        names = [f.name for f in dataclasses.fields(given) if f.name in fields]
        changed = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(default, name)}
        options[group] = kind(**changed)
    return options


def save_args(tree: Any, context: Any) -> Any:
    """How a tree is saved: Orbax's argument, with the types that the context asks for."""
    saving = context.array_options.saving
    every = saving.storage_options.dtype
    creator = getattr(saving, "scoped_storage_options_creator", None)
    creator = creator or getattr(context.pytree_options.saving, "create_array_storage_options_fn", None)
    if every is None and creator is None:
        return ocp.args.PyTreeSave(tree)

    def of(path: Any, leaf: Any) -> ocp.SaveArgs:
        scoped = creator and creator(path, leaf)
        return ocp.SaveArgs(dtype=(scoped and scoped.dtype) or every)

    return ocp.args.PyTreeSave(tree, save_args=jax.tree_util.tree_map_with_path(of, tree))


def restore_args(abstract: Any, context: Any) -> Any:
    """How a tree is restored: Orbax's argument, or None for the tree as it was saved."""
    if isinstance(abstract, ocp.v1.CheckpointMetadata | ocp.v1.training.CheckpointMetadata):
        abstract = abstract.metadata
    if abstract is None:
        return None
    if isinstance(abstract, RenamedRestore):
        partial = abstract.partial or context.pytree_options.loading.partial_load
        return dataclasses.replace(abstract, item=jax.tree.map(_target, abstract.item), partial=partial)
    target = jax.tree.map(_target, abstract)
    resize = context.array_options.loading.enable_padding_and_truncation
    if not context.pytree_options.loading.partial_load:
        return ocp.args.StandardRestore(target, strict=not resize)
    args: Any = ocp.args.PyTreeRestore(target, partial_restore=True)
    args.strict = not resize  # as StandardRestore has it; see `arrays.restore_items.tree_request`
    return args


def _target(leaf: Any) -> Any:
    """An abstract leaf as our engine takes it: a type stands for any value of it."""
    if isinstance(leaf, type):
        if issubclass(leaf, bool | int | float | str | np.generic):
            return leaf()
        in_numpy = issubclass(leaf, np.ndarray)
        return ocp.RestoreArgs(restore_type=leaf) if in_numpy else ocp.ArrayRestoreArgs(restore_type=jax.Array)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not hasattr(leaf, "sharding"):
        return _numpy_target(leaf)
    return leaf


def _numpy_target(leaf: Any) -> Any:
    """The NumPy array that an array, or a description of one, asks for; a shape or dtype of None is the saved one."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf
    if leaf.shape is None or leaf.dtype is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # takes no memory
