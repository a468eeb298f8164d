"""Where a directory stands towards its mirror: every row of the table in `tiers.standing`, without any storage."""

from __future__ import annotations

import dataclasses

import pytest

from epochckpt.directory.lineage import ClaimDirectly, ClaimLineage, Lineage
from epochckpt.errors import FencedError
from epochckpt.tiers.ledger import Adoption, Copy, Identity, Ledger
from epochckpt.tiers.standing import ForeignReader, Owner, Stranger, Successor, assess, claim_of, diverged

OURS, THEIRS = Lineage("one", "c1"), Lineage("two", "c2", ("one",))


def ledger(*claims: str, copies: dict[int, str] | None = None, directory: str = "one") -> Ledger:
    identity = Identity(directory=directory, host="h", path="/p", inode=5000)
    known = {epoch: Copy(save_id=f"here-{epoch}", mirror_id=id) for epoch, id in (copies or {}).items()}
    return Ledger(url="u", identity=identity, claims=claims, copies=known)


def same(*epochs: int):
    return lambda epoch: epoch in epochs


def test_a_mirror_that_nobody_has_used_is_anybody_s() -> None:
    assert assess(None, [0, 1], None, {}, same()) == Owner(None)
    assert assess(ledger("c0"), [], None, {}, same()) == Owner(None)


def test_a_known_claim_is_the_directory_s_own() -> None:
    assert assess(ledger("c0", "c1"), [5], OURS, {0: "a"}, same()) == Owner(OURS)


def test_a_history_that_was_adopted_counts_only_as_it_was_found() -> None:
    """The directory has saved epoch 3, and was killed before it had claimed the mirror."""
    adopted = dataclasses.replace(ledger(directory="three"), adopted=Adoption("c2", {0: "a"}))
    assert assess(adopted, [3], THEIRS, {0: "a"}, same()) == Owner(THEIRS)
    assert assess(adopted, [3], THEIRS, {0: "a", 1: "b"}, same()) == Successor(THEIRS, (3,))
    tried = adopted.claiming("c3")
    assert assess(tried, [3], Lineage("three", "c3", ("two",)), {0: "a", 1: "b"}, same()).__class__ is Successor


def test_an_empty_directory_goes_on_from_the_mirror() -> None:
    assert assess(None, [], THEIRS, {0: "a", 1: "b"}, same()) == Successor(THEIRS, ())


def test_a_returned_directory_gives_up_what_has_diverged() -> None:
    found = assess(ledger("c1", copies={0: "a", 1: "b"}), [0, 1, 2, 3], THEIRS, {0: "a", 1: "b", 2: "x"}, same(0, 1))
    assert found == Successor(THEIRS, (2, 3))


def test_a_mirror_that_has_not_changed_costs_a_returned_directory_nothing() -> None:
    found = assess(ledger("c1", copies={0: "a", 1: "b"}), [1, 2, 3], THEIRS, {0: "a", 1: "b"}, same(1))
    assert found == Successor(THEIRS, ())


def test_a_mirror_that_nobody_owns_any_more_is_followed_by_who_has_an_epoch_of_it() -> None:
    direct = ClaimDirectly().apply(OURS)
    assert direct is not None
    assert direct.past == ("one",)
    assert assess(None, [1], direct, {1: "b"}, same(1)) == Successor(direct, ())
    assert assess(None, [1], None, {1: "b"}, same(1)) == Successor(None, ())


def test_a_copy_of_a_directory_only_reads() -> None:
    assert assess(None, [0, 1, 9], THEIRS, {0: "a", 1: "b", 2: "c"}, same(0, 1)) == ForeignReader(THEIRS, 1)


def test_a_directory_without_a_common_epoch_is_a_stranger() -> None:
    assert assess(None, [0, 1], THEIRS, {0: "a"}, same()) == Stranger(THEIRS)
    assert assess(ledger("c9", directory="three"), [0], OURS, {0: "a"}, same()) == Stranger(OURS)


@pytest.mark.parametrize(
    ("there", "alike", "gone"),
    [
        ({0: "a", 1: "b"}, (0, 1), ()),  # as it was left
        ({0: "a", 1: "b", 2: "x"}, (0, 1), (2, 3)),  # somebody has gone on
        ({0: "a"}, (0,), (1, 2, 3)),  # somebody has gone back
        ({0: "y", 1: "b"}, (1,), (0, 2, 3)),  # somebody has replaced one
        ({7: "z"}, (), (0, 1, 2, 3)),  # nothing is left that both have
    ],
)
def test_what_diverges(there: dict[int, str], alike: tuple[int, ...], gone: tuple[int, ...]) -> None:
    assert diverged(ledger("c1", copies={0: "a", 1: "b"}), [0, 1, 2, 3], there, same(*alike)) == gone


def test_a_copy_that_may_have_been_committed_is_not_taken_for_nothing() -> None:
    """Epoch 2 was being copied when this run died; somebody has removed it since."""
    known = ledger("c1", copies={0: "a"}).begun(2, Copy(save_id="here-2", mirror_id="m"))
    assert diverged(known, [0, 2, 3], {0: "a"}, same(0)) == (2, 3)


def test_a_claim_replaces_exactly_the_lineage_that_was_seen() -> None:
    claim = ClaimLineage(expected=OURS, directory="two", claim="c2")
    after = claim.apply(OURS)
    assert (after, claim_of(after)) == (Lineage("two", "c2", ("one",)), "c2")
    for found in (None, after, Lineage("one", "c0")):
        with pytest.raises(FencedError, match="has claimed the mirror since this one looked"):
            claim.apply(found)


def test_an_ordinary_claim_takes_a_mirror_from_its_directory() -> None:
    assert ClaimDirectly().apply(None) is None
    after = ClaimDirectly().apply(OURS)
    assert after is not None
    assert (after.directory, after.knows("one"), after.claim != "c1") == ("", True, True)
