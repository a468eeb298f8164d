"""The ledger of a mirror as a run writes it, where each host has a copy of it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import orbax.checkpoint as ocp
import pytest

from epochckpt.directory import directory_of
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store
from epochckpt.tiers.ledger import Identity, Ledger
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.ledger_kinds import ONE_PER_DISK


@pytest.fixture
def file(tmp_path: pathlib.Path) -> Iterator[LedgerFile]:
    """The ledger of a directory that is claimed; it has been written once."""
    local = directory_of(open_store(tmp_path), StepNames.of(ocp.CheckpointManagerOptions()))
    writer = local.claim()
    made = LedgerFile(local, ONE_PER_DISK)
    made.claimed(writer)
    made.write(Ledger(url="mirror", identity=Identity.of(local.store, "id")))
    yield made
    writer.release()


@pytest.mark.parametrize(("serial", "adopted"), [(0, False), (1, True), (2, True)])
def test_the_primary_s_ledger_is_adopted_unless_this_disk_has_a_newer_one(
    file: LedgerFile, serial: int, adopted: bool
) -> None:
    """Of two with one number the primary's counts: each was written while the other disk was away."""
    own = file.known()
    assert own.serial == 1
    told = dataclasses.replace(own, url="the primary's", serial=serial)
    file.adopt(told.to_bytes().decode())
    assert file.known() == (told if adopted else own)


def test_a_ledger_that_cannot_be_used_is_not_adopted(file: LedgerFile) -> None:
    own = file.known()
    file.adopt("{}")
    assert file.known() == own
