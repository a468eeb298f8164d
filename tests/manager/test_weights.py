"""Weights that leave and come back: a part of an epoch, under other names, in another precision."""

import json
import os
import pathlib
import uuid
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.flax import load_file

import epochckpt as ec
from epochckpt.errors import DamagedError, InvalidArgumentError, UnknownNameError
from tests.support import stock_states


def state() -> dict[str, Any]:
    """Sharded parameters of three layers, Adam's moments, and what else a state has."""
    rng = np.random.default_rng(1)
    sharding = NamedSharding(jax.make_mesh((len(jax.devices()),), ("x",)), PartitionSpec("x"))
    layers = [{"w": jax.device_put(rng.normal(size=(8, 6)).astype(np.float32), sharding), "n": i} for i in range(3)]
    params = {
        "layers": layers,
        "scale": jnp.float32(1.1),
        "half": jnp.asarray(rng.normal(size=5), jnp.bfloat16),
        "ids": jnp.arange(4),
        "mask": jnp.array([True, False]),
        "none": None,
    }
    floats = {"layers": [layer["w"] for layer in layers], "scale": params["scale"]}
    return {"params": params, "opt_state": optax.adam(1e-3).init(floats), "key": jax.random.key(3), "step": 7}


def save(directory: Any, tree: Any, **storage: Any) -> Any:
    """Epoch 5; returns the tree."""
    with ec.CheckpointManager(directory, storage=ec.StorageOptions(**storage)) as manager:
        manager.save(5, args=ocp.args.StandardSave(tree), metrics={"loss": 0.5})
    return tree


def restored(directory: Any, epoch: int = 0) -> Any:
    """An epoch as dicts, lists and NumPy arrays."""
    with ec.CheckpointManager(directory) as manager:
        return manager.restore(epoch)


