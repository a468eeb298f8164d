"""`Checkpointer`: the interface of `orbax.checkpoint.v1.training.Checkpointer`, over our `CheckpointManager`.

Policies, metadata classes and errors are Orbax's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import v1

from epochckpt import _threads
from epochckpt.arrays import TreeMetadata
from epochckpt.errors import EpochNotFoundError, InvalidArgumentError, UnsupportedError
from epochckpt.format import ItemKind, paths
from epochckpt.manager import CheckpointManager, CheckpointReader, Response
from epochckpt.manager.numbers import epoch_number
from epochckpt.options import StorageOptions
from epochckpt.v1 import bridge
from epochckpt.v1 import context as contexts
from epochckpt.v1.engine import STATE, DeletionResponse, Engine, SaveResponse, shown_names, tree_name

save_decision_policies = v1.training.save_decision_policies
preservation_policies = v1.training.preservation_policies
errors = v1.training.errors
CheckpointMetadata = v1.training.CheckpointMetadata
RootMetadata = v1.training.RootMetadata

_T = TypeVar("_T")
_HAS_PATH = "path" in inspect.signature(CheckpointMetadata).parameters  # not in older Orbax
_RESERVED = frozenset({"metrics", "AUTO"})  # names that Orbax's v1 refuses


class Checkpointer:
    """Saves and loads the epochs (steps) of a training loop; a drop-in for `orbax.checkpoint.v1.training.Checkpointer`.

    All processes of a job make the same calls. Unlike Orbax's, it has no barriers. A call waits for other processes
    only if all must agree on what to read or delete, as in `load` of the newest epoch. `latest` and `checkpoints` name
    committed epochs only, and every byte that is loaded is verified.

    A step may be a number, or the CheckpointMetadata of an epoch. Methods raise EpochNotFoundError (which is Orbax's
    StepNotFoundError) if there is no such epoch.

    Examples:
        >>> import jax.numpy as jnp
        >>> from epochckpt import v1 as ocp
        >>> state = {"params": {"w": jnp.arange(3.0)}, "step": 7}
        >>> with ocp.training.Checkpointer("run") as checkpointer:
        ...     checkpointer.save(7, state, metrics={"loss": 0.5})
        True
        >>> with ocp.training.Checkpointer("run") as checkpointer:
        ...     print(checkpointer.latest.step, checkpointer.latest.metrics, checkpointer.load(None, state)["step"])
        7 {'loss': 0.5} 7
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        context: Any = None,
        save_decision_policy: Any = None,
        preservation_policy: Any = None,
        step_name_format: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
        cleanup_tmp_directories: bool = False,
        lightweight_initialize: bool = False,
        logger: Any = None,
        storage: StorageOptions | None = None,
        node: str | Sequence[str] | None = None,
    ):
        """Opens a directory, see `epochckpt.CheckpointManager`.

        Args:
            directory: where the epochs live: a path or a URL.
            context: an Orbax Context for all calls that are not made inside an active one. Its options for
                asynchronous saves, files and processes, and `array_options.loading.use_load_and_broadcast`, count when
                the directory is opened.
            save_decision_policy: what is saved; by default the first step, one whenever no save is in progress, and the
                last one before a preemption.
            preservation_policy: what is kept; by default everything. The newest epoch always is.
            step_name_format: how the folders of epochs are called, see `orbax.checkpoint.v1.path.step`.
            custom_metadata: JSON for the whole directory, see `root_metadata`; written once, with the first write.
            cleanup_tmp_directories: changes nothing: what an earlier run left unfinished is always cleaned up.
            lightweight_initialize: changes nothing: opening is fast in any case.
            logger: an Orbax logger.
            storage: how bytes get to storage, and timeouts.
            node: this process's node name, or names.
        """
        given = context if context is not None else contexts.active()
        self._context = v1.Context(contexts.check(v1.Context() if given is None else given))
        options = ocp.CheckpointManagerOptions(
            save_decision_policy=save_decision_policy,
            preservation_policy=preservation_policy or preservation_policies.PreserveAll(),
            step_name_format=step_name_format,
            cleanup_tmp_directories=cleanup_tmp_directories,
            max_to_keep=None,
            **contexts.v0_options(self._context),
        )
        if hasattr(options, "lightweight_initialize"):
            options.lightweight_initialize = lightweight_initialize
        loading = self._context.array_options.loading  # set here: Orbax refuses it beside some formats of names
        options.single_host_load_and_broadcast = getattr(loading, "use_load_and_broadcast", False)
        self._engine = Engine(directory, options, custom_metadata, logger, storage, node)
        self._deleting: _threads.Future[bool] | None = None

    @property
    def manager(self) -> CheckpointManager:
        """The manager underneath, for what Orbax's v1 has no name for, such as `verify`, `status` and `rollback_to`."""
        return self._engine.manager

    @property
    def _manager(self) -> CheckpointManager:
        """The same, by the name that users of Orbax's v1 reach for, where it had no `delete`; see docs/orbax.md."""
        return self.manager

    @property
    def directory(self) -> epath.Path:
        """The directory, resolved."""
        return self.manager.directory

    # -- which epochs there are ----------------------------------------------------------------------------------

    @property
    def latest(self) -> Any:
        """CheckpointMetadata of the greatest committed epoch, or None. Saves in flight are not in it."""
        infos = self._engine.committed()
        return self._describe(infos[-1]) if infos else None

    @property
    def checkpoints(self) -> Sequence[Any]:
        """CheckpointMetadata of the committed epochs, ascending: step, path, metrics and time of the commit."""
        return [self._describe(info) for info in self._engine.committed()]

    def _describe(self, info: Any) -> Any:
        name = self._engine.folder(info.step)
        nanoseconds = round(info.time.timestamp() * 1e9)
        return _metadata(
            info.step, self.directory / name, metadata=None, metrics=info.metrics, commit_timestamp_nsecs=nanoseconds
        )

    def reload(self) -> None:
        """Looks at storage again; see `CheckpointManager.reload`."""
        self._wait_for_deletion()
        self.manager.reload()

    # -- saving --------------------------------------------------------------------------------------------------

    def should_save(self, step: Any) -> bool:
        """Whether the policy asks for this step to be saved, after those that were requested so far."""
        return self.manager.should_save(_number(step))

    def save(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = STATE,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Saves a pytree, and waits until it is committed; see `save_async`.

        Returns:
            Whether it was saved; False if the policy did not ask for it.

        Raises:
            SaveError: it was begun, and not committed; earlier epochs are untouched.
        """
        return self._wait_for(
            self.save_async(
                step,
                state,
                checkpointable_name=checkpointable_name,
                force=force,
                overwrite=overwrite,
                metrics=metrics,
                custom_metadata=custom_metadata,
            )
        )

    def save_async(
        self,
        step: int,
        state: Any,
        *,
        checkpointable_name: str = STATE,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> SaveResponse | None:
        """Saves a pytree in the background; returns when it has been copied or can no longer change.

        Args:
            step: the epoch's number.
            state: what to save.
            checkpointable_name: its name. By its default it is the one unnamed item, which v0 calls `default`.
            force: save even if the policy says no.
            overwrite: take the place of an existing epoch of this number; at any moment the old or the new one exists.
            metrics: JSON, kept with the epoch, for the preservation policy.
            custom_metadata: JSON, kept with the epoch.

        Returns:
            A response, whose `result()` is True, or raises what happened to this very save; None if the policy did not
            ask for it.

        Raises:
            StepExistsError: the epoch exists, and there is no `overwrite`; it is Orbax's StepAlreadyExistsError.
            InvalidArgumentError: something in `state` cannot be saved; names it.
        """
        return self.save_checkpointables_async(
            step,
            {checkpointable_name: state},
            force=force,
            overwrite=overwrite,
            metrics=metrics,
            custom_metadata=custom_metadata,
        )

    def save_checkpointables(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> bool:
        """Saves several objects by name, and waits until they are committed; see `save`."""
        return self._wait_for(
            self.save_checkpointables_async(
                step,
                checkpointables,
                force=force,
                overwrite=overwrite,
                metrics=metrics,
                custom_metadata=custom_metadata,
            )
        )

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: Mapping[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> SaveResponse | None:
        """Saves several objects by name in the background: pytrees, JSON, and what a handler of Orbax's v1 takes.

        See `save_async`. Handlers are found by Orbax's rules, in the registry of the context.
        """
        _check_names(checkpointables, "save")
        self._wait_for_deletion()
        context = contexts.now(self._context)
        return self._engine.save_epoch(
            step,
            checkpointables,
            context,
            overwrite=overwrite,
            metrics=metrics,
            force=force,
            custom_metadata=custom_metadata,
        )

    @staticmethod
    def _wait_for(response: SaveResponse | None) -> bool:
        return response is not None and response.result()

    def is_saving_in_progress(self) -> bool:
        """Whether a save of this process has not ended yet."""
        return self.manager.is_saving_in_progress()

    def cancel(self, step: Any = None) -> None:
        """No save in flight is committed any more, but for one that is just being committed; all processes call it.

        Their responses raise SaveError, nothing else does. With `step` this waits for their end, and deletes that epoch
        if it exists.
        """
        self._engine.cancel()
        if step is not None:
            self.delete(step, missing_ok=True)

    # -- loading -------------------------------------------------------------------------------------------------

    def load(self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = STATE) -> Any:
        """Loads a pytree, on any number of processes and any sharding; every byte is verified first.

        Args:
            step: which epoch; None: the newest that every process can read (agreed by vote).
            abstract_state: pytree of expected leaves: `jax.ShapeDtypeStruct`, arrays, values, types, or `...` for a
                leaf that is left out. None: as it was saved.
            checkpointable_name: the item; by its default the one unnamed item, whoever saved it.

        Raises:
            MismatchError: the target does not fit; lists every leaf.
            DamagedError: bytes differ from the saved ones; without a `step`, in every epoch.
            UnknownNameError: the epoch has no such item.
        """
        return self.load_checkpointables(step, {checkpointable_name: abstract_state})[checkpointable_name]

    def load_async(self, step: Any = None, abstract_state: Any = None, *, checkpointable_name: str = STATE) -> Any:
        """Like `load`, in the background; see `CheckpointManager.restore_async`."""
        loading = self.load_checkpointables_async(step, {checkpointable_name: abstract_state})
        return loading.then(lambda loaded: loaded[checkpointable_name])

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Loads several objects by name, or all; see `load`.

        Args:
            step: which epoch; None: the newest.
            abstract_checkpointables: what to expect of each object that is to be loaded; None for one as it was saved.

        Returns:
            The objects by name. The one unnamed item is called `state`.
        """
        return self._engine.load(*self._to_load(step, abstract_checkpointables))

    def load_checkpointables_async(
        self, step: Any = None, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> Any:
        """Like `load_checkpointables`, in the background; see `load_async`."""
        return self._engine.begin_load(*self._to_load(step, abstract_checkpointables))

    def _to_load(self, step: Any, abstract: Any) -> tuple[int | None, Any, Any]:
        if isinstance(abstract, v1.CheckpointMetadata | CheckpointMetadata):
            abstract = abstract.metadata
        if abstract:
            _check_names(abstract, "load")
        return None if step is None else _number(step), abstract, contexts.now(self._context)

    # -- looking -------------------------------------------------------------------------------------------------

    def metadata(self, step: Any = None) -> Any:
        """CheckpointMetadata of an epoch; its `metadata` is a tree like that of `state`, and fits as `abstract_state`.

        None is the latest epoch. Of an epoch without an unnamed item the first tree by name is described.
        """

        def look(reader: CheckpointReader) -> Any:
            return _described(reader, _tree_of(_item_metadata(reader)[tree_name(reader)]))

        return self._engine.look(self._existing(step), look)

    def checkpointables_metadata(self, step: Any = None) -> Any:
        """CheckpointMetadata of an epoch; its `metadata` is a dict that describes each object, by name."""
        context = contexts.now(self._context)

        def look(reader: CheckpointReader) -> Any:
            items = _item_metadata(reader)
            kinds = reader.item_kinds()
            recorded = reader.item_handlers()
            described = {}
            for name, item in shown_names(reader, kinds).items():
                if kinds[item] is not ItemKind.FILES:
                    described[name] = _tree_of(items[item])
                    continue
                args = bridge.metadata_args(name, recorded.get(item, ""), context)
                described[name] = None if args is None else reader.restore_item(item, args)
            return _described(reader, described)

        return self._engine.look(self._existing(step), look)

    def root_metadata(self) -> Any:
        """Orbax's RootMetadata: what was written for the whole directory, else `custom_metadata=`."""
        metadata = self.manager.metadata()
        return RootMetadata(directory=self.directory, custom_metadata=metadata.custom_metadata)

    # -- deleting, waiting, closing ------------------------------------------------------------------------------

    def delete(self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> bool:
        """Deletes an epoch, also the newest, and waits until its files are removed.

        Returns:
            Whether it existed; False only with `missing_ok`.

        Raises:
            RemovalError: it is deleted, but its files could not be removed.
            UnsupportedError: `checkpointable_name` is given: an epoch is deleted as a whole.
        """
        return self.delete_async(step, checkpointable_name=checkpointable_name, missing_ok=missing_ok).result()

    def delete_async(
        self, step: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False
    ) -> Response[bool]:
        """Deletes an epoch: it is gone from `checkpoints` at once, and its files are removed in the background."""
        if checkpointable_name is not None:
            raise UnsupportedError(
                f"delete(checkpointable_name={checkpointable_name!r}): an epoch is deleted as a whole, because its "
                "record has the checksums of all that it holds; load what is to stay, and save it with overwrite=True"
            )
        self._wait_for_deletion()
        try:
            self._deleting = self._engine.remove(_number(step))
        except EpochNotFoundError:
            if not missing_ok:
                raise
            nothing = _threads.Future[bool]()
            nothing.set(False)
            return DeletionResponse(self._engine, nothing)
        return DeletionResponse(self._engine, self._deleting)

    def _wait_for_deletion(self) -> None:
        deleting = self._deleting
        self._deleting = None
        if deleting is not None:
            deleting.wait()

    def wait(self) -> None:
        """Waits for saves and deletions; raises the failures that no response has raised."""
        self._wait_for_deletion()
        self.manager.wait_until_finished()

    def close(self) -> None:
        """Waits like `wait`, and lets go of the directory."""
        self._wait_for_deletion()
        self.manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: object) -> None:
        """Closes it. An error of the block itself is what is raised; a failed save becomes a note on it."""
        self.manager.__exit__(kind, error, trace)

    # -- older names ---------------------------------------------------------------------------------------------

    def save_pytree(self, *args: Any, **kwargs: Any) -> bool:
        """Deprecated: `save`."""
        return self.save(*_renamed("save_pytree", "save", "pytree", "state", args, kwargs), **kwargs)

    def save_pytree_async(self, *args: Any, **kwargs: Any) -> SaveResponse | None:
        """Deprecated: `save_async`."""
        return self.save_async(*_renamed("save_pytree_async", "save_async", "pytree", "state", args, kwargs), **kwargs)

    def load_pytree(self, *args: Any, **kwargs: Any) -> Any:
        """Deprecated: `load`."""
        return self.load(*_renamed("load_pytree", "load", "abstract_pytree", "abstract_state", args, kwargs), **kwargs)

    def load_pytree_async(self, *args: Any, **kwargs: Any) -> Any:
        """Deprecated: `load_async`."""
        given = _renamed("load_pytree_async", "load_async", "abstract_pytree", "abstract_state", args, kwargs)
        return self.load_async(*given, **kwargs)

    def pytree_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Deprecated: `metadata`."""
        return self.metadata(*_renamed("pytree_metadata", "metadata", "", "", args, kwargs), **kwargs)

    def __getattr__(self, name: str) -> Any:
        text = f"epochckpt.v1.training.Checkpointer has no attribute {name!r}"
        if not name.startswith("_") and hasattr(v1.training.Checkpointer, name):
            text += f"; that of orbax-checkpoint {ocp.__version__} has it, and this epochckpt does not know it"
        raise AttributeError(text)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _existing(self, step: Any) -> int:
        if step is not None:
            return _number(step)
        infos = self._engine.committed()
        if not infos:
            raise EpochNotFoundError(None, self.manager.root, [])
        return infos[-1].step


def _number(step: Any) -> int:
    return epoch_number(step.step if isinstance(step, CheckpointMetadata) else step)


def _check_names(names: Any, verb: str) -> None:
    if not isinstance(names, Mapping) or not names:
        what = f"a {type(names).__name__}" if names or not isinstance(names, Mapping) else "an empty one"
        raise InvalidArgumentError(f"{verb}_checkpointables expects a dict of objects by name, got {what}")
    for name in names:
        if name in _RESERVED:
            raise InvalidArgumentError(f"checkpointable name {name!r} is reserved; choose another one")
        if verb == "save" and (name != STATE or len(names) > 1):
            paths.check_item_name(name)


def _renamed(
    old: str, new: str, old_argument: str, new_argument: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Warns of an older name, and takes the older name of its argument."""
    warnings.warn(f"Use `{new}` instead of `{old}`.", DeprecationWarning, stacklevel=3)
    if old_argument in kwargs:
        kwargs[new_argument] = kwargs.pop(old_argument)
    return args


def _metadata(step: int, path: Any, **fields: Any) -> Any:
    return CheckpointMetadata(step, **fields, **({"path": path} if _HAS_PATH else {}))


def _described(reader: CheckpointReader, metadata: Any) -> Any:
    record = reader.record
    return _metadata(
        record.epoch,
        reader.path,
        metadata=metadata,
        init_timestamp_nsecs=record.started_ns,
        commit_timestamp_nsecs=record.committed_ns,
        custom_metadata=dict(record.custom_metadata),
        metrics=reader.metrics(),
    )


def _item_metadata(reader: CheckpointReader) -> Mapping[str, Any]:
    """What is known of each item, by its stored name."""
    metadata = reader.item_metadata()
    names = list(reader.item_kinds())
    return dict(metadata.items()) if isinstance(metadata, ocp.args.Composite) else {names[0]: metadata}


@dataclasses.dataclass(frozen=True)
class NumpyMetadata:
    """What is known of an array that was on no device, with the attributes of Orbax's v1; a target that asks for NumPy.

    `storage_metadata` has the shapes of the array's parts in the files.
    """

    shape: tuple[int, ...]
    dtype: Any
    storage_metadata: Any


@dataclasses.dataclass(frozen=True)
class ArrayMetadata(NumpyMetadata):
    """What is known of an array that was on devices; `sharding_metadata` is Orbax's form of its sharding."""

    sharding_metadata: Any

    @property
    def sharding(self) -> jax.sharding.Sharding | None:
        """The sharding; None if its devices do not exist here, where Orbax raises ValueError."""
        with contextlib.suppress(ValueError):
            return self.sharding_metadata.to_jax_sharding()
        return None


_VALUES = {"b": False, "i": 0, "u": 0, "f": 0.0, "c": 0j}  # by the kind of a dtype: what v1 has in place of numbers


def _tree_of(metadata: Any) -> Any:
    """A tree of metadata as v1 has it: values stand for Python numbers and texts, and arrays say where they were."""

    def leaf(value: Any) -> Any:
        if isinstance(value, ocp.metadata.StringMetadata):
            return "string"
        if isinstance(value, ocp.metadata.ScalarMetadata) and value.dtype is not None:
            return _VALUES.get(value.dtype.kind, value)
        if isinstance(value, ocp.metadata.ArrayMetadata) and value.sharding is None:
            return NumpyMetadata(value.shape, value.dtype, value.storage)
        if isinstance(value, ocp.metadata.ArrayMetadata):
            return ArrayMetadata(
                shape=value.shape,
                dtype=value.dtype,
                storage_metadata=value.storage,
                sharding_metadata=value.sharding,
            )
        return value

    return jax.tree.map(leaf, metadata.tree) if isinstance(metadata, TreeMetadata) else metadata
