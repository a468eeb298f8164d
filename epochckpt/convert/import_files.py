"""`import_`: makes an epoch out of files that something else wrote: flax msgpack, safetensors, PyTorch's DCP.

A safetensors or DCP file is never taken into memory: its arrays are views of the mapped file, which the writer streams
to storage.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from epochckpt import _text
from epochckpt.arrays.user_json import checked_json
from epochckpt.convert.import_sources import Source, source_of
from epochckpt.convert.selection import Patterns, Rename, Selection
from epochckpt.convert.torch_dcp import Unread
from epochckpt.directory import directory_of
from epochckpt.errors import EpochExistsError, FormatError, InvalidArgumentError, UnsupportedError
from epochckpt.format import grid, paths
from epochckpt.format import tree as tree_lib
from epochckpt.manager import CheckpointManager, EpochStatus
from epochckpt.manager.numbers import epoch_number
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames
from epochckpt.storage import expanded, mapped, mmap, open_store, path_text, plain


@dataclasses.dataclass(frozen=True)
class ImportedLeaf:
    """One leaf of an import: its name in the epoch and in the source, and what the epoch will hold.

    `dtype` is a type of Python if the leaf is not an array. `cast_from` is the dtype in the source, if another one.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    cast_from: str = ""


@dataclasses.dataclass(frozen=True)
class ImportPlan:
    """What an import would do; nothing is written before `write`."""

    source: str
    directory: str
    epoch: int
    item: str
    leaves: tuple[ImportedLeaf, ...]
    _save: "_ImportSave" = dataclasses.field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in the epoch."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def write(self, *, take_over: bool = True) -> EpochStatus:
        """Makes the epoch; raises as `import_` does, and for `take_over` as `CheckpointManager.claim`."""
        return self._save.run(take_over)


def import_(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    epoch: int,
    *,
    format: str | None = None,
    item: str = paths.DEFAULT_ITEM,
    separator: str | None = ".",
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    dtype: Any = None,
    metrics: Any = None,
    custom_metadata: Mapping[str, Any] | None = None,
    options: ocp.CheckpointManagerOptions | None = None,
    storage: StorageOptions | None = None,
) -> EpochStatus:
    """Makes a committed epoch out of a flax msgpack or a safetensors file, a folder of those, or a DCP directory.

    Arrays become NumPy leaves, bit for bit unless they are cast. Safetensors and DCP are streamed in bounded memory,
    whatever the size of the files (on object stores by the size of a data file's part); msgpack files are read whole.
    torch is not needed, and no pickle runs code. One process does it. Like every manager that writes it fences off
    whatever else writes to `directory`: do not import into that of a running job. `plan_import` shows the effect first.

    Args:
        source: a local `.msgpack` file (`flax.serialization.to_bytes`, `msgpack_serialize`), a `.safetensors` file, or
            a folder with one of them, with the parts and the index of Hugging Face, or that
            `torch.distributed.checkpoint` saved. It must not change meanwhile.
        directory: where the epochs live; created if it is missing.
        epoch: the number of the new epoch.
        format: `"msgpack"`, `"safetensors"` or `"dcp"`; None: by the files' names, else by the first bytes.
        item: name of the item.
        separator: safetensors and DCP: names are split at it into nested dicts; None: one flat dict. What `export`
            wrote has its tree noted, and gets exactly that.
        include: only these leaves: one or more names, parts of the tree, or shell patterns of names, whose keys are
            joined by "/" (`"params"`, `"*/kernel"`).
        exclude: not these, in the same form.
        rename: new names: a mapping of names, or of their beginnings up to a "/", to what takes their place (`{"model":
            "params", "lm_head/weight": "head"}`, or `""` for nothing); or a function from name to name. New keys are
            dict keys.
        dtype: floating arrays are cast to it.
        metrics: kept with the epoch.
        custom_metadata: kept with the epoch.
        options: the step name format and the mode of folders, if they are not the default.
        storage: how bytes get to storage.

    Raises:
        FormatError: the source is truncated, damaged or no such file. As after every other error nothing was written.
        DamagedError: a tensor of DCP lacks its checksum.
        UnsupportedError: a dtype that we lack, an object of Python in DCP, or several processes.
        UnknownNameError: a pattern, or an entry of `rename`, matches nothing.
        InvalidArgumentError: two leaves would get one name.
        EpochExistsError: the epoch exists, readable or not.
        SaveError: storage refused; the epoch does not exist.
        OSError: the source cannot be read.

    Examples:
        >>> from flax import serialization
        >>> with open("params.msgpack", "wb") as file:
        ...     written = file.write(serialization.to_bytes({"w": np.arange(3)}))
        >>> ec.import_("params.msgpack", "run", 0).state
        'committed'
    """
    plan = plan_import(
        source,
        directory,
        epoch,
        format=format,
        item=item,
        separator=separator,
        include=include,
        exclude=exclude,
        rename=rename,
        dtype=dtype,
        metrics=metrics,
        custom_metadata=custom_metadata,
        options=options,
        storage=storage,
    )
    return plan.write()


