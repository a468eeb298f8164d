"""The store contract on a server of every scheme."""

import pytest

from epochckpt.storage import Store, open_store
from epochckpt.storage.schemes import SCHEMES
from epochckpt.testing import StoreContract
from tests.support.object_servers import EMULATORS, Bucket


def test_every_scheme_of_a_server_is_tested() -> None:
    """A row of `schemes.SCHEMES` that has a client has an emulator, on which the contract is tried."""
    assert {name for name, row in SCHEMES.items() if row.client is not None} == EMULATORS.keys()


@pytest.mark.parametrize("server", EMULATORS, indirect=True)
class TestBucket(StoreContract):
    @pytest.fixture
    def url(self, cloud: Bucket) -> str:
        return cloud.new_url()

    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url)

    @pytest.fixture
    def reopened(self, url: str) -> Store:
        return open_store(url)
