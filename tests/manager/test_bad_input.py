"""What nobody should pass, or find on storage: a clear error of ours, nothing written, nothing lost."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
import os
import pathlib
import pickle
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt import errors
from epochckpt.format import checksums
from epochckpt.format import paths as layout
from tests.support.files import unchanged
from tests.support.mutations import DELETE, DOUBLE, mutate, mutations
from tests.support.processes import run_worker

Save, Restore = ocp.args.StandardSave, ocp.args.StandardRestore
READ_ONLY = ocp.CheckpointManagerOptions(read_only=True)
NOBODY = 65534
BIG = 64 * 2**20  # more than any restore here needs


def state(epoch: int = 0) -> dict[str, Any]:
    """One of every kind of leaf."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    rng = np.random.default_rng(epoch)

    def put(shape: tuple[int, ...], *spec: Any) -> jax.Array:
        values = rng.normal(size=shape).astype(np.float32)
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "w": put((8, 4), "x", "y"),
        "v": put((8, 4), ("x", "y")),
        "r": put((4,)),
        "one": jnp.arange(5, dtype=jnp.bfloat16) + epoch,
        "key": jax.random.split(jax.random.key(epoch), 3),
        "numpy": rng.integers(0, 100, (2, 3)),
        "scalar": np.int16(epoch),
        "py": [epoch, 1.5, True, 2 + 3j, "text", b"bytes", None, {}, ()],
        "text": "long " * 1000,
        "blob": b"\xff\x00" * 4000,
        "ints": {3: np.zeros((0, 2))},
    }


def save_epochs(directory: pathlib.Path, epochs: int = 2) -> None:
    with ec.CheckpointManager(directory) as m:
        for epoch in range(epochs):
            m.save(epoch, args=Save(state(epoch)), metrics={"loss": 1.0}, custom_metadata={"note": ["x"]})
        m.wait_until_finished()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("bad") / "run"
    save_epochs(directory)
    return directory


@pytest.fixture
def run(pristine: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """Epochs 0 and 1."""
    return pathlib.Path(shutil.copytree(pristine, tmp_path / "run", symlinks=True))


def reader(directory: pathlib.Path) -> ec.CheckpointManager:
    return ec.CheckpointManager(directory, options=READ_ONLY)


# -- the directory ---------------------------------------------------------------------------------------------------


def test_a_file_or_broken_link_is_no_directory(tmp_path: pathlib.Path) -> None:
    """Says what it is instead."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with unchanged(tmp_path):
        for options in (None, READ_ONLY):
            with pytest.raises(errors.NotACheckpointDirectoryError, match="is a file"):
                ec.CheckpointManager(tmp_path / "file", options=options)
            with pytest.raises(errors.NotACheckpointDirectoryError, match="broken link"):
                ec.CheckpointManager(tmp_path / "link", options=options)
        with pytest.raises(errors.EpochCheckpointError, match="file"):
            ec.CheckpointManager(tmp_path / "file" / "below")


def test_a_directory_or_url_that_makes_no_sense_is_refused() -> None:
    """An unknown scheme, an empty name, a wrong type."""
    with pytest.raises(ValueError, match="bogus"):
        ec.CheckpointManager("bogus://bucket/run")
    for wrong in (None, 5):
        with pytest.raises((TypeError, errors.EpochCheckpointError)):
            ec.CheckpointManager(wrong)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "path", "mode"),
    [
        ("write", "run", 0o755),
        ("write", "run", 0o700),
        ("read", "run", 0o700),
        ("read", ".", 0o700),
        ("read", "run/1", 0o700),
        ("read", "run/1/epoch.json", 0o600),
        ("restore", "run/1/process_0/node.json", 0o600),
        ("restore", "run/1/process_0/default.safetensors", 0o600),
    ],
)
def test_no_permission_is_an_access_error(
    pristine: pathlib.Path, public_folder: pathlib.Path, what: str, path: str, mode: int
) -> None:
    """As uid 65534: AccessError (a PermissionError) that names the path; nothing is written, no older epoch is taken
    instead."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    run = pathlib.Path(shutil.copytree(pristine, public_folder / "run", symlinks=True))
    run.chmod(0o755)
    (public_folder / path).chmod(mode)
    with unchanged(run):
        job = {"directory": str(run), "what": what, "user": NOBODY}
        (said,) = run_worker("tests.support.permission_jobs:as_another_user", job, env={"HOME": "/nonexistent"})
    assert said is not None, "nothing was refused"
    kind, is_permission_error, text = said
    assert (kind, is_permission_error) == ("AccessError", True), text
    assert str(run) in text or path.removeprefix("run/") in text


def leave_unfinished(directory: pathlib.Path, step: int) -> None:
    """What stock Orbax leaves of a step when it is killed on a store without rename: no record of its end."""
    with ocp.CheckpointManager(directory.parent / "stock") as stock:
        stock.save(step, args=Save({"x": np.zeros(2)}))
    left = directory.parent / "stock" / str(step)
    (left / "_CHECKPOINT_METADATA").unlink()
    (left / "default" / "_METADATA").unlink()
    left.rename(directory / str(step))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["folder", "empty", "orbax"])