def as_numpy(tree: Any) -> Any:
    """The tree with NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def cast(tree: Any, dtype: Any = jnp.bfloat16) -> Any:
    """The tree with its floating arrays as JAX casts them, as NumPy arrays."""
    floats = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return as_numpy(jax.tree.map(lambda leaf: leaf.astype(dtype) if floats(leaf) else leaf, tree))


@pytest.mark.parametrize("kind", ["posix", "memory"])
def test_weights_alone_become_safetensors_and_come_back(tmp_path: pathlib.Path, kind: str) -> None:
    """The library of safetensors reads them by their new names; `import_` gives the tree with its lists and values."""
    directory = str(tmp_path / "run") if kind == "posix" else f"memory://{uuid.uuid4().hex}/"
    params = save(directory, state(), block_bytes=4096)["params"]
    asked: dict[str, Any] = {"include": "params/**", "rename": {"params": ""}, "dtype": "bfloat16"}
    done = ec.export(directory, 5, tmp_path / "out", "safetensors", **asked, max_buffer_bytes=50)
    assert done.cast == {**{f"layers/{i}/w": "float32" for i in range(3)}, "scale": "float32"}
    expected = cast(params)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == {"half", "ids", "mask", "scale", *(f"layers.{i}.w" for i in range(3))}
    assert stock_states.differences(np.asarray(tensors["layers.1.w"]), expected["layers"][1]["w"]) == []
    assert tensors["scale"].shape == ()
    ec.import_(tmp_path / "out", tmp_path / "back", 0)
    found = restored(tmp_path / "back")
    assert stock_states.differences(found, expected) == []
    assert (found["none"], found["layers"][2]["n"]) == (None, 2)
    ec.import_(tmp_path / "out", tmp_path / "back", 1, rename={"": "params"}, dtype="float32", exclude="layers/0")
    again = restored(tmp_path / "back", 1)["params"]
    np.testing.assert_array_equal(again["layers"][1]["w"], expected["layers"][1]["w"].astype(np.float32))
    assert again["layers"].keys() == {1, 2}  # no list, for it lacks its first element


def test_the_form_of_hugging_face_is_read_by_its_index(tmp_path: pathlib.Path) -> None:
    """Parts of bounded size, the index, a model card with nothing but facts, and the user's config; and back again."""
    params = save(tmp_path / "run", state())["params"]
    rename = lambda name: name.replace("params/layers", "model/h").replace("/w", "/weight")  # noqa: E731
    done = ec.export(
        tmp_path / "run", None, tmp_path / "out", "huggingface", include=["params/layers", "params/half"],
        exclude="*/n", rename=rename, max_file_bytes=400, framework="pt", config={"n_layer": 3},
    )  # fmt: skip
    assert done.cast == {}
    parts = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    index = "model.safetensors.index.json"
    assert sorted(os.listdir(tmp_path / "out")) == ["README.md", "config.json", *parts, index]
    where = json.loads((tmp_path / "out" / index).read_text())["weight_map"]
    assert where.keys() == {"params.half", *(f"model.h.{i}.weight" for i in range(3))}
    for number in range(3):
        with safe_open(tmp_path / "out" / where[f"model.h.{number}.weight"], "numpy") as file:
            assert file.metadata()["format"] == "pt"
            np.testing.assert_array_equal(file.get_tensor(f"model.h.{number}.weight"), params["layers"][number]["w"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- 4 tensors, 149 elements: 144 of float32, 5 of bfloat16" in card
    assert '\n    {\n      "loss": 0.5\n    }\n' in card
    assert str(tmp_path) not in card
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"n_layer": 3}
    ec.import_(tmp_path / "out", tmp_path / "back", 0, rename={"model/h/*": "params/layers/*"})
    found = restored(tmp_path / "back")["params"]
    assert stock_states.differences([layer["weight"] for layer in found["layers"]],
                                    as_numpy([layer["w"] for layer in params["layers"]])) == []  # fmt: skip
    (tmp_path / "config").write_text('{"a": [1]}')
    ec.export(tmp_path / "run", 5, tmp_path / "one", "huggingface", include="*/half", config=tmp_path / "config")
    assert sorted(os.listdir(tmp_path / "one")) == ["README.md", "config.json", "model.safetensors"]
    for problem, config in (("no JSON", {"a": object()}), ("must be an object", tmp_path / "one" / "README.md")):
        (tmp_path / "one" / "README.md").write_text("[1]")
        with pytest.raises(InvalidArgumentError, match=problem):
            ec.export(tmp_path / "run", 5, tmp_path / "two", "huggingface", config=config)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("kind", ["posix", "memory"])
def test_weights_alone_become_a_step_of_orbax(tmp_path: pathlib.Path, kind: str) -> None:
    """Stock Orbax restores them, cast and renamed, as a list without its first element; verified on the way."""
    directory = str(tmp_path / "run") if kind == "posix" else f"memory://{uuid.uuid4().hex}/"
    params = save(directory, state(), block_bytes=4096)["params"]
    asked: dict[str, Any] = {"include": "params", "rename": {"params": "weights"}, "dtype": jnp.bfloat16}
    ec.export(directory, 5, tmp_path / "out", **asked)
    assert stock_states.differences(stock(tmp_path / "out"), {"weights": cast(params)}) == []
    assert not any(path.is_symlink() or path.name == "epoch.json" for path in (tmp_path / "out").rglob("*"))
    ec.export(directory, 5, tmp_path / "less", **asked, exclude=["params/layers/0", "*/none"])
    found = stock(tmp_path / "less")["weights"]
    assert found.keys() == params.keys() - {"none"}
    assert found["layers"].keys() == {"1", "2"}
    assert stock_states.differences(found["layers"]["2"], cast(params["layers"][2])) == []
    with ocp.CheckpointManager(tmp_path / "less") as manager:
        assert manager.metrics(5) == {"loss": 0.5}
    if kind == "posix":
        path = tmp_path / "run" / "5" / "process_0" / "default.safetensors"
        data = path.read_bytes()
        where = data.index(np.asarray(params["layers"][1]["w"].addressable_data(0)).tobytes())
        path.write_bytes(data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :])
        with pytest.raises(DamagedError, match=r"process_0/default\.safetensors"):
            ec.export(directory, 5, tmp_path / "damaged", **asked)
        assert not (tmp_path / "damaged").exists()


