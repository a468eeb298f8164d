"""The difference of two epochs: what became of each leaf, of real checkpoints, ours and stock Orbax's."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from orbax.checkpoint.args import Composite, JsonSave, StandardSave

import epochckpt as ec
from epochckpt.args import NodeSave
from epochckpt.errors import EpochDeletedError, InvalidArgumentError
from epochckpt.inspection import describe, leaf_views, opening, scan, select
from epochckpt.inspection import diff as diffing
from epochckpt.inspection import html as html_views
from epochckpt.inspection import text as text_views
from epochckpt.inspection.leaf_reader import open_reader
from epochckpt.inspection.rows import Diff, DiffRow, EpochDetail, FileRow
from epochckpt.inspection.stats import ArrayChange

NODES = ("a", "b")
LONG = "x" * 3000


def sharded(array: Any) -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))


def state(after: bool) -> dict[str, Any]:
    """A tree in which one leaf or more of each sort changed, and one of each did not."""
    weights = np.arange(12, dtype=np.float32).reshape(4, 3)
    holes = np.array([1.0, np.nan, np.inf, -np.inf, 5.0], np.float32)
    tree: dict[str, Any] = {
        "frozen": sharded(weights),
        "moved": sharded(weights + (0.5 if after else 0)),
        "half": jnp.ones(4, jnp.float32 if after else jnp.bfloat16),
        "wide": jnp.zeros((6, 2) if after else (3, 4)),
        "holes": np.array([1.0, np.nan, np.inf, -np.inf, 7.0 if after else 5.0], np.float32),
        "same holes": -holes,
        "lost": np.array([1.0, 2.0, np.nan if after else 3.0, 4.0 if after else np.nan], np.float32),
        "rng": jax.random.key(1 if after else 0),
        "same rng": jax.random.key(7),
        "mask": np.array([True, False, after]),
        "ids": np.array([2**62, 2**62 + (1 if after else 0)], np.int64),
        "phase": np.array([1 + 1j, 2 + (2j if after else 1j)], np.complex64),
        "when": np.array(["2026-01-01", "NaT"], "datetime64[D]") + np.timedelta64(after, "D"),
        "empty": jnp.zeros((0, 3)),
        "step": 10 if after else 9,
        "rate": 1.0 if after else 1,
        "nan": math.nan,
        "name": "warm" if after else "cold",
        "flag": None if after else True,
        "text": LONG + ("a" if after else "b"),
        "same text": LONG,
        "slot": jnp.zeros(2) if after else 5,
        "list": [jnp.ones(2), jnp.zeros(2)] if after else [jnp.ones(2)],
    }
    tree |= {"new": jnp.ones(3)} if after else {"old": jnp.ones(3)}
    return tree


def own(after: bool) -> dict[str, Any]:
    """Each node's own state; node b has another one afterwards."""
    return {"a": {"at": np.array([1, 2])}, "b": {"at": np.array([1, 3 if after else 2])}}


