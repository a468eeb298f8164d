"""What is saved comes back: every kind of leaf and tree, bit for bit, and as other types only where nothing is lost."""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import os
import pathlib
import resource
import struct
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec
from epochckpt.arrays import Shardings
from epochckpt.errors import InvalidArgumentError, MismatchError, UnknownNameError
from epochckpt.format import tree as tree_lib
from tests.support.processes import run_worker

JAX_TYPES = [
    "bool_",
    *(f"{sign}int{bits}" for bits in (2, 4, 8, 16, 32) for sign in ("", "u")),
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    *sorted(n for n in dir(jnp) if n.startswith(("float4", "float8"))),
]
WIDE_TYPES = ["int64", "uint64", "float64", "complex128"]
NUMPY_TYPES = [
    "?",
    *("i1", "u1", "<i2", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"),
    *(">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16"),
    *("<M8[s]", "<M8[ns]", "<M8[D]", ">M8[us]", "<m8[ms]", "<M8[25s]"),
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4)]


def random_bits(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """An array with every kind of bit pattern that its type has: NaNs with payloads, -0.0, subnormals."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if dtype == np.bool_:
        return rng.integers(0, 2, size=shape).astype(bool)
    narrow = {"int2": (-2, 2), "int4": (-8, 8), "uint2": (0, 4), "uint4": (0, 16)}.get(dtype.name)
    if narrow:
        return rng.integers(*narrow, size=shape).astype(dtype)
    raw = rng.integers(0, 256, size=count * dtype.itemsize, dtype=np.uint8)
    if dtype.name.startswith("float4"):
        raw &= 0xF
    return raw.view(dtype).reshape(shape)


def bits(leaf: Any) -> Any:
    """A leaf as something that is equal only for the same type, shape and bits."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        return "key", str(jax.random.key_impl(leaf)), leaf.shape, data.tobytes(), leaf.sharding
    if isinstance(leaf, jax.Array):
        return "jax", leaf.dtype, leaf.shape, np.asarray(leaf).tobytes(), leaf.sharding
    if isinstance(leaf, np.ndarray | np.generic):
        return type(leaf), leaf.dtype.str, leaf.dtype.name, leaf.shape, leaf.tobytes()
    if isinstance(leaf, float):
        return type(leaf), struct.pack("<d", leaf)
    if isinstance(leaf, complex):
        return type(leaf), struct.pack("<dd", leaf.real, leaf.imag)
    return type(leaf), leaf


def assert_same(found: Any, expected: Any) -> None:
    """Type, structure and every bit are the same."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = jax.tree_util.tree_flatten_with_path(expected, is_leaf=lambda x: x is None)[0]
    leaves = jax.tree.leaves(found, is_leaf=lambda x: x is None)
    for (path, want), got in zip(pairs, leaves, strict=True):
        assert bits(got) == bits(want), jax.tree_util.keystr(path)


def save(directory: Any, tree: Any, storage: ec.StorageOptions | None = None) -> ec.CheckpointManager:
    """Saves a tree as epoch 0 and returns the closed manager, which can still read."""
    with ec.CheckpointManager(directory, storage=storage) as m:
        assert m.save(0, args=ocp.args.StandardSave(tree))
    assert m.latest_step() == 0
    return m


def restore(m: ec.CheckpointManager, target: Any) -> Any:
    return m.restore(0, args=ocp.args.StandardRestore(target))


def check_round_trip(directory: Any, tree: Any, storage: ec.StorageOptions | None = None) -> ec.CheckpointManager:
    """With the tree itself as the target, it comes back exactly."""
    m = save(directory, tree, storage)
    assert_same(restore(m, tree), tree)
    assert m.verify(0).ok
    return m


def zeros_like(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros_like(x) if isinstance(x, jax.Array) else x, tree)


# -- types ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_jax_type_and_shape(tmp_path: pathlib.Path) -> None:
    """Every type that JAX holds without x64, in every kind of shape, also without a target."""
    tree = {
        name: [jnp.asarray(random_bits(getattr(jnp, name).dtype, shape, i)) for i, shape in enumerate(SHAPES)]
        for name in JAX_TYPES
    }
    m = check_round_trip(tmp_path, tree)
    assert_same(restore(m, zeros_like(tree)), tree)
    assert_same(m.restore(0), tree)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    assert_same(restore(m, abstract), tree)


def wide_job(directory: str) -> int:
    """Runs with jax_enable_x64."""
    tree = {name: [jnp.asarray(random_bits(name, shape, i)) for i, shape in enumerate(SHAPES)] for name in WIDE_TYPES}
    assert tree["int64"][0].dtype == np.int64
    m = check_round_trip(directory, tree)
    assert_same(m.restore(0), tree)
    return len(tree)


@pytest.mark.slow
def test_64_bit_types_with_x64_and_without(tmp_path: pathlib.Path) -> None:
    """A job with x64 gets them back; one without gets NumPy arrays without a target, and is refused with one."""
    assert run_worker(
        "tests.arrays.test_round_trip:wide_job", {"directory": str(tmp_path)}, env={"JAX_ENABLE_X64": "1"}
    )
    m = ec.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(read_only=True))
    got = m.restore(0)
    for name in WIDE_TYPES:
        for i, shape in enumerate(SHAPES):
            assert isinstance(got[name][i], np.ndarray)
            assert bits(got[name][i]) == bits(random_bits(name, shape, i))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), got)
    with pytest.raises(MismatchError, match="jax_enable_x64") as caught:
        restore(m, target)
    assert len(caught.value.rows) == len(WIDE_TYPES) * len(SHAPES)


def test_every_numpy_type_and_shape(tmp_path: pathlib.Path) -> None:
    """NumPy arrays keep type, byte order and bits; so do Fortran order (as C), strides and NumPy's scalars."""
    tree = {name: [random_bits(name, shape, i) for i, shape in enumerate(SHAPES)] for name in NUMPY_TYPES}
    tree["bfloat16"] = [random_bits(ml_dtypes.bfloat16, (3, 4))]
    tree["strided"] = [np.asfortranarray(random_bits("<f4", (6, 7))), random_bits("<f4", (6, 8))[::2, ::-3]]
    tree["scalars"] = [np.float64("nan"), np.float32(-0.0), np.int8(-3), np.bool_(True), np.complex64(1 - 2j)]
    m = save(tmp_path, tree)
    assert_same(restore(m, tree), tree)
    native = jax.tree.map(lambda x: x.astype(x.dtype.newbyteorder("=")) if isinstance(x, np.ndarray) else x, tree)
    assert_same(m.restore(0), native)


def test_numpy_leaves_are_copied_when_save_returns(tmp_path: pathlib.Path) -> None:
    """What the caller does to an array after `save()` does not reach the epoch."""
    array = np.arange(1000.0)
    with ec.CheckpointManager(tmp_path) as m:
        m.save(0, args=ocp.args.StandardSave({"a": array}))
        array[:] = -1
    assert (m.restore(0)["a"] == np.arange(1000.0)).all()


def test_python_values(tmp_path: pathlib.Path) -> None:
    """Python's values come back as themselves, with and without a target."""
    tree = {
        "bool": [True, False],
        "int": [0, -1, 2**31, -(2**63), 2**64, 10**400, -(10**400)],
        "float": [0.0, -0.0, 1.5, 5e-324, float("inf"), -float("inf"), float("nan"), 0.1],
        "complex": [1j, complex(-0.0, float("nan")), complex(float("inf"), -1.5)],
        "str": ["", "a", "é€𝄞", "\0\n\x7f", "x" * 5000, "é" * 3000],
        "surrogates": ["\ud800", "a\udfffb", "\ud83d\ude00", "\udc80" * 4097],
        "bytes": [b"", b"\0\xff", bytes(range(256)) * 40],
        "none": [None, None],
    }
    m = check_round_trip(tmp_path, tree)
    assert_same(m.restore(0), tree)


def searches(call: Callable[[], object]) -> int:
    """How many searches for a regular expression a call makes."""
    found = list[Any]()

    def note(frame: types.FrameType, event: str, called: Any) -> None:
        del frame
        if event == "c_call" and called.__name__ == "search":
            found.append(called)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return len(found)


def test_text_without_surrogates_is_not_searched_for_them() -> None:
    """The search of long texts takes time, of the training thread; ASCII is known to have none."""
    for letter, expected in (("x", 0), ("é", 1)):
        text = letter * 4096
        assert searches(lambda text=text: tree_lib.value_to_json(text)) == expected
        assert searches(lambda text=text: tree_lib.path_to_json((("k", text),))) == expected
    assert tree_lib.value_to_json("x" * 4096) == "x" * 4096
    assert tree_lib.path_to_json((("k", "x" * 4096),)) == ["x" * 4096]


def test_empty_containers_and_none(tmp_path: pathlib.Path) -> None:
    """They are part of the tree."""
    tree = {"a": {}, "b": [], "c": (), "d": None, "e": [{}, [[]], {"x": {}, "y": None}], "f": np.zeros(2)}
    m = check_round_trip(tmp_path, tree)
    assert_same(m.restore(0), tree)


@pytest.mark.parametrize("tree", [None, {}, [], 7, "x", np.arange(3), jnp.arange(3)], ids=repr)
def test_a_tree_of_one_leaf(tmp_path: pathlib.Path, tree: Any) -> None:
    """A bare value, or nothing at all, is a tree too."""
    m = check_round_trip(tmp_path, tree)
    assert_same(m.restore(0), tree)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_prng_keys(tmp_path: pathlib.Path, impl: str) -> None:
    """Keys of every implementation: one, a batch, a sharded and a replicated batch; they draw the same numbers."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))

    def put(spec: PartitionSpec) -> jax.Array:
        return jax.device_put(jax.random.split(jax.random.key(2, impl=impl), (4, 2)), NamedSharding(mesh, spec))

    tree = {
        "one": jax.random.key(1, impl=impl),
        "batch": jax.random.split(jax.random.key(1, impl=impl), 3),
        "sharded": put(PartitionSpec("x", "y")),
        "rows": put(PartitionSpec("y")),
        "everywhere": put(PartitionSpec()),
        "raw": jax.random.PRNGKey(0),
    }
    m = check_round_trip(tmp_path, tree)
    got = m.restore(0)
    assert_same(got, tree)
    assert jax.random.bits(got["one"]) == jax.random.bits(tree["one"])
    other = {**tree, "one": jax.random.key(0, impl="rbg" if impl != "rbg" else "threefry2x32")}
    with pytest.raises(MismatchError) as caught:
        restore(m, other)
    assert [r.leaf for r in caught.value.rows] == ["one"]


# -- trees ---------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


class Nothing(NamedTuple):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    kernel: Any
    bias: Any
    name: str = dataclasses.field(default="w", metadata={"static": True})


@flax.struct.dataclass
class Struct:
    a: Any
    b: Any
    c: int = flax.struct.field(pytree_node=False, default=3)


NONE_KEY = None if jax.__version_info__ >= (0, 9) else -1  # older jax cannot flatten a dict with the key None


def test_odd_keys(tmp_path: pathlib.Path) -> None:
    """Keys that would collide as paths, or that storage reserves, stay apart."""
    leaf = iter(range(100))
    tree = {
        "slash": {"a/b": next(leaf), "a": {"b": next(leaf)}},
        "int": {1: next(leaf), -2: next(leaf), 10**30: next(leaf)},
        "str": {"1": next(leaf), "-2": next(leaf)},
        "mixed": collections.OrderedDict([(1, np.zeros(2)), ("1", np.ones(2)), (NONE_KEY, 3), (1.5, 4)]),
        "bool": {False: next(leaf), True: next(leaf)},
        "": {"": next(leaf)},
        "%": next(leaf),
        "%2F": next(leaf),
        "%25": np.arange(2),
        "__metadata__": np.arange(3),
        "%5F_metadata__": np.arange(4),
        "[0:1]": np.arange(5),
        "x": jnp.arange(6),
        "x[0:3]": np.arange(7),
        "é𝄞": np.arange(8),
        "\ud800": next(leaf),
        "\ud83d\ude00": next(leaf),
        "😀": next(leaf),
        "k" * 5000: np.arange(9),
        "..": np.arange(10),
        " \n\t\0": np.arange(11),
        "value": next(leaf),
    }
    m = check_round_trip(tmp_path, tree)
    got = m.restore(0)
    assert list(got["mixed"]) == [1, "1", NONE_KEY, 1.5]
    assert {type(k) for k in got["int"]} == {int}
    assert got.keys() == tree.keys()
    assert got["slash"] == tree["slash"]


def test_the_root_may_use_the_reserved_name(tmp_path: pathlib.Path) -> None:
    """`__metadata__` at the top of the tree is a leaf, not safetensors' own entry."""
    check_round_trip(tmp_path, {"__metadata__": np.arange(3), "%5F_metadata__": np.arange(4)})


def test_tuples_named_tuples_and_dataclasses(tmp_path: pathlib.Path) -> None:
    """With a target they come back as what they are; without one as dict and list."""
    tree = {
        "tuple": (1, (2.0, [np.arange(3)])),
        "point": Point(jnp.ones(3), Point(None, {})),
        "nothing": [Nothing(), (), {}],
        "weights": Weights(jnp.ones((2, 2)), Weights(1, 2, "inner"), "outer"),
        "struct": Struct(jnp.zeros(2), {"q": 1}, 9),
        "default": collections.defaultdict(list, {"a": np.zeros(1)}),
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    }
    m = check_round_trip(tmp_path, tree)
    got = m.restore(0)
    assert got["tuple"][0] == 1
    assert type(got["tuple"]) is list
    assert set(got["point"]) == {"x", "y"}
    assert set(got["weights"]) == {"kernel", "bias"}
    assert got["struct"]["b"] == {"q": 1}


def params() -> dict[str, Any]:
    return {"dense": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.zeros(4)}, "scale": jnp.ones(())}


