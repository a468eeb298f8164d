"""Directories with a mirror in another directory: whose history counts, and who may write.

`tests/object_stores/test_mirror.py` has what is about buckets, `tests/faults/test_random_mirrors.py` random rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import http.server
import json
import logging
import os
import pathlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.agreement import Coordinator
from epochckpt.cli.main import main
from epochckpt.directory import directory_of
from epochckpt.directory.lineage import ClaimLineage, Lineage
from epochckpt.directory.posix import PosixDirectory
from epochckpt.errors import EpochDeletedError, FencedError, InvalidArgumentError
from epochckpt.format import checksums, paths
from epochckpt.orbax import StepNames
from epochckpt.storage import PosixStore, Store, open_store
from epochckpt.testing import Faults, StoreCall
from epochckpt.tiers import read_ledger
from epochckpt.tiers.backlog import Backlog, MirrorEpochs
from epochckpt.tiers.copying import MirrorJob
from epochckpt.tiers.ledger import Copy, Identity, Ledger, parse
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.ledger_kinds import ONE_FOR_ALL
from epochckpt.tiers.mirror import Mirror
from epochckpt.tiers.worker import Worker
from tests.support import lives
from tests.support.lives import Killed, Life
from tests.support.taps import eventually

Save, Options = ocp.args.StandardSave, ocp.CheckpointManagerOptions


@pytest.fixture(autouse=True)
def quick(patience: Callable[..., None]) -> None:
    """Pauses that a test need not wait for."""
    patience(mirror_pauses_secs=(0.01, 0.05))


@pytest.fixture
def lived() -> Iterator[None]:
    """Lives can be killed and held at their steps."""
    with lives.installed():
        yield


class Place:
    """A mirror, and the directories that use it."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.mirror = root / "mirror"

    def open(
        self, name: str, keep: int | None = None, mirror: Any = None, metadata_handler: Any = None, **storage: Any
    ) -> ec.CheckpointManager:
        return ec.CheckpointManager(
            self.root / name,
            options=Options(max_to_keep=keep),
            storage=ec.StorageOptions(mirror=str(mirror or self.mirror), orbax_view=False, **storage),
            metadata_handler=metadata_handler,
        )

    def mirrored(self) -> dict[int, float]:
        """The values of the epochs that the mirror has; none before the first copy has made it."""
        if not self.mirror.exists():
            return {}
        try:
            return values_of(self.mirror)
        except EpochDeletedError:  # while it was read: a newer copy has taken its place
            return self.mirrored()


def values_of(directory: Any) -> dict[int, float]:
    with ec.CheckpointManager(directory, options=Options(read_only=True)) as manager:
        return listed(manager)


def listed(manager: ec.CheckpointManager) -> dict[int, float]:
    return {epoch: float(manager.restore(epoch)["w"][0]) for epoch in manager.all_steps()}


def save(manager: ec.CheckpointManager, epoch: int, value: float | None = None, replace: bool = False) -> None:
    if replace:
        manager.allow_overwrite(epoch)
    number = float(epoch) if value is None else value
    assert manager.save(epoch, args=Save({"w": jnp.full(4, number)}), force=True)
    manager.wait_until_finished()


def reaches_mirror(place: Place, *names: str) -> Callable[[StoreCall], bool]:
    """The renames by which one of these folders appears in the mirror."""
    return lambda call: call.store.root == str(place.mirror) and call.target in names


def moves_away(directory: pathlib.Path, name: str) -> Callable[[StoreCall], bool]:
    """The renames by which a folder of a directory goes out of sight."""
    return lambda call: call.store.root == str(directory) and call.path == name


def writes_ledger(place: Place, name: str, matches: Callable[[Ledger], bool]) -> Callable[[StoreCall], bool]:
    """The calls that write a ledger of this kind to a directory."""

    def is_it(call: StoreCall) -> bool:
        if (call.store.root, call.path) != (str(place.root / name), paths.MIRROR_RECORD):
            return False
        assert call.content is not None
        return matches(parse(call.path, bytes(call.content)))

    return is_it


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    """The files below a folder, but for what is being written in it at this moment."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "incarnation-" not in str(path))
    return {str(path): path.read_bytes() for path in files}


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Place:
    return Place(tmp_path)


@contextlib.contextmanager
def away(place: Place) -> Iterator[None]:
    """The mirror cannot be looked at: a file lies in its place."""
    aside = place.root / "aside"
    if place.mirror.exists():
        place.mirror.rename(aside)
    place.mirror.write_text("")
    yield
    place.mirror.unlink()
    if aside.exists():
        aside.rename(place.mirror)


# -- 1: a returned host


def test_a_returned_host_goes_on_from_the_history_of_its_replacement(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with place.open("one") as manager:
        for epoch in range(5):
            save(manager, epoch)
    with away(place), place.open("one") as manager:  # its last epochs never reach the mirror
        for epoch in range(5, 9):
            save(manager, epoch)
    with place.open("two") as manager:
        assert manager.latest_step() == 4
        for epoch in (5, 6, 7):
            save(manager, epoch, epoch + 0.5)
    caplog.clear()
    with caplog.at_level(logging.WARNING), place.open("one") as manager:
        assert listed(manager) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5.5, 6: 6.5, 7: 7.5}
        manager.claim()
        assert float(manager.restore(None)["w"][0]) == 7.5
        save(manager, 8, 8.25)
    assert "checkpoint 5, 6, 7, 8 of this directory is no part of that history" in caplog.text
    assert place.mirrored() == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5.5, 6: 6.5, 7: 7.5, 8: 8.25}
    (aside,) = (place.root / "one").glob("diverged-*")
    assert values_of(aside) == {5: 5, 6: 6, 7: 7, 8: 8}
    found = ec.inspect(place.root / "one").overview().leftovers
    assert [row.kind for row in found if row.path == aside.name] == ["quarantined"]
    with place.open("two") as manager:  # and the replacement, when it comes back
        assert manager.latest_step() == 8


def test_what_a_returned_host_leaves_out_does_not_come_back_when_its_mirror_is_away_again(place: Place) -> None:
    """A look without the mirror, before the claim, brings nothing back that an earlier look has left out."""
    with place.open("one") as manager:
        for epoch in range(3):
            save(manager, epoch)
    with away(place), place.open("one") as manager:
        save(manager, 3)
    with place.open("two") as manager:
        save(manager, 3, 3.5)
    before = place.mirrored()
    with place.open("one") as manager:
        assert listed(manager) == {0: 0, 1: 1, 2: 2, 3: 3.5}
        with away(place):
            manager.reload()
        assert manager.all_steps() == [0, 1, 2]
        save(manager, 4)
        assert listed(manager) == {0: 0, 1: 1, 2: 2, 4: 4}
    (aside,) = (place.root / "one").glob("diverged-*")
    assert values_of(aside) == {3: 3}
    assert place.mirrored() == before


def test_a_returned_host_whose_newest_epoch_has_diverged_lists_all_that_the_mirror_has(place: Place) -> None:
    """Also what it has deleted while the mirror was away: the mirror's history goes on, and no mixture of two."""
    with place.open("one") as manager:
        for epoch in (0, 1):
            save(manager, epoch)
    with away(place), place.open("one", keep=1) as manager:
        save(manager, 2)
        manager.delete(0)
    ledger = read_ledger(PosixStore(place.root / "one"))
    assert ledger is not None
    assert [each.epochs for each in ledger.withdrawals] == [(0,)]
    begun = Copy(save_id=manager.save_id(2), mirror_id="0123456789abcdef-2-1")  # and then the mirror went away
    (place.root / "one" / paths.MIRROR_RECORD).write_bytes(dataclasses.replace(ledger, copying={2: begun}).to_bytes())
    with place.open("two") as manager:
        manager.claim()
    assert place.mirrored() == {0: 0, 1: 1}
    with place.open("one") as manager:
        assert listed(manager) == {0: 0, 1: 1}
        save(manager, 3)
    assert place.mirrored() == {0: 0, 1: 1, 3: 3}


