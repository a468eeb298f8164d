"""Where a directory stands towards its mirror: may it write there, and which epochs count?

This table is the one answer; `docs/architecture.md` tells how a run gets from one row to another. The mirror is as the
directory has left it if its claim is one that the ledger lists. Until a directory has claimed a mirror that it goes on
from, the mirror must also have the same epochs as then. The ledger of a copied directory does not count, but
to a reader: it knows the epochs that the ledger in its directory lists.

| the mirror | the directory | standing | reads | writes |
| --- | --- | --- | --- | --- |
| was never claimed, and has no epochs | any | `Owner` | nothing | yes |
| is as the directory has left it, or found it | any | `Owner` | all of it | yes |
| has another history | has no epochs | `Successor` | all of it | yes |
| has another history | knows an older one of it | `Successor` | all of it; what diverges here is set aside | yes |
| belongs to no directory by now | has an epoch of it | `Successor` | as above | yes |
| belongs to another directory | has an epoch of it | `ForeignReader` | known, none after the newest common one | no |
| has epochs | has none of them | `Stranger` | nothing | no |
| does not answer, or its records are damaged | any | `Unanswered` | what the ledger knows | no, until it answers |

Nothing is decided by a number of an epoch alone: an epoch is a copy of another one if both are of one save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from epochckpt.directory.lineage import Lineage
from epochckpt.tiers.ledger import Copy, Ledger


@dataclasses.dataclass(frozen=True)
class Owner:
    """The mirror is this directory's, or nobody's."""

    lineage: Lineage | None


@dataclasses.dataclass(frozen=True)
class Successor:
    """This directory goes on from the history that the mirror has, and claims the mirror with its first write."""

    lineage: Lineage | None
    diverged: tuple[int, ...]  # epochs of this directory that are no part of that history


@dataclasses.dataclass(frozen=True)
class ForeignReader:
    """The mirror belongs to another directory, and both have a part of their history in common."""

    lineage: Lineage | None
    common: int  # the newest epoch that both have


@dataclasses.dataclass(frozen=True)
class Stranger:
    """The mirror has the epochs of another directory."""

    lineage: Lineage | None


@dataclasses.dataclass(frozen=True)
class Unanswered:
    """The mirror cannot be looked at now."""

    error: Exception


Standing = Owner | Successor | ForeignReader | Stranger | Unanswered


_UNCLAIMED = "unclaimed"  # a ledger has it of a mirror with epochs that no directory has claimed


def claim_of(lineage: Lineage | None) -> str:
    """The claim of a mirror, as a ledger has it."""
    return _UNCLAIMED if lineage is None else lineage.claim


def assess(
    ledger: Ledger | None,
    here: Collection[int],
    lineage: Lineage | None,
    there: Mapping[int, str],
    same: Callable[[int], bool],
) -> Owner | Successor | ForeignReader | Stranger:
    """Where a directory with epochs `here` stands towards a mirror with this lineage, and with epochs `there`.

    Args:
        ledger: this directory's own; None if it has none, or is a copy of another directory.
        here: its epochs.
        lineage: the mirror's.
        there: the ids of the mirror's epochs.
        same: whether a common epoch comes from the same save on both sides.
    """
    if lineage is None and not there:
        return Owner(lineage)
    if ledger is not None and ledger.goes_on_from(claim_of(lineage), there):
        return Owner(lineage)
    if not here:
        return Successor(lineage, ())
    common = max((epoch for epoch in here if epoch in there and same(epoch)), default=None)
    known = ledger is not None and (
        ledger.adopted is not None or (lineage is not None and lineage.knows(ledger.identity.directory))
    )
    unowned = lineage is None or not lineage.directory
    if known or (unowned and common is not None):
        return Successor(lineage, diverged(ledger, here, there, same))
    return Stranger(lineage) if common is None else ForeignReader(lineage, common)


def diverged(
    ledger: Ledger | None, here: Collection[int], there: Mapping[int, str], same: Callable[[int], bool]
) -> tuple[int, ...]:
    """The epochs here that are no part of the mirror's history, ascending.

    Nothing has diverged if this directory knows every epoch of the mirror, by its own epoch or by its ledger, and the
    mirror has every copy that the ledger lists. Otherwise an epoch is common if the mirror has the same save, or if it
    is older than such an epoch and was never mirrored.
    """
    copies: Mapping[int, Copy] = {} if ledger is None else ledger.copies
    ours = {epoch for epoch in there if (epoch in here and same(epoch)) or _is(copies.get(epoch), there[epoch])}
    pending = {} if ledger is None else ledger.copying
    if ledger is not None and ours == there.keys() and {*copies, *pending} <= there.keys():
        return ()
    common = {epoch for epoch in here if epoch in there and same(epoch)}
    newest = max(common, default=-1)
    mirrored = {*copies, *pending, *there}
    return tuple(sorted(e for e in here if e not in common and (e > newest or e in mirrored)))


def _is(copy: Copy | None, mirror_id: str) -> bool:
    return copy is not None and copy.mirror_id == mirror_id
