"""The head of a bucket as a record: what is no head is refused, wherever it goes wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.head_record import Head, parse
from epochckpt.errors import DamagedError, FormatError
from epochckpt.format import checksums

DIGEST = "0123456789abcdef" * 2
ENTRY = EpochSummary("a-1-0", 1, 2, 3, 2, 0.1, 0.2, None)


def changed(**fields: Any) -> bytes:
    """A head of one epoch with other fields, sealed as a run would."""
    head = json.loads(Head(epochs={"1": ENTRY}).to_bytes())
    del head["checksum"]
    return checksums.seal({**head, **fields})


def test_a_head_comes_back() -> None:
    assert parse("head", changed()).epochs == {"1": ENTRY}


@pytest.mark.parametrize(
    "pages",
    [
        {},
        [DIGEST],
        [[DIGEST]],
        [[DIGEST, 1]],
        [[DIGEST, "1", "1"]],
        [["0" * 31, "1"]],
        [[DIGEST.upper(), "1"]],
        [[DIGEST, "-1"]],
        [[DIGEST, ""]],
        [[DIGEST, "1"], [DIGEST, "2"]],
    ],
)
def test_pages_that_are_no_pairs_of_a_digest_and_bits_are_refused(pages: Any) -> None:
    """Before any of them is read."""
    with pytest.raises(FormatError, match="pages"):
        parse("head", changed(pages=pages), lambda digests: pytest.fail(f"{digests} are read"))


def test_a_head_that_was_changed_after_it_was_sealed_is_damaged() -> None:
    data = changed().replace(b'"a-1-0"', b'"a-1-1"')
    with pytest.raises(DamagedError, match="head"):
        parse("head", data)
