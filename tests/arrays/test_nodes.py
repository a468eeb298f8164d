"""Nodes: one process that hosts several, values that differ per node, and what moves between numbers of nodes."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.arrays import restore_items
from epochckpt.errors import InvalidArgumentError, SaveError
from epochckpt.format import Nodes, checksums
from epochckpt.orbax import Handlers
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.node_jobs import NAMES, items, own, right_weights, same, weights
from tests.support.processes import run_worker, start_processes

Composite, Save = ocp.args.Composite, ocp.args.StandardSave
NodeSave, NodeRestore = ec.args.NodeSave, ec.args.NodeRestore
OWN = {name: own(number) for number, name in enumerate(NAMES)}


def hosting(directory: Any, names: Any = NAMES, **kwargs: Any) -> ec.CheckpointManager:
    """A manager of several nodes."""
    manager = ec.CheckpointManager(directory, **kwargs)
    manager.set_nodes(names)
    return manager


def save(manager: ec.CheckpointManager, epoch: int, **args: Any) -> None:
    """One committed epoch."""
    assert manager.save(epoch, args=Composite(**args), force=True)
    manager.wait_until_finished()


# -- hosting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constructed", [True, False])
def test_hosted_nodes_come_back_by_name(directory: str, constructed: bool) -> None:
    """Each writes its own folder and record; arrays and JSON are the first one's; every byte is verified."""
    with ec.CheckpointManager(directory, node=NAMES) if constructed else hosting(directory) as manager:
        assert manager.node_names == NAMES
        manager.save(3, args=items(OWN))
        manager.wait_until_finished()
        assert manager.nodes(3) == list(NAMES)
        assert manager.verify(3).ok
        files = {
            n.name: {f.item for f in n.files} for n in manager.components.directory.epoch_directory.read_record(3).nodes
        }
        assert files == {
            "trainer_0": {"state", "config", "own", "alike"},
            "trainer_1": {"own", "alike"},
            "trainer_2": {"own", "alike"},
        }
    with hosting(directory) as manager:
        args = Composite(own=NodeRestore(OWN, by_node=True), state=ocp.args.StandardRestore(weights()))
        got = manager.restore(3, args=args)
        assert list(got["own"]) == list(NAMES)
        assert same(got["own"], OWN)
        assert right_weights(got["state"])
        some = NodeRestore({NAMES[1]: OWN[NAMES[1]]}, by_node=True)
        assert same(manager.restore(3, args=Composite(own=some))["own"], OWN)
        everything = manager.restore(3)
        assert same(everything["own"], OWN)
        assert everything["rare"] == {NAMES[1]: {"found": NAMES[1]}}
        assert everything["config"] == {"a": 1}


def test_folders_on_storage_are_those_of_the_nodes(tmp_path: pathlib.Path) -> None:
    """`<epoch>/<node>/node.json` for each; an item that a node lacks is not in it, nor in its folder."""
    with hosting(tmp_path) as manager:
        manager.save(0, args=items(OWN))
    names = {n: {p.name for p in (tmp_path / "0" / n).iterdir()} for n in NAMES}
    assert names["trainer_1"] == {"node.json", "metadata", "own.safetensors", "alike.safetensors"}
    assert names["trainer_0"] == names["trainer_1"] | {"state.safetensors", "config"}
    assert [b'"rare"' in (tmp_path / "0" / n / "node.json").read_bytes() for n in NAMES] == [False, True, False]


def test_stock_orbax_restores_the_arrays_of_hosted_nodes(tmp_path: pathlib.Path) -> None:
    """The view leads to the first node's folder; the nodes' own items are left out of it."""
    with hosting(tmp_path) as manager:
        manager.save(0, args=items(OWN))
    with ocp.CheckpointManager(tmp_path, item_names=("state", "config")) as stock:
        args = Composite(state=ocp.args.StandardRestore(weights()), config=ocp.args.JsonRestore())
        got = stock.restore(0, args=args)
    assert right_weights(got["state"])
    assert got["config"] == {"a": 1}