def save(directory: pathlib.Path, epoch: int, after: bool, **more: Any) -> None:
    with ec.CheckpointManager(directory, node=NODES) as manager:
        items: dict[str, Any] = {
            "state": StandardSave(state(after)),
            "own": NodeSave(own(after), by_node=True),
            "same config": JsonSave({"a": 1}),
            "config": JsonSave({"a": [1 if after else 2]}),
        }
        items = {name.replace(" ", "_"): args for name, args in items.items()}
        manager.save(epoch, args=Composite(**items, **more))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Epochs 0 (before), 1 (after) and 2 (as epoch 0, with two more items)."""
    directory = tmp_path_factory.mktemp("diff") / "run"
    save(directory, 0, after=False)
    save(directory, 1, after=True)
    save(directory, 2, after=False, extra=StandardSave({"a": 1}), files=JsonSave([1]))
    return directory


def side(directory: pathlib.Path, epoch: int) -> diffing.Side:
    epoch_directory = opening.open_directory(directory)
    (row,) = [row for row in scan.look(directory).epochs if row.epoch == epoch]
    return describe.describe(epoch_directory, row), open_reader(epoch_directory, epoch)


def diff(directory: pathlib.Path, before: int, after: int, patterns: str | list[str] = "*", *args: Any) -> Diff:
    (one, before_leaves), (two, after_leaves) = side(directory, before), side(directory, after)
    one, two = select.narrowed([one, two], patterns)
    return diffing.compare((one, before_leaves), (two, after_leaves), *args)


def by_name(found: Diff, item: str = "state") -> dict[str, DiffRow]:
    return {row.name: row for row in found.rows if row.item == item}


@pytest.fixture(scope="module")
def rows(run: pathlib.Path) -> dict[str, DiffRow]:
    """What became of each leaf of `state` from epoch 0 to 1."""
    found = diff(run, 0, 1)
    assert (found.before, found.after, found.problems) == (0, 1, {})
    return by_name(found)


EXPECTED = {
    "added": {"new", "list/1"},
    "removed": {"old"},
    "reshaped": {"wide"},
    "retyped": {"half", "rate", "flag", "slot"},
    "changed": {"moved", "holes", "lost", "rng", "mask", "ids", "phase", "when", "step", "name", "text"},
    "unchanged": {"frozen", "same holes", "same rng", "empty", "nan", "same text", "list/0"},
}


def test_every_leaf_has_one_row_that_says_what_became_of_it(rows: dict[str, DiffRow]) -> None:
    """Arrays, keys, datetimes and Python values; NaN is equal to NaN; an int that became a float is retyped."""
    assert {change: {n for n, r in rows.items() if r.change == change} for change in EXPECTED} == EXPECTED
    for name, row in rows.items():
        assert (row.before is None, row.after is None) == (row.change == "added", row.change == "removed"), name


def test_the_order_is_that_of_the_trees(run: pathlib.Path) -> None:
    """Rows stand in the order of the second tree; what was removed comes last."""
    names = [row.name for row in diff(run, 0, 1).rows if row.item == "state"]
    removed = EXPECTED["removed"]
    assert names == [*sorted(set().union(*EXPECTED.values()) - removed), *sorted(removed)]
    assert [row.item for row in diff(run, 0, 1).rows] == sorted(row.item for row in diff(run, 0, 1).rows)


def test_the_numbers_of_a_change(rows: dict[str, DiffRow]) -> None:
    """Norm, relative norm, largest change and the number of changed elements are those of exact arithmetic."""
    moved = rows["moved"]
    assert (moved.norm, moved.largest, moved.elements) == (math.sqrt(12 * 0.25), 0.5, 12)
    assert moved.relative == pytest.approx(math.sqrt(3) / math.sqrt(sum(i * i for i in range(12))))
    assert (rows["mask"].norm, rows["mask"].elements) == (1.0, 1)
    assert (rows["ids"].norm, rows["ids"].largest, rows["ids"].elements) == (1.0, 1.0, 1)
    assert (rows["phase"].norm, rows["phase"].elements) == (1.0, 1)
    assert (rows["frozen"].norm, rows["frozen"].largest, rows["frozen"].elements) == (0.0, 0.0, 0)
    assert (rows["half"].norm, rows["half"].elements) == (0.0, 0)  # the cast lost nothing


def test_elements_that_are_not_finite(rows: dict[str, DiffRow]) -> None:
    """They are left out of norms, and what became of them is said."""
    assert (rows["holes"].norm, rows["holes"].elements, rows["holes"].detail) == (2.0, 1, "")
    lost = rows["lost"]
    assert (lost.norm, lost.largest, lost.elements) == (0.0, 0.0, 2)
    assert lost.detail == "1 became NaN or infinite, 1 became finite"


@pytest.mark.parametrize("name", ["rng", "when"])
def test_a_distance_that_means_nothing_is_not_told(rows: dict[str, DiffRow], name: str) -> None:
    """Of random keys and times only the number of changed elements is told."""
    assert (rows[name].norm, rows[name].relative, rows[name].largest) == (None, None, None)
    assert (rows[name].elements or 0) > 0


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("step", "9 → 10"),
        ("rate", "int 1 → float 1.0"),
        ("name", "'cold' → 'warm'"),
        ("flag", "bool True → none"),
        ("slot", "int 5 → jax float32[2]"),
        ("wide", "float32[3,4] → float32[6,2]"),
        ("half", "bfloat16[4] → float32[4]"),
        ("text", "3001 → 3001 characters, the first difference at character 3000"),
    ],
)
def test_what_a_leaf_was_and_is_stands_in_words(rows: dict[str, DiffRow], name: str, detail: str) -> None:
    """Python values, and types and shapes of arrays, before and after."""
    assert rows[name].detail == detail


def test_items_of_nodes_and_files(run: pathlib.Path) -> None:
    """A node's own leaves are compared with those of that node, files of handlers by what they hold."""
    found = diff(run, 0, 1)
    assert [(r.node, r.change, r.norm) for r in found.rows if r.item == "own"] == [
        ("a", "unchanged", 0.0),
        ("b", "changed", 1.0),
    ]
    files = {r.item: r for r in found.rows if "config" in r.item}
    assert (files["config"].change, files["same_config"].change) == ("changed", "unchanged")
    assert (files["config"].before, files["config"].after) == (None, None)


