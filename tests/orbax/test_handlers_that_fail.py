"""Handlers of other people that overlap, hang, fail, or change between runs; and arguments that do not fit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath
from google.protobuf import empty_pb2, struct_pb2

import epochckpt as ec
from epochckpt.arrays import writer
from epochckpt.format import DataFile, NodeEntry, paths
from epochckpt.saving.commit_record import commit_record
from epochckpt.saving.reports import NodeReport, ProcessReport
from epochckpt.storage import PosixStore, Store
from epochckpt.testing import Faults

Composite, Save = ocp.args.Composite, ocp.args.StandardSave
WAIT_SECS = 30.0
STATE = {"w": jnp.arange(6.0)}


class Later:
    """A future that runs a call when it is waited for."""

    def __init__(self, call: Any):
        self.call = call

    def result(self, timeout: float | None = None) -> Any:
        return self.call()


class TextHandler(ocp.AsyncCheckpointHandler):
    """Keeps what it is to write in itself until its future, and counts in `finalize`: as careless as people are."""

    def __init__(self, scale: float = 1.0):
        self.scale, self.text, self.closed = scale, "", 0

    async def async_save(self, directory: epath.Path, args: Any) -> Any:
        self.text = str(args.item * self.scale)
        return [Later(lambda: (directory / "text").write_text(self.text))]

    def save(self, directory: epath.Path, args: Any) -> None:
        raise AssertionError("the asynchronous way is there")

    def restore(self, directory: epath.Path, args: Any = None) -> Any:
        return float((directory / "text").read_text()) / self.scale

    def finalize(self, directory: epath.Path) -> None:
        (directory / "again").write_text(self.text)

    def close(self) -> None:
        self.closed += 1


@ocp.args.register_with_handler(TextHandler, for_save=True)
@dataclasses.dataclass
class TextSave(ocp.args.CheckpointArgs):
    item: float


@ocp.args.register_with_handler(TextHandler, for_restore=True)
@dataclasses.dataclass
class TextRestore(ocp.args.CheckpointArgs):
    pass


class OtherHandler(TextHandler):
    """Another one, for items that change their handler."""


@ocp.args.register_with_handler(OtherHandler, for_save=True)
@dataclasses.dataclass
class OtherSave(ocp.args.CheckpointArgs):
    item: float


@ocp.args.register_with_handler(OtherHandler, for_restore=True)
@dataclasses.dataclass
class OtherRestore(ocp.args.CheckpointArgs):
    pass


def registry(handler: Any, item: str | None = None) -> Any:
    """A registry with one handler, for one item or for any."""
    found = ocp.handlers.DefaultCheckpointHandlerRegistry()
    found.add(item, TextSave, handler)
    found.add(item, TextRestore, handler)
    return found


@pytest.fixture
def folders(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Where handlers are given folders; in the end there is none left."""
    place = tmp_path / "local"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    until = time.monotonic() + WAIT_SECS
    while list(place.glob("epochckpt-*")) and time.monotonic() < until:
        threading.Event().wait(0.01)
    assert list(place.glob("epochckpt-*")) == []


def test_a_handler_is_done_with_one_save_before_it_gets_the_next(tmp_path: pathlib.Path, folders: pathlib.Path) -> None:
    """What it keeps in itself until its future or `finalize` is not that of the save after it."""
    with ec.CheckpointManager(tmp_path / "run", item_handlers={"x": TextHandler()}) as manager:
        for epoch in range(4):
            manager.save(epoch, args=Composite(x=TextSave(epoch)))
        manager.wait_until_finished()
        assert [manager.restore(e, args=Composite(x=TextRestore())).x for e in range(4)] == [0, 1, 2, 3]
    texts = [(tmp_path / "run" / str(e) / "x" / "again").read_text() for e in range(4)]
    assert texts == ["0.0", "1.0", "2.0", "3.0"]


@pytest.mark.parametrize("item", ["x", None])
def test_restore_without_arguments_takes_the_configured_handler(tmp_path: pathlib.Path, item: str | None) -> None:
    """The registry's, for this item or for any; not a new one with other settings. `close` reaches it."""
    handler = TextHandler(8)
    with ec.CheckpointManager(tmp_path, handler_registry=registry(handler, item)) as manager:
        manager.save(0, args=Composite(x=TextSave(3.0)))
        manager.wait_until_finished()
        assert manager.restore(0).x == manager.restore(0, args=Composite(x=TextRestore())).x == 3.0
    assert handler.closed == 1