def test_what_lies_under_an_epochs_number_and_is_none_is_left_alone(
    run: pathlib.Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`5/` that is no epoch: the directory opens, restores and saves other numbers; it is named once, never touched."""
    if what == "orbax":
        leave_unfinished(run, 5)
    else:
        (run / "5").mkdir()
    if what == "folder":
        (run / "5" / "weights.bin").write_text("precious")
    with unchanged(run):
        caplog.clear()
        for options in (READ_ONLY, None):
            with ec.CheckpointManager(run, options=options) as manager:
                assert manager.all_steps() == [0, 1]
                assert manager.restore(None) is not None
                assert list(manager.foreign_folders()) == [5]
        said = [r.getMessage() for r in caplog.records if f"{run}/5 is named like an epoch" in r.getMessage()]
        assert len(said) == 2, "once per manager"
    with ec.CheckpointManager(run) as manager, unchanged(run / "5"):
        assert [epoch for epoch in range(7) if manager.should_save(epoch)] == [2, 3, 4, 6]
        caplog.clear()
        assert not manager.save(5, args=Save({"x": np.zeros(2)}))
        assert f"checkpoint 5 cannot be saved: {run}/5 is named like an epoch" in caplog.text
        with pytest.raises(errors.EpochExistsError, match=r"/5 is named like an epoch .* move the folder away"):
            manager.save(5, args=Save({"x": np.zeros(2)}), force=True)
        for epoch in (4, 6):
            assert manager.save(epoch, args=Save({"x": np.full(2, epoch)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1, 4, 6]
        assert (manager.restore(6)["x"] == 6).all()
        shutil.move(run / "5", run.parent / "5")
        manager.reload()
        assert manager.foreign_folders() == {}
        assert manager.save(5, args=Save({"x": np.zeros(2)}), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1, 4, 5, 6]
        shutil.move(run.parent / "5", run / "7")  # nobody knew of it when the save began
        assert manager.save(7, args=Save({"x": np.zeros(2)}))
        with pytest.raises(errors.SaveError, match=r"/7 is named like an epoch"):
            manager.wait_until_finished()
        shutil.move(run / "7", run / "5.away")
        shutil.rmtree(run / "5")
        shutil.move(run / "5.away", run / "5")


def test_a_stock_orbax_directory_is_opened_without_a_change(tmp_path: pathlib.Path) -> None:
    """A directory that Orbax wrote: its steps are epochs, reading changes nothing, and Orbax can still read it."""
    value = np.arange(4.0)
    with ocp.CheckpointManager(tmp_path / "orbax") as stock:
        stock.save(3, args=Save({"x": value}))
        stock.wait_until_finished()
    with unchanged(tmp_path / "orbax"):
        with ec.CheckpointManager(tmp_path / "orbax", options=READ_ONLY) as m:
            assert m.all_steps() == [3]
            np.testing.assert_array_equal(m.restore(None, args=Restore({"x": value}))["x"], value)
        with ec.CheckpointManager(tmp_path / "orbax") as m:
            assert m.latest_step() == 3
    with ocp.CheckpointManager(tmp_path / "orbax") as stock:
        np.testing.assert_array_equal(stock.restore(3, args=Restore({"x": value}))["x"], value)


def test_other_things_beside_epochs_do_no_harm(run: pathlib.Path) -> None:
    """Files named like epochs, folders named otherwise, links to epochs: ignored, and left alone."""
    (run / "7").write_text("a file")
    (run / "notes").mkdir()
    (run / "8").symlink_to(run / "1")
    (run / "01").mkdir()
    with unchanged(run):
        assert reader(run).all_steps() == [0, 1]
    with ec.CheckpointManager(run) as m:
        assert m.all_steps() == [0, 1]
        m.save(2, args=Save({"x": np.zeros(1)}))
        m.wait_until_finished()
        assert m.all_steps() == [0, 1, 2]
        assert m.save(7, args=Save({"x": np.zeros(1)}))
        with pytest.raises(errors.SaveError, match="exists"):
            m.wait_until_finished()
    assert (run / "7").read_text() == "a file"
    assert (run / "8").is_symlink()


def test_a_read_only_manager_never_writes(run: pathlib.Path) -> None:
    """Whatever is called, the directory stays as it was."""
    with unchanged(run.parent):
        m = reader(run)
        assert m.save(9, args=Save({"x": np.zeros(1)})) is False
        assert m.save(9, args=Save({"x": np.zeros(1)}), force=True) is False
        m.delete(1)
        with pytest.raises(errors.InvalidArgumentError, match="read only"):
            m.rollback_to(0)
        m.restore(None)
        m.restore_leaves(1, "w")
        m.item_metadata(1)
        m.metadata()
        m.metadata(1)
        m.metrics(1)
        assert m.verify(1).ok
        m.reload()
        m.wait_until_finished()
        m.check_for_errors()
        m.close()
        assert m.all_steps() == [0, 1]
        ec.CheckpointManager(run, options=READ_ONLY, metadata={"a": 1}).close()


# -- records ---------------------------------------------------------------------------------------------------------

EPOCH, NODE = "1/epoch.json", "1/process_0/node.json"
DATA = "1/process_0/default.safetensors"


def load(run: pathlib.Path, name: str) -> dict[str, Any]:
    return checksums.parse_sealed(name, (run / name).read_bytes())


def seal_epoch(run: pathlib.Path, record: dict[str, Any]) -> None:
    (run / EPOCH).write_bytes(checksums.seal(record))


def seal_node(run: pathlib.Path, record: dict[str, Any], into: int = 0) -> None:
    """Writes a node's record, and the commit record that vouches for it."""
    data = checksums.seal(record)
    (run / NODE).write_bytes(data)
    epoch = load(run, EPOCH)
    epoch["nodes"][into][2:4] = [len(data), checksums.digest(data)]
    seal_epoch(run, epoch)


def use_everything(manager: ec.CheckpointManager, target: Any) -> list[Exception]:
    """Every way to read epoch 1; returns the project's errors, anything else fails the test."""
    calls: list[Callable[[], Any]] = [
        lambda: manager.restore(1),
        lambda: manager.restore(1, args=Restore(target)),
        lambda: manager.restore_leaves(1, "*"),
        lambda: manager.item_metadata(1),
        lambda: manager.metadata(1),
        lambda: manager.metrics(1),
        lambda: manager.nodes(1),
        lambda: manager.status(1),
        lambda: manager.verify(1),
    ]
    found: list[Exception] = []
    for call in calls:
        try:
            call()
        except errors.EpochCheckpointError as error:
            found.append(error)
    return found


def frames_left() -> int:
    """How many more calls Python allows here."""

    def deeper(count: int) -> int:
        try:
            return deeper(count + 1)
        except RecursionError:
            return count

    return deeper(0)


def give_back_frames(before: int) -> None:
    """Allows as many calls as `before`.

    jaxlib loses some of them for good, whenever it flattens a tree in which a dict below the top has keys that cannot
    be sorted. No job can save such a tree, but some of these records have one.
    """
    lost = before - frames_left()
    sys.setrecursionlimit(sys.getrecursionlimit() + lost)


def check_mutations(
    run: pathlib.Path, name: str, wrong: Sequence[tuple[tuple[Any, ...], Any]], record: dict[str, Any]
) -> None:
    """Each of these paths of a valid record gets its new value, which every reader refuses clearly, or reads."""
    target = state(1)
    before = reader(run)
    original = (run / EPOCH).read_bytes(), (run / NODE).read_bytes()
    refused = 0
    surprises: list[str] = []
    biggest = [0]
    frames = frames_left()
    real = np.empty

    def spy(shape: Any, *args: Any, **kwargs: Any) -> Any:
        array = real(shape, *args, **kwargs)
        biggest[0] = max(biggest[0], array.nbytes)
        return array

    np.empty = spy
    try:
        for path, new in wrong:
            changed = mutate(record, path, new)
            try:
                (seal_epoch if name == EPOCH else seal_node)(run, changed)
            except (ValueError, UnicodeEncodeError):
                continue  # not JSON
            shown = f"{path} = {'deleted' if new is DELETE else 'doubled' if new is DOUBLE else repr(new)[:60]}"
            try:
                found = use_everything(before, target)
                try:
                    reader(run).restore(None)
                except errors.EpochCheckpointError as error:
                    found.append(error)
                refused += bool(found)
            except Exception as error:  # collected: one run shows them all
                surprises.append(f"{shown} gave {type(error).__name__}: {error}"[:300])
            if biggest[0] > BIG:
                surprises.append(f"{shown} made a reader allocate {biggest[0]} bytes")
                biggest[0] = 0
            (run / EPOCH).write_bytes(original[0])
            (run / NODE).write_bytes(original[1])
            give_back_frames(frames)
    finally:
        np.empty = real
    assert not surprises, f"{name}: {len(surprises)} surprises:\n" + "\n".join(surprises[:100])
    assert refused > 100
    assert before.verify(1).ok


@pytest.mark.long
@pytest.mark.parametrize("name", [EPOCH, NODE])
def test_records_with_any_field_wrong_are_refused_clearly(run: pathlib.Path, name: str) -> None:
    """A valid record with one field of a wrong type, range or meaning, and a right checksum: every way to read it
    gives an error of ours or a value, in bounded memory, never anything else."""
    record = load(run, name)
    check_mutations(run, name, mutations(record, 300 if name == EPOCH else 150, seed=5), record)


PARTS = 4  # of the test below


@pytest.mark.long
@pytest.mark.timeout(800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", [EPOCH, NODE])
def test_every_field_wrong_in_every_way_is_refused_clearly(run: pathlib.Path, name: str, part: int) -> None:
    """The same, all of them."""
    record = load(run, name)
    check_mutations(run, name, mutations(record, None, seed=0)[part::PARTS], record)


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def nested_text(depth: int) -> bytes:
    """A sealed record whose metrics are nested that deep; built as text, because json.dumps would not."""
    body = b'{"format":"epochckpt","version":1,"record":"epoch","metrics":' + b"[" * depth + b"]" * depth + b"}"
    zeroed = b'{"checksum":"xxh3:' + b"0" * 16 + b'",' + body[1:]
    return zeroed.replace(b"0" * 16, f"{checksums.xxh3(zeroed):016x}".encode(), 1)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [100, 300, 480, 700, 900])
@pytest.mark.parametrize("field", ["metrics", "custom_metadata", "leaf path", "sharding", "values"])
def test_deep_nesting_is_refused_or_read(run: pathlib.Path, depth: int, field: str) -> None:
    """A record of any depth that JSON itself can hold never ends in a RecursionError."""
    record = load(run, EPOCH)
    item = record["items"]["default"]
    if field == "metrics":
        record["metrics"] = nest(depth)
    elif field == "custom_metadata":
        record["custom_metadata"] = {"deep": nest(depth)}
    elif field == "leaf path":
        item["leaves"][0][0] = nest(depth)
    elif field == "sharding":
        item["shardings"][0] = nest(depth)
    else:
        item["values"][next(iter(item["values"]))] = nest(depth)
    before = reader(run)
    try:
        seal_epoch(run, record)
    except RecursionError:
        pytest.skip("json cannot write it that deep")
    use_everything(before, state(1))
    reader(run).restore(None)


@pytest.mark.parametrize("depth", [2000, 100_000, 5_000_000])
def test_absurd_nesting_is_refused(run: pathlib.Path, depth: int) -> None:
    """A record of megabytes of brackets is refused by name, and the older epoch is taken."""
    before = reader(run)
    (run / EPOCH).write_bytes(nested_text(depth))
    with pytest.raises(errors.FormatError, match=r"1/epoch\.json"):
        before.restore(1)
    assert reader(run).all_steps() == [0]


def nested(depth: int, inner: Any = 0) -> Any:
    """Lists in lists."""
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize("depth", [101, 500, 900, 960, 985])
def test_metadata_of_the_directory_that_is_nested_deeply_is_refused(run: pathlib.Path, depth: int) -> None:
    """As damage of a file that is named, whatever the depth at which Python itself gives up."""
    (run / "metadata").mkdir()
    (run / "metadata" / "_ROOT_METADATA").write_text(f'{{"custom_metadata": {{"x": {"[" * depth}{"]" * depth}}}}}')
    with (
        ec.CheckpointManager(run, options=READ_ONLY) as manager,
        pytest.raises(errors.DamagedError, match=r"metadata/_ROOT_METADATA: .*(nested|recursion)"),
    ):
        manager.metadata()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [101, 900, 960, 985])
