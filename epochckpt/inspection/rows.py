"""The findings of an inspection as plain values: HTML, text, JSON and plots are made from these rows alone.

Names, paths and messages are as they were found, hostile ones included: views escape them. None in a field means
that it is not known or does not apply; an empty text, that it does not apply. Times (`_ns`) are nanoseconds since 1970.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from epochckpt._metrics import flat, numbers
from epochckpt.format.tree import EMPTY_KINDS

if TYPE_CHECKING:
    from epochckpt.format import EpochRecord

COMMITTED = "committed"
NEWER = "newer"  # committed, and only a newer epochckpt can read it
DAMAGED = "damaged"  # it cannot be read, or files are missing or have other sizes than recorded
IN_PROGRESS = "in progress"  # an attempt that something was written to lately
ABANDONED = "abandoned"  # an attempt that failed or died
ELSEWHERE = "elsewhere"  # of a node: its files are on the disk of another host
LOCAL, MIRROR, BOTH = "local", "mirror", "both"  # tiers


@dataclasses.dataclass(frozen=True)
class NodeRow:
    """One node's part of an epoch, or of an attempt at one."""

    name: str
    nbytes: int | None  # of its files: in an epoch as recorded, in an attempt as they are now
    secs: float | None = None  # how long the node wrote
    state: str = COMMITTED  # or `damaged`, `elsewhere`; in an attempt `writing` or `written`
    detail: str = ""  # what is damaged


_FACT = "of_record"  # the key of a field's metadata


def _fact(default: Any, of_record: Callable[[EpochRecord], Any]) -> Any:
    """A field that a record tells; `default` where none was read."""
    return dataclasses.field(default=default, metadata={_FACT: of_record})


@dataclasses.dataclass(frozen=True)
class EpochRow:
    """One epoch, or one attempt at saving an epoch that has not been committed.

    A field that the epoch's record tells says how, see `facts_of`. `epoch_rows` finds out the others: from the files,
    where they are looked at, and in a bucket, where no record is read, from the head. To show a field, add a column
    to `epoch_table.EpochTable.columns`, for `ls` and notebooks; JSON has every field.
    """

    epoch: int
    state: str  # COMMITTED, DAMAGED, NEWER, IN_PROGRESS or ABANDONED
    writer: str = "epochckpt"  # or `orbax`
    detail: str = ""  # why the epoch cannot be read, or what is known of the attempt
    folder: str = ""  # relative to the directory
    save_id: str = _fact("", lambda record: record.save_id)  # its id
    nodes: tuple[NodeRow, ...] = ()  # none in a step of stock Orbax; of more than 16 as `notes`
    nbytes: int = _fact(0, lambda record: record.nbytes)
    started_ns: int | None = _fact(None, lambda record: record.started_ns)
    committed_ns: int | None = _fact(None, lambda record: record.committed_ns)
    # How long the save blocked the training thread of the primary.
    blocked_secs: float | None = _fact(None, lambda record: record.timings.get("blocked_secs"))
    age_secs: float | None = None  # of an attempt: time since the last write to it
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # saved with the epoch, and attached later
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of metrics attached later, by metric
    # Without the runner's notes, and these (see `JobRunner`); None in an object store if the record was not read.
    custom_metadata: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
    notes: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
    checked: bool = False  # whether the files were looked at, not only the record
    latest: bool = False
    best: bool = False  # by the metric that was asked for
    tier: str = ""  # of a directory with a mirror, where it is: LOCAL, MIRROR or BOTH; empty if that is not known
    unit: str = "epoch"  # the counting unit of the job that saved it, or `step`

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


def facts_of(record: EpochRecord) -> dict[str, Any]:
    """The fields of `EpochRow` that a record tells."""
    fields = dataclasses.fields(EpochRow)
    return {field.name: field.metadata[_FACT](record) for field in fields if _FACT in field.metadata}


ATTEMPT = "attempt"  # a save that failed, died, or is under way
ROLLED_BACK = "rolled back"  # quarantined by `rollback_to`
QUARANTINED = "quarantined"  # a damaged epoch that was replaced
DELETED = "deleted"  # moved out of sight; its bytes are not yet removed
ORBAX_ATTEMPT = "orbax attempt"  # staging of stock Orbax
FOREIGN = "foreign"  # named like an epoch, but not one
OTHER = "other"  # records of the directory, and what nothing here made


