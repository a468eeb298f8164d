"""Items that are not pytrees of arrays: handlers of Orbax's and of other people, and values that differ per node."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import threading
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from google.protobuf import struct_pb2

import epochckpt as ec
from tests.support import handler_jobs
from tests.support.handler_jobs import Reader, ReaderHandler, ReaderRestore, ReaderSave
from tests.support.processes import run_worker

STATE = {"w": jnp.arange(6.0)}


class NotesHandler(ocp.AsyncCheckpointHandler):
    """Writes lines into files, in the background, and some of them into a folder."""

    def __init__(self, gate: threading.Event | None = None):
        self.gate, self.closed, self.finalized = gate, False, 0

    async def async_save(self, directory: epath.Path, args: Any) -> Any:
        lines = list(args.lines)
        handler = self

        class Later:
            def result(self, timeout: float | None = None) -> None:
                if handler.gate is not None and not handler.gate.wait(timeout):
                    raise TimeoutError
                (directory / "sub folder").mkdir()
                (directory / "sub folder" / "rest.txt").write_text("\n".join(lines[1:]))
                (directory / "first.txt").write_text(lines[0])

        return [Later()]

    def save(self, directory: epath.Path, args: Any) -> None:
        raise AssertionError("the asynchronous way is there")

    def restore(self, directory: epath.Path, args: Any = None) -> Any:
        return [(directory / "first.txt").read_text(), *(directory / "sub folder" / "rest.txt").read_text().split("\n")]

    def metadata(self, directory: epath.Path) -> Any:
        return {"files": sorted(p.name for p in directory.iterdir())}

    def finalize(self, directory: epath.Path) -> None:
        self.finalized += 1
        (directory / "done").write_text("")

    def close(self) -> None:
        self.closed = True


@ocp.args.register_with_handler(NotesHandler, for_save=True)
@dataclasses.dataclass
class NotesSave(ocp.args.CheckpointArgs):
    lines: list[str]


@ocp.args.register_with_handler(NotesHandler, for_restore=True)
@dataclasses.dataclass
class NotesRestore(ocp.args.CheckpointArgs):
    pass


NOTES = ["one", "two", "three"]


@pytest.fixture(params=["posix", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """A directory on each kind of storage."""
    return str(tmp_path) if request.param == "posix" else f"memory://{tmp_path.name}-{id(tmp_path)}/"


def save(directory: Any, epoch: int = 0, **items: Any) -> None:
    with ec.CheckpointManager(directory) as manager:
        manager.save(epoch, args=ocp.args.Composite(**items))


def test_a_registered_handler_saves_in_the_background_and_restores(place: str) -> None:
    """Its files, folders among them, are kept with checksums and come back, also to a manager that knows nothing."""
    save(place, notes=NotesSave(NOTES), state=ocp.args.StandardSave(STATE))
    with ec.CheckpointManager(place) as manager:
        assert manager.restore(0, args=ocp.args.Composite(notes=NotesRestore())).notes == NOTES
        everything = manager.restore(0)
        assert everything.notes == NOTES
        np.testing.assert_array_equal(everything.state["w"], STATE["w"])
        assert manager.verify(0).ok
        assert manager.item_metadata(0).notes == {"files": ["done", "first.txt", "sub folder"]}
        assert manager.metadata(0).item_handlers["notes"] == f"{__name__}.NotesHandler"


def test_handler_files_lie_where_people_look_for_them(tmp_path: pathlib.Path) -> None:
    """`dir/<step>/<item>/…` holds what the handler wrote, and the item is the default one, too."""
    save(tmp_path, notes=NotesSave(NOTES))
    assert (tmp_path / "0" / "notes" / "first.txt").read_text() == "one"
    assert (tmp_path / "0" / "notes" / "sub folder" / "rest.txt").read_text() == "two\nthree"
    assert (tmp_path / "0" / "process_0" / "notes" / "first.txt").is_file()
    with ec.CheckpointManager(tmp_path / "one") as manager:
        manager.save(0, args=NotesSave(NOTES))
        manager.wait_until_finished()
        assert manager.restore(0) == NOTES
        assert manager.restore(0, args=NotesRestore()) == NOTES


def test_stock_orbax_restores_what_a_handler_wrote(tmp_path: pathlib.Path) -> None:
    """The same handler under Orbax's own manager reads it."""
    save(tmp_path, notes=NotesSave(NOTES), reader=ReaderSave(Reader(7)))
    reader = Reader()
    with ocp.CheckpointManager(tmp_path) as manager:
        got = manager.restore(0, args=ocp.args.Composite(notes=NotesRestore(), reader=ReaderRestore(reader)))
    assert got.notes == NOTES
    assert reader.position == 7


