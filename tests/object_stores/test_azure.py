"""What is particular to `az://`, on Azurite; the contract of stores, and faults, are tested for all kinds alike."""

import pathlib

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.cli import main
from epochckpt.errors import AccessError, InvalidArgumentError
from epochckpt.storage import open_store
from tests.support import azurite
from tests.support.object_servers import BUCKET, Bucket, Fault, Request

Save, Options = ocp.args.StandardSave, ocp.CheckpointManagerOptions
pytestmark = pytest.mark.parametrize("server", ["az"], indirect=True)


def save(url: str, *epochs: int, storage: ec.StorageOptions | None = None) -> None:
    with ec.CheckpointManager(url, storage=storage) as manager:
        for epoch in epochs:
            manager.save(epoch, args=Save({"w": jnp.arange(4.0) + epoch}), metrics={"loss": 1.0 / epoch})


def test_a_run_is_kept_in_azure(cloud: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved, listed, restored, deleted and rolled back."""
    url = cloud.new_url()
    save(url, 1, 2, 3, 4)
    with ec.CheckpointManager(url) as manager:
        manager.delete(2)
        manager.rollback_to(3)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]
        np.testing.assert_array_equal(manager.restore(None)["w"], np.arange(4.0) + 3)
    assert not open_store(url).exists("2")
    assert main.main(["ls", url]) == 0
    listed = capsys.readouterr().out
    assert f"{url}\n2 epochs" in listed
    assert "rolled back" in listed


@pytest.mark.slow
def test_a_lost_head_is_made_again_in_azure(cloud: Bucket) -> None:
    url = cloud.new_url()
    save(url, 1, 3)
    assert main.main(["verify", url]) == 0
    open_store(url).remove("_epochckpt/head.json")
    assert main.main(["repair", url, "--yes"]) == 0
    with ec.CheckpointManager(url, options=Options(read_only=True)) as manager:
        assert manager.all_steps() == [1, 3]


def test_a_directory_has_a_mirror_in_azure(cloud: Bucket, tmp_path: pathlib.Path) -> None:
    """A new host goes on from it."""
    storage = ec.StorageOptions(mirror=cloud.new_url())
    save(str(tmp_path / "one"), 1, 2, storage=storage)
    with ec.CheckpointManager(tmp_path / "two", storage=storage) as manager:
        assert manager.all_steps() == [1, 2]
        np.testing.assert_array_equal(manager.restore(None)["w"], np.arange(4.0) + 2)


def test_of_two_writers_one_has_the_object(cloud: Bucket) -> None:
    """Azure says 409 where there is an object, and 412 where it has changed; both are answers, at once."""
    url = cloud.new_url()
    one, other = open_store(url), open_store(url)
    one.create("a", b"first")
    with cloud.proxy.counted() as counts, pytest.raises(FileExistsError):
        other.create("a", b"second")
    assert counts == {"PUT": 1}
    other.replace("a", b"first", b"third")
    with pytest.raises(FileExistsError):
        one.replace("a", b"first", b"fourth")
    assert one.read("a", limit_bytes=10) == b"third"


def test_another_conflict_is_no_object(cloud: Bucket) -> None:
    """409 has other meanings, too: of those that pass, the request is repeated."""
    store, left = open_store(f"{cloud.new_url()}?first_retry_secs=0.001"), [1, 1]

    def decide(request: Request) -> Fault | None:
        return Fault(status=409, code="OperationTimedOut") if request.kind == "PUT" and left and left.pop() else None

    cloud.proxy.decide = decide
    store.create("a", b"1")
    assert store.read("a", limit_bytes=1) == b"1"


def test_a_container_belongs_to_an_account(cloud: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment or a setting names it; those of two accounts are two directories; without one it is an error."""
    url = f"az://{BUCKET}/run"
    for name in ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name)
    with pytest.raises(InvalidArgumentError, match=r"needs the name of the storage account: set AZURE_STORAGE"):
        open_store(url)
    mine, theirs = open_store(f"{url}?account=mine"), open_store(url, settings={"account": "theirs"})
    assert (mine.root, mine.endpoint) == (url, "https://mine.blob.core.windows.net")
    assert theirs.address == f"{url}?account=theirs"
    assert not mine.is_same(theirs)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    assert open_store(url).is_same(mine)
    endpoint = f"{cloud.proxy.url}/{azurite.ACCOUNT}"
    by_settings = open_store(f"{cloud.new_url()}?account={azurite.ACCOUNT}&endpoint={endpoint}")
    by_settings.create("a", b"1")
    assert by_settings.read("a", limit_bytes=1) == b"1"


def test_what_azure_refuses_is_said(cloud: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that is missing, a wrong key, nobody: three errors, and none is an empty directory."""
    missing = open_store(f"az://no-{BUCKET}/run")
    for call in (
        lambda: missing.list(""),
        lambda: missing.create("a", b"x"),
        lambda: missing.read("a", limit_bytes=1),
        lambda: missing.exists(""),
    ):
        with pytest.raises(AccessError, match="there is no such bucket"):
            call()
    nobody = open_store(f"{cloud.new_url()}?anonymous=true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "AAAA")
    for store in (nobody, open_store(cloud.new_url())):
        with pytest.raises(AccessError, match="is not permitted"):
            store.list("")
    assert not any(
        "authorization" in r.headers for r in cloud.proxy.requests if nobody.root.rpartition("/")[2] in r.target
    )


@pytest.mark.slow
def test_stock_orbax_has_no_files_in_azure(cloud: Bucket) -> None:
    """It reads no such path, so none are written for it."""
    url = cloud.new_url()
    save(url, 1)
    names = {file.path.rpartition("/")[2] for file in open_store(url).files("1")}
    assert not names & {"commit_success.txt", "manifest.ocdbt", "_CHECKPOINT_METADATA"}
