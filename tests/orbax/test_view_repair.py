"""Damage of the Orbax view: found, told apart from damage of the epoch, and repaired."""

import dataclasses
import io
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.cli import main
from epochckpt.errors import EpochDeletedError, UnsupportedError
from epochckpt.format import EpochRecord
from epochckpt.format.parsing import parse_epoch
from epochckpt.orbax import linked_view
from epochckpt.storage import Store, open_store
from epochckpt.testing import Faults, StoreCall
from tests.support import stock_states
from tests.support.file_systems import immovable

Composite, Save = ocp.args.Composite, ocp.args.StandardSave
READ_ONLY = ocp.CheckpointManagerOptions(read_only=True)
NODES = ["first", "second"]


def items() -> Any:
    """Arrays over several parts, text and numbers; JSON; a random key; what differs per node."""
    return Composite(
        state=Save(stock_states.plain()),
        config=ocp.args.JsonSave({"a": [1]}),
        key=ocp.args.NumpyRandomKeySave(np.random.get_state()),
        own=ec.args.NodeSave({"second": {"x": jnp.ones(3)}}, by_node=True),
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Epochs 4 and 5 of two nodes."""
    directory = tmp_path_factory.mktemp("view") / "run"
    storage = ec.StorageOptions(replica_split_bytes=512, part_bytes=512)
    with ec.CheckpointManager(directory, node=NODES, storage=storage) as manager:
        for epoch in (4, 5):
            manager.save(epoch, args=items(), metrics={"loss": 0.5})
        manager.wait_until_finished()
    return directory


@pytest.fixture
def saved(pristine: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(pristine, tmp_path / "run", symlinks=True))


def verify(directory: pathlib.Path, epoch: int = 5) -> ec.Verification:
    with ec.CheckpointManager(directory, options=READ_ONLY) as manager:
        return manager.verify(epoch)


def contents(folder: pathlib.Path) -> dict[str, Any]:
    """What a folder holds: bytes of files, targets of links."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = kind
    return found


def view_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Files and links of the view in an epoch's folder: all that is no node's and no record, and the nodes' links."""
    nodes = [folder / name for name in NODES]
    found = [node / "metadata" for node in nodes]
    for path in sorted(folder.rglob("*")):
        mine = not any(node in (path, *path.parents) for node in nodes)
        if mine and path.name != "epoch.json" and (path.is_symlink() or path.is_file()):
            found.append(path)
    return found


def flip(path: pathlib.Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def into_folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


FILE_DAMAGE: dict[str, Callable[[pathlib.Path], object]] = {
    "first bit": lambda path: flip(path, 0),
    "a bit": lambda path: flip(path, 0.5),
    "last bit": lambda path: flip(path, 1),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "huge": lambda path: os.truncate(path, 1 << 40),
    "gone": lambda path: path.unlink(),
    "a folder": into_folder,
}


def relink(target: str) -> Callable[[pathlib.Path], object]:
    return lambda path: (path.unlink(), path.symlink_to(target))


LINK_DAMAGE: dict[str, Callable[[pathlib.Path], object]] = {
    "gone": lambda path: path.unlink(),
    "dangling": relink("nowhere"),
    "a loop": lambda path: relink(path.name)(path),
    "outside": relink("/etc"),
    "a folder": into_folder,
    "another file": lambda path: (path.unlink(), path.write_bytes(b"{}")),
}


def damages(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path, Callable[[pathlib.Path], object]]]:
    for path in view_of(folder):
        for name, damage in (LINK_DAMAGE if path.is_symlink() else FILE_DAMAGE).items():
            yield f"{path.relative_to(folder)}: {name}", path, damage


@pytest.mark.slow
def test_every_damage_of_the_view_is_found_and_repaired(saved: pathlib.Path) -> None:
    """Each file and link, in every way: named, the epoch is whole all the same, and the repair gives what was there."""
    folder = saved / "5"
    before = contents(folder)
    assert {"state/first", "key/np_random_key/first", "config/metadata", "second/metadata"} <= before.keys()
    count = 0
    for what, path, damage in list(damages(folder)):
        damage(path)
        found = verify(saved)
        assert found.ok, what
        assert not found.note
        assert [getattr(error, "path", "") for error in found.view_damage] == [str(path.relative_to(saved))], what
        assert ec.repair_view(saved, 5) != [], what
        assert contents(folder) == before, what
        count += 1
    print(count, "damages")
    assert count > 100
    assert verify(saved).view_damage == ()
    assert ec.repair_view(saved, 5) == []


class Asked(EpochRecord):
    """A record that notes which nodes' folders it is asked for."""

    asked: ClassVar[list[int]] = []

    def node_folder(self, node: int, item: str = "") -> str:
        self.asked.append(node)
        return super().node_folder(node, item)


def test_copies_in_place_of_links_are_not_looked_up_among_all_files(
    pristine: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Each is compared with what its link led to: nodes are asked for as often as with links."""
    recorded = parse_epoch("epoch.json", (pristine / "5" / "epoch.json").read_bytes())
    record = Asked(**{field.name: getattr(recorded, field.name) for field in dataclasses.fields(recorded)})
    counts = []
    for symlinks in (True, False):
        copy = pathlib.Path(shutil.copytree(pristine, tmp_path / str(symlinks), symlinks=symlinks))
        found = verify(copy)
        assert found.view_damage == ()
        assert not found.note
        Asked.asked.clear()
        assert linked_view.check(open_store(copy), "5", record) == {}
        counts.append(len(Asked.asked))
    assert counts[0] == counts[1] > 0


def test_a_link_to_another_epoch_is_damage(saved: pathlib.Path) -> None:
    """Also where that one has the same names; all damaged places are listed and repaired at once."""
    with ec.CheckpointManager(saved) as manager:
        manager.allow_overwrite(4)
        manager.save(4, args=Composite(state=Save({"other": np.ones(8)}), config=ocp.args.JsonSave({})))
    for name in ("state/first", "config/metadata"):
        relink(f"../../4/{'first' if name == 'state/first' else name}")(saved / "5" / name)
    (saved / "5" / "commit_success.txt").unlink()
    found = verify(saved)
    assert found.ok
    assert [getattr(error, "path", "") for error in found.view_damage] == [
        "5/commit_success.txt",
        "5/config/metadata",
        "5/state/first",
    ]
    assert ec.repair_view(saved, 5) == ["commit_success.txt", "config", "state"]
    assert verify(saved).view_damage == ()


@pytest.mark.slow
@pytest.mark.parametrize("nodes_too", [True, False])
def test_a_copy_without_the_view_is_whole_and_can_be_given_one(
    saved: pathlib.Path, nodes_too: bool, run_cli: Callable[..., tuple[int, str]]
) -> None:
    """What the records list was copied, nothing else: no damage, but a note; stock Orbax reads it after the repair."""
    before = contents(saved / "5")
    for path in list((saved / "5").iterdir()):
        if path.is_dir() and path.name not in NODES:
            shutil.rmtree(path)
        elif path.name not in ("epoch.json", *NODES):
            path.unlink()
    if nodes_too:
        for node in NODES:
            (saved / "5" / node / "metadata").unlink()
    found = verify(saved)
    assert (found.ok, found.view_damage) == (True, ())
    assert "the Orbax view is not there" in found.note
    code, out = run_cli("verify", saved)
    assert code == 0
    assert "the Orbax view is not there" in out
    assert run_cli("verify", saved, "--repair-view")[0] == 0
    assert verify(saved).note == ""
    assert contents(saved / "5") == before
    tree = stock_states.plain()
    read = ocp.StandardCheckpointer().restore(saved / "5" / "state", stock_states.abstract(tree))
    assert stock_states.differences(read, tree) == []


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command in this process."""

    def run(*argv: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main.main([str(arg) for arg in argv])
        said = capsys.readouterr()
        return code, " ".join((said.out if "--json" in argv else said.out + said.err).split())

    return run


def test_the_command_line_tells_it_apart(saved: pathlib.Path, run_cli: Callable[..., tuple[int, str]]) -> None:
    """Exit code 5 if only the view is damaged, 1 if an epoch is; `--repair-view` ends with 0."""
    (saved / "5" / "state" / "manifest.ocdbt").write_bytes(b"")
    code, out = run_cli("verify", saved)
    assert code == 5
    assert "the Orbax view is damaged: stock Orbax may not read it (--repair-view)" in out
    assert "5/state/manifest.ocdbt: has 0 bytes" in out
    code, out = run_cli("verify", saved, 5, "--json")
    (row,) = json.loads(out)["epochs"]
    assert (code, row["ok"], row["damage"]) == (5, True, [])
    assert [place["path"] for place in row["view_damage"]] == ["5/state/manifest.ocdbt"]
    code, out = run_cli("verify", saved, "--repair-view")
    assert code == 0
    assert "epoch 5: made anew for stock Orbax: state" in out
    assert run_cli("verify", saved)[0] == 0
    (saved / "5" / "state" / "manifest.ocdbt").write_bytes(b"")
    (saved / "4" / "first" / "node.json").write_bytes(b"")
    assert run_cli("verify", saved)[0] == 1


@pytest.mark.parametrize("lacking", ["exchange", "rename"])
def test_a_view_is_repaired_where_folders_cannot_be_exchanged(
    saved: pathlib.Path, lacking: str, faults: Faults
) -> None:
    """NFS, and overlayfs."""
    before = contents(saved / "5")
    (saved / "5" / "state" / "index.0").unlink()
    (saved / "5" / "view-0123456789abcdef.orbax-checkpoint-tmp").mkdir()  # of a repair that was killed
    if lacking == "exchange":
        with faults.fail(Store.exchange, io.UnsupportedOperation("exchange")) as refused:
            assert ec.repair_view(saved, 5) == ["state"]
        assert refused.hits == 1
    else:
        with immovable(saved):
            assert ec.repair_view(saved, 5) == ["state"]
    assert contents(saved / "5") == before


def test_a_repair_never_touches_the_epoch_that_took_the_place(saved: pathlib.Path, faults: Faults) -> None:
    """The epoch is replaced while its view is made anew: the repair says so, the new one keeps its own view."""

    def overtake(_: StoreCall) -> None:
        rule.remove()
        with ec.CheckpointManager(saved) as manager:
            manager.allow_overwrite(5)
            manager.save(5, args=Composite(state=Save({"new": np.ones(8)})))

    (saved / "5" / "state" / "index.0").unlink()
    rule = faults.before(Store.exchange, overtake)
    with pytest.raises(EpochDeletedError, match="while its Orbax view was being repaired"):
        ec.repair_view(saved, 5)
    assert rule.hits == 1
    assert verify(saved).view_damage == ()
    assert ocp.StandardCheckpointer().restore(saved / "5" / "state").keys() == {"new"}
    assert not list((saved / "5").glob("view-*"))


def test_what_has_no_view_is_not_repaired(tmp_path: pathlib.Path) -> None:
    """Saved without one, on an object store, or by stock Orbax: refused with the reason; verify finds nothing wrong."""
    with ec.CheckpointManager(tmp_path / "ours", storage=ec.StorageOptions(orbax_view=False)) as manager:
        manager.save(1, args=Save({"x": np.ones(3)}))
        manager.wait_until_finished()
        found = manager.verify(1)
        assert (found.ok, found.view_damage, found.note) == (True, (), "")
    with ocp.CheckpointManager(tmp_path / "stock") as stock:
        stock.save(1, args=Save({"x": np.ones(3)}))
    for name, why in (("ours", "saved without an Orbax view .none was asked for"), ("stock", "written by stock Orbax")):
        with pytest.raises(UnsupportedError, match=why):
            ec.repair_view(tmp_path / name, 1)


def test_a_record_that_calls_a_nodes_folder_part_of_the_view_is_refused(saved: pathlib.Path) -> None:
    """Whatever a record says, a repair never exchanges what holds data."""
    path = saved / "5" / "epoch.json"
    record = parse_epoch("5/epoch.json", path.read_bytes())
    for name in ("first/extra", "second/node.json", "other/index.0"):
        assert record.orbax_view is not None
        view = {**record.orbax_view, name: (1, "0" * 32)}
        path.write_bytes(dataclasses.replace(record, orbax_view=view).to_bytes())
        before = contents(saved / "5")
        with pytest.raises(UnsupportedError, match=f"makes no {name.partition('/')[0]}, "):
            ec.repair_view(saved, 5)
        assert contents(saved / "5") == before


def test_the_view_of_nodes_whose_folders_have_escaped_names(tmp_path: pathlib.Path) -> None:
    """A node's name is no name of a folder; `verify` raised KeyError of it."""
    with ec.CheckpointManager(tmp_path / "run", node=["trainer:0", "trainer:1"]) as manager:
        manager.save(5, args=Composite(state=Save(stock_states.plain())))
    assert verify(tmp_path / "run").view_damage == ()
    link = tmp_path / "run/5/state/x-trainer-3a0"
    link.unlink()
    assert [error.path for error in verify(tmp_path / "run").view_damage] == ["5/state/x-trainer-3a0"]
    assert ec.repair_view(tmp_path / "run", 5) == ["state"]
    assert link.is_symlink()
    assert verify(tmp_path / "run").view_damage == ()


def test_the_other_names_of_the_unnamed_item_are_part_of_the_view(tmp_path: pathlib.Path) -> None:
    """`state` and `pytree`: every damage is found and repaired; in a copy they may be folders, each with all bytes."""
    run, folder = tmp_path / "run", tmp_path / "run" / "5"
    with ec.CheckpointManager(run) as manager:
        manager.save(5, args=Save(stock_states.plain()))
    before = contents(folder)
    assert (before["state"], before["pytree"]) == ("default", "default")
    for name, damage in LINK_DAMAGE.items():
        damage(folder / "state")
        found = verify(run)
        assert found.ok
        assert [getattr(error, "path", "") for error in found.view_damage] == ["5/state"], name
        assert ec.repair_view(run, 5) == ["state"]
        assert contents(folder) == before
    copy = pathlib.Path(shutil.copytree(run, tmp_path / "copy"))
    assert not (copy / "5" / "pytree").is_symlink()
    assert verify(copy).view_damage == ()
    for path in ("pytree/_METADATA", "pytree/process_0/default.safetensors"):
        flip(copy / "5" / path, 0.9)
        assert [getattr(error, "path", "") for error in verify(copy).view_damage] == ["5/pytree"]
        assert ec.repair_view(copy, 5) == ["pytree"]
        assert (copy / "5" / "pytree").is_symlink()
        shutil.rmtree(copy)
        shutil.copytree(run, copy)


def test_views_from_before_the_other_names_are_whole(tmp_path: pathlib.Path) -> None:
    """Such an epoch lacks the links, and its record the small file: nothing is missed, and repairs add no link."""
    folder = tmp_path / "5"
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=Save(stock_states.plain()))
    for path in ("state", "pytree", "default/metadata"):
        (folder / path).unlink()
    assert len(verify(tmp_path).view_damage) == 3
    record = parse_epoch("5/epoch.json", (folder / "epoch.json").read_bytes())
    view = {path: row for path, row in (record.orbax_view or {}).items() if path != "default/metadata"}
    (folder / "epoch.json").write_bytes(dataclasses.replace(record, orbax_view=view).to_bytes())
    assert verify(tmp_path).view_damage == ()
    (folder / "default" / "index.0").unlink()
    assert ec.repair_view(tmp_path, 5) == ["default"]
    assert not (folder / "state").exists()
    assert verify(tmp_path).view_damage == ()


@pytest.mark.parametrize("node", ["state", "metadata"])
def test_a_node_may_have_one_of_these_names(tmp_path: pathlib.Path, node: str) -> None:
    """Then the item lacks the name; stock Orbax finds it by the others."""
    with ec.CheckpointManager(tmp_path, node=node) as manager:
        manager.save(5, args=Save({"x": np.ones(3)}))
    assert not (tmp_path / "5" / "state").is_symlink()
    assert (tmp_path / "5" / "pytree").is_symlink() == (node == "state")
    assert verify(tmp_path).view_damage == ()
    assert ocp.StandardCheckpointer().restore(tmp_path / "5" / "default").keys() == {"x"}