def test_the_training_thread_does_not_wait_for_a_handlers_future(tmp_path: pathlib.Path) -> None:
    """`save` returns while an asynchronous handler still writes; the epoch appears when it has ended."""
    gate = threading.Event()
    handler = NotesHandler(gate)
    with ec.CheckpointManager(tmp_path, item_handlers={"notes": handler}) as manager:
        lines = list(NOTES)
        manager.save(0, args=ocp.args.Composite(notes=NotesSave(lines)))
        lines[0] = "changed"
        assert manager.is_saving_in_progress()
        assert manager.latest_step() is None
        gate.set()
        manager.wait_until_finished()
        assert manager.restore(0, args=ocp.args.Composite(notes=NotesRestore())).notes == NOTES
        assert handler.finalized == 1
    assert handler.closed


def test_a_registry_chooses_the_handler(tmp_path: pathlib.Path) -> None:
    """`handler_registry` by item, and for any item; it is not changed."""
    mine, anyone = NotesHandler(), NotesHandler()
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("mine", NotesSave, mine)
    registry.add("mine", NotesRestore, mine)
    registry.add(None, NotesSave, anyone)
    registry.add(None, NotesRestore, anyone)
    registry.add("state", ocp.args.StandardSave)
    registry.add("state", ocp.args.StandardRestore)
    with ec.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        args = {"mine": NotesSave(NOTES), "other": NotesSave(NOTES[::-1]), "state": ocp.args.StandardSave(STATE)}
        manager.save(0, args=ocp.args.Composite(**args, config=ocp.args.JsonSave({"a": 1})))
        manager.wait_until_finished()
        assert (mine.finalized, anyone.finalized) == (1, 1)
        got = manager.restore(0)
        assert (got.mine, got.other, got.config) == (NOTES, NOTES[::-1], {"a": 1})
    assert len(registry.get_all_entries()) == 6