def test_nodes_of_other_names_take_the_places_that_are_left(directory: str) -> None:
    """Of as many nodes: a name goes on as itself, the others in order."""
    with hosting(directory) as manager:
        save(manager, 0, own=NodeSave(OWN, by_node=True))
    with hosting(directory, ("a", "trainer_0", "b")) as manager:
        got = manager.restore(0)["own"]
        assert {name: value["seed"] for name, value in got.items()} == {"a": 101, "trainer_0": 100, "b": 102}


def test_a_node_without_the_item_has_none(directory: str) -> None:
    """Also when no node has it; it is left out, or, where it is asked for by itself, refused by name."""
    with hosting(directory, NAMES[:1]) as manager:
        nobody = {"none": NodeSave({}, by_node=True), "own": NodeSave(1)}
        save(manager, 0, **nobody)
        assert manager.restore(0) == {"own": 1}
        assert manager.restore(0, args=Composite(none=NodeRestore(by_node=True))) == {"none": {}}
        with pytest.raises(
            InvalidArgumentError, match="item 'none' of checkpoint 0: the node whose place trainer_0 takes"
        ):
            manager.restore(0, args=Composite(none=NodeRestore()))
        assert manager.verify(0).ok


def test_what_nodes_cannot_be_is_refused(tmp_path: pathlib.Path) -> None:
    """Names that are unusable, doubled, an item's, or come too late; others than those that were given."""
    for names, words in [((), "at least one"), (("a", "a"), "two nodes have the name 'a'"), (("a", "../b"), "'../b'")]:
        with pytest.raises(InvalidArgumentError, match=words):
            ec.CheckpointManager(tmp_path / "run", node=names)
        with ec.CheckpointManager(tmp_path / "other") as manager, pytest.raises(InvalidArgumentError, match=words):
            manager.set_nodes(names)
    assert not (tmp_path / "run").exists()
    with ec.CheckpointManager(tmp_path, node=("a", "b")) as manager:
        with pytest.raises(InvalidArgumentError, match=r"a manager with other nodes: .* a, b; asked for were b, a"):
            manager.set_nodes(["b", "a"])
        manager.set_nodes(["a", "b"])
    with ec.CheckpointManager(tmp_path, item_names=("own",)) as manager:
        with pytest.raises(InvalidArgumentError, match="item 'own' has the name of a node"):
            manager.set_nodes(["a", "own"])
        manager.set_nodes(["a", "b"])
        manager.set_nodes(["c"])
        with pytest.raises(InvalidArgumentError, match="item 'c' has the name of a node"):
            manager.save(0, args=Composite(c=NodeSave(1)))
        save(manager, 0, own=NodeSave(1))
        manager.set_nodes(["c"])
        with pytest.raises(InvalidArgumentError, match=r"before the first save; .* saved as c, asked for were a, b"):
            manager.set_nodes(["a", "b"])
        assert manager.node_names == ("c",)


