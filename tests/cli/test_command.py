"""The command `epochckpt`: what it prints, its exit codes, and that it disturbs nothing."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.cli import arguments, main
from epochckpt.errors import AccessError, StorageError
from epochckpt.inspection import plain, scan
from epochckpt.storage import Reader, Store, opening_through
from epochckpt.testing import Faults
from tests.support.processes import ROOT

Composite, Save = ocp.args.Composite, ocp.args.StandardSave
NOBODY = 65534
COMMANDS = ("ls", "du", "show", "tree", "stat", "diff", "verify", "gc", "export", "watch")
CHANGES = ("rm", "rollback", "cp", "import")


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process."""

    def run(*argv: object) -> Said:
        capsys.readouterr()
        code = main.main([str(arg) for arg in argv])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


def state(epoch: int) -> dict[str, Any]:
    weights = np.linspace(-1, 1, 5000, dtype=np.float32).reshape(50, 100)
    return {"params": {"dense": {"kernel": weights + epoch, "bias": np.zeros(100)}, "scale": np.ones(3)}, "step": epoch}


def save(directory: Any, epochs: Sequence[int], **options: Any) -> None:
    with ec.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for epoch in epochs:
            args = Composite(model=Save(state(epoch)), config=ocp.args.JsonSave({"lr": 0.1}))
            manager.save(epoch, args=args, metrics={"loss": abs(epoch - 2.0), "by\x1b[31m": 1.0}, force=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Epochs 1, 2 and 3 of which 2 has the least loss. Not to be changed."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    save(directory, (1, 2, 3))
    return directory


@pytest.fixture
def damaged(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """The same with a flipped bit in epoch 1, a truncated file in 2, and what a run left that died."""
    run = pathlib.Path(shutil.copytree(saved, tmp_path / "damaged", symlinks=True))
    path = run / "1" / "process_0" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    path = run / "2" / "process_0" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    staging = run / f"incarnation-{'ab' * 8}.orbax-checkpoint-tmp" / "4-1" / "process_0"
    staging.mkdir(parents=True)
    (staging / "model.safetensors").write_bytes(b"x" * 1000)
    return run


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One epoch of two nodes with a value of each one's own."""
    directory = tmp_path_factory.mktemp("nodes") / "run"
    names = ["east", "west"]
    with ec.CheckpointManager(directory, node=names) as manager:
        own = ec.args.NodeSave({name: {"seed": np.full(4, i)} for i, name in enumerate(names)}, by_node=True)
        manager.save(0, args=Composite(model=Save(state(0)), data=own))
    return directory


def export_args(directory: object, to: object) -> list[object]:
    return ["export", directory, "1", to, "--format", "safetensors", "--item", "model"]


def every_command(directory: object, to: object) -> dict[str, list[object]]:
    """A line of each that ends."""
    return {
        "ls": ["ls", directory],
        "du": ["du", directory],
        "show": ["show", directory],
        "tree": ["tree", directory],
        "stat": ["stat", directory],
        "diff": ["diff", directory, 1, 2],
        "verify": ["verify", directory],
        "gc": ["gc", directory],
        "export": export_args(directory, to),
        "watch": ["watch", directory, "--until", 3],
    }


# -- what they say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_all_there_is_on_stdout(
    run_cli: Any, saved: pathlib.Path, tmp_path: pathlib.Path, command: str
) -> None:
    """One document (of watch one a line), with nothing of anybody's log beside it."""
    said = run_cli(*every_command(saved, tmp_path / "out")[command], "--json")
    assert said.code == (1 if command == "diff" else 0)
    assert said.err == ""
    documents = [json.loads(line) for line in said.out.splitlines()]
    assert len(documents) == (3 if command == "watch" else 1)
    assert "NaN" not in said.out


@pytest.mark.parametrize("command", COMMANDS)
def test_text_is_plain_where_there_is_no_terminal(
    run_cli: Any, saved: pathlib.Path, tmp_path: pathlib.Path, command: str
) -> None:
    """No colours, no progress, no escape sequences, not even those in the name of a metric."""
    said = run_cli(*every_command(saved, tmp_path / "out")[command])
    assert said.out.strip()
    assert "\x1b" not in said.out
    assert said.err == ""
    assert max(map(len, said.out.splitlines())) <= (300 if command in ("watch", "export") else 80)


@pytest.mark.parametrize("command", [*COMMANDS, *CHANGES])
def test_help_has_an_example_and_the_exit_codes(run_cli: Any, command: str) -> None:
    """And ends well."""
    said = run_cli(command, "--help")
    assert said.code == 0
    assert f"epochckpt {command} {'params.msgpack ' if command == 'import' else ''}/data/run" in said.out
    assert arguments.EXIT_CODES in said.out


def test_json_of_ls_is_the_rows(run_cli: Any, saved: pathlib.Path) -> None:
    """The same that a notebook is made from."""
    found = scan.look(saved, metric="loss", mode="min")
    assert run_cli("ls", saved, "--metric", "loss", "--mode", "min", "--json").json == plain.to_json(found)


def test_ls_marks_latest_and_best(run_cli: Any, saved: pathlib.Path) -> None:
    """With their numbers in words above."""
    said = run_cli("ls", saved, "--metric", "loss", "--mode", "min")
    assert "3 epochs, " in said.out
    assert "▸ latest 3 · ★ best 2 by min loss" in said.out


def test_ls_shows_so_many(run_cli: Any, saved: pathlib.Path) -> None:
    """The rest is counted."""
    assert "… 2 older epochs" in run_cli("ls", saved, "--limit", 1).out
    assert len(run_cli("ls", saved, "--limit", 0, "--json").json["epochs"]) == 3


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [([], 3), (["latest"], 3), (["1"], 1), (["best", "--metric", "loss", "--mode", "min"], 2),
     (["best", "--metric", "loss"], 3)],
)  # fmt: skip
def test_epochs_have_numbers_and_marks(run_cli: Any, saved: pathlib.Path, epoch: list[str], expected: int) -> None:
    """A number, the latest, the best."""
    assert run_cli("show", saved, *epoch, "--json").json["row"]["epoch"] == expected


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], {"params/dense/kernel", "params/dense/bias", "params/scale", "step"}),
        (["params/dense"], {"params/dense/kernel", "params/dense/bias"}),
        (["params/dense/"], {"params/dense/kernel", "params/dense/bias"}),
        (["*/bias", "step"], {"params/dense/bias", "step"}),
        (["params/scale"], {"params/scale"}),
    ],
)
def test_tree_shows_what_is_asked_for(
    run_cli: Any, saved: pathlib.Path, patterns: list[str], expected: set[str]
) -> None:
    """Names, parts of the tree, shell patterns."""
    items = {item["name"]: item for item in run_cli("tree", saved, "latest", *patterns, "--json").json["items"]}
    assert {leaf["name"] for leaf in items["model"]["leaves"]} == expected
    assert ("config" in items) == (not patterns)