def test_a_leaf_and_a_file_of_one_name(run: pathlib.Path) -> None:
    """Each has its row."""

    def with_file(detail: EpochDetail, nbytes: int) -> EpochDetail:
        file = FileRow("step", "a", nbytes)
        items = [dataclasses.replace(i, files=(file,)) if i.name == "state" else i for i in detail.items]
        return dataclasses.replace(detail, items=tuple(items))

    (one, before), (two, after) = side(run, 0), side(run, 1)
    found = diffing.compare((with_file(one, 1), before), (with_file(two, 2), after))
    (leaf, file) = [row for row in found.rows if (row.item, row.name) == ("state", "step")]
    assert leaf == by_name(diff(run, 0, 1))["step"]
    assert (file.change, file.detail) == ("changed", "1 → 2 bytes")


class Sliced(bytes):
    """Bytes that are looked at in slices: one by one would take seconds for a large file."""

    def __iter__(self) -> Any:
        raise AssertionError("they are looked at one by one")


class OneFile:
    """The reader of an epoch all of whose files have this content."""

    def __init__(self, content: bytes):
        self._content = content

    def checksummed_files(self, item: str, node: str) -> dict[str, Any]:
        """It has no checksums, as if stock Orbax had written it."""
        return {}

    def file(self, item: str, name: str, node: str) -> bytes:
        return Sliced(self._content)


@pytest.mark.parametrize("place", [0, 65535, 65536, 65537, 199_998, 199_999])
def test_the_first_difference_of_a_large_file(run: pathlib.Path, place: int) -> None:
    """Its place is found without a look at every byte before it; a file that ends there differs at its end."""
    (one, _), (two, _) = side(run, 0), side(run, 1)
    large = dataclasses.replace(one.items[0], leaves=(), files=(FileRow("large", "a", 200_000),))
    one, two = (dataclasses.replace(detail, items=(large,)) for detail in (one, two))
    content = bytes(place) + b"x" + bytes(199_999 - place)
    after: Any = OneFile(content)
    for other in (bytes(200_000), bytes(place)):
        before: Any = OneFile(other)
        (row,) = diffing.compare((one, before), (two, after)).rows
        assert row.detail == f"{len(other)} → 200000 bytes, the first difference at byte {place}"


def test_items_of_one_epoch_only(run: pathlib.Path) -> None:
    """All their leaves and files were added, or removed."""
    for numbers, change in (((0, 2), "added"), ((2, 0), "removed")):
        found = diff(run, *numbers)
        assert {(r.item, r.change) for r in found.rows if r.change != "unchanged"} == {
            ("extra", change),
            ("files", change),
        }


def without_data(run: pathlib.Path, to: pathlib.Path, epochs: tuple[int, ...]) -> pathlib.Path:
    """A copy of the run whose epochs consist of nothing but records."""
    shutil.copytree(run, to, symlinks=True)
    for epoch in epochs:
        for path in sorted((to / str(epoch)).rglob("*"), reverse=True):
            if (path.is_file() or path.is_symlink()) and path.name not in ("epoch.json", "node.json"):
                path.unlink()
    return to


