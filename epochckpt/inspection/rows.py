"""What an inspection finds, as plain values: HTML, text, JSON and plots are made from these rows alone.

Names, paths and messages are as they were found, hostile ones included: views escape them. A field that is None is not
known, or does not apply; an empty text is one that does not apply.
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
        nbytes: bytes of its files: in an epoch as recorded, in an attempt as they are now.
        secs: how long it wrote.
        state: `committed` or `damaged`; in an attempt `writing` or `written`.
        detail: what is wrong with it.
    """

    name: str
    nbytes: int
    secs: float | None = None
    state: str = COMMITTED
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class EpochRow:
    """One epoch, or one attempt at saving an epoch that has not been committed.

    Attributes:
        epoch: its number.
        state: `committed`; `damaged`: it cannot be read, or files are missing or have other sizes than recorded;
            `in progress`: an attempt that something was written to lately; `abandoned`: an attempt that failed or died.
        writer: `epochckpt`, or `orbax` if stock Orbax wrote it.
        detail: why it is damaged, or what is known of the attempt.
        folder: where it lies, relative to the directory.
        attempt: the id of its attempt.
        nodes: the nodes that wrote it; none if stock Orbax did.
        nbytes: bytes of its files.
        started_ns: when the save began, nanoseconds since 1970.
        committed_ns: when it was committed, nanoseconds since 1970.
        blocked_secs: how long the training thread of the primary was blocked.
        age_secs: of an attempt: how long ago something was last written to it.
        metrics: the metrics that it was saved with, and those that were attached later.
        sources: the source that was named when a metric was attached later, by metric.
        custom_metadata: what the caller attached, without the runner's notes.
        notes: what the runner noted (see `JobRunner`).
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
        """From the call of `save` to the commit."""
        if self.started_ns is None or self.committed_ns is None:
            return None
        return max(self.committed_ns - self.started_ns, 0) / 1e9

    @property
    def slowest_node(self) -> str | None:
        """The node that wrote longest, if several nodes did."""
        timed = [n for n in self.nodes if n.secs is not None]
        return max(timed, key=lambda n: n.secs or 0.0).name if len(timed) > 1 else None


@dataclasses.dataclass(frozen=True)
class LeftoverRow:
    """Something in a directory that is not an epoch and that no reader looks at.

    Attributes:
        path: relative to the directory.
        kind: `attempt` (a save that failed, died, or is under way), `rolled back` (quarantined by `rollback_to`),
            `quarantined` (a damaged epoch that was replaced), `deleted` (taken out of sight, bytes not yet removed),
            `orbax attempt` (staging of stock Orbax), `foreign` (named like an epoch, but not one).
        nbytes: bytes of its files.
        age_secs: how long ago something was last written to it; object stores do not tell.
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
        hidden: how many older epochs are not in `epochs`.
        hidden_nbytes: bytes of these, as far as known.
        leftovers: what else lies there.
        metric: the metric by which `best` was decided.
        mode: `max` or `min`.
        problems: why something could not be looked at, by path.
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
        owners: the name of the node that wrote each part, in C order; empty where it is not known.
        replicas: how many nodes held each part; 0 if that is not known.
        spec: how the array lay on devices: `PartitionSpec('data', None) on data=4, model=2`.
    """

    counts: tuple[int, ...]
    owners: tuple[str, ...] = ()
    replicas: int = 0
    spec: str = ""


@dataclasses.dataclass(frozen=True)
class LeafRow:
    """One leaf of an item.

    Attributes:
        name: its key path as people write it: `params/dense/kernel`; see docs/format.md.
        path: its keys, outermost first, as text.
        kind: `jax`, `numpy`, `prng`, `int`, `str`, `none`, … (see `format.tree`).
        dtype: of an array: `float32`, `bfloat16`, `key<fry>`.
        shape: of an array.
        nbytes: bytes of its data; 0 for a value that lies in the record.
        value: repr of a Python value, shortened.
        sharding: of an array.
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
        name: its path inside the item's folder.
        node: the node that wrote it.
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
        kind: `arrays` (a pytree), `files` (of a handler), `node` (a pytree that each node has for itself).
        handler: class name of the Orbax handler for it.
        nbytes: bytes of its leaves or files, those of all nodes together.
        leaves: of `arrays`, in order of the tree.
        files: of `files`.
        nodes: of `node`: the item as each node saved it, by node name.
        custom_metadata: what the caller attached to it.
        problem: why it could not be looked into.
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
        unsupported: why stock Orbax cannot read a leaf, by leaf, by item; an item `*` says why it can read nothing.
            None where no Orbax view was asked for.
    """

    row: EpochRow
    items: tuple[ItemRow, ...]
    unsupported: Mapping[str, Mapping[str, str]] | None = None


@dataclasses.dataclass(frozen=True)
class LeafStats:
    """Statistics of one array; from `min` on they are of its finite elements, of complex ones the absolute values.

    Attributes:
        item: the item's name.
        node: the node, if each node has an item of this name for itself.
        leaf: the leaf.
        count: how many elements the array has.
        nans: how many are NaN.
        infs: how many are infinite.
        zeros: how many are 0.
        min: the least element.
        max: the greatest element.
        mean: their mean.
        std: their standard deviation.
        norm: their Euclidean norm.
        edges: of the histogram's bins, one more than there are bins; none without finite elements.
        histogram: elements per bin.
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


ADDED, REMOVED, RESHAPED = "added", "removed", "reshaped"
RETYPED, CHANGED, UNCHANGED = "retyped", "changed", "unchanged"


@dataclasses.dataclass(frozen=True)
class DiffRow:
    """What became of one leaf between two epochs.

    Attributes:
        item: the item's name.
        node: the node, if each node has an item of this name for itself.
        name: the leaf's name, or the path of a handler's file.
        change: `added`, `removed`, `reshaped`, `retyped` (another dtype or kind), `changed`, `unchanged`.
        before: the leaf in the first epoch; None for a file.
        after: the leaf in the second epoch; None for a file.
        norm: Euclidean norm of the change, without elements that are not finite in either epoch.
        relative: norm, divided by the norm of the leaf before.
        largest: greatest absolute change of an element.
        elements: how many elements changed.
        detail: more in words, such as the values of Python leaves.
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
        directory: where the first epoch lies.
        before: the first epoch.
        after: the second epoch.
        rows: one per leaf, in order of the trees.
        other_directory: where the second epoch lies, if it is another directory.
        problems: why something could not be compared and has no row, by `item`, `item:leaf` or `item:node:leaf`.
    """

    directory: str
    before: int
    after: int
    rows: tuple[DiffRow, ...]
    other_directory: str = ""
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)


def flat(metrics: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Metrics by name; one in an inner mapping is named `outer/inner`."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping) and prefix.count("/") < 8:
            found.update(flat(value, f"{prefix}{name}/"))
        else:
            found[f"{prefix}{name}"] = value
    return found
