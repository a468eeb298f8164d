"""`export`: an epoch as a plain stock Orbax checkpoint, or as safetensors files, in a folder of its own."""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _progress, _threads, _units
from epochckpt.agreement import Coordinator, restore_vote
from epochckpt.arrays import item_names
from epochckpt.arrays.reader import ArraySource
from epochckpt.convert.destination import checked, staged
from epochckpt.convert.formats import EXPORTED
from epochckpt.convert.leaf_files import FormOptions, LeftOut
from epochckpt.convert.orbax_form import CopiedFiles, NewFiles, write_orbax
from epochckpt.convert.safetensors_form import write_model_files, write_safetensors
from epochckpt.convert.selected_arrays import SelectedArrays, say_cast
from epochckpt.convert.selection import Patterns, Rename, Selection
from epochckpt.directory import EpochDirectory, directory_of
from epochckpt.errors import InvalidArgumentError, NotACheckpointDirectoryError, UnsupportedError
from epochckpt.format import ItemKind
from epochckpt.manager import CheckpointReader, Readers
from epochckpt.manager.numbers import epoch_number
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames, view
from epochckpt.storage import Store, open_store
from epochckpt.tiers import named_mirror


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
    request = ExportRequest.of(
        format=format,
        item=item,
        selection=Selection.of(include, exclude, rename, dtype),
        options=FormOptions(
            separator=separator,
            framework=framework,
            max_file_bytes=max_file_bytes,
            max_buffer_bytes=max_buffer_bytes,
            skip_unsupported=skip_unsupported,
        ),
        config=config,
        progress=progress or _progress.counting(),
    )
    began = time.monotonic()
    store = open_store(directory)
    epoch_directory = directory_of(store, StepNames.of(options or ocp.CheckpointManagerOptions()))
    job = _Export(request, epoch_directory, mirror, checked(destination, store))
    try:
        exported = job.newest() if epoch is None else job.write(epoch_number(epoch))
    except NotADirectoryError as error:
        if store.is_reachable():
            raise
        problem = f"{store.root} is a file, or lies below one; expected a directory of epochs"
        raise NotACheckpointDirectoryError(problem) from error
    _log(exported, request, store, time.monotonic() - began)
    return exported


@dataclasses.dataclass(frozen=True)
class ExportRequest:
    """What to write, and how; `export` says what each means."""

    format: str
    item: str | None
    selection: Selection
    options: FormOptions
    config: Mapping[str, Any] | None
    progress: Callable[[int], None] | None

    @classmethod
    def of(
        cls,
        *,
        format: str,
        item: str | None,
        selection: Selection,
        options: FormOptions,
        config: Mapping[str, Any] | str | os.PathLike[str] | None,
        progress: Callable[[int], None] | None,
    ) -> "ExportRequest":
        """A request of what a caller gave; InvalidArgumentError for what cannot be meant."""
        if format not in EXPORTED:
            known = ", ".join(map(repr, EXPORTED))
            raise InvalidArgumentError(f"format {format!r} is not known; expected one of {known}")
        if not isinstance(options.separator, str) or not options.separator:
            problem = f"separator must be a text of at least one character, got {options.separator!r}"
            raise InvalidArgumentError(problem)
        for name in ("max_file_bytes", "max_buffer_bytes"):
            value = getattr(options, name)
            if type(value) is not int or value < 1:
                raise InvalidArgumentError(f"{name} must be a positive integer, got {value!r}")
        if not isinstance(options.framework, str):
            raise InvalidArgumentError(f"framework must be a text such as 'pt', got {options.framework!r}")
        if config is not None and format != "huggingface":
            raise InvalidArgumentError(f"config= is of the format 'huggingface', not of {format!r}")
        return cls(
            format=format,
            item=item,
            selection=selection,
            options=options,
            config=_config(config),
            progress=progress,
        )