def test_orbax_handlers_select_our_engine(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unmodified array handlers with options of their own are never run, and one line says so; a JSON handler's file
    name is kept."""
    caplog.set_level("INFO", "absl")
    for kind in (ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler, ocp.ArrayCheckpointHandler):
        for name in ("save", "async_save", "restore"):
            monkeypatch.setattr(kind, name, None)
    given = {
        "state": ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True),
        "array": ocp.ArrayCheckpointHandler(),
        "config": ocp.JsonCheckpointHandler("settings.json"),
    }
    with ec.CheckpointManager(tmp_path, item_handlers=given) as manager:
        array = ocp.args.ArraySave(jnp.ones(3))
        args = {"state": ocp.args.PyTreeSave(STATE), "array": array, "config": ocp.args.JsonSave({"a": 1})}
        manager.save(0, args=ocp.args.Composite(**args))
        manager.wait_until_finished()
        got = manager.restore(0)
    np.testing.assert_array_equal(got.state["w"], STATE["w"])
    np.testing.assert_array_equal(got.array, np.ones(3))
    assert got.config == {"a": 1}
    assert json.loads((tmp_path / "0" / "config" / "settings.json").read_text()) == {"a": 1}
    assert (tmp_path / "0" / "process_0" / "state.safetensors").is_file()
    assert sum("items array, state: Orbax's array handlers choose" in r.getMessage() for r in caplog.records) == 1


def test_a_handler_that_changes_orbaxs_engine_is_refused(tmp_path: pathlib.Path) -> None:
    """By name, at construction or when its argument comes; nothing is begun."""

    class MyPyTree(ocp.PyTreeCheckpointHandler):
        def restore(self, directory: epath.Path, *args: Any, **kwargs: Any) -> Any:
            return {}

    @ocp.args.register_with_handler(MyPyTree, for_save=True)
    @dataclasses.dataclass
    class MySave(ocp.args.CheckpointArgs):
        item: Any

    with pytest.raises(ec.errors.UnsupportedError, match=r"MyPyTree changes PyTreeCheckpointHandler, a part of Orbax"):
        ec.CheckpointManager(tmp_path, item_handlers={"state": MyPyTree()})
    with ec.CheckpointManager(tmp_path) as manager:
        with pytest.raises(ec.errors.UnsupportedError, match="MyPyTree"):
            manager.save(0, args=ocp.args.Composite(state=MySave(STATE)))
        with pytest.raises(ec.errors.UnsupportedError, match="CompositeCheckpointHandler"):
            manager.save(0, args=ocp.args.Composite(state=ocp.args.Composite(a=ocp.args.JsonSave({}))))
        assert manager.all_steps() == []


class Renamed(ocp.PyTreeCheckpointHandler):
    """Orbax's handler by another name."""


@ocp.args.register_with_handler(Renamed, for_save=True)
class RenamedSave(ocp.args.PyTreeSave):
    """The arguments of the handler for saving."""


@ocp.args.register_with_handler(Renamed, for_restore=True)
class RenamedRestore(ocp.args.PyTreeRestore):
    """The arguments of the handler for restoring."""


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_a_handler_that_adds_nothing_to_one_of_orbaxs_is_that_one(tmp_path: pathlib.Path) -> None:
    """In each form in which handlers are given, with its own arguments and Orbax's. Stock Orbax reads the epochs."""
    plain = {"item_handlers": Renamed()}, (ocp.args.PyTreeSave, ocp.args.PyTreeRestore)
    own = RenamedSave, RenamedRestore
    known = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for args in own:
        known.add(None, args, Renamed())
    for step, (given, (save_args, restore_args)) in enumerate([plain, ({}, own), ({"handler_registry": known}, own)]):
        with ec.CheckpointManager(tmp_path, **given) as manager:
            manager.save(step, args=save_args(STATE))
            manager.wait_until_finished()
            np.testing.assert_array_equal(manager.restore(step, args=restore_args())["w"], STATE["w"])
            np.testing.assert_array_equal(manager.restore(step)["w"], STATE["w"])
    with ec.CheckpointManager(tmp_path, ocp.Checkpointer(Renamed())) as manager:
        manager.save(3, STATE)
        np.testing.assert_array_equal(manager.restore(3)["w"], STATE["w"])
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in range(4):
            np.testing.assert_array_equal(manager.restore(step)["w"], STATE["w"])


def test_a_handler_of_orbaxs_that_is_no_part_of_its_engine_is_run(tmp_path: pathlib.Path) -> None:
    """Such as the one of its test tools, whose save fails in the background."""
    tools = ocp.test_utils
    with futures.ThreadPoolExecutor(1) as executor:
        handler = tools.ErrorCheckpointHandler(ocp.PyTreeCheckpointHandler(), executor=executor)
        with ec.CheckpointManager(tmp_path, item_handlers=handler) as manager:
            manager.save(0, args=tools.ErrorSaveArgs(STATE))
            with pytest.raises(ec.errors.SaveError, match="its handler failed") as caught:
                manager.wait_until_finished()
            assert manager.all_steps() == []
    assert isinstance(caught.value.__cause__, SystemError)


@pytest.mark.parametrize("named", [True, False])
def test_arguments_of_another_handler_are_refused(named: bool, tmp_path: pathlib.Path) -> None:
    """As in stock Orbax, where the item has a handler: what takes them here could not be run with stock Orbax."""
    handler = ocp.PyTreeCheckpointHandler()

    def item(args: Any) -> Any:
        return ocp.args.Composite(state=args) if named else args

    with ec.CheckpointManager(tmp_path, item_handlers={"state": handler} if named else handler) as manager:
        for args in (ocp.args.StandardSave(STATE), ocp.args.ArraySave(STATE["w"])):
            with pytest.raises(ValueError, match=r"has a PyTreeCheckpointHandler, which takes PyTreeSave.* got a "):
                manager.save(0, args=item(args))
        manager.save(0, args=item(ocp.args.PyTreeSave(STATE)))
        manager.wait_until_finished()
        with pytest.raises(ValueError, match=r"PyTreeRestore.*got a StandardRestore.*any registered handler"):
            manager.restore(0, args=item(ocp.args.StandardRestore()))
        assert manager.restore(0, args=item(ocp.args.PyTreeRestore())) is not None


def test_arguments_without_a_handler_and_contradictions_are_refused(tmp_path: pathlib.Path) -> None:
    """An argument class nobody registered, handlers given twice, an argument for another kind of item."""

    @dataclasses.dataclass
    class Lonely(ocp.args.CheckpointArgs):
        item: Any = None

    class NoArgs(ocp.CheckpointHandler):
        def save(self, directory: Any) -> None: ...

        def restore(self, directory: Any) -> None: ...

    with pytest.raises(ec.errors.UnsupportedError, match=r"NoArgs has no argument classes; register them"):
        ec.CheckpointManager(tmp_path, item_handlers={"x": NoArgs()})
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    with pytest.raises(ec.errors.InvalidArgumentError, match="item_handlers and handler_registry exclude each other"):
        ec.CheckpointManager(tmp_path, item_handlers={"x": NotesHandler()}, handler_registry=registry)
    with (
        ec.CheckpointManager(tmp_path / "typed", item_handlers={"x": NotesHandler()}) as manager,
        pytest.raises(
            ec.errors.InvalidArgumentError, match=r"has a NotesHandler, which takes NotesSave .* a StandardS"
        ),
    ):
        manager.save(0, args=ocp.args.Composite(x=ocp.args.StandardSave(STATE)))
    with ec.CheckpointManager(tmp_path) as manager:
        with pytest.raises(ec.errors.InvalidArgumentError, match=r"Lonely has no handler; register it"):
            manager.save(0, args=ocp.args.Composite(x=Lonely()))
        with pytest.raises(ec.errors.InvalidArgumentError, match="NotesRestore is no argument for saving"):
            manager.save(0, args=ocp.args.Composite(x=NotesRestore()))
        with pytest.raises(ec.errors.InvalidArgumentError, match="StandardRestoreArgs is no argument for saving"):
            manager.save(0, args=ocp.args.Composite(x=ocp.args.StandardRestore(STATE)))
        items = {"notes": NotesSave(NOTES), "state": ocp.args.StandardSave(STATE), "config": ocp.args.JsonSave({})}
        manager.save(0, args=ocp.args.Composite(**items, own=ec.args.NodeSave({"a": 1})))
        manager.wait_until_finished()
        wrong = {
            "notes": ocp.args.StandardRestore(),
            "state": NotesRestore(),
            "config": ocp.args.StandardRestore(),
            "own": ocp.args.StandardRestore(),
        }
        for name, args in wrong.items():
            with pytest.raises(ec.errors.InvalidArgumentError, match=f"item '{name}' was saved by .* does not restore"):
                manager.restore(0, args=ocp.args.Composite(**{name: args}))
        with pytest.raises(ec.errors.InvalidArgumentError, match="NodeRestore does not restore"):
            manager.restore(0, args=ocp.args.Composite(config=ec.args.NodeRestore()))


@pytest.mark.slow
def test_an_item_of_an_unknown_handler_says_what_to_pass(tmp_path: pathlib.Path) -> None:
    """Without the handler's class in this process the other items are still there."""
    save(tmp_path, notes=NotesSave(NOTES), state=ocp.args.StandardSave(STATE))
    script = f"""
import epochckpt as ec, orbax.checkpoint as ocp
with ec.CheckpointManager({str(tmp_path)!r}) as manager:
    try:
        manager.restore(0)
    except ec.errors.InvalidArgumentError as error:
        print(error)
    print(manager.restore(0, args=ocp.args.Composite(state=None)).state["w"].sum(), manager.item_metadata(0).notes)
"""
    import subprocess
    import sys

    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "was saved by" in out
    assert "NotesHandler, which is not known here: pass its restore argument" in out
    assert out.strip().endswith("15.0 None")


def test_a_handler_that_fails_costs_the_save_and_nothing_else(tmp_path: pathlib.Path) -> None:
    """On the training thread its error is raised as it is; in the background it fails the attempt, by item."""

    class Failing(NotesHandler):
        async def async_save(self, directory: epath.Path, args: Any) -> Any:
            if args.lines == ["now"]:
                raise ZeroDivisionError("at once")

            class Later:
                def result(self, timeout: float | None = None) -> None:
                    raise ZeroDivisionError("later")

            return [Later()]

    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(None, NotesSave, Failing())
    with ec.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        with pytest.raises(ZeroDivisionError, match="at once"):
            manager.save(0, args=ocp.args.Composite(notes=NotesSave(["now"]), state=ocp.args.StandardSave(STATE)))
        manager.save(1, args=ocp.args.Composite(notes=NotesSave(["later"]), state=ocp.args.StandardSave(STATE)))
        with pytest.raises(ec.errors.SaveError, match=r"item 'notes': its handler failed: .*later"):
            manager.wait_until_finished()
        manager.save(2, args=ocp.args.Composite(state=ocp.args.StandardSave(STATE)))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]


