"""The servers of this folder's tests: one of each kind for a session."""

import math
from collections.abc import Callable, Iterator

import pytest

from tests.support.object_servers import Bucket, bucket


# The default level has the contract of stores on all kinds of servers, and the rest on one of them.
@pytest.fixture(scope="module", params=["gs", pytest.param("s3", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    with bucket(request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_read_is_late(patience: Callable[..., None]) -> None:
    """Tests count requests, and a busy machine answers late. The tests of late reads say when a read is late."""
    patience(late_read_secs=math.inf)


@pytest.fixture
def cloud(server: Bucket) -> Iterator[Bucket]:
    """The bucket, without faults at the beginning and the end."""
    server.proxy.requests.clear()
    yield server
    server.proxy.decide, server.proxy.delay_secs = (lambda request: None), 0.0
