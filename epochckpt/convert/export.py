"""`export`: an epoch as a plain stock Orbax checkpoint, or as safetensors files, in a folder of its own.

The folder appears whole or not at all: it is written under another name beside its own, made durable, and renamed.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import stat
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _progress, _threads, _units
from epochckpt.agreement import Coordinator, restore_vote
from epochckpt.arrays import items
from epochckpt.arrays.restore import ArraySource
from epochckpt.convert import export_formats
from epochckpt.convert.formats import EXPORTED
from epochckpt.convert.selection import Patterns, Rename, SelectedArrays, Selection, say_cast
from epochckpt.directory import directory_of
from epochckpt.errors import InvalidArgumentError, NotACheckpointDirectoryError, UnsupportedError
from epochckpt.format import paths
from epochckpt.manager import CheckpointReader, Readers
from epochckpt.manager.numbers import epoch_number
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames, view
from epochckpt.storage import PosixStore, Store, expanded, open_store, path_text, plain
from epochckpt.storage.posix import PosixWriter
from epochckpt.tiers import viewed


@dataclasses.dataclass(frozen=True)
class Exported:
    """What an export wrote: the epoch, the path of its folder, and the bytes of the files there.

    `unsupported` is what the format cannot express: reasons by leaf name, by item. `cast` has the dtypes that leaves
    which were cast have in the epoch, by their names in the export.
    """

    epoch: int
    path: str
    nbytes: int
    unsupported: Mapping[str, Mapping[str, str]]
    cast: Mapping[str, str]


@_progress.work("exporting")
def export(
    directory: str | os.PathLike[str],
    epoch: int | None,
    destination: str | os.PathLike[str],
    format: str = "orbax",
    *,
    item: str | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    dtype: Any = None,
    separator: str = ".",
    framework: str = "flax",
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5 * 10**9,
    max_buffer_bytes: int = 64 * 2**20,
    skip_unsupported: bool = False,
    options: ocp.CheckpointManagerOptions | None = None,
    mirror: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Exported:
    """Writes an epoch in a form that needs nothing of ours, into a new local folder. Every byte is verified first.

    - `"orbax"`: a checkpoint directory with this one step in it, without symlinks:
      `ocp.CheckpointManager(destination).restore(epoch)`, `StandardCheckpointer`, `ocp.v1`. With `include`, `exclude`,
      `rename` or `dtype` of one item only.
    - `"safetensors"`: an item of arrays as whole tensors, `model.safetensors` or Hugging Face's parts with their index.
      Typed PRNG keys become their key data. What the format cannot say (Python values, key paths) is noted in the
      file's `__metadata__`, for `import_`.
    - `"huggingface"`: the same, with a model card (`README.md`) to be completed, and `config.json` if one is given.

    One process does it, at any time, also while the job goes on saving. Memory is bounded by blocks, or by about twice
    `max_buffer_bytes`, and while leaves are cast by as much as their elements take in the epoch. Steps of stock Orbax,
    which have no checksums, are exported as tensors, or where leaves are selected.

    Args:
        directory: where the epochs live: a path or a URL.
        epoch: its number; None: the newest that can be read.
        destination: a local folder that is missing or empty; an empty one is replaced, by one of its mode and group.
        format: `"orbax"`, `"safetensors"` or `"huggingface"`.
        item: export this item only; needed if there are several of arrays, but for a whole step of Orbax.
        include: only these leaves: one or more names, parts of the tree, or shell patterns of names, as the command
            `epochckpt tree` shows them and takes them (`"params"`, `"*/kernel"`).
        exclude: not these, in the same form.
        rename: new names, see docs/orbax.md: a mapping of names, or of their beginnings, to what takes their place
            (`{"params": "model"}`, or `""` for nothing); or a function from name to name. New keys are dict keys.
        dtype: floating arrays are cast to it, rounded as JAX does; integers, bools, keys and Python values stay.
        separator: joins the keys of a leaf's path to the name of its tensor; "." is what Hugging Face and Orbax use.
        framework: noted in the files; the names and layouts of the tensors are those of this framework. Libraries of
            Hugging Face look for it. `"pt"` is true where leaves were renamed, and lie, as in PyTorch.
        config: the content of `config.json`, or a file of JSON that has it; huggingface only.
        max_file_bytes: bytes of tensors after which safetensors go on in a further file.
        max_buffer_bytes: bound on the bytes of tensors that are held at a time.
        skip_unsupported: leave out, and log, what the format cannot express, instead of refusing.
        options: the step name format, if it is not the default.
        mirror: the directory's mirror, for epochs that are not in the directory, or are damaged there.
        progress: is called with the bytes of each piece that was written, from any thread.

    Raises:
        EpochNotFoundError: there is no such epoch.
        DamagedError: bytes have changed since they were written. After this or another error there is no destination.
        UnsupportedError: the format cannot express something, by name.
        UnknownNameError: a pattern, or an entry of `rename`, matches nothing.
        InvalidArgumentError: the destination is no empty folder, lies in `directory`, or is the current directory; no
            such item; leaves that would be called alike.
        OSError: the destination cannot be written.

    Examples:
        >>> with ec.CheckpointManager("run") as manager:
        ...     saved = manager.save(4, args=ocp.args.StandardSave({"w": np.zeros(3)}))
        >>> ec.export("run", None, "tensors", "safetensors").epoch
        4
    """
    began = time.monotonic()
    progress = progress or _progress.counting()
    if format not in EXPORTED:
        raise InvalidArgumentError(f"format {format!r} is not known; expected one of {', '.join(map(repr, EXPORTED))}")
    if not isinstance(separator, str) or not separator:
        raise InvalidArgumentError(f"separator must be a text of at least one character, got {separator!r}")
    for name, value in (("max_file_bytes", max_file_bytes), ("max_buffer_bytes", max_buffer_bytes)):
        if type(value) is not int or value < 1:
            raise InvalidArgumentError(f"{name} must be a positive integer, got {value!r}")
    if not isinstance(framework, str):
        raise InvalidArgumentError(f"framework must be a text such as 'pt', got {framework!r}")
    if config is not None and format != "huggingface":
        raise InvalidArgumentError(f"config= is of the format 'huggingface', not of {format!r}")
    config = _config(config)
    selection = Selection.of(include, exclude, rename, dtype)
    store = open_store(directory)
    epoch_directory = directory_of(store, StepNames.of(options or ocp.CheckpointManagerOptions()))
    place = _destination(destination, store)
    how = export_formats.FormatOptions(separator, framework, max_file_bytes, max_buffer_bytes, skip_unsupported)
    pool = _threads.Pool(max(StorageOptions().io_threads, store.concurrency))
    copies = None if mirror is None else viewed(mirror, epoch_directory)
    readers = Readers(epoch_directory, pool, mirror=copies)

    def listed() -> list[int]:
        return sorted({*epoch_directory.list_epochs(), *(() if copies is None else copies.readable())})

    def run(number: int) -> Exported:
        reader = readers.open(number)
        arrays = None
        kinds = reader.item_kinds()
        record = reader.record
        if item is not None and item not in kinds:
            raise items.unknown_item(number, item, kinds)
        if format != "orbax" or selection:
            source, name = _array_item(reader, kinds, item)
            arrays = SelectedArrays(source, name, selection)
        elif record.stock:
            raise UnsupportedError(
                f"checkpoint {number} was written by stock Orbax: copy its folder, or save it with a manager of ours"
            )
        elif item is not None:
            record = dataclasses.replace(record, items={item: record.items[item]})
        with _staged(place) as folder:
            target = PosixStore(folder) if progress is None else _Counted(folder, progress)
            if arrays is None or format == "orbax":
                unsupported = export_formats.write_orbax(reader, record, target, how, arrays)
            else:
                unsupported = export_formats.write_safetensors(arrays, target, how)
            if arrays is not None and format == "huggingface":
                export_formats.write_model_files(arrays, target, config)
            nbytes = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(folder) for f in files)
            if reader.native is not None:
                reader.native.check_present("it was being exported")
        return Exported(number, place, nbytes, unsupported, arrays.cast if arrays is not None else {})

    try:
        if epoch is not None:
            done = run(epoch_number(epoch))
        else:
            _, done, _ = restore_vote.newest_readable(
                listed(), run, lambda _: (listed(), {}), Coordinator(), "", 0.0, store.root
            )
    except NotADirectoryError as error:
        if store.local_path is None or os.path.isdir(store.local_path):
            raise
        problem = f"{store.root} is a file, or lies below one; expected a directory of epochs"
        raise NotACheckpointDirectoryError(problem) from error
    for left, leaves in done.unsupported.items():
        few = view.few(leaves)
        logging.warning("%s: item %s: left out %s: %s", place, left, _units.several(len(leaves), "leaf", "leaves"), few)
    if done.cast:
        logging.info("%s: %s", place, say_cast(done.cast, selection.dtype))
    secs = time.monotonic() - began
    size = _units.nbytes(done.nbytes)
    logging.info(
        "checkpoint %d of %s exported as %s to %s: %s in %.2f s", done.epoch, store.root, format, place, size, secs
    )
    return done


def _array_item(reader: CheckpointReader, kinds: Mapping[str, str], item: str | None) -> tuple[ArraySource, str]:
    """The item of arrays that is meant."""
    epoch = reader.record.epoch
    arrays = [name for name, kind in kinds.items() if kind == "arrays"]
    if item is None and not arrays:
        raise UnsupportedError(f"checkpoint {epoch} has no item of arrays, and only those become tensors")
    chosen = item or items.chosen_arrays(epoch, arrays, None)
    if chosen not in arrays:
        raise UnsupportedError(f"item {chosen!r} is not made of arrays; only those become tensors")
    return reader.arrays(chosen), chosen


def _config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> Mapping[str, Any] | None:
    """What becomes `config.json`; InvalidArgumentError unless it is an object of JSON."""
    where = "config"
    try:
        if isinstance(config, str | os.PathLike):
            where = f"config: {os.fspath(config)}"
            config = json.loads(pathlib.Path(config).read_bytes())
        json.dumps(config)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgumentError(f"{where} is no JSON: {error}") from None
    if not (config is None or isinstance(config, Mapping)):
        raise InvalidArgumentError(f"{where} must be an object, got a {type(config).__name__}")
    return config


def _destination(destination: str | os.PathLike[str], store: Store) -> str:
    """The destination, resolved; InvalidArgumentError unless it is missing or an empty folder outside of the store."""
    path = path_text(destination, "destination")
    if "://" in path:
        raise InvalidArgumentError(f"destination {plain(path)!r} is a URL; export to a local folder, and upload that")
    path = os.path.realpath(expanded(path))
    root = None if store.local_path is None else os.path.realpath(store.local_path)
    if root is not None and os.path.commonpath([root, path]) == root:
        raise InvalidArgumentError(
            f"destination {path} lies in the checkpoint directory {root}, where only epochs belong; "
            "choose a folder outside"
        )
    if os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):  # the current directory is gone
            if os.path.samefile(path, os.curdir):
                raise InvalidArgumentError(
                    f"destination {path} is the current working directory, which an export would replace; "
                    "name a folder in it, or go elsewhere"
                )
        if os.listdir(path) or os.path.ismount(path):
            raise InvalidArgumentError(f"destination {path} is not empty; choose another folder")
    elif os.path.lexists(path):
        raise InvalidArgumentError(f"destination {path} is a file; expected a folder that is missing or empty")
    return path


@contextlib.contextmanager
def _staged(place: str) -> Generator[str]:
    """A folder beside `place`, under a temporary name; the block fills it durably, and then it becomes `place`.

    After an error nothing is left, neither this folder nor the parents that were made for it.
    """
    parent, name = os.path.split(place)
    above = PosixStore(parent)
    staging = f"export-{paths.new_id()}{paths.TMP_SUFFIX}"
    folder = os.path.join(parent, staging)
    missing = [str(p) for p in pathlib.Path(place).parents if not os.path.lexists(p)]  # innermost first
    with contextlib.ExitStack() as undo:
        undo.callback(_remove_empty, missing)
        above.make_root()
        undo.callback(_threads.logged, f"{folder} stays", lambda: above.remove_tree(staging))
        above.make_folder(staging)
        if os.path.isdir(place):  # the new folder is, from the beginning, as open to others as the one it replaces
            status = os.stat(place)
            with contextlib.suppress(PermissionError):
                os.chown(folder, -1, status.st_gid)
            os.chmod(folder, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
        yield folder
        try:
            above.rename(staging, name, replace=True)  # of folders only an empty one
        except (FileExistsError, NotADirectoryError) as error:
            problem = f"destination {place} was filled by another program meanwhile: {error}"
            raise InvalidArgumentError(problem) from error
        above.sync_folder("")
        undo.pop_all()


def _remove_empty(folders: Sequence[str]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it was never made, or another program uses it already
            os.rmdir(folder)


class _Counted(PosixStore):
    """A store that calls `progress` with the bytes of each write."""

    def __init__(self, root: str, progress: Callable[[int], None]):
        super().__init__(root)
        self._progress = progress

    def open_writer(self, path: str, size: int) -> PosixWriter:
        writer = super().open_writer(path, size)
        write = writer.write

        def counted(offset: int, data: memoryview | bytes) -> None:
            write(offset, data)
            self._progress(memoryview(data).nbytes)

        writer.write = counted
        return writer
