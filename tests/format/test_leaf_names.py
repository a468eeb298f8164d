"""Names of leaves: one spelling wherever they are shown, both spellings wherever they are asked for."""

import collections
import pathlib
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import _text, errors
from epochckpt.cli import main

Restore = ocp.args.PyTreeRestore


@pytest.fixture
def manager(tmp_path: pathlib.Path) -> Any:
    """Epochs 0 and 1: a transformer's layers under the keys "0" and "1", numbers as keys, a list, and odd keys."""
    with ec.CheckpointManager(tmp_path) as opened:
        for epoch in range(2):
            tree = {
                "layers": {str(i): {"größe": np.full(2, i + 10 * epoch)} for i in range(2)},
                "numbers": {0: {"w": np.full(2, 5)}},
                "list": [np.full(2, 6)],
                "odd": {"a/b": np.full(2, 7), "w[0]": np.full(2, 8)},
            }
            opened.save(epoch, args=ocp.args.StandardSave(tree))
        opened.wait_until_finished()
        yield opened


NAMES = ["layers/0/größe", "layers/1/größe", "list/0", "numbers/0/w", "odd/a%2Fb", "odd/w[0]"]


def test_leaves_have_one_name_wherever_they_are_shown(
    manager: ec.CheckpointManager, capsys: pytest.CaptureFixture[str]
) -> None:
    """`restore_leaves`, `inspect`, its statistics and differences, errors, and the command say the same."""
    assert sorted(manager.restore_leaves(0, "*")) == NAMES
    seen = ec.inspect(manager.directory)
    assert sorted(seen[0]["default"]) == NAMES
    assert sorted(row.leaf.name for row in seen[0].stats()) == NAMES
    found = {row.name: row.change for row in seen.diff(0, 1)}
    assert sorted(found) == NAMES
    assert [name for name, change in found.items() if change == "changed"] == NAMES[:2]
    with pytest.raises(errors.MismatchError, match=r"layers/0/größe +unexpected"):
        manager.restore(0, args=Restore({"list": [np.zeros(2, int)]}))
    capsys.readouterr()
    assert main.main(["stat", str(manager.directory), "0"]) == 0
    assert "%3" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["layers/0/größe", "layers/%30/gr%C3%B6%C3%9Fe", "layers/0/gr%C3%B6%C3%9Fe"])
def test_both_spellings_of_a_name_are_taken_wherever_one_is_asked_for(
    manager: ec.CheckpointManager, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `restore_leaves`, `inspect` and the command, alone and in patterns."""
    directory = str(manager.directory)
    assert list(manager.restore_leaves(0, name)) == NAMES[:1]
    assert list(manager.restore_leaves(0, name.replace("layers", "lay*"))) == NAMES[:1]
    item = ec.inspect(directory)[0]["default"]
    assert name in item
    assert item[name].tolist() == [0, 0]
    assert [row.leaf.name for row in item.stats(name)] == NAMES[:1]
    assert [row.name for row in ec.inspect(directory).diff(0, 1, name)] == NAMES[:1]
    capsys.readouterr()
    for typed in (name, name.rpartition("/")[0]):
        assert main.main(["stat", directory, "0", typed]) == 0
        out = capsys.readouterr().out
        assert "layers/0/größe" in out
        assert "layers/1" not in out


def test_a_name_with_marks_of_patterns_means_its_leaf(manager: ec.CheckpointManager) -> None:
    """`w[0]` is the leaf of that name, though as a pattern it would mean `w0`."""
    assert manager.restore_leaves(0, "odd/w[0]")["odd/w[0]"].tolist() == [8, 8]


def test_keys_that_read_alike_fit_where_only_one_of_them_is_there(manager: ec.CheckpointManager) -> None:
    """A target may have text where a number, or a place in a list, was saved, and the other way round."""
    target = {"layers": {1: {"größe": 0}}, "numbers": {"0": {"w": 0}}, "list": {"0": 0}}
    target = {k: _arrays(v) for k, v in target.items()}
    got = manager.restore(0, args=Restore(target, partial_restore=True))
    assert got["layers"][1]["größe"].tolist() == [1, 1]
    assert got["numbers"]["0"]["w"].tolist() == [5, 5]
    assert got["list"]["0"].tolist() == [6, 6]


def test_keys_that_read_alike_side_by_side_are_told_apart(tmp_path: pathlib.Path) -> None:
    """The number 0 keeps the name `0`, the text "0" its escaped one; none is restored for the other."""
    tree = collections.OrderedDict({0: np.full(2, 1), "0": np.full(2, 2)})
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"x": tree, "y": {"0": np.full(2, 3)}}))
        manager.wait_until_finished()
        got = {name: value.tolist() for name, value in manager.restore_leaves(0, "*").items()}
        assert got == {"x/0": [1, 1], "x/%30": [2, 2], "y/0": [3, 3]}
        for name, value in got.items():
            assert manager.restore_leaves(0, name)[name].tolist() == value
            assert ec.inspect(tmp_path)[0]["default"][name].tolist() == value
        one = {"x": {0: np.zeros(2, int)}, "y": {"0": np.zeros(2, int)}}
        assert manager.restore(0, args=Restore(one, partial_restore=True))["x"][0].tolist() == [1, 1]
        with pytest.raises(errors.MismatchError, match=r"x/0 +unexpected"):
            manager.restore(0, args=Restore(one))


def test_what_reads_as_something_else_stays_escaped() -> None:
    """Keys with `/` and `%`, what cannot be printed, and what is no text at all."""
    for name in ("a%2Fb", "%2530", "%1B%5Bm", "%FF", "%", "%float:1.5", "%E2%80%AE"):
        assert _text.readable(f"x/{name}") == f"x/{name}"
    assert _text.readable("%30/%311/b%20c/%22") == '0/11/b c/"'


def _arrays(tree: Any) -> Any:
    return {k: _arrays(v) for k, v in tree.items()} if isinstance(tree, dict) else np.zeros(2, int)