@pytest.mark.slow
def test_optax_states(tmp_path: pathlib.Path) -> None:
    """Adam, chains with empty states, masks and multi_transform come back in type and structure."""
    labels = {"dense": {"kernel": "slow", "bias": "fast"}, "scale": "frozen"}
    transforms = {"slow": optax.sgd(0.1, momentum=0.9), "fast": optax.adam(1e-3), "frozen": optax.set_to_zero()}
    optimizers = {
        "adam": optax.adam(1e-3),
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-1.0)),
        "masked": optax.masked(optax.adam(1e-3), {"dense": {"kernel": True, "bias": False}, "scale": False}),
        "multi": optax.multi_transform(transforms, labels),
        "schedule": optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1e-3, 10)),
    }
    grads = jax.tree.map(lambda x: x + 0.5, params())
    tree = {name: o.update(grads, o.init(params()), params())[1] for name, o in optimizers.items()}
    m = save(tmp_path, tree)
    assert_same(restore(m, {name: o.init(params()) for name, o in optimizers.items()}), tree)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(nn.LayerNorm()(nn.Dense(3)(x)))


@pytest.mark.slow
def test_flax_train_state(tmp_path: pathlib.Path) -> None:
    """A Linen TrainState comes back into a fresh one."""

    def fresh(seed: int) -> TrainState:
        variables = net.init(jax.random.key(seed), jnp.ones((1, 4)))
        return TrainState.create(apply_fn=net.apply, params=variables["params"], tx=optimizer)

    net, optimizer = Net(), optax.adam(1e-3)
    state = fresh(0)
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    m = save(tmp_path, state)
    got = restore(m, fresh(1))
    assert type(got) is TrainState
    assert_same(got, state)


