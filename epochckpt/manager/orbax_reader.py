"""Reads a step that stock Orbax wrote.

Arrays are read by `orbax.leaves`, from the zarr files, and restored by the code that restores ours, which refuses the
same targets and casts (Orbax itself casts without a word). Everything else is read by Orbax's own handlers.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding, SingleDeviceSharding

from epochckpt import args as own
from epochckpt import errors
from epochckpt.arrays import EpochReader, Pack, Request, Shardings, item_names, restore_items
from epochckpt.arrays.reader import ArraySource
from epochckpt.arrays.restore import restore_tree
from epochckpt.arrays.shardings import divides, logical_shape, of_keys
from epochckpt.directory import EpochDirectory
from epochckpt.format import ArrayItem, Box, ItemKind, Leaf, grid, parsing, paths
from epochckpt.manager.reader import PIECE_ELEMENTS, CheckpointReader, ignore
from epochckpt.manager.status import EpochStatus, Verification
from epochckpt.orbax import OrbaxRecord, handlers, small_files, step_files, steps
from epochckpt.orbax.leaves import OrbaxItem, errno_in, in_bands
from epochckpt.storage import local_folder

NOTE = (
    "written by stock Orbax, which keeps no checksums: checked was only whether it is whole and can be read, "
    "not whether its bytes are those that were written"
)


class OrbaxReader(CheckpointReader):
    """Reads one step of stock Orbax."""

    record: OrbaxRecord

    def __init__(
        self, epoch_directory: EpochDirectory, folder: str, record: OrbaxRecord, context: restore_items.RestoreContext
    ):
        super().__init__(epoch_directory, folder, record, context)
        self.item = functools.cache(self._item)

    def item_kinds(self) -> dict[str, ItemKind]:
        self._check()
        return {n: ItemKind.ARRAYS if self._kind(n) == "arrays" else ItemKind.FILES for n in self.record.names}

    def item_handlers(self) -> dict[str, str]:
        return dict(self.record.handlers)

    def restore_item(self, name: str, args: Any) -> Any:
        def anew() -> Any:
            self.item = functools.cache(self._item)  # what is kept of an item may be the damaged answer
            return self._restore_item(name, args)

        return self.store.confirming_damage(anew)

    def _restore_item(self, name: str, args: Any) -> Any:
        recorded = self.record.handlers.get(name, "")
        kind = self._kind(name)
        if kind == "arrays":
            handler = recorded or handlers.type_name(ocp.handlers.StandardCheckpointHandler)
            request = restore_items.tree_request(name, args, handler, self.context)
            target = request.target if request.target is not None else request.restore_args
            item = self.item(name, isinstance(args, ocp.args.ArrayRestore))
            with self.still_there():
                item.check(None if request.sources is not None else target)
            source = _Step(self, name, item, target)
            arrays = source.record.items[name].arrays
            assert arrays is not None, "its kind says so"
            return restore_tree(source, name, request, self._shardings(name, arrays, request.fallback_sharding))
        if isinstance(args, own.RenamedRestore):
            raise restore_items.contradiction(name, recorded or kind, args)
        if kind == "json" and (args is None or isinstance(args, ocp.args.JsonRestore)):
            with self._readable(name), self._local(name) as path:
                file = small_files.json_file(self.store, self._at(name))
                return ocp.JsonCheckpointHandler(file).restore(path, args=args or ocp.args.JsonRestore())
        handler, args = self._handler(name, recorded, args)
        if handlers.kind_of(handler) is handlers.HandlerKind.OTHER:  # its errors are passed on as they are
            with self._local(name) as path:
                return handler.restore(path, args=args)
        with self._readable(name), self._local(name) as path:
            return (handler() if isinstance(handler, type) else handler).restore(path, args=args)

    @contextlib.contextmanager
    def _local(self, name: str) -> Generator[epath.Path]:
        """The folder of an item for a handler of Orbax's; of a bucket a copy, which goes when the handler returns."""
        with local_folder(self.store, self._at(name)) as folder:
            yield epath.Path(folder)

    def _handler(self, name: str, recorded: str, args: Any) -> tuple[Any, Any]:
        """The handler of an item that is neither arrays nor JSON, and its argument."""
        if args is not None:
            return self.context.handlers.find(name, args, saving=False), args
        if not recorded:
            raise errors.UnsupportedError(
                f"item {name!r} was saved by an unknown handler of Orbax: "
                f"say how to restore it, with args=Composite({name}=…)"
            )
        handler, args = self.context.handlers.of(name, recorded)
        if isinstance(args, ocp.args.JaxRandomKeyRestore):
            sharding = SingleDeviceSharding(jax.local_devices()[0])
            args.restore_args = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
        return handler, args

    def arrays(self, item: str, node: str = "") -> ArraySource:
        if node or item not in self.record.names or self._kind(item) != "arrays":
            raise errors.UnknownNameError(f"checkpoint {self.record.epoch}: item {item!r} has no leaves")
        return _Step(self, item, self.item(item), None)

    def file(self, item: str, name: str, node: str = "") -> bytes:
        if item not in self.record.folders or not paths.is_file_path(name):
            raise errors.UnknownNameError(f"item {item!r} has no file {name!r}")
        path = paths.join(self._at(item), name)
        with self.still_there():
            data = parsing.read_record(self.store, path, lambda _, found: found, limit_bytes=step_files.MAX_BYTES)
            if data is None:
                raise errors.DamagedError(path, "is missing")
            return data

    def status(self) -> EpochStatus:
        self._check()
        nbytes = steps.nbytes(self.store, self.folder)
        return EpochStatus(self.record.epoch, "committed", "written by stock Orbax", orbax_nbytes=nbytes)

    def verify(self, progress: Callable[[int], None] = ignore) -> Verification:
        """Looks whether the step is whole, and reads every array; there are no checksums to compare with."""
        damage: list[errors.EpochCheckpointError] = [
            errors.DamagedError(p, problem) for p, problem in self.record.problems.items()
        ]
        with self.still_there():
            for check in (self._check, *(functools.partial(self._verify_item, n, progress) for n in self.record.names)):
                try:
                    damage += check() or ()
                except errors.EpochDeletedError:
                    raise
                except errors.EpochCheckpointError as error:
                    damage.append(error)
            nbytes = steps.nbytes(self.store, self.folder)
        if damage:
            self.check_present("files of it were missing")
        known = {str(error): error for error in damage}  # what is missing is found twice
        return Verification.of(self.record.epoch, nbytes, known.values(), NOTE)

    def _verify_item(self, name: str, progress: Callable[[int], None]) -> list[errors.EpochCheckpointError]:
        kind = self._kind(name)
        if kind == "json":
            self.restore_item(name, None)
        if kind != "arrays":
            return []
        item = self.item(name)
        failed: dict[int, errors.EpochCheckpointError] = {}
        arrays = [row for row in item.leaves if row.leaf.dtype is not None]
        boxes = ((row, box) for row in arrays for box in grid.boxes(row.leaf.shape, PIECE_ELEMENTS))
        for (row, _, piece), error in item.read(
            (row, box, np.empty(grid.box_shape(box), row.leaf.dtype)) for row, box in boxes
        ):
            if error is not None:
                failed.setdefault(row.number, error)
            progress(piece.nbytes)
        for row in item.leaves:
            try:
                if row.leaf.dtype is None:
                    item.value(row)
            except errors.EpochCheckpointError as error:
                failed[row.number] = error
        # A leaf whose type only a user's type handler knows is no damage.
        return [error for _, error in sorted(failed.items()) if not isinstance(error, errors.UnsupportedError)]

    def _shardings(self, item: str, arrays: ArrayItem, fallback: Sharding | None = None) -> Shardings:
        return _SavedShardings(arrays, self.item(item), fallback)

    def _item_metadata(self, name: str, kind: ItemKind) -> Any:
        if kind is ItemKind.ARRAYS:
            with self.still_there():
                self.item(name).check(types=False)
        return super()._item_metadata(name, kind)

    def _storage(self, item: str, arrays: ArrayItem, number: int) -> ocp.metadata.StorageMetadata | None:
        stored = self.item(item).leaves[arrays.leaves[number].sharding]
        if stored.array is None:
            return None
        return ocp.metadata.StorageMetadata(chunk_shape=stored.array.chunks, write_shape=stored.write_shape)

    def _leaf_metadata(
        self, item: str, arrays: ArrayItem, number: int, shardings: Shardings, directory: epath.Path
    ) -> Any:
        found = super()._leaf_metadata(item, arrays, number, shardings, directory)
        leaf = arrays.leaves[number]
        stored = self.item(item).leaves[leaf.sharding]
        if isinstance(found, ocp.metadata.Metadata):
            found.name = stored.param
        if isinstance(found, ocp.metadata.ScalarMetadata):
            found.dtype = found.dtype if stored.array is None else stored.array.dtype
        elif isinstance(found, ocp.metadata.ArrayMetadata):
            found.sharding = _sharding(self.item(item), leaf)
        return found

    # -- what lies where -----------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        if name not in self.record.folders:
            raise item_names.unknown_item(self.record.epoch, name, self.record.names)
        return paths.join(self.folder, self.record.folders[name])

    def _kind(self, name: str) -> str:
        at = self._at(name)
        with self.still_there():
            return steps.kind(self.store, at, name, self.record)

    def _item(self, name: str, bare: bool = False) -> OrbaxItem:
        with self.still_there():
            handler = self.record.handlers.get(name, "")
            present = functools.partial(self.check_present, "its files went")
            return OrbaxItem(self.store, self._at(name), self.record.epoch, handler, bare, present)

    def _check(self) -> None:
        with self.still_there():
            steps.check(self.store, self.folder, self.record)

    @property
    def save_id(self) -> None:
        return None

    def copyable(self) -> EpochReader:
        raise errors.UnsupportedError(
            "it was written by stock Orbax, whose steps are not copied; copy its folder, or restore it and save it "
            "with epochckpt"
        )

    def check_present(self, detail: str, error: BaseException | None = None) -> None:
        if self.epoch_directory.read_save_id(self.record.epoch) != self.record.save_id:
            raise errors.EpochDeletedError(self.record.epoch, self.store.root, detail) from error

    @contextlib.contextmanager
    def still_there(self) -> Generator[None]:
        """A step that went away is no damage."""
        try:
            yield
        except (errors.InvalidArgumentError, errors.EpochDeletedError):
            raise
        except OSError as error:
            self.check_present(str(error), error)
            raise errors.unreadable(self.folder, error) from error
        except errors.EpochCheckpointError as error:
            self.check_present(errors.say(error), error)
            raise

    @contextlib.contextmanager
    def _readable(self, name: str) -> Generator[None]:
        """Says what an error of Orbax's means. What the caller asked for was checked before: it is the data's fault."""
        at = self._at(name)
        try:
            yield
        except (errors.EpochCheckpointError, MemoryError):
            raise
        except Exception as error:  # Orbax raises many classes, also Exception itself
            causes: list[BaseException] = [error]
            while causes[-1].__cause__ is not None:
                causes.append(causes[-1].__cause__)
            self.check_present(errors.say(error), error)
            if any(isinstance(e, PermissionError) or "PERMISSION_DENIED" in str(e) for e in causes):
                raise errors.AccessError(f"{at}: {causes[-1]}") from error
            for cause in causes:
                code = errno_in(cause)
                found = cause if isinstance(cause, OSError) else OSError(code, str(cause)) if code else None
                if found is not None and errors.is_passing(found):
                    raise errors.StorageError(at, found) from error
                if isinstance(cause, MemoryError | RuntimeError | Warning) and not isinstance(cause, RecursionError):
                    raise  # it says nothing about the data
            problem = f"Orbax cannot read item {name!r} ({type(causes[-1]).__name__}: {str(causes[-1])[:800]})"
            raise small_files.half_written(self.record.epoch, at, problem) from error


