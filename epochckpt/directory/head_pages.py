"""Which entries of a head are in pages: all but the newest ones, so that each write of the head stays small.

The head keeps some kilobytes of entries itself. When it has more, all but the newest few move to new pages. Pages that
are half full or less, because they were made so or because their other entries count no more, give theirs to the new
ones. So the number of pages follows that of the entries that count.

Whoever changes the head writes the new pages first, then the head, and removes the pages that the head names no more,
then or with the next change. A writer that is killed in between leaves pages that no head names: the next claim
removes them. It lists the pages before it changes the head, and removes those that its own head does not name. No
later head can name these pages: a change names only the pages of the head that it has read, and pages that it has
written since.
"""

from __future__ import annotations

import dataclasses

from epochckpt.directory.head_record import SECTIONS, Head, Page, PageEntry

INLINE_BYTES = 16 << 10  # of entries in the head, before some move to a page
KEPT_BYTES = 4 << 10  # of the newest entries, which then stay
PAGE_BYTES = 64 << 10  # of entries in a page


def paged(head: Head) -> Head:
    """The head with the pages that it should have; those with `data` are new, and have to be written first."""
    live = {page.digest: page.counted(head) for page in head.pages}
    pages = [page for page in head.pages if live[page.digest]]
    moving = _moving(head)
    # Pages that are half empty or more, the emptiest first, as far as one new page has room for them.
    merged = dict[str, Page]()
    room = PAGE_BYTES - _nbytes(moving) % PAGE_BYTES
    thin = [page for page in pages if _nbytes(live[page.digest]) <= PAGE_BYTES // 2]
    for page in sorted(thin, key=lambda page: _nbytes(live[page.digest])):
        if (room := room - _nbytes(live[page.digest])) < 0:
            break
        merged[page.digest] = page
    if not moving and len(merged) < 2:
        return dataclasses.replace(head, pages=tuple(pages))
    entries = [entry for page in merged.values() for entry in live[page.digest]] + moving
    kept = [page for page in pages if page.digest not in merged]
    return dataclasses.replace(head, pages=(*kept, *_cut(entries)))


def _moving(head: Head) -> list[PageEntry]:
    """The entries that are to leave the head."""
    loose = [PageEntry.of(name, key, entry) for name, found in head.loose().items() for key, entry in found.items()]
    if _nbytes(loose) <= INLINE_BYTES:
        return []
    # Epochs are looked at and changed more often than what is set aside.
    loose.sort(key=lambda entry: (entry.section == SECTIONS[0], entry.epoch.committed_ns))
    kept = 0
    while kept + loose[-1].nbytes <= KEPT_BYTES:
        kept += loose.pop().nbytes
    return loose


def _nbytes(entries: list[PageEntry]) -> int:
    return sum(entry.nbytes for entry in entries)


def _cut(entries: list[PageEntry]) -> list[Page]:
    """Pages of these entries, each as full as the order allows."""
    parts = [list[PageEntry]()]
    for entry in entries:
        if parts[-1] and _nbytes(parts[-1]) + entry.nbytes > PAGE_BYTES:
            parts.append([])
        parts[-1].append(entry)
    return [Page.of(part) for part in parts]