@pytest.mark.slow
def test_nnx_state(tmp_path: pathlib.Path) -> None:
    """An nnx State with parameters and typed RNG keys comes back, and merges into a working module."""

    class Model(nnx.Module):
        def __init__(self, seed: int):
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    graph, state = nnx.split(Model(0))
    m = save(tmp_path, state)
    got = restore(m, nnx.state(Model(1)))
    assert type(got) is type(state)
    assert_same(got, state)
    assert (nnx.merge(graph, got).layers[0](jnp.ones(3)) == nnx.merge(graph, state).layers[0](jnp.ones(3))).all()


def test_arrays_without_a_target_keep_their_sharding(tmp_path: pathlib.Path) -> None:
    """Where the devices exist, arrays lie as they were saved, also on one device, a sub-mesh, or in another order."""
    devices = np.array(jax.devices()[:4])
    data = random_bits(np.float32, (8, 4))
    places = {
        "device": jax.sharding.SingleDeviceSharding(devices[2]),
        "rows": NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x")),
        "both": NamedSharding(Mesh(devices[::-1].reshape(2, 2), ("x", "y")), PartitionSpec("y", "x")),
        "folded": NamedSharding(Mesh(devices.reshape(2, 2), ("x", "y")), PartitionSpec(("y", "x"))),
        "part": NamedSharding(Mesh(devices[[1, 3]], ("x",)), PartitionSpec(None, "x")),
        "everywhere": NamedSharding(Mesh(devices, ("x",)), PartitionSpec()),
        "pinned": NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"), memory_kind="pinned_host"),
        "one pinned": jax.sharding.SingleDeviceSharding(devices[1], memory_kind="pinned_host"),
    }
    tree = {name: jax.device_put(data, place) for name, place in places.items()}
    m = save(tmp_path, tree)
    with jax.transfer_guard("disallow"):  # a restore is no accident
        got = m.restore(0)
    assert {name: array.sharding for name, array in got.items()} == places
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, tree), "else a step would be compiled again"
    assert_same(got, tree)
    turned = dict(zip(places, [*list(places.values())[1:], places["device"]], strict=True))
    target = {name: jax.ShapeDtypeStruct((8, 4), np.float32, sharding=place) for name, place in turned.items()}
    assert_same(restore(m, target), {name: jax.device_put(data, place) for name, place in turned.items()})