def test_a_handler_that_is_false_is_a_handler(tmp_path: pathlib.Path) -> None:
    """Only None is none."""

    class Empty(TextHandler):
        def __len__(self) -> int:
            return 0

    handler = Empty(4)
    with ec.CheckpointManager(tmp_path, handler_registry=registry(handler, "x")) as manager:
        manager.save(0, args=Composite(x=TextSave(3.0)))
        manager.wait_until_finished()
        assert manager.restore(0, args=Composite(x=TextRestore())).x == 3.0


def test_an_item_may_change_its_handler_from_epoch_to_epoch(tmp_path: pathlib.Path) -> None:
    """Each epoch is restored by the one that saved it."""
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch, args in enumerate((TextSave(1.0), OtherSave(2.0), ocp.args.JsonSave({"a": 3}))):
            manager.save(epoch, args=Composite(x=args))
            manager.wait_until_finished()
        assert [manager.restore(e).x for e in range(3)] == [1.0, 2.0, {"a": 3}]
        with pytest.raises(ec.errors.InvalidArgumentError, match="was saved by OtherHandler; TextRestore does not"):
            manager.restore(1, args=Composite(x=TextRestore()))


@pytest.mark.parametrize("where", ["future", "finalize"])
@pytest.mark.parametrize("how", [asyncio.CancelledError, SystemExit, ValueError])
def test_whatever_a_handler_raises_fails_its_save_and_no_other(
    tmp_path: pathlib.Path, folders: pathlib.Path, where: str, how: type[BaseException]
) -> None:
    """Also what is no Exception; the reason is told, and nothing is left behind."""

    def fail(*_: Any) -> Any:
        raise how("on purpose")

    class Failing(TextHandler):
        async def async_save(self, directory: epath.Path, args: Any) -> Any:
            return [Later(fail)] if where == "future" else None

        def finalize(self, directory: epath.Path) -> None:
            fail()

    with ec.CheckpointManager(tmp_path / "run", handler_registry=registry(Failing())) as manager:
        manager.save(0, args=Composite(x=TextSave(0), state=Save(STATE)))
        with pytest.raises(ec.errors.SaveError, match=r"item 'x': its handler failed: .*on purpose"):
            manager.wait_until_finished()
        manager.save(1, args=Composite(state=Save(STATE)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1]


@pytest.mark.parametrize("where", ["future", "finalize"])
def test_a_handler_that_hangs_fails_its_save_in_time(tmp_path: pathlib.Path, folders: pathlib.Path, where: str) -> None:
    """The next save, without it, is committed; its folder goes when it ends at last."""
    gate = threading.Event()

    class Hanging(TextHandler):
        async def async_save(self, directory: epath.Path, args: Any) -> Any:
            return [Later(gate.wait)] if where == "future" else None

        def finalize(self, directory: epath.Path) -> None:
            gate.wait()

    storage = ec.StorageOptions(save_timeout_secs=1.0)
    with ec.CheckpointManager(tmp_path / "run", handler_registry=registry(Hanging()), storage=storage) as manager:
        manager.save(0, args=Composite(x=TextSave(0), state=Save(STATE)))
        with pytest.raises(ec.errors.SaveError, match=r"item 'x': its handler failed: .*did not end within 1 s"):
            manager.wait_until_finished()
        for epoch in range(1, 50):  # a busy machine may take longer than a second
            manager.save(epoch, args=Composite(state=Save(STATE)))
            with contextlib.suppress(ec.errors.SaveError):
                manager.wait_until_finished()
                break
        assert manager.all_steps() == [epoch]
        assert list(folders.glob("epochckpt-*"))
        gate.set()


def test_a_second_handler_that_fails_leaves_nothing_of_the_first(tmp_path: pathlib.Path, folders: pathlib.Path) -> None:
    """`save` raises, and the folder of the handler that had begun is gone."""

    class Bad(TextHandler):
        async def async_save(self, directory: epath.Path, args: Any) -> Any:
            raise ValueError("at once")

    handlers = registry(Bad(), "bad")
    with ec.CheckpointManager(tmp_path / "run", handler_registry=handlers) as manager:
        for epoch in range(3):
            with pytest.raises(ValueError, match="at once"):
                manager.save(epoch, args=Composite(a=OtherSave(1.0), bad=TextSave(0)))
        assert manager.all_steps() == []


def test_a_file_name_that_changed_in_the_configuration_is_no_damage(tmp_path: pathlib.Path) -> None:
    """Saved under another name: read nevertheless, and the epochs stay what they are."""
    for epoch, name in enumerate([None, "settings.json", "a\u00a0b.json"]):
        given = {"config": ocp.JsonCheckpointHandler(name)}
        with ec.CheckpointManager(tmp_path, item_handlers=given) as manager:
            manager.save(epoch, args=Composite(config=ocp.args.JsonSave({"a": epoch})))
    for handler in (None, ocp.JsonCheckpointHandler("other.json")):
        with ec.CheckpointManager(tmp_path, item_handlers=handler and {"config": handler}) as manager:
            args = Composite(config=ocp.args.JsonRestore())
            assert [manager.restore(e, args=args).config["a"] for e in range(3)] == [0, 1, 2]
            assert manager.restore(None, args=args).config == {"a": 2}
            assert manager.all_steps() == [0, 1, 2]
    with ec.CheckpointManager(tmp_path, item_handlers={"config": ocp.JsonCheckpointHandler("../x")}) as manager:
        with pytest.raises(ec.errors.InvalidArgumentError, match=r"'\.\./x'.* is no file name"):
            manager.save(9, args=Composite(config=ocp.args.JsonSave({})))
        assert manager.all_steps() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        *[(name, True) for name in ("a", "ä b/c", "a\u3000b")],
        *[
            (name, False)
            for name in ("", "/a", "a//b", "a/../b", "a\nb", "a\x00", "\ud800", "x" * 256, "x/" * 600 + "x")
        ],
    ],
)
def test_names_of_handlers_files(name: str, fine: bool) -> None:
    """What a path inside an item's folder may be."""
    assert paths.is_file_path(name) is fine


