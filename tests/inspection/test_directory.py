"""`inspect`: what a notebook and a program ask of a directory; near names; live directories; no jax backend."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.caffe2.epochs import NodeEpochs
from epochckpt.errors import (
    DamagedError,
    EpochDeletedError,
    EpochNotFoundError,
    InvalidArgumentError,
    NotACheckpointDirectoryError,
)
from epochckpt.inspection.directory import Inspection
from epochckpt.inspection.rows import DAMAGED
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.files import unchanged
from tests.support.stock_steps import tree_of, write

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def tree(epoch: int) -> dict[str, Any]:
    kernel = np.arange(12, dtype=np.float32).reshape(3, 4) * epoch
    return {
        "params": {"dense": {"kernel": kernel, "bias": np.zeros(4, np.float32)}, "out": {"kernel": kernel + 1}},
        "step": epoch,
    }


def save(manager: ec.CheckpointManager, epoch: int, loss: float) -> None:
    items = {
        "state": ocp.args.StandardSave(tree(epoch)),
        "config": ocp.args.JsonSave({"epoch": epoch}),
        "own": ec.args.NodeSave({"seed": epoch, "where": np.arange(epoch)}),
    }
    manager.save(epoch, args=ocp.args.Composite(**items), metrics={"loss": loss})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The epochs 2, 4, 6 and 8, of which 4 has the least loss."""
    path = tmp_path_factory.mktemp("saved") / "run"
    with ec.CheckpointManager(path) as manager:
        for epoch, loss in ((2, 3.0), (4, 1.0), (6, 2.0), (8, 5.0)):
            save(manager, epoch, loss)
    return path