def test_values_of_nodes_that_are_elsewhere_or_unnamed_are_refused(directory: str) -> None:
    """Which node a value belongs to is never guessed; nothing is begun."""
    with hosting(directory) as manager:
        saves: list[tuple[Any, str]] = [
            (NodeSave({"x": 1}), r"hosts 3 nodes \(trainer_0, trainer_1, trainer_2\); pass NodeSave"),
            (NodeSave({"x": 1}, by_node=True), "by_node=True names 'x'; this process hosts trainer_0, trainer_1"),
            (NodeSave([1], by_node=True), "expects a dict of pytrees by node name, got a list"),
            (NodeSave({NAMES[0]: object()}, by_node=True), "a builtins.object cannot be saved"),
        ]
        for args, words in saves:
            with pytest.raises(InvalidArgumentError, match=words):
                manager.save(0, args=Composite(own=args))
        save(manager, 0, own=NodeSave(OWN, by_node=True))
        restores: list[tuple[Any, str]] = [
            (NodeRestore(), r"hosts 3 nodes \(trainer_0, trainer_1, trainer_2\); pass NodeRestore"),
            (NodeRestore({"x": 1}, by_node=True), "by_node=True names 'x'; this process hosts trainer_0"),
            (NodeRestore(5, by_node=True), "expects a dict of pytrees by node name, got a int"),
        ]
        for args, words in restores:
            with pytest.raises(InvalidArgumentError, match=words):
                manager.restore(0, args=Composite(own=args))
        with pytest.raises(ec.errors.MismatchError, match="seed") as caught:
            manager.restore(0, args=Composite(own=NodeRestore({NAMES[1]: {"queue": 1}}, by_node=True)))
        assert "NodeRestore(target, rename={" in str(caught.value)
        assert "RenamedRestore" not in str(caught.value)
        moved = {
            name: {"seeds": {"now": state["seed"]}, **{key: value for key, value in state.items() if key != "seed"}}
            for name, state in OWN.items()
        }
        asked = NodeRestore(moved, by_node=True, rename={"seed": "seeds/now"})
        assert same(manager.restore(0, args=Composite(own=asked)).own, moved)
        with pytest.raises(InvalidArgumentError, match="needs a target"):
            manager.restore(0, args=Composite(own=NodeRestore(by_node=True, rename={"seed": "seeds"})))


def test_a_damaged_part_of_one_hosted_node_is_found(tmp_path: pathlib.Path) -> None:
    """A flipped bit in the third node's file: `verify` and a restore name it, the other nodes' values come back."""
    with hosting(tmp_path) as manager:
        save(manager, 0, own=NodeSave(OWN, by_node=True))
        path = tmp_path / "0" / "trainer_2" / "own.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        (damage,) = manager.verify(0).damage
        assert "trainer_2/own.safetensors" in str(damage)
        with pytest.raises(ec.errors.DamagedError, match=r"trainer_2/own\.safetensors"):
            manager.restore(0)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["trainer_1/node.json", "trainer_2/node.json", "/epoch.json"])
def test_a_kill_during_a_hosted_save_leaves_no_half_epoch(tmp_path: pathlib.Path, place: str) -> None:
    """After the first, the last node's record, or the epoch's, was written: epoch 1 stays, 2 is nowhere."""
    args = f'{{"directory": "{tmp_path / "run"}", "place": "{place}"}}'
    with start_processes(["-m", "tests.support.worker", "tests.support.node_jobs:save_and_die", args], 1) as job:
        (outcome,) = job.wait(150)
    assert outcome.returncode == -signal.SIGKILL, outcome.stdout
    with hosting(tmp_path / "run") as manager:
        assert manager.all_steps() == [1]
        assert manager.verify(1).ok
        assert same(manager.restore(None)["own"], OWN)
        save(manager, 2, own=NodeSave(OWN, by_node=True))
        assert manager.all_steps() == [1, 2]
    assert sorted(os.listdir(tmp_path / "run")) == ["1", "2"]