def test_what_a_handler_leaves_must_be_plain_files(tmp_path: pathlib.Path) -> None:
    """A symlink could point anywhere by the time it is read: the attempt fails, by name."""

    class Linking(NotesHandler):
        async def async_save(self, directory: epath.Path, args: Any) -> Any:
            pathlib.Path(directory / "link").symlink_to("/etc/hostname")

    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("notes", NotesSave, Linking())
    with ec.CheckpointManager(tmp_path, handler_registry=registry) as manager:
        manager.save(1, args=ocp.args.Composite(notes=NotesSave(NOTES)))
        with pytest.raises(ec.errors.SaveError, match=r"'link', which cannot be kept"):
            manager.wait_until_finished()


def test_a_damaged_handler_file_never_reaches_the_handler(tmp_path: pathlib.Path) -> None:
    """One changed byte of a large file: an error that names it; `restore(None)` falls back."""
    big = ["x" * 3_000_000, "y" * 6_000_000]
    for epoch in (0, 1):
        save(tmp_path, epoch, notes=NotesSave(big))
    path = tmp_path / "1" / "process_0" / "notes" / "sub folder" / "rest.txt"
    data = bytearray(path.read_bytes())
    data[5_000_000] ^= 1
    path.write_bytes(data)
    with ec.CheckpointManager(tmp_path) as manager:
        assert not manager.verify(1).ok
        with pytest.raises(ec.errors.DamagedError, match=r"rest\.txt.*bytes 4194304-6000000"):
            manager.restore(1)
        assert manager.restore(None).notes == big
        assert manager.all_steps() == [0]


