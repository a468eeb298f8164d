"""A directory under several names, and numbers in records that no float holds."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import epochckpt as ec
from tests.support.small_saves import cut, edit_record, fill, save_all, value_of


def test_a_directory_named_in_another_way_is_the_same_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """restore(None, directory=) with a slash, a dot or a relative path falls back, and learns, like without it."""
    monkeypatch.chdir(tmp_path)
    place = str(tmp_path / "run")
    for other in (f"{place}/", f"{place}/.", "run", pathlib.Path(place)):
        with ec.CheckpointManager(place) as manager:
            save_all(manager, [1, 2])
            cut(manager, 2)
            assert value_of(manager.restore(None, directory=other)) == 1
            assert list(manager.all_steps()) == [1]
            manager.delete(1)
            manager.delete(2)


def test_a_number_that_no_float_holds_is_damage_not_a_crash(tmp_path: pathlib.Path) -> None:
    """An integer of 400 digits where seconds should be."""
    fill(str(tmp_path), 1, 2)

    def edit(body: dict[str, Any]) -> None:
        assert isinstance(body["nodes"][0][4], float)
        body["nodes"][0][4] = 10**400

    edit_record(tmp_path / "2" / "epoch.json", edit)
    with ec.CheckpointManager(tmp_path) as manager:
        assert list(manager.all_steps()) == [1]
        assert value_of(manager.restore(None)) == 1
        assert manager.status(2).state == "damaged"