def test_a_hosted_save_that_fails_fails_for_all_its_nodes(tmp_path: pathlib.Path, faults: Faults) -> None:
    """A full disk under the last node's file: nothing is committed, the error says why, the next save works."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with hosting(tmp_path) as manager:
        with faults.fail(Store.open_writer, full, where=lambda call: "trainer_2" in call.path):
            manager.save(0, args=items(OWN))
            with pytest.raises(SaveError, match="No space left"):
                manager.wait_until_finished()
        assert manager.all_steps() == []
        assert manager.save(0, args=items(OWN))
        manager.wait_until_finished()
        assert manager.verify(0).ok


# -- between processes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_hosted_nodes_go_on_in_three_processes_and_back(tmp_path: pathlib.Path) -> None:
    """Each process gets its node's values, and the arrays; one process then hosts what three have saved."""
    one, three = tmp_path / "one", tmp_path / "three"
    with hosting(one) as manager:
        manager.save(3, args=items(OWN))
    for number, found in enumerate(run_worker("tests.support.node_jobs:restore", {"directory": str(one)}, 3)):
        has = number == 1
        assert found["own"], f"process {number}"
        assert found["state"], f"process {number}"
        value = {"found": NAMES[1]}
        assert found["rare"] == ([{NAMES[1]: value}, value] if has else [{}, None])
        assert "saved none" in found["refused"], f"process {number}: it restores what all of them can, or nothing"
    assert run_worker("tests.support.node_jobs:save", {"directory": str(three)}, 3) == [list(NAMES)] * 3
    with hosting(three) as manager:
        assert manager.verify(3).ok
        got = manager.restore(3)
        assert same(got["own"], OWN)
        assert right_weights(manager.restore(3, args=Composite(state=ocp.args.StandardRestore(weights())))["state"])
        assert got["rare"] == {NAMES[1]: {"found": NAMES[1]}}


def refused_in_two_processes(directory: str) -> list[str]:
    """What a job of two processes is told about nodes that do not fit it."""
    found = []
    for kwargs in ({"node": ["a", "b"]}, {"node": ("a",)}):
        try:
            ec.CheckpointManager(directory, **kwargs)
        except InvalidArgumentError as error:
            found.append(str(error))
    with ec.CheckpointManager(directory) as manager:
        try:
            manager.set_nodes(["a", "b", "c"])
        except InvalidArgumentError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_in_several_processes_each_is_one_node(tmp_path: pathlib.Path) -> None:
    """Both counts are named."""
    for found in run_worker("tests.arrays.test_nodes:refused_in_two_processes", {"directory": str(tmp_path)}, 2):
        assert len(found) == 3
        assert "only in a job of one process, here are 2" in found[0]
        assert "only in a job of one process, here are 2" in found[1]
        assert "3 nodes (a, b, c) in a job of 2 processes" in found[2]


# -- the mark of agreement -------------------------------------------------------------------------------------------


def marks(directory: Any, epoch: int = 0) -> dict[str, bool]:
    """Which items of an epoch are marked as the same on all nodes."""
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        return {
            name: item.same
            for name, item in manager.components.directory.epoch_directory.read_record(epoch).items.items()
        }


def tree(**changes: Any) -> dict[str, Any]:
    """One of every kind of leaf that a node may have of its own."""
    return {
        "array": np.arange(1000.0),
        "device": jnp.arange(5),
        "small": np.int8(3),
        "n": 1,
        "x": 0.5,
        "text": "a",
        "long": "b" * 5000,
        "empty": {},
        "list": [1, (2, None)],
        **changes,
    }


DIFFERENT = {
    "value": tree(array=np.arange(1000.0) + (np.arange(1000) == 999)),
    "on device": tree(device=jnp.arange(5) + 1),
    "dtype": tree(array=np.arange(1000.0).view(np.int64)),
    "shape": tree(array=np.arange(1000.0).reshape(10, 100)),
    "zero": tree(x=-0.0),
    "number": tree(n=2),
    "type": tree(n=True),
    "text": tree(text="b"),
    "long text": tree(long="b" * 4999 + "c"),
    "structure": tree(list=[1, 2, None]),  # a list and a tuple are one, in what is written
    "name": tree(more=1),
    "container": tree(empty=[]),
}


@pytest.mark.parametrize("change", [None, *DIFFERENT])
def test_what_all_nodes_have_alike_is_marked(tmp_path: pathlib.Path, change: str | None) -> None:
    """If and only if: one bit, type, shape, key or container of one node takes the mark away."""
    trees = dict.fromkeys(NAMES, tree(x=0.0))
    if change is not None:
        trees[NAMES[2]] = {**DIFFERENT[change], "x": -0.0 if change == "zero" else 0.0}
    with hosting(tmp_path) as manager:
        save(manager, 0, own=NodeSave(trees, by_node=True), arrays=Save({"w": np.ones(3)}))
    assert marks(tmp_path) == {"own": change is None, "arrays": False}