@dataclasses.dataclass(frozen=True)
class LeftoverRow:
    """Something in a directory that is not an epoch and that no reader looks at."""

    path: str  # relative to the directory
    kind: str  # ATTEMPT, ROLLED_BACK, QUARANTINED, DELETED, ORBAX_ATTEMPT or FOREIGN
    nbytes: int
    age_secs: float | None  # since the last write to it
    epochs: tuple[int, ...] = ()  # the epochs in it, as far as its names say
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Overview:
    """A directory of checkpoints."""

    directory: str  # path or URL
    epochs: tuple[EpochRow, ...]  # epochs and attempts, ascending
    hidden: int = 0  # older epochs that are not in `epochs`
    hidden_nbytes: int = 0  # of these, as far as known
    leftovers: tuple[LeftoverRow, ...] = ()
    metric: str = ""  # by which `best` was decided
    mode: str = "max"  # or `min`
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what could not be looked at, by path
    mirror: str = ""  # its path or URL, if the directory has one
    mirror_seen: bool = False  # whether it was looked at; else `tier` is what the directory knows of it
    host: str = ""  # the node that wrote there last, if the directory is on a disk of one host and has its part alone
    asked: tuple[str, ...] = ()  # the metrics that a view shows, in this order; empty: all
    # The finite values of each metric by epoch, ascending: of all committed epochs, also those not in `epochs`, and of
    # those that were deleted.
    history: Mapping[str, tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=dict)
    deleted: tuple[MetricsRow, ...] = ()  # epochs whose metrics are all that is left, ascending
    better: int | None = None  # the best of these by `metric`, if it was better than all that are there
    unit: str = "epoch"  # what numbers are called: `epoch` or `step`


@dataclasses.dataclass(frozen=True)
class MetricsRow:
    """The metrics of one epoch of a run."""

    epoch: int
    committed_ns: int | None
    metrics: Mapping[str, Any]  # of an epoch that was deleted: the numbers among them, by `outer/inner` names
    deleted: bool = False


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """The metrics of all epochs of a run."""

    directory: str  # path or URL
    rows: tuple[MetricsRow, ...]  # ascending
    asked: tuple[str, ...] = ()  # the metrics that a view shows, in this order; empty: all
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what could not be looked at, by path
    unit: str = "epoch"  # as in `Overview`

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics, by `outer/inner` names: those that were asked for, or all."""
        known = dict.fromkeys(name for row in self.rows for name in flat(row.metrics))
        return tuple(name for name in self.asked if name in known) or tuple(known)


@dataclasses.dataclass(frozen=True)
class DirectoryRow:
    """One run among several: a checkpoint directory."""

    name: str  # its path below the folder of all
    # `training`, `saving`, `finished`, `closed` (by its run, which did not say why), `ended` (its process has, without
    # closing it), `stale` (no epoch for long), `empty`; DAMAGED if the newest epoch is
    state: str
    detail: str = ""  # why
    epochs: int = 0
    nbytes: int = 0
    latest: int | None = None
    committed_ns: int | None = None  # of the latest
    best: int | None = None
    best_value: float | None = None
    better: int | None = None  # an epoch that was better than that, and was deleted
    unit: str = "epoch"  # as in `Overview`
    history: Mapping[str, tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=dict)  # as in `Overview`
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the latest, NaN and infinity too
    damaged: tuple[int, ...] = ()  # of the newest epochs, those that are damaged
    trained_secs: float | None = None  # all runs of the job, as the runner noted
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by `outer/inner` names, see `configs`


@dataclasses.dataclass(frozen=True)
class RunsOverview:
    """A folder of runs."""

    directory: str  # path or URL
    runs: tuple[DirectoryRow, ...]  # by name, or as was asked for
    metric: str = ""  # whose curves a view shows
    mode: str = "max"  # or `min`
    ranked: bool = False  # whether `best` is by this metric, or it was not asked for
    sort: str = ""  # the column by which runs are ordered
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what could not be looked at, by name

    @property
    def differing(self) -> tuple[str, ...]:
        """The values of configs that differ between the runs that have them, by name."""
        names = dict.fromkeys(name for row in self.runs for name in row.config)
        found = {name: {repr(row.config[name]) for row in self.runs if name in row.config} for name in names}
        return tuple(name for name, values in found.items() if len(values) > 1)


@dataclasses.dataclass(frozen=True)
class UsageRow:
    """What one thing takes up on storage: an epoch, an attempt at one, or something else."""

    kind: str  # COMMITTED, IN_PROGRESS, ABANDONED, a kind of leftovers, or OTHER
    path: str  # relative to the directory
    nbytes: int  # of its files, each counted once in all rows
    files: int  # symlinks too
    epochs: tuple[int, ...] = ()
    oldest_ns: int | None = None  # when the oldest of its files was written
    newest_ns: int | None = None


@dataclasses.dataclass(frozen=True)
class KindUsage:
    """What all things of a kind take up."""

    kind: str
    things: int
    nbytes: int
    files: int
    oldest_ns: int | None
    newest_ns: int | None


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a directory takes up on storage, with all that lies in it."""

    directory: str  # path or URL
    rows: tuple[UsageRow, ...]  # by kind, epochs ascending
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what could not be looked at, by path
    host: str = ""  # as in `Overview`
    unit: str = "epoch"  # as in `Overview`

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(row.nbytes for row in self.rows)

    @property
    def files(self) -> int:
        """Files in all."""
        return sum(row.files for row in self.rows)

    @property
    def kinds(self) -> tuple[KindUsage, ...]:
        """The same by kind."""
        found = []
        for kind in dict.fromkeys(row.kind for row in self.rows):
            some = [row for row in self.rows if row.kind == kind]
            oldest = min((row.oldest_ns for row in some if row.oldest_ns is not None), default=None)
            newest = max((row.newest_ns for row in some if row.newest_ns is not None), default=None)
            usage = KindUsage(
                kind=kind,
                things=len(some),
                nbytes=sum(row.nbytes for row in some),
                files=sum(row.files for row in some),
                oldest_ns=oldest,
                newest_ns=newest,
            )
            found.append(usage)
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class RunGoodput:
    """What one run has spent its time on, from the opening of its manager until the next run, as the primary saw it."""

    incarnation: str
    began_ns: int
    alive_ns: int  # when it committed its newest epoch: it was alive then
    epoch: int  # that epoch; 0 without any
    saves: int  # committed
    killed: bool | None  # whether it ended without closing the directory; None: it goes on, or nobody has seen its end
    trained_secs: float  # until its newest save began
    blocked_secs: float  # training was held by saves
    restoring_secs: float
    waiting_secs: float  # for saves to end
    lost_secs: float  # trained after its newest save began, and lost with a kill: at least so much
    unknown_secs: float  # from its newest commit until the next run: more that was lost, or no run at all

    @property
    def secs(self) -> float:
        """All of it."""
        return sum(getattr(self, name) for name in SPENT)

    @property
    def goodput(self) -> float:
        """The part of the time that went into training that was kept; 0 without any time."""
        return self.trained_secs / self.secs if self.secs else 0.0