_KEYS = st.one_of(
    st.dictionaries(st.text(st.characters(exclude_categories=()), max_size=6), st.none(), max_size=4),
    st.dictionaries(st.integers(-5, 5), st.none(), max_size=4),
)
_TYPES = st.sampled_from([np.dtype(t) for t in ("?", "i1", "<u2", "<i4", "<f4", "<f8", "<c8", ">f4", "<M8[s]")])
_ARRAYS = st.builds(
    random_bits, _TYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5), st.integers(0, 9)
)
_JAX = st.builds(
    lambda d, s, n: jnp.asarray(random_bits(getattr(jnp, d).dtype, s, n)),
    st.sampled_from(JAX_TYPES),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    st.integers(0, 9),
)
_VALUES = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
    st.none(),
)
_TREES = st.recursive(
    st.one_of(_ARRAYS, _JAX, _VALUES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda xy: Point(*xy)),
        _KEYS.flatmap(lambda keys: st.fixed_dictionaries(dict.fromkeys(keys, inner))),
    ),
    max_leaves=12,
)


@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(tree=_TREES, block=st.sampled_from([4096, 2**23]), part=st.sampled_from([None, 1, 100]))
def test_any_tree(tree: Any, block: int, part: int | None) -> None:
    """Random trees of random leaves come back exactly, whatever the block and part sizes."""
    storage = ec.StorageOptions(block_bytes=block, part_bytes=part)
    check_round_trip(f"memory://{uuid.uuid4().hex}/", tree, storage)


# -- files ---------------------------------------------------------------------------------------------------------


def data_files(m: ec.CheckpointManager) -> list[pathlib.Path]:
    return sorted(pathlib.Path(m.node_path("process_0", 0)).glob("*.safetensors"))


def header_of(path: pathlib.Path) -> tuple[int, dict[str, Any]]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return 8 + length, json.loads(raw[8 : 8 + length])


