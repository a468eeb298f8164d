"""Checks of Orbax's options and arguments: honoured, accepted as a hint, or refused by name."""

import dataclasses
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt.errors import InvalidArgumentError, UnsupportedError
from epochckpt.format import paths
from epochckpt.options import StorageOptions
from epochckpt.orbax.step_names import StepNames

HONOURED = {
    *("save_interval_steps", "save_on_steps", "should_save_fn", "save_decision_policy"),
    *("max_to_keep", "keep_period", "keep_time_interval", "keep_checkpoints_without_metrics", "preservation_policy"),
    *("best_fn", "best_mode", "prevent_write_metrics", "save_root_metadata"),
    *("step_prefix", "step_format_fixed_length", "step_name_format"),
    *("create", "read_only", "todelete_subdir", "file_options.path_permission_mode"),
    *("single_host_load_and_broadcast",),  # of what is listed always, and here also of what is restored
    *("enable_async_checkpointing", "enable_should_save_is_saving_in_progress_check"),
    *("async_options.timeout_secs", "async_options.post_finalization_callback"),
    *("multiprocessing_options.primary_host", "multiprocessing_options.active_processes"),
    *("multiprocessing_options.barrier_sync_key_prefix",),
}
"""Fields of CheckpointManagerOptions, and of the options in it, that do here what they do in Orbax."""

HINTS = {
    "cleanup_tmp_directories": "what an earlier run left unfinished is always cleaned up",
    "enable_background_delete": "epochs are always deleted in the background",
    "num_deletion_threads": "epochs are always deleted in the background",
    "atomicity_options": "an epoch is always committed atomically, in our own way",
    "temporary_path_class": "an epoch is always committed atomically, in our own way",
    "enable_per_process_directory_creation": "with primary_host=None every process makes its own directory in any case",
    "async_options.barrier_sync_fn": "there are no barriers",
    "async_options.create_directories_asynchronously": "folders are always made in the background",
    "file_options.skip_sync_file_validations": "save() never looks at files before it returns",
    "lightweight_initialize": "opening is fast in any case",
}
"""Fields that concern Orbax's own engine and change nothing here, and why."""

_NESTED = frozenset({"async_options", "file_options", "multiprocessing_options"})

REFUSED = {
    "todelete_full_path": "use todelete_subdir, or leave it out to delete",
    "should_keep_fn": "use preservation_policy",  # only in older Orbax
}
"""Fields that would change which data exists, and are not supported."""


def is_multi(args: Any) -> bool:
    """Whether the argument names several items (Composite), as opposed to one unnamed item."""
    return isinstance(args, ocp.args.Composite)


def check_options(options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManagerOptions:
    """Refuses options that would change which data exists and are not honoured; logs hints about Orbax's own engine."""
    changed = _changed(options)
    for name in changed:
        if name in REFUSED:
            raise UnsupportedError(f"{name} is not supported: {REFUSED[name]}")
        if name not in HONOURED and name not in HINTS:
            raise UnsupportedError(f"{name} is an option of a newer Orbax, which this epochckpt does not know; omit it")
    excluded = [n for n in ("keep_time_interval", "max_to_keep", "keep_period") if getattr(options, n)]
    if options.preservation_policy is not None and excluded:
        raise InvalidArgumentError(f"preservation_policy and {excluded[0]} exclude each other; pass one of them")
    folder = options.todelete_subdir
    if folder is not None and (not paths.is_free_folder(folder) or StepNames.of(options).parse(folder) is not None):
        raise InvalidArgumentError(
            f"todelete_subdir {folder!r} is not usable: expected the name of one folder in the directory, such as "
            "'ttl=1h', that is named neither like an epoch nor like the folders that epochckpt makes itself"
        )
    longest = StepNames.of(options).longest()
    if not (options.read_only or paths.is_movable(longest, folder or "")):
        raise InvalidArgumentError(
            f"the names of epochs, such as {longest!r}{f', and todelete_subdir {folder!r}' if folder else ''} are too "
            "long. An epoch that is deleted or set aside gets a longer name on its way, which must fit into 255 bytes. "
            "Characters other than letters, digits and '_.-~' count three times or more in it. Shorten "
            f"{'step_prefix or todelete_subdir' if folder else 'step_prefix'}"
        )
    hints = [f"{name} ({HINTS[name]})" for name in changed if name in HINTS]
    if hints:
        logging.info("options that change nothing here: %s", "; ".join(hints))
    return options


def _changed(options: Any, prefix: str = "") -> list[str]:
    """Names of the fields that are not at their defaults; those of the options in it as `file_options.…`."""
    default, found = type(options)(), list[str]()
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in _NESTED:
            found += [] if value is None else _changed(value, f"{field.name}.")
        elif value != getattr(default, field.name):
            found.append(prefix + field.name)
    return found


def storage_options(options: ocp.CheckpointManagerOptions, storage: StorageOptions | None) -> StorageOptions:
    """StorageOptions as given, or the defaults, with the bound on a save that `async_options` asks for.

    With local disks there is no Orbax view: stock Orbax cannot read the part of an epoch that one disk has.
    InvalidArgumentError: both ask for a bound, and not for the same.
    """
    found, default = storage or StorageOptions(), StorageOptions().save_timeout_secs
    asked = options.async_options
    if asked is not None and asked.timeout_secs not in (type(asked)().timeout_secs, found.save_timeout_secs):
        if found.save_timeout_secs != default:
            raise InvalidArgumentError(
                f"AsyncOptions.timeout_secs={asked.timeout_secs} contradicts StorageOptions.save_timeout_secs="
                f"{found.save_timeout_secs:g}: both bound how long a save may take. Pass one of them"
            )
        found = dataclasses.replace(found, save_timeout_secs=asked.timeout_secs)
    return dataclasses.replace(found, orbax_view=False) if found.local_disks else found


def check_args(args: Any, multi: bool | None, *, restoring: bool = False) -> bool | None:
    """Checks the argument of `save` or `restore`; returns whether the manager handles several named items."""
    verb = "restore" if restoring else "save"
    if args is None:
        if restoring:
            return multi
        raise InvalidArgumentError("save() needs args=, for example args=orbax.checkpoint.args.StandardSave(state)")
    if not isinstance(args, ocp.args.CheckpointArgs):
        raise InvalidArgumentError(
            f"{verb}(args=…) expects a class of orbax.checkpoint.args, got {type(args).__name__}"
        )
    given = is_multi(args)
    if multi is not None and multi != given:
        raise InvalidArgumentError(
            "this manager handles several named items: pass args=Composite(name=…) (in Orbax's words: Must provide "
            "`args` of type `Composite` when dealing with multiple checkpointable objects.)"
            if multi
            else "this manager handles one unnamed item: pass its args directly, not a Composite (in Orbax's words: "
            "Cannot provide `args` of type `Composite` when dealing with a single, unnamed (default) checkpointable "
            "object.)"
        )
    return given