@pytest.mark.parametrize("verify", [True, False])
def test_verify_finds_every_damaged_handler_file(tmp_path: pathlib.Path, verify: bool) -> None:
    """One file hides no other, and a manager whose restores do not verify still does so when it is asked to."""
    save(tmp_path, notes=NotesSave(NOTES))
    for name in ("first.txt", "sub folder/rest.txt"):
        (tmp_path / "0" / "process_0" / "notes" / name).write_bytes(b"\7" * len(("one", "two\nthree")["sub" in name]))
    with ec.CheckpointManager(tmp_path, storage=ec.StorageOptions(verify=verify)) as manager:
        damage = [str(error) for error in manager.verify(0).damage]
    assert [("first.txt" in each, "rest.txt" in each) for each in damage] == [(True, False), (False, True)], damage


def test_protos_are_saved_and_restored(place: str) -> None:
    """ProtoSave/Restore, with the class given for restoring."""
    proto = struct_pb2.Struct()
    proto.update({"name": "héllo", "layers": [1, 2, 3]})
    save(place, config=ocp.args.ProtoSave(proto))
    with ec.CheckpointManager(place) as manager:
        args = ocp.args.Composite(config=ocp.args.ProtoRestore(struct_pb2.Struct))
        assert manager.restore(0, args=args).config == proto
        with pytest.raises(ec.errors.InvalidArgumentError, match="ProtoRestoreArgs cannot be made without arguments"):
            manager.restore(0)
        with pytest.raises(ec.errors.InvalidArgumentError, match="is no ListValue"):
            manager.restore(0, args=ocp.args.Composite(config=ocp.args.ProtoRestore(struct_pb2.ListValue)))
        with pytest.raises(ec.errors.InvalidArgumentError, match="expects a protobuf message, got dict"):
            manager.save(1, args=ocp.args.Composite(config=ocp.args.ProtoSave({})))  # type: ignore[arg-type]


KEYS = {
    "typed": jax.random.key(3),
    "rbg": jax.random.key(3, impl="rbg"),
    "raw": jax.random.PRNGKey(5),
    "several": jax.random.split(jax.random.key(1), 4),
}


