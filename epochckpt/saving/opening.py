"""Opening a directory: once, bounded, agreed between the processes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import orbax.checkpoint as ocp  # pyright: ignore[reportMissingTypeStubs]
from absl import logging

from epochckpt import errors
from epochckpt.agreement import Coordinator, coordination
from epochckpt.agreement.collective import Timeouts, collective, hear_secs
from epochckpt.directory import EpochDirectory
from epochckpt.format import Nodes, paths
from epochckpt.format.nodes import check_names
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames, step_names
from epochckpt.saving.job_directory import JobDirectory, Kind, Place
from epochckpt.saving.survey import Survey
from epochckpt.storage import Store

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Opened:
    """An open directory."""

    job_directory: JobDirectory
    nodes: Nodes
    survey: Survey
    refused: errors.AccessError | None  # on the primary: why this user may not write there, if that can be seen

    @property
    def coordinator(self) -> Coordinator:
        return self.job_directory.coordinator

    @property
    def epoch_directory(self) -> EpochDirectory:
        return self.job_directory.epoch_directory

    @property
    def store(self) -> Store:
        return self.job_directory.epoch_directory.store

    @property
    def prefix(self) -> str:
        """Of this manager's coordination keys, and of no other manager's of the job."""
        return self.job_directory.prefix


def open_directory(
    directory: str | os.PathLike[str],
    options: ocp.CheckpointManagerOptions,
    storage: StorageOptions,
    node: str | Sequence[str] | None,
    coordinator: Coordinator,
    item_names: Sequence[str] = (),
    *,
    kind: Kind,
) -> Opened:
    """Opens a directory for a manager: looks at it, and writes nothing but the directory itself where it is missing.

    `kind` says how it lies on the hosts of the job. With `read_only`, or where `create` is False, a directory that is
    missing has no epochs, and is not made.

    Raises:
        NotACheckpointDirectoryError: it is a file.
        AccessError: there is no permission to read or create it.
        FormatVersionError: a record of the directory itself needs a newer epochckpt.
        InvalidArgumentError: names of nodes or items are unusable or repeated.
        CoordinationTimeoutError: a process did not come to open it; the error names that process.
    """
    base = keys_prefix(coordinator, options)  # first of all: every process counts alike
    names = StepNames.of(options)  # refuses what cannot be used before another process hears of this one
    defaults = _default_names(coordinator)
    own = check_names(defaults[coordinator.process] if node is None else node)
    if coordinator.processes > 1 and not (node is None or isinstance(node, str)):
        raise errors.InvalidArgumentError(
            f"node={list(own)}: one process may host several nodes only in a job of one process, here are "
            f"{coordinator.processes}; pass the one name of this process's node"
        )
    place = Place(directory=directory, options=options, storage=storage, names=names)
    opened = kind(place, coordinator)

    def hello() -> dict[str, Any]:
        return {"node": own[0], "told": opened.introduce(own[0])}

    # The primary looks at the directory, once it knows every node's name, and the other processes take its answer. With
    # local disks every process tells what is on its own disk.
    def decide(hellos: list[Any]) -> dict[str, Any]:
        nodes = own if coordinator.processes == 1 else _checked_nodes(coordinator, hellos)
        return _decide(opened, item_names, nodes, [hello["told"] for hello in hellos])

    wait = storage.open_timeout_secs
    late = "{names} did not construct its CheckpointManager within {secs:g} s"
    patience = Timeouts(collect_secs=wait, hear_secs=hear_secs(wait), late_text=late)
    answer = collective(coordinator, base, hello, decide, patience, once=True)
    prefix = ""
    if coordinator.processes > 1:
        prefix = f"{base}/{answer['opening']}"
        coordination.forget_opening(coordinator, f"{base}/told", f"{base}/decision")

    # Each process opens the directory as the primary has resolved it, or its own.
    there = Survey.from_wire(answer["survey"])
    found = tuple(answer["nodes"] or defaults)
    given = node is not None or (coordinator.processes > 1 and found != tuple(defaults))
    nodes = Nodes(found, coordinator.process, coordinator.processes, given, coordinator.ids)
    opened.open(answer["directory"], prefix, nodes, there)
    refused = opened.epoch_directory.write_refusal() if coordinator.primary and not options.read_only else None
    if refused is not None:
        logging.warning("%s", refused)
    elif coordinator.primary and not options.read_only and (advice := opened.epoch_directory.store.advice):
        logging.warning("%s", advice)
    return Opened(opened, nodes, there, refused)


def _default_names(coordinator: Coordinator) -> list[str]:
    return [f"process_{id}" for id in coordinator.ids]


def keys_prefix(coordinator: Coordinator, options: ocp.CheckpointManagerOptions) -> str:
    """The prefix of an opening's coordination keys: the processes that open, and a number that all of them count."""
    requested = options.multiprocessing_options
    group = [requested.barrier_sync_key_prefix] if requested.barrier_sync_key_prefix else []
    if requested.primary_host != 0 or requested.active_processes is not None:
        group += map(str, coordinator.ids)
    base = paths.join("epochckpt/open", quote(".".join(group), safe=""))
    return f"{base}/{coordinator.next_opening(base)}"


