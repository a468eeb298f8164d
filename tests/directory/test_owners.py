"""Who has claimed a directory, whether that process is alive, and whose files are in the way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.cli.main import main
from epochckpt.directory.owners import Process, current
from epochckpt.format import paths
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from tests.support.claim_jobs import args
from tests.support.files import unchanged

ID = "0123456789abcdef"


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with the epochs 1 and 2, of a run that has closed it."""
    directory = tmp_path / "run"
    with ec.CheckpointManager(directory) as manager:
        for epoch in (1, 2):
            assert manager.save(epoch, args=args(epoch))
    return directory


def left_by(directory: pathlib.Path, owner: Any) -> pathlib.Path:
    """Puts the staging folder of a run that has not closed a directory there."""
    home = directory / paths.incarnation_folder(ID)
    home.mkdir()
    (home / paths.OWNER_FILE).write_text(json.dumps(owner))
    return home


def may_be_claimed(directory: pathlib.Path) -> bool:
    """Whether a claim that takes no live run over goes through."""
    with ec.CheckpointManager(directory) as manager:
        try:
            manager.claim(take_over=False)
        except errors.InvalidArgumentError as error:
            return "may be alive" not in str(error)
        return True


THIS = current()
ENDED = {
    "its PID is another process's by now": {"started": THIS["started"] - 1},
    "no process has its PID": {"pid": 2**22 + 1},
    "its machine has booted since": {"boot": "of last week"},
}
UNKNOWN = {
    "it is this process": {},
    "it runs in another container": {"namespace": "pid:[1]", "pid": 2**22 + 1},
    "another container had the same PID": {"namespace": "pid:[1]", "started": THIS["started"] - 1},
    "another container of another boot": {"namespace": "pid:[1]", "boot": "of last week", "machine": ""},
    "a machine of the same name": {"boot": "of last week", "machine": "0" * 32},
    "it was written without a start time": {"started": 0},
    "its PID is no PID": {"pid": "7"},
}


@pytest.mark.skipif(not THIS["machine"], reason="this is a container: its machine is not known")
@pytest.mark.parametrize("change", ENDED.values(), ids=ENDED)
def test_a_run_that_is_known_to_have_ended_is_taken_over(run: pathlib.Path, change: Mapping[str, Any]) -> None:
    """A new pod, or a restarted machine, is not refused for ever."""
    left_by(run, {**THIS, **change})
    assert may_be_claimed(run)


@pytest.mark.parametrize("change", UNKNOWN.values(), ids=UNKNOWN)
def test_a_run_that_may_be_alive_is_not_taken_for_dead(run: pathlib.Path, change: Mapping[str, Any]) -> None:
    """Its process id says nothing where it is of another namespace, or of another machine of the same name."""
    left_by(run, {**THIS, **change})
    with unchanged(run):
        assert not may_be_claimed(run)


@pytest.mark.parametrize("said", [None, 5, [], "x", {}, {"pid": 10**4000}, {"host": {}}, {**THIS, "pid": -1}])
def test_an_owner_that_makes_no_sense_may_be_alive(run: pathlib.Path, said: Any) -> None:
    """Whatever JSON it is."""
    left_by(run, said)
    assert not may_be_claimed(run)


def test_a_process_says_what_proves_its_end() -> None:
    """The record has all that is known of this process, and this process is alive."""
    assert THIS["host"] == socket.gethostname()
    assert Process.parse(json.loads(json.dumps(THIS))) == Process.this()
    assert not Process.this().has_ended
    if sys.platform == "linux":
        assert all(dataclasses.asdict(dataclasses.replace(Process.this(), machine="x")).values())


def test_a_child_that_has_ended_and_was_not_waited_for_is_not_alive() -> None:
    """A container without an init process keeps such children."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        stat = pathlib.Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2].split()
        process = dataclasses.replace(Process.this(), pid=child.pid, started=int(stat[19]))
        assert not process.has_ended
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.has_ended


HOLD = """
import os, sys
while not (child := os.fork()) and os.getpid() < int(sys.argv[2]):
    pass
if child:
    sys.exit(os.waitpid(child, 0)[1])
