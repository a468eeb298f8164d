"""What an inspection finds, as plain values: every view (HTML, text, JSON, plots) is made from these rows alone.

Names, paths and messages in rows are as they were found, hostile ones included: views escape them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

COMMITTED, DAMAGED, IN_PROGRESS, ABANDONED = "committed", "damaged", "in progress", "abandoned"


@dataclasses.dataclass(frozen=True)
class NodeRow:
    """One node's part of an epoch, or of an attempt at one.

    Attributes:
        name: the node's name.
        nbytes: bytes of its files, as recorded; of an attempt: as they are now.
        secs: how long it wrote; None: not known.
        state: `committed`, `damaged`, or of an attempt `writing` or `written`.
        detail: what is wrong with it; empty otherwise.
    """

    name: str
    nbytes: int
    secs: float | None = None
    state: str = COMMITTED
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class EpochRow:
    """One epoch, or one attempt at saving one that has not been committed.

    Attributes:
        epoch: its number.
        state: `committed`; `damaged`: it cannot be read, or files are missing or have other sizes than recorded;
            `in progress`: an attempt that something was written to lately; `abandoned`: an attempt that failed or died.
        writer: `epochckpt`, or `orbax`: stock Orbax wrote it.
        detail: why it is damaged, or what is known of the attempt; empty otherwise.
        folder: where it lies, relative to the directory.
        attempt: its attempt's id; empty if not known.
        nodes: the nodes that wrote it; none if stock Orbax did.
        nbytes: bytes of its files.
        started_ns: when the save began, nanoseconds since 1970; None: not known.
        committed_ns: when it was committed; None: it was not, or not known.
        blocked_secs: how long the training thread of the primary was blocked; None: not known.
        age_secs: of an attempt: how long ago something was last written to it.
        metrics: those that it was saved with, and those that were attached later.
        sources: for metrics that were attached later: by whom, by metric.
        custom_metadata: what the caller attached; without the runner's notes.
        notes: what the runner noted (see `JobRunner`); empty without one.
        checked: whether its files were looked at, not only its record.
        latest: whether it is the newest committed epoch.
        best: whether it is the best by the metric that was asked for.
    """

    epoch: int
    state: str
    writer: str = "epochckpt"
    detail: str = ""
    folder: str = ""
    attempt: str = ""
    nodes: tuple[NodeRow, ...] = ()
    nbytes: int = 0
    started_ns: int | None = None
    committed_ns: int | None = None
    blocked_secs: float | None = None
    age_secs: float | None = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    custom_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checked: bool = False
    latest: bool = False
    best: bool = False

    @property
    def secs(self) -> float | None:
        """From the call of `save` to the commit; None: not known."""
        if self.started_ns is None or self.committed_ns is None:
            return None
        return max(self.committed_ns - self.started_ns, 0) / 1e9

    @property
    def slowest_node(self) -> str | None:
        """The node that wrote longest, if there are several and it is known."""
        timed = [n for n in self.nodes if n.secs is not None]
        return max(timed, key=lambda n: n.secs or 0.0).name if len(timed) > 1 else None


@dataclasses.dataclass(frozen=True)
class LeftoverRow:
    """Something in a directory that is no epoch and that no reader looks at.

    Attributes:
        path: relative to the directory.
        kind: `attempt` (a save that failed, died, or is under way), `rolled back` (quarantined by `rollback_to`),
            `quarantined` (a damaged epoch that was replaced), `deleted` (taken out of sight, bytes not yet removed),
            `orbax attempt` (staging of stock Orbax), `foreign` (named like an epoch, and none).
        nbytes: bytes of its files.
        age_secs: how long ago something was last written to it; None: object stores do not tell.
        epochs: the numbers of the epochs in it, as far as its names say.
        detail: what it is, in words.
    """

    path: str
    kind: str
    nbytes: int
    age_secs: float | None
    epochs: tuple[int, ...] = ()
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Overview:
    """A directory of checkpoints.

    Attributes:
        directory: its path or URL.
        epochs: epochs and attempts, ascending by number; if `hidden` is not 0, only the newest of them, and the best.
        hidden: how many older ones are not in `epochs`.
        hidden_nbytes: bytes of those, as far as known.
        remains: what else lies there.
        metric: by which `best` was decided; empty if none was asked for.
        mode: `max` or `min`.
        problems: what could not be looked at, and why, by path.
    """

    directory: str
    epochs: tuple[EpochRow, ...]
    hidden: int = 0
    hidden_nbytes: int = 0
    leftovers: tuple[LeftoverRow, ...] = ()
    metric: str = ""
    mode: str = "max"
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ShardingRow:
    """How an array lies on nodes.

    Attributes:
        counts: into how many parts each dimension is cut.
        owners: for each part (C order) the name of the node that wrote it; empty where that is not known.
        replicas: on how many nodes the parts were held; 0: not known.
        spec: how it lay on devices, in words (`PartitionSpec('data', None) on data=4, model=2`); empty if not known.
    """

    counts: tuple[int, ...]
    owners: tuple[str, ...] = ()
    replicas: int = 0
    spec: str = ""


@dataclasses.dataclass(frozen=True)
class LeafRow:
    """One leaf of an item.

    Attributes:
        name: its key path as text (`params/dense/kernel`), as people write it; see docs/format.md.
        path: its keys, outermost first, as text.
        kind: `jax`, `numpy`, `prng`, `int`, `str`, `none`, … (see `tree`).
        dtype: of an array (`float32`, `bfloat16`, `key<fry>`); empty for other leaves.
        shape: of an array.
        nbytes: of its data; 0 for what lies in the record.
        value: repr of a Python value, shortened; empty for arrays.
        sharding: of an array; None for other leaves.
    """

    name: str
    path: tuple[str, ...]
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    value: str = ""
    sharding: ShardingRow | None = None


@dataclasses.dataclass(frozen=True)
class FileRow:
    """One file that a handler wrote.

    Attributes:
        name: path inside the item's folder.
        node: the node that wrote it; empty if not known.
        nbytes: its size.
    """

    name: str
    node: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ItemRow:
    """One item of an epoch.

    Attributes:
        name: its name.
        kind: `arrays` (a pytree), `files` (what a handler wrote), `node` (a pytree of each node's own).
        handler: class name of the Orbax handler that stands for it.
        nbytes: bytes of its leaves or files; of a `node` item those of all nodes.
        leaves: of `arrays`, in order of the tree.
        files: of `files`.
        nodes: of `node`: the item as each node saved it, by node name.
        custom_metadata: what the caller attached to it.
        problem: why it could not be looked into; empty otherwise.
    """

    name: str
    kind: str
    handler: str = ""
    nbytes: int = 0
    leaves: tuple[LeafRow, ...] = ()
    files: tuple[FileRow, ...] = ()
    nodes: Mapping[str, ItemRow] = dataclasses.field(default_factory=dict)
    custom_metadata: Any = None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class EpochDetail:
    """Everything about one epoch that is known without reading arrays.

    Attributes:
        row: its row in the overview.
        items: its items, by name ascending.
        unsupported: what Orbax cannot read: reasons by leaf, by item; None where no Orbax view was asked for,
            and by the item `*` why there is none where it was.
    """

    row: EpochRow
    items: tuple[ItemRow, ...]
    unsupported: Mapping[str, Mapping[str, str]] | None = None


@dataclasses.dataclass(frozen=True)
class LeafStats:
    """Statistics of one array, over its finite elements where that matters.

    Attributes:
        item: the item's name.
        node: the node, for a leaf of an item of each node's own; empty otherwise.
        leaf: the leaf.
        count: elements.
        nans: how many are NaN.
        infs: how many are infinite.
        zeros: how many are 0.
        min: least finite element; None without one. Complex arrays: of the absolute values, as all that follows.
        max: greatest finite element; None without one.
        mean: of the finite elements; None without one.
        std: their standard deviation; None without one.
        norm: Euclidean norm of the finite elements.
        edges: of the histogram: one more than there are bins; empty without finite elements.
        histogram: finite elements per bin.
    """

    item: str
    node: str
    leaf: LeafRow
    count: int
    nans: int
    infs: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float
    edges: tuple[float, ...] = ()
    histogram: tuple[int, ...] = ()


ADDED, REMOVED, RESHAPED, RETYPED, CHANGED, UNCHANGED = (
    "added",
    "removed",
    "reshaped",
    "retyped",
    "changed",
    "unchanged",
)


@dataclasses.dataclass(frozen=True)
class DiffRow:
    """What became of one leaf between two epochs.

    Attributes:
        item: the item's name.
        node: the node, for a leaf of an item of each node's own; empty otherwise.
        name: the leaf's name; for a file of a handler: its path.
        change: `added`, `removed`, `reshaped`, `retyped` (another dtype or kind), `changed`, `unchanged`.
        before: the leaf in the first epoch; None if added, or not a leaf but a file.
        after: the leaf in the second epoch; None if removed, or not a leaf but a file.
        norm: Euclidean norm of the change; None where it makes no sense. Elements that are not finite in either epoch
            are left out.
        relative: norm, divided by the norm of the leaf before; None where that makes no sense.
        largest: greatest absolute change of an element; None where it makes no sense.
        elements: how many elements changed; None where it makes no sense.
        detail: more in words (values of Python leaves); empty otherwise.
    """

    item: str
    node: str
    name: str
    change: str
    before: LeafRow | None = None
    after: LeafRow | None = None
    norm: float | None = None
    relative: float | None = None
    largest: float | None = None
    elements: int | None = None
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Diff:
    """The difference of two epochs.

    Attributes:
        directory: where the first one lies.
        before: the first epoch.
        after: the second epoch.
        rows: one per leaf, in order of the trees.
        other_directory: where the second one lies, if elsewhere; empty otherwise.
        problems: what could not be compared and is in no row, and why, by `item`, `item:leaf` or `item:node:leaf`.
    """

    directory: str
    before: int
    after: int
    rows: tuple[DiffRow, ...]
    other_directory: str = ""
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)


def flat(metrics: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Metrics by name; those in further mappings as `outer/inner`."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping) and prefix.count("/") < 8:
            found.update(flat(value, f"{prefix}{name}/"))
        else:
            found[f"{prefix}{name}"] = value
    return found