@pytest.mark.parametrize(
    "argv",
    [
        ["tree", "{run}", "1", "params/scale", "step", "--item", "model", "--json"],
        ["tree", "{run}", "--item", "model", "1", "--json", "params/scale", "step"],
        ["tree", "--json", "{run}", "1", "params/scale", "--item", "model", "step"],
    ],
)
def test_options_may_stand_anywhere(run_cli: Any, saved: pathlib.Path, argv: list[str]) -> None:
    """Before, between and behind what they are options of."""
    found = run_cli(*(arg.replace("{run}", str(saved)) for arg in argv)).json
    assert found["row"]["epoch"] == 1
    assert [leaf["name"] for leaf in found["items"][0]["leaves"]] == ["params/scale", "step"]


def test_items_and_nodes_are_chosen(run_cli: Any, nodes: pathlib.Path) -> None:
    """One item; of what each node has of its own, one node's."""
    (item,) = run_cli("tree", nodes, "0", "--item", "data", "--node", "west", "--json").json["items"]
    assert list(item["nodes"]) == ["west"]
    (stats,) = run_cli("stat", nodes, "0", "--node", "west", "--json").json
    assert (stats["node"], stats["min"], stats["max"], stats["count"]) == ("west", 1.0, 1.0, 4)


def test_stat_reads_what_was_saved(run_cli: Any, saved: pathlib.Path) -> None:
    """One leaf of one epoch."""
    (found,) = run_cli("stat", saved, "2", "params/dense/kernel", "--json").json
    kernel = state(2)["params"]["dense"]["kernel"]
    assert (found["min"], found["max"], found["count"]) == (kernel.min(), kernel.max(), 5000)
    assert found["norm"] == pytest.approx(float(np.linalg.norm(kernel.astype(np.float64))))
    assert "params/dense/kernel" in run_cli("stat", saved, "2", "*/kernel").out


