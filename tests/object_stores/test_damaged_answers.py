"""What is damaged on its way is read once more; what is stored damaged is damage."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import obstore
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import DamagedError
from epochckpt.storage.object_client import Client
from tests.support import stock_steps
from tests.support.object_servers import Bucket, Fault, Request

Options, Composite = ocp.CheckpointManagerOptions, ocp.args.Composite
FAULTS = {
    "the first byte flipped": Fault(flipped=0),
    "the last byte flipped": Fault(flipped=10**9),
    "cut": Fault(short=20),
    "cut to nothing": Fault(short=0),
}


def state(epoch: int) -> dict[str, Any]:
    return {"w": jnp.arange(1000.0) + epoch, "rows": np.arange(60_000).reshape(300, 200) * epoch}


@pytest.fixture
def url(cloud: Bucket) -> str:
    """A run of two epochs, with arrays, JSON and a value of the node's own."""
    found = cloud.new_url()
    with ec.CheckpointManager(found, storage=ec.StorageOptions(block_bytes=64 * 1024)) as manager:
        for epoch in (1, 2):
            items = Composite(
                state=ocp.args.StandardSave(state(epoch)),
                config=ocp.args.JsonSave({"epoch": epoch}),
                own=ec.args.NodeSave({"position": epoch}),
            )
            manager.save(epoch, args=items)
    return found


def restore_newest(url: str) -> Any:
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        return manager.restore(None)


def nth_answer(number: int, fault: Fault, met: list[Request]) -> Callable[[Request], Fault | None]:
    """The fault for one of the answers with an object's content, which is added to a list."""
    seen: list[Request] = []

    def decide(request: Request) -> Fault | None:
        if request.kind != "GET":
            return None
        seen.append(request)
        if len(seen) - 1 != number:
            return None
        met.append(request)
        return fault

    return decide


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the last byte flipped", "cut to nothing", "the first byte flipped", "cut"])
def test_one_damaged_answer_costs_no_epoch(name: str, cloud: Bucket, url: str) -> None:
    """Of the head, the records, the blocks of arrays and other files, each in turn."""
    number = 0
    while True:
        met: list[Request] = []
        cloud.proxy.decide = nth_answer(number, FAULTS[name], met)
        found = restore_newest(url)
        cloud.proxy.decide = lambda request: None
        jax.tree.map(np.testing.assert_array_equal, found["state"], state(2))
        assert (found["config"], found["own"]) == ({"epoch": 2}, {"position": 2})
        if not met:
            break
        number += 1
    assert number >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "written_by"),
    [("gs", "epochckpt"), ("s3", "epochckpt"), ("gs", "stock Orbax")],
    indirect=["server"],
)
def test_one_damaged_answer_of_a_named_epoch_is_no_damage(
    written_by: str, cloud: Bucket, url: str, tmp_path: pathlib.Path
) -> None:
    """Each answer in turn: the manager does not take the epoch for damaged, and goes on listing it."""
    if written_by == "stock Orbax":
        url = cloud.new_url()
        stock_steps.simple(tmp_path, 1, 2)
        stock_steps.upload(tmp_path, url, 1, 2)
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        expected, number, met = dict(manager.restore(2)), 0, list[Request]()
        while number == 0 or met:
            met = []
            cloud.proxy.decide = nth_answer(number, Fault(flipped=10**9), met)
            jax.tree.map(np.testing.assert_array_equal, dict(manager.restore(2)), expected)
            assert (manager.latest_step(), manager.damaged_epochs()) == (2, [])
            number += 1
    assert number >= 3


@pytest.mark.slow
def test_part_of_an_array_survives_a_damaged_answer(cloud: Bucket, url: str) -> None:
    """Single leaves, and what `verify` looks at, go other ways."""
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        for look in (
            lambda: np.testing.assert_array_equal(manager.restore_leaves(2, "w", "state")["w"], state(2)["w"]),
            lambda: manager.verify(2).raise_if_damaged(),
        ):
            for number in range(4):
                cloud.proxy.decide = nth_answer(number, Fault(flipped=10**9), [])
                look()


def test_bytes_that_are_stored_damaged_stay_damage(cloud: Bucket, url: str) -> None:
    """Of arrays: the epoch is refused by its number, and the older one is taken by whoever names none."""
    client = Client(url)
    keys = [meta["path"] for page in obstore.list(client.kv, client.below("2")) for meta in page]
    (key,) = [key for key in keys if key.endswith("state.safetensors")]
    content = bytearray(obstore.get(client.kv, key).bytes())
    content[-1] ^= 1
    obstore.put(client.kv, key, bytes(content))
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        with pytest.raises(DamagedError, match=r"differ from what was written.*latest_step\(\) is 1 now"):
            manager.restore(2)
        assert manager.damaged_epochs() == [2]
        assert manager.restore(None)["config"] == {"epoch": 1}


def test_an_answer_that_is_always_damaged_is_damage(cloud: Bucket, url: str) -> None:
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        flip = Fault(flipped=10**9)
        cloud.proxy.decide = lambda request: flip if "safetensors" in request.target else None
        with pytest.raises(DamagedError):
            manager.restore(2)