def stock(folder: pathlib.Path) -> Any:
    """Epoch 5, as stock Orbax restores it."""
    return ocp.PyTreeCheckpointer().restore(folder / "5" / "default", restore_args=None)


def test_weights_leave_a_step_of_stock_orbax(tmp_path: pathlib.Path) -> None:
    """As tensors and as another step; what was not chosen is not read."""
    tree = {"params": {"w": jnp.arange(6.0).reshape(2, 3), "n": 3, "e": {}}, "mu": [jnp.ones(2), jnp.zeros(2)]}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, args=ocp.args.StandardSave(tree))
    asked: dict[str, Any] = {"include": ["params", "mu/1"], "dtype": "bfloat16"}
    expected = cast({"params": tree["params"], "mu": {1: tree["mu"][1]}})
    for format in ("orbax", "safetensors"):
        done = ec.export(tmp_path / "run", None, tmp_path / format, format, **asked)
        assert done.cast == {"params/w": "float32", "mu/1": "float32"}
    found = stock(tmp_path / "orbax")
    assert stock_states.differences(found, {**expected, "mu": {"1": expected["mu"][1]}}) == []
    ec.import_(tmp_path / "safetensors", tmp_path / "back", 0)
    assert stock_states.differences(restored(tmp_path / "back"), expected) == []
    ec.export(tmp_path / "run", 5, tmp_path / "all", "safetensors")
    assert load_file(tmp_path / "all" / "model.safetensors").keys() == {"params.w", "mu.0", "mu.1"}


def test_what_a_selection_cannot_mean_is_refused(tmp_path: pathlib.Path) -> None:
    """With near names; nothing is written. Names that are shown escaped are meant as they are shown."""
    save(tmp_path / "run", {"a": {"wäge x": jnp.ones(1), "b": jnp.ones(1)}, "c": np.ones(1)})
    out = tmp_path / "out"
    with pytest.raises(UnknownNameError, match=r"item 'default': no leaf matches 'a/d'; near: 'a/b'"):
        ec.export(tmp_path / "run", 5, out, include="a/d")
    with pytest.raises(InvalidArgumentError, match="'a/b' and 'c' would both be called 'c'"):
        ec.export(tmp_path / "run", 5, out, rename={"a/b": "c"})
    with pytest.raises(InvalidArgumentError, match="config= is of the format 'huggingface'"):
        ec.export(tmp_path / "run", 5, out, config={})
    assert sorted(os.listdir(tmp_path)) == ["run"]
    ec.export(tmp_path / "run", 5, out, "safetensors", rename={"a/wäge x": "ü"}, exclude="c")
    assert load_file(out / "model.safetensors").keys() == {"ü", "a.b"}


def test_keys_that_stay_are_of_the_type_that_they_had(tmp_path: pathlib.Path) -> None:
    """Also where a key of a dict and a number in a list read alike, and where another key of the name changes."""
    ones = [jnp.ones(1), jnp.ones(2)]
    save(tmp_path / "run", {"0": ones, "a": {"0": {"0": ones}}})
    ec.export(tmp_path / "run", 5, tmp_path / "out", "safetensors", rename={"a": "b"})
    ec.import_(tmp_path / "out", tmp_path / "back", 5)
    with ec.CheckpointManager(tmp_path / "back") as manager:
        back = manager.restore(5)
    assert jax.tree.structure(back) == jax.tree.structure({"0": ones, "b": {"0": {"0": ones}}})
    # The keys of one dict are of one type: a number that comes to names becomes one.
    rename = {"0": "b", "a/0/0/1": "b/x"}
    ec.export(tmp_path / "run", 5, tmp_path / "mixed", "safetensors", rename=rename, exclude="a/0/0/0")
    ec.import_(tmp_path / "mixed", tmp_path / "from_mixed", 5)
    with ec.CheckpointManager(tmp_path / "from_mixed") as manager:
        back = manager.restore(5)
    assert jax.tree.structure(back) == jax.tree.structure({"b": {"0": 0, "1": 0, "x": 0}})