def test_random_keys_of_jax_and_numpy(place: str) -> None:
    """JaxRandomKeySave and NumpyRandomKeySave: the generators go on exactly where they were."""
    rng = np.random.RandomState(4)
    rng.normal(size=3)
    items = {name: ocp.args.JaxRandomKeySave(key) for name, key in KEYS.items()}
    items["legacy"] = ocp.args.NumpyRandomKeySave(rng.get_state())
    items["state"] = ocp.args.NumpyRandomKeySave(rng.get_state(legacy=False))  # type: ignore[arg-type]
    save(place, **items)
    expected = rng.normal(size=5)
    asked = {name: ocp.args.JaxRandomKeyRestore() for name in KEYS}
    asked |= {"legacy": ocp.args.NumpyRandomKeyRestore(), "state": ocp.args.NumpyRandomKeyRestore()}
    with ec.CheckpointManager(place) as manager:
        for got in (manager.restore(0, args=ocp.args.Composite(**asked)), manager.restore(0)):
            for name, key in KEYS.items():
                assert got[name].dtype == key.dtype
                np.testing.assert_array_equal(*(jax.random.key_data(k) for k in (got[name], key)))
            assert isinstance(got.legacy, tuple)
            for state in (got.legacy, got.state):
                again = np.random.RandomState()
                again.set_state(state)
                np.testing.assert_array_equal(again.normal(size=5), expected)
        with pytest.raises(ec.errors.InvalidArgumentError, match="'typed' was saved by JaxRandomKeyCheckpointHandler"):
            manager.restore(0, args=ocp.args.Composite(typed=ocp.args.StandardRestore()))
        with pytest.raises(ec.errors.InvalidArgumentError, match="expected a jax random key, got a int"):
            manager.save(1, args=ocp.args.Composite(k=ocp.args.JaxRandomKeySave(3)))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_stock_orbax_reads_arrays_keys_and_protos(tmp_path: pathlib.Path) -> None:
    """Items of every argument class of Orbax's lie as its own handlers expect them; nothing is left out."""
    proto = struct_pb2.Struct()
    proto.update({"a": 1.5})
    rng = np.random.RandomState(4)
    items: dict[str, Any] = {
        "array": ocp.args.ArraySave(jnp.arange(8.0)),
        "number": ocp.args.ArraySave(5),
        "config": ocp.args.ProtoSave(proto),
        "json": ocp.args.JsonSave({"b": 2}),
        "typed": ocp.args.JaxRandomKeySave(KEYS["typed"]),
        "raw": ocp.args.JaxRandomKeySave(KEYS["raw"]),
        "legacy": ocp.args.NumpyRandomKeySave(rng.get_state()),
        "tree": ocp.args.PyTreeSave(STATE, custom_metadata={"q": [1, "x"]}),
    }
    save(tmp_path, **items)
    assert json.loads((tmp_path / "0" / "epoch.json").read_bytes())["orbax_unsupported"] == {}
    with ocp.CheckpointManager(tmp_path) as manager:
        asked = {
            "array": ocp.args.ArrayRestore(),
            "number": ocp.args.ArrayRestore(),
            "config": ocp.args.ProtoRestore(struct_pb2.Struct),
            "json": ocp.args.JsonRestore(),
            "typed": ocp.args.JaxRandomKeyRestore(),
            "raw": ocp.args.JaxRandomKeyRestore(),
            "legacy": ocp.args.NumpyRandomKeyRestore(),
            "tree": ocp.args.PyTreeRestore(),
        }
        got = manager.restore(0, args=ocp.args.Composite(**asked))
        metadata = manager.item_metadata(0)
    np.testing.assert_array_equal(got.array, np.arange(8.0))
    assert got.number == 5
    assert (got.config, got.json) == (proto, {"b": 2})
    assert got.typed == KEYS["typed"]
    np.testing.assert_array_equal(got.raw, KEYS["raw"])
    again = np.random.RandomState()
    again.set_state(got.legacy)
    assert again.normal() == rng.normal()
    np.testing.assert_array_equal(got.tree["w"], STATE["w"])
    assert metadata is not None
    assert metadata["tree"].custom_metadata == {"q": [1, "x"]}


def test_an_items_own_metadata_comes_back(tmp_path: pathlib.Path) -> None:
    """`custom_metadata` of PyTreeSave and StandardSave, in `item_metadata`, which can be a restore target."""
    save(tmp_path, a=ocp.args.PyTreeSave(STATE, custom_metadata={"q": 1}), b=ocp.args.StandardSave(STATE))
    with ec.CheckpointManager(tmp_path) as manager:
        metadata = manager.item_metadata(0)
        assert metadata["a"].custom_metadata == {"q": 1}
        assert metadata["b"].custom_metadata is None
        assert metadata["a"].tree["w"].shape == metadata["a"]["w"].shape == (6,)
        assert jax.tree.map(lambda x: x.dtype, metadata["a"]).tree == {"w": np.dtype("float32")}
        got = manager.restore(0, args=ocp.args.Composite(a=ocp.args.StandardRestore(metadata["a"])))
        np.testing.assert_array_equal(got["a"]["w"], STATE["w"])
        with pytest.raises(ec.errors.InvalidArgumentError, match=r"item 'a': custom_metadata holds a set"):
            manager.save(1, args=ocp.args.Composite(a=ocp.args.StandardSave(STATE, custom_metadata={"x": {1}})))