def check_valid(path: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The file is what the safetensors format asks for: no holes, page-aligned data, opened by its own package."""
    raw = path.read_bytes()
    start, header = header_of(path)
    assert start % 4096 == 0
    header.pop("__metadata__")
    at = 0
    out = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == at, "there is a hole"
        at = end
        out[name] = (entry["dtype"], entry["shape"], raw[start + begin : start + end])
    assert start + at == len(raw)
    with safetensors.safe_open(path, framework="numpy") as f:
        assert sorted(f.keys()) == sorted(header)
        for name, entry in header.items():
            assert f.get_slice(name).get_shape() == entry["shape"]
            assert f.get_slice(name).get_dtype() == entry["dtype"]
    return out


def test_the_safetensors_package_reads_native_types(tmp_path: pathlib.Path) -> None:
    """`load_file` gives names, types, shapes and bytes as saved, also of slices."""
    native = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32"]
    tree: dict[str, Any] = {
        t: {str(i) + "x": random_bits(t, s) for i, s in enumerate(SHAPES)} for t in [*native, "float64", "complex64"]
    }
    m = save(tmp_path, tree)
    (path,) = data_files(m)
    loaded = safetensors.numpy.load_file(path)
    expected = {f"{t}/{k}": v for t, group in tree.items() for k, v in group.items()}
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert (loaded[name].dtype, loaded[name].shape) == (value.dtype, value.shape)
        assert loaded[name].tobytes() == value.tobytes()
    check_valid(path)


def test_the_safetensors_package_opens_every_type(tmp_path: pathlib.Path) -> None:
    """Types that it does not know are bytes to it; nothing is missing."""
    tree = {name: jnp.asarray(random_bits(getattr(jnp, name).dtype, (3, 5))) for name in JAX_TYPES}
    numpy = {f"np{i}": random_bits(t, (3, 5)) for i, t in enumerate(NUMPY_TYPES)}
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    sharded = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
    keys = {"key": jax.random.key(1), "long": "x" * 5000, "odd [0:1] / \n é": jnp.ones(2), "sharded": sharded}
    m = save(tmp_path, {**tree, **numpy, **keys})
    (path,) = data_files(m)
    found = check_valid(path)
    for name, value in tree.items():
        assert found[name][2] == np.asarray(value).tobytes()
    for name, value in numpy.items():
        assert found[name][2] == value.astype(value.dtype.newbyteorder("<")).tobytes()
    assert found["bfloat16"][0] == "BF16"
    assert found["float8_e4m3fn"][0] == "F8_E4M3"
    shards = sorted(n for n in found if n.startswith("sharded"))
    assert shards == [f"sharded[{i}:{i + 2}]" for i in (0, 2, 4, 6)]
    assert b"".join(found[n][2] for n in shards) == np.arange(8, dtype=np.float32).tobytes()
    assert len(found) == len(tree) + len(numpy) + 3 + 4


@pytest.mark.parametrize("part_bytes", [1, 5000, 40_000])
def test_a_file_rolls_over_into_numbered_parts(tmp_path: pathlib.Path, part_bytes: int) -> None:
    """Past `part_bytes` the data goes on in `-00001`, …; each part is a valid file, and no tensor is split."""
    tree = {f"leaf{i:02}": random_bits(np.float32, (i * 40,), i) for i in range(24)}
    tree["bytes"] = random_bits(np.uint8, (77,))
    m = check_round_trip(tmp_path, tree, ec.StorageOptions(part_bytes=part_bytes, block_bytes=4096))
    files = data_files(m)
    assert len(files) > 1
    names = {f"default-{i:05d}.safetensors" for i in range(1, len(files))} | {"default.safetensors"}
    assert {f.name for f in files} == names
    found: dict[str, Any] = {}
    for path in files:
        tensors = check_valid(path)
        assert not found.keys() & tensors.keys()
        found.update(tensors)
        assert len(tensors) == 1 or sum(len(t[2]) for t in tensors.values()) <= part_bytes
    assert {n: t[2] for n, t in found.items()} == {n: a.tobytes() for n, a in tree.items()}


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """This process may open a hundred files more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {*map(int, os.listdir("/proc/self/fd"))}
    free = [number for number in range(1000) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[100], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_many_parts_are_not_all_open_at_the_same_time(tmp_path: pathlib.Path) -> None:
    """300 parts are written and read by a process that may open a hundred files."""
    tree = {f"leaf{i:03}": np.full(3, i, np.float32) for i in range(300)}
    manager = check_round_trip(tmp_path, tree, ec.StorageOptions(part_bytes=1))
    assert len(data_files(manager)) == 300


def test_leaves_larger_than_a_block(tmp_path: pathlib.Path) -> None:
    """Leaves that span many blocks, whole, in rows, in columns, beside small ones and next to block borders."""
    sizes = [4095, 4096, 4097, 8192, 12_289, 100_003]
    tree: dict[str, Any] = {f"b{n}": random_bits(np.uint8, (n,), n) for n in sizes}
    data = random_bits(np.float32, (64, 96))
    tree |= {"matrix": jnp.asarray(data), "small": jnp.ones(3), "tall": random_bits(np.float32, (1, 5000, 1))}
    m = check_round_trip(tmp_path, tree, ec.StorageOptions(block_bytes=4096))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    for spec in (PartitionSpec("x"), PartitionSpec(None, "y"), PartitionSpec("y", "x"), PartitionSpec(("x", "y"))):
        sharding = NamedSharding(mesh, spec)
        target = {"matrix": jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)}
        args = ocp.args.PyTreeRestore(target, partial_restore=True)
        assert_same(m.restore(0, args=args), {"matrix": jax.device_put(data, sharding)})


# -- parts of a tree -----------------------------------------------------------------------------------------------


@pytest.fixture
def layers(tmp_path: pathlib.Path) -> ec.CheckpointManager:
    tree = {
        "params": {f"layer{i}": {"kernel": jnp.full((2, 3), i), "bias": np.full(3, i)} for i in range(3)},
        "step": 7,
        "name": "run",
        "text": "y" * 5000,
        "nothing": None,
    }
    return save(tmp_path, tree)


def test_leaves_by_pattern(layers: ec.CheckpointManager) -> None:
    """`restore_leaves` gives NumPy arrays and Python values by name, of those leaves only."""
    got = layers.restore_leaves(0, "params/*/kernel")
    assert list(got) == [f"params/layer{i}/kernel" for i in range(3)]
    assert all(isinstance(v, np.ndarray) and (v == i).all() for i, v in enumerate(got.values()))
    got = layers.restore_leaves(0, ["step", "n*", "text", "params/layer[12]/bias"])
    arrays = {k: got.pop(k) for k in [k for k in got if k.startswith("params")]}
    assert list(arrays) == ["params/layer1/bias", "params/layer2/bias"]
    assert got == {"step": 7, "name": "run", "text": "y" * 5000, "nothing": None}


def test_a_pattern_that_matches_no_leaf_is_refused_with_near_names(layers: ec.CheckpointManager) -> None:
    """Each of several patterns has to match; a part of the tree is told how to ask for what lies below it."""
    with pytest.raises(UnknownNameError, match=r"checkpoint 0, item 'default'.*'stpe'; near: 'step'"):
        layers.restore_leaves(0, "stpe")
    with pytest.raises(UnknownNameError, match=r"'params/\*/kernal'; near: 'params/layer[012]/kernel'"):
        layers.restore_leaves(0, ["step", "params/*/kernal"])
    with pytest.raises(UnknownNameError, match=r"'params'; those below it match 'params/\*'"):
        layers.restore_leaves(0, "params")
    assert layers.restore_leaves(0, []) == {}


def test_partial_restore(layers: ec.CheckpointManager) -> None:
    """Leaves that the target lacks are left out; those that the epoch lacks stay as the target has them."""
    target = {"params": {"layer1": {"bias": np.zeros(3, np.int64)}}, "step": 0, "new": "kept"}
    got = layers.restore(0, args=ocp.args.PyTreeRestore(target, partial_restore=True))
    assert_same(got, {"params": {"layer1": {"bias": np.full(3, 1)}}, "step": 7, "new": "kept"})
    with pytest.raises(MismatchError) as caught:
        layers.restore(0, args=ocp.args.PyTreeRestore(target))
    problems = {r.leaf: r.problem for r in caught.value.rows}
    assert problems["new"] == "missing"
    assert problems["params/layer0/kernel"] == "unexpected"
    assert "step" not in problems


def test_restore_args_beside_a_target_that_does_not_fit(layers: ec.CheckpointManager) -> None:
    """An array's shape counts, so that a wrong model is noticed; so does all of a leaf that `restore_args` lacks."""
    full = layers.restore(0)
    asked = jax.tree.map(lambda _: ocp.RestoreArgs(), full)
    wrong = {**full, "params": jax.tree.map(lambda x: np.zeros((5, 5)), full["params"])}
    with pytest.raises(MismatchError) as caught:
        layers.restore(0, args=ocp.args.PyTreeRestore(wrong, restore_args=asked))
    assert [(r.leaf, r.problem) for r in caught.value.rows] == [
        (f"params/layer{i}/{n}", "shape") for i in range(3) for n in ("bias", "kernel")
    ]
    asked["step"] = ocp.ArrayRestoreArgs()
    got = layers.restore(0, args=ocp.args.PyTreeRestore(full, restore_args=asked))["step"]
    assert (got, got.dtype) == (7, np.int32)
    less = {key: value for key, value in asked.items() if key != "step"}
    with pytest.raises(MismatchError) as caught:
        layers.restore(0, args=ocp.args.PyTreeRestore({**full, "step": np.zeros(3)}, restore_args=less))
    assert [r.leaf for r in caught.value.rows] == ["step"]
    with pytest.raises(InvalidArgumentError, match=r"restore_args has a str at 'step'; expected ocp\.RestoreArgs"):
        layers.restore(0, args=ocp.args.PyTreeRestore(full, restore_args={**asked, "step": "int"}))


def test_nothing_in_a_partial_target_leaves_the_leaf_out(layers: ec.CheckpointManager) -> None:
    """None and empty containers, with restore_args and without."""
    full = layers.restore(0)
    target = {**full, "params": {**full["params"], "layer0": {}}, "step": None}
    asked = jax.tree.map(lambda _: ocp.RestoreArgs(), target)
    for restore_args in (None, asked):
        args = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=True)
        assert_same(layers.restore(0, args=args), target)