@pytest.mark.parametrize("field", ["metrics", "custom_metadata", "init_timestamp_nsecs", "item_handlers"])
def test_a_step_of_stock_orbax_that_is_nested_deeply_says_so(tmp_path: pathlib.Path, depth: int, field: str) -> None:
    """Or is read without what is nested; never a RecursionError."""
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=Save({"x": np.zeros(2)}), metrics={"loss": 1.0})
    path = tmp_path / "0" / "_CHECKPOINT_METADATA"
    record = json.loads(path.read_text())
    text = json.dumps({**record, field: "HERE"}).replace('"HERE"', "[" * depth + "]" * depth)
    path.write_text(text)
    options = ocp.CheckpointManagerOptions(read_only=True, best_fn=lambda m: m["loss"])
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        for call in (manager.metadata, manager.metrics, manager.item_metadata, manager.restore, manager.status):
            with contextlib.suppress(errors.EpochCheckpointError):
                call(0)
        manager.best_step()
        manager.reload()


@pytest.mark.slow
@pytest.mark.parametrize(
    "metrics", [{"loss": "high"}, {"loss": [1]}, {"loss": None}, [1], "high", 7, {"x": {}}, nested(90)]
)
def test_metrics_that_are_no_numbers_make_no_epoch_the_best(tmp_path: pathlib.Path, metrics: Any) -> None:
    """Whatever `best_fn` does with them: the epoch counts as one without metrics, also for retention."""
    for best_fn in (lambda m: m["loss"], lambda m: -m["loss"], lambda m: m.loss, lambda m: 1 / m["loss"]):
        options = ocp.CheckpointManagerOptions(best_fn=best_fn, max_to_keep=1)
        directory = tmp_path / str(id(best_fn))
        with ec.CheckpointManager(directory, options=options) as manager:
            manager.save(0, args=Save({"x": 0}), metrics=metrics)
            manager.save(1, args=Save({"x": 0}), metrics={"other": 1.0})
            manager.wait_until_finished()
            assert manager.best_step() is None
            assert 1 in manager.all_steps()


