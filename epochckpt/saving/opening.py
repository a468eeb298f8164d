"""Opening a directory: once, bounded, agreed between the processes."""

from __future__ import annotations

import collections
import dataclasses
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _monitoring, errors
from epochckpt.agreement import Coordinator, coordination
from epochckpt.agreement.collective import Timeouts, collective, hear_secs
from epochckpt.directory import Commits, attached_metrics, commits_of
from epochckpt.directory.protocol import ReplaceCondition
from epochckpt.format import EpochRecord, Nodes, RunEntry, checksums, paths
from epochckpt.format.nodes import check_names
from epochckpt.format.records import RUN_ROWS
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames, events, step_names
from epochckpt.saving import auto_interval, disks, host_record
from epochckpt.saving.auto_interval import SaveCost
from epochckpt.saving.disks import Disk, Together
from epochckpt.saving.host_record import HostRecord
from epochckpt.storage import Store, open_store, patiently
from epochckpt.storage.posix import is_folder

T = TypeVar("T")

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
    # With local disks, by process: what its disk has under these numbers are no parts of the job's epochs.
    aside: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    copies: Mapping[int, str] = dataclasses.field(default_factory=dict)  # ids of the mirror's copies of the remote ones
    diverged: tuple[int, ...] = ()  # epochs that lie here and are no part of the mirror's history

    def to_wire(self) -> dict[str, Any]:
        return {
            "epochs": self.epochs,
            "damaged": [[epoch, found.attempt, found.damage] for epoch, found in self.damaged.items()],
            "foreign": sorted(self.foreign.items()),
            "attached": checksums.pack_by_number(self.attached, "metrics"),
            "remote": list(self.remote),
            "runs": [RUN_ROWS.pack(run) for run in self.runs],
            "costs": [dataclasses.astuple(cost) for cost in self.costs],
            "copies": sorted(self.copies.items()),
            "diverged": list(self.diverged),
            "aside": [[process, list(epochs)] for process, epochs in self.aside.items()],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Survey:
        damaged = {epoch: ReplaceCondition(attempt, damage) for epoch, attempt, damage in wire["damaged"]}
        attached = checksums.unpack_by_number(wire["attached"])
        runs = tuple(RUN_ROWS.parse("a survey", "runs", row) for row in wire["runs"])
        costs = tuple(SaveCost(*row) for row in wire["costs"])
        foreign, aside = dict(map(tuple, wire["foreign"])), {process: tuple(found) for process, found in wire["aside"]}
        return cls(
            epochs=wire["epochs"],
            damaged=damaged,
            foreign=foreign,
            attached=attached,
            remote=tuple(wire["remote"]),
            runs=runs,
            costs=costs,
            aside=aside,
            copies=dict(map(tuple, wire["copies"])),
            diverged=tuple(wire["diverged"]),
        )


class Completing(Protocol):
    """Knows more epochs of a directory than lie there: its mirror."""

    url: str

    def complete(self, local: Commits, survey: Survey, texts: Sequence[str] | None = None) -> Survey:
        """The survey of the directory with the epochs that the mirror has.

        `texts`: with local disks, the records of the mirror that these have.
        """
        ...

    def newest(self, texts: Sequence[str]) -> str:
        """The newest of such records; empty if none can be used."""
        ...

    def text(self) -> str:
        """The record as it is now; empty if there is none."""
        ...

    def adopt(self, text: str) -> None:
        """On other processes than the primary: writes a record of the primary's, unless it has a newer one."""
        ...

    def origin_of(self, epoch: int) -> str | None:
        """The attempt here that the mirror's epoch of a number is a copy of, also if that is not here any more."""
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
    host: HostRecord | None = None  # of a directory on a disk of this process's own


def _commits_at(
    directory: str | os.PathLike[str],
    options: ocp.CheckpointManagerOptions,
    names: StepNames,
    storage: StorageOptions,
) -> Commits:
    mode = options.file_options.path_permission_mode if options.file_options else None
    store = open_store(directory, folder_mode=mode, settings=storage.store, direct_io=storage.direct_io)
    return commits_of(store, names)


@_monitoring.timed(events.LOOKED)
def survey(
    commits: Commits,
    options: ocp.CheckpointManagerOptions,
    known: Mapping[int, ReplaceCondition] | None = None,
    mirror: Completing | None = None,
) -> Survey:
    """Looks at a directory; a `known` damaged epoch is still damaged, as long as the same attempt is there.

    The `mirror` of the directory adds the epochs that it has.

    Where storage does not give the newest epoch, nothing is decided: that is an error. An epoch that only a newer
    epochckpt can read is listed unseen, and the next older one is looked at.
    """
    commits.forget_records()
    epochs, others = commits.scan()
    foreign = {epoch: commits.obstacle(name) for epoch, name in others.items()}
    there = {epoch: found for epoch, found in (known or {}).items() if epoch in epochs}
    damaged = {epoch: found for epoch, found in there.items() if _is_still(commits, epoch, found)}
    epochs, looks, runs = [e for e in epochs if e not in damaged], 0, ()
    unknown: list[int] = []
    while epochs:
        epoch = epochs[-1]
        try:
            found = _look_at(commits, epoch)
        except errors.EpochNotFoundError:  # deleted just now: others may be gone, too, and newer ones committed
            looks += 1
            listed = epochs[:-1] if looks > _LOOKS else [e for e in commits.list_epochs() if e not in damaged]
            epochs = [e for e in listed if e not in unknown]
            continue
        except errors.FormatVersionError as error:
            logging.error("%s: checkpoint %d cannot be read here: %s", commits.store.root, epoch, error)
            unknown.append(epochs.pop())
            continue
        if not isinstance(found, ReplaceCondition):
            runs = found.runs
            break
        where = commits.store.root
        logging.error("%s: checkpoint %d is damaged and will not be used: %s", where, epoch, found.damage)
        damaged[epoch] = found
        epochs.pop()
    epochs = sorted({*epochs, *unknown})
    needed = attached_metrics.are_needed(options)
    readable = [epoch for epoch in epochs if epoch not in unknown]
    metrics = attached_metrics.of_epochs(commits, readable, partial(_attempt, commits)) if needed else {}
    costs = auto_interval.recent(epochs, commits.read_brief) if auto_interval.is_asked(options) else ()
    found = Survey(epochs, damaged, foreign, metrics, runs=runs, costs=tuple(costs))
    return found if mirror is None else mirror.complete(commits, found)


def _attempt(commits: Commits, epoch: int) -> str | None:
    """The attempt of an epoch; None if its record does not say, or not to this epochckpt."""
    with suppress(errors.FormatVersionError):
        return commits.read_attempt(epoch)
    return None


def _is_still(commits: Commits, epoch: int, damaged: ReplaceCondition) -> bool:
    """Whether an epoch is the one that was found damaged."""
    with suppress(errors.FormatVersionError):  # another one, which is not known to be damaged
        return commits.read_attempt(epoch) == damaged.attempt
    return False


def _runs(commits: Commits, epochs: Sequence[int]) -> tuple[RunEntry, ...]:
    """The runs of a directory until the newest epoch that this epochckpt can read."""
    for epoch in reversed(epochs):
        with suppress(errors.FormatVersionError):
            return commits.read_head(epoch).runs
    return ()


def survey_of_disks(
    commits: Commits,
    told: Sequence[Mapping[str, Any]],
    options: ocp.CheckpointManagerOptions,
    known: Mapping[int, ReplaceCondition],
    mirror: Completing,
    coordinator: Coordinator,
) -> Survey:
    """The same for directories on disks of the processes' own, on the primary: what all have `told` (see `disks`).

    An epoch that is not whole on all of them is listed if the mirror has it: each process then reads what its disk has
    of it, and the rest from the mirror.
    """
    found = Together.of([*map(Disk.from_wire, told)], coordinator.named)
    found.check_apart(coordinator.named, commits.store.root)
    foreign = {epoch: text for disk in reversed(found.disks) for epoch, text in disk.foreign.items()}
    there = {epoch: condition for epoch, condition in known.items() if epoch in found.whole}
    damaged = {e: condition for e, condition in there.items() if condition.attempt in (None, found.whole[e])}
    epochs = [epoch for epoch in found.whole if epoch not in damaged]
    needed = attached_metrics.are_needed(options)
    metrics = attached_metrics.of_epochs(commits, epochs, found.whole.get) if needed else {}
    runs = _runs(commits, epochs)
    costs = tuple(auto_interval.recent(epochs, commits.read_brief)) if auto_interval.is_asked(options) else ()
    local, texts = Survey(epochs, damaged, foreign, metrics, (), runs, costs), [each.mirror for each in found.disks]
    survey = mirror.complete(commits, local, texts)
    damaged, remote, aside = dict(survey.damaged), set(survey.remote), dict[int, list[int]]()
    for epoch in sorted({epoch for disk in found.disks for epoch in disk.parts} - found.whole.keys()):
        others = found.not_of(epoch, mirror.origin_of(epoch) if epoch in remote else None)
        for process in others:
            aside.setdefault(process, []).append(epoch)
        if epoch in remote:
            if any(epoch in disk.parts for number, disk in enumerate(found.disks) if number not in others):
                remote.discard(epoch)
        elif epoch in found.unfinished:
            logging.warning("checkpoint %d was never finished, or is deleted in part: %s", epoch, found.faults[epoch])
        elif epoch in found.faults:
            logging.error("checkpoint %d is not whole, and the mirror does not have it: %s", epoch, found.faults[epoch])
            damaged[epoch] = ReplaceCondition(None, found.faults[epoch])
    for epoch in survey.diverged:
        for process, disk in enumerate(found.disks):
            if epoch in disk.parts:
                aside.setdefault(process, []).append(epoch)
    away = {process: tuple(epochs) for process, epochs in aside.items()}
    return dataclasses.replace(survey, damaged=damaged, remote=tuple(sorted(remote)), aside=away)


def _look_at(commits: Commits, epoch: int) -> ReplaceCondition | EpochRecord:
    """The damage of an epoch, as far as its records and the sizes of its files tell; its record if it has none.

    Raises EpochNotFoundError, or FormatVersionError for one that only a newer epochckpt can read.
    """
    while True:  # one that is replaced meanwhile is looked at again
        attempt = None
        try:
            record = commits.read_record(epoch)
            attempt = record.attempt
            if commits.store.renames:  # elsewhere a request for each file; a restore finds it, and falls back, too
                commits.check_shallow(record)
            return record
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

    With `read_only`, or where `create` is False, a directory that is missing has no epochs, and is not made.

    Raises NotACheckpointDirectoryError (a file), AccessError (no permission to read or create it), FormatVersionError
    (a record of the directory itself needs a newer epochckpt), InvalidArgumentError (unusable or repeated names of
    nodes or items) or CoordinationTimeoutError, which names the process that did not come to open it.
    """
    base = _base(coordinator, options)  # first of all: every process counts alike
    names = StepNames.of(options)  # refuses what cannot be used before another process hears of this one
    defaults = _default_names(coordinator)
    own = check_names(defaults[coordinator.process] if node is None else node)
    if coordinator.processes > 1 and not (node is None or isinstance(node, str)):
        raise errors.InvalidArgumentError(
            f"node={list(own)}: one process may host several nodes only in a job of one process, here are "
            f"{coordinator.processes}; pass the one name of this process's node"
        )
    local = mirror if storage.local_disks and not options.read_only else None
    host: HostRecord | None = None

    def hello() -> dict[str, Any]:
        nonlocal host
        if local is None:
            return {"node": own[0]}
        here = _commits_at(directory, options, names, storage)
        if not here.store.renames:
            raise errors.UnsupportedError(f"local_disks: {here.store.root} is on no disk; leave it out")
        url = local.url
        host = _looked_at(here.store, options, lambda: host_record.introduce(here, own[0], url))
        disk = disks.look(here.store, names, host, coordinator.process, coordinator.processes)
        return {"node": own[0], "disk": disk.to_wire()}

    # The primary looks at the directory, once it knows every node's name, and the other processes take its answer. With
    # local disks every process tells what is on its own disk.
    def decide(hellos: list[Any]) -> dict[str, Any]:
        nodes = _checked_nodes(coordinator, hellos)
        return _decide(directory, options, storage, names, item_names, mirror, coordinator, nodes, hellos)

    if coordinator.processes == 1:
        prefix = ""
        answer = _decide(directory, options, storage, names, item_names, mirror, coordinator, own, [hello()])
    else:
        wait = storage.open_timeout_secs
        late = "{names} did not construct its CheckpointManager within {secs:g} s"
        patience = Timeouts(collect_secs=wait, hear_secs=hear_secs(wait), late_text=late)
        answer = collective(coordinator, base, hello, decide, patience)
        prefix = f"{base}/{answer['opening']}"
        coordination.forget_opening(coordinator, f"{base}/told", f"{base}/decision")
    # Each process opens the directory as the primary has resolved it.
    where, found = answer["directory"] if host is None else directory, tuple(answer["nodes"] or defaults)
    commits, there = _commits_at(where, options, names, storage), Survey.from_wire(answer["survey"])
    commits.ignored = frozenset((*there.aside.get(coordinator.process, ()), *there.diverged))
    given = node is not None or (coordinator.processes > 1 and found != tuple(defaults))
    nodes = Nodes(found, coordinator.process, coordinator.processes, given, coordinator.ids)
    refused = commits.write_refusal() if coordinator.primary and not options.read_only else None
    if refused is not None:
        logging.warning("%s", refused)
    return Opened(coordinator, commits.store, commits, prefix, nodes, there, refused, host)


def _default_names(coordinator: Coordinator) -> list[str]:
    return [f"process_{id}" for id in coordinator.ids]


def _base(coordinator: Coordinator, options: ocp.CheckpointManagerOptions) -> str:
    """The prefix of an opening's coordination keys: the processes that open, and a number that all of them count."""
    asked = options.multiprocessing_options
    group = [asked.barrier_sync_key_prefix] if asked.barrier_sync_key_prefix else []
    if asked.primary_host != 0 or asked.active_processes is not None:
        group += map(str, coordinator.ids)
    base = paths.join("epochckpt/open", quote(".".join(group), safe=""))
    _opens[base] += coordinator.processes > 1
    return f"{base}/{_opens[base]}"


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
    directory: str | os.PathLike[str],
    options: ocp.CheckpointManagerOptions,
    storage: StorageOptions,
    names: StepNames,
    item_names: Sequence[str],
    mirror: Completing | None,
    coordinator: Coordinator,
    nodes: Sequence[str],
    hellos: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """On the primary: looks at the directory; makes it if it is missing."""
    folders = {paths.folder_name(node) for node in nodes}
    for item in item_names:
        paths.check_item_name(item, folders)
    commits = _commits_at(directory, options, names, storage)
    store, told = commits.store, [hello["disk"] for hello in hellos if "disk" in hello]
    if 0 < len(told) < len(hellos) or (told and mirror is None):
        raise errors.InvalidArgumentError(f"{store.root}: StorageOptions.local_disks differs between the processes")

    def look() -> tuple[Survey, list[int]]:
        if not (told and mirror):
            _check_whole(store, options)
            return survey(commits, options, mirror=mirror), commits.moving()
        return survey_of_disks(commits, told, options, {}, mirror, coordinator), commits.moving()

    found, moving = _looked_at(store, options, look)
    if not (found.epochs or found.damaged or found.foreign):
        _look_beside(store, commits.names)
    for text in found.foreign.values():
        logging.error("%s. It is left alone: other epochs can be used, saving under its number is refused", text)
    if moving and not options.read_only:
        what = f"{'checkpoint' if len(moving) == 1 else 'checkpoints'} {', '.join(map(str, moving))}"
        remedy = "which the next write puts back. claim() does that now: call it before you choose what to restore"
        logging.warning("%s: an earlier run was killed while it replaced %s, %s", store.root, what, remedy)
    named = [] if nodes == _default_names(coordinator) else list(nodes)  # every process takes the answer: it is short
    return {"directory": store.address, "opening": paths.new_id(), "nodes": named, "survey": found.to_wire()}


def _looked_at(store: Store, options: ocp.CheckpointManagerOptions, look: Callable[[], T]) -> T:
    """What `look` finds in a directory, which is made if it is missing and may be; errors say what is wrong with it."""
    try:
        is_there = _check_directory(store)
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


def _check_whole(store: Store, options: ocp.CheckpointManagerOptions) -> None:
    """Refuses to write to a directory that has the parts of one host; `read_only` may look at them."""
    if store.renames and not options.read_only and (record := host_record.read_host_record(store)) is not None:
        raise errors.InvalidArgumentError(
            f"{store.root} is on a disk of one host (of node {record.node}), and has only that host's parts of epochs. "
            f"Open it with StorageOptions(local_disks=True, mirror=…), or all epochs in its mirror, {record.mirror}. "
            "options.read_only=True looks at what is here"
        )


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


def _check_directory(store: Store) -> bool:
    """Whether a directory is there; raises NotACheckpointDirectoryError if something else is."""
    if not store.renames:
        return True
    try:
        found = patiently(store.root, lambda: os.lstat(store.root))
    except FileNotFoundError:
        return False
    if not is_folder(store.root):
        kind = "a broken link" if stat.S_ISLNK(found.st_mode) and not os.path.exists(store.root) else "a file"
        raise errors.NotACheckpointDirectoryError(f"{store.root} is {kind}; expected a directory for checkpoints")
    return True
