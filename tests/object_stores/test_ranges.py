"""Ranged reads: where their bytes go, and when nothing goes there any more."""

import threading

import pytest

from epochckpt.errors import StorageError
from epochckpt.storage import open_store
from epochckpt.storage.landing import Landing
from epochckpt.testing import write_file
from tests.support.object_servers import Bucket, Fault


def test_one_request_fills_many_buffers(cloud: Bucket) -> None:
    """Of any sizes, also empty ones, and of other formats than bytes."""
    store, data = open_store(cloud.new_url()), bytes(range(256)) * 9000
    write_file(store, "file", data)
    sizes = (5, 0, 1 << 20, 3, 1_000_000)
    buffers = [bytearray(size) for size in sizes]
    numbers = memoryview(bytearray(8)).cast("I")
    with store.open_reader("file", len(data)) as reader, cloud.proxy.counted() as counts:
        reader.read_parts(7, [*map(memoryview, buffers), numbers])
    assert counts == {"GET": 1}
    assert b"".join(buffers) + numbers.tobytes() == data[7 : 7 + sum(sizes) + 8]


def test_an_answer_that_is_cut_is_asked_for_again_from_its_beginning(cloud: Bucket) -> None:
    """What came before the cut is written over."""
    store, data = open_store(cloud.new_url()), bytes(range(256)) * 10_000
    write_file(store, "file", data)
    left = [Fault(cut=1 << 20)]
    cloud.proxy.decide = lambda request: left.pop() if request.kind == "GET" and left else None
    out = bytearray(len(data))
    with store.open_reader("file", len(data)) as reader, cloud.proxy.counted() as counts:
        reader.read_into(0, memoryview(out))
    assert counts == {"GET": 2}
    assert out == data


def test_a_file_that_is_shorter_than_it_was_said_to_be_is_an_error(cloud: Bucket) -> None:
    store = open_store(cloud.new_url())
    write_file(store, "file", b"0123456789")
    for start in (0, 8, 10, 12):
        with store.open_reader("file", 20) as reader, pytest.raises(EOFError, match="file"):
            reader.read_parts(start, [memoryview(bytearray(4)), memoryview(bytearray(4))])


def test_a_refused_read_is_an_error(cloud: Bucket) -> None:
    store = open_store(f"{cloud.new_url()}?retries=0")
    cloud.proxy.decide = lambda request: Fault(status=503)
    with store.open_reader("file", 20) as reader, pytest.raises(StorageError, match="reading failed"):
        reader.read_into(0, memoryview(bytearray(4)))


def test_a_closed_landing_stays_as_it_is() -> None:
    """Buffers that are closed, or replaced, take no late bytes."""
    one, other = bytearray(3), bytearray(4)
    landing = Landing([memoryview(one), memoryview(b""), memoryview(other)])
    assert landing.nbytes == 7
    assert landing.put(2, b"cde")
    assert landing.put(0, b"ab")
    assert (one, other) == (b"abc", b"de\0\0")
    landing.replace(b"0123456")
    assert not landing.put(0, b"late")
    assert (one, other) == (b"012", b"3456")
    closed = Landing([memoryview(one)])
    closed.close()
    assert not closed.put(0, b"x")
    assert one == b"012"


def test_a_close_waits_for_the_piece_that_is_copied() -> None:
    """Many threads fill one landing: after its close no byte changes."""
    out = bytearray(1 << 20)
    landing, pieces = Landing([memoryview(out)]), [bytes([number]) * len(out) for number in range(1, 5)]
    begun = threading.Barrier(len(pieces) + 1)

    def fill(piece: bytes) -> None:
        begun.wait()
        while landing.put(0, piece):
            pass

    threads = [threading.Thread(target=fill, args=(piece,)) for piece in pieces]
    for thread in threads:
        thread.start()
    begun.wait()
    landing.close()
    before = bytes(out)
    for thread in threads:
        thread.join()
    assert out == before
    assert before in {bytes(len(out)), *pieces}  # never a mixture