def test_a_file_where_another_node_has_a_folder_fails_the_attempt(tmp_path: pathlib.Path, faults: Faults) -> None:
    """No epoch is committed that could not be restored."""
    with ec.CheckpointManager(tmp_path, handler_registry=registry(TextHandler())) as manager:
        with faults.hold(Store.rename):
            manager.save(0, args=Composite(x=TextSave(1.0)))
            (save,) = manager.components.saves.queue.pending()
        manager.wait_until_finished()
        for written in (("a", "a/b"), ("a/b", "a")):
            for node, name in enumerate(written):
                entry = NodeEntry(f"n{node}", node, 1, "", (DataFile("k", 0, 1, name=name),))
                save.reports.add(node, ProcessReport("", (NodeReport(entry, {}),)))
            with pytest.raises(ec.errors.SaveError, match=r"nodes n0 and n1 both wrote k/a"):
                commit_record(save, "id", objects=False)


def test_a_proto_whose_text_would_lose_something_is_refused(tmp_path: pathlib.Path) -> None:
    """Fields that this class does not know are in its bytes, not in the text that Orbax's handler writes."""
    unknown = empty_pb2.Empty()
    unknown.ParseFromString(struct_pb2.Value(string_value="x").SerializeToString())
    with (
        ec.CheckpointManager(tmp_path) as manager,
        pytest.raises(ec.errors.InvalidArgumentError, match=r"item 'default': Orbax's format.* would lose fields"),
    ):
        manager.save(0, args=ocp.args.ProtoSave(unknown))


@pytest.mark.parametrize("size", [10, 1000])
def test_a_file_that_shrinks_while_it_is_copied_is_an_error(tmp_path: pathlib.Path, size: int) -> None:
    """Small or large: nothing short is recorded with its old size."""

    class Shrunk(io.BytesIO):
        def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
            return size if whence == os.SEEK_END else super().seek(offset, whence)

    source: Any = types.SimpleNamespace(open=lambda mode: Shrunk(b"abc"))
    store = PosixStore(tmp_path)
    store.make_folder("item")
    with pytest.raises(OSError, match="became shorter"):
        writer.write_file(store, "", "item", "x", source, 100)


def test_an_unknown_record_of_files_is_no_way_out(tmp_path: pathlib.Path) -> None:
    """A hostile name in a node's record is refused when it is read, also if everything else fits."""
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=Composite(config=ocp.args.JsonSave({"a": 1})))
    path = tmp_path / "0" / "epoch.json"
    data = path.read_bytes().replace(b'"metadata"]', b'"../../x"]')
    zeros = b"0" * 16
    start = data.index(b"xxh3:") + 5
    blank = data[:start] + zeros + data[start + 16 :]
    from epochckpt.format import checksums

    path.write_bytes(data[:start] + f"{checksums.xxh3(blank):016x}".encode() + data[start + 16 :])
    assert json.loads(path.read_bytes())["nodes"][0][5][0][5] == "../../x"
    with ec.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == []
        assert manager.status(0).state == "damaged"