def test_stock_orbax_is_looked_at_as_well(run_cli: Any, tmp_path: pathlib.Path) -> None:
    """Its steps have no nodes and no checksums, and are told as such."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, args=Save({"w": np.arange(6.0)}))
    assert "stock Orbax" in run_cli("show", tmp_path / "run").out
    said = run_cli("verify", tmp_path / "run")
    assert said.code == 0
    assert "keeps no checksums" in " ".join(said.out.split())
    assert run_cli("stat", tmp_path / "run", "7", "--json").json[0]["max"] == 5.0


def test_object_stores_are_looked_at_as_well(run_cli: Any) -> None:
    """Wherever the store can go."""
    directory = f"memory://{uuid.uuid4().hex}/"
    save(directory, (1, 2))
    assert [row["epoch"] for row in run_cli("ls", directory, "--json").json["epochs"]] == [1, 2]
    assert run_cli("verify", directory).code == 0
    assert run_cli("diff", directory, 1, 2).code == 1


def test_folders_with_a_prefix_are_found(run_cli: Any, tmp_path: pathlib.Path) -> None:
    """By the options that the manager has; without them it says what it found."""
    save(tmp_path / "run", (3,), step_prefix="ckpt", step_format_fixed_length=6)
    said = run_cli("show", tmp_path / "run", "--step-prefix", "ckpt", "--step-format-fixed-length", 6, "--json")
    assert (said.json["row"]["epoch"], said.json["row"]["folder"]) == (3, "ckpt_000003")
    said = run_cli("ls", tmp_path / "run")
    assert (said.code, said.out) == (3, "")
    assert "ckpt_000003" in said.err


def test_after_a_rollback_a_directory_with_a_prefix_is_no_folder_of_runs(run_cli: Any, tmp_path: pathlib.Path) -> None:
    """What was rolled back lies in a folder in it, which holds epochs, too."""
    save(tmp_path, (1, 2), step_prefix="ckpt")
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt")
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        manager.rollback_to(1)
    said = run_cli("ls", tmp_path)
    assert (said.code, said.out) == (3, "")
    assert "ckpt_1" in said.err


# -- exit codes ------------------------------------------------------------------------------------------------------


def test_damage_is_exit_code_1(run_cli: Any, damaged: pathlib.Path) -> None:
    """Of ls and show where a look at the files shows it, of verify wherever a byte differs; the rest is still shown."""
    said = run_cli("ls", damaged)
    assert said.code == 1
    assert re.search(r"2 +damaged", said.out)
    assert re.search(r"▸ +✓", said.out)
    assert run_cli("show", damaged, 2).code == 1
    assert run_cli("show", damaged, 3).code == 0
    said = run_cli("verify", damaged, "--json")
    assert said.code == 1
    assert [(row["epoch"], row["ok"]) for row in said.json["epochs"]] == [(1, False), (2, False), (3, True)]
    assert said.json["epochs"][0]["damage"][0]["path"] == "1/process_0/model.safetensors"
    assert run_cli("verify", damaged, 3).code == 0
    assert run_cli("stat", damaged, 1).code == 1


def test_an_epoch_without_a_usable_record_is_damaged(run_cli: Any, damaged: pathlib.Path) -> None:
    """It is said of the latest that a newer one is damaged; verify goes on behind it."""
    (damaged / "3" / "epoch.json").write_bytes(b"{}")
    said = run_cli("show", damaged, 3)
    assert said.code == 1
    assert "epoch.json" in said.out
    said = run_cli("show", damaged, "--json")
    assert said.json["row"]["epoch"] == 1
    assert "newer, but damaged: 2, 3" in said.err
    assert [row["ok"] for row in run_cli("verify", damaged, "--json").json["epochs"]] == [False] * 3
    assert run_cli("tree", damaged, 3).code == 1


def test_differences_are_exit_code_1(run_cli: Any, saved: pathlib.Path, nodes: pathlib.Path) -> None:
    """And none are 0."""
    assert run_cli("diff", saved, 1, 2).code == 1
    said = run_cli("diff", saved, 2, 2)
    assert said.code == 0
    assert "unchanged" in said.out
    said = run_cli("diff", saved, 1, 2, "params/dense/kernel", "--json")
    (row,) = said.json["rows"]
    assert (row["name"], row["change"], row["elements"]) == ("params/dense/kernel", "changed", 5000)
    said = run_cli("diff", saved, 1, 0, "--other", nodes, "--item", "model", "--json")
    assert said.json["other_directory"] == str(nodes)
    assert {row["change"] for row in said.json["rows"]} == {"changed", "unchanged"}


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["ls"],
        ["ls", "{run}", "--limit", "-1"],
        ["show", "{run}", "first"],
        ["show", "{run}", "best"],
        ["diff", "{run}", "1"],
        ["gc", "{run}", "--older-than", "soon"],
        ["gc", "{run}", "--older-than", "1s"],
        ["export", "{run}", "1", "/nowhere"],
        ["export", "{run}", "1", "{run}/inside", "--format", "orbax"],
        ["watch", "{run}", "--interval", "0s"],
        ["ls", "bogus://bucket/run"],
        ["ls", "gs://"],
    ],
)
def test_wrong_usage_is_exit_code_2(run_cli: Any, saved: pathlib.Path, argv: list[str]) -> None:
    """Said on stderr, without a traceback; nothing on stdout."""
    said = run_cli(*(arg.replace("{run}", str(saved)) for arg in argv))
    assert (said.code, said.out) == (2, "")
    assert said.err.strip()
    assert "Traceback" not in said.err


def test_watch_says_by_its_code_that_an_epoch_is_damaged(run_cli: Any, tmp_path: pathlib.Path) -> None:
    """Also if that is the one waited for; 0 says that all that it showed is whole."""
    save(tmp_path / "run", (1, 2, 3))
    record = tmp_path / "run" / "3" / "epoch.json"
    whole = record.read_bytes()
    for data, code, word in ((whole, 0, "present"), (b"{}", 1, "damaged")):
        record.write_bytes(data)
        said = run_cli("watch", tmp_path / "run", "--until", 3)
        assert said.code == code
        assert f"epoch 3 {word}" in said.out


def test_watch_looks_once_for_each_event(run_cli: Any, saved: pathlib.Path) -> None:
    """To tell whether its epoch is the best so far."""
    opened: list[Store] = []

    def noted(store: Store) -> Store:
        opened.append(store)
        return store

    with opening_through(noted):
        said = run_cli("watch", saved, "--until", 3, "--metric", "loss")
    assert (said.code, said.out.count("best"), len(opened)) == (0, 1, 1 + 3)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["ls", "{run}x"], "does not exist"),
        (["watch", "{run}/1"], "is the folder of a single epoch; pass its parent"),
        (["watch", "{run}x"], "does not exist"),
        (["show", "{run}", "7"], "near: 1, 2, 3"),
        (["verify", "{run}", "1", "7"], "near: 1, 2, 3"),
        (["diff", "{run}", "1", "7"], "near: 1, 2, 3"),
        (["export", "{run}", "7", "/nowhere", "--format", "orbax"], "near: 1, 2, 3"),
        (["tree", "{run}", "1", "params/dense/kernal"], "near: 'params/dense/kernel'"),
        (["stat", "{run}", "1", "kernel"], "near: 'params/dense/kernel'"),
        (["tree", "{run}", "1", "--item", "modell"], "near: 'model'"),
        (["tree", "{run}", "1", "--node", "process_0"], "no node 'process_0' has items of its own"),
        (["show", "{run}", "best", "--metric", "lost"], "loss"),
        (["watch", "{run}", "--timeout", "0.01s", "--interval", "0.01s"], "nothing was committed within 10 ms"),
    ],
)
def test_what_is_not_there_is_exit_code_3(run_cli: Any, saved: pathlib.Path, argv: list[str], expected: str) -> None:
    """With near names, where there are any."""
    said = run_cli(*(arg.replace("{run}", str(saved)) for arg in argv))
    assert said.code == 3
    assert expected in " ".join(said.err.split())
    assert "Traceback" not in said.err
    assert argv[0] == "watch" or said.out == ""


def test_no_permission_is_exit_code_4(run_cli: Any, saved: pathlib.Path, public_folder: pathlib.Path) -> None:
    """Root is let in everywhere, and looks as nobody."""
    run = pathlib.Path(shutil.copytree(saved, public_folder / "run", symlinks=True))
    run_cli("ls", run)  # whatever is imported late is imported
    run.chmod(0)
    with contextlib.ExitStack() as stack:
        stack.callback(run.chmod, 0o755)
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
            stack.callback(os.seteuid, 0)
        said = run_cli("ls", run)
    assert (said.code, said.out) == (4, "")
    assert "Permission denied" in said.err


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "not permitted"), OSError(errno.EIO, "away")])
@pytest.mark.parametrize("more", [(), ("--repair-view",)])
def test_what_cannot_be_reached_is_not_called_damaged(
    run_cli: Any, saved: pathlib.Path, faults: Faults, error: OSError, more: tuple[str, ...]
) -> None:
    """The other epochs are verified all the same."""
    faults.fail(Store.read, error, where=lambda call: call.path == "2/epoch.json")
    said = run_cli("verify", saved, "--json", *more)
    assert (said.code, [(one["epoch"], one["ok"]) for one in said.json["epochs"]]) == (4, [(1, True), (3, True)])
    assert str(error.strerror) in said.err


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "not permitted"), OSError(errno.EIO, "away")])
@pytest.mark.parametrize("method", [Store.open_reader, Reader.read_into])
def test_a_file_that_cannot_be_reached_is_not_called_damaged(
    run_cli: Any, saved: pathlib.Path, faults: Faults, error: OSError, method: Any
) -> None:
    """Its place is listed; a damaged file of the same epoch is damage all the same."""
    faults.fail(method, error, where=lambda call: call.path.startswith("2/process_0/model"))
    said = run_cli("verify", saved, "--json")
    epochs = {one["epoch"]: one for one in said.json["epochs"]}
    assert (said.code, [epoch for epoch, one in epochs.items() if not one["ok"]]) == (4, [2])
    assert epochs[2]["damage"] == epochs[2]["view_damage"] == []
    assert epochs[2]["unread"]
    assert all(str(error.strerror) in one["problem"] for one in epochs[2]["unread"])
    with ec.CheckpointManager(saved, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        found = manager.verify(2)
    assert (found.ok, found.damage) == (False, ())
    with pytest.raises((AccessError, StorageError), match=str(error.strerror)):
        found.raise_if_damaged()
    text = run_cli("verify", saved, "2")
    assert text.code == 4
    assert "not all of it was read" in text.out


def test_a_hostile_message_does_nothing_to_a_terminal(run_cli: Any, saved: pathlib.Path) -> None:
    """Not on stderr either; a traceback comes only if asked for."""
    said = run_cli("tree", saved, "1", "\x1b[31m\u202e")
    assert said.code == 3
    assert r"x1b[31m\\u202e" in said.err
    assert not {"\x1b", "\u202e"} & set(said.err)
    assert "Traceback" in run_cli("tree", saved, "1", "nothing", "--debug").err


# -- what they do ----------------------------------------------------------------------------------------------------


def test_an_epoch_by_number_is_marked(run_cli: Any, saved: pathlib.Path) -> None:
    """As it is in the list: the same epoch is not the latest, or the best, only because nobody called it so."""
    rows = [run_cli("show", saved, epoch, "--metric", "loss", "--mode", "min", "--json").json["row"] for epoch in "123"]
    assert [(row["latest"], row["best"]) for row in rows] == [(False, False), (False, True), (True, False)]


def test_an_item_that_cannot_be_looked_into_is_damage(run_cli: Any, tmp_path: pathlib.Path) -> None:
    """Of stock Orbax, whose listing does not show that an index is gone: no word of it would look like no data."""
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=Composite(model=Save({"a": np.ones(3)})))
    for path in (tmp_path / "run" / "1" / "model").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.unlink()
    for command in ("show", "tree", "stat"):
        assert run_cli(command, tmp_path / "run").code == 1, command
    assert "cannot be read" in run_cli("stat", tmp_path / "run").err


def test_leaves_are_told_apart_by_their_items(run_cli: Any, tmp_path: pathlib.Path) -> None:
    """A runner's blobs are items of one leaf each, all of the same name: items can be named, and are in the answer."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        for epoch in (1, 2):
            blobs = {name: Save(np.full(3, epoch if name == "w" else 0)) for name in ("b", "w")}
            manager.save(epoch, args=Composite(**blobs))
    for pattern in ("w", "w:*", "w:value"):
        found = run_cli("stat", tmp_path / "run", 2, pattern, "--json")
        assert [(row["item"], row["mean"]) for row in found.json] == [("w", 2.0)], pattern
    assert re.search(r"^w +value +int64", run_cli("stat", tmp_path / "run", 2, "w").out, re.MULTILINE)
    assert re.search(r"^~ +w +value +changed", run_cli("diff", tmp_path / "run", 1, 2).out, re.MULTILINE)
    assert "near: 'w'" in run_cli("tree", tmp_path / "run", 2, "ww").err


