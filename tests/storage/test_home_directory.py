"""`~` at the start of a path is the home directory, as in a shell; in a URL it is nothing special."""

import pathlib

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import storage
from epochckpt.cli import main
from epochckpt.jobs import stop


def test_a_tilde_is_the_home_directory_wherever_a_path_is_taken(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Managers, `inspect`, `follow`, `export`, `import_`, metadata handlers, stop conditions, uploads, the command."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    with ec.CheckpointManager("~/run") as manager:
        assert manager.save(0, args=ocp.args.StandardSave({"w": np.ones(2)}))
        manager.wait_until_finished()
        assert manager.directory == home / "run"
    with ec.CheckpointManager(pathlib.Path("~") / "other") as manager:
        assert list(manager.restore(0, directory="~/run")) == ["w"]
    assert list(ec.inspect("~/run")) == [0]
    assert list(ec.follow("~/run", timeout_secs=0)) == [0]
    ec.export("~/run", 0, "~/out", "safetensors")
    assert (home / "out").is_dir()
    ec.import_("~/out", "~/run", 1)
    assert main.main(["ls", "~/run", "--json"]) == 0
    assert str(home / "run") in capsys.readouterr().out
    assert ec.CopyUpload("~/copy").destination == str(home / "copy")
    (home / "stop").touch()
    assert ec.stop.file_exists("~/stop").holds(
        stop.Context(epoch=1, metrics={}, workspace={}, elapsed_secs=0.0, total_secs=0.0)
    )
    (home / "a.json").write_text('{"epochckpt": "last_epoch", "version": 1, "epoch": 4}')
    assert ec.metadata.JsonMetadataHandler("~/a.json").last_epoch() == 4
    assert ec.caffe2.CheckpointManager("~/blobs", "trainer", "epochckpt").db_prefix == str(home / "blobs")
    assert list(here.iterdir()) == []


def test_a_tilde_in_a_url_or_further_on_is_nothing_special(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a shell, `./~x` is how a folder of that name is written."""
    monkeypatch.setenv("HOME", "/home/somebody")
    assert storage.open_store("memory://~/run").root == "memory://~/run"
    assert storage.open_store("/data/~x").root == "/data/~x"
    assert storage.open_store("./~x").root.endswith("/~x")
    assert not storage.open_store("./~x").root.startswith("/home/somebody")
    assert storage.open_store("~/run").root == "/home/somebody/run"