class _Step:
    """The arrays of one item as a restore reads them; see `ArraySource`."""

    def __init__(self, reader: OrbaxReader, name: str, item: OrbaxItem, target: Any):
        self._reader = reader
        self._item = item
        self.folder = reader.folder
        recorded = item.record(reader.record.handlers.get(name, ""), target, reader.still_there)
        self.record = dataclasses.replace(reader.record, items={name: recorded})

    def read(self, requests: Sequence[Request], packs: Sequence[Pack] = ()) -> None:
        """Fills every request's `out`; no leaf of Orbax's is in a pack."""
        assert not packs
        by_leaf: dict[int, list[tuple[Box, np.ndarray]]] = {}
        for request in requests:
            by_leaf.setdefault(request.leaf, []).append((request.box, request.out))
        parts = (part for leaf, pairs in by_leaf.items() for part in in_bands(self._item.leaves[leaf], pairs))
        with self._reader.still_there():
            for _, error in self._item.read(parts, one_by_one=len(requests) == 1):
                if error is not None:
                    raise error

    def check_files(self, item: str, leaf: int, box: Box) -> None:
        """Nothing is known of the files before they are read."""


class _SavedShardings(Shardings):
    """The shardings that Orbax recorded, as far as their devices exist in this process's job."""

    def __init__(self, arrays: ArrayItem, item: OrbaxItem, fallback: Sharding | None):
        super().__init__(arrays, fallback)
        self._stored = item

    def is_uncommitted(self, leaf: Leaf) -> bool:
        return False  # Orbax does not record it

    def of(self, leaf: Leaf) -> Sharding | None:
        if leaf.sharding < 0:
            return self._fallback
        recorded = _sharding(self._stored, leaf)
        try:
            found = None if recorded is None else recorded.to_jax_sharding()
        except Exception:  # its devices do not exist here, or it is nonsense: jax and Orbax have many errors for that
            found = None
        if isinstance(found, SingleDeviceSharding) and jax.process_count() > 1:
            return self._fallback  # a device of one process
        found = of_keys(found, leaf) if leaf.kind == "prng" else found
        return found if found is not None and divides(found, logical_shape(leaf)) else self._fallback


def _sharding(item: OrbaxItem, leaf: Leaf) -> ocp.metadata.ShardingMetadata | None:
    """The sharding that Orbax recorded for a leaf, whose devices may not exist here."""
    row = item.shardings.get(item.leaves[leaf.sharding].param)
    if row is None:
        return None
    named = row.get("sharding_type") == "NamedSharding"
    kind = ocp.metadata.NamedShardingMetadata if named else ocp.metadata.SingleDeviceShardingMetadata
    try:
        return kind.from_deserialized_dict(row)
    except Exception:  # nonsense, for which Orbax has many errors
        return None
