"""What `status`, `verify` and the metadata calls answer: plain values, read from records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from epochckpt.errors import DamagedError, EpochCheckpointError, kept
from epochckpt.format import checksums, paths
from epochckpt.storage import Store

NO_VIEW = "the Orbax view is not there, as in a copy that left it out: stock Orbax cannot read the epoch, epochckpt can"


@dataclasses.dataclass(frozen=True)
class NodeStatus:
    """One node's part of an epoch.

    Attributes:
        name: the node's name.
        nbytes: bytes of its files.
        secs: how long it wrote.
    """

    name: str
    nbytes: int
    secs: float


@dataclasses.dataclass(frozen=True)
class EpochStatus:
    """What is known of one epoch.

    Attributes:
        epoch: its number.
        state: `committed`, `saving`, `failed`, `damaged` or `absent`; `uncertain`: not there, but this process cannot
            know that it will not be (see `UncertainError`).
        detail: what it waits for, or why it failed; empty otherwise.
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
        epoch: its number.
        committed: whether the epoch exists now; False also where that is uncertain.
        detail: why it was not committed, or why that is uncertain; empty otherwise.
        blocked_secs: how long the training thread was blocked.
        secs: from the call of `save` to the end.
        nodes: how long each node wrote, in seconds by name, as far as this process knows: the primary knows all.
    """

    epoch: int
    committed: bool
    detail: str
    blocked_secs: float
    secs: float
    nodes: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Verification:
    """The outcome of reading every byte of an epoch.

    Attributes:
        epoch: its number.
        nbytes: bytes that its records say it has.
        damage: one error per damaged place, each naming its file and, where there is one, its leaf.
        note: what could not be checked, if anything: epochs of stock Orbax have no checksums.
        view_damage: one error per damaged place of the Orbax view. The epoch itself is whole nevertheless; stock Orbax
            may not be able to read it until `repair_view` makes its view anew.
    """

    epoch: int
    nbytes: int
    damage: tuple[EpochCheckpointError, ...] = ()
    note: str = ""
    view_damage: tuple[EpochCheckpointError, ...] = ()

    def __post_init__(self) -> None:
        for error in (*self.damage, *self.view_damage):
            kept(error)  # without the blocks that were read

    @property
    def ok(self) -> bool:
        """Whether the epoch is as it was written, as far as that can be checked; the Orbax view apart."""
        return not self.damage

    def raise_if_damaged(self) -> None:
        """Raises the first damage, if there is any."""
        if self.damage:
            raise self.damage[0]


def root_metadata(store: Store, given: Mapping[str, Any] | None = None) -> Any:
    """Orbax's RootMetadata of a directory: what was written there, else what is given.

    Raises:
        DamagedError: the file there cannot be used.
    """
    for path in (paths.join(*paths.ROOT_METADATA), paths.join(*paths.LEGACY_ROOT_METADATA)):
        try:
            data = json.loads(store.read(path, limit_bytes=2**24))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except (ValueError, RecursionError) as error:
            raise DamagedError(path, f"is not usable JSON: {error}") from None
        known = ("internal_metadata", "custom_metadata")
        custom = (data.get("custom_metadata") or {}) if isinstance(data, dict) else None
        if not isinstance(custom, dict):
            raise DamagedError(path, "is not the metadata of a directory: expected a JSON object")
        # the older file holds nothing but what the user gave
        others = {key: value for key, value in data.items() if key not in known}
        return ocp.metadata.RootMetadata(custom_metadata=checksums.unpack_json({**others, **custom}))
    return ocp.metadata.RootMetadata(custom_metadata=dict(given or {}))