def plan_import(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    epoch: int,
    *,
    format: str | None = None,
    item: str = paths.DEFAULT_ITEM,
    separator: str | None = ".",
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    dtype: Any = None,
    metrics: Any = None,
    custom_metadata: Mapping[str, Any] | None = None,
    options: ocp.CheckpointManagerOptions | None = None,
    storage: StorageOptions | None = None,
) -> ImportPlan:
    """What `import_` would do with these arguments: the leaves, and a method that does it. Writes nothing.

    Raises:
        EpochCheckpointError: every error that `import_` raises before it writes.
        OSError: the source cannot be read.
    """
    epoch = epoch_number(epoch)
    paths.check_item_name(item, ("process_0",))
    if separator is not None and not separator:
        raise InvalidArgumentError("separator='' cannot split a name; None keeps names whole")
    if not (custom_metadata is None or isinstance(custom_metadata, Mapping)):
        raise InvalidArgumentError(f"custom_metadata must be a dict, got a {type(custom_metadata).__name__}")
    selection = Selection.of(include, exclude, rename, dtype)
    metrics = checked_json(metrics, "metrics")
    custom = checked_json(dict(custom_metadata or {}), "custom_metadata")
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"import_ works in one process, and this job has {jax.process_count()}: import before the job starts"
        )
    given = options or ocp.CheckpointManagerOptions()
    # only those that name and make folders: an import must not delete any
    naming = ("file_options", "step_name_format", "step_prefix", "step_format_fixed_length")
    names = ocp.CheckpointManagerOptions(**{name: getattr(given, name) for name in naming})
    store = open_store(directory)
    with contextlib.suppress(NotADirectoryError):  # opening it says so, once the source is known to be good
        if epoch in directory_of(store, StepNames.of(names)).list_epochs():
            raise EpochExistsError(
                f"{store.root}: checkpoint {epoch} exists; delete it, or choose another number (in Orbax's words: "
                f"Checkpoint for step {epoch} already exists)"
            )
    path = path_text(source, "source")
    if "://" in path:
        raise UnsupportedError(f"source {plain(path)!r}: only local files are imported; download it first")
    loaded = source_of(os.path.abspath(expanded(path)), format)
    tree, leaves = _chosen(loaded.tree(separator), path, selection)
    args: Any = ocp.args.StandardSave(tree)
    if item != paths.DEFAULT_ITEM:
        args = ocp.args.Composite(**{item: args})
    save = _ImportSave(
        source=loaded,
        directory=directory,
        epoch=epoch,
        args=args,
        metrics=metrics,
        custom_metadata=custom,
        options=names,
        # what is imported has to fit once: a bound on copies of training state is no reason to refuse it
        storage=dataclasses.replace(storage or StorageOptions(), host_memory_limit_bytes=None),
    )
    return ImportPlan(path, store.root, epoch, item, leaves, save)


@dataclasses.dataclass(frozen=True)
class _ImportSave:
    """The save that makes the epoch of an import."""

    source: Source
    directory: str | os.PathLike[str]
    epoch: int
    args: Any
    metrics: Any
    custom_metadata: dict[str, Any]
    options: ocp.CheckpointManagerOptions
    storage: StorageOptions

    def run(self, take_over: bool) -> EpochStatus:
        """Verifies the source, and saves."""
        self.source.verify()
        with CheckpointManager(self.directory, options=self.options, storage=self.storage) as manager:
            manager.claim(take_over=take_over)
            manager.save(
                self.epoch,
                args=self.args,
                metrics=self.metrics,
                custom_metadata=self.custom_metadata,
                force=True,
            )
            manager.wait_until_finished()
            return manager.status(self.epoch)


def _chosen(tree: Any, source: str, selection: Selection) -> tuple[Any, tuple[ImportedLeaf, ...]]:
    """The tree of the selected leaves, and a description of each leaf."""
    try:
        pairs, _ = tree_lib.flatten(tree)
    except (ValueError, TypeError) as error:
        raise FormatError(source, f"is no tree for JAX, which sorts the keys of each dict: {error}") from None
    new_paths = selection.paths(source, [path for path, _ in pairs])
    was = _text.public(tree_lib.leaf_name(pairs[number][0]) for number in new_paths)
    now = _text.public(map(tree_lib.leaf_name, new_paths.values()))
    chosen = []
    leaves = list[ImportedLeaf]()
    for number, old, new in zip(new_paths, was, now, strict=True):
        value = pairs[number][1]
        before = getattr(value, "dtype", None) if isinstance(value, np.ndarray | np.generic | mmap.Assembled) else None
        dtype = selection.cast_to(before)
        if dtype is not None and dtype != before:
            value = _cast(value, dtype)
        chosen.append((new_paths[number], value))
        kind = str(getattr(value, "dtype", type(value).__name__))
        leaf = ImportedLeaf(
            name=new,
            source=old,
            shape=getattr(value, "shape", ()),
            dtype=kind,
            nbytes=getattr(value, "nbytes", 0),
            cast_from=str(before) if dtype != before else "",
        )
        leaves.append(leaf)
    _check(chosen, source)
    if not selection:  # dicts stay dicts, whatever their keys
        return tree, tuple(leaves)
    return tree_lib.nest(chosen, source), tuple(leaves)


def _cast(value: Any, dtype: np.dtype[Any]) -> Any:
    """An array of another dtype; one of a mapped file is cast while it is written."""
    if isinstance(value, mmap.Assembled):
        return mmap.Assembled(value.shape, dtype, value.pieces)
    if isinstance(value, mapped.Mapped):
        return mmap.Assembled(value.shape, dtype, [(grid.slices(grid.whole(value.shape)), value)])
    with np.errstate(all="ignore"):
        return value.astype(dtype)


def _check(pairs: Sequence[tuple[tree_lib.KeyPath, Any]], source: str) -> None:
    """Raises an error for what a save would refuse, which is after the directory was made."""
    seen: set[str] = set()
    for path, value in pairs:
        name = tree_lib.leaf_name(path)
        if isinstance(value, Unread):
            raise UnsupportedError(f"{source}: {name[:200]!r} cannot be read ({value.why}); leave it out with exclude=")
        if tree_lib.leaf_kind(value) is None:
            raise UnsupportedError(f"{source}: leaf {name[:200]!r} is a {type(value).__qualname__}; it cannot be saved")
        if name in seen:  # two keys that are NaN
            raise FormatError(source, f"has two leaves that are called {name[:200]!r}")
        seen.add(name)