HUGE = [10**5000, -(10**5000), 2**63, 10**400, -1, True, 1.0, "1", None]


@pytest.mark.parametrize("step", HUGE, ids=[str(i) for i, _ in enumerate(HUGE)])
def test_a_number_that_no_epoch_has_is_refused(run: pathlib.Path, step: Any) -> None:
    """By whatever takes one, also where Python refuses to write it; 2**63 - 1 is the largest."""
    with ec.CheckpointManager(run) as manager:
        methods = [manager.delete, manager.rollback_to, manager.allow_overwrite, manager.status, manager.verify]
        methods += [manager.metrics, manager.item_metadata, manager.item_kinds, manager.nodes, manager.save_id]
        methods += [manager.should_save, lambda step: manager.save(step, args=Save({"x": 0}))]
        methods += [lambda step: manager.restore_leaves(step, "*"), lambda step: manager.node_path("process_0", step)]
        methods += [lambda step: ec.attach_metrics(run, step, {"a": 1.0}, "x"), ec.inspect(run).__getitem__]
        if step is not None:  # which stands for the newest epoch, or the directory
            methods += [manager.restore, manager.metadata, manager.restore_async]
        for method in methods:
            with pytest.raises(errors.InvalidArgumentError):
                method(step)
        assert manager.all_steps() == [0, 1]
        largest = layout.MAX_EPOCH
        assert manager.save(largest, args=Save({"x": 0}))
        manager.wait_until_finished()
        assert manager.latest_step() == largest


def test_a_closed_manager_says_that_it_is_closed(run: pathlib.Path) -> None:
    """Whatever it is asked to write."""
    manager = ec.CheckpointManager(run)
    manager.save(2, args=Save({"x": 0}))
    manager.close()
    calls = [
        lambda: manager.delete(1),
        lambda: manager.rollback_to(0),
        lambda: manager.allow_overwrite(1),
        manager.claim,
    ]
    with unchanged(run):
        for call in [*calls, lambda: manager.save(5, args=Save({"x": 0}))]:
            with pytest.raises(errors.InvalidArgumentError, match="is closed"):
                call()


@pytest.mark.parametrize("content", ["", "{}", "[]", "{", "[" * 900 + "]" * 900, "sealed"])
def test_a_damaged_rollback_record_is_named_with_a_remedy(run: pathlib.Path, content: str) -> None:
    """It decides which epochs count: nothing is guessed, and once it is moved away all is there again."""
    record = {
        "format": layout.FORMAT,
        "version": layout.VERSION,
        "record": "rollback",
        "to": "x",
        "epochs": 5,
        "id": "0",
    }
    path = run / layout.ROLLBACK_RECORD
    path.write_bytes(checksums.seal(record) if content == "sealed" else content.encode())
    with unchanged(run):
        for options in (None, READ_ONLY):
            with pytest.raises((errors.DamagedError, errors.FormatError)) as caught:
                ec.CheckpointManager(run, options=options)
            assert str(caught.value).startswith(f"{path}: ")
            assert "Move this file away" in str(caught.value)
        assert "Move this file away" in str(ec.inspect(run).overview().problems)
    path.rename(run.parent / "rollback.json")
    with ec.CheckpointManager(run) as manager:
        assert manager.all_steps() == [0, 1]


def test_a_record_larger_than_the_cap_is_not_read(run: pathlib.Path) -> None:
    """Sparse files of many gigabytes under a record's name: refused by their size, in bounded memory."""
    before = reader(run)
    for name in (EPOCH, NODE):
        kept = (run / name).read_bytes()
        os.truncate(run / name, 50 * 2**30)
        tracemalloc.start()
        try:
            with pytest.raises(errors.EpochCheckpointError, match=name):
                before.restore(1)
            assert reader(run).latest_step() == 0
            assert tracemalloc.get_traced_memory()[1] < BIG
        finally:
            tracemalloc.stop()
        (run / name).write_bytes(kept)


