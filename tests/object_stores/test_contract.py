"""The store contract on real servers of S3, Google Cloud Storage and Azure Blob Storage."""

import pytest

from epochckpt.storage import Store, open_store
from epochckpt.testing import StoreContract
from tests.support.object_servers import Bucket


@pytest.mark.parametrize("server", ["gs", "s3", "az"], indirect=True)
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
