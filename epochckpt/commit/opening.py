"""Opening a directory: once, bounded, agreed between the processes."""

from __future__ import annotations

import collections
import dataclasses
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _monitoring, errors
from epochckpt._threads import Deadline
from epochckpt.commit import attached_metrics, auto_interval, coordination
from epochckpt.commit.auto_interval import SaveCost
from epochckpt.commit.conditional_put import PutCommits
from epochckpt.commit.coordination import Coordinator
from epochckpt.commit.protocol import Commits, ReplaceCondition
from epochckpt.commit.rename import RenameCommits
from epochckpt.format import EpochRecord, Nodes, RunEntry, checksums, paths
from epochckpt.format.nodes import check_names
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames, events, step_names
from epochckpt.storage import Store, open_store, patiently
from epochckpt.storage.posix import is_folder

_LOOKS = 16  # at a directory whose newest epoch is deleted again and again
_opens: collections.Counter[str] = collections.Counter()  # managers by group of processes, which count alike


@dataclasses.dataclass(frozen=True)
class Survey:
    """The findings of a look at a directory; nothing large is read."""

    epochs: list[int]  # committed, ascending, without the damaged ones
    damaged: dict[int, ReplaceCondition]  # as far as known before, or as the files of the newest epochs tell
    foreign: dict[int, str]  # folders that are named like an epoch and are none, described, by number
    attached: dict[int, Any]  # metrics that were attached to epochs, by epoch, if the options need them
    remote: tuple[int, ...] = ()  # those of the epochs that only the mirror has
    runs: tuple[RunEntry, ...] = ()  # as the newest epoch has them
    costs: tuple[SaveCost, ...] = ()  # of the newest epochs, if the options need them

    def to_wire(self) -> dict[str, Any]:
        return {
            "epochs": self.epochs,
            "damaged": [[epoch, found.attempt, found.damage] for epoch, found in self.damaged.items()],
            "foreign": sorted(self.foreign.items()),
            "attached": checksums.pack_by_number(self.attached, "metrics"),
            "remote": list(self.remote),
            "runs": [dataclasses.astuple(run) for run in self.runs],
            "costs": [dataclasses.astuple(cost) for cost in self.costs],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Survey:
        damaged = {epoch: ReplaceCondition(attempt, damage) for epoch, attempt, damage in wire["damaged"]}
        attached = checksums.unpack_by_number(wire["attached"])
        runs, costs = tuple(RunEntry(*row) for row in wire["runs"]), tuple(SaveCost(*row) for row in wire["costs"])
        return cls(
            wire["epochs"], damaged, dict(map(tuple, wire["foreign"])), attached, tuple(wire["remote"]), runs, costs
        )


class Completing(Protocol):
    """Knows more epochs of a directory than lie there: its mirror."""

    def complete(self, local: Commits, survey: Survey) -> Survey:
        """The survey of the directory with the epochs that the mirror has."""
        ...


@dataclasses.dataclass(frozen=True)
class Opened:
    """An open directory."""

    coordinator: Coordinator
    store: Store
    commits: Commits
    prefix: str  # of this manager's coordination keys, and of no other manager's of the job
    nodes: Nodes
    survey: Survey
    refused: errors.AccessError | None  # on the primary: why this user may not write there, if that can be seen


def commits_of(store: Store, names: StepNames) -> Commits:
    """How attempts become epochs on this store."""
    return RenameCommits(store, names) if store.renames else PutCommits(store, names)


def _commits_at(
    directory: str | os.PathLike[str],
    options: ocp.CheckpointManagerOptions,
    names: StepNames,
    storage: StorageOptions,
) -> Commits:
    mode = options.file_options.path_permission_mode if options.file_options else None
    return commits_of(open_store(directory, folder_mode=mode, settings=storage.store), names)


@_monitoring.timed(events.LOOKED)
def survey(
    commits: Commits,
    options: ocp.CheckpointManagerOptions,
    known: Mapping[int, ReplaceCondition] | None = None,
    mirror: Completing | None = None,
) -> Survey:
    """Looks at a directory; a `known` damaged epoch is still damaged, as long as the same attempt is there.

    The `mirror` of the directory adds the epochs that it has.

    Where a newer epochckpt wrote the newest epoch, or storage does not give it, nothing is decided: that is an error.
    """
    commits.forget_records()
    epochs, others = commits.scan()
    foreign = {epoch: commits.obstacle(name) for epoch, name in others.items()}
    there = {epoch: found for epoch, found in (known or {}).items() if epoch in epochs}
    damaged = {epoch: found for epoch, found in there.items() if commits.read_attempt(epoch) == found.attempt}
    epochs, looks, runs = [e for e in epochs if e not in damaged], 0, ()
    while epochs:
        epoch = epochs[-1]
        try:
            found = _look_at(commits, epoch)
        except errors.EpochNotFoundError:  # deleted just now: others may be gone, too, and newer ones committed
            looks += 1
            epochs = epochs[:-1] if looks > _LOOKS else [e for e in commits.list_epochs() if e not in damaged]
            continue
        if not isinstance(found, ReplaceCondition):
            runs = found.runs
            break
        where = commits.store.root
        logging.error("%s: epoch %d is damaged and will not be used: %s", where, epoch, found.damage)
        damaged[epoch] = found
        epochs.pop()
    needed = attached_metrics.are_needed(options)
    metrics = attached_metrics.of_epochs(commits, epochs, commits.read_attempt) if needed else {}
    costs = auto_interval.recent(epochs, commits.read_brief) if auto_interval.is_asked(options) else ()
    found = Survey(epochs, damaged, foreign, metrics, runs=runs, costs=tuple(costs))
    return found if mirror is None else mirror.complete(commits, found)


def _look_at(commits: Commits, epoch: int) -> ReplaceCondition | EpochRecord:
    """The damage of an epoch, as far as its records and the sizes of its files tell; its record if it has none."""
    while True:  # one that is replaced meanwhile is looked at again
        attempt = None
        try:
            record = commits.read_record(epoch)
            attempt = record.attempt
            if commits.store.renames:  # elsewhere a request for each file; a restore finds it, and falls back, too
                commits.check_shallow(record)
            return record
        except errors.FormatVersionError:
            raise
        except (errors.DamagedError, errors.FormatError) as error:
            if attempt is None or commits.read_head(epoch).attempt == attempt:
                return ReplaceCondition(attempt, errors.say(error))


def open_directory(
    directory: str | os.PathLike[str],
    options: ocp.CheckpointManagerOptions,
    storage: StorageOptions,
    node: str | Sequence[str] | None,
    coordinator: Coordinator,
    item_names: Sequence[str] = (),
    mirror: Completing | None = None,
) -> Opened:
    """Opens a directory for a manager: looks at it, and writes nothing but the directory itself where it is missing.

    Raises NotACheckpointDirectoryError (a file, or missing and not to be created), AccessError (no permission to read
    or create it), FormatVersionError (written by a newer epochckpt), InvalidArgumentError (unusable or repeated names
    of nodes or items) or CoordinationTimeoutError, which names the process that did not come to open it.
    """
    base = _base(coordinator, options)  # first of all: every process counts alike
    names = StepNames.of(options)  # refuses what cannot be used before another process hears of this one
    defaults = [f"process_{id}" for id in coordinator.ids]
    own = check_names(defaults[coordinator.process] if node is None else node)
    if coordinator.processes > 1 and not (node is None or isinstance(node, str)):
        raise errors.InvalidArgumentError(
            f"node={list(own)}: one process may host several nodes only in a job of one process, here are "
            f"{coordinator.processes}; pass the one name of this process's node"
        )
    if storage.local_disks and coordinator.processes > 1:
        raise errors.UnsupportedError("local_disks: several processes with a disk each are not supported yet")
    # The primary looks at the directory, once it knows every node's name. The other processes take its answer.
    prefix = ""
    if coordinator.processes == 1:
        answer = _decide(directory, options, storage, names, own, item_names, mirror)
    else:
        if not coordinator.primary:
            try:
                coordinator.put(f"{base}/hello/{coordinator.process}", {"node": own[0]})
            except errors.CoordinationError as error:
                problem = f"{coordinator.named([coordinator.process])} could not say hello ({error})"
                remedy = "A process that was relaunched into a running job cannot join: restart the whole job"
                raise errors.CoordinationError(f"{problem}. {remedy}") from error
        wait = storage.open_timeout_secs

        def decide() -> dict[str, Any]:
            nodes = _gather_nodes(coordinator, f"{base}/hello", own[0], wait)
            return _decide(directory, options, storage, names, nodes, item_names, mirror)

        # The other processes wait longer: the primary may come late, and then waits for the latest of them.
        answer = coordinator.agree(f"{base}/answer", decide, wait if coordinator.primary else 2 * wait + 60)
        prefix = f"{base}/{answer['opening']}"
        coordination.forget_opening(coordinator, f"{base}/hello", f"{base}/answer")
    # Each process opens the directory as the primary has resolved it.
    commits, found = _commits_at(answer["directory"], options, names, storage), tuple(answer["nodes"])
    given = node is not None or (coordinator.processes > 1 and found != tuple(defaults))
    nodes = Nodes(found, coordinator.process, coordinator.processes, given, coordinator.ids)
    refused = commits.write_refusal() if coordinator.primary and not options.read_only else None
    if refused is not None:
        logging.warning("%s", refused)
    return Opened(coordinator, commits.store, commits, prefix, nodes, Survey.from_wire(answer["survey"]), refused)


def _base(coordinator: Coordinator, options: ocp.CheckpointManagerOptions) -> str:
    """The prefix of an opening's coordination keys: the processes that open, and a number that all of them count."""
    asked = options.multiprocessing_options
    group = [asked.barrier_sync_key_prefix] if asked.barrier_sync_key_prefix else []
    if asked.primary_host != 0 or asked.active_processes is not None:
        group += map(str, coordinator.ids)
    base = paths.join("epochckpt/open", quote(".".join(group), safe=""))
    _opens[base] += coordinator.processes > 1
    return f"{base}/{_opens[base]}"


def _gather_nodes(coordinator: Coordinator, prefix: str, name: str, wait: float) -> list[str]:
    others = set(range(1, coordinator.processes))
    found, missing = coordinator.gather(prefix, others, Deadline(wait))
    if missing:
        late = coordinator.named(missing)
        raise errors.CoordinationTimeoutError(f"{late} did not construct its CheckpointManager within {wait:g} s")
    nodes = [name] + [str(found[process]["node"]) for process in sorted(others)]
    for process, node in enumerate(nodes):
        first = nodes.index(node)
        if first != process:
            both = f"{coordinator.named([first])} and {coordinator.named([process])}"
            raise errors.InvalidArgumentError(f"{both} both call their node {node!r}; node= must be unique")
    return nodes


def _decide(
    directory: str | os.PathLike[str],
    options: ocp.CheckpointManagerOptions,
    storage: StorageOptions,
    names: StepNames,
    nodes: Sequence[str],
    item_names: Sequence[str],
    mirror: Completing | None,
) -> dict[str, Any]:
    """On the primary: looks at the directory; makes it if it is missing."""
    folders = {paths.folder_name(node) for node in nodes}
    for item in item_names:
        paths.check_item_name(item, folders)
    commits = _commits_at(directory, options, names, storage)
    store = commits.store
    try:
        _check_directory(store, options.create and not options.read_only)
        if not options.read_only:
            store.make_root()
        found, moving = survey(commits, options, mirror=mirror), commits.moving()
    except (errors.NotACheckpointDirectoryError, errors.AccessError):  # a NotADirectoryError or PermissionError, too
        raise
    except NotADirectoryError as error:
        problem = f"{store.root}: a folder on the way to it is a file ({error})"
        raise errors.NotACheckpointDirectoryError(problem) from error
    except PermissionError as error:
        needs = f"this user (uid {os.getuid()}) needs access to read it, and to write where it is to be created"
        raise errors.AccessError(f"{store.root}: {error}; {needs}") from error
    if not (found.epochs or found.damaged or found.foreign):
        _look_beside(store, commits.names)
    for text in found.foreign.values():
        logging.error("%s. It is left alone: other epochs can be used, saving under its number is refused", text)
    if moving and not options.read_only:
        what = f"{'epoch' if len(moving) == 1 else 'epochs'} {', '.join(map(str, moving))}"
        remedy = "which the next write puts back. claim() does that now: call it before you choose what to restore"
        logging.warning("%s: an earlier run was killed while it replaced %s, %s", store.root, what, remedy)
    return {"directory": store.address, "opening": paths.new_id(), "nodes": list(nodes), "survey": found.to_wire()}


def _look_beside(store: Store, names: StepNames) -> None:
    """Looks why a directory has no epochs: refuses the folder of a single epoch, warns of other names of epochs."""
    try:
        entries = [(entry.name, entry.is_folder) for entry in store.list("")]
    except OSError:  # it is missing, or may be read and not listed
        return
    here = {name for name, _ in entries}
    if step_names.is_single(here):
        above, what = os.path.dirname(store.root.rstrip("/")), "the folder of a single epoch"
        if step_names.is_item(store, here):
            above, what = os.path.dirname(above), "an item of an epoch"
        raise errors.NotACheckpointDirectoryError(
            f"{store.root} is {what}, or of what a plain Orbax checkpointer saved; expected the directory that holds "
            f"the epochs. Open {above}, if it is that; look at this folder with ec.inspect or "
            "`epochckpt show`; restore a folder of a plain checkpointer with that checkpointer"
        )
    otherwise = step_names.named_otherwise(store, [one for one in entries if names.parse(one[0]) is None])
    if otherwise:
        logging.warning("%s has no epoch under the names that are expected, but %s", store.root, otherwise)


def _check_directory(store: Store, create: bool) -> None:
    if not store.renames:
        return
    try:
        found = patiently(store.root, lambda: os.lstat(store.root))
    except FileNotFoundError:
        if create:
            return
        raise errors.NotACheckpointDirectoryError(
            f"{store.root} does not exist, and options.create is False; check the path (in Orbax's words: No steps "
            f"found in {store.root})"
        ) from None
    if not is_folder(store.root):
        kind = "a broken link" if stat.S_ISLNK(found.st_mode) and not os.path.exists(store.root) else "a file"
        raise errors.NotACheckpointDirectoryError(f"{store.root} is {kind}; expected a directory for checkpoints")
