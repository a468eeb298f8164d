"""Tests that ship with epochckpt, for code that plugs into it. Needs pytest; `import epochckpt` does not import it.

`StoreContract` holds what every `epochckpt.storage.Store` promises. To check a store of your own, inherit from it in a
test module and add two fixtures; pytest collects the tests with your class:

    import pytest
    from epochckpt.testing import StoreContract

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)

        @pytest.fixture
        def reopened(self, tmp_path, store):
            return MyStore(tmp_path)

`Faults` has stores fail, wait or be slow when a test says so.
"""

import pytest

pytest.register_assert_rewrite("epochckpt.testing.stores")  # before the import: failed assertions show their values

from epochckpt.testing.faults import Faults, FaultyStore, Rule, SlowStore, StoreCall  # noqa: E402
from epochckpt.testing.stores import StoreContract, in_parallel, write_file  # noqa: E402

__all__ = ["Faults", "FaultyStore", "Rule", "SlowStore", "StoreCall", "StoreContract", "in_parallel", "write_file"]