def test_an_item_that_a_node_lacks_is_not_marked(directory: str) -> None:
    """Nor one that nobody has; of one node alone everything is marked that it has."""
    with hosting(directory) as manager:
        some = dict.fromkeys(NAMES[:2], 1)
        save(manager, 0, own=NodeSave(some, by_node=True), none=NodeSave({}, by_node=True))
        assert {n: i.same for n, i in manager.components.directory.epoch_directory.read_record(0).items.items()} == {
            "own": False,
            "none": False,
        }
    with hosting(directory, ("alone",)) as manager:
        save(manager, 1, own=NodeSave(1), none=NodeSave({}, by_node=True))
        assert {n: i.same for n, i in manager.components.directory.epoch_directory.read_record(1).items.items()} == {
            "own": True,
            "none": False,
        }


def test_equal_arrays_on_other_devices_are_the_same(directory: str) -> None:
    """Where an array lay is not part of its value."""
    values = {name: jax.device_put(np.arange(8.0), jax.devices()[n]) for n, name in enumerate(NAMES)}
    with hosting(directory) as manager:
        save(manager, 0, own=NodeSave(values, by_node=True))
        assert manager.components.directory.epoch_directory.read_record(0).items["own"].same


@pytest.mark.parametrize("count", [1, 2, 5])
def test_only_what_is_the_same_goes_to_another_number_of_nodes(directory: str, count: int) -> None:
    """Equal values come back on every node, with and without targets; others are refused by name, or resharded."""
    names = tuple(f"n{i}" for i in range(count))
    with hosting(directory) as manager:
        save(manager, 0, alike=NodeSave(dict.fromkeys(NAMES, tree()), by_node=True), own=NodeSave(OWN, by_node=True))
    with hosting(directory, names) as manager:
        for target in (None, dict.fromkeys(names, tree())):
            got = manager.restore(0, args=Composite(alike=NodeRestore(target, by_node=True)))["alike"]
            assert list(got) == list(names)
            assert all(same(value["array"], tree()["array"]) and value["text"] == "a" for value in got.values())
        for args in (None, Composite(own=NodeRestore(by_node=True))):
            with pytest.raises(
                InvalidArgumentError, match=f"item 'own' .* saved by 3 nodes; this job has {count}: pass"
            ):
                manager.restore(0, args=args)

        def reshard(old: Any, n: int, m: int) -> list[Any]:
            return [{"seeds": [o["seed"] for o in old], "n": n, "me": i} for i in range(m)]

        asked = Composite(own=NodeRestore(reshard=reshard, by_node=True), alike=NodeRestore(reshard=reshard_alike))
        if count > 1:
            asked = Composite(own=asked["own"])
        got = manager.restore(0, args=asked)
        assert got["own"] == {name: {"seeds": [100, 101, 102], "n": 3, "me": i} for i, name in enumerate(names)}
        assert count > 1 or got["alike"] == "made of 3"


def reshard_alike(old: Any, n: int, m: int) -> list[str]:
    """A given `reshard` counts, also where all are the same."""
    assert len(old) == n
    return [f"made of {n}"] * m


