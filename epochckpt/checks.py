"""Checks of Orbax's options and legacy arguments: honoured, accepted as a hint, or refused by name."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import items, layout
from epochckpt.errors import InvalidArgumentError, UnsupportedError


def check_options(options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManagerOptions:
    """Refuses options that would change which data exists and are not honoured; logs hints about Orbax's own engine.

    Raises:
        UnsupportedError: by name.
    """
    processes = options.multiprocessing_options
    if processes.primary_host != 0 or processes.active_processes is not None:
        raise UnsupportedError(
            "multiprocessing_options with another primary_host or active_processes is not supported: "
            "every process of the job takes part, and process 0 commits"
        )
    if options.todelete_full_path is not None:
        raise UnsupportedError("todelete_full_path is not supported; use todelete_subdir, or leave it out to delete")
    if options.todelete_subdir is not None and not layout.is_name(options.todelete_subdir):
        raise InvalidArgumentError(f"todelete_subdir {options.todelete_subdir!r} is not a plain folder name")
    if options.enable_per_process_directory_creation:
        raise UnsupportedError("enable_per_process_directory_creation is not supported: nodes share one directory")
    hints = [n for n in ("temporary_path_class", "atomicity_options") if getattr(options, n, None) is not None]
    if hints:
        logging.info("%s concern Orbax's own way of committing and change nothing here", ", ".join(hints))
    return options


def check_save_args(tree: Any, kwargs: Any, args: Any, multi: bool | None, restoring: bool = False) -> bool | None:
    """Checks the arguments of `save` or `restore`; returns whether the manager handles several named items.

    Raises:
        InvalidArgumentError, UnsupportedError: naming the form to use.
    """
    verb = "restore" if restoring else "save"
    if isinstance(tree, ocp.args.CheckpointArgs):
        raise InvalidArgumentError(f"pass it by name: {verb}(step, args={type(tree).__name__}(…))")
    if tree is not None or kwargs is not None:
        raise UnsupportedError(
            f"{verb}(step, items, …_kwargs) is Orbax's legacy form; use {verb}(step, "
            f"args=orbax.checkpoint.args.Standard{'Restore' if restoring else 'Save'}(…)), "
            "or args.Composite(name=…) for several items"
        )
    if args is None:
        if restoring:
            return multi
        raise InvalidArgumentError("save() needs args=, for example args=orbax.checkpoint.args.StandardSave(state)")
    if not isinstance(args, ocp.args.CheckpointArgs):
        raise InvalidArgumentError(
            f"{verb}(args=…) expects a class of orbax.checkpoint.args, got {type(args).__name__}"
        )
    given = items.is_multi(args)
    if multi is not None and multi != given:
        raise InvalidArgumentError(
            "this manager handles several named items: pass args=Composite(name=…)"
            if multi
            else "this manager handles one unnamed item: pass its args directly, not a Composite"
        )
    return given