SPENT = ("trained_secs", "blocked_secs", "restoring_secs", "waiting_secs", "lost_secs", "unknown_secs")


@dataclasses.dataclass(frozen=True)
class Goodput:
    """What the runs of a directory have spent their time on."""

    directory: str  # path or URL
    runs: tuple[RunGoodput, ...]  # oldest first; those that began to save; the newest hundred are recorded
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what could not be looked at, by path
    unit: str = "epoch"  # as in `Overview`

    @property
    def kills(self) -> int:
        """How many runs ended without closing the directory."""
        return sum(1 for run in self.runs if run.killed)

    @property
    def total(self) -> RunGoodput | None:
        """All runs together, with the newest epoch; None if there are none."""
        if not self.runs:
            return None
        sums = {name: sum(getattr(run, name) for run in self.runs) for name in SPENT}
        saves = sum(run.saves for run in self.runs)
        return dataclasses.replace(self.runs[-1], began_ns=self.runs[0].began_ns, saves=saves, **sums)


@dataclasses.dataclass(frozen=True)
class ShardingRow:
    """How an array lies on nodes."""

    counts: tuple[int, ...]  # into how many parts each dimension is cut
    owners: tuple[str, ...] = ()  # the node that wrote each part, in C order; empty if unknown
    replicas: int = 0  # how many nodes held each part; 0 if unknown
    spec: str = ""  # on devices: `P(None, 'data')`, or its only device, `cpu:0`
    mesh: str = ""  # of devices, that the spec is about: `data=4, model=2`
    devices: tuple[tuple[int, ...], ...] = ()  # ids of those that had each part, in C order; empty if unknown or many
    holders: tuple[tuple[str, ...], ...] = ()  # the nodes that held each part; empty if unknown or many


@dataclasses.dataclass(frozen=True)
class LeafRow:
    """One leaf of an item."""

    name: str  # its key path as people write it: `params/dense/kernel`; see docs/format.md
    path: tuple[str, ...]  # its keys, outermost first
    kind: str  # `jax`, `numpy`, `prng`, `int`, `str`, `none`, … (see `format.tree`)
    dtype: str = ""  # of an array: `float32`, `bfloat16`, `key<fry>`
    shape: tuple[int, ...] = ()
    nbytes: int = 0  # 0 for a value that lies in the record
    value: str = ""  # repr of a Python value, shortened
    sharding: ShardingRow | None = None  # of an array