@pytest.fixture
def run(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy that a test may damage."""
    return pathlib.Path(shutil.copytree(saved, tmp_path / "run", symlinks=True))


def open_run(path: pathlib.Path) -> Inspection:
    return ec.inspect(path, metric="loss", mode="min")


def latest(inspection: Inspection) -> int | None:
    found = inspection.latest
    return None if found is None else found.epoch


# -- what it gives ---------------------------------------------------------------------------------------------------


def test_a_directory_is_a_sequence_of_epochs(saved: pathlib.Path) -> None:
    """Their numbers, the latest, the best, their rows; nothing is written."""
    with unchanged(saved):
        found = open_run(saved)
        assert found.directory == str(saved)
        assert (list(found), len(found)) == ([2, 4, 6, 8], 4)
        assert 4 in found
        assert 5 not in found
        assert [row.epoch for row in found.epochs()] == [2, 4, 6, 8]
        assert latest(found) == 8
        assert found.best is not None
        assert (found.best.epoch, found.best.row.best, found[8].row.latest, found[2].row.best) == (4, True, True, False)
        assert [row.epoch for row in found.overview(2).epochs] == [4, 6, 8]  # the two newest, and the best
        assert found[4].row.metrics == {"loss": 1.0}


def test_items_leaves_and_files_of_an_epoch(saved: pathlib.Path) -> None:
    """By name: arrays, values, each node's own, files of handlers; statistics of what matches."""
    with unchanged(saved):
        epoch = open_run(saved)[6]
        assert (list(epoch), len(epoch), "state" in epoch) == (["config", "own", "state"], 3, True)
        state = epoch["state"]
        names = ["params/dense/bias", "params/dense/kernel", "params/out/kernel", "step"]
        assert (list(state), len(state), "step" in state) == (names, 4, True)
        assert state["step"] == 6
        np.testing.assert_array_equal(state["params/dense/kernel"], tree(6)["params"]["dense"]["kernel"])
        params = state["params"]
        assert ("params" in state, "params/dense/" in state, "param" in state) == (True, True, False)
        assert {name: list(inner) for name, inner in params.items()} == {"dense": ["bias", "kernel"], "out": ["kernel"]}
        np.testing.assert_array_equal(params["out"]["kernel"], tree(6)["params"]["out"]["kernel"])
        np.testing.assert_array_equal(state["params/dense"]["bias"], params["dense"]["bias"])
        assert json.loads(epoch["config"].read("metadata")) == {"epoch": 6}
        assert list(epoch["own"]) == ["process_0"]
        assert epoch["own"].node("process_0")["where"].tolist() == [0, 1, 2, 3, 4, 5]
        told: list[int] = []
        found = epoch.stats("*/kernel", progress=told.append)
        assert [row.leaf.name for row in found] == ["params/dense/kernel", "params/out/kernel"]
        assert (found[0].max, found[1].min, sum(told)) == (66.0, 1.0, 96)
        assert [(row.item, row.node) for row in epoch.stats("where")] == [("own", "process_0")]
        assert [row.leaf.name for row in epoch["own"].node("process_0").stats()] == ["where"]
        assert len(epoch.stats()) == 4
        assert len(epoch.stats(node="process_0")) == 1
        assert len(epoch.stats(["*bias", "*out*"], item="state")) == 2
        assert epoch.verify().ok
        assert {leaf.name for item in epoch.detail().items for leaf in item.leaves} == set(names)


def test_the_difference_of_two_epochs(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Of one directory, and of two; of what matches; what is asked for in vain is said."""
    found = open_run(saved)
    with unchanged(saved):
        changed = found.diff(2, 4)
    rows = {row.name: row for row in changed if row.item == "state"}
    assert rows["params/dense/bias"].change == "unchanged"
    assert rows["params/dense/kernel"].change == "changed"
    assert rows["params/dense/kernel"].largest == 22.0
    assert [row.name for row in found.diff(2, 4, "*/bias")] == ["params/dense/bias"]
    assert len(changed) == len(changed.rows) == len(changed.diff.rows)
    assert "kernel" in repr(changed)
    assert "kernel" in changed.to_html()
    with ec.CheckpointManager(tmp_path / "other") as manager:
        manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave({"params": {"more": np.ones(2)}})))
    elsewhere = found.diff(2, 1, "params/*", directory=tmp_path / "other")
    assert {row.change for row in elsewhere} == {"added", "removed"}
    assert (elsewhere.diff.directory, elsewhere.diff.other_directory) == (str(saved), str(tmp_path / "other"))
    with pytest.raises(EpochNotFoundError, match="near"):
        found.diff(2, 5)
    with pytest.raises(InvalidArgumentError, match="nothing"):
        found.diff(2, 4, "nothing")


def test_plots_are_of_all_epochs(saved: pathlib.Path) -> None:
    """Each of the five has a point for every epoch, on axes of its own or on those that it is given."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    given = open_run(saved).plots
    for draw in (given.nbytes, given.save_secs, given.blocked_secs, given.node_secs, given.metric):
        ax = Figure().subplots()
        assert draw(ax=ax) is ax
        assert any(list(line.get_xdata()) == [2, 4, 6, 8] for line in ax.get_lines()), draw.__name__
    ax = ec.inspect(saved).plots.metric("loss", Figure().subplots())
    assert [3.0, 1.0, 2.0, 5.0] in [list(line.get_ydata()) for line in ax.get_lines()]
    with pytest.raises(InvalidArgumentError, match="which metric"):
        ec.inspect(saved).plots.metric()
    with pytest.raises(InvalidArgumentError, match="loss"):
        given.metric("acc", Figure().subplots())


def test_everything_shows_itself_in_three_ways(saved: pathlib.Path) -> None:
    """The same rows as HTML, text and JSON: each names what it is about."""
    found = open_run(saved)
    epoch = found[8]
    shown = {
        "loss": found,
        "params": epoch,
        "kernel": epoch["state"],
        "process_0": epoch["own"],
        "metadata": epoch["config"],
        "params/dense/kernel": epoch.stats("params/dense/*"),
        "seed": epoch["own"].node("process_0"),
    }
    for word, thing in shown.items():
        assert word in thing._repr_html_(), word
        assert "<" in thing._repr_html_()
        assert word in repr(thing), word
        assert "\x1b" not in repr(thing)
        assert word in json.dumps(thing.to_json(), allow_nan=False), word
        assert max(map(len, thing.to_text(width=60).splitlines())) <= 60


# -- what is not there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [5, 3, 100])
def test_an_unknown_epoch_names_those_that_are_near(saved: pathlib.Path, asked: int) -> None:
    with pytest.raises(EpochNotFoundError, match=rf"no checkpoint {asked}; near: .*\b(4|8)\b") as caught:
        open_run(saved)[asked]
    assert caught.value.available == [2, 4, 6, 8]


def test_what_is_no_epoch_is_refused_with_a_hint(saved: pathlib.Path) -> None:
    found: Any = ec.inspect(saved)
    for asked, hint in ((-1, r"\.latest"), (slice(0, 2), r"\.epochs"), ("8", "integer"), (True, "integer")):
        with pytest.raises(InvalidArgumentError, match=hint):
            found[asked]
    with pytest.raises(InvalidArgumentError, match="metric="):
        _ = found.best
    with pytest.raises(InvalidArgumentError, match="mode"):
        ec.inspect(saved, mode="most")


def test_a_subtree_has_the_keys_that_names_have(tmp_path: pathlib.Path) -> None:
    """Numbers, list positions, keys with a slash, empty containers; of each node's own as well."""
    layers = {"n": {0: np.ones(2), 11: np.zeros(2)}, "größe": [1.5, {"a/b": 2}], "none": None, "empty": {}}
    with ec.CheckpointManager(tmp_path / "run") as manager:
        own = ec.args.NodeSave({"seeds": {"a": 1, "b": [2]}})
        args = ocp.args.Composite(state=ocp.args.StandardSave({"layers": layers}), own=own)
        assert manager.save(1, args=args)
    epoch = ec.inspect(tmp_path / "run")[1]
    found = epoch["state"]["layers"]
    assert found.keys() == {"n", "größe", "none", "empty"}
    assert {key: value.tolist() for key, value in found["n"].items()} == {"0": [1, 1], "11": [0, 0]}
    assert (found["größe"], found["none"], found["empty"]) == ({"0": 1.5, "1": {"a%2Fb": 2}}, None, {})
    assert epoch["state"]["layers/größe/"] == found["größe"]
    assert epoch["own"].node("process_0")["seeds"] == {"a": 1, "b": {"0": 2}}


def test_an_array_has_a_look_of_its_own(tmp_path: pathlib.Path) -> None:
    """Its statistics, and squares for its parts: signs by colour, strength by size, what is not finite apart."""
    array = np.zeros((50, 8), np.float32)
    array[:25, :4], array[25:, 4:], array[49, 0] = 2.0, -1.0, np.nan
    with ec.CheckpointManager(tmp_path / "run") as manager:
        tree = {"a": {"[w]*": array, "v": np.ones(3)}, "none": np.zeros(0), "n": 1}
        assert manager.save(1, args=ocp.args.StandardSave(tree))
    item = ec.inspect(tmp_path / "run")[1]["default"]
    seen = item.look(next(name for name in item if "w" in name))
    means = np.array(seen.look.means)
    assert means.shape == (24, 8)
    assert (means[0, 0], means[23, 7], math.isnan(means[23, 0]), seen.look.stats.nans) == (2.0, -1.0, True, 1)
    lines = seen.to_text(60).splitlines()
    assert (lines[-24], lines[-1]) == ("  ████", "  ×   ▒▒▒▒")
    assert "the strongest is ±2" in seen.to_text(200)
    page = seen.to_html()
    assert page.count('<i class="eckpt-live" style="opacity:1.00">') == 4 * 12
    assert page.count('<i class="eckpt-warn" style="opacity:0.50">') == 4 * 12
    assert page.count('<i class="eckpt-bad">') == 1
    for name, said in (
        ("a", "no single array"),
        ("none", "no single array"),
        ("n", "no single array"),
        ("b", "no leaf"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            item.look(name)


def test_unknown_names_get_near_ones(saved: pathlib.Path) -> None:
    """Items, leaves, parts of the tree, patterns, files, nodes: each error says what to ask for instead."""
    epoch = open_run(saved)[8]
    for call, said in (
        (lambda: epoch["stat"], "near: 'state'"),
        (lambda: epoch["xyz"], "there are: 'config', 'own', 'state'"),
        (lambda: epoch["state"]["params/dense/kernl"], "near: 'params/dense/kernel'"),
        (lambda: epoch["state"]["kernel"], "near: .*'params/dense/kernel'"),
        (lambda: epoch["state"]["params/den"], "near: .*'params/dense/kernel'"),
        (lambda: epoch["state"]["params/*"], r"pattern.*\.stats\('params/\*'\)"),
        (lambda: epoch["state"][""], "there is no leaf"),
        (lambda: epoch["config"]["x"], r"\.read.*'metadata'"),
        (lambda: epoch["config"].read("metdata"), "near: 'metadata'"),
        (lambda: epoch["own"]["seed"], r"\.node.*'process_0'"),
        (lambda: epoch["own"].node("process_1"), "near: 'process_0'"),
        (lambda: epoch["state"].node("process_0"), "one for all nodes"),
        (lambda: epoch.stats("parms/*"), "no leaf matches 'parms/\\*'; near: 'params"),
        (lambda: epoch.stats("*", item="stte"), "near: 'state'"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            call()
    with pytest.raises(KeyError) as caught:  # as of a mapping, and readable
        epoch["state"]["params/dense/kernl"]
    assert str(caught.value).startswith("checkpoint 8, item 'state': there is no leaf 'params/dense/kernl'; near: ")


def test_hostile_names_reach_no_terminal_raw(tmp_path: pathlib.Path) -> None:
    """Escape sequences in a leaf's name, in errors and views."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave({"a\x1b[2Jb": np.ones(2), "<script>": {"x\u202ey": np.ones(2)}}))
    epoch = ec.inspect(tmp_path / "run")[1]
    item = epoch["default"]
    with pytest.raises(InvalidArgumentError) as caught:
        item["\x1b[2Jb"]
    for text in (str(caught.value), repr(epoch), repr(item), item.to_html(), repr(epoch.stats())):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "<script>" not in item.to_html()
    (first, second) = list(item)
    assert item[first].tolist() == item[second].tolist() == [1, 1]


def test_errors_show_hostile_names_as_views_do(tmp_path: pathlib.Path) -> None:
    """Escaped and shortened: a metric's name of somebody else's ends up in a terminal, too."""
    hostile = "\x1b[31m\u202e" + "long" * 2000
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave({hostile: np.ones(2)}), metrics={hostile: 1.0})
    found = ec.inspect(tmp_path / "run")
    for ask in (
        lambda: found.plots.metric("loss"),
        lambda: found.diff(1, 1, "none"),
        lambda: found.diff(1, 1, hostile),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            ask()
        assert "\x1b" not in str(caught.value)
        assert "\u202e" not in str(caught.value)
        assert len(str(caught.value)) < 1500


def test_no_statistics_where_there_is_damage_are_an_error(tmp_path: pathlib.Path) -> None:
    """A step of stock Orbax that lost the index of its arrays is not one without arrays."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.Composite(model=ocp.args.StandardSave({"a": np.ones(3)})))
    for path in (tmp_path / "run" / "1" / "model" / "d").iterdir():
        path.unlink()
    for patterns in ("*", "a"):
        with pytest.raises(DamagedError, match="cannot be read"):
            ec.inspect(tmp_path / "run")[1].stats(patterns)


def test_an_unknown_node_is_said(saved: pathlib.Path) -> None:
    """Statistics of no node at all would look like a node without arrays."""
    with pytest.raises(InvalidArgumentError, match="near: 'process_0'"):
        ec.inspect(saved)[4].stats(node="process_1")
    assert [row.leaf.name for row in ec.inspect(saved)[4].stats(node="process_0")] == ["where"]


def test_progress_may_be_none(saved: pathlib.Path) -> None:
    epoch = open_run(saved)[2]
    assert epoch.verify(None).ok
    assert epoch.verify(progress=None).ok
    assert len(epoch.stats("*kernel", progress=None)) == len(epoch["state"].stats("*kernel", progress=None)) == 2


def test_what_is_no_directory_of_checkpoints_is_refused(tmp_path: pathlib.Path) -> None:
    """Missing, a file, somebody else's: at once, not at the first question."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    for name in ("missing", "file", "photos"):
        with pytest.raises(NotACheckpointDirectoryError, match=name):
            ec.inspect(tmp_path / name)


# -- damage, deletion, writers ---------------------------------------------------------------------------------------


def test_a_damaged_epoch_hides_no_other(run: pathlib.Path) -> None:
    """A record that cannot be used, a data file that is gone: said so; the others are whole, and latest is one."""
    record = run / "8" / "epoch.json"
    record.write_bytes(record.read_bytes()[:-30])
    (run / "6" / "process_0" / "state.safetensors").unlink()
    found = open_run(run)
    assert [(row.epoch, row.state == DAMAGED) for row in found.epochs(check=True)] == [
        (2, False),
        (4, False),
        (6, True),
        (8, True),
    ]
    assert latest(found) == 4
    assert list(found) == [2, 4, 6, 8]
    for view in (found, found[8], found[6]):
        assert "damaged" in repr(view)
    with pytest.raises(DamagedError, match=r"8/epoch\.json"):
        found[8]["state"]
    with pytest.raises(DamagedError):
        found[8].verify()
    with pytest.raises(DamagedError, match=r"state\.safetensors"):
        found[6]["state"]["params/dense/kernel"]
    assert found[6]["state"]["step"] == 6  # it lies in the record
    assert found[6]["config"].read("metadata") == b'{"epoch": 6}'
    assert not found[6].verify().ok
    assert found[4]["state"]["params/dense/bias"].tolist() == [0, 0, 0, 0]


def test_the_latest_is_found_behind_many_damaged_epochs(tmp_path: pathlib.Path) -> None:
    """However many newer ones there are; and there is none if all are damaged."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for epoch in range(25):
            manager.save(epoch, args=ocp.args.StandardSave({"x": np.ones(1)}))
    for epoch in range(1, 25):
        (tmp_path / "run" / str(epoch) / "process_0" / "default.safetensors").unlink()
    found = ec.inspect(tmp_path / "run")
    assert latest(found) == 0
    (tmp_path / "run" / "0" / "process_0" / "default.safetensors").unlink()
    assert latest(found) is None


def test_an_epoch_that_is_deleted_meanwhile_is_said(run: pathlib.Path) -> None:
    """What was handed out for it raises EpochDeletedError; the directory goes on without it."""
    found = open_run(run)
    epoch, item = found[8], found[8]["state"]
    seen = found[8]["state"]
    assert seen["step"] == 8
    with ec.CheckpointManager(run) as manager:
        manager.delete(8)
    for call in (
        lambda: item["params/dense/kernel"],
        lambda: seen["params/dense/kernel"],
        lambda: epoch.row,
        lambda: epoch["state"],
        lambda: epoch.detail(),
        lambda: epoch.verify(),
        lambda: epoch.stats(),
    ):
        with pytest.raises(EpochDeletedError):
            call()
    assert list(found) == [2, 4, 6]
    assert latest(found) == 6
    with pytest.raises(EpochNotFoundError, match="near"):
        found[8]


def test_an_epoch_whose_record_is_away_for_a_moment_is_said_to_be_gone(run: pathlib.Path, faults: Faults) -> None:
    """It is there again when it is looked for a second time: what was asked for was another attempt."""
    epoch = open_run(run)[8]
    item = epoch["state"]
    for call in (epoch.leaves, lambda: item["step"], epoch.verify):
        away = faults.fail(Store.read, FileNotFoundError(), where=lambda call: call.path == "8/epoch.json", times=1)
        with away, pytest.raises(EpochDeletedError):
            call()
        assert away.hits == 1


def test_an_item_is_of_one_attempt(run: pathlib.Path) -> None:
    """The epoch is replaced by another of its number: what was begun is not mixed with it."""
    found = open_run(run)
    item = found[8]["state"]
    assert item["step"] == 8
    with ec.CheckpointManager(run) as manager:
        manager.allow_overwrite(8)
        manager.save(8, args=ocp.args.Composite(state=ocp.args.StandardSave({"params": np.ones(3)})))
        manager.wait_until_finished()
    with pytest.raises(EpochDeletedError):
        item["params/dense/kernel"]
    assert list(found[8]["state"]) == ["params"]


@pytest.mark.slow
def test_a_directory_that_is_being_written_can_be_looked_at(tmp_path: pathlib.Path) -> None:
    """Beside a manager that saves and deletes: every look is a whole one, and sees what is new."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    done = threading.Event()
    with ec.CheckpointManager(tmp_path / "run", options=options) as manager:
        save(manager, 0, 1.0)
        manager.wait_until_finished()
        found = open_run(tmp_path / "run")

        def write() -> None:
            try:
                for epoch in range(1, 16):
                    save(manager, epoch, 1.0)
                    manager.wait_until_finished()
            finally:
                done.set()

        writer = threading.Thread(target=write)
        writer.start()
        looks, newest = 0, -1
        while not done.is_set() or not looks:
            now = latest(found)
            assert now is not None
            assert now >= newest
            newest = now
            assert f"{found.directory}" in repr(found)
            try:
                epoch = found[now]
                state = epoch["state"]
                assert state["step"] == now
                np.testing.assert_array_equal(state["params/out/kernel"], tree(now)["params"]["out"]["kernel"])
                assert epoch.verify().ok
                assert str(now) in repr(epoch)
                looks += 1
            except EpochNotFoundError:  # EpochDeletedError is one
                assert now not in list(found)
        writer.join()
    assert latest(found) == 15


def test_an_attempt_is_no_epoch_and_is_named(run: pathlib.Path) -> None:
    """A save that died: asking for its number says so."""
    shutil.rmtree(run / "8")
    staging = run / "incarnation-0123456789abcdef.orbax-checkpoint-tmp"
    (staging / "8-1" / "process_0").mkdir(parents=True)
    (staging / "8-1" / "process_0" / "state.safetensors").write_bytes(b"x")
    with pytest.raises(EpochNotFoundError, match=r"no checkpoint 8; near: .*An attempt at saving it is"):
        open_run(run)[8]


def test_steps_of_stock_orbax_and_epochs_of_single_nodes(tmp_path: pathlib.Path) -> None:
    """The same questions, the same answers."""
    write(tmp_path / "stock", "ocdbt-zarr3-single", {1: tree_of(1), 2: tree_of(2)})
    found = ec.inspect(tmp_path / "stock", metric="loss", mode="min")
    assert (list(found), latest(found)) == ([1, 2], 2)
    assert found.best is not None
    assert found[2]["default"]["w"].tolist() == [[2.0] * 3] * 4
    assert [row.mean for row in found[2].stats("w")] == [2.0]
    assert "orbax" in repr(found[2]).lower()
    assert "w" in found[2].to_html()
    assert found[2].verify().note
    (tmp_path / "lone").mkdir()
    for node in ("a", "b"):
        NodeEpochs(tmp_path / "lone", node).save(7, ocp.args.StandardSave({"x": np.arange(3)}))
    lone = ec.inspect(tmp_path / "lone")
    assert list(lone) == [7]
    assert lone[7]["default"].node("b")["x"].tolist() == [0, 1, 2]
    assert [row.node for row in lone[7].stats("x")] == ["a", "b"]
    assert lone[7].verify().ok
    assert "x" in repr(lone[7])


def test_nodes_of_which_only_some_are_of_a_manager_are_shown(tmp_path: pathlib.Path) -> None:
    """A node's notes say what its own custom metadata mean."""
    NodeEpochs(tmp_path, "a").save(7, ocp.args.StandardSave({"x": np.arange(3)}), {"mine": 1})
    session = ec.LocalSession()
    session.run(ec.Task(lambda ws: ws.update(x=5), node="b"))
    manager = ec.caffe2.MultiNodeCheckpointManager(str(tmp_path), "epochckpt")
    session.run(manager.init(["b"]))
    manager.notes = {"unit": "step"}
    session.run(manager.save(7))
    (row,) = ec.inspect(tmp_path).overview().epochs
    assert ([node.name for node in row.nodes], row.custom_metadata, row.unit) == (["a", "b"], {"mine": 1}, "step")


def test_a_copy_of_a_node_s_folder_hides_no_node(tmp_path: pathlib.Path) -> None:
    for node in ("a", "b"):
        NodeEpochs(tmp_path, node).save(7, ocp.args.StandardSave({"x": np.arange(3)}))
    shutil.copytree(tmp_path / "7" / "a", tmp_path / "7" / "a.bak")
    found = ec.inspect(tmp_path)[7]
    assert found["default"].node("b")["x"].tolist() == [0, 1, 2]
    assert [row.node for row in found.stats("x")] == ["a", "b"]
    assert found.verify().ok


def test_attached_metrics_are_those_of_the_epoch(run: pathlib.Path) -> None:
    """An epoch that is asked for by number has them, with who attached them, as it has in the overview."""
    ec.attach_metrics(run, 6, {"score": 0.25}, "evaluator")
    row = open_run(run)[6].row
    assert row.metrics == {"loss": 2.0, "score": 0.25}
    assert row.sources == {"score": "evaluator"}
    assert row.metrics == next(row for row in open_run(run).epochs() if row.epoch == 6).metrics
    assert "attached by evaluator" in repr(open_run(run)[6])
    best = ec.inspect(run, metric="score")
    assert best.best is not None
    assert best.best.row.metrics["score"] == 0.25


@pytest.mark.parametrize(
    "yes", [True, np.bool_(True), np.array(True), jnp.array(True)], ids=["bool", "numpy", "array", "jax"]
)
def test_bools_stay_bools(tmp_path: pathlib.Path, yes: Any) -> None:
    """Among metrics, also attached ones, what a caller attaches and configs; for programs as for people."""
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch, flag in enumerate((yes, np.logical_not(yes))):
            config = ocp.args.JsonSave({"ema": bool(flag)})
            args = ocp.args.Composite(x=ocp.args.StandardSave({"w": np.zeros(2)}), config=config)
            manager.save(epoch, args=args, metrics={"ok": flag}, custom_metadata={"note": flag})
        manager.wait_until_finished()
        ec.attach_metrics(tmp_path, 0, {"eval": {"passed": yes}}, "evaluator")
        assert repr(manager.metrics(0)) == repr({"ok": True, "eval": {"passed": True}})
    run = ec.inspect(tmp_path)
    assert '"ok": true, "eval": {"passed": true}' in json.dumps(run[0].to_json())
    assert '"custom_metadata": {"note": true}' in json.dumps(run[0].to_json())
    assert run.overview().history == {}
    assert re.search(r"epoch .*ok +eval/passed\n +0 .* true +true\n +1 .*false *\n", run.to_text(100))
    assert all(said in run[0].to_text() for said in ("ok true", "eval/passed true", "note: true", "ema  true"))
    assert "ema true → false" in run.diff(0, 1).to_text()
    assert re.search(r"ok +true +false", run.diff(0, 1).to_text())


def test_a_damaged_epoch_is_neither_the_latest_nor_the_best(run: pathlib.Path) -> None:
    """Whoever is asked, and also where only its files tell that it is damaged."""
    (run / "8" / "process_0" / "state.safetensors").unlink()
    (run / "4" / "process_0" / "state.safetensors").unlink()
    found = open_run(run)
    rows = {number: found[number].row for number in found}
    assert [number for number, row in rows.items() if row.latest] == [latest(found)] == [6]
    assert [number for number, row in rows.items() if row.best] == [6]
    assert found.best is not None
    assert found.best.epoch == 6


def test_statistics_of_one_item_are_asked_for_as_differences_are(saved: pathlib.Path) -> None:
    """`item:leaf` names leaves of one item, where others have some of the same name."""
    found = ec.inspect(saved)[4].stats("own:*")
    assert {row.item for row in found} == {"own"}
    assert {row.leaf.name for row in found} == {"where"}


_NO_BACKEND = """
import sys
import epochckpt as ec
from jax._src import xla_bridge

ours, stock = sys.argv[1:]
for path, item, leaf in ((ours, "state", "params/out/kernel"), (stock, "default", "w")):
    run = ec.inspect(path, metric="loss", mode="min")
    epoch = run[2]
    assert run.latest is not None and run.best is not None
    assert epoch[item][leaf].ndim == 2
    assert epoch.stats() and epoch.verify().ok and epoch.detail().items
    for thing in (run, epoch, epoch[item], epoch.stats()):
        assert thing.to_html() and repr(thing) and thing.to_json()
    changed = run.diff(1 if item == "default" else 4, 2)
    assert changed.rows and changed.to_html() and repr(changed) and changed.to_json()
assert ec.inspect(ours)[2]["own"].node("process_0")["seed"] == 2
assert ec.inspect(ours)[2]["config"].read("metadata")
assert not xla_bridge.backends_are_initialized()
print("none")
"""


@pytest.mark.slow
def test_no_backend_of_jax_is_started(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """On a TPU host a second process that starts one breaks training: here starting one would fail."""
    write(tmp_path / "stock", "ocdbt-zarr3-single", {1: tree_of(1), 2: tree_of(2)})
    env = {**os.environ, "JAX_PLATFORMS": "there_is_no_such_platform", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", _NO_BACKEND, str(saved), str(tmp_path / "stock")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "none\n"), done.stderr


@pytest.mark.parametrize("which", ["latest", "best"])
def test_an_epoch_that_is_deleted_while_it_is_chosen_gives_way_to_another(
    tmp_path: pathlib.Path, faults: Faults, which: str
) -> None:
    """A run deletes each newest epoch after the look that has chosen it, and saves a newer one."""
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.zeros(2)}), metrics={"loss": 1.0})
        manager.wait_until_finished()
        chosen: list[int] = []

        def overtake(call: StoreCall) -> None:
            epoch = manager.latest_step()
            assert epoch is not None
            assert call.path.startswith(f"{epoch}/")
            if len(chosen) < 3:
                chosen.append(epoch)
                manager.delete(epoch)
                manager.save(epoch + 1, args=ocp.args.StandardSave({"w": np.zeros(2)}), metrics={"loss": 1.0})
                manager.wait_until_finished()

        def checks_data(call: StoreCall) -> bool:
            return call.store is not manager.components.directory.store and call.path.endswith(".safetensors")

        faults.after(Store.size, overtake, where=checks_data)
        found = getattr(ec.inspect(tmp_path, metric="loss"), which)
        assert (chosen, found.epoch) == ([0, 1, 2], 3)
