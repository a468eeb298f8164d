"""What the tests of inspection share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epochckpt.storage import Store
from epochckpt.testing import Faults
from epochckpt.testing.faults import Hold


@pytest.fixture
def hold_saves(faults: Faults) -> Callable[[], Hold]:
    """From a call on, saves stop just before they become visible."""
    return lambda: faults.hold(Store.rename, where=lambda call: call.target.isdigit())