def test_files_of_equal_checksums_are_not_read(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Files of handlers are compared though none of them is there any more: records are enough to say which changed."""
    bare = without_data(run, tmp_path / "bare", (0, 1))
    found = diff(bare, 0, 1, ["*config:*"])
    assert {row.item: row.change for row in found.rows} == {"config": "changed", "same_config": "unchanged"}
    assert all("is missing" in said for said in found.problems.values())


def test_progress_goes_up_to_all_bytes_of_both_epochs(run: pathlib.Path) -> None:
    """The total is known from the beginning; it is reached, and nothing goes backwards."""
    told: list[tuple[int, int]] = []
    found = diff(run, 0, 1, "moved", lambda done, total: told.append((done, total)))
    assert told[0] == (0, 96)
    assert told[-1] == (96, 96)
    assert told == sorted(told)
    assert [row.change for row in found.rows] == ["changed"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("list/*", {"list/0", "list/1"}),
        (["state:st*", "own:*"], {"step", "at"}),
        (["*:moved", "list"], {"moved", "list/0", "list/1"}),
    ],
)
def test_patterns_choose_leaves(run: pathlib.Path, patterns: str | list[str], expected: set[str]) -> None:
    """Shell patterns of leaves, or of items and leaves; what they do not name is not in the result."""
    assert {row.name for row in diff(run, 0, 1, patterns).rows} == expected


def test_a_pattern_that_matches_nothing_is_refused(run: pathlib.Path) -> None:
    """The error names near leaves."""
    with pytest.raises(InvalidArgumentError, match=r"no leaf matches 'frosen'; near: 'frozen'"):
        diff(run, 0, 1, "frosen")


def test_a_damaged_leaf_does_not_hide_the_rest(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """What cannot be read is among the problems, by name; everything else is compared."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    for path in (copy / "1").glob("*/state.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 255
        path.write_bytes(data)
    found = diff(copy, 0, 1)
    assert found.problems
    assert all(name.startswith("state:") and "differ" in said for name, said in found.problems.items())
    assert not {f"state:{row.name}" for row in found.rows if row.item == "state"} & set(found.problems)
    assert {row.name for row in found.rows} > {"at", "step", "new", "old", "wide"}


def test_an_item_that_cannot_be_looked_into_was_not_removed(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A node whose record is damaged: nobody claims that its leaves are gone."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    os.truncate(copy / "1" / "b" / "node.json", 10)
    found = diff(copy, 0, 1, "own:*")
    assert [(row.node, row.change) for row in found.rows] == [("a", "unchanged")]
    assert list(found.problems) == ["own:b"]


def test_an_epoch_that_goes_away_is_no_damage(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Deleting an epoch while it is compared is told as that."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    before, after = side(copy, 0), side(copy, 1)
    shutil.rmtree(copy / "1")
    with pytest.raises(EpochDeletedError):
        diffing.compare(before, after)


def test_runs_of_different_directories(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Epochs of two runs are compared, whatever their numbers and however many nodes wrote them."""
    with ec.CheckpointManager(tmp_path / "other") as manager:
        manager.save(7, args=Composite(state=StandardSave(state(False))))
    found = diffing.compare(side(run, 0), side(tmp_path / "other", 7), directory=str(run), other_directory="other")
    assert (found.before, found.after, found.directory, found.other_directory) == (0, 7, str(run), "other")
    assert {row.change for row in found.rows if row.item == "state"} == {"unchanged"}


def test_ours_against_stock_orbax(tmp_path: pathlib.Path) -> None:
    """The same tree saved by both is the same; one of its leaves changed is that leaf."""
    tree = {
        "w": sharded(np.arange(400, dtype=np.float32)),
        "b": jnp.arange(5, dtype=jnp.bfloat16),
        "n": np.arange(3),
        "step": 3,
        "rate": 0.5,
        "name": "cold",
        "inner": [{"x": jnp.ones((2, 2))}, None],
    }
    with ec.CheckpointManager(tmp_path / "ours") as ours:
        ours.save(0, args=StandardSave(tree))
    with ocp.CheckpointManager(tmp_path / "orbax") as orbax:
        orbax.save(0, args=ocp.args.PyTreeSave(tree))
        orbax.save(1, args=ocp.args.PyTreeSave({**tree, "w": tree["w"].at[3].set(-4.0), "step": 4}))
        orbax.wait_until_finished()
    found = diffing.compare(side(tmp_path / "ours", 0), side(tmp_path / "orbax", 0))
    assert found.problems == {}
    assert {row.name: row.change for row in found.rows if row.change != "unchanged"} == {}
    assert len(found.rows) == 8
    for before in (side(tmp_path / "ours", 0), side(tmp_path / "orbax", 0)):
        found = diffing.compare(before, side(tmp_path / "orbax", 1))
        changed = {row.name: row for row in found.rows if row.change != "unchanged"}
        assert set(changed) == {"w", "step"}
        assert (changed["w"].norm, changed["w"].elements, changed["step"].detail) == (7.0, 1, "3 → 4")


def change_of(before: np.ndarray, after: np.ndarray, size: int = 1000) -> ArrayChange:
    found = ArrayChange()
    for start in range(0, before.size, size):
        found.add(before[start : start + size], after[start : start + size])
    return found


FLOATS = st.one_of(st.floats(-1e150, 1e150), st.sampled_from([math.nan, math.inf, -math.inf]))
PAIRS = st.integers(0, 40).flatmap(lambda n: st.tuples(*[hnp.arrays(np.float64, n, elements=FLOATS)] * 2))


@pytest.mark.slow
@given(PAIRS, st.integers(1, 50))
def test_changes_of_any_floats(pair: tuple[np.ndarray, np.ndarray], size: int) -> None:
    """Count, largest and norm of the change are right, also for NaN and infinities."""
    before, after = pair
    found = change_of(before, after, size)
    both = list(zip(before.tolist(), after.tolist(), strict=True))
    assert found.elements == sum(a != b and not (math.isnan(a) and math.isnan(b)) for a, b in both)
    finite = [abs(b - a) for a, b in both if math.isfinite(a) and math.isfinite(b)]
    assert found.largest == max(finite, default=0.0)
    assert found.norm == pytest.approx(math.hypot(*finite), rel=1e-12, abs=1e-150)
    assert found.lost == sum(math.isfinite(a) and not math.isfinite(b) for a, b in both)
    assert found.gained == sum(math.isfinite(b) and not math.isfinite(a) for a, b in both)


def test_relative_changes() -> None:
    """The norm of the change is set against that of the array before; not if that is 0."""
    assert change_of(np.full(100, 3.0), np.full(100, -3.0)).relative == pytest.approx(2.0)
    assert change_of(np.zeros(3), np.ones(3)).relative is None


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)), max_size=20))
def test_changes_of_64_bit_integers(pairs: list[tuple[int, int]]) -> None:
    """Differences do not wrap around, and a change by one of a large number is one."""
    before, after = (np.array([p[i] for p in pairs], np.int64) for i in (0, 1))
    found = change_of(before, after)
    assert found.elements == sum(a != b for a, b in pairs)
    assert found.largest == max((float(abs(b - a)) for a, b in pairs), default=0.0)


@pytest.mark.parametrize("other", [np.float32, np.int8, np.uint64, np.bool_, np.complex64, ml_dtypes.int4])
def test_the_same_values_in_another_dtype(other: Any) -> None:
    """Values are compared, not bits, between any two dtypes."""
    values = np.array([0, 1, 1, 0])
    for before in (values.astype(ml_dtypes.bfloat16), values.astype(np.int64)):
        found = change_of(before, values.astype(other))
        assert (found.elements, found.norm, found.relative) == (0, 0.0, 0.0)
        assert change_of(before, (1 - values).astype(other)).elements == 4


def test_both_views_tell_what_could_not_be_compared() -> None:
    """A leaf that cannot be read is named in text and HTML, escaped, and nobody says that nothing changed."""
    found = Diff("/run", 1, 2, (), problems={"state:w\x1b<b>": "bytes 0-8 differ"} | {f"p{i}": "x" for i in range(200)})
    text, html = (
        text_views.to_text(text_views.render(leaf_views.diff(found)), 100),
        html_views.page(leaf_views.diff(found)),
    )
    for view in (text, html):
        assert "bytes 0-8 differ" in view
        assert "\x1b" not in view
        assert "more" in view
    assert "<b>" not in html
    assert "othing" not in html
