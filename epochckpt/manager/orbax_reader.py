"""Reads a step that stock Orbax wrote, with Orbax's own handlers.

What Orbax is asked for is decided here, leaf by leaf, from its metadata and the target: so a target that does not fit
is refused with our table of all differences, and no value changes its kind of number unless it survives exactly (Orbax
itself casts without a word). Nothing here waits for another process.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding, SingleDeviceSharding

from epochckpt import _text
from epochckpt import args as own
from epochckpt.arrays import Shardings, items
from epochckpt.arrays import restore as restoring
from epochckpt.arrays.targets import LeafRequest, divides, key_dims, without_target
from epochckpt.errors import (
    AccessError,
    DamagedError,
    EpochCheckpointError,
    EpochDeletedError,
    Mismatch,
    MismatchError,
    StorageError,
    UnsupportedError,
    is_passing,
    say,
)
from epochckpt.format import ArrayItem, Leaf, paths
from epochckpt.format import tree as tree_lib
from epochckpt.manager import status
from epochckpt.orbax import Handlers, OrbaxRecord, TreeMetadata, handlers, steps
from epochckpt.orbax.leaves import StoredTree, leaves_of, value_types
from epochckpt.storage import Store
from epochckpt.storage.object_store import errno_in

NOTE = (
    "written by stock Orbax, which keeps no checksums: checked was only whether it is whole and can be read, "
    "not whether its bytes are those that were written"
)

_VERIFY_BYTES = 256 * 2**20  # what is held at once while every array is read
_ARRAY = "checkpoint"  # what Orbax's ArrayCheckpointHandler calls its only leaf


class StepReader:
    """Reads one step of stock Orbax.

    Args:
        store: the directory.
        folder: the step's folder in it.
        record: what Orbax recorded of it.
        known: the manager's handlers.
    """

    def __init__(self, store: Store, folder: str, record: OrbaxRecord, known: Handlers):
        self._store, self._folder, self.record, self._known = store, folder, record, known
        self._path = epath.Path(store.root) / folder

    # -- what the manager asks -----------------------------------------------------------------------------------

    def restore(self, args: Any) -> Any:
        """Restores the items that `args` names (None: all, as they were saved).

        Raises:
            MismatchError: the target does not fit; lists every leaf that does not.
            DamagedError: the step is not whole, or cannot be read.
        """
        self._check()
        wanted, single = items.asked_for(args, self.record.names, self.record.default_item)
        values = {name: self._item(name, arg) for name, arg in sorted(wanted.items())}
        return values[paths.DEFAULT_ITEM] if single else ocp.args.Composite(**{n: values[n] for n in wanted})

    def leaves(self, patterns: str | Sequence[str], item: str | None) -> dict[str, Any]:
        """Single leaves by shell patterns of their names, as NumPy arrays and Python values."""
        self._check()
        arrays = [name for name in self.record.names if self._kind(name) == "arrays"]
        item = items.chosen_arrays(self.record.epoch, arrays, item)
        tree = self._tree(item)
        chosen = restoring.matching(f"epoch {self.record.epoch}, item {item!r}", tree.leaves, patterns)
        values = self._deliver(tree, tree.leaves, [_plain(i, tree.leaves[i]) for i in chosen])
        names = _text.public(leaf.name for leaf in tree.leaves)
        return dict(zip((names[i] for i in chosen), values, strict=True))

    def verify(self) -> status.Verification:
        """Looks whether the step is whole, and reads every array; there are no checksums to compare with."""
        damage: list[EpochCheckpointError] = [DamagedError(p, problem) for p, problem in self.record.problems.items()]
        try:
            self._check()
            for name in self.record.names:
                damage += self._verify_item(name)
        except EpochDeletedError:
            raise
        except EpochCheckpointError as error:
            damage.append(error)
        return status.Verification(self.record.epoch, self._nbytes(), tuple(damage), NOTE)

    def status(self) -> status.EpochStatus:
        """Committed; raises what `restore` would raise for a step that is not whole."""
        self._check()
        return status.EpochStatus(self.record.epoch, "committed", "written by stock Orbax", orbax_nbytes=self._nbytes())

    def item_kinds(self) -> dict[str, str]:
        """`arrays` or `files`, by item name."""
        self._check()
        return {name: "arrays" if self._kind(name) == "arrays" else "files" for name in self.record.names}

    def item_metadata(self) -> Any:
        """What Orbax's handlers say of every array item, usable as restore targets; None for other items."""
        self._check()
        found: dict[str, Any] = dict.fromkeys(self.record.names)
        for name in found:
            if self._kind(name) == "arrays":
                metadata = self._metadata(name)
                found[name] = TreeMetadata(metadata.tree, metadata.custom_metadata)
        return found[paths.DEFAULT_ITEM] if self.record.default_item else ocp.args.Composite(**found)

    def step_metadata(self) -> Any:
        """Orbax's StepMetadata."""
        return status.step_metadata(self.record, self.record.handlers, self.item_metadata())

    def _nbytes(self) -> int:
        with self._stock(""):
            return steps.nbytes(self._store, self._folder)

    def _check(self) -> None:
        with self._stock(""):
            steps.check(self._store, self._folder, self.record)

    # -- items ---------------------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        if name not in self.record.folders:
            raise items.unknown_item(self.record.epoch, name, self.record.names)
        return paths.join(self._folder, self.record.folders[name])

    def _kind(self, name: str) -> str:
        at = self._at(name)
        with self._stock(name):
            return steps.kind(self._store, at, name, self.record)

    def _item(self, name: str, args: Any) -> Any:
        kind = self._kind(name)
        if kind == "arrays":
            return self._array_item(name, args)
        if isinstance(args, own.RenamedRestore):
            raise items.contradiction(name, self.record.handlers.get(name) or kind, args)
        path = self._path / self.record.folders[name]
        if kind == "json" and (args is None or isinstance(args, ocp.args.JsonRestore)):
            with self._stock(name):
                return ocp.JsonCheckpointHandler().restore(path, args=args or ocp.args.JsonRestore())
        handler, args = self._handler(name, args)
        if handlers.kind_of(handler) == "other":  # what it raises is its own affair
            return handler.restore(path, args=args)
        with self._stock(name):
            return (handler() if isinstance(handler, type) else handler).restore(path, args=args)

    def _handler(self, name: str, args: Any) -> tuple[Any, Any]:
        """The handler of an item that is neither arrays nor JSON, and its argument."""
        if args is not None:
            return self._known.find(name, args, saving=False), args
        recorded = self.record.handlers.get(name, "")
        if not recorded:
            raise UnsupportedError(
                f"item {name!r} was saved by an unknown handler of Orbax: "
                f"say how to restore it, with args=Composite({name}=…)"
            )
        handler, args = self._known.of(name, recorded)
        if isinstance(args, ocp.args.JaxRandomKeyRestore):
            sharding = SingleDeviceSharding(jax.local_devices()[0])
            args.restore_args = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
        return handler, args

    def _array_item(self, name: str, args: Any) -> Any:
        recorded = self.record.handlers.get(name) or handlers.type_name(ocp.handlers.StandardCheckpointHandler)
        request = items.tree_request(name, args, recorded, self._known)
        tree = self._tree(name, isinstance(args, ocp.args.ArrayRestore))
        given = request.target if request.target is not None else request.restore_args
        if given is None:
            item = ArrayItem(name, tree.leaves, ())
            wants = without_target(item, _SavedShardings(item, tree, None))
            return tree.nest(self._deliver(tree, item.leaves, wants))
        item = ArrayItem(name, tree.named_like(given), ())
        shardings = _SavedShardings(item, tree, request.fallback_sharding)
        wants, treedef = restoring.match(self.record.epoch, name, item, request, shardings)
        restored = tree_lib.unflatten(treedef, self._deliver(tree, item.leaves, wants))
        return jax.tree.map(restoring.laid_out, restored, request.target) if request.layouts else restored

    def _verify_item(self, name: str) -> list[EpochCheckpointError]:
        kind = self._kind(name)
        if kind == "json":
            self._item(name, None)
        if kind != "arrays":
            return []
        tree, damage = self._tree(name), []
        batches: list[list[int]] = [[]]
        held = 0
        for i, leaf in enumerate(tree.leaves):
            held += leaf.nbytes
            if held > _VERIFY_BYTES:
                batches.append([])
                held = leaf.nbytes
            batches[-1].append(i)
        while batches:
            batch = batches.pop(0)
            try:
                self._deliver(tree, tree.leaves, [_plain(i, tree.leaves[i]) for i in batch])
            except DamagedError as error:
                if len(batch) > 1:
                    batches += [[i] for i in batch]
                else:
                    damage.append(DamagedError(error.path, error.problem, tree.leaves[batch[0]].name))
        return damage

    # -- trees ---------------------------------------------------------------------------------------------------

    def _metadata(self, name: str) -> Any:
        self._at(name)
        with self._stock(name):
            return ocp.PyTreeCheckpointHandler().metadata(self._path / self.record.folders[name])

    def _tree(self, name: str, bare: bool = False) -> StoredTree:
        at, path = self._at(name), self._path / self.record.folders[name]
        with self._stock(name):
            if not self._store.exists(paths.join(at, steps.TREE_RECORD)):  # written before Orbax had metadata
                values = ocp.PyTreeCheckpointHandler().restore(path)
                pairs, treedef = tree_lib.flatten(values)
                return StoredTree(name, treedef, leaves_of(pairs, {}, {}), [v for _, v in pairs], values=True)
            tree = self._metadata(name).tree
            types = value_types(steps.tree_record(self._store, at, self.record.epoch))
            impls = steps.prng_impls(self._store, at)
        pairs, treedef = tree_lib.flatten(tree)
        handler = self.record.handlers.get(name, "")
        bare = (bare or handler.endswith("ArrayCheckpointHandler")) and isinstance(tree, dict) and set(tree) == {_ARRAY}
        leaves = leaves_of(pairs, types, impls)
        if bare:
            leaves = (dataclasses.replace(leaves[0], path=(), name=tree_lib.leaf_name(())),)
        return StoredTree(name, treedef, leaves, [meta for _, meta in pairs], bare=bare)

    def _deliver(self, tree: StoredTree, leaves: Sequence[Leaf], wants: Sequence[LeafRequest]) -> list[Any]:
        """Has Orbax read what is wanted, and makes of it what was asked for."""
        rows: list[Mismatch] = []
        out: list[Any] = [want.value for want in wants]
        left = [i for i, want in enumerate(wants) if want.leaf >= 0]
        while left:  # once, unless a renamed leaf is wanted at several places
            now = {wants[i].leaf: i for i in left}
            asked = {leaf: _ask(leaves[leaf], wants[i]) for leaf, i in now.items()}
            values = {leaf: tree.found[leaf] for leaf in asked} if tree.values else self._read(tree, asked)
            for leaf, i in now.items():
                out[i] = _finish(rows, leaves[leaf], wants[i], values[leaf])
            left = [i for i in left if i not in now.values()]
        if rows:
            raise MismatchError(tree.name, self.record.epoch, rows)
        return out

    def _read(self, tree: StoredTree, asked: Mapping[int, ocp.RestoreArgs]) -> dict[int, Any]:
        """The leaves with these numbers, read by Orbax's handler; the others are placeholders and not read."""
        if not asked:
            return {}
        nothing = ocp.RestoreArgs()
        skeleton = [0 if i in asked else ... for i in range(len(tree.leaves))]
        args = [asked.get(i, nothing) for i in range(len(tree.leaves))]
        request = ocp.args.PyTreeRestore(
            tree_lib.unflatten(tree.treedef, skeleton), restore_args=tree_lib.unflatten(tree.treedef, args)
        )
        with self._stock(tree.name):
            path = self._path / self.record.folders[tree.name]
            # an array may be stored as a folder of the name under which Orbax looks for its old msgpack file
            old = steps.AGGREGATE if (path / steps.AGGREGATE).is_file() else ".none"
            got = ocp.PyTreeCheckpointHandler(aggregate_filename=old).restore(path, args=request)
        return dict(enumerate(jax.tree.leaves(got, is_leaf=lambda x: x is ...)))

    @contextlib.contextmanager
    def _stock(self, name: str) -> Generator[None]:
        """Says what an error of Orbax's means. What the caller asked for was checked before: it is the data's fault."""
        at = paths.join(self._folder, self.record.folders.get(name, ""))
        try:
            yield
        except (EpochCheckpointError, MemoryError) as error:
            if isinstance(error, DamagedError) and not self._store.exists(self._folder):
                raise EpochDeletedError(self.record.epoch, self._store.root, say(error)) from error
            raise
        except Exception as error:  # Orbax raises many classes, also Exception itself
            causes = _causes(error)
            if not self._store.exists(self._folder):
                raise EpochDeletedError(self.record.epoch, self._store.root, say(error)) from error
            if any(isinstance(e, PermissionError) or "PERMISSION_DENIED" in str(e) for e in causes):
                raise AccessError(f"{at}: {causes[-1]}") from error
            for cause in causes:
                code = errno_in(cause)
                told = cause if isinstance(cause, OSError) else OSError(code, str(cause)) if code else None
                if told is not None and is_passing(told):
                    raise StorageError(at, told) from error
            passing = [e for e in causes if isinstance(e, MemoryError | RuntimeError | Warning)]
            if any(not isinstance(e, RecursionError) for e in passing):  # says nothing about the data
                raise
            problem = f"Orbax cannot read item {name!r} ({type(causes[-1]).__name__}: {str(causes[-1])[:800]})"
            raise steps.half_written(self.record.epoch, at, problem) from error


