"""Opening a directory: once, bounded, agreed between the processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt import attached, checksum, hosting, layout, parsing, records, retention
from epochckpt.commit import Commits, StepNames
from epochckpt.commit_put import PutCommits
from epochckpt.commit_rename import RenameCommits
from epochckpt.coordination import Coordinator, Deadline
from epochckpt.errors import (
    AccessError,
    CoordinationError,
    CoordinationTimeoutError,
    DamagedError,
    EpochCheckpointError,
    EpochNotFoundError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
    NotACheckpointDirectoryError,
)
from epochckpt.hosting import Nodes
from epochckpt.options import StorageOptions
from epochckpt.storage import open_store
from epochckpt.store import Store

_opens = itertools.count()  # managers are constructed in the same order on every process


@dataclasses.dataclass(frozen=True)
class Opened:
    """An open directory.

    Attributes:
        coordinator: the other processes.
        store: the directory.
        commits: its epochs.
        prefix: where this incarnation's coordination keys live.
        nodes: of the job.
        history: committed epochs that can be restored as far as a look at their files tells.
        damaged: newer ones that cannot.
        attached: metrics that were attached to epochs, by epoch, if the options need them.
    """

    coordinator: Coordinator
    store: Store
    commits: Commits
    prefix: str
    nodes: Nodes
    history: list[int]
    damaged: list[int]
    attached: dict[int, Any]


def step_names(options: ocp.CheckpointManagerOptions) -> StepNames:
    """The names of epochs' folders that the options ask for."""
    if options.step_name_format is not None:
        return StepNames(options.step_name_format)
    length = options.step_format_fixed_length
    return StepNames(
        ocp.path.step.standard_name_format(step_prefix=options.step_prefix, step_format_fixed_length=length)
    )


def folder_mode(options: ocp.CheckpointManagerOptions) -> int | None:
    """Permission bits that the options ask for."""
    return options.file_options.path_permission_mode if options.file_options else None


def commits_of(store: Store, names: StepNames) -> Commits:
    """How attempts become epochs on this store."""
    return RenameCommits(store, names) if store.renames else PutCommits(store, names)


def survey(commits: Commits, options: ocp.CheckpointManagerOptions) -> tuple[list[int], list[int], list[Any]]:
    """The committed epochs, and the newest ones that turn out to be damaged at a look (nothing large is read).

    The third is what is attached to the epochs if the options need it, for `attached_from_wire`.

    Raises:
        FormatVersionError: the newest epoch was written by a newer epochckpt.
    """
    epochs, damaged = commits.list_epochs(), []
    while epochs:
        try:
            _look_at(commits, epochs[-1])
            break
        except FormatVersionError:
            raise
        except (DamagedError, FormatError, EpochNotFoundError) as error:
            logging.error("%s: epoch %d is damaged and will not be used: %s", commits.store.root, epochs[-1], error)
            damaged.append(epochs.pop())
    found: dict[int, Any] = {}
    if retention.reads_metrics(options):
        found = attached.of_epochs(commits, epochs, commits.read_attempt)
    return epochs, damaged, checksum.pack_by_number(found, "metrics")


def attached_from_wire(wire: list[Any]) -> dict[int, Any]:
    """Attached metrics by epoch, as the primary found them."""
    return checksum.unpack_by_number(wire)


def _look_at(commits: Commits, epoch: int) -> None:
    """Raises what `read_record` and `check_shallow` raise; an epoch that is replaced meanwhile is looked at again."""
    while True:
        record = commits.read_record(epoch)
        try:
            commits.check_shallow(record)
            return
        except DamagedError:
            if commits.read_attempt(epoch) in (record.attempt, None):
                raise


def open_directory(
    directory: str | os.PathLike[str],
    options: ocp.CheckpointManagerOptions,
    storage: StorageOptions,
    node: str | Sequence[str] | None,
    coordinator: Coordinator,
    item_names: Sequence[str] = (),
) -> Opened:
    """Opens a directory for a manager.

    Raises:
        NotACheckpointDirectoryError: it is a file, or missing and not to be created.
        AccessError: no permission.
        FormatError: it holds something under an epoch's name that is not ours.
        FormatVersionError: it was written by a newer epochckpt.
        InvalidArgumentError: node names that are unusable, or not unique, or several in a job of several processes;
            items named like a node.
        CoordinationTimeoutError: a process did not come to open it; says which.
    """
    number = next(_opens) if coordinator.processes > 1 else 0  # first of all: every process counts alike
    own = hosting.check_names(_default_name(coordinator.process) if node is None else node)
    if coordinator.processes > 1 and not (node is None or isinstance(node, str)):
        raise InvalidArgumentError(
            f"node={list(own)}: one process may host several nodes only in a job of one process, here are "
            f"{coordinator.processes}; pass the one name of this process's node"
        )
    names = step_names(options)
    if coordinator.processes == 1:
        answer = _decide(directory, options, names, own, item_names)
        prefix = ""
    else:
        base = f"epochckpt/open/{number}"
        if not coordinator.primary:
            try:
                coordinator.put(f"{base}/hello/{coordinator.process}", {"node": own[0]})
            except CoordinationError as error:
                raise CoordinationError(
                    f"process {coordinator.process} could not say hello ({error}). A process that was relaunched into "
                    "a running job cannot join its managers: restart the whole job"
                ) from error
        wait = storage.open_timeout_secs

        def decide() -> dict[str, Any]:
            nodes = _gather_nodes(coordinator, f"{base}/hello", own[0], wait)
            return _decide(directory, options, names, nodes, item_names)

        # the others wait longer: the primary may come late, and then waits for the latest
        answer = coordinator.agree(f"{base}/answer", decide, wait if coordinator.primary else 2 * wait + 60)
        prefix = f"{base}/{answer['incarnation']}"
    store = open_store(answer["directory"], folder_mode=folder_mode(options))
    commits = commits_of(store, names)
    commits.join_incarnation(answer["incarnation"])
    found = tuple(answer["nodes"])
    given = node is not None or (
        coordinator.processes > 1 and found != tuple(map(_default_name, range(coordinator.processes)))
    )
    nodes = Nodes(found, coordinator.process, coordinator.processes, given)
    told = attached_from_wire(answer["attached"])
    return Opened(coordinator, commits.store, commits, prefix, nodes, answer["history"], answer["damaged"], told)