def test_a_returned_host_only_claims_and_changes_nothing(place: Place) -> None:
    """The case that lost epochs: it has newer numbers than the mirror, and saves nothing."""
    with place.open("one", mirror_every=2) as manager:
        for epoch in range(4):
            save(manager, epoch)
    shutil.copytree(place.root / "one", place.root / "kept", copy_function=os.link)
    with place.open("two") as manager:
        save(manager, 4, 4.5)
    before = place.mirrored()
    with place.open("one") as manager:
        manager.claim()
    assert place.mirrored() == before


def test_a_run_that_lost_its_mirror_goes_on_without_it(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with place.open("one") as first:
        save(first, 0)
    first = place.open("one")
    save(first, 1)
    eventually(lambda: place.mirrored() == {0: 0, 1: 1})
    with place.open("two") as second:
        save(second, 7, 7.5)
    before = place.mirrored()
    with caplog.at_level(logging.WARNING):
        save(first, 2)
        first.close()
    assert "nothing more is mirrored" in caplog.text
    assert place.mirrored() == before


def test_whoever_writes_to_the_mirror_directly_takes_it(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with place.open("one") as manager:
        save(manager, 0)
        save(manager, 1)
    with ec.CheckpointManager(place.mirror) as direct:
        direct.delete(1)
    with place.open("one") as manager:  # what was deleted there is no part of the history here any more
        assert listed(manager) == {0: 0}
        save(manager, 2)
    assert place.mirrored() == {0: 0, 2: 2}


# -- 2: a replaced epoch


@pytest.mark.slow
@pytest.mark.usefixtures("lived")
@pytest.mark.parametrize("step", [0, 3, 6, 9, 12, 15])
def test_a_replaced_epoch_reaches_the_mirror_whatever_was_killed(place: Place, step: int) -> None:
    with place.open("one") as manager:
        save(manager, 0)
        save(manager, 1)
    life = Life(step, str(place.mirror))

    def replace() -> None:
        manager = place.open("one")
        save(manager, 1, 1.5, replace=True)
        manager.close()

    with contextlib.suppress(Killed):
        life.run(replace)
    life.end()
    here = values_of(place.root / "one")  # the save may have been killed, too
    with place.open("one", keep=1) as manager:
        save(manager, 2)
    assert place.mirrored() == {**here, 2: 2}
    with place.open("one") as manager:  # the old one does not come back from there, either
        assert listed(manager) == {**here, 2: 2}


def test_a_replaced_epoch_reaches_a_mirror_that_was_away_until_the_end(place: Place) -> None:
    with place.open("one") as manager:
        save(manager, 0)
        save(manager, 1)
    with away(place), place.open("one", keep=2) as manager:
        save(manager, 1, 1.5, replace=True)
    with place.open("one", keep=1) as manager:
        for epoch in (2, 3, 4):
            save(manager, epoch)
        assert listed(manager)[1] == 1.5
    assert place.mirrored()[1] == 1.5


def test_an_epoch_that_only_the_mirror_has_is_replaced_in_one_step(place: Place) -> None:
    with place.open("one") as manager:
        save(manager, 0)
    with place.open("two") as manager:
        save(manager, 0, 0.5, replace=True)
        assert listed(manager) == {0: 0.5}
    assert place.mirrored() == {0: 0.5}


# -- 3: copies of a directory, and hostile ledgers


@pytest.mark.parametrize("alive", [True, False])
def test_a_copy_of_a_directory_changes_nothing_in_its_mirror(
    place: Place, capsys: pytest.CaptureFixture[str], alive: bool
) -> None:
    run = place.open("one")
    for epoch in range(3):
        save(run, epoch)
    if not alive:
        run.close()
    eventually(lambda: list(place.mirrored()) == [0, 1, 2])
    # Of a run that is alive, a draft may go while it is copied: that is an error of `cp`, which has copied the rest.
    subprocess.run(["cp", "-r", str(place.root / "one"), str(place.root / "copy")], check=not alive)
    before = {} if alive else files_of(place.mirror)
    copy, mirror = str(place.root / "copy"), str(place.mirror)
    assert main(["rm", copy, "1", "--yes", "--take-over"]) == 0
    assert "has not followed yet" in " ".join(capsys.readouterr().err.split())
    with place.open("copy") as manager:
        manager.rollback_to(0)
        save(manager, 9)
    for arguments in (["rm", copy, "0", "--yes"], ["rollback", copy, "0", "--yes"]):
        main([*arguments, "--mirror", mirror])
    if alive:
        save(run, 3)
        run.close()
        assert place.mirrored() == {0: 0, 1: 1, 2: 2, 3: 3}
    else:
        assert files_of(place.mirror) == before


def test_commands_ask_whether_a_run_writes_to_the_mirror(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with place.open("one") as manager:
        save(manager, 0)
        save(manager, 1)
    remove_0 = ["rm", str(place.root / "one"), "0", "--mirror", str(place.mirror), "--yes"]
    alive = ec.CheckpointManager(place.mirror)  # somebody saves to the mirror itself
    alive.claim()
    capsys.readouterr()
    assert main(remove_0) == 2
    assert "may be alive" in " ".join(capsys.readouterr().err.split())
    alive.close()
    assert place.mirrored() == values_of(place.root / "one") == {0: 0, 1: 1}
    assert main(remove_0) == 0
    assert place.mirrored() == values_of(place.root / "one") == {1: 1}


def test_a_hostile_ledger_deletes_nothing_elsewhere(place: Place) -> None:
    """It names another directory of mine as its mirror, and epochs that are to be deleted there."""
    with ec.CheckpointManager(place.root / "precious") as manager:
        save(manager, 0)
        save(manager, 1)
    with place.open("evil") as manager:
        save(manager, 0, 0.5)
    ledger = read_ledger(PosixStore(place.root / "evil"))
    assert ledger is not None
    (place.root / "evil" / paths.MIRROR_RECORD).write_bytes(
        type(ledger)(
            url=str(place.root / "precious"),
            identity=ledger.identity,
            claims=("unclaimed",),
            withdrawals=(_withdrawal(0, 1),),
        ).to_bytes()
    )
    assert main(["rm", str(place.root / "evil"), "0", "--yes"]) == 0
    with ec.CheckpointManager(place.root / "evil") as manager:
        save(manager, 5)
    assert values_of(place.root / "precious") == {0: 0, 1: 1}


def _withdrawal(*epochs: int) -> Any:
    from epochckpt.tiers.ledger import Withdrawal

    return Withdrawal(to=None, epochs=epochs, here=())


# -- 4: addresses out of a directory


class _Counting(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_error(404)

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Counting)
    made.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_looking_at_a_downloaded_directory_asks_no_server(
    place: Place, server: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its records name: with the credentials of the environment, an address in them would leak these."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with place.open("run") as manager:
        save(manager, 0)
        save(manager, 1)
    directory = place.root / "run"
    record = directory / paths.MIRROR_RECORD
    data = json.loads(record.read_text())
    data["url"] = f"s3://bucket/run?endpoint={endpoint}"
    data["address"] = data["url"]
    data.pop("checksum")
    record.write_bytes(checksums.seal(data))
    found = ec.inspect(directory)
    assert "s3://bucket/run" in str(found.overview())
    for look in (found.epochs, found.du, found.metrics, found.goodput, lambda: found[1].detail()):
        look()
    with contextlib.suppress(ec.errors.EpochNotFoundError):
        found[7]
    for command in ("ls", "show", "verify", "tree", "du"):
        assert main([command, str(directory)]) == 0
    assert main(["export", str(directory), "1", str(place.root / "out"), "--format", "safetensors"]) == 0
    assert main(["cp", str(directory), str(place.root / "there"), "--yes"]) == 0
    assert main(["rm", str(directory), "0", "--yes"]) == 0
    with ec.CheckpointManager(directory) as manager:
        save(manager, 2)
    assert server.asked == []  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.usefixtures("lived")
@pytest.mark.parametrize("step", range(8, 26, 2))
def test_epochs_are_set_aside_together(place: Place, step: int) -> None:
    """A returned host is killed while it sets its own epochs aside; and its mirror is away when it opens again."""
    with place.open("one") as manager:
        save(manager, 0)
    with away(place), place.open("one") as manager:
        for epoch in (1, 2, 3):
            save(manager, epoch)
    with place.open("two") as manager:
        save(manager, 1, 1.5)
    life = Life(None, str(place.root / "one"))

    def come_back() -> None:
        manager = place.open("one")
        life.arm(step)
        manager.claim()

    with contextlib.suppress(Killed):
        life.run(come_back)
    life.end()
    with away(place), place.open("one") as manager:
        assert [epoch for epoch in manager.all_steps() if epoch > 1 or not epoch] in ([0, 2, 3], [0])
    with place.open("one") as manager:
        assert listed(manager) == {0: 0, 1: 1.5}


# -- 5: deleting, going back, and what is kept


@pytest.mark.slow
@pytest.mark.usefixtures("lived")
@pytest.mark.parametrize("step", range(8))
def test_a_rollback_that_is_killed_is_done_or_not(place: Place, step: int) -> None:
    """The newest epoch is here, the others in the mirror alone."""
    with place.open("one", keep=1) as manager:
        for epoch in range(4):
            save(manager, epoch)
    life = Life(step, str(place.root / "one"))

    def go_back() -> None:
        manager = place.open("one", keep=1)
        manager.claim()
        life.arm(step)
        manager.rollback_to(0)

    with contextlib.suppress(Killed):
        life.run(go_back)
    life.end()
    for _ in range(2):
        with place.open("one", keep=1) as manager:
            found = list(manager.all_steps())
            manager.claim()
        assert found in ([0, 1, 2, 3], [0])
    assert list(place.mirrored()) == found


def test_the_mirror_keeps_what_could_not_be_deleted_here(place: Place, faults: Faults) -> None:
    with place.open("one") as manager:
        save(manager, 0)
        save(manager, 1)

        stuck = faults.fail(
            Store.rename, OSError(errno.EIO, "it cannot be renamed"), where=moves_away(place.root / "one", "0")
        )
        with stuck, pytest.raises(OSError, match="cannot be renamed"):
            manager.delete(0)
        assert manager.all_steps() == [0, 1]
        save(manager, 2)
    assert place.mirrored() == {0: 0, 1: 1, 2: 2}


def test_the_mirror_keeps_no_more_than_mirror_keep(place: Place) -> None:
    most = 0
    for start in range(0, 12, 4):
        with place.open("one", keep=6, mirror_keep=2, mirror_backlog=4) as manager:
            for epoch in range(start, start + 4):
                save(manager, epoch)
                most = max(most, len([p for p in place.mirror.glob("*") if p.name.isdigit()]))
        assert list(place.mirrored()) == [start + 2, start + 3]
    assert most <= 3  # and one copy more while it is made


def test_what_mirror_keep_has_removed_is_not_listed_after_a_deletion(place: Place) -> None:
    with place.open("one") as manager:
        save(manager, 0)
    with place.open("two", mirror_keep=1) as manager:
        assert manager.all_steps() == [0]
        save(manager, 1)
        assert eventually(lambda: [p.name for p in place.mirror.glob("*") if p.name.isdigit()] == ["1"])
        manager.delete(1)
        assert manager.all_steps() == []
        assert manager.latest_step() is None


@pytest.mark.parametrize("change", ["delete", "rollback"])
def test_the_newest_is_mirrored_at_the_end_after_a_change(place: Place, change: str) -> None:
    with place.open("one", mirror_every=100) as manager:
        for epoch in range(4):
            save(manager, epoch)
        if change == "delete":
            manager.delete(3)
        else:
            manager.rollback_to(2)
    assert list(place.mirrored()) == [2]


# -- 6: a mirror that cannot be used


def damage_lineage(mirror: pathlib.Path) -> None:
    (mirror / paths.LINEAGE_RECORD).write_text("{}")


def remove(mirror: pathlib.Path) -> None:
    shutil.rmtree(mirror)


def put_a_file(mirror: pathlib.Path) -> None:
    shutil.rmtree(mirror)
    mirror.write_text("")


def newer_version(mirror: pathlib.Path) -> None:
    rewrite_by_a_newer_version(mirror / paths.LINEAGE_RECORD)


def rewrite_by_a_newer_version(record: pathlib.Path) -> None:
    """A newer epochckpt has written this record, in a form that this one cannot read."""
    data = json.loads(record.read_text())
    data.pop("checksum")
    record.write_bytes(checksums.seal({**data, "version": 99}))


@pytest.mark.parametrize("break_it", [damage_lineage, remove, put_a_file, newer_version])
def test_a_healthy_directory_starts_without_its_mirror(place: Place, break_it: Any) -> None:
    with place.open("one") as manager:
        save(manager, 0)
        save(manager, 1)
    break_it(place.mirror)
    with place.open("one") as manager:
        assert listed(manager) == {0: 0, 1: 1}
        save(manager, 2)
    if break_it is remove:  # it begins anew
        assert place.mirrored() == {0: 0, 1: 1, 2: 2}
    with pytest.raises((ec.EpochCheckpointError, OSError)) if break_it is not remove else contextlib.nullcontext():
        place.open("empty").close()  # but nothing starts from scratch beside it


def test_a_directory_is_no_mirror_of_itself_under_another_name(place: Place) -> None:
    with place.open("one") as manager:
        save(manager, 0)
    link = place.root / "link"
    link.symlink_to(place.root / "one")
    for name in (place.root / "one", link, place.root / "one" / ".." / "one"):
        with pytest.raises(InvalidArgumentError, match="is the directory itself"):
            place.open("one", mirror=name)
    with place.open("one") as manager:
        save(manager, 1)


def test_a_bind_mount_is_no_mirror_of_what_is_mounted(place: Place) -> None:
    with place.open("one") as manager:
        save(manager, 0)
    mounted = place.root / "mounted"
    mounted.mkdir()
    done = subprocess.run(["mount", "--bind", str(place.root / "one"), str(mounted)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this user may not mount")
    try:
        with pytest.raises(InvalidArgumentError, match="is the directory itself"):
            place.open("one", mirror=mounted)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_a_run_saves_where_no_thread_is_to_be_had_for_its_mirror(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if "Worker.run" in repr(getattr(thread, "_args", "")):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with caplog.at_level(logging.ERROR), place.open("one") as manager:
        save(manager, 0)
    assert "there is no thread for it" in caplog.text
    assert values_of(place.root / "one") == {0: 0}


def test_commands_find_what_ls_lists_after_a_host_was_replaced(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with place.open("one") as manager:
        for epoch in range(4):
            save(manager, epoch)
    with place.open("two", keep=1) as manager:
        save(manager, 4)
    directory, mirror = str(place.root / "two"), ["--mirror", str(place.mirror)]
    capsys.readouterr()
    assert main(["ls", directory, *mirror, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["epochs"]
    assert [(row["epoch"], row["tier"]) for row in rows] == [*((e, "mirror") for e in range(4)), (4, "both")]
    for command in (["show", directory, "1"], ["verify", directory, "1"], ["tree", directory, "0"]):
        assert main([*command, *mirror]) == 0
    assert main(["export", directory, "2", str(place.root / "out"), "--format", "orbax", *mirror]) == 0
    assert main(["cp", directory, str(place.root / "copied"), *mirror, "--yes"]) == 0
    assert values_of(place.root / "copied") == {e: e for e in range(5)}
    assert main(["rm", directory, "1", *mirror, "--yes"]) == 0
    assert main(["rollback", directory, "2", *mirror, "--yes"]) == 0
    assert list(place.mirrored()) == [0, 2]
    with place.open("two") as manager:
        assert listed(manager) == {0: 0, 2: 2}


def test_a_paused_older_run_cannot_claim_the_mirror_back(place: Place) -> None:
    """The claim that it wrote down before is known to the newer run, and replaced by it."""
    with place.open("one") as manager:
        save(manager, 0)
    ledger = read_ledger(PosixStore(place.root / "one"))
    assert ledger is not None
    assert len(ledger.claims) == 1
    with place.open("one") as manager:
        save(manager, 1)
    after = read_ledger(PosixStore(place.root / "one"))
    assert after is not None
    assert len(after.claims) == 1
    assert after.claims != ledger.claims
    epoch_directory = PosixDirectory(PosixStore(place.mirror), manager.components.directory.epoch_directory.names)
    old = Lineage(directory=ledger.identity.directory, claim=ledger.claims[0])
    with pytest.raises(FencedError):
        epoch_directory.claim(lineage=ClaimLineage(expected=old, directory=old.directory, claim="x"))
    np.testing.assert_equal(place.mirrored(), {0: 0, 1: 1})


def test_an_older_run_that_claims_the_mirror_just_before_a_newer_one_does_not_end_its_copies(
    place: Place, faults: Faults
) -> None:
    """The newer run has looked whose mirror it is, and knows of the older claim, which comes before its own."""
    with place.open("one") as manager:
        save(manager, 0)
    ledger = read_ledger(PosixStore(place.root / "one"))
    assert ledger is not None
    older = "0123456789abcdef"
    # The older run has noted it before it was paused.
    (place.root / "one" / paths.MIRROR_RECORD).write_bytes(ledger.claiming(older).to_bytes())

    def claim_before(call: StoreCall) -> None:
        if claims.hits == 1:
            mirror = PosixDirectory(PosixStore(place.mirror), manager.components.directory.epoch_directory.names)
            change = ClaimLineage(expected=mirror.lineage(), directory=ledger.identity.directory, claim=older)
            mirror.claim(lineage=change)

    def is_claim(call: StoreCall) -> bool:
        return call.store.root == str(place.mirror) and paths.parse_unclaimed(call.path) is not None

    claims = faults.before(Store.rename, claim_before, where=is_claim)
    with place.open("one") as manager:
        save(manager, 1)
    assert claims.hits == 2
    np.testing.assert_equal(place.mirrored(), {0: 0, 1: 1})


# -- what a review found


def test_what_a_live_replacement_writes_after_the_look_is_not_overwritten(place: Place) -> None:
    """The returned host has adopted the mirror's history; the other one, which is alive, goes on before it saves."""
    with place.open("one") as manager:
        for epoch in range(3):
            save(manager, epoch)
    second = place.open("two")
    save(second, 3, 3.5)
    eventually(lambda: 3 in place.mirrored())
    first = place.open("one")
    save(second, 4, 4.5)
    eventually(lambda: 4 in place.mirrored())
    before = place.mirrored()
    save(first, 4, 104.0)
    first.close()
    assert place.mirrored() == before
    second.close()
    with place.open("one") as first:  # and now it finds what it had missed
        assert listed(first) == {0: 0, 1: 1, 2: 2, 3: 3.5, 4: 4.5}


def test_an_interrupted_deletion_is_none(place: Place) -> None:
    """Ctrl-C comes before anything is deleted. Retention then leaves the epoch to the mirror, where it stays."""
    with place.open("one", keep=3) as manager:
        for epoch in range(3):
            save(manager, epoch)
        ledger = manager.components.administration.ledger

        def interrupted() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ledger.withdraw(None, [1], interrupted)
        for epoch in (3, 4):
            save(manager, epoch)
        manager.delete(2)
        assert list(manager.all_steps()) == [0, 1, 3, 4]
    assert list(place.mirrored()) == [0, 1, 3, 4]


def test_a_deletion_that_begins_while_the_ledger_is_settled_reaches_the_mirror(place: Place, faults: Faults) -> None:
    with place.open("one") as manager:
        for epoch in range(3):
            save(manager, epoch)
        eventually(lambda: place.mirrored().keys() == {0, 1, 2})
        ledger = manager.components.administration.ledger
        assert ledger is not None
        deletion = threading.Thread(target=manager.delete, args=[1])
        written = threading.Event()
        settling = threading.current_thread()

        def is_settled(call: StoreCall) -> bool:
            return call.path == paths.MIRROR_RECORD and threading.current_thread() is settling

        def delete_meanwhile(call: StoreCall) -> None:
            if not deletion.ident:
                deletion.start()
                written.wait(0.5)  # it may have to wait for this

        names_1 = writes_ledger(place, "one", lambda ledger: bool(ledger.withdrawals))
        faults.after(Store.put, lambda call: written.set(), where=names_1)
        settled = faults.before(Store.read, delete_meanwhile, where=is_settled)
        with settled, faults.hold(Store.rename, where=moves_away(place.root / "one", "1")):
            ledger.settle()
        deletion.join()
    assert place.mirrored().keys() == {0, 2}


def test_a_rollback_without_the_mirror_holds_for_what_only_the_mirror_has(place: Place) -> None:
    options = Options(max_to_keep=1, keep_period=10)
    storage = ec.StorageOptions(mirror=str(place.mirror))
    with ec.CheckpointManager(place.root / "one", options=options, storage=storage) as manager:
        for epoch in (10, 11, 12, 13, 14):
            save(manager, epoch)
            eventually(lambda epoch=epoch: epoch in place.mirrored())
    assert list(place.mirrored()) == [10, 11, 12, 13, 14]
    with ec.CheckpointManager(place.root / "one") as manager:
        assert 11 not in manager.all_steps()
        manager.rollback_to(10)
    with place.open("one") as manager:
        assert list(manager.all_steps()) == [10]
        save(manager, 11, 11.5)
    assert place.mirrored() == {10: 10, 11: 11.5}


def test_a_mirror_that_was_given_up_for_another_one_is_refused(place: Place) -> None:
    with place.open("one") as manager:
        for epoch in range(3):
            save(manager, epoch)
    with place.open("one", mirror=place.root / "other") as manager:
        manager.rollback_to(1)
    with pytest.raises(InvalidArgumentError, match="has missed what was deleted"):
        place.open("one")
    shutil.rmtree(place.mirror)
    with place.open("one") as manager:
        assert listed(manager) == {0: 0, 1: 1}


@pytest.mark.parametrize("every", [1, 3])
def test_a_save_that_comes_while_its_number_is_copied_is_copied_too(every: int) -> None:
    backlog = Backlog(url="u", options=ec.StorageOptions(mirror_every=every))
    backlog.begin([], present=[], outdated=[1, 2, 3])
    assert backlog.take() == 1
    backlog.withdraw([1])
    backlog.committed(1, MirrorEpochs())
    backlog.done()
    assert backlog.waiting() == {1, 2, 3}


def test_a_look_that_fails_leaves_what_is_known_of_the_mirror(place: Place) -> None:
    """The mirror that a directory had before is refused, and what an open manager reads from it stays."""
    with place.open("one") as manager:
        save(manager, 0)
    mirror = Mirror(str(place.mirror), ec.StorageOptions(mirror=str(place.mirror)), Options())
    local = directory_of(open_store(place.root / "one"), StepNames.of(Options()))
    known = dict(mirror.look(local))
    assert known.keys() == {0}
    with place.open("one", mirror=place.root / "another") as manager:
        save(manager, 1)
    with pytest.raises(InvalidArgumentError, match="was the mirror of"):
        mirror.look(local)
    assert mirror.readable() == known


def test_what_the_mirror_may_have_in_an_older_form_is_never_left_out() -> None:
    backlog = Backlog(url="u", options=ec.StorageOptions(mirror_backlog=1))
    backlog.begin([5, 7], present=[5, 7], outdated=[7])
    backlog.committed(8, MirrorEpochs())
    backlog.committed(9, MirrorEpochs())
    assert backlog.waiting() == {7, 9}


def test_an_epoch_that_is_replaced_while_it_is_copied_reaches_the_mirror(place: Place, faults: Faults) -> None:
    copying_now, go_on = threading.Event(), threading.Event()

    def held(call: StoreCall) -> None:
        copying_now.set()
        assert go_on.wait(60)

    faults.after(Store.rename, held, where=reaches_mirror(place, "1"))
    with place.open("one", mirror_every=2) as manager:
        save(manager, 0)
        save(manager, 1)
        assert copying_now.wait(60)
        save(manager, 1, 1.5, replace=True)
        go_on.set()
    assert place.mirrored() == {1: 1.5}


def test_an_epoch_of_a_newer_epochckpt_in_the_mirror_stays(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with place.open("one") as manager:
        for epoch in range(3):
            save(manager, epoch)
    record = place.mirror / "1" / "epoch.json"
    rewrite_by_a_newer_version(record)
    newer = record.read_bytes()
    with caplog.at_level(logging.ERROR), place.open("one") as manager:
        save(manager, 1, 1.5, replace=True)
        save(manager, 3)
    assert "a newer epochckpt has written a checkpoint 1 to the mirror" in caplog.text
    assert record.read_bytes() == newer
    assert (place.mirror / "3").exists()


def test_a_damaged_ledger_stops_no_run(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with place.open("one") as manager:
        save(manager, 0)
    (place.root / "one" / paths.MIRROR_RECORD).write_text("{")
    with caplog.at_level(logging.ERROR):
        with ec.CheckpointManager(place.root / "one") as manager:
            save(manager, 1)
        with place.open("one") as manager:
            assert listed(manager) == {0: 0, 1: 1}
            save(manager, 2)
    assert "what it knows of its mirror is damaged" in caplog.text
    assert values_of(place.root / "one") == {0: 0, 1: 1, 2: 2}


def test_damage_of_the_mirror_is_no_damage_of_an_epoch(place: Place) -> None:
    """Its records are damaged for a while: what was saved meanwhile is mirrored all the same."""
    with place.open("one") as manager:
        save(manager, 0)
        eventually(lambda: 0 in place.mirrored())
        damaged = place.mirror / paths.ROLLBACK_RECORD
        damaged.write_text("{")
        save(manager, 1)
        save(manager, 2)
        damaged.unlink()
    assert place.mirrored() == {0: 0, 1: 1, 2: 2}


def test_a_manager_closes_though_its_directory_is_away(place: Place) -> None:
    manager = place.open("one")
    save(manager, 0)
    eventually(lambda: place.mirrored() == {0: 0})
    shutil.rmtree(place.root / "one")
    (place.root / "one").touch()
    manager.close()
    assert place.mirrored() == {0: 0}


def test_a_mirror_that_goes_away_right_after_its_claim_is_this_directory_s(
    place: Place, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    with place.open("one") as manager:
        save(manager, 0)
        save(manager, 1)

    def lists(call: StoreCall) -> bool:
        return call.store.root == str(place.mirror) and call.path == ""

    def go_away(call: StoreCall) -> None:
        faults.fail(Store.list, OSError(errno.EIO, "the mirror is away"), where=lists, times=1)

    def claims(call: StoreCall) -> bool:
        return call.store.root == str(place.mirror) and call.path == paths.LINEAGE_RECORD

    with faults.after(Store.put, go_away, where=claims) as claim, place.open("two") as manager:
        save(manager, 1, 1.5, replace=True)
        assert eventually(lambda: "the mirror is away" in caplog.text)
    assert claim.hits == 1
    ledger = read_ledger(PosixStore(str(place.root / "two")))
    assert ledger is not None
    assert ledger.adopted is None
    assert place.mirrored() == {0: 0, 1: 1.5}


class ClosingBacklog(Backlog):
    """The manager is closed just when the worker has seen that nothing is to be copied.

    Attributes:
        close: closes it.
    """

    def __init__(self, fails: bool):
        super().__init__(url="", options=ec.StorageOptions(mirror_every=2))
        self.close: Callable[[], None] = lambda: None
        self._fails = fails
        self._looks = 0

    def take(self) -> int | None:
        found = super().take()
        self._looks += 1
        if self._looks == 2:  # after the first look, the worker has followed metrics
            assert found is None
            self.close()
            if self._fails:
                raise OSError(errno.EIO, "the mirror is away")
        return found


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_due_at_the_end_is_copied_though_the_worker_was_at_work(place: Place, fails: bool) -> None:
    with ec.CheckpointManager(place.root / "one") as manager:
        save(manager, 0)
    names = StepNames.of(Options())
    local = directory_of(open_store(place.root / "one"), names)
    writer = local.claim()
    ledger = LedgerFile(local, ONE_FOR_ALL)
    ledger.claimed(writer)
    ledger.write(Ledger(url=str(place.mirror), identity=Identity.of(local.store, paths.new_id())))
    job = MirrorJob(
        url=str(place.mirror),
        local=local,
        copies=directory_of(open_store(place.mirror), names),
        coordinator=Coordinator(),
        prefix="",
        options=ec.StorageOptions(mirror=str(place.mirror), mirror_every=2),
        hosted=lambda: [node.name for node in local.read_record(0).nodes],
    )
    backlog = ClosingBacklog(fails)
    worker = Worker(job=job, ledger=ledger, epochs=MirrorEpochs(), backlog=backlog)
    backlog.close = worker.close
    worker.run()
    writer.release()
    assert place.mirrored() == {0: 0}


def test_a_copy_that_is_uncertain_counts_though_it_is_left_out(
    place: Place, faults: Faults, patience: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """It can be seen, and neither made durable nor taken back."""
    broken = OSError(errno.EIO, "the answer is lost")

    def of_mirror(path: str) -> Callable[[StoreCall], bool]:
        return lambda call: call.store.root == str(place.mirror) and call.path == path

    def become_unsure(call: StoreCall) -> None:
        faults.fail(Store.sync_folder, broken, where=of_mirror(""), times=1)
        faults.fail(Store.rename, broken, where=of_mirror("1"), times=1)

    faults.after(Store.rename, become_unsure, where=reaches_mirror(place, "1"))
    patience(mirror_pauses_secs=(600.0, 600.0))
    with place.open("one", mirror_keep=2, mirror_backlog=1) as manager:
        save(manager, 0)
        assert eventually(lambda: place.mirrored() == {0: 0})
        save(manager, 1)
        assert eventually(lambda: "it is uncertain" in caplog.text)
        save(manager, 2)
    assert "checkpoint 1 is left out" in caplog.text
    assert place.mirrored() == {1: 1, 2: 2}


def test_a_copy_that_could_not_be_confirmed_gives_way_to_the_save_that_replaced_it(
    place: Place, faults: Faults, patience: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    confirms_1 = writes_ledger(place, "one", lambda ledger: 1 in ledger.copies)
    faults.fail(Store.put, OSError(errno.ENOSPC, "the disk is full"), where=confirms_1, times=1)
    patience(mirror_pauses_secs=(600.0, 600.0))
    with place.open("one", mirror_backlog=1) as manager:
        save(manager, 0)
        assert eventually(lambda: place.mirrored() == {0: 0})
        save(manager, 1)
        assert eventually(lambda: "the disk is full" in caplog.text)
        manager.allow_overwrite(1)
        for epoch, value in ((1, 1.5), (2, 2), (3, 3)):
            save(manager, epoch, value)
    assert place.mirrored()[1] == 1.5
    with place.open("one") as manager:
        assert listed(manager)[1] == 1.5


@pytest.mark.parametrize("noticed", [False, True])
def test_what_was_replaced_beside_another_owner_of_the_mirror_does_not_come_back(
    place: Place, caplog: pytest.LogCaptureFixture, noticed: bool
) -> None:
    first = place.open("one", keep=1)
    for epoch in range(3):
        save(first, epoch)
    eventually(lambda: place.mirrored().keys() == {0, 1, 2})
    with place.open("two") as second:
        save(second, 3, 3.5)
        second.delete(3)
    if noticed:
        save(first, 4)
        eventually(lambda: "nothing more is mirrored" in caplog.text)
    save(first, 1, 1.5, replace=True)
    save(first, 5)
    eventually(lambda: "nothing more is mirrored" in caplog.text)
    assert eventually(
        lambda: not first.components.mirror.waiting()
    )  # it has ended, and keeps no epoch from being deleted
    save(first, 6)
    first.close()
    with place.open("one") as first:
        assert listed(first) == {0: 0, 1: 1, 2: 2}  # as the mirror is, and what was saved since is set aside
    assert "was moved to diverged-" not in caplog.text
    with place.open("one") as first:
        first.claim()
    assert "checkpoint 6 was moved to diverged-" in caplog.text


def begins_copy(ledger: Ledger) -> bool:
    """Whether the ledger is of a run that begins a copy."""
    return bool(ledger.copying)


def begins_claim(ledger: Ledger) -> bool:
    """Whether the ledger is of a run that claims the mirror, or has claimed it."""
    return bool(ledger.claims)


def damage(directory: pathlib.Path, epoch: int) -> None:
    """One data file of an epoch is cut."""
    found = next((directory / str(epoch)).rglob("*.safetensors"))
    os.truncate(found, found.stat().st_size - 1)


def test_a_mirror_that_comes_back_stands_in_for_what_is_damaged_here(place: Place) -> None:
    """A run that was opened and claimed while the mirror was away."""
    with place.open("one") as manager:
        for epoch in range(2):
            save(manager, epoch)
    with away(place):
        manager = place.open("one")
        save(manager, 2)
    assert eventually(lambda: manager.components.mirror.has(2))
    damage(place.root / "one", 2)
    manager.reload()
    assert listed(manager) == {0: 0, 1: 1, 2: 2}
    manager.close()


def test_on_local_disks_a_mirror_that_comes_back_has_the_epochs_that_are_only_there(place: Place) -> None:
    """Epochs that retention has deleted here, and one that is not whole on all disks."""
    with place.open("one", local_disks=True) as manager:
        for epoch in range(3):
            save(manager, epoch)
    with away(place):
        manager = place.open("one", keep=2, local_disks=True)
        save(manager, 3)
    assert eventually(lambda: place.mirrored() == {0: 0, 1: 1, 2: 2, 3: 3})
    damage(place.root / "one", 2)
    manager.reload()
    assert listed(manager) == {0: 0, 1: 1, 2: 2, 3: 3}
    manager.close()


@pytest.mark.parametrize(("directory", "step"), [("one", begins_copy), ("two", begins_claim)])
def test_a_run_without_its_mirror_keeps_what_the_mirror_has_in_an_older_form(
    place: Place,
    faults: Faults,
    caplog: pytest.LogCaptureFixture,
    directory: str,
    step: Callable[[Ledger], bool],
) -> None:
    """A run of the directory that has made the copy, or of another one that goes on from there."""
    with place.open("one", keep=1) as manager:
        save(manager, 0)
    error = OSError(errno.ENOSPC, "the disk is full")
    full = faults.fail(Store.put, error, where=writes_ledger(place, directory, step))
    with full, place.open(directory, keep=1) as manager:
        save(manager, 0, 0.5, replace=True)
        assert eventually(lambda: "the disk is full" in caplog.text)
    with away(place), place.open(directory, keep=1, mirror_backlog=1) as manager:
        for epoch in (1, 2, 3):
            save(manager, epoch)
    with place.open(directory, keep=1) as manager:
        assert listed(manager)[0] == 0.5


@pytest.mark.parametrize("replaced", ["before", "after"])
def test_what_a_copy_of_a_directory_has_replaced_does_not_come_back_from_the_mirror(
    place: Place, faults: Faults, caplog: pytest.LogCaptureFixture, replaced: str
) -> None:
    with place.open("one", keep=3) as manager:
        for epoch in range(3):
            save(manager, epoch)
    if replaced == "before":
        error = OSError(errno.ENOSPC, "the disk is full")
        full = faults.fail(Store.put, error, where=writes_ledger(place, "one", begins_copy))
        with full, place.open("one", keep=3) as manager:
            save(manager, 0, 0.5, replace=True)
            assert eventually(lambda: "the disk is full" in caplog.text)
    shutil.copytree(place.root / "one", place.root / "two")
    with place.open("two", keep=3) as manager:
        if replaced == "after":
            save(manager, 0, 0.5, replace=True)
        save(manager, 3)
    with place.open("two", keep=3) as manager:
        assert listed(manager) == {1: 1, 2: 2, 3: 3}


# -- metrics


def attached_in(directory: pathlib.Path, epoch: int) -> Any:
    """The metrics that were attached to an epoch, as a reader of the directory sees them."""
    with ec.CheckpointManager(directory, options=Options(read_only=True)) as manager:
        return manager.metrics(epoch)


@pytest.mark.parametrize("change", ["replaced", "rolled back"])
def test_equal_metrics_of_an_epoch_that_is_saved_again_are_attached_to_its_new_copy(place: Place, change: str) -> None:
    with place.open("one") as manager:
        save(manager, 0)
        save(manager, 1)
        ec.attach_metrics(place.root / "one", 1, {"accuracy": 0.5}, "evaluator")
        save(manager, 2)
        assert eventually(lambda: attached_in(place.mirror, 1) == {"accuracy": 0.5})
        if change == "rolled back":
            manager.rollback_to(0)
        save(manager, 1, 1.5, replace=change == "replaced")
        assert eventually(lambda: place.mirrored().get(1) == 1.5)
        assert attached_in(place.mirror, 1) is None
        ec.attach_metrics(place.root / "one", 1, {"accuracy": 0.5}, "evaluator")
        save(manager, 3)
    assert place.mirrored()[1] == 1.5
    assert attached_in(place.mirror, 1) == {"accuracy": 0.5}


# -- what a manager does beside a mirror that it cannot write to


def lists(directory: pathlib.Path) -> Callable[[StoreCall], bool]:
    """The calls that look which epochs a directory has."""
    return lambda call: call.store.root == str(directory) and call.path == ""


def test_a_mirror_closes_though_the_directory_does_not_answer(
    place: Place, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    with place.open("one") as manager:
        save(manager, 0)
        assert eventually(lambda: place.mirrored() == {0: 0})
        with faults.hold(Store.list, where=lists(place.root / "one")) as held:
            closing = threading.Thread(target=manager.components.mirror.close, args=[0.1])
            closing.start()
            assert held.reached.wait(60)
            closing.join(60)
            assert not closing.is_alive()
    assert "what is not mirrored cannot be seen: no result within 0.1 s" in caplog.text


class Commits:
    """A metadata handler that notes which commits it hears of."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_params(self, db_prefix: str, db_type: str, node_names: list[str], path_prefix: Any, path_type: Any) -> None:
        pass

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        return user_epoch

    def write(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def report(self, action_name: str, all_stats: Any) -> None:
        pass

    def cp_accessible(self, epoch: int | None = None) -> bool:
        return True


def test_a_worker_that_is_fenced_off_ends_though_a_newer_version_has_rewritten_the_ledger(
    place: Place, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps no epoch from being deleted from then on, and the metadata handler hears of every commit."""
    handler = Commits()
    with place.open("one", metadata_handler=handler) as first:
        save(first, 0)
        save(first, 1)
        assert eventually(lambda: place.mirrored() == {0: 0, 1: 1})
        with place.open("two") as second:
            save(second, 2, 2.5)

        def rewrite(call: StoreCall) -> None:
            rewrite_by_a_newer_version(place.root / "one" / paths.MIRROR_RECORD)

        faults.after(Store.put, rewrite, where=writes_ledger(place, "one", begins_copy))
        save(first, 1, 1.5, replace=True)
        assert eventually(lambda: "nothing more is mirrored" in caplog.text)
        assert eventually(lambda: not first.components.mirror.waiting())
        assert "that its mirror's copies of [1] are outdated is not noted" in caplog.text
        save(first, 0, 0.5, replace=True)
    assert "that its mirror's copies of [0] are outdated is not noted" in caplog.text
    assert handler.epochs == [0, 1, 1, 0]


def test_a_commit_beside_a_mirror_of_another_directory_is_heard_of_though_the_ledger_cannot_be_read(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with place.open("one") as manager:
        save(manager, 0)
        save(manager, 1)
    shutil.copytree(place.root / "one", place.root / "copy")
    handler = Commits()
    with place.open("copy", metadata_handler=handler) as copy:
        save(copy, 2)
        rewrite_by_a_newer_version(place.root / "copy" / paths.MIRROR_RECORD)
        save(copy, 1, 1.5, replace=True)
    assert "that its mirror's copies of [1] are outdated is not noted" in caplog.text
    assert handler.epochs == [2, 1]
    assert place.mirrored() == {0: 0, 1: 1}
