"""The runner on stock `orbax.checkpoint.CheckpointManager`.

A blob that holds arrays is an item of `StandardSave`; any other is one of `JsonSave`, with a value for each node. What
Orbax cannot do raises an UnsupportedError that names it: rollback, several nodes in one process.
"""

import base64
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _threads
from epochckpt.errors import InvalidArgumentError, UnsupportedError, say
from epochckpt.format import paths
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs import containers
from epochckpt.jobs.backends.base import BARE, BYTES, ItemBackend, Names, Prepared, ReadEpoch
from epochckpt.jobs.notes import Form, RunNotes
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.session import Session
from epochckpt.manager import SaveResult

_FORMS = {
    Form.JSON: "a value without arrays",
    Form.BARE: "an array",
    Form.ARRAYS: "a tree with arrays",
}
"""The forms of blobs, for people."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ToSave:
    """A blob of this process, as stock Orbax is to save it."""

    form: Form
    value: Any  # of the form JSON: this node's value; else what `StandardSave` takes


class OrbaxBackend(ItemBackend[_ToSave]):
    """Stock Orbax's manager."""

    asks_jax: ClassVar[bool] = True
    taken_names = ("default",)  # Orbax's name for the item of an epoch of one item

    def __init__(self, manager: ocp.CheckpointManager):
        super().__init__(manager)
        self._requested: tuple[int, float, float] | None = None  # the save in flight: epoch, began, blocked seconds
        self._replace: set[int] = set()

    def nodes(self, wanted: Sequence[str], session: Session) -> Sequence[str]:
        processes = session.coordinator.processes
        if processes == 1:
            _refuse_several(wanted)
        return wanted or [f"process_{i}" for i in range(processes)]

    def open(self, session: Session, calls: RunCalls, out_of_band: bool = False) -> None:
        """See CheckpointBackend. UnsupportedError: there are more nodes here than those that are to be checkpointed."""
        _refuse_several(session.hosted)
        super().open(session, calls, out_of_band)

    # -- restoring -----------------------------------------------------------------------------------------------

    def _roll_back(self, epoch: int) -> None:
        raise UnsupportedError(
            f"{self.directory}: going back to checkpoint {epoch} sets those up to {self.epochs()[-1]} aside, which "
            "stock Orbax cannot do; use epochckpt.CheckpointManager, or delete the later steps"
        )

    def _read_newest(self, epochs: Sequence[int]) -> ReadEpoch:
        """See ItemBackend. Orbax does not verify: the newest is the newest that it lists."""
        return self._read(epochs[-1])

    def _read(self, epoch: int, only: Mapping[str, set[str]] | None = None) -> ReadEpoch:
        if only is None and (self._manager.directory / str(epoch) / paths.EPOCH_RECORD).exists():
            raise UnsupportedError(
                f"{self.directory}: checkpoint {epoch} was written by epochckpt.CheckpointManager; resume it with "
                "that. Stock Orbax reads its arrays, but not what differs per node"
            )
        notes = self.notes(epoch)
        blobs = self._blobs_of(self._item_names(epoch), notes, only)
        forms = notes.forms
        ((node, workspace),) = self._spaces().items()
        if renamed := [blob for blob in blobs.values() if blob_lib.rename_of(workspace, blob) is not None]:
            problem = f"ws.target({renamed[0]!r}, rename=…) needs an epochckpt.CheckpointManager"
            raise UnsupportedError(f"{self.directory}: {problem}, which reads epochs of stock Orbax, too")
        requested = {
            item: ocp.args.JsonRestore()
            if forms.get(item) is Form.JSON
            else self._argument(blob_lib.target_of(workspace, blob), forms.get(item))
            for item, blob in blobs.items()
        }
        nodes = self._session.nodes
        saved_by = notes.nodes or self._session.nodes
        try:
            got = self._manager.restore(epoch, args=ocp.args.Composite(**requested)) if requested else {}
        except Exception as error:  # Orbax raises many types where it has no devices for an array
            arrays = [blob for item, blob in blobs.items() if forms.get(item) is not Form.JSON]
            bare = [blob for blob in arrays if blob_lib.target_of(workspace, blob) is None]
            if not bare or len(saved_by) == len(nodes):
                raise
            problem = f"{len(saved_by)} nodes saved checkpoint {epoch}, and here are {len(nodes)}: stock Orbax restores"
            raise InvalidArgumentError(
                f"{self.directory}: {problem} no arrays then without a target, such as those of {', '.join(bare)}; "
                f"{blob_lib.how_to_place(bare[0])}. Orbax says: {say(error)}"
            ) from error
        values = {
            blob: self._as_saved(blob, {node: got[item]}, forms.get(item), nodes, notes) for item, blob in blobs.items()
        }
        return ReadEpoch(epoch=epoch, notes=notes, values=values)

    def _item_names(self, epoch: int) -> Sequence[str]:
        if forms := self.notes(epoch).forms:
            return list(forms)
        metadata: Any = self._manager.metadata(epoch).item_metadata
        items = list(metadata.keys()) if hasattr(metadata, "keys") else []
        if not items:
            raise UnsupportedError(
                f"{self.directory}: checkpoint {epoch} is one item without a name, to which stock Orbax adds no "
                "others; use epochckpt.CheckpointManager, which reads it as blob 'default'"
            )
        return items

    # -- saving --------------------------------------------------------------------------------------------------

    def agree_on_names(self, names: Names) -> None:
        """See CheckpointBackend. InvalidArgumentError, too: Orbax cannot save what a blob is on each of the nodes."""
        super().agree_on_names(names)
        self._agree_on_forms("the forms of the blobs", lambda: self._forms_of(self._states(names)), {})

    def _forms_of(self, states: Mapping[tuple[str, str], Any]) -> dict[str, Form]:
        """The form of each item of this process. What a node lacks is saved as None."""
        (node,) = self._spaces()
        return {item: _form_of(states.get((node, blob))) for blob, item in self._items.items()}

    def prepare(self, epoch: int, names: Names) -> Prepared[_ToSave]:
        (node,) = self._spaces()
        states = self._states(names)
        forms = self._forms_of(states)
        items: dict[str, _ToSave] = {}
        for blob, item in self._items.items():
            value = states.get((node, blob))
            if forms[item] is Form.JSON:
                value = _encode(node, blob, value)
            elif forms[item] is Form.BARE:
                value = {BARE: value}
            items[item] = _ToSave(form=forms[item], value=value)
        return self._prepared(items, states)

    def save(
        self,
        epoch: int,
        prepared: Prepared[_ToSave],
        metrics: Mapping[str, Any],
        notes: RunNotes,
        force: bool,
    ) -> bool:
        """See CheckpointBackend. Orbax's policies refuse what is older than the newest: so they are not asked.

        Raises:
            InvalidArgumentError: Orbax cannot save what a blob is on each of the nodes.
        """
        if not force and not any(e > epoch for e in self.epochs()) and not self._manager.should_save(epoch):
            return False
        self._settle()
        items = prepared.items
        forms = {item: one.form for item, one in items.items()}
        mine = {item: one.value for item, one in items.items() if one.form is Form.JSON}
        by_node = self._agree_on_forms(f"blobs of checkpoint {epoch}", lambda: forms, mine)
        args: dict[str, ocp.args.CheckpointArgs] = {}
        for item, one in items.items():
            values = by_node.get(item)
            args[item] = ocp.args.StandardSave(one.value) if values is None else ocp.args.JsonSave(values)
        notes = notes.with_blobs(prepared.names, prepared.types).with_forms(forms)
        if epoch in self._replace:
            self._manager.delete(epoch)
            self._replace.discard(epoch)
        began = time.monotonic()
        try:
            saved = self._begin(epoch, args, metrics, notes)
        except Exception as error:  # often of the save before: Orbax raises it here, and does not save
            logging.warning("stock Orbax did not save checkpoint %d, trying once more: %s", epoch, say(error))
            saved = self._begin(epoch, args, metrics, notes)
        if saved:
            self._requested = (epoch, began, time.monotonic() - began)
        return saved

    def _agree_on_forms(
        self, what: str, forms: Callable[[], Mapping[str, Form]], values: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """The values of all nodes, by item and node. All processes call this with the items that they are to save.

        Orbax saves an item of arrays together, so that a process which took it for another item would be waited for.

        Raises:
            InvalidArgumentError: a blob has not the same form on all nodes.
        """
        nodes = self._session.nodes
        blobs = {item: blob for blob, item in self._items.items()}

        def tell() -> dict[str, Any]:
            return {"forms": {item: form.value for item, form in forms().items()}, "values": values}

        def decide(told: list[Any]) -> dict[str, dict[str, Any]]:
            for item, blob in blobs.items():
                by_node = {node: Form(one["forms"][item]) for node, one in zip(nodes, told, strict=True)}
                if len(set(by_node.values())) > 1:
                    raise _unlike(blob, by_node)
            return {item: dict(zip(nodes, (one["values"][item] for one in told), strict=True)) for item in values}

        return self._calls.collective(what, tell, decide)

    def outcomes(self) -> list[SaveResult]:
        if self._requested is not None and not self._manager.is_saving_in_progress():
            self._settle()
        return super().outcomes()

    def _settle(self) -> None:
        """Waits for the save in flight, if there is one, and looks at what became of it."""
        if self._requested is None:
            return
        epoch, began, held = self._requested
        self._requested = None
        detail = ""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            detail = say(error)
        self._manager.reload()
        committed = epoch in self.epochs()
        if committed or detail:
            result = SaveResult(
                epoch=epoch,
                committed=committed,
                detail=detail,
                blocked_secs=held,
                secs=time.monotonic() - began,
                nodes={},
            )
            self._ended.append(result)
        else:  # no failure: with best_fn Orbax deletes an epoch at once if better ones fill max_to_keep
            logging.warning("stock Orbax saved checkpoint %d and deleted it, as its options say", epoch)
            self.discarded = epoch

    def drain(self) -> None:
        """See CheckpointBackend. Also waits for saves of other backends: Orbax already lists their steps."""
        self._settle()
        _threads.logged("a save of stock Orbax failed", self._manager.wait_until_finished)

    def allow_overwrite(self, epoch: int) -> None:
        """See CheckpointBackend. Orbax deletes it just before."""
        self._replace.add(epoch)


def _refuse_several(nodes: Sequence[str]) -> None:
    if len(nodes) > 1:
        raise UnsupportedError(
            f"stock Orbax keeps no nodes: the job's {len(nodes)} ({', '.join(nodes)}) cannot be checkpointed "
            "from one process; use epochckpt.CheckpointManager"
        )


def _form_of(value: Any) -> Form:
    """The form in which Orbax saves a blob."""
    leaves = jax.tree.leaves(value)
    if not any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        return Form.JSON
    return Form.BARE if len(leaves) == 1 and leaves[0] is value else Form.ARRAYS


def _unlike(blob: str, by_node: Mapping[str, Form]) -> InvalidArgumentError:
    """The error of a blob with several forms. The error names one node for each form, the first one."""
    first: dict[Form, str] = {}
    for node, form in by_node.items():
        first.setdefault(form, node)
    found = ", ".join(f"{_FORMS[form]} on {node}" for form, node in first.items())
    return InvalidArgumentError(
        f"blob {blob!r}: {found}. Stock Orbax saves arrays once, and what holds none for each node: expected the same "
        "on all nodes. Make the blob alike on all of them, leave it out with JobRunner(exclude=…), or use "
        "epochckpt.CheckpointManager, which saves what each node has"
    )


def _encode(node: str, blob: str, value: Any) -> Any:
    """A Python value as JSON that gives it back."""
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    try:
        copy = json.loads(json.dumps(value))  # the next epoch may change the value before Orbax has written it
        made_of = containers.of(value)  # JSON turns tuples into lists; the epoch records the containers
        if (copy if made_of is None else containers.rebuild(copy, made_of)) == value:
            return [copy]
    except (TypeError, ValueError, RecursionError):
        pass
    raise InvalidArgumentError(
        f"node {node}, blob {blob!r}: without arrays, stock Orbax keeps it as JSON, and JSON cannot hold this "
        f"{type(value).__name__}; use epochckpt.CheckpointManager"
    )