def _checked_nodes(coordinator: Coordinator, hellos: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the nodes, which differ."""
    nodes = [str(hello["node"]) for hello in hellos]
    firsts: dict[str, int] = {}
    for process, node in enumerate(nodes):
        if (first := firsts.setdefault(node, process)) != process:
            both = f"{coordinator.named([first])} and {coordinator.named([process])}"
            raise errors.InvalidArgumentError(f"{both} both call their node {node!r}; node= must be unique")
    return nodes


def _decide(
    directory: JobDirectory, item_names: Sequence[str], nodes: Sequence[str], told: Sequence[Any]
) -> dict[str, Any]:
    """On the primary: looks at the directory; makes it if it is missing."""
    folders = {paths.folder_name(node) for node in nodes}
    for item in item_names:
        paths.check_item_name(item, folders)
    options = directory.place.options
    epoch_directory = directory.place.epoch_directory()
    store = epoch_directory.store

    def look() -> tuple[Survey, list[int]]:
        directory.check(epoch_directory, told)
        return directory.survey(epoch_directory, told, {}), epoch_directory.moving()

    found, moving = looked_at(store, options, look)
    if not (found.epochs or found.damaged or found.foreign):
        _look_beside(store, epoch_directory.names)
    for text in found.foreign.values():
        logging.error("%s. It is left alone: other epochs can be used, saving under its number is refused", text)
    if moving and not options.read_only:
        what = f"{'checkpoint' if len(moving) == 1 else 'checkpoints'} {', '.join(map(str, moving))}"
        remedy = "which the next write puts back. claim() does that now: call it before you choose what to restore"
        logging.warning("%s: an earlier run was killed while it replaced %s, %s", store.root, what, remedy)
    defaults = _default_names(directory.coordinator)
    named = [] if list(nodes) == defaults else list(nodes)  # every process takes the answer: it is short
    return {"directory": store.address, "opening": paths.new_id(), "nodes": named, "survey": found.to_wire()}


def looked_at(store: Store, options: ocp.CheckpointManagerOptions, look: Callable[[], T]) -> T:
    """What `look` finds in a directory, which is made if it is missing and may be; errors say what is wrong with it."""
    try:
        is_there = store.check_root()
        if not options.read_only and (is_there or options.create):
            store.make_root()
        elif not is_there:
            later = "reload() looks again" if options.read_only else "options.create is False: the first save makes it"
            logging.warning("%s does not exist, so it has no epochs; %s. Check the path", store.root, later)
        return look()
    except (errors.NotACheckpointDirectoryError, errors.AccessError):  # a NotADirectoryError or PermissionError, too
        raise
    except NotADirectoryError as error:
        problem = f"{store.root}: a folder on the way to it is a file ({error})"
        raise errors.NotACheckpointDirectoryError(problem) from error
    except PermissionError as error:
        needs = f"this user (uid {os.getuid()}) needs access to read it, and to write where it is to be created"
        raise errors.AccessError(f"{store.root}: {error}; {needs}") from error


def _look_beside(store: Store, names: StepNames) -> None:
    """Looks why a directory has no epochs: refuses the folder of a single epoch, warns of other names of epochs."""
    try:
        entries = [(entry.name, entry.is_folder) for entry in store.list("")]
    except OSError:  # it is missing, or may be read and not listed
        return
    here = {name for name, _ in entries}
    if step_names.is_single(here):
        above = os.path.dirname(store.root.rstrip("/"))
        what = "the folder of a single epoch"
        if step_names.is_item(store, here):
            above = os.path.dirname(above)
            what = "an item of an epoch"
        raise errors.NotACheckpointDirectoryError(
            f"{store.root} is {what}, or of what a plain Orbax checkpointer saved; expected the directory that holds "
            f"the epochs. Open {above}, if it is that; look at this folder with ec.inspect or "
            "`epochckpt show`; restore a folder of a plain checkpointer with that checkpointer"
        )
    otherwise = step_names.named_otherwise(store, [one for one in entries if names.parse(one[0]) is None])
    if otherwise:
        logging.warning("%s has no epoch under the names that are expected, but %s", store.root, otherwise)
