"""Several runs side by side: found below a folder, with what goes on in each."""

from __future__ import annotations

import json
import math
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Callable
from typing import Any

import matplotlib.axes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.cli import main
from epochckpt.errors import NotACheckpointDirectoryError, UnknownNameError
from epochckpt.inspection import runs as looking
from epochckpt.inspection.rows import COMMITTED, DAMAGED, IN_PROGRESS, DirectoryRow, EpochRow, Overview
from epochckpt.storage import Store
from epochckpt.testing import Faults
from tests.support.small_saves import edit_record


def save(directory: pathlib.Path, losses: list[float]) -> None:
    with ec.CheckpointManager(directory) as manager:
        for epoch, loss in enumerate(losses):
            manager.save(epoch, args=ocp.args.StandardSave({"w": np.zeros(3)}), metrics={"loss": loss, "lr": 0.1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    found = tmp_path_factory.mktemp("several") / "runs"
    save(found / "a", [3.0, 1.0, 2.0])
    save(found / "deep" / "b", [0.5])
    (found / "notes").mkdir()
    (found / "notes" / "todo.txt").write_text("no run")
    return found


def test_runs_are_found_below_a_folder(folder: pathlib.Path) -> None:
    runs = ec.inspect_runs(folder, metric="loss", mode="min")
    assert list(runs) == ["a", "deep/b"]
    a, b = runs.rows()
    assert (a.state, a.epochs, a.latest, a.best, a.best_value) == ("closed", 3, 2, 1, 1.0)
    assert a.history == {"loss": ((0, 3.0), (1, 1.0), (2, 2.0)), "lr": ((0, 0.1), (1, 0.1), (2, 0.1))}
    assert (b.best, b.best_value) == (0, 0.5)
    assert a.nbytes > 2 * b.nbytes > 0
    assert list(runs["deep/b"]) == [0]
    text = runs.to_text(100)
    assert "2 runs · 2 closed" in text
    assert "★ best deep/b by min loss: 0.5" in text
    assert "█▁▅" in text
    ax = runs.plots.metric("loss")
    assert isinstance(ax, matplotlib.axes.Axes)
    assert [line.get_label() for line in ax.get_lines()] == ["a", "deep/b"]
    with pytest.raises(UnknownNameError, match="los"):
        runs.plots.metric("los")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Runs with configs of all kinds: an item of a job, a JSON item, metadata of a directory, and none."""
    found = tmp_path_factory.mktemp("sweep")
    for number, (lr, width) in enumerate([(0.1, 64), (0.01, 128), (0.3, 64)]):
        job = ec.Job(stop_conditions=[ec.stop.max_epochs(3)])
        job.init(lambda ws, lr=lr, width=width: ws.update(config={"lr": lr, "net": {"width": width}}, seen=0, seed=1))
        job.epoch(lambda ws, lr=lr: ws.update(seen=ws["seen"] + 5) or {"loss": lr, "done": ws.epoch * 10.0})
        ec.run(job, found / f"job_{number}")
    config = ocp.args.JsonSave({"lr": 0.03, "net": {"width": 64}, "bias": False})
    with ec.CheckpointManager(found / "json") as manager:
        for epoch in range(2):
            position = ocp.args.JsonSave({"position": epoch})
            args = ocp.args.Composite(x=ocp.args.StandardSave({"w": np.ones(2)}), config=config, reader=position)
            manager.save(epoch, args=args, metrics={"loss": 0.02, "eval": {"acc": 0.9}}, custom_metadata={"bias": True})
    with ec.CheckpointManager(found / "meta", metadata={"lr": "auto"}) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.ones(2)}), metrics={"loss": math.nan})
    with ocp.CheckpointManager(found / "stock") as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.ones(2)}))
    return found


def test_configs_that_differ_are_columns(sweep: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What changes within a run is no config, nor what all runs that have it have alike."""
    seen = ec.inspect_runs(sweep).overview()
    rows = {row.name: row for row in seen.runs}
    assert rows["job_1"].config == {"lr": 0.01, "net/width": 128, "value": 1}
    assert rows["json"].config == {"lr": 0.03, "net/width": 64, "config/bias": False, "bias": True}
    assert (rows["meta"].config, rows["stock"].config) == ({"lr": "auto"}, {})
    assert seen.differing == ("lr", "net/width")
    assert all((row.trained_secs is not None) is row.name.startswith("job") for row in seen.runs)
    assert main.main(["ls", str(sweep), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["differing"] == ["lr", "net/width"]
    assert [run["config"].get("lr") for run in answer["runs"]] == [0.1, 0.01, 0.3, 0.03, "auto", None]
    text = ec.inspect_runs(sweep).to_text(120)
    assert re.search(r"age +trained +loss +curve +lr +net/width", text)
    assert re.search(r"job_1 .* 0\.01 +128 ", text)
    page = ec.inspect_runs(sweep)._repr_html_()
    assert "net/width" in page
    assert "trained" in page


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("lr", ["job_1", "json", "job_0", "job_2", "meta", "stock"]),
        ("-lr", ["meta", "job_2", "job_0", "json", "job_1", "stock"]),
        ("loss", ["job_1", "json", "job_0", "job_2", "meta", "stock"]),
        ("-loss", ["job_2", "job_0", "json", "job_1", "meta", "stock"]),
        ("-run", ["stock", "meta", "json", "job_2", "job_1", "job_0"]),
        ("eval/acc", ["json", "job_0", "job_1", "job_2", "meta", "stock"]),
    ],
)
def test_runs_are_in_the_order_of_any_column(
    sweep: pathlib.Path, sort: str, order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Those without a value, or with NaN, come last; the column is seen on a narrow terminal, too."""
    assert main.main(["ls", str(sweep), f"--sort={sort}"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if re.match("(job|json|meta|stock)", line)] == order
    assert f" {sort.removeprefix('-')} " in shown.replace("\n", " \n") or sort == "-run"
    rows = ec.inspect_runs(sweep, sort=sort).rows()
    assert [row.name for row in rows] == order


@pytest.mark.slow
@pytest.mark.parametrize("sort", ["latest", "age", "trained", "best", "epochs", "bytes", "eval/acc", "lr", "seen_by"])
def test_the_column_of_the_order_has_room(sweep: pathlib.Path, tmp_path: pathlib.Path, sort: str) -> None:
    """Also where another metric is asked for, and where all runs have the same value."""
    shutil.copytree(sweep, tmp_path / "runs", symlinks=True)
    with ec.CheckpointManager(tmp_path / "runs" / "one", metadata={"seen_by": 7}) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.ones(2)}), metrics={"loss": 1.0})
    text = ec.inspect_runs(tmp_path / "runs", metric="loss", sort=sort).to_text(30)
    assert re.search(rf"^run .*\b{sort}\b", text, re.MULTILINE), text


def json_runs(folder: pathlib.Path, config: dict[str, object], **kwargs: object) -> None:
    """Two runs with an item `config` each."""
    for number in range(2):
        with ec.CheckpointManager(folder / f"run_{number}", **kwargs) as manager:  # type: ignore[arg-type]
            args = ocp.args.Composite(config=ocp.args.JsonSave({**config, "number": number}))
            manager.save(0, args=args, metrics={"loss": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("[" * 8000, {}),
        ('{"a":' * 2000, {}),
        ('{"a":' * 2000 + "1" + "}" * 2000, {}),
        ('{"a": ' + "[" * 400 + "]" * 400 + ', "b": 2}', {"b": 2}),
        ('{"a": 1' + "0" * 6000 + "}", {}),
        ('{"a": 1' + "0" * 4000 + "}", {"a": 10**4000}),
        ('{"a": "' + "x" * 20_000 + '"}', {}),
        ('{"\\ud800": "\\u001b[2J\\ud800", "b": Infinity}', {"\ud800": "\x1b[2J\ud800", "b": math.inf}),
        ("[1, 2]", {}),
        ("", {}),
    ],
)
def test_a_hostile_json_item_hides_no_run(
    tmp_path: pathlib.Path, content: str, found: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    json_runs(tmp_path, {"lr": 0.1})
    file = tmp_path / "run_0" / "0" / "process_0" / "config" / "metadata"
    file.chmod(0o644)
    file.write_text(content)
    for asked in ([], ["--json"], ["--sort=a"] * ("a" in found)):
        assert main.main(["ls", str(tmp_path), *asked]) == 0
        shown = capfd.readouterr().out
        assert "run_0" in shown
        assert "\x1b" not in shown
    rows = ec.inspect_runs(tmp_path).rows()
    assert [row.config for row in rows] == [found, {"lr": 0.1, "number": 1}]
    assert "run_0" in (ec.inspect_runs(tmp_path)._repr_html_() or "")


def test_a_hostile_json_item_is_read_up_to_a_limit(tmp_path: pathlib.Path) -> None:
    """Also the metadata of a directory."""
    json_runs(tmp_path, {"lr": 0.1, "much": "x" * 17_000}, metadata={"much": "x" * 17_000})
    assert [row.config for row in ec.inspect_runs(tmp_path).rows()] == [{}, {}]


def test_notes_of_the_runner_are_no_config(tmp_path: pathlib.Path) -> None:
    """Also where a run has one epoch left, so that nothing tells what changes."""
    for number in range(2):
        job = ec.Job(stop_conditions=[ec.stop.max_epochs(2)])
        job.init(lambda ws, number=number: ws.update(config={"lr": number}))
        job.epoch(lambda ws: {"loss": 1.0})
        ec.run(job, tmp_path / f"run_{number}", options=ocp.CheckpointManagerOptions(max_to_keep=1))
    rows = ec.inspect_runs(tmp_path).rows()
    assert [(row.epochs, row.config) for row in rows] == [(1, {"lr": 0}), (1, {"lr": 1})]
    assert all(row.trained_secs is not None for row in rows)


def test_secrets_are_no_values_of_configs(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither by the name of a value, nor by that of its item, or of the mapping that it is in."""
    for number in range(2):
        hidden = f"hidden{number}"
        tree = {"password": hidden, "depth": number}
        with ec.CheckpointManager(tmp_path / f"run_{number}", metadata={"HF_TOKEN": hidden}) as manager:
            args = ocp.args.Composite(
                config=ocp.args.JsonSave({"api_key": hidden, "auth": {"user": hidden}, "lr": number}),
                secrets=ocp.args.JsonSave({"first": hidden}),
                values=ocp.args.StandardSave(tree),
            )
            manager.save(0, args=args, custom_metadata={"net": {"Credentials": hidden, "width": number}})
    assert [row.config for row in ec.inspect_runs(tmp_path).rows()] == [
        {"lr": number, "depth": number, "net/width": number} for number in range(2)
    ]
    for asked in ([], ["--json"]):
        assert main.main(["ls", str(tmp_path), *asked]) == 0
        shown = capsys.readouterr().out
        assert "depth" in shown
        assert "hidden" not in shown


def test_configs_are_read_without_the_arrays(tmp_path: pathlib.Path) -> None:
    """Their cost does not depend on how many leaves a run saves: of a record only short items are parsed."""
    with ec.CheckpointManager(tmp_path / "a") as manager:
        for epoch in range(2):
            tree = {f"w{n}": np.zeros(1) for n in range(300)}
            state = ocp.args.StandardSave(tree, custom_metadata={"optimizer": {"kind": "adam"}})
            config = ocp.args.JsonSave({"lr": 0.1})
            values = ocp.args.StandardSave({"depth": 3, "width": 4})
            args = {"state": state, "config": config, "values": values}
            manager.save(epoch, args=ocp.args.Composite(**args))

    def leaf_lost(item: str) -> Callable[[dict[str, Any]], None]:
        """Has no leaf where an item's first one is: whoever parses it refuses the record."""

        def edit(body: dict[str, Any]) -> None:
            body["items"][item]["leaves"][0] = None

        return edit

    for epoch in range(2):
        edit_record(tmp_path / "a" / str(epoch) / "epoch.json", leaf_lost("state"))
    assert ec.inspect_runs(tmp_path).rows()[0].config == {"lr": 0.1, "depth": 3, "width": 4}
    edit_record(tmp_path / "a" / "1" / "epoch.json", leaf_lost("values"))
    assert ec.inspect_runs(tmp_path).rows()[0].config != {"lr": 0.1, "depth": 3, "width": 4}


def test_in_a_bucket_no_request_is_made_for_configs(faults: Faults) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    with ec.CheckpointManager(f"{root}/runs/a", metadata={"lr": 1}) as manager:
        manager.save(3, args=ocp.args.JsonSave({"lr": 0.1}), metrics={"loss": 1.0})
    asked: list[str] = []
    for method in (Store.read, Store.open_reader):
        faults.before(method, lambda call: asked.append(f"{call.store.root}/{call.path}"))
    (row,) = ec.inspect_runs(f"{root}/runs").rows()
    assert (row.latest, row.config) == (3, {})
    assert asked
    assert not [path for path in asked if "a/3/" in path or path.endswith("ROOT_METADATA")]


class Incomparable(DirectoryRow):
    """A row that is compared with no other."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError(f"{self.name} is compared with {other}")

    __hash__ = DirectoryRow.__hash__


def test_rows_are_not_compared_with_each_other() -> None:
    """The time to order many runs does not grow with the square of their number."""
    rows = [Incomparable(str(n), "closed", best_value=float(n) if n % 2 else None) for n in range(4)]
    assert [row.name for row in looking.ordered(rows, "-best")] == ["3", "1", "0", "2"]


def test_a_column_that_no_run_has_is_answered_with_near_ones(
    sweep: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["ls", str(sweep), "--sort", "net/widt"]) == 3
    assert "no column 'net/widt' to sort runs by; near: 'net/width'" in capsys.readouterr().err
    assert main.main(["ls", str(sweep / "json"), "--sort", "loss"]) == 2
    assert "is one run" in capsys.readouterr().err


def test_the_command_lists_runs(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a metric the one that most runs have is shown, and none is best."""
    assert main.main(["ls", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "deep/b" in shown
    assert "loss" in shown
    assert "best" not in shown
    assert main.main(["ls", str(folder / "notes")]) == 3
    assert "holds no epochs but todo.txt" in capsys.readouterr().err


def test_what_is_no_folder_of_runs_is_said(folder: pathlib.Path) -> None:
    with pytest.raises(NotACheckpointDirectoryError, match="is one checkpoint directory: use `inspect`"):
        ec.inspect_runs(folder / "a")
    with pytest.raises(NotACheckpointDirectoryError, match="does not exist"):
        ec.inspect_runs(folder / "c")
    with pytest.raises(NotACheckpointDirectoryError, match="holds checkpoint directories"):
        ec.inspect(folder)


def test_one_that_cannot_be_read_hides_no_other(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(folder / "a", tmp_path / "a", symlinks=True)
    save(tmp_path / "b", [1.0])
    head = next((tmp_path / "b").rglob("epoch.json"))
    head.chmod(0o644)
    head.write_bytes(b"{}")
    seen = ec.inspect_runs(tmp_path).overview()
    assert [(row.name, row.state) for row in seen.runs] == [("a", "closed"), ("b", DAMAGED)]


def test_runs_in_a_bucket_are_reached_by_its_settings() -> None:
    """They stand in the query of the URL, and each run is opened with them."""
    root = f"memory://{uuid.uuid4().hex}"
    with ec.CheckpointManager(f"{root}/runs/a") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.zeros(3)}), metrics={"loss": 1.0})
    runs = ec.inspect_runs(f"{root}/runs?concurrency=3", metric="loss")
    assert [(row.name, row.latest, row.best_value) for row in runs.rows()] == [("a", 3, 1.0)]
    assert runs["a"].epoch_directory.store.settings.concurrency == 3


def test_a_run_is_stale_when_its_next_epoch_is_long_overdue() -> None:
    """Ten of its usual intervals, and ten minutes; a finished one is not, nor one that is saving."""
    now = time.time_ns()

    def state(*ages: float, **latest: object) -> str:
        rows = [EpochRow(n, COMMITTED, committed_ns=now - int(age * 1e9)) for n, age in enumerate(ages)]
        rows[-1] = EpochRow(len(ages) - 1, COMMITTED, committed_ns=rows[-1].committed_ns, latest=True, **latest)  # type: ignore[arg-type]
        return looking.state_of(Overview("/run", tuple(rows)))[0]

    assert [state(500, 400), state(5000, 4000), state(5000, 700), state(2000, 1990)] == [
        "training",
        "training",
        "training",
        "stale",
    ]
    closed = {
        owners: looking.state_of(Overview("/run", (EpochRow(1, COMMITTED, committed_ns=now, latest=True),)), owners)[0]
        for owners in looking.Owners
    }
    assert list(closed.values()) == ["closed", "ended", "training"]
    assert state(9e9, notes={"finished": ["target"]}) == "finished"
    seen = Overview("/run", (EpochRow(3, IN_PROGRESS),))
    assert looking.state_of(seen) == ("saving", "")
    assert looking.state_of(Overview("/run", ())) == ("empty", "")


def test_a_run_is_closed_when_its_manager_is(tmp_path: pathlib.Path) -> None:
    """And not "training" until its next epoch is overdue."""
    with ec.CheckpointManager(tmp_path / "a") as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": np.zeros(3)}))
        manager.wait_until_finished()
        assert [row.state for row in ec.inspect_runs(tmp_path).rows()] == ["training"]
    assert [row.state for row in ec.inspect_runs(tmp_path).rows()] == ["closed"]


def test_a_loss_of_nan_is_shown_as_the_latest(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where no epoch has another value; in JSON, which has no NaN, as text."""
    save(tmp_path / "a", [3.0, float("nan")])
    save(tmp_path / "b", [float("inf")])
    assert main.main(["ls", str(tmp_path), "--json"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    rows = json.loads(capsys.readouterr().out, parse_constant=refuse)["runs"]
    assert [row["metrics"]["loss"] for row in rows] == ["NaN", "Infinity"]
    text = ec.inspect_runs(tmp_path, metric="loss").to_text(100)
    assert "NaN" in text
    assert "∞" in text


def test_a_run_with_damaged_epochs_is_marked(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Also where its newest epoch is whole."""
    shutil.copytree(folder / "a", tmp_path / "a", symlinks=True)
    record = tmp_path / "a" / "1" / "epoch.json"
    record.chmod(0o644)
    record.write_bytes(b"{}")
    runs = ec.inspect_runs(tmp_path)
    assert [(row.state, row.latest, row.damaged) for row in runs.rows()] == [("closed", 2, (1,))]
    assert "1 damaged" in runs.to_text(100)


def test_a_search_that_ends_says_so_and_is_fair(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A subtree with thousands of folders does not hide the runs in another one."""
    shutil.copytree(folder / "a", tmp_path / "z" / "runs" / "a", symlinks=True)
    for number in range(looking._SEARCHED + 10):
        (tmp_path / "data" / str(number)).mkdir(parents=True)
    runs = ec.inspect_runs(tmp_path)
    seen = runs.overview()
    assert [row.name for row in seen.runs] == ["z/runs/a"]
    assert "only 2000 folders were searched for runs" in seen.problems[runs.directory]
    assert "of them lie in data" in seen.problems[runs.directory]
    assert "only 2000 folders" in runs.to_text(100)