def test_save_args_change_the_precision(tmp_path: pathlib.Path) -> None:
    """SaveArgs(dtype): floats get it; a leaf whose values it would change otherwise keeps its own."""
    tree = {
        "jax": jnp.linspace(0, 1, 7),
        "numpy": np.linspace(0, 1, 7),
        "count": jnp.int32(16_777_217),
        "narrow": np.int8([1, 2]),
        "python": 16_777_217,
    }
    wide = {"narrow": np.int32}
    save_args = {k: ocp.SaveArgs(dtype=wide.get(k, jnp.bfloat16)) for k in tree}
    save(tmp_path, state=ocp.args.PyTreeSave(tree, save_args=save_args))
    with ec.CheckpointManager(tmp_path) as manager:
        got = manager.restore(0).state
        for name in ("jax", "numpy"):
            assert got[name].dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(tree[name]).astype(jnp.bfloat16))
        assert got["narrow"].dtype == np.int32
        assert got["count"].dtype == np.int32
        assert (int(got["count"]), got["python"]) == (16_777_217, 16_777_217)
        args = ocp.args.PyTreeSave(STATE, save_args={"other": ocp.SaveArgs(dtype=jnp.bfloat16)})
        with pytest.raises(ec.errors.InvalidArgumentError, match="save_args has 'other', which the item lacks"):
            manager.save(1, args=ocp.args.Composite(state=args))


def test_node_values_of_one_process(place: str) -> None:
    """NodeSave/NodeRestore with and without a target, alone as the default item, and in `restore(step)`."""
    value = {"position": 3, "rng": np.random.default_rng(0).bit_generator.state, "array": np.arange(4)}
    with ec.CheckpointManager(place) as manager:
        manager.save(0, args=ec.args.NodeSave(value))
        manager.wait_until_finished()
        for got in (manager.restore(0), manager.restore(0, args=ec.args.NodeRestore(value))):
            assert got["rng"] == value["rng"]
            np.testing.assert_array_equal(got["array"], value["array"])
        with pytest.raises(ec.errors.MismatchError, match="position"):
            manager.restore(0, args=ec.args.NodeRestore({"array": np.arange(4)}))
        assert manager.verify(0).ok


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[Any]]:
    """What a job of two processes saved, and what each of them saw."""
    directory = tmp_path_factory.mktemp("job")
    return directory, run_worker("tests.support.handler_jobs:save_all", {"directory": str(directory)}, 2, 2)


@pytest.mark.slow
def test_every_process_keeps_what_is_its_own(job: tuple[pathlib.Path, list[Any]]) -> None:
    """An iterator per process and node-local values, saved and restored by two real processes."""
    directory, saved = job
    assert [s["ok"] for s in saved] == [True, True]
    names = [p.name for p in sorted((directory / "3" / "iter").iterdir())]
    assert names == ["process_0-of-2.json", "process_1-of-2.json"]
    assert (directory / "3" / "process_1" / "iter" / "process_1-of-2.json").is_file()
    arguments = {"directory": str(directory), "same_count": True}
    for me, got in enumerate(run_worker("tests.support.handler_jobs:restore_all", arguments, 2, 2)):
        assert got == {"config": {"lr": 0.1}, "own": True, "reader": 10 + me, "state": True}


@pytest.mark.slow
def test_two_nodes_writing_one_name_fail_the_attempt(job: tuple[pathlib.Path, list[Any]]) -> None:
    """Nobody's file is silently the one that counts; all processes hear why."""
    directory, saved = job
    for process in saved:
        assert process["steps"] == [3]
        assert "nodes process_0 and process_1 both wrote clash/state" in process["clash"]
    assert not (directory / "4").exists()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_node_values_on_another_count_need_reshard(job: tuple[pathlib.Path, list[Any]], count: int) -> None:
    """Refused without it, with both counts; with it every node gets its part. A Grain-like handler refuses itself."""
    directory, _ = job
    arguments = {"directory": str(directory), "same_count": False}
    for me, got in enumerate(
        run_worker("tests.support.handler_jobs:restore_all", arguments, count, 4 if count == 1 else 1)
    ):
        assert "was saved by 2 nodes; this job has" in got["own refused"]
        assert "another number of processes" in got["iter refused"]
        assert got["own"] == [[100, 101], 2, count], f"process {me}"
        assert got["config"] == {"lr": 0.1}