class _Export:
    """Writes one epoch of a directory into one folder."""

    def __init__(self, request: ExportRequest, epoch_directory: EpochDirectory, mirror: str | None, place: str):
        self._request = request
        self._directory = epoch_directory
        self._place = place
        self._mirror = named_mirror(mirror, epoch_directory)
        store = epoch_directory.store
        pool = _threads.Pool(max(StorageOptions().io_threads, store.concurrency))
        self._readers = Readers(epoch_directory, pool, mirror=self._mirror)

    def newest(self) -> Exported:
        """Writes the newest epoch that can be read."""
        _, exported, _ = restore_vote.newest_readable(
            candidates=self._epochs(),
            restore=self.write,
            save_of=lambda epoch: None,
            look_again=lambda rejected: (self._epochs(), {}),
            coordinator=Coordinator(),
            prefix="",
            timeout_secs=0.0,
            directory=self._directory.store.root,
        )
        return exported

    def _epochs(self) -> list[int]:
        return sorted({*self._directory.list_epochs(), *self._mirror.readable()})

    def write(self, epoch: int) -> Exported:
        """Writes an epoch; after an error there is no folder."""
        request = self._request
        reader = self._readers.open(epoch)
        kinds = reader.item_kinds()
        if request.item is not None and request.item not in kinds:
            raise item_names.unknown_item(epoch, request.item, kinds)
        arrays = None
        if request.format != "orbax" or request.selection:
            source, name = _array_item(reader, kinds, request.item)
            arrays = SelectedArrays(source, name, request.selection)
        elif reader.record.stock:
            raise UnsupportedError(
                f"checkpoint {epoch} was written by stock Orbax: copy its folder, or save it with a manager of ours"
            )
        with staged(self._place) as folder:
            target = open_store(folder)
            if request.progress is not None:
                target.written.follow(request.progress)
            left_out = self._write_files(reader, arrays, target)
            nbytes = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(folder) for f in files)
            reader.check_present("it was being exported")
        return Exported(
            epoch=epoch,
            path=self._place,
            nbytes=nbytes,
            unsupported=left_out,
            cast=arrays.cast if arrays is not None else {},
        )

    def _write_files(self, reader: CheckpointReader, arrays: SelectedArrays | None, target: Store) -> LeftOut:
        request = self._request
        options = request.options
        if request.format == "orbax":
            files = self._copied(reader) if arrays is None else NewFiles(arrays, options.max_buffer_bytes)
            return write_orbax(files, reader.store, target, options)
        assert arrays is not None, "tensors are those of one item"
        left_out = write_safetensors(arrays, target, options)
        if request.format == "huggingface":
            write_model_files(arrays, target, request.config)
        return left_out

    def _copied(self, reader: CheckpointReader) -> CopiedFiles:
        """The files of all items, or of the one that is asked for."""
        record = reader.record
        if self._request.item is not None:
            record = dataclasses.replace(record, items={self._request.item: record.items[self._request.item]})
        return CopiedFiles(reader.copyable(), record)


def _log(exported: Exported, request: ExportRequest, store: Store, secs: float) -> None:
    place = exported.path
    for item, leaves in exported.unsupported.items():
        few = view.few(leaves)
        logging.warning("%s: item %s: left out %s: %s", place, item, _units.several(len(leaves), "leaf", "leaves"), few)
    if exported.cast:
        logging.info("%s: %s", place, say_cast(exported.cast, request.selection.dtype))
    text = "checkpoint %d of %s exported as %s to %s: %s in %.2f s"
    size = _units.nbytes(exported.nbytes)
    logging.info(text, exported.epoch, store.root, request.format, place, size, secs)


def _array_item(reader: CheckpointReader, kinds: Mapping[str, ItemKind], item: str | None) -> tuple[ArraySource, str]:
    """The item of arrays that is meant."""
    epoch = reader.record.epoch
    arrays = [name for name, kind in kinds.items() if kind is ItemKind.ARRAYS]
    if item is None and not arrays:
        raise UnsupportedError(f"checkpoint {epoch} has no item of arrays, and only those become tensors")
    chosen = item or item_names.chosen_arrays(epoch, arrays, None)
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
