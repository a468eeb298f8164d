"""The answers of `status`, `verify` and the metadata calls: plain values, read from records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from epochckpt._lazy import ocp
from epochckpt.errors import AccessError, DamagedError, EpochCheckpointError, StorageError, kept
from epochckpt.format import checksums, paths
from epochckpt.storage import Store, read_json

_UNREAD = (AccessError, StorageError)  # what says nothing about the data
NO_VIEW = "the Orbax view is not there, as in a copy that left it out: stock Orbax cannot read it, epochckpt can"


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    """One node's part of an epoch: the bytes of its files, and the seconds that it wrote."""

    name: str
    nbytes: int
    secs: float


@dataclasses.dataclass(frozen=True)
class EpochStatus:
    """The status of one epoch.

    Attributes:
        state: `committed`, `saving`, `failed`, `damaged`, `newer` or `absent`; `newer`: committed, and only a newer
            epochckpt can read it; `uncertain`: absent, but this process cannot know that it will stay so (see
            `UncertainError`).
        detail: what the save waits for, why it failed, or why the epoch cannot be read; empty otherwise.
        nodes: the nodes that wrote it, if committed; none if stock Orbax wrote it.
        orbax_nbytes: bytes of its files, if stock Orbax wrote it.
    """

    epoch: int
    state: str
    detail: str = ""
    nodes: tuple[NodeStatus, ...] = ()
    orbax_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(n.nbytes for n in self.nodes) + self.orbax_nbytes


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """How one save ended.

    Attributes:
        committed: whether the epoch exists now; False also where that is uncertain.
        detail: why it was not committed, or why that is uncertain; empty otherwise.
        blocked_secs: how long the training thread was blocked.
        secs: from the call of `save` to the end.
        nodes: seconds that each node wrote, by name; the primary knows all nodes, other processes their own.
        behind: it could not even begin, because storage was behind with older saves.
    """

    epoch: int
    committed: bool
    detail: str
    blocked_secs: float
    secs: float
    nodes: Mapping[str, float]
    behind: bool = False


@dataclasses.dataclass(frozen=True)
class Verification:
    """The outcome of reading every byte of an epoch.

    Attributes:
        nbytes: its size by its records.
        damage: one error per damaged place, each naming its file and, where there is one, its leaf.
        note: what could not be checked: epochs of stock Orbax have no checksums.
        view_damage: one error per damaged place of the Orbax view. The epoch itself is whole nevertheless; stock Orbax
            may not be able to read it until `repair_view` has rebuilt its view.
        unread: one AccessError or StorageError per place that this user may not read, or that storage did not answer
            for. That says nothing about the data: verify it again.
    """

    epoch: int
    nbytes: int
    damage: tuple[EpochCheckpointError, ...] = ()
    note: str = ""
    view_damage: tuple[EpochCheckpointError, ...] = ()
    unread: tuple[EpochCheckpointError, ...] = ()

    @classmethod
    def of(
        cls,
        epoch: int,
        nbytes: int,
        found: Iterable[EpochCheckpointError],
        note: str = "",
        view: Iterable[EpochCheckpointError] = (),
    ) -> Verification:
        """Sorts the errors that were found in the epoch and in its Orbax view: damage, and what was not read."""
        errors = list(found)
        of_view = list(view)
        return cls(
            epoch=epoch,
            nbytes=nbytes,
            damage=tuple(error for error in errors if not isinstance(error, _UNREAD)),
            note=note,
            view_damage=tuple(error for error in of_view if not isinstance(error, _UNREAD)),
            unread=tuple(error for error in (*errors, *of_view) if isinstance(error, _UNREAD)),
        )

    def __post_init__(self) -> None:
        for error in (*self.damage, *self.view_damage, *self.unread):
            kept(error)  # without the blocks that were read

    @property
    def ok(self) -> bool:
        """Whether all of it was read, and is as it was written as far as can be checked; the Orbax view apart."""
        return not self.damage and not self.unread

    def raise_if_damaged(self) -> None:
        """Raises the first damage, or the first error of a place that was not read, if there is one."""
        for error in (*self.damage, *self.unread):
            raise error


def custom_metadata(store: Store, *, limit_bytes: int = 2**24) -> dict[str, Any] | None:
    """The user's metadata of a directory; None if none was written; raises DamagedError."""
    for path in (paths.join(*paths.ROOT_METADATA), paths.join(*paths.LEGACY_ROOT_METADATA)):
        try:
            data = checksums.unpack_json(read_json(store, path, limit_bytes=limit_bytes))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except (ValueError, RecursionError) as error:
            raise DamagedError(path, f"is not usable JSON: {error}") from None
        custom = (data.pop("custom_metadata", None) or {}) if isinstance(data, dict) else None
        if not isinstance(custom, dict):
            raise DamagedError(path, "is not the metadata of a directory: expected a JSON object")
        data.pop("internal_metadata", None)
        # what remains is the user's, too: the older file holds nothing else
        return {**data, **custom}
    return None


def root_metadata(store: Store, given: Mapping[str, Any] | None = None) -> Any:
    """Orbax's RootMetadata of a directory: the one written there, else the `given` one; raises DamagedError."""
    written = custom_metadata(store)
    return ocp.metadata.RootMetadata(custom_metadata=dict(given or {}) if written is None else written)
