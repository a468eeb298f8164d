"""What a user hands in is kept as JSON up to a depth, and refused beyond it."""

from __future__ import annotations

from typing import Any

import pytest

from epochckpt.errors import InvalidArgumentError
from epochckpt.format import checksums


@pytest.mark.parametrize("wrap", [lambda inner: {"a": inner}, lambda inner: [inner], lambda inner: (inner,)])
def test_the_depth_of_user_data_is_bounded(wrap: Any) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = wrap(deep)
    packed = checksums.pack_json(deep, "custom_metadata")
    for _ in range(100):
        (packed,) = packed.values() if isinstance(packed, dict) else packed
    assert packed == 1
    with pytest.raises(InvalidArgumentError, match="custom_metadata is nested deeper than 100"):
        checksums.pack_json(wrap(deep), "custom_metadata")
