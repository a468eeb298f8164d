"""Directories that somebody made to do harm, or that rotted: every file of records, ours and stock Orbax's.

Whatever stands in them, what is asked of the directory ends in an error of ours or in a value, and in bounded memory.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors
from epochckpt.format import paths
from tests.support.mutations import mutate, places

Options = ocp.CheckpointManagerOptions
STATE = {"w": np.arange(4.0), "n": 3}


def state(epoch: int) -> dict[str, Any]:
    return {**STATE, "w": STATE["w"] + epoch, "sub": {"k": jnp.ones((2, 2))}}


def save(manager: Any) -> None:
    for epoch in (1, 2):
        args = ocp.args.Composite(state=ocp.args.StandardSave(state(epoch)), extra=ocp.args.JsonSave({"a": epoch}))
        manager.save(epoch, args=args, metrics={"acc": 1.0}, custom_metadata={"c": 1})
    manager.wait_until_finished()


# What Orbax leaves undone where it fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """`ours` and `stock`, each with the epochs 1 and 2."""
    folder = tmp_path_factory.mktemp("pristine")
    options = Options(best_fn=lambda metrics: metrics["acc"])
    with ocp.CheckpointManager(folder / "stock", item_names=("state", "extra"), options=options) as manager:
        save(manager)
    with ec.CheckpointManager(folder / "ours", metadata={"x": 1}) as manager:
        save(manager)
    ec.attach_metrics(folder / "ours", 2, {"loss": 1}, "evaluator")
    return folder


def copy(pristine: pathlib.Path, writer: str, tmp_path: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    return pathlib.Path(shutil.copytree(pristine / writer, tmp_path / "run", symlinks=True))


def uses(run: pathlib.Path) -> Iterator[Callable[[], Any]]:
    """What is asked of a directory."""
    options = Options(read_only=True, best_fn=lambda metrics: metrics["acc"])
    try:
        manager = ec.CheckpointManager(run, options=options)
    except errors.EpochCheckpointError:
        return
    yield lambda: manager.restore(2)
    yield lambda: manager.restore(None)
    yield lambda: manager.item_metadata(2)
    yield lambda: manager.metadata(2)
    yield lambda: manager.metadata()
    yield lambda: manager.verify(2)
    yield lambda: manager.status(2)
    yield lambda: manager.best_step()
    yield lambda: manager.restore_leaves(2, "*", "state")
    yield lambda: ec.inspect(run)._repr_html_()
    yield lambda: str(ec.inspect(run)[2])
    yield lambda: list(ec.follow(run, timeout_secs=0))
    yield manager.close


def assert_bears(run: pathlib.Path, what: Any) -> None:
    """No use of a directory ends in an error that is not ours."""
    for use in uses(run):
        try:
            use()
        except errors.EpochCheckpointError:
            continue
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}") from error


def records(run: pathlib.Path) -> list[pathlib.Path]:
    """The files of an epoch that are no data."""
    found = [path for path in (run / "2").rglob("*") if path.is_file() and not path.is_symlink()]
    small = [p for p in found if p.suffix != ".safetensors" and p.parent.name != "d"]
    return sorted([*small, *(run / "_root_metadata").glob("*")])


DOCUMENTS = {
    "null": b"null",
    "nested beyond": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "a tree nested to the edge": b'{"tree_metadata":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
}


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["stock", "ours"])
def test_any_record_that_is_another_document_or_a_circle_is_borne(
    pristine: pathlib.Path, tmp_path: pathlib.Path, writer: str
) -> None:
    """Every small file of an epoch in turn: other JSON, nested as no program nests, a link to itself."""
    for path in records(pristine / writer):
        name = path.relative_to(pristine / writer)
        for what, data in [*DOCUMENTS.items(), ("a circle", b"")]:
            run = copy(pristine, writer, tmp_path)
            (run / name).unlink()
            if what == "a circle":
                (run / name).symlink_to(name.name)
            else:
                (run / name).write_bytes(data)
            assert_bears(run, (name, what))


FIELDS = ["_CHECKPOINT_METADATA", "state/_METADATA", "state/_sharding", "state/array_metadatas/process_0"]
VALUES = (None, -1, 2**70, "x", [], [[]], {}, True)


def wrong(record: Any, every: bool) -> Iterator[tuple[Any, Any]]:
    """A record with another value at each place, or with every other value; and what was changed."""
    for number, place in enumerate(places(record)):
        for value in VALUES if every else [VALUES[number % len(VALUES)]]:
            yield mutate(record, place, value), (place, value)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_any_field_of_another_type_in_a_record_of_stock_orbax_is_borne(
    pristine: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    """Numbers for names, lists for objects, negative and enormous sizes."""
    if not (pristine / "stock" / "2" / name).exists():
        pytest.skip("this Orbax does not write it")
    run = copy(pristine, "stock", tmp_path)
    for record, what in wrong(json.loads((run / "2" / name).read_bytes()), every=False):
        (run / "2" / name).write_text(json.dumps(record))
        assert_bears(run, what)


@pytest.mark.long
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_every_other_type_in_a_record_of_stock_orbax_is_borne(
    pristine: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    """The same with all values at all places."""
    run = copy(pristine, "stock", tmp_path)
    for record, what in wrong(json.loads((run / "2" / name).read_bytes()), every=True):
        (run / "2" / name).write_text(json.dumps(record))
        assert_bears(run, what)


# -- files that must not be read --------------------------------------------------------------------------------------

LARGE = ["manifest.ocdbt", "ocdbt.process_0/manifest.ocdbt", "_METADATA", "_sharding", "array_metadatas/process_0"]


@pytest.mark.parametrize("name", LARGE)
def test_a_file_of_metadata_of_a_terabyte_is_refused_by_its_size(
    pristine: pathlib.Path, tmp_path: pathlib.Path, name: str
) -> None:
    """A sparse file costs nobody anything to make. TensorStore takes it into memory, and ends the process."""
    run = copy(pristine, "stock", tmp_path)
    os.truncate(run / "2" / "state" / name, 2**40)
    with ec.CheckpointManager(run, options=Options(read_only=True)) as manager:
        with pytest.raises((errors.DamagedError, errors.FormatError), match=f"2/state/{name}.*{2**40}"):
            manager.restore(2)
        assert int(manager.restore(None)["state"]["w"][0]) == 1
        assert not manager.verify(2).ok
    assert "1099511627776" in str(ec.inspect(run)[2]["state"])


@pytest.mark.parametrize("what", ["state/d", "state/manifest.ocdbt", "state/_METADATA", "extra/metadata"])
def test_what_lies_behind_a_link_out_of_the_directory_is_not_read(
    pristine: pathlib.Path, tmp_path: pathlib.Path, what: str
) -> None:
    """It could be any file of this user's. Nothing is changed, and the older step is restored."""
    run = copy(pristine, "stock", tmp_path)
    shutil.move(run / "2" / what, tmp_path / "away")
    (run / "2" / what).symlink_to(tmp_path / "away")
    with ec.CheckpointManager(run, options=Options(read_only=True)) as manager:
        with pytest.raises(errors.DamagedError, match=f"2/{what}: is a symlink that leads out of"):
            manager.restore(2)
        assert not manager.verify(2).ok
        assert int(manager.restore(None)["state"]["w"][0]) == 1
    assert os.path.islink(run / "2" / what)
    shutil.rmtree(tmp_path / "away") if what == "state/d" else (tmp_path / "away").unlink()


def test_links_inside_the_directory_and_a_link_to_it_are_followed(
    pristine: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A step whose data was moved within the directory, opened by another name of the directory."""
    run = copy(pristine, "stock", tmp_path)
    shutil.move(run / "2" / "state" / "d", run / "data")
    (run / "2" / "state" / "d").symlink_to(run / "data")
    (run / "data" / "circle").symlink_to(run / "data")
    (tmp_path / "link").symlink_to(run)
    with ec.CheckpointManager(tmp_path / "link", options=Options(read_only=True)) as manager:
        assert int(manager.restore(None)["state"]["w"][0]) == 2
        assert manager.verify(2).ok
    assert ec.inspect(tmp_path / "link")[2]["state"]["w"][0] == 2


def test_a_bad_name_in_a_record_is_said_to_be_a_nodes_where_it_is() -> None:
    """It names the record, too."""
    with pytest.raises(errors.FormatError, match=r"2/x/node\.json.*holds the node name 'a/b'"):
        paths.check_recorded_name("2/x/node.json", "a/b", paths.is_node_name)
