"""The other processes hear that nothing more is mirrored, whatever is wrong on the primary."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Iterator

import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.directory import directory_of
from epochckpt.format import checksums, paths
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store
from epochckpt.tiers.backlog import Backlog, MirrorEpochs
from epochckpt.tiers.copying import MirrorFollower, MirrorJob, MirrorTasks
from epochckpt.tiers.ledger import Identity, Ledger
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.ledger_kinds import ONE_PER_DISK
from epochckpt.tiers.looking import MirrorLook
from epochckpt.tiers.mirror_run import Idle, MirrorContext
from epochckpt.tiers.standing import Owner, Stranger
from tests.support import lives

WAIT_SECS = 60.0


class TwoProcesses:
    """A job whose primary has claimed its directory, and whose other process listens for tasks.

    Attributes:
        job: as the primary has it.
        ledger: of the directory.
        told: the ledgers that the other process was told to adopt.
    """

    def __init__(self, root: pathlib.Path):
        run = lives.Job(2)
        names = StepNames.of(ocp.CheckpointManagerOptions())
        self._primary, self._other = (
            MirrorJob(
                url=str(root / "mirror"),
                local=directory_of(open_store(root / "run"), names),
                copies=directory_of(open_store(root / "mirror"), names),
                coordinator=coordinator,
                prefix="a mirror",
                options=ec.StorageOptions(mirror=str(root / "mirror"), local_disks=True),
                hosted=list,
            )
            for coordinator in run.coordinators
        )
        self.job = self._primary
        self._writer = self.job.local.claim()
        self.ledger = LedgerFile(self.job.local, ONE_PER_DISK)
        self.ledger.claimed(self._writer)
        self.ledger.write(Ledger(url=self.job.url, identity=Identity.of(self.job.local.store, "id")))
        self.told: list[str] = []
        follower = MirrorFollower(job=self._other, adopt=self.told.append)
        self._listening = threading.Thread(target=follower.run, daemon=True)
        self._listening.start()

    def begin(self, look: MirrorLook) -> None:
        """The primary begins to work, after this look at its mirror."""
        idle = Idle(MirrorContext(job=self.job, ledger=self.ledger, epochs=MirrorEpochs()))
        assert idle.begin(look, [], Backlog(url=self.job.url, options=self.job.options)) is idle

    def other_ends(self) -> bool:
        """Whether the other process hears that no further task comes."""
        self._listening.join(WAIT_SECS)
        return not self._listening.is_alive()

    def close(self) -> None:
        self._writer.release()


@pytest.fixture
def processes(tmp_path: pathlib.Path) -> Iterator[TwoProcesses]:
    (tmp_path / "run").mkdir()
    made = TwoProcesses(tmp_path)
    yield made
    made.close()


def test_the_end_comes_with_the_ledger(processes: TwoProcesses) -> None:
    MirrorTasks(job=processes.job, ledger=processes.ledger).end()
    assert processes.other_ends()
    assert processes.told == [processes.ledger.text()]


def test_the_end_comes_without_a_ledger_that_cannot_be_read(
    processes: TwoProcesses, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer epochckpt has rewritten it."""
    record = tmp_path / "run" / paths.MIRROR_RECORD
    data = json.loads(record.read_text())
    data.pop("checksum")
    record.write_bytes(checksums.seal({**data, "version": 99}))
    MirrorTasks(job=processes.job, ledger=processes.ledger).end()
    assert processes.other_ends()
    assert processes.told == []
    assert "has format version '99'" in caplog.text


@pytest.mark.parametrize("standing", [Owner(lineage=None), Stranger(lineage=None)])
def test_the_end_comes_where_no_thread_is_to_be_had(
    processes: TwoProcesses, monkeypatch: pytest.MonkeyPatch, standing: Owner | Stranger
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    processes.begin(MirrorLook(standing=standing))
    assert processes.other_ends()
