"""What the runner notes in each epoch, beside the blobs: how a run goes on from it, and how its blobs are stored."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

NOTES = "job_runner"  # under this name the runner's notes are in an epoch's custom metadata
EPOCH = "epoch"
STEP = "step"

_SHOWN = ("finished", "partial", "beside", "total_secs", "stop", "blobs")
_INTERNAL = ("version", "nodes", "metrics", "forms", "kinds", "types", "unit", "begun")


class Form(enum.Enum):
    """How stock Orbax saves a blob, whose items do not tell. The values are in the notes."""

    JSON = "json"  # a value for each node
    BARE = "bare"  # a tree of one array, which is the blob by itself
    ARRAYS = "arrays"  # the blob's tree


@dataclasses.dataclass(frozen=True)
class RunNotes:
    """The notes of one epoch, as JSON; empty for an epoch that no runner saved.

    Anything may be on storage. A property gives a value of its type; an entry of another type counts as missing.
    Entries of a later epochckpt are kept.
    """

    entries: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, entries: Any) -> "RunNotes":
        """Notes out of custom metadata, where anything may stand."""
        return cls(entries if isinstance(entries, Mapping) else {})

    @classmethod
    def of_run(
        cls,
        *,
        nodes: Sequence[str],
        partial: bool,
        stop_states: Mapping[str, Any],
        total_secs: float,
        went_back_to: int | None,
        unit: str,
        begun: int,
    ) -> "RunNotes":
        """What a run notes in each of its epochs; the properties say what each means."""
        entries: dict[str, Any] = {
            "version": 1,
            "nodes": list(nodes),
            "partial": partial,
            "stop": stop_states,
            "total_secs": total_secs,
        }
        if went_back_to is not None:
            entries["went_back_to"] = went_back_to
        if unit != EPOCH:
            entries |= {"unit": unit, "begun": begun}
        return cls(entries)

    def with_end(self, finished: Sequence[str], metrics: Mapping[str, Any]) -> "RunNotes":
        """With the metrics of the epoch, and why the run has finished with it, if it has."""
        return self._with(finished=list(finished) or None, metrics=metrics)

    def with_blobs(self, names: Mapping[str, str], types: Mapping[str, Any]) -> "RunNotes":
        """With the blobs' names by item, and their containers."""
        return self._with(blobs=names, types=types)

    def with_forms(self, forms: Mapping[str, Form]) -> "RunNotes":
        """With the form of each item, for managers whose items do not tell."""
        return self._with(forms={item: form.value for item, form in forms.items()})

    def as_out_of_band(self) -> "RunNotes":
        """Of an epoch that `save_checkpoints` saves during a run, which has not come to this epoch yet."""
        return self._with(beside=True)

    def _with(self, **entries: Any) -> "RunNotes":
        return RunNotes({**self.entries, **entries})

    def to_json(self) -> dict[str, Any]:
        """The notes as they are stored."""
        return dict(self.entries)

    def __bool__(self) -> bool:
        return bool(self.entries)

    # -- how a run goes on ---------------------------------------------------------------------------------------

    @property
    def is_of_run(self) -> bool:
        """Whether a run made them: `save_checkpoints` without a run notes less."""
        return "version" in self.entries

    @property
    def counted(self) -> str:
        """What the job counted, in the words of the program that saved the epoch."""
        unit = self.entries.get("unit")
        return unit if isinstance(unit, str) else EPOCH

    @property
    def unit(self) -> str:
        """What the job counts: `epoch` or `step`; `epoch` for what a later epochckpt may count."""
        return STEP if self.counted == STEP else EPOCH

    @property
    def begun(self) -> int | None:
        """Of a job that counts steps: how many had been done when the epoch began."""
        begun = self.entries.get("begun")
        return begun if isinstance(begun, int) else None

    @property
    def partial(self) -> bool:
        """Whether the run left the epoch in the middle."""
        return bool(self.entries.get("partial"))

    @property
    def out_of_band(self) -> bool:
        """See `as_out_of_band`: a run goes on from it only if it is named."""
        return bool(self.entries.get("beside"))

    @property
    def went_back_to(self) -> int | None:
        """The epoch that the user has named for the run to go back to."""
        epoch = self.entries.get("went_back_to")
        return epoch if isinstance(epoch, int) else None

    @property
    def finished(self) -> tuple[str, ...]:
        """The stop conditions with which the run has finished; none if it has not."""
        why = self.entries.get("finished")
        if isinstance(why, list | tuple):
            return tuple(map(str, why))
        return (str(why),) if why else ()

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The metrics of the epoch, as its tasks returned them."""
        return self._mapping("metrics")

    @property
    def stop_states(self) -> Any:
        """The states of stop conditions, by their names, as stored; `stop_states.load_states` checks them."""
        return self.entries.get("stop")

    @property
    def total_secs(self) -> float | None:
        """For how many seconds the job had run in all."""
        secs = self.entries.get("total_secs")
        if not isinstance(secs, int | float) or isinstance(secs, bool):
            return None
        try:
            return float(secs) if math.isfinite(secs) else None
        except OverflowError:
            return None

    # -- how its blobs are stored ----------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[str]:
        """The nodes of the job, in their order."""
        nodes = self.entries.get("nodes")
        return [str(node) for node in nodes] if isinstance(nodes, list | tuple) else []

    @property
    def blobs(self) -> Mapping[str, str]:
        """The blob of each item, where its name is another one."""
        return self._mapping("blobs")

    @property
    def forms(self) -> Mapping[str, Form | None]:
        """See `with_forms`; None for a form of a later epochckpt."""
        known = {form.value: form for form in Form}
        return {item: known.get(str(form)) for item, form in self._mapping("forms").items()}

    @property
    def types(self) -> Mapping[str, Any]:
        """The containers of blobs, by blob, and by `node/blob` where nodes differ."""
        return self._mapping("types")

    def others(self) -> dict[str, Any]:
        """Entries that no view shows in words of its own, such as those of a later epochckpt."""
        return {name: value for name, value in self.entries.items() if name not in (*_SHOWN, *_INTERNAL)}

    def _mapping(self, name: str) -> Mapping[str, Any]:
        value = self.entries.get(name)
        return value if isinstance(value, Mapping) else {}


@dataclasses.dataclass(frozen=True)
class NodeNotes:
    """What a manager of `epochckpt.caffe2` notes in the epoch of one node, as its custom metadata."""

    blobs: Mapping[str, str]  # the blob of each item
    types: Mapping[str, Any]  # the containers of blobs, by blob
    notes: Any  # what the manager was told, such as the runner's notes

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> "NodeNotes | None":
        """The notes in custom metadata, and None if another program saved the epoch."""
        blobs = metadata.get("blobs")
        types = metadata.get("types")
        if not isinstance(blobs, Mapping):
            return None
        return cls(blobs=blobs, types=types if isinstance(types, Mapping) else {}, notes=metadata.get("notes"))

    def to_json(self) -> dict[str, Any]:
        """The custom metadata of the epoch."""
        return {"blobs": dict(self.blobs), "types": dict(self.types), "notes": self.notes}

    def rest_of(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The custom metadata without the notes, and without the names of blobs if all items are named like them."""
        rest = {name: value for name, value in metadata.items() if name != "notes"}
        if all(item == blob for item, blob in self.blobs.items()):
            rest.pop("blobs", None)
        return rest