@pytest.mark.parametrize("version", [0, 2, 10**9, "1", None, 1.5])
def test_a_newer_format_version_is_refused_by_name(run: pathlib.Path, version: Any) -> None:
    """By a manager that was open before, too; it is not damage, so no older epoch is taken."""
    before = reader(run)
    seal_epoch(run, {**load(run, EPOCH), "version": version})
    with unchanged(run):
        for manager in (before, reader(run), ec.CheckpointManager(run)):
            for epoch in (1, None):
                with pytest.raises(errors.FormatVersionError, match=r"1/epoch\.json.*version"):
                    manager.restore(epoch)
            assert manager.all_steps() == [0, 1]
            assert manager.damaged_epochs() == []


def test_a_foreign_record_is_refused(run: pathlib.Path) -> None:
    """A right checksum, another program's content; a record of another kind, or of another epoch."""
    before = reader(run)
    for record, words in [
        ({"format": "other", "version": 1}, "no epochckpt record"),
        ({}, "no epochckpt record"),
        (load(run, NODE), "node"),
        ({**load(run, EPOCH), "epoch": 7}, "checkpoint 7"),
    ]:
        seal_epoch(run, record)
        with pytest.raises(errors.FormatError, match=words) as caught:
            before.restore(1)
        assert caught.value.path == EPOCH
        assert reader(run).all_steps() == [0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../0", "/etc", "..", ".", "", "a/b", "a\\b", "a\x00", "-x", "x" * 500])
@pytest.mark.parametrize("where", ["node", "item", "file", "node.json"])
def test_names_that_lead_elsewhere_are_refused(run: pathlib.Path, where: str, name: str) -> None:
    """Names in records are checked before they become paths; that of a node, which may be any, is escaped."""
    before = reader(run)
    if where == "node.json":
        node = load(run, NODE)
        node["files"][0]["item"] = name
        seal_node(run, node)
    else:
        record = load(run, EPOCH)
        if where == "node":
            record["nodes"][0][0] = name
        elif where == "item":
            record["items"][name] = record["items"].pop("default")
        else:
            record["nodes"][0][5][0][0] = name
        seal_epoch(run, record)
    if where == "node" and layout.is_node_name(name):
        with pytest.raises(errors.DamagedError) as caught:
            before.restore(1)
        assert caught.value.path == f"1/{layout.folder_name(name)}/node.json"
        return
    with pytest.raises(errors.FormatError, match="not allowed") as caught:
        before.restore(1)
    assert caught.value.path == (NODE if where == "node.json" else EPOCH)


def test_a_folder_of_an_epoch_that_leads_elsewhere_is_refused(run: pathlib.Path) -> None:
    """A node's folder that is a link out of the directory, though the bytes there would be right."""
    before = reader(run)
    shutil.move(run / "1/process_0", run.parent / "outside")
    (run / "1/process_0").symlink_to(run.parent / "outside")
    with unchanged(run.parent):
        with pytest.raises(errors.EpochCheckpointError, match="out of the root"):
            before.restore(1)
        assert not before.verify(1).ok


def one_leaf(run: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The records of a new epoch 1 that holds one array."""
    shutil.rmtree(run / "1")
    with ec.CheckpointManager(run) as m:
        m.save(1, args=Save({"a": np.arange(1024, dtype=np.float32)}))
        m.wait_until_finished()
    return load(run, EPOCH), load(run, NODE)


@pytest.mark.slow
@pytest.mark.parametrize("consistent", ["leaf only", "records", "records and file size"])
@pytest.mark.parametrize("shape", [[2**38], [2**34], [2**28], [2**20, 2**18], [1, 2**38, 1]])
def test_an_enormous_array_is_refused_before_memory_is_taken(
    run: pathlib.Path, consistent: str, shape: list[int]
) -> None:
    """A record that claims a 1 TB array over a tiny file (or a sparse one that is not as recorded): refused, and no
    buffer is made for it."""
    epoch, node = one_leaf(run)
    before = reader(run)
    leaf = epoch["items"]["default"]["leaves"][0]
    leaf[3] = shape
    nbytes = 4 * int(np.prod(shape, dtype=np.int64))
    if consistent != "leaf only":
        start = node["files"][0]["data_start"]
        node["files"][0]["size"] = start + nbytes
        if consistent == "records and file size":
            node["files"][0]["size"] = start + nbytes - 1
        data = checksums.seal(node)
        (run / NODE).write_bytes(data)
        epoch["nodes"][0][2:4] = [len(data), checksums.digest(data)]
        epoch["nodes"][0][5][0][2] = node["files"][0]["size"]
    seal_epoch(run, epoch)
    tracemalloc.start()
    try:
        abstract = {"a": jax.ShapeDtypeStruct(tuple(shape), np.float32)}
        for call in (
            lambda: before.restore(1),
            lambda: before.restore(1, args=Restore(abstract)),
            lambda: before.restore_leaves(1, "a"),
            lambda: before.verify(1).raise_if_damaged(),
        ):
            with pytest.raises((errors.DamagedError, errors.FormatError), match="1/"):
                call()
        assert set(reader(run).restore(None)) == set(state(0))
        assert tracemalloc.get_traced_memory()[1] < BIG
    finally:
        tracemalloc.stop()


OVERLAPS: dict[str, Callable[[dict[str, Any]], None]] = {
    "fewer holders than cells": lambda item: item["grids"][0][1].pop(),
    "more holders than cells": lambda item: item["grids"][0][1].append([0]),
    "a holder that does not exist": lambda item: item["grids"][0][1].__setitem__(0, [7]),
    "a cell that nobody holds": lambda item: item["grids"][0][1].__setitem__(0, []),
    "a cell with the holders of no earlier one": lambda item: item["grids"][0][1].__setitem__(0, 0),
    "a holder of another type": lambda item: item["grids"][0][1].__setitem__(0, [False]),
    "a grid that does not divide": lambda item: item["grids"][0].__setitem__(slice(None), [[3], [[0]] * 3]),
    "a grid of more dimensions": lambda item: item["grids"][0].__setitem__(slice(None), [[1] * 9, [[0]]]),
    "more cells than elements": lambda item: item["grids"][0].__setitem__(slice(None), [[4096], [[0]] * 4096]),
    "the same leaf twice": lambda item: item["leaves"].append(item["leaves"][0]),
    "one more leaf": lambda item: item["leaves"].append([["zzz"], *item["leaves"][0][1:]]),
    "one leaf less": lambda item: item["leaves"].pop(0),
    "a leaf that is another's folder": lambda item: item["leaves"].append([["r", "below"], "none"]),
    "a negative rotation": lambda item: item["leaves"][0].__setitem__(5, -1),
    "a grid that does not exist": lambda item: item["leaves"][0].__setitem__(4, 99),
    "a sharding that does not exist": lambda item: item["leaves"][0].__setitem__(6, 99),
    "another rank": lambda item: item["leaves"][0][3].append(2),
    "a negative dimension": lambda item: item["leaves"][0][3].__setitem__(0, -5),
}


@pytest.mark.parametrize("what", OVERLAPS)
def test_shards_that_do_not_fit_are_refused(run: pathlib.Path, what: str) -> None:
    """Holders, grids and leaves that contradict each other or the files: refused naming epoch.json."""
    before = reader(run)
    record = load(run, EPOCH)
    OVERLAPS[what](record["items"]["default"])
    seal_epoch(run, record)
    with pytest.raises((errors.FormatError, errors.DamagedError), match=r"epoch\.json"):
        before.restore(1)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["size", "data_start", "cells", "part", "block_bytes", "xxh3"])
@pytest.mark.parametrize("value", [0, 1, 17, 2**40, None])
def test_a_node_record_that_does_not_fit_is_refused(run: pathlib.Path, field: str, value: Any) -> None:
    """node.json with another size, start, number of cells or blocks than epoch.json and the file have."""
    before = reader(run)
    node = load(run, NODE)
    if node["files"][0][field] == value:
        value = 5
    node["files"][0][field] = value if field != "xxh3" else [f"{value}"[:16].rjust(16, "0")]
    seal_node(run, node)
    _, error = _save_id(lambda: before.restore(1))
    assert isinstance(error, errors.FormatError | errors.DamagedError)
    assert "1/process_0/" in str(error)


def _save_id(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except errors.EpochCheckpointError as error:
        return None, error


# -- arguments -------------------------------------------------------------------------------------------------------


def test_a_target_that_does_not_fit_gets_one_table(tmp_path: pathlib.Path) -> None:
    """Missing, unexpected, shape, dtype and type: all rows at once, with what was found and expected."""
    saved = {
        "same": jnp.ones(3),
        "extra": jnp.ones(2),
        "shape": jnp.ones((2, 3)),
        "dtype": jnp.array([2**24 + 1], jnp.int32),
        "type": "text",
        "inner": {"deep": np.ones(1)},
    }
    target = {
        "same": jnp.ones(3),
        "absent": jnp.ones(2),
        "shape": jnp.ones((3, 2)),
        "dtype": jnp.ones(1, jnp.float32),
        "type": jnp.ones(1),
        "inner": {"deep": np.ones(1)},
    }
    with ec.CheckpointManager(tmp_path) as m:
        m.save(0, args=Save(saved))
        m.wait_until_finished()
        with unchanged(tmp_path):
            with pytest.raises(errors.MismatchError) as caught:
                m.restore(0, args=Restore(target))
            rows = {row.leaf: row.problem for row in caught.value.rows}
            assert rows == {"absent": "missing", "extra": "unexpected", "shape": "shape", "type": "type"}
            for word in ("absent", "extra", "float32[2, 3]", "float32[3, 2]", "str", "partial_restore"):
                assert word in str(caught.value)
            del target["absent"], saved["extra"]
            fits = {**target, "extra": jnp.ones(2), "shape": jnp.ones((2, 3)), "type": "x"}
            with pytest.raises(errors.MismatchError, match="not every value survives") as caught:
                m.restore(0, args=Restore(fits))
            assert [(row.leaf, row.problem) for row in caught.value.rows] == [("dtype", "dtype")]
            with pytest.raises(errors.MismatchError):  # the same leaf, also from restore(None): no older epoch is taken
                m.restore(None, args=Restore(fits))
        assert m.all_steps() == [0]


def test_an_epoch_that_does_not_exist_says_which_do(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """From every call that takes an epoch."""
    with ec.CheckpointManager(run) as m:
        for call in (
            m.restore,
            m.item_metadata,
            m.metadata,
            m.nodes,
            m.verify,
            m.delete,
            m.rollback_to,
            lambda e: m.restore_leaves(e, "w"),
            lambda e: m.node_path("process_0", e),
        ):
            with pytest.raises(errors.EpochNotFoundError, match="committed: 0, 1") as caught:
                call(7)
            assert (caught.value.epoch, caught.value.available) == (7, [0, 1])
        assert m.status(7).state == "absent"
        for wrong in (-1, "1", 1.0, True, None):
            with pytest.raises(errors.InvalidArgumentError, match="integer"):
                m.metrics(wrong)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgumentError, match="process_0"):
            m.node_path("nobody", 1)
    with ec.CheckpointManager(tmp_path / "empty") as m, pytest.raises(errors.EpochNotFoundError, match="no committed"):
        m.restore(None)


class Opaque:
    def __repr__(self) -> str:
        return "Opaque()"


BAD_LEAVES: dict[str, Any] = {
    "an object": Opaque(),
    "an array of strings": np.array(["a", "b"]),
    "an array of objects": np.array([Opaque()], dtype=object),
    "a structured array": np.zeros(2, dtype=[("x", "f4")]),
    "a set": {1, 2},
    "a function": len,
}


@pytest.mark.parametrize("what", BAD_LEAVES)
def test_a_leaf_that_cannot_be_saved_is_named(run: pathlib.Path, what: str) -> None:
    """save() refuses it before anything is begun; the manager goes on."""
    with ec.CheckpointManager(run) as m:
        with unchanged(run):
            with pytest.raises(errors.InvalidArgumentError, match="model/bad"):
                m.save(5, args=Save({"model": {"good": np.ones(2), "bad": BAD_LEAVES[what]}}))
            assert not m.is_saving_in_progress()
        assert m.save(5, args=Save({"model": {"good": np.ones(2)}}))
        m.wait_until_finished()
        assert m.all_steps() == [0, 1, 5]


def test_values_that_are_not_json_are_refused(run: pathlib.Path) -> None:
    """Metrics, metadata and JSON items are checked in save(), by name; after it the epoch may be saved rightly."""
    cycle: list[Any] = []
    cycle.append(cycle)
    options = ocp.CheckpointManagerOptions(best_fn=len)  # else metrics harm no save
    with ec.CheckpointManager(run, options=options) as m:
        with unchanged(run):
            for kwargs, words in [
                ({"metrics": {"loss": Opaque()}}, "metrics"),
                ({"metrics": {1: 2}}, "metrics"),
                ({"metrics": {"a": {"$float": "nan"}}}, "metrics"),
                ({"custom_metadata": {"a": nest(200)}}, "custom_metadata is nested deeper"),
                ({"custom_metadata": {"x": {1, 2}}}, "custom_metadata"),
            ]:
                with pytest.raises(errors.InvalidArgumentError, match=words):
                    m.save(5, args=Save({"x": np.ones(1)}), **kwargs)
        assert m.save(5, args=Save({"x": np.ones(1)}), metrics={"loss": np.float32(1)})
        m.wait_until_finished()
        assert m.metrics(5) == {"loss": 1.0}
    with ec.CheckpointManager(run.parent / "json") as m:
        for wrong in (Opaque(), cycle, {"a": {1, 2}}):
            with pytest.raises(errors.InvalidArgumentError, match="extra"):
                m.save(0, args=ocp.args.Composite(extra=ocp.args.JsonSave(wrong)))


def test_legacy_and_unsupported_arguments_are_refused_by_name(run: pathlib.Path) -> None:
    """Each names the argument and the form to use; nothing is written."""
    tree = {"x": np.ones(1)}

    class OwnHandler(ocp.JsonCheckpointHandler):
        pass

    with unchanged(run):
        for kwargs, words in [
            (
                {"checkpointers": ocp.PyTreeCheckpointHandler()},
                "checkpointers= expects an orbax.checkpoint.Checkpointer",
            ),
            ({"checkpointers": ocp.PyTreeCheckpointer(), "item_names": ("a",)}, "exclude each other"),
            ({"handler_registry": object()}, "handler_registry"),
            ({"metadata_handler": object()}, "a object without set_params, last_epoch, write, report, cp_accessible"),
            ({"item_handlers": {"x": OwnHandler()}}, "OwnHandler"),
            ({"item_names": ("process_0",)}, "process_0"),
            ({"item_names": ("../x",)}, "item name"),
            ({"node": "../x"}, "node name"),
            ({"node": ""}, "node name"),
            ({"options": ocp.CheckpointManagerOptions(todelete_full_path="x")}, "todelete_full_path"),
        ]:
            with pytest.raises(errors.InvalidArgumentError, match=words):
                ec.CheckpointManager(run, **kwargs)
    with ec.CheckpointManager(run) as m, unchanged(run):
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda: m.save(5, tree), "args=orbax.checkpoint.args.StandardSave"),
            (lambda: m.save(5, save_kwargs={}), "legacy"),
            (lambda: m.save(5, Save(tree)), "by name"),
            (lambda: m.save(5), "needs args="),
            (lambda: m.save(5, args=tree), "orbax.checkpoint.args"),
            (lambda: m.restore(1, tree), "StandardRestore"),
            (lambda: m.restore(1, restore_kwargs={}), "legacy"),
            (lambda: m.restore(1, args=tree), "orbax.checkpoint.args"),
            (lambda: m.restore(1, args=ocp.args.JsonRestore()), "JsonRestore"),
            (lambda: m.restore(1, args=ocp.args.PyTreeRestore(tree, legacy_transform_fn=max)), "legacy_transform_fn"),
            (lambda: m.restore_leaves(1, "w", item="nobody"), "nobody"),
            (lambda: m.save("5", args=Save(tree)), "integer"),  # type: ignore[arg-type]
            (lambda: m.save(-5, args=Save(tree)), "integer"),
        ]
        for call, words in calls:
            with pytest.raises(errors.InvalidArgumentError, match=words):
                call()
        with pytest.raises(errors.EpochExistsError, match="checkpoint 1 exists"):
            m.save(1, args=Save(tree), force=True)
    with pytest.raises(errors.InvalidArgumentError, match="closed"):
        m.save(9, args=Save(tree))


def test_items_with_names_of_nodes_or_of_the_format_are_refused(tmp_path: pathlib.Path) -> None:
    """An item named like a node, like a file of the format, or not fit for a path."""
    with ec.CheckpointManager(tmp_path / "run", node="trainer") as m, unchanged(tmp_path):
        for name, words in [
            ("trainer", "name of a node"),
            ("epoch.json", "not usable"),
            ("a/b", "not usable"),
            ("..", "not usable"),
            ("x-00001", "not usable"),
            ("x.safetensors", "not usable"),
            ("x.orbax-checkpoint-tmp", "not usable"),
        ]:
            with pytest.raises(errors.InvalidArgumentError, match=words):
                m.save(0, args=ocp.args.Composite(**{name: Save({"x": np.ones(1)})}))
        assert not m.is_saving_in_progress()


@pytest.mark.parametrize(
    "wrong",
    [
        {"io_threads": 0},
        {"io_threads": True},
        {"io_threads": 1.5},
        {"block_bytes": 1},
        {"part_bytes": -1},
        {"save_timeout_secs": 0},
        {"save_timeout_secs": None},
        {"save_timeout_secs": "6 parsecs"},
        {"save_timeout_secs": float("nan")},
        {"max_blocked_secs": 0},
        {"max_blocked_secs": "soon"},
        {"host_memory_limit_bytes": -5},
        {"verify": "yes"},
    ],
)
def test_storage_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    """By name, at construction."""
    with pytest.raises(errors.InvalidArgumentError, match=next(iter(wrong))):
        ec.StorageOptions(**wrong)


# -- several processes -----------------------------------------------------------------------------------------------


def duplicate_nodes(directory: str) -> Any:
    try:
        ec.CheckpointManager(directory, node="same", storage=ec.StorageOptions(open_timeout_secs=20))
    except errors.InvalidArgumentError as error:
        return str(error)
    return None


def local_array(directory: str) -> Any:
    """An array on a device of this process is refused on every process; then a proper save commits."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    proper = jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8.0, dtype=np.float32)[index])
    with ec.CheckpointManager(directory) as m:
        told = []
        here = jax.local_devices()[0]
        count, key = jax.device_put((jnp.zeros(()), jax.random.key(0)), here)
        for tree in ({"opt": {"count": count}, "w": proper}, {"key": key}):
            try:
                m.save(0, args=Save(tree))
            except errors.InvalidArgumentError as error:
                told.append(str(error))
        before = sorted(p.name for p in pathlib.Path(directory).iterdir() if p.name.isdigit())
        m.save(0, args=Save({"w": proper}))
        m.wait_until_finished()
        return told, before, list(m.all_steps())


@pytest.mark.slow
def test_two_nodes_of_one_name_are_refused_on_every_process(tmp_path: pathlib.Path) -> None:
    """Both processes get the error, which names both; nothing is written."""
    for answer in run_worker("tests.manager.test_bad_input:duplicate_nodes", {"directory": str(tmp_path / "run")}, 2):
        assert "'same'" in answer
        assert "process 0 and process 1 both" in answer
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_array_of_one_process_is_refused_in_a_job_of_several(tmp_path: pathlib.Path) -> None:
    """Names the leaf and the remedy, on every process; nothing is begun."""
    for told, before, steps in run_worker(
        "tests.manager.test_bad_input:local_array", {"directory": str(tmp_path / "run")}, 2
    ):
        assert len(told) == 2
        assert "opt/count" in told[0]
        assert "out_shardings" in told[0]
        assert "'key'" in told[1]
        assert (before, steps) == ([], [0])


# -- the errors themselves -------------------------------------------------------------------------------------------


def examples() -> list[Exception]:
    rows = [errors.Mismatch("a/b", "shape", "float32[2]", "float32[3]")]
    made = {
        errors.EpochNotFoundError: [(None, "/d", []), (3, "/d", range(30))],
        errors.EpochDeletedError: [(3, "/d", "gone")],
        errors.StorageError: [("1/epoch.json", OSError(5, "no answer"))],
        errors.FormatError: [("1/epoch.json", "odd")],
        errors.FormatVersionError: [("1/epoch.json", "new")],
        errors.DamagedError: [("1/x", "differs"), ("1/x", "differs", "a/b")],
        errors.MismatchError: [("default", 3, rows)],
        errors.NodeCountError: [("own", 3, 2, 4)],
        errors.SaveError: [(3, "reason")],
        errors.FencedError: [(3, "reason")],
        errors.StorageBehindError: [(3, "reason")],
        errors.UncertainError: [(3, "reason")],
        errors.LateNodesError: [(3, ["process_1", "process_2"], 6.0)],
        errors.BufferChangedError: [(3, "a/b")],
        errors.TaskError: [("step", "epoch", "trainer_0", 3, "reason")],
        errors.UnfinishedError: [("/d", [1, 2], "reason")],
        errors.RemovalError: [("/d", 3, "reason")],
        errors.RetentionError: [("/d", 3, "reason")],
        errors.UploadError: [(3, "elsewhere", "reason")],
        errors.SaveErrorGroup: [([errors.SaveError(1, "x"), errors.LateNodesError(2, ["n"], 1.0)],)],
    }
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.EpochCheckpointError)]
    assert set(made) < set(classes)
    return [cls(*args) for cls in classes for args in made.get(cls, [("message",)])]