def _default_name(process: int) -> str:
    return f"process_{process}"


def _gather_nodes(coordinator: Coordinator, prefix: str, name: str, wait: float) -> list[str]:
    others = set(range(1, coordinator.processes))
    found, missing = coordinator.gather(prefix, others, Deadline(wait))
    if missing:
        late = ", ".join(f"process {p}" for p in sorted(missing))
        raise CoordinationTimeoutError(f"{late} did not construct its CheckpointManager within {wait:g} s")
    nodes = [name] + [str(found[p]["node"]) for p in sorted(others)]
    first: dict[str, int] = {}
    for p, n in enumerate(nodes):
        q = first.setdefault(n, p)
        if p != q:
            raise InvalidArgumentError(f"processes {q} and {p} both call their node {n!r}; node= must be unique")
    return nodes


def _decide(
    directory: str | os.PathLike[str],
    options: ocp.CheckpointManagerOptions,
    names: StepNames,
    nodes: Sequence[str],
    item_names: Sequence[str],
) -> dict[str, Any]:
    """On the primary: looks at the directory, and only then writes to it."""
    for item in item_names:
        layout.check_item_name(item, tuple(nodes))
    store = open_store(directory, folder_mode=folder_mode(options))
    commits = commits_of(store, names)
    try:
        _check_directory(store, options.create and not options.read_only)
        foreign = commits.foreign()
        if foreign:
            refusal = _refusal(commits, foreign)
            if not options.read_only:
                raise refusal
            logging.error("%s; ignored, as nothing is written here", refusal)
        history, damaged, found = survey(commits, options)
        if not options.read_only:
            store.make_root()
            commits.claim()
            history = [e for e in commits.list_epochs() if e not in damaged]
    except NotACheckpointDirectoryError:
        raise
    except NotADirectoryError as error:
        raise NotACheckpointDirectoryError(f"{store.root}: a folder on the way to it is a file ({error})") from error
    except PermissionError as error:
        raise AccessError(
            f"{store.root}: {error}; this user (uid {os.getuid()}) needs read and write access"
        ) from error
    return {
        "directory": store.root,
        "incarnation": commits.incarnation,
        "nodes": list(nodes),
        "history": history,
        "damaged": damaged,
        "attached": found,
    }


def _refusal(commits: Commits, foreign: Sequence[str]) -> FormatError:
    """The error for folders that are named like an epoch and are none."""
    for name in foreign:
        alone = _nodes_alone(commits.store, name)
        if alone:
            return FormatError(
                f"{commits.store.root}/{name}",
                f"holds no {layout.EPOCH_RECORD} for the epoch as a whole, but epochs of single nodes, of jobs that "
                f"know nothing of each other ({', '.join(alone[:5])}). Read them with "
                "ec.caffe2.CheckpointManager(directory, node, 'epochckpt'), and choose another directory for this",
            )
    shown, lost = ", ".join(foreign[:5]), [name for name in foreign if commits.lost_records(name)]
    if lost:
        return FormatError(
            f"{commits.store.root}/{lost[0]}",
            f"is an epoch of epochckpt that lost its records: it holds no {layout.EPOCH_RECORD} (foreign: {shown}). "
            "Without them nothing of it can be verified, so it is not read as a step of stock Orbax either. Put a "
            "whole copy in its place, or move the folder away",
        )
    return FormatError(
        f"{commits.store.root}/{foreign[0]}",
        f"is named like an epoch but holds no {layout.EPOCH_RECORD} (foreign: {shown}), and it is no step of stock "
        "Orbax on a file system either, as far as its files say. Choose another directory, or move these folders away",
    )


def _nodes_alone(store: Store, folder: str) -> list[str]:
    """The nodes whose epochs, each by itself, lie in a foreign folder; see `node_epochs`."""
    try:
        inner = [entry.name for entry in store.list(folder) if entry.is_folder]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [name for name in inner if _is_alone(store, layout.join(folder, name, layout.EPOCH_RECORD))]


def _is_alone(store: Store, path: str) -> bool:
    try:
        return parsing.parse_epoch(path, store.read(path, limit_bytes=records.MAX_RECORD_BYTES)).alone
    except (EpochCheckpointError, ValueError, OSError):  # nothing, or another's: a sweep has <seed>/<step>/epoch.json
        return False


def _check_directory(store: Store, create: bool) -> None:
    if not store.renames:
        return
    with contextlib.suppress(FileNotFoundError):  # `exists` calls a directory missing that this user may not reach
        os.lstat(store.root)
    if os.path.lexists(store.root) and not os.path.isdir(store.root):
        kind = "a broken link" if os.path.islink(store.root) and not os.path.exists(store.root) else "a file"
        raise NotACheckpointDirectoryError(f"{store.root} is {kind}; expected a directory for checkpoints")
    if not os.path.exists(store.root) and not create:
        raise NotACheckpointDirectoryError(f"{store.root} does not exist, and options.create is False; check the path")