def test_a_leaf_that_only_a_partial_target_has_keeps_its_value(layers: ec.CheckpointManager) -> None:
    """Without restore_args, with them, and where they lack the leaf."""
    target = {"step": 0, "more": 7}
    for restore_args in (None, jax.tree.map(lambda _: ocp.RestoreArgs(), target), {"step": ocp.RestoreArgs()}):
        args = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=True)
        assert layers.restore(0, args=args) == {"step": layers.restore(0)["step"], "more": 7}


def test_a_placeholder_for_an_array_needs_restore_args(layers: ec.CheckpointManager) -> None:
    """Without them the item is a target, and a number is none for an array."""
    full = layers.restore(0)
    item = jax.tree.map(lambda leaf: leaf if isinstance(leaf, str) else 0, full)
    with pytest.raises(MismatchError):
        layers.restore(0, args=ocp.args.PyTreeRestore(item))
    asked = jax.tree.map(lambda _: ocp.RestoreArgs(), item)
    got = layers.restore(0, args=ocp.args.PyTreeRestore(item, restore_args=asked))
    np.testing.assert_array_equal(got["params"]["layer0"]["kernel"], full["params"]["layer0"]["kernel"])


def test_placeholders_are_left_as_they_are(layers: ec.CheckpointManager) -> None:
    """`...` in a target: not read, and handed back."""
    target = {"params": ..., "step": ocp.PLACEHOLDER, "name": "", "text": ..., "nothing": None}
    full = layers.restore(0)
    target["params"] = jax.tree.map(lambda _: ..., full["params"])
    got = restore(layers, target)
    assert got["name"] == "run"
    assert got["step"] is ...
    assert jax.tree.leaves(got["params"]) == [...] * 6