@pytest.mark.parametrize("error", examples(), ids=lambda e: type(e).__name__)
def test_an_error_is_the_same_after_pickling(error: Exception) -> None:
    """Class, message and attributes; also after a deep copy."""
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert repr(again.__dict__) == repr(error.__dict__)


@pytest.mark.parametrize("error", examples(), ids=lambda e: type(e).__name__)
def test_an_error_reaches_other_processes(error: Exception) -> None:
    """As JSON: the same class, message and notes, or one that says what it was."""
    error = copy.deepcopy(error)
    error.add_note("in a condition, epoch 3")
    again = errors.from_wire(json.loads(json.dumps(errors.to_wire(error))))
    assert str(error) in str(again)
    assert again.__notes__ == ["in a condition, epoch 3"]
    if not isinstance(error, errors.SaveErrorGroup | errors.MismatchError):
        assert type(again) is type(error)
        assert repr(again.__dict__) == repr(error.__dict__)


def test_every_pair_of_bases_is_caught_as_documented() -> None:
    """The classes are what callers of the standard library and of Orbax catch."""
    expected = {
        errors.InvalidArgumentError: ValueError,
        errors.EpochNotFoundError: FileNotFoundError,
        errors.EpochExistsError: ValueError,
        errors.NotACheckpointDirectoryError: NotADirectoryError,
        errors.AccessError: PermissionError,
        errors.StorageError: OSError,
        errors.LateNodesError: TimeoutError,
        errors.StorageBehindError: TimeoutError,
        errors.CoordinationTimeoutError: TimeoutError,
    }
    for cls, base in itertools.chain(expected.items(), ((c, errors.EpochCheckpointError) for c in expected)):
        assert issubclass(cls, base)
