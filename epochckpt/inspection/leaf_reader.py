"""Values of single leaves, and files of handlers, read without devices: from epochs of ours and of stock Orbax.

Ours are verified block by block before a byte of them is seen; stock Orbax keeps no checksums. Typed keys come as
their data. A reader that meets a deletion raises `EpochDeletedError`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from epochckpt._threads import Pool
from epochckpt.arrays import EpochReader, Request
from epochckpt.commit import Commits
from epochckpt.errors import (
    DamagedError,
    EpochCheckpointError,
    EpochDeletedError,
    EpochNotFoundError,
    FormatError,
    InvalidArgumentError,
    UnknownNameError,
    say,
    unreadable,
)
from epochckpt.format import Box, EpochRecord, Leaf, grid, paths
from epochckpt.format import tree as tree_lib
from epochckpt.inspection import describe
from epochckpt.manager import status
from epochckpt.manager.orbax_reader import NOTE
from epochckpt.orbax import OrbaxRecord, marks, steps
from epochckpt.orbax.leaves import OrbaxItem, StoredLeaf

PIECE_ELEMENTS = 2**22
"""How many elements a piece has at most, unless told otherwise."""

_THREADS = 4


class Leaves:
    """Reads leaves of one epoch; its record is read now, and stays the one that is read.

    Args:
        commits: the directory's epochs.
        epoch: its number.

    Raises:
        EpochNotFoundError: there is no such epoch.
        DamagedError, FormatError: its record cannot be used.
    """

    def __init__(self, commits: Commits, epoch: int):
        self._commits, self._store, pool = commits, commits.store, Pool(_THREADS)
        self._lone: dict[str, EpochReader] = {}
        self._unread: dict[str, str] = {}
        try:
            self.record: EpochRecord = commits.read_record(epoch)
        except EpochNotFoundError:
            self._lone, self._unread = describe.readers(commits, epoch, pool)
            if not self._lone:
                raise
            self.record = next(iter(self._lone.values())).record
        self._folder = commits.folder(epoch)
        self._reader: EpochReader | None = next(iter(self._lone.values()), None)
        if self._reader is None and not isinstance(self.record, OrbaxRecord):
            self._reader = EpochReader(self._store, self._folder, self.record, pool)
        self._of_node: dict[tuple[str, str], EpochReader] = {}
        self._orbax_item = functools.cache(self._open_orbax)

    def value(self, item: str, leaf: str, node: str = "") -> Any:
        """A leaf as a NumPy array or Python value.

        Args:
            item: the item.
            leaf: the leaf's name, public or as it is stored.
            node: whose, for an item of each node's own; empty otherwise.

        Raises:
            InvalidArgumentError: there is no such leaf.
            DamagedError: its bytes differ from what was written, or cannot be read.
            EpochDeletedError: the epoch went away meanwhile.
        """
        if self._reader is None:
            with self._still_there():
                found, row = self._orbax_leaf(item, leaf)
                return found.value(row)
        reader, number, info = self._ours(item, leaf, node)
        if info.kind in tree_lib.EMPTY_KINDS:
            return {"dict": {}, "list": [], "tuple": ()}.get(info.kind)
        where = paths.join(self._folder, paths.EPOCH_RECORD)
        if info.dtype is None:
            return tree_lib.value_from_json(where, info.kind, reader.record.items[item].values[number])
        data = _read(reader, item, number, info, grid.whole(info.shape))
        if info.kind not in ("longstr", "longbytes"):
            return data
        raw = data.tobytes()
        try:
            return raw.decode("utf-8", "surrogatepass") if info.kind == "longstr" else raw
        except UnicodeDecodeError as error:
            raise FormatError(where, f"leaf {leaf!r} is no text: {error}") from None

    def pieces(self, item: str, leaf: str, node: str = "", max_elements: int = PIECE_ELEMENTS) -> Iterator[np.ndarray]:
        """A whole array in consecutive runs of its elements, C order; each is one-dimensional.

        The cut depends on the array's shape and on `max_elements` only. Of an array without elements there are none.
        Memory: a few pieces; of stock Orbax also the chunks that the pieces along the first axis share.

        Args:
            item: the item.
            leaf: the leaf's name, public or as it is stored.
            node: whose, for an item of each node's own; empty otherwise.
            max_elements: of a piece.

        Raises:
            InvalidArgumentError: there is no such leaf, or it is no array.
            DamagedError: its bytes differ from what was written, or cannot be read.
            EpochDeletedError: the epoch went away meanwhile.
        """
        if max_elements < 1:
            raise InvalidArgumentError(f"max_elements must be at least 1, got {max_elements}")
        if self._reader is None:
            with self._still_there():
                found, row = self._orbax_leaf(item, leaf)
            _check_array(row.leaf)
            parts = found.boxes(row, grid.boxes(row.leaf.shape, max_elements))
            while True:
                with self._still_there():
                    part = next(parts, None)
                if part is None:
                    return
                yield part.reshape(-1)
        reader, number, info = self._ours(item, leaf, node)
        _check_array(info)
        for box in grid.boxes(info.shape, max_elements):
            yield _read(reader, item, number, info, box).reshape(-1)

    def file(self, item: str, name: str, node: str = "") -> bytes:
        """The content of a file that a handler wrote; verified if we wrote it.

        Args:
            item: the item.
            name: of the file.
            node: whose, for an item of each node's own; empty otherwise.

        Raises:
            InvalidArgumentError: there is no such file.
            DamagedError: its bytes differ from what was written, or cannot be read.
            EpochDeletedError: the epoch went away meanwhile.
        """
        if self._reader is not None:
            return self._owner(item, node).read_file(item, name)
        assert isinstance(self.record, OrbaxRecord)
        if item not in self.record.folders or not paths.is_file_path(name):
            raise UnknownNameError(f"item {item!r} has no file {name!r}")
        path = paths.join(self._folder, self.record.folders[item], name)
        with self._still_there():
            try:
                return self._store.read(path, limit_bytes=marks.MAX_BYTES)
            except OSError as error:
                raise unreadable(path, error) from error
            except ValueError as error:
                raise FormatError(path, str(error)) from None

    def reader(self, item: str, node: str = "") -> EpochReader | None:
        """What reads an item of an epoch of ours, for who looks at its checksums; None for steps of stock Orbax.

        Raises:
            InvalidArgumentError: the node has no such item.
            DamagedError: the node's record cannot be used.
        """
        return None if self._reader is None else self._owner(item, node)

    def verify(self, progress: Callable[[int], None] = lambda nbytes: None) -> status.Verification:
        """Reads every byte, of all nodes; of steps of stock Orbax every array.

        Args:
            progress: is told how many bytes have been read, piece by piece, from any thread; of stock Orbax the bytes
                of arrays, which are fewer in its files where it compressed them.

        Raises:
            EpochDeletedError: the epoch went away meanwhile.
        """
        if self._lone:
            each = [status.verify(reader, progress) for reader in self._lone.values()]
            wrong = [error for one in each for error in one.damage]
            unread = {paths.join(self._folder, paths.folder_name(node)): said for node, said in self._unread.items()}
            wrong += [DamagedError(path, said) for path, said in unread.items()]
            return status.Verification(self.record.epoch, sum(one.nbytes for one in each), tuple(wrong))
        if self._reader is not None:
            return status.verify(self._reader, progress)
        assert isinstance(self.record, OrbaxRecord)
        damage: list[EpochCheckpointError] = [DamagedError(p, said) for p, said in self.record.problems.items()]
        with self._still_there():
            try:
                steps.check(self._store, self._folder, self.record)
            except EpochCheckpointError as error:
                damage.append(error)
            for name in self.record.names:
                at = paths.join(self._folder, self.record.folders[name])
                try:
                    if steps.kind(self._store, at, name, self.record) == "arrays":
                        damage += self._verify_orbax(self._orbax_item(name), progress)
                except EpochDeletedError:
                    raise
                except EpochCheckpointError as error:
                    damage.append(error)
            nbytes = steps.nbytes(self._store, self._folder)
        if damage:
            self._check_present("files of it were missing")
        said = {str(error): error for error in damage}  # what is missing is found twice
        return status.Verification(self.record.epoch, nbytes, tuple(said.values()), NOTE)

    @staticmethod
    def _verify_orbax(item: OrbaxItem, progress: Callable[[int], None]) -> Iterator[EpochCheckpointError]:
        for row in item.leaves:
            try:
                if row.leaf.dtype is None:
                    item.value(row)
                else:
                    for part in item.boxes(row, grid.boxes(row.leaf.shape, PIECE_ELEMENTS)):
                        progress(part.nbytes)
            except InvalidArgumentError:
                continue  # of a type that only somebody's own handler knows
            except EpochCheckpointError as error:
                yield error

    # -- finding -------------------------------------------------------------------------------------------------

    def _ours(self, item: str, leaf: str, node: str) -> tuple[EpochReader, int, Leaf]:
        reader = self._owner(item, node)
        record = reader.record.items.get(item)
        if record is None or record.arrays is None or leaf not in record.arrays.by_either_name:
            raise _no_leaf(self.record.epoch, item, leaf, node)
        number = record.arrays.by_either_name[leaf]
        return reader, number, record.arrays.leaves[number]

    def _owner(self, item: str, node: str) -> EpochReader:
        """Who reads an item: of each node's own, that node's."""
        reader = self._lone.get(node) if self._lone else self._reader
        if not node and reader is not None:
            return reader
        if (item, node) not in self._of_node:
            record = reader.record if reader is not None else self.record
            number = next((i for i, entry in enumerate(record.nodes) if entry.name == node), -1)
            if reader is not None and self._lone and item in record.items and record.items[item].kind != "node":
                self._of_node[item, node] = reader
            elif reader is not None and number >= 0 and reader.has(number, item):
                self._of_node[item, node] = reader.of_node(number, item)
            else:
                what = f"node {node!r} has no item {item!r} of its own" if node else f"item {item!r} is of each node's"
                raise InvalidArgumentError(f"epoch {self.record.epoch}: {what}")
        return self._of_node[item, node]

    def _open_orbax(self, item: str) -> OrbaxItem:
        assert isinstance(self.record, OrbaxRecord)
        at = paths.join(self._folder, self.record.folders[item])
        return OrbaxItem(self._store, at, self.record.epoch, self.record.handlers.get(item, ""))

    def _orbax_leaf(self, item: str, leaf: str) -> tuple[OrbaxItem, StoredLeaf]:
        assert isinstance(self.record, OrbaxRecord)
        if item not in self.record.names:
            raise _no_leaf(self.record.epoch, item, leaf, "")
        found = self._orbax_item(item)
        if leaf not in found.by_name:
            raise _no_leaf(self.record.epoch, item, leaf, "")
        return found, found.by_name[leaf]

    @contextlib.contextmanager
    def _still_there(self) -> Generator[None]:
        """A step of stock Orbax that went away is no damage."""
        try:
            yield
        except (InvalidArgumentError, EpochDeletedError):
            raise
        except (EpochCheckpointError, OSError) as error:
            self._check_present(say(error), error)
            raise

    def _check_present(self, detail: str, error: BaseException | None = None) -> None:
        if self._commits.read_attempt(self.record.epoch) != self.record.attempt:
            raise EpochDeletedError(self.record.epoch, self._store.root, detail) from error


def _read(reader: EpochReader, item: str, number: int, leaf: Leaf, box: Box) -> np.ndarray:
    assert leaf.dtype is not None, "callers choose arrays"
    reader.check_files(item, number, box)
    out = np.empty(grid.box_shape(box), leaf.dtype)
    reader.read([Request(item, number, box, out)])
    return out


def _check_array(leaf: Leaf) -> None:
    if leaf.dtype is None or leaf.kind in ("longstr", "longbytes"):
        raise InvalidArgumentError(f"leaf {leaf.name!r} is no array but a value of kind {leaf.kind!r}")


def _no_leaf(epoch: int, item: str, leaf: str, node: str) -> UnknownNameError:
    of = f" of node {node!r}" if node else ""
    return UnknownNameError(f"epoch {epoch}: item {item!r}{of} has no leaf {leaf!r}")