@pytest.mark.slow
def test_reshard_must_give_one_state_per_node(tmp_path: pathlib.Path, job: tuple[pathlib.Path, list[Any]]) -> None:
    """Too few states are refused instead of being dealt out somehow."""
    directory, _ = job
    manager = ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True))
    args = ocp.args.Composite(own=ec.args.NodeRestore(reshard=lambda old, n, m: [*old, None]))
    with manager, pytest.raises(ec.errors.InvalidArgumentError, match="reshard returned 3 states for 1 nodes"):
        manager.restore(3, args=args)


def test_the_module_of_jobs_is_used() -> None:
    """The handler of the jobs has no base class, as Grain's has none."""
    assert ReaderHandler.__mro__ == (ReaderHandler, object)
    assert handler_jobs.own_value()["seed"] == 100


def test_restore_gives_the_layout_that_is_asked_for(tmp_path: pathlib.Path) -> None:
    """StandardRestore(support_layout=True) with a Format in the target."""
    layout = pytest.importorskip("jax.experimental.layout")
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    turned = layout.Format(layout.Layout((1, 0)), single)
    value = jnp.arange(6.0).reshape(2, 3)
    save(tmp_path, state=ocp.args.StandardSave({"w": value, "n": 1}))
    target = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=turned), "n": 0}
    with ec.CheckpointManager(tmp_path) as manager:
        args = ocp.args.StandardRestore(target, support_layout=True)
        got = manager.restore(0, args=ocp.args.Composite(state=args))["state"]
    assert got["w"].format.layout.major_to_minor == (1, 0)
    np.testing.assert_array_equal(got["w"], value)
    assert got["n"] == 1


ALONE: dict[str, tuple[Any, Any, Any]] = {  # how to save, how to restore, how to look at it
    "Standard": (lambda: ocp.args.StandardSave(STATE), ocp.args.StandardRestore(), lambda x: x["w"].tolist()),
    "PyTree": (lambda: ocp.args.PyTreeSave(STATE), ocp.args.PyTreeRestore(), lambda x: x["w"].tolist()),
    "Array": (lambda: ocp.args.ArraySave(STATE["w"]), ocp.args.ArrayRestore(), lambda x: x.tolist()),
    "Json": (lambda: ocp.args.JsonSave({"a": [1]}), ocp.args.JsonRestore(), dict),
    "Proto": (lambda: ocp.args.ProtoSave(PROTO), ocp.args.ProtoRestore(struct_pb2.Value), lambda x: x.string_value),
    "JaxRandomKey": (
        lambda: ocp.args.JaxRandomKeySave(jax.random.key(3)),
        ocp.args.JaxRandomKeyRestore(),
        lambda x: jax.random.key_data(x).tolist(),
    ),
    "NumpyRandomKey": (
        lambda: ocp.args.NumpyRandomKeySave(np.random.RandomState(3).get_state()),
        ocp.args.NumpyRandomKeyRestore(),
        lambda x: (x[0], x[1].tolist(), x[2:]),
    ),
}
PROTO = struct_pb2.Value(string_value="x")


def test_every_argument_class_of_orbax_is_known_here() -> None:
    """A class that a newer Orbax adds cannot be forgotten."""
    found = {name.removesuffix("Save") for name in dir(ocp.args) if name.endswith("Save")}
    assert found == ALONE.keys()


@pytest.mark.parametrize("name", ALONE)
def test_every_argument_class_works_alone_and_in_composite(place: str, name: str) -> None:
    """As the unnamed item and as one of several; restored with its argument and, where that has defaults, without."""
    make, restore, look = ALONE[name]
    expected = look(make().item)
    with ec.CheckpointManager(f"{place}/alone") as alone, ec.CheckpointManager(f"{place}/several") as several:
        alone.save(0, args=make())
        several.save(0, args=ocp.args.Composite(one=make(), two=make()))
        assert look(alone.restore(0, args=restore)) == expected
        got = several.restore(0, args=ocp.args.Composite(one=restore, two=restore))
        assert (look(got.one), look(got.two)) == (expected, expected)
        if name != "Proto":  # its class must be named
            assert look(alone.restore(0)) == look(several.restore(0).two) == expected
        assert alone.verify(0).ok
        assert several.verify(0).ok