def test_gc_removes_nothing_unless_told_to(run_cli: Any, damaged: pathlib.Path) -> None:
    """A dry run by default; never an epoch; not what may still be written to."""
    staging = damaged / f"incarnation-{'ab' * 8}.orbax-checkpoint-tmp"
    said = run_cli("gc", damaged, "--delete")
    assert said.code == 0
    assert "nothing was removed" in said.out
    assert "something was written" in " ".join(said.out.split())
    before = sorted(damaged.rglob("*"))
    soon = ["--older-than", "0.002s", "--save-timeout", "0.001s"]  # as if no save of the job took longer than that
    said = run_cli("gc", damaged, *soon, "--json")
    assert said.json["deleted"] is False
    assert [(row["kind"], row["epochs"]) for row in said.json["rows"]] == [("attempt", [4])]
    assert (said.json["kept"], said.json["failed"]) == ({}, [])
    kept = run_cli("gc", damaged, "--json").json["kept"]
    assert all("something was written to it" in why for why in kept.values())
    assert kept.keys() == {row["path"] for row in said.json["rows"]}
    assert "--delete removes it" in run_cli("gc", damaged, *soon).out
    assert sorted(damaged.rglob("*")) == before
    assert "removed: 1 thing" in run_cli("gc", damaged, "--delete", *soon).out
    assert not (staging / "4-1").exists()
    assert (damaged / "1" / "epoch.json").exists()