import epochckpt as ec
from tests.support.claim_jobs import args
manager = ec.CheckpointManager(sys.argv[1])
manager.save(3, args=args(3))
manager.wait_until_finished()
print("claimed", flush=True)
input()
manager.save(4, args=args(4))
manager.close()
print(manager.all_steps(), flush=True)
"""


@contextlib.contextmanager
def in_a_pid_namespace(*program: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has PIDs of its own, as in a container, and the host name of this one."""
    unshare = shutil.which("unshare")
    command = [str(unshare), "--pid", "--fork", "--kill-child", "--mount-proc"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [*command, sys.executable, "-c", *program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_live_run_in_another_pid_namespace_is_not_fenced_off(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container on this host: `rm --yes` and `claim(take_over=False)` refuse, and the run saves on.

    Its PID there is one that no process has here.
    """
    free = next(pid for pid in range(2, 2**15) if not pathlib.Path(f"/proc/{pid}").exists())
    with in_a_pid_namespace(HOLD, str(run), str(free)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        assert main(["rm", str(run), "1", "--yes"]) == 2
        assert "may be alive" in capsys.readouterr().err
        assert not may_be_claimed(run)
        answer, _ = process.communicate("\n", timeout=60)
        assert answer == "[1, 2, 3, 4]\n"


# -- a claim that is half done -----------------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends a call where a kill would."""


@pytest.mark.parametrize("method", [Store.make_folder, Store.create, Store.sync_folder, Store.rename])
def test_a_run_that_is_killed_while_it_claims_is_not_taken_for_alive(
    run: pathlib.Path, faults: Faults, method: Callable[..., Any]
) -> None:
    """After each step until its folder has the name by which it counts; the next run that writes clears it away."""

    def killed(call: StoreCall) -> None:
        raise Killed

    with ec.CheckpointManager(run) as manager:
        rule = faults.before if method is Store.rename else faults.after
        with rule(method, killed), pytest.raises(Killed):
            manager.components.directory.epoch_directory.claim()
    assert [path.name[:10] for path in run.glob("*tmp")] == ["unclaimed-"]
    assert may_be_claimed(run)
    assert not list(run.glob("*tmp"))


def test_a_run_that_is_killed_while_it_closes_is_not_taken_for_alive(run: pathlib.Path, faults: Faults) -> None:
    """The files of its staging folder go one by one, the record of its owner perhaps before others."""

    def killed(call: StoreCall) -> None:
        (run / call.path / paths.OWNER_FILE).unlink()
        raise Killed

    manager = ec.CheckpointManager(run)
    manager.claim()
    (run / paths.incarnation_folder(manager.components.directory.job_directory.incarnation) / "3-0").mkdir()
    with faults.before(Store.remove_tree, killed), pytest.raises(Killed):
        manager.components.directory.job_directory.writer.release()
    assert may_be_claimed(run)


def test_a_staging_folder_without_an_owner_counts_if_something_is_in_it(run: pathlib.Path) -> None:
    """An empty one is of a run that was killed before it claimed; another may be of a live run."""
    home = run / paths.incarnation_folder(ID)
    home.mkdir()
    assert may_be_claimed(run)
    (home / "3-0").mkdir(parents=True)
    assert not may_be_claimed(run)


# -- two users of one group --------------------------------------------------------------------------------------------

TWO_USERS = """
import json, os, sys
import numpy as np, orbax.checkpoint as ocp
import epochckpt as ec
from epochckpt import errors
directory, mode, closes = sys.argv[1], int(sys.argv[2], 8), sys.argv[3] == "closes"
options = ocp.CheckpointManagerOptions(
    max_to_keep=1, file_options=ocp.options.FileOptions(path_permission_mode=mode) if mode else None
)
def save(manager, epoch):
    manager.save(epoch, args=ocp.args.StandardSave({"w": np.zeros(2)}), force=True)
    manager.wait_until_finished()
def as_user(uid, body):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.setgroups([4000]); os.setgid(4000); os.setuid(uid); os.umask(0o022)
        body()
        sys.stdout.flush()
        os._exit(0)  # as if it was killed
    assert os.waitpid(pid, 0)[1] == 0
def said(call):
    try:
        call()
        return "no error"
    except errors.EpochCheckpointError as error:
        return f"{type(error).__name__}: {error}"
with ec.CheckpointManager(directory + "-before", options=options) as manager:  # what is imported late, as root
    save(manager, 0)
def first():
    manager = ec.CheckpointManager(directory, options=options)
    save(manager, 0)
    if closes:
        manager.close()
def second():
    manager = ec.CheckpointManager(directory, options=options)
    found = [said(lambda: save(manager, epoch)) for epoch in (1, 2)] + [said(manager.claim), said(manager.close)]
    print(json.dumps([found, list(manager.all_steps()), sorted(os.listdir(directory))]))
as_user(4001, first)
as_user(4002, second)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "end"), [("0", "is killed"), ("0", "closes"), ("2775", "is killed")])
def test_what_another_user_left_is_named_with_its_owner_and_the_remedy(
    public_folder: pathlib.Path, mode: str, end: str
) -> None:
    """The first of two users of a group is killed: no try of the second leaves a folder. If it has closed, the second
    saves, and cannot delete the epoch of the first. With the remedy it can do both."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    directory = public_folder / "run"
    directory.mkdir()
    os.chown(directory, 0, 4000)
    directory.chmod(0o2775)
    env = {**os.environ, "HOME": "/nonexistent", "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", TWO_USERS, str(directory), mode, end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    said, listed, there = json.loads(done.stdout)
    if mode == "2775":
        assert (said, listed, there) == (["no error"] * 4, [2], ["2"])
        return
    if end == "closes":
        assert (listed, there) == ([0, 2], ["0", "2"])
        assert said[1:] == ["no error"] * 3
        assert said[0].startswith("RetentionError: ")
        assert f"{directory}/0 belongs to the user with uid 4001" in said[0]
        return
    (home,) = (name for name in there if name != "0")
    for text in said[:3]:
        assert "Permission denied" in text
        assert f"{directory}/{home} belongs to the user with uid 4001, group 4000" in text
        assert "uid 4002" in text
        assert "chmod -R g+w" in text
        assert "path_permission_mode" in text
    assert [text.partition(":")[0] for text in said] == ["SaveError", "SaveError", "AccessError", "no error"]
    assert listed == [0]


def test_a_refusal_names_the_process_that_may_be_alive(run: pathlib.Path) -> None:
    """Where the record of its owner has it."""
    home = left_by(run, THIS)
    with ec.CheckpointManager(run) as manager:
        who = rf"a run \(process {os.getpid()} on host {socket.gethostname()}\) has not closed it and may be alive"
        with pytest.raises(errors.InvalidArgumentError, match=who):
            manager.claim(take_over=False)
        for unknown in ({}, {**THIS, "pid": 0}, {**THIS, "host": ""}):
            (home / paths.OWNER_FILE).write_text(json.dumps(unknown))
            with pytest.raises(errors.InvalidArgumentError, match=r"a run has not closed it and may be alive"):
                manager.claim(take_over=False)


def test_a_claim_that_takes_no_live_run_over_says_nothing_of_later_saves(run: pathlib.Path) -> None:
    """The first save claims the directory, as that of any manager."""
    left_by(run, THIS)
    with ec.CheckpointManager(run) as manager:
        with pytest.raises(errors.InvalidArgumentError, match="may be alive"):
            manager.claim(take_over=False)
        assert manager.save(3, args=args(3))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]


def test_of_a_process_on_a_kernel_that_is_not_known_nothing_is_known() -> None:
    """Its number may be free here, and its host may have the same name."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert Process.parse({**THIS, "pid": ended.pid}).has_ended
    assert not Process.parse({**THIS, "pid": ended.pid, "boot": ""}).has_ended


def test_a_look_at_a_process_leaves_it_alone() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        assert not Process.parse({**THIS, "pid": other.pid, "started": 0}).has_ended
        assert not Process.parse({**THIS, "pid": other.pid, "namespace": "x"}).has_ended
        assert other.poll() is None
        other.communicate()
    assert other.returncode == 0