def _causes(error: BaseException) -> list[BaseException]:
    """An error and what it was raised from, the first cause last."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


def _plain(number: int, leaf: Leaf) -> LeafRequest:
    """A leaf as a NumPy array or a Python value; typed keys as their data."""
    if leaf.kind in tree_lib.EMPTY_KINDS:
        return LeafRequest(-1, "keep")
    return LeafRequest(number, "python" if leaf.dtype is None else "numpy")


def _direct(leaf: Leaf, want: LeafRequest) -> bool:
    """Whether Orbax itself makes the array that is wanted: no number changes its kind."""
    if want.form != "jax" or leaf.dtype is None or want.shape is not None:
        return False
    return want.dtype is None or want.dtype == leaf.dtype or restoring.only_precision(leaf.dtype, want.dtype)


def _ask(leaf: Leaf, want: LeafRequest) -> ocp.RestoreArgs:
    if leaf.kind == "str":
        return ocp.RestoreArgs()
    if _direct(leaf, want):
        sharding = want.sharding or SingleDeviceSharding(jax.local_devices()[0])
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding, dtype=want.dtype)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _finish(rows: list[Mismatch], leaf: Leaf, want: LeafRequest, value: Any) -> Any:
    if leaf.kind in ("str", "longstr") or (_direct(leaf, want) and isinstance(value, jax.Array)):
        return value
    if want.form == "python":
        plain = isinstance(value, str | bytes) or not isinstance(value, np.generic | np.ndarray | jax.Array)
        return restoring.convert(rows, leaf, value if plain else np.asarray(value).item(), want.kind)
    data = restoring.cast(rows, leaf, restoring.resized(np.asarray(value), want.shape), want.dtype)
    if want.form != "jax":
        return data if want.form == "numpy" else data[()]
    sharding = want.sharding or SingleDeviceSharding(jax.local_devices()[0])
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index], dtype=data.dtype)


class _SavedShardings(Shardings):
    """The shardings that Orbax recorded, as far as their devices exist in this process's job."""

    def __init__(self, item: ArrayItem, tree: StoredTree, fallback: Sharding | None):
        super().__init__(item, fallback)
        self._tree = tree

    def of(self, leaf: Leaf) -> Sharding | None:
        """See Shardings."""
        recorded: Any = getattr(self._tree.found[leaf.sharding], "sharding", None)
        shape = leaf.shape[: len(leaf.shape) - key_dims(leaf)] if leaf.kind == "prng" else leaf.shape
        try:
            found = recorded.to_jax_sharding() if hasattr(recorded, "to_jax_sharding") else None
        except Exception:  # its devices do not exist here: jax and Orbax have many errors for that
            found = None
        if isinstance(found, SingleDeviceSharding) and jax.process_count() > 1:
            return self._fallback  # a device of one process
        return found if found is not None and divides(found, shape) else self._fallback