def test_export_writes_an_epoch(run_cli: Any, saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As `ec.export` does; a destination that is not empty is refused."""
    said = run_cli(*export_args(saved, tmp_path / "out"), "--json", "--skip-unsupported")
    assert said.code == 0
    assert said.json["path"] == str(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == said.json["nbytes"]
    assert run_cli(*export_args(saved, tmp_path / "out")).code == 2
    said = run_cli(
        "export", saved, "best", tmp_path / "orbax", "--format", "orbax", "--metric", "loss", "--mode", "min"
    )
    assert said.code == 0
    with ocp.CheckpointManager(tmp_path / "orbax", item_names=("model", "config")) as manager:
        assert manager.all_steps() == [2]


def test_export_writes_some_leaves(run_cli: Any, saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Chosen, renamed and cast; it says what was cast. A pattern that fits nothing is answered with near names."""
    chosen = "--item", "model", "--include", "params/*", "--rename", "params=model", "--dtype", "bfloat16"
    config = tmp_path / "config.json"
    config.write_text("{}")
    said = run_cli("export", saved, "1", tmp_path / "hf", "--format", "huggingface", *chosen, "--config", config)
    assert (said.code, said.err) == (0, "")
    assert "1 leaf of float32 and 2 leaves of float64 cast to bfloat16" in said.out
    assert sorted(os.listdir(tmp_path / "hf")) == ["README.md", "config.json", "model.safetensors"]
    said = run_cli("export", saved, "1", tmp_path / "x", "--format", "orbax", "--item", "model", "--exclude", "parms/*")
    assert said.code == 3
    assert "near: 'params/" in said.err
    said = run_cli("export", saved, "1", tmp_path / "x", "--format", "orbax", "--rename", "params")
    assert (said.code, "OLD=NEW" in said.err) == (2, True)
    assert run_cli("export", saved, "1", tmp_path / "x", "--format", "orbax", "--max-file-size", "big").code == 2


def test_the_command_is_installed() -> None:
    """Under its name, and as `python -m epochckpt`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    entry = importlib.metadata.EntryPoint("epochckpt", scripts["epochckpt"], "console_scripts")
    assert entry.load() is main.main


# -- terminals, pipes, signals ---------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs a command whose stdout and stderr are a terminal; gives what came there."""
    ours, theirs = os.openpty()
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")

    def run(*argv: object) -> str:
        with open(os.dup(theirs), "w", encoding="utf-8") as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", file)
            patch.setattr(sys, "stderr", file)
            assert main.main([str(arg) for arg in argv]) == 0
            file.write("\x00")
        said = b""
        while not said.endswith(b"\x00"):
            said += os.read(ours, 1 << 16)
        return said.decode().rstrip("\x00")

    yield run
    os.close(ours)
    os.close(theirs)


def test_colours_are_for_terminals(terminal: Any, saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR and a dumb terminal have none; a metric's name brings none of its own."""
    assert "\x1b[38;5;" in terminal("ls", saved)
    assert "\x1b[31m" not in terminal("ls", saved)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[38;5;" not in terminal("ls", saved)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in terminal("ls", saved)


def test_colours_can_be_forced(run_cli: Any, saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a pager that shows them."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in run_cli("ls", saved).out
    assert "\x1b" not in run_cli("ls", saved, "--json").out


def test_a_terminal_without_unicode_gets_what_it_has(saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Question marks instead of a traceback."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main.main(["ls", str(saved)]) == 0
    assert b"? latest 3 ?" in written.getvalue()


def test_long_work_shows_its_progress_on_a_terminal(
    terminal: Any, saved: pathlib.Path, tmp_path: pathlib.Path, patience: Callable[..., None]
) -> None:
    """And takes it away at the end; what is done soon shows none."""
    patience(bar_delay_secs=1e6)
    assert "verifying" not in terminal("verify", saved)
    patience(bar_delay_secs=0.0, bar_removal_secs=100.0)
    assert "verifying" in terminal("verify", saved)
    assert "exporting epoch 1" in terminal(*export_args(saved, tmp_path / "out"), "--skip-unsupported")


def start(*argv: object, **given: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "epochckpt", *map(str, argv)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen(command, **(pipes | given))


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_silently(tmp_path: pathlib.Path) -> None:
    """`| head`: no traceback, and an exit code of its own."""
    with ec.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=Save({f"leaf_{i:05d}": i for i in range(4000)}))
    with start("tree", tmp_path / "run", "--all") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("item default  4,000 leaves")
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_ctrl_c_ends_watch(saved: pathlib.Path) -> None:
    """With its exit code, without a traceback."""
    with start("watch", saved) as process:
        assert process.stdout is not None
        assert "epoch 1 present" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said[1]


@pytest.mark.slow
def test_no_command_starts_a_backend_that_disturbs_training(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With a platform that does not exist all work; export and what changes something have the CPU's alone."""
    commands = every_command(saved, tmp_path / "out")
    copy = tmp_path / "copy"
    last = [
        ["cp", saved, copy, "--yes"],
        ["rm", copy, 1, "--yes"],
        ["rollback", copy, 2, "--yes"],
        ["export", saved, "1", tmp_path / "orbax", "--format", "orbax"],
    ]
    script = f"""
import sys
from jax._src import xla_bridge
from epochckpt.cli.main import main
for argv in {[[str(arg) for arg in argv] for argv in commands.values()]!r}:
    assert main(argv) == (1 if argv[0] == "diff" else 0), argv
    assert not xla_bridge.backends_are_initialized(), argv
for argv in {[[str(arg) for arg in argv] for argv in last]!r}:
    assert main(argv) == 0, argv
assert set(xla_bridge.backends()) <= {{"cpu"}}
"""
    env = {**os.environ, "JAX_PLATFORMS": "nonsense", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_the_documentation_has_every_command_and_exit_code() -> None:
    """docs/inspect.md."""
    page = (ROOT / "docs" / "inspect.md").read_text()
    assert arguments.EXIT_CODES.strip() in page
    headings = "".join(line for line in page.splitlines() if line.startswith("### "))
    assert [command for command in (*COMMANDS, *CHANGES) if f"`{command}`" not in headings] == []