def test_one_nodes_values_go_to_three(directory: str) -> None:
    """Of one node everything is the same; a node that had none is `None` to `reshard`."""
    with ec.CheckpointManager(directory) as manager:
        save(manager, 0, own=NodeSave({"seed": 5}), none=NodeSave({}, by_node=True))
    with hosting(directory) as manager:
        got = manager.restore(0, args=Composite(own=NodeRestore(by_node=True)))["own"]
        assert got == {name: {"seed": 5} for name in NAMES}
        first, second, _ = got.values()
        assert first is not second
        with pytest.raises(InvalidArgumentError, match="item 'none'"):
            manager.restore(0)
        seen = []
        args = NodeRestore(reshard=lambda old, n, m: seen.append(old) or [1, 2, 3], by_node=True)
        assert manager.restore(0, args=Composite(none=args))["none"] == dict(zip(NAMES, [1, 2, 3], strict=True))
        assert seen == [[None]]
        with pytest.raises(InvalidArgumentError, match="reshard returned 1 states for 3 nodes"):
            manager.restore(0, args=Composite(own=NodeRestore(reshard=lambda old, n, m: old, by_node=True)))


def agreement_in_processes(directory: str) -> list[bool]:
    """Saves, in every process, something that differs, something that does not, and both on a device of its own."""
    me = jax.process_index()
    local = jax.device_put(np.arange(4.0), jax.local_devices()[0])
    own = {"alike": NodeSave({"x": 1, "local": local}), "own": NodeSave({"me": me}), "shift": NodeSave(local + me)}
    with ec.CheckpointManager(directory) as manager:
        save(manager, 0, **own)
        return [item.same for item in manager.components.directory.epoch_directory.read_record(0).items.values()]


@pytest.mark.long
def test_processes_agree_too(tmp_path: pathlib.Path) -> None:
    """Three processes mark what they have alike; one process then restores that, and only that."""
    found = run_worker("tests.arrays.test_nodes:agreement_in_processes", {"directory": str(tmp_path)}, 3, 2)
    assert found == [[True, False, False]] * 3
    with ec.CheckpointManager(tmp_path) as manager:
        got = manager.restore(0, args=Composite(alike=NodeRestore({"x": 0, "local": np.zeros(4)})))["alike"]
        assert got["x"] == 1
        np.testing.assert_array_equal(got["local"], np.arange(4.0))
        for name in ("own", "shift"):
            with pytest.raises(InvalidArgumentError, match=f"item '{name}' .* saved by 3 nodes; this job has 1"):
                manager.restore(0, args=Composite(**{name: NodeRestore()}))


@pytest.mark.parametrize(("mark", "fine"), [(None, False), (True, True), (1, False), ("yes", False), ([], False)])
def test_the_mark_is_read_with_care(tmp_path: pathlib.Path, mark: Any, fine: bool) -> None:
    """Anything but true or false is no record, and neither is a missing mark. A mark that lies is found out."""
    with hosting(tmp_path) as manager:
        save(manager, 0, own=NodeSave({NAMES[0]: 1}, by_node=True))
    path = tmp_path / "0" / "epoch.json"
    record = checksums.parse_sealed("epoch.json", path.read_bytes())
    assert record["items"]["own"].pop("same") is False
    if mark is not None:
        record["items"]["own"]["same"] = mark
    path.write_bytes(checksums.seal(record))
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ec.CheckpointManager(tmp_path, options=options, node=("a", "b")) as manager:
        args = Composite(own=NodeRestore(by_node=True))
        if not fine:
            with pytest.raises(ec.errors.FormatError, match=r"items\.own\.same: expected true or false"):
                manager.restore(0, args=args)
        else:  # the first has it; the second node's record, which its digest covers, says that it has none
            assert manager.restore(0, args=args)["own"] == {"a": 1}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("abc", "abc", [0, 1, 2]),
        ("abc", "cab", [2, 0, 1]),
        ("ab", "bc", [1, 0]),
        ("abcd", "xbyd", [0, 1, 2, 3]),
        ("abc", "xyz", [0, 1, 2]),
    ],
)
def test_every_old_node_has_one_successor(old: str, new: str, expected: list[int]) -> None:
    """Nodes of one name go on as themselves; the others share out what is left; nothing is taken twice or lost."""
    assert restore_items.RestoreContext(Handlers(), Nodes(tuple(new))).successions(list(old)) == expected