def test_a_mismatch_lists_every_leaf(layers: ec.CheckpointManager) -> None:
    """Missing, unexpected, wrongly shaped and wrongly typed leaves in one table."""
    target = layers.restore(0)
    target["params"]["layer0"]["kernel"] = jnp.zeros((3, 2))
    target["params"]["layer1"]["extra"] = jnp.zeros(1)
    del target["params"]["layer2"]
    target["name"] = 5
    with pytest.raises(MismatchError) as caught:
        restore(layers, target)
    assert {(r.leaf, r.problem) for r in caught.value.rows} == {
        ("params/layer0/kernel", "shape"),
        ("params/layer1/extra", "missing"),
        ("params/layer2/kernel", "unexpected"),
        ("params/layer2/bias", "unexpected"),
        ("name", "type"),
    }
    assert all(r.leaf in str(caught.value) for r in caught.value.rows)


# -- other types ---------------------------------------------------------------------------------------------------

CASTS = [
    # saved, asked for, what comes back (None: refused)
    (np.array([1.1, np.nan, -np.inf, 1e30], np.float32), jnp.bfloat16, np.array([1.1, np.nan, -np.inf, 1e30])),
    (np.array([1.1, 1e-300], np.float64), np.float32, np.array([1.1, 0.0])),
    (np.array([1.5], np.float16), np.float32, np.array([1.5])),
    (np.array([1.5, 448.0], np.float32), jnp.float8_e4m3fn, np.array([1.5, 448.0])),
    (np.array([16777216, -5], np.int32), np.float32, np.array([16777216, -5])),
    (np.array([16777217], np.int32), np.float32, None),
    (np.array([257], np.int16), jnp.bfloat16, None),
    (np.array([256], np.int16), jnp.bfloat16, np.array([256])),
    (np.array([2**53 + 1], np.int64), np.float64, None),
    (np.array([3_000_000_000], np.uint32), np.int32, None),
    (np.array([7, 2**31 - 1], np.uint32), np.int32, np.array([7, 2**31 - 1])),
    (np.array([-1], np.int32), np.uint32, None),
    (np.array([-1], np.int64), np.uint64, None),
    (np.array([2**63], np.uint64), np.int64, None),
    (np.array([300], np.int32), np.int8, None),
    (np.array([-8, 7], np.int8), jnp.int4, np.array([-8, 7])),
    (np.array([8], np.int8), jnp.int4, None),
    (np.array([3.0, -2.0], np.float32), np.int32, np.array([3, -2])),
    (np.array([3.5], np.float32), np.int32, None),
    (np.array([np.nan], np.float32), np.int32, None),
    (np.array([np.inf], np.float32), np.int32, None),
    (np.array([2.0**31], np.float32), np.int32, None),
    (np.array([1 + 0j, -2.5], np.complex64), np.float32, np.array([1, -2.5])),
    (np.array([1 + 1j], np.complex64), np.float32, None),
    (np.array([1.5], np.float32), np.complex64, np.array([1.5])),
    (np.array([True, False]), np.int32, np.array([1, 0])),
    (np.array([1, 0], np.int32), np.bool_, np.array([True, False])),
    (np.array([2], np.int32), np.bool_, None),
    (np.zeros(0, np.float32), np.int32, np.zeros(0)),
]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["numpy", "jax"])
@pytest.mark.parametrize(("saved", "asked", "expected"), CASTS, ids=lambda x: getattr(x, "__name__", None) or str(x))
def test_casts(tmp_path: pathlib.Path, saved: np.ndarray, asked: Any, expected: np.ndarray | None, form: str) -> None:
    """Float precision follows the target; a cast of another kind happens only if every value survives."""
    dtype = np.dtype(asked)
    if form == "jax" and dtype.itemsize == 8 and dtype.kind != "c":
        pytest.skip("without x64")
    m = save(tmp_path, {"inner": {"leaf": saved}})
    empty: Any = np.zeros(saved.shape, dtype) if form == "numpy" else jnp.zeros(saved.shape, dtype)
    if expected is None:
        with pytest.raises(MismatchError) as caught:
            restore(m, {"inner": {"leaf": empty}})
        assert [r.leaf for r in caught.value.rows] == ["inner/leaf"]
        return
    got = restore(m, {"inner": {"leaf": empty}})["inner"]["leaf"]
    assert isinstance(got, jax.Array if form == "jax" else np.ndarray)
    assert got.dtype == dtype
    with np.errstate(all="ignore"):
        assert np.asarray(got).tobytes() == expected.astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("saved", "target", "expected"),
    [
        (7, 0.0, 7.0),
        (7.0, 0, 7),
        (7.5, 0, None),
        (2**53 + 1, 0.0, None),
        (10**400, 0.0, None),
        (1, False, True),
        (2, False, None),
        (7, np.zeros((), np.float32), np.array(7, np.float32)),
        (16777217, np.zeros((), np.float32), None),
        (300, np.zeros((), np.int8), None),
        (10**30, np.zeros((), np.int32), None),
        (np.float32(2.5), 0.0, 2.5),
        (np.array(3), 0, 3),
        (np.array(2.5), 0, None),
        (np.array([1, 2]), 0, None),
        ("text", 0, None),
        ("text", b"", None),
        (None, 0, None),
    ],
    ids=repr,
)
def test_casts_of_python_values(tmp_path: pathlib.Path, saved: Any, target: Any, expected: Any) -> None:
    """Python values follow the same rule, between each other and to and from arrays of one element."""
    m = save(tmp_path, {"leaf": saved})
    if expected is None:
        with pytest.raises(MismatchError) as caught:
            restore(m, {"leaf": target})
        assert [r.leaf for r in caught.value.rows] == ["leaf"]
    else:
        assert bits(restore(m, {"leaf": target})["leaf"]) == bits(expected)