@dataclasses.dataclass(frozen=True)
class FileRow:
    """One file that a handler wrote."""

    name: str  # path inside the item's folder
    node: str  # the node that wrote it
    nbytes: int
    content: Any = None  # of a small file that is JSON, parsed


@dataclasses.dataclass(frozen=True)
class ItemRow:
    """One item of an epoch."""

    name: str
    kind: str  # `arrays` (a pytree), `files` (of a handler), `node` (a pytree that each node has for itself)
    handler: str = ""  # class name of its Orbax handler
    leaves: tuple[LeafRow, ...] = ()  # of `arrays`, in order of the tree
    files: tuple[FileRow, ...] = ()  # of `files`
    nodes: Mapping[str, ItemRow] = dataclasses.field(default_factory=dict)  # of `node`: what each node saved
    custom_metadata: Any = None
    problem: str = ""  # why it could not be looked into

    @property
    def nbytes(self) -> int:
        """Bytes of its leaves or files, on all nodes together."""
        return sum(part.nbytes for part in [*self.leaves, *self.files, *self.nodes.values()])


@dataclasses.dataclass(frozen=True)
class EpochDetail:
    """Everything about one epoch that is known without reading arrays."""

    row: EpochRow
    items: tuple[ItemRow, ...]  # by name
    # Why stock Orbax cannot read a leaf, by item and leaf; item `*` says why it can read nothing. None: no Orbax view.
    unsupported: Mapping[str, Mapping[str, str]] | None = None


@dataclasses.dataclass(frozen=True)
class LeafStats:
    """Statistics of one array; from `min` on they are of its finite elements, of complex ones the absolute values."""

    item: str
    node: str  # empty unless each node has an item of this name for itself
    leaf: LeafRow
    count: int
    nans: int
    infs: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float  # Euclidean
    edges: tuple[float, ...] = ()  # of the histogram's bins, one more than there are bins
    histogram: tuple[int, ...] = ()  # elements per bin


@dataclasses.dataclass(frozen=True)
class ArrayLook:
    """One array: its statistics, and a picture of it."""

    stats: LeafStats
    # The means of parts of it, all of about one size, as a matrix: its last axis from left to right, the others from
    # top to bottom. NaN where a part has elements that are not finite.
    means: tuple[tuple[float, ...], ...]


def without_empty(leaves: Iterable[LeafRow]) -> list[LeafRow]:
    """Without containers that hold nothing, such as the states of optax that have no fields."""
    return [leaf for leaf in leaves if leaf.kind == "none" or leaf.kind not in EMPTY_KINDS]


ADDED, REMOVED, RESHAPED = "added", "removed", "reshaped"
RETYPED = "retyped"  # another dtype or kind
CHANGED, UNCHANGED = "changed", "unchanged"


@dataclasses.dataclass(frozen=True)
class DiffRow:
    """The change of one leaf, or of one file of a handler, between two epochs."""

    item: str
    node: str  # empty unless each node has an item of this name for itself
    name: str  # the leaf's name, or the file's path
    change: str  # ADDED, REMOVED, RESHAPED, RETYPED, CHANGED or UNCHANGED
    before: LeafRow | None = None  # None for a file, as `after`
    after: LeafRow | None = None
    norm: float | None = None  # Euclidean norm of the change, of elements that are finite in both epochs
    relative: float | None = None  # `norm`, divided by the norm of the leaf before
    largest: float | None = None  # greatest absolute change of an element
    elements: int | None = None  # how many elements changed
    detail: str = ""  # more in words, such as the values of Python leaves


@dataclasses.dataclass(frozen=True)
class Diff:
    """The difference of two epochs."""

    directory: str
    before: int
    after: int
    rows: tuple[DiffRow, ...]  # in order of the trees; of each item, leaves that were removed come last
    other_directory: str = ""  # of the second epoch, if different
    metrics: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)  # of both, by name, that differ
    # Why something was not compared and has no row, by `item`, `item:leaf` or `item:node:leaf`.
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unit: str = "epoch"  # as in `Overview`


def history(metrics: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, tuple[tuple[int, float], ...]]:
    """The finite values of each metric, of (epoch, metrics) ascending."""
    found: dict[str, list[tuple[int, float]]] = {}
    for epoch, some in metrics:
        for name, value in numbers(some).items():
            if math.isfinite(value):
                found.setdefault(name, []).append((epoch, value))
    return {name: tuple(values) for name, values in found.items()}
