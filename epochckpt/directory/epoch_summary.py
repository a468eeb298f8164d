"""What lists, policies and the next commit know of an epoch, without its whole record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from epochckpt.format import EpochRecord, checksums, codec, paths
from epochckpt.format.codec import stored

_MAX_METRICS_BYTES = 8192  # of one epoch in the head: larger ones are in its record only
_MAX_NODES = 16  # of an epoch in the head: what more nodes took is in its record only


def _read_attached(fields: codec.Fields, key: str) -> dict[str, dict[str, Any]]:
    found = codec.Fields(fields.path, fields.mapping(key), f"{fields.where}{key}.")
    return {
        paths.check_recorded_name(fields.path, source): codec.user_data(found, source, dict) for source in found.data
    }


def _write_attached(attached: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {source: checksums.pack_json(dict(metrics), "metrics") for source, metrics in attached.items()}


_ATTACHED: codec.Codec[Mapping[str, Mapping[str, Any]]] = codec.Codec(_read_attached, _write_attached)


@dataclasses.dataclass(frozen=True)
class EpochSummary:
    """One committed epoch, as far as lists, policies and the next commit need it; the head has one of each epoch."""

    save_id: str = stored("attempt", codec.name(limit=80))
    started_ns: int = stored("started_ns", codec.INTEGER)
    committed_ns: int = stored("committed_ns", codec.INTEGER)
    nbytes: int = stored("nbytes", codec.INTEGER)
    nodes: int = stored("nodes", codec.INTEGER)
    secs: float = stored("secs", codec.NUMBER)  # the whole save
    blocked_secs: float = stored("blocked_secs", codec.NUMBER)
    # It was saved with; None also where they are `large`.
    metrics: Any = stored("metrics", codec.user(object, "metrics"))
    large: bool = stored("large", codec.BOOLEAN, default=False)  # its metrics are in the record only
    # Metrics by source.
    attached: Mapping[str, Mapping[str, Any]] = stored("attached", _ATTACHED, default_factory=dict)
    # That each wrote; only in the head, and not if they are many. The head has the names of nodes once for many epochs.
    node_secs: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])

    # Of a step of stock Orbax: why files of it could not be read just now, by path. Not recorded.
    unread: Mapping[str, Exception] = dataclasses.field(default_factory=dict[str, Exception], compare=False)

    @property
    def stock(self) -> bool:
        """Whether stock Orbax wrote it."""
        return paths.save_id_in(self.save_id) is None

    @classmethod
    def of(cls, record: EpochRecord) -> Self:
        """The summary of a commit record, with all metrics."""
        return cls(
            save_id=record.save_id,
            started_ns=record.started_ns,
            committed_ns=record.committed_ns,
            nbytes=record.nbytes,
            nodes=len(record.nodes),
            secs=round(record.timings.get("secs", 0.0), 6),
            blocked_secs=round(record.timings.get("blocked_secs", 0.0), 6),
            metrics=record.metrics,
            unread=record.unread,
        )

    @classmethod
    def unrecorded(cls, *, metrics: Any, time_ns: int, save_id: str = "") -> Self:
        """What is known of an epoch without its record: the metrics that its save was given, and a time."""
        return cls(
            save_id=save_id,
            started_ns=time_ns,
            committed_ns=time_ns,
            nbytes=0,
            nodes=0,
            secs=0.0,
            blocked_secs=0.0,
            metrics=metrics,
        )

    @classmethod
    def for_head(cls, record: EpochRecord) -> Self:
        """The summary as the head has it: without large metrics, and with the seconds of nodes unless they are many."""
        packed = checksums.seal({"metrics": checksums.pack_json(record.metrics, "metrics")})
        large = len(packed) > _MAX_METRICS_BYTES
        nodes = record.nodes if len(record.nodes) <= _MAX_NODES else ()
        return dataclasses.replace(
            cls.of(record),
            metrics=None if large else record.metrics,
            large=large,
            node_secs={node.name: round(node.secs, 6) for node in nodes},
            unread={},
        )

    def with_attached(self, source: str, metrics: Mapping[str, Any]) -> Self:
        """The entry with the metrics of a source, in place of its older ones."""
        return dataclasses.replace(self, attached={**self.attached, source: metrics})

    def to_json(self, nodes: list[list[str]]) -> dict[str, Any]:
        """Its form in the head, which has the names of its nodes in `nodes`, once for many epochs."""
        names = list(self.node_secs)
        if names not in nodes:
            nodes.append(names)
        return {**codec.pack(self), "node_secs": [nodes.index(names), *self.node_secs.values()]}

    @classmethod
    def from_json(cls, path: str, where: str, data: object, nodes: Sequence[Sequence[str]]) -> Self:
        """Parses that form; raises FormatError."""
        fields = codec.Fields(path, data, f"{where}.")
        number, *secs = fields.array("node_secs") or [-1]
        if type(number) is not int or not 0 <= number < len(nodes) or len(secs) != len(nodes[number]):
            raise fields.fail("node_secs", "seconds of nodes that the head names")
        if not all(type(s) in (int, float) and abs(s) < 1e300 for s in secs):
            raise fields.fail("node_secs", "finite numbers")
        return codec.parse(cls, fields, node_secs=dict(zip(nodes[number], secs, strict=True)))