def test_what_is_refused_reaches_no_device(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All differences are in one table all the same, those of Python values among them."""
    m = save(tmp_path, {"array": np.float32([1.5]), "fine": np.ones(3, np.float32), "number": 7, "value": 2.5})
    target = {"array": jnp.zeros(1, int), "fine": jnp.ones(3), "number": jnp.zeros(()), "value": 0}
    calls: list[Any] = []
    for name in ("device_put", "make_array_from_callback", "make_array_from_single_device_arrays"):
        monkeypatch.setattr(jax, name, lambda *args, **kwargs: calls.append(args))
    with pytest.raises(MismatchError) as caught:
        restore(m, target)
    assert [(r.leaf, r.problem) for r in caught.value.rows] == [("array", "dtype"), ("value", "value")]
    assert calls == []


def test_a_restore_leaves_nothing_that_only_a_garbage_collector_frees(tmp_path: pathlib.Path) -> None:
    """The recorded shardings with their meshes and devices among it."""
    m = save(tmp_path, {"a": jnp.ones(3)})
    gc.collect()
    gc.disable()
    try:
        m.restore(0)
        assert not [x for x in gc.get_objects() if isinstance(x, Shardings)]
    finally:
        gc.enable()


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    """Objects, strings in arrays, structured types and odd keys: nothing is begun."""
    with ec.CheckpointManager(tmp_path) as m:
        for bad in (object(), np.array(["a"]), np.zeros(2, "i4,f4"), np.array([object()])):
            with pytest.raises(ec.errors.InvalidArgumentError, match="item 'default', leaf 'inner/bad'"):
                m.save(0, args=ocp.args.StandardSave({"inner": {"bad": bad}}))
        with pytest.raises(ec.errors.InvalidArgumentError):
            m.save(0, args=ocp.args.StandardSave({"inner": {(1, 2): 3}}))
        donated = jnp.ones(3)
        donated.delete()
        with pytest.raises(ec.errors.InvalidArgumentError, match="item 'default', leaf 'gone' was deleted"):
            m.save(0, args=ocp.args.StandardSave({"gone": donated}))
        assert m.all_steps() == []
        assert not m.is_saving_in_progress()


def test_text_of_numpy_is_text(tmp_path: pathlib.Path) -> None:
    """It is an instance of Python's types, and of NumPy's scalars, whose other types are numbers."""
    with ec.CheckpointManager(tmp_path) as manager:
        for epoch, letter in enumerate("xéx"):  # of one length in letters, and of several in bytes
            tree = {"name": np.str_(letter), "raw": np.bytes_(b"\xff"), "long": np.str_(letter * 100_000)}
            manager.save(epoch, args=ocp.args.StandardSave(tree))
            plain = manager.restore(epoch)
            like = manager.restore(epoch, args=ocp.args.StandardRestore(tree))
            assert {type(value) for value in plain.values()} == {str, bytes}
            assert plain == like == tree


def test_orbaxs_description_of_typed_keys_is_a_target(tmp_path: pathlib.Path) -> None:
    """`utils.to_shape_dtype_struct` gives the keys' data, as `item_metadata` does; the keys come back typed."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    keys = jax.random.split(jax.random.key(1, impl="rbg"), len(jax.devices()))
    tree = {"one": jax.random.key(3), "many": jax.device_put(keys, spread)}
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        described = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        assert described["one"].dtype == np.uint32
        for target in (described, manager.item_metadata(0), tree):
            got = manager.restore(0, args=ocp.args.StandardRestore(target))
            for name, value in tree.items():
                assert got[name].dtype == value.dtype
                assert got[name].sharding.is_equivalent_to(value.sharding, value.ndim)
                np.testing.assert_array_equal(jax.random.key_data(got[name]), jax.random.key_data(value))
        asked = ocp.checkpoint_utils.construct_restore_args(jax.eval_shape(lambda: tree))  # without shardings
        got = manager.restore(0, args=ocp.args.PyTreeRestore({"one": 0, "many": 0}, restore_args=asked))
        assert got["one"].dtype == tree["one"].dtype
        wrong = {**described, "one": jax.ShapeDtypeStruct((2,), np.float32)}
        with pytest.raises(ec.errors.MismatchError, match="one"):
            manager.restore(0, args=ocp.args.StandardRestore(wrong))
