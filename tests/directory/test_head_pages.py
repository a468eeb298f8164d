"""When entries move from a bucket's head to pages, and when pages are joined."""

from __future__ import annotations

import dataclasses

from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_pages import INLINE_BYTES, KEPT_BYTES, PAGE_BYTES, paged
from epochckpt.directory.head_record import SECTIONS, Head, PageEntry


def entry(epoch: int) -> EpochSummary:
    return EpochSummary(f"a-{epoch}-0", 1, epoch, 3, 2, 0.1, 0.2, None)


def head_of(count: int) -> Head:
    return Head(epochs={str(epoch): entry(epoch) for epoch in range(count)})


def nbytes(head: Head, count: int) -> int:
    return PageEntry.of(SECTIONS[0], "1000", entry(1000)).nbytes * count


def test_a_small_head_has_no_pages_and_a_large_one_keeps_the_newest() -> None:
    small = head_of(20)
    assert nbytes(small, 20) < INLINE_BYTES
    assert paged(small).pages == ()
    large = paged(head_of(300))
    (page,) = large.pages
    assert page.data
    loose = large.loose()[SECTIONS[0]]
    assert 0 < sum(PageEntry.of(SECTIONS[0], key, found).nbytes for key, found in loose.items()) <= KEPT_BYTES
    assert sorted(map(int, loose)) == list(range(300 - len(loose), 300))
    assert len(page.entries) + len(loose) == 300


def test_one_page_of_few_entries_stays_and_two_are_joined() -> None:
    """A page never changes: its entries leave one by one, until it is worth while to write them anew."""
    head = paged(head_of(300))
    (page,) = head.pages
    left = {key: found for key, found in head.epochs.items() if int(key) < 60 or int(key) > 290}
    one = dataclasses.replace(head, epochs=left)
    assert len(paged(one).pages) == 1
    assert paged(one).pages[0] is page
    more = {str(epoch): entry(epoch) for epoch in range(500, 700)}
    two = paged(dataclasses.replace(one, epochs=left | more))
    assert len(two.pages) == 1, "what moves goes with what is left of the page"
    assert two.pages[0] is not page
    first = paged(head_of(300))
    second = paged(Head(epochs={str(epoch): entry(epoch) for epoch in range(1000, 1300)}))
    few = {key: found for key, found in {**first.epochs, **second.epochs}.items() if int(key) % 1000 < 60}
    both = Head(epochs=few, pages=(*first.pages, *second.pages))
    (joined,) = paged(both).pages
    assert {found.key for found in joined.entries} == few.keys()


def test_a_page_without_entries_that_count_is_left_out() -> None:
    head = paged(head_of(300))
    assert paged(dataclasses.replace(head, epochs={"1000": entry(1000)})).pages == ()
    assert PAGE_BYTES > INLINE_BYTES > KEPT_BYTES
