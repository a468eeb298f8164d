"""Blobs of jobs without targets come back in the containers that init made; with every kind of manager."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

import epochckpt as ec
from epochckpt import errors
from epochckpt.format import tree as tree_lib
from epochckpt.jobs import containers


class Moving(NamedTuple):
    mean: Any
    count: Any
    nothing: Any = ()


class Alone(NamedTuple):
    """Without a child."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["low", "high"], meta_fields=["unit"])
@dataclasses.dataclass
class Range:
    low: Any
    high: Any
    unit: str = "m"


@flax.struct.dataclass
class Scaled:
    value: Any
    by: float = flax.struct.field(pytree_node=False, default=0.5)
    axes: tuple[int, ...] = flax.struct.field(pytree_node=False, default=(0, -1))


@flax.struct.dataclass
class OnlyStatic:
    name: str = flax.struct.field(pytree_node=False, default="x")


class Position:
    """An object whose state is a tuple."""

    def __init__(self) -> None:
        self.state = (0, Moving(0.0, 0))

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        assert isinstance(state, tuple), state
        self.state = (state[0], Moving(state[1].mean, state[1].count))


MANAGERS: dict[str, Callable[[str], Any]] = {
    "ours": ec.CheckpointManager,
    "stock": ocp.CheckpointManager,
    "caffe2": lambda d: ec.caffe2.CheckpointManager(d, "process_0", "epochckpt"),
}
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2), optax.sgd(0.5, momentum=0.9))


@pytest.fixture(params=list(MANAGERS))
def make(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Callable[[], Any]:
    (tmp_path / "run").mkdir()
    return lambda: MANAGERS[request.param](str(tmp_path / "run"))


def run(job: ec.Job, manager: Any, epochs: int, epoch: int | None = None) -> ec.Workspace:
    """Runs a job to an epoch; Caffe2's managers go on from the epoch that is named."""
    ec.epoch_limiter(job, epochs)
    session = ec.LocalSession()
    named = epoch if isinstance(manager, ec.caffe2.CheckpointManager) else None
    runner = ec.JobRunner(job, manager, named)
    runner.train(session)
    assert runner.result.resumed_from == epoch
    assert runner.result.failed_saves == ()
    if not isinstance(manager, ec.caffe2.CheckpointManager):
        manager.close()
    return session.workspace()


def step(params: Any, state: Any) -> tuple[Any, Any]:
    updates, state = TX.update(jax.tree.map(lambda p: p - 1.0, params), state, params)
    return optax.apply_updates(params, updates), state


def optax_job(ran: list[str]) -> ec.Job:
    """The README's form: init sets blobs, nothing says how they come back."""
    job = ec.Job()

    @job.init
    def init(ws: ec.Workspace) -> None:
        ran.append("init")
        params = {"layers": [{"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}], "scale": jnp.float32(2.0)}
        ws["params"], ws["opt"] = params, TX.init(params)
        ws["key"] = {"now": jax.random.key(7)}
        ws["nested"] = {
            "moving": Moving(jnp.zeros(2), 0),
            "range": Range(jnp.zeros(1), np.ones(2), unit="s"),
            "scaled": [Scaled(jnp.ones(2), by=0.25, axes=(1,)), OnlyStatic("y"), Alone()],
            "frozen": flax.core.FrozenDict({"a": {"b": jnp.ones(1)}, "c": (jnp.ones(1), None)}),
            "numbers": {1: jnp.zeros(1), 2: (jnp.zeros(1),)},
            "ordered": collections.OrderedDict(z=jnp.ones(1), a=(1, 2)),
            "empty": ((), [], {}),
        }
        ws["plain"] = {"a": [1, 2], "b": (1, (2.5, None), Moving(1, 2))}
        ws["position"] = Position()

    @job.setup
    def setup(ws: ec.Workspace) -> None:
        ws["position"] = Position()

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        ws["params"], ws["opt"] = step(ws["params"], ws["opt"])
        ws["key"]["now"] = jax.random.split(ws["key"]["now"], 2)[0]
        nested, position = dict(ws["nested"]), ws["position"]
        nested["moving"] = nested["moving"]._replace(count=nested["moving"].count + 1)
        nested["scaled"] = [nested["scaled"][0].replace(value=nested["scaled"][0].value * 2), *nested["scaled"][1:]]
        ws["nested"] = nested
        position.state = (position.state[0] + 1, Moving(0.5, position.state[1].count + 1))

    return job


def alike(a: ec.Workspace, b: ec.Workspace) -> None:
    """The same containers and values."""
    assert set(a) == set(b)
    for name in a:
        left, right = (ws[name].get_state() if name == "position" else ws[name] for ws in (a, b))
        assert jax.tree.structure(left) == jax.tree.structure(right), name
        for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
            if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                one, other = jax.random.key_data(one), jax.random.key_data(other)
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)


@pytest.mark.slow
def test_a_resumed_run_has_the_containers_that_init_made_and_trains_on(
    make: Callable[[], Any], tmp_path: pathlib.Path, caplog: Any
) -> None:
    """optax's states, named tuples, dataclasses, flax's, keys, tuples in Python values and in states of objects."""
    ran: list[str] = []
    run(optax_job(ran), make(), 2)
    resumed = run(optax_job(ran), make(), 4, 2)
    assert ran == ["init"], "init runs from scratch only"
    whole = run(optax_job([]), ec.CheckpointManager(tmp_path / "whole"), 4)
    alike(resumed, whole)
    assert "ws.target" not in caplog.text


class Model:
    """What TrainState keeps in static fields: nothing that a checkpoint can hold."""

    @staticmethod
    def apply(params: Any, x: Any) -> Any:
        return params["w"] * x


def train_state_job(read: Callable[[Any], Any], *, target: bool = False) -> ec.Job:
    job = ec.Job()

    def create() -> TrainState:
        params = {"w": jnp.asarray(read(jnp.ones(3)))}
        return TrainState.create(apply_fn=Model.apply, params=params, tx=TX)

    @job.setup
    def setup(ws: ec.Workspace) -> None:
        ws["log"] = []
        if target:
            ws.target("state", jax.eval_shape(create))

    @job.init
    def init(ws: ec.Workspace) -> None:
        ws["state"] = create()
        ws["log"].append("init")

    @job.epoch
    def train(ws: ec.Workspace) -> None:
        if isinstance(ws["state"], TrainState):
            ws["state"] = ws["state"].apply_gradients(grads=ws["state"].params)

    return job


@pytest.mark.slow
def test_static_fields_that_no_checkpoint_holds_come_from_tracing_init(make: Callable[[], Any], caplog: Any) -> None:
    """The first run says so. Tracing leaves nothing in the workspace."""
    run(train_state_job(lambda x: x), make(), 1)
    assert caplog.text.count("static fields apply_fn, tx") == 1
    assert "ws.target('state', jax.eval_shape(" in caplog.text
    caplog.clear()
    ws = run(train_state_job(lambda x: x), make(), 3, 1)
    assert isinstance(ws["state"], TrainState)
    assert int(ws["state"].step) == 3
    assert ws["state"].apply_fn is Model.apply
    assert ws["log"] == ["init"]
    assert "comes back as dicts" not in caplog.text


@pytest.mark.slow
def test_an_init_that_cannot_be_traced_is_named_with_what_to_do(make: Callable[[], Any], caplog: Any) -> None:
    """Then the blob is dicts and lists, as the first run said that it would be; a target makes it right."""
    run(train_state_job(np.asarray), make(), 1)
    assert "where init cannot be traced the blob comes back as dicts and lists" in caplog.text
    caplog.clear()
    ws = run(train_state_job(np.asarray), make(), 2, 1)
    assert isinstance(ws["state"], dict)
    (said,) = [r.getMessage() for r in caplog.records if "comes back as dicts" in r.getMessage()]
    assert "node process_0, blob 'state'" in said
    assert "flax.training.train_state.TrainState" in said
    assert "TracerArrayConversionError" in said
    assert "ws.target('state'" in said
    caplog.clear()
    ws = run(train_state_job(lambda x: x, target=True), make(), 3, 2)
    assert isinstance(ws["state"], TrainState)
    assert "ws.target" not in caplog.text


def test_nodes_may_have_blobs_of_one_name_in_other_containers(tmp_path: pathlib.Path) -> None:
    """Each gets its own back."""

    def job() -> ec.Job:
        made = ec.Job()
        for node, value in (("a", Moving(1, 2)), ("b", (1, 2)), ("c", [1, 2])):
            ec.Task(lambda ws, value=value: ws.update(x=value), group=made.init_group, node=node)
        return made

    for epochs in (1, 2):
        one, session = job(), ec.LocalSession()
        ec.epoch_limiter(one, epochs)
        with ec.CheckpointManager(tmp_path) as manager:
            ec.JobRunner(one, manager).train(session)
        found = {node: ws["x"] for node, ws in session.workspaces().items()}
        assert found == {"a": Moving(1, 2), "b": (1, 2), "c": [1, 2]}
        assert [type(x) for x in found.values()] == [Moving, tuple, list]


@pytest.mark.slow
def test_single_blobs_are_loaded_in_their_containers(make: Callable[[], Any]) -> None:
    """`load_blobs_from_checkpoints` gives what a resume gives."""
    run(optax_job([]), make(), 1)
    session, manager = ec.LocalSession(), make()
    assert ec.JobRunner(optax_job([]), manager).load_blobs_from_checkpoints(["opt"], 1, session)
    step(session.workspace()["opt"][1][0].mu, session.workspace()["opt"])


# -- the record --------------------------------------------------------------------------------------------------


def plain(tree: Any) -> Any:
    """What a restore without a target gives."""
    pairs, _ = tree_lib.flatten(tree)
    kept = [(path, None if tree_lib.leaf_kind(leaf) == "node" else leaf) for path, leaf in pairs]
    return tree_lib.nest(kept, "x") if kept else None


@pytest.mark.parametrize(
    "tree",
    [
        (),
        (1,),
        [(1, None), {}],
        {"a": {"b": {1: (2,), 3: 4}}},
        Moving(Moving(1, 2), Alone()),
        [OnlyStatic("z"), 1],
        (1, [OnlyStatic("z")], {"a": OnlyStatic(), "b": Alone()}),
        Scaled({"a": (1,)}, by=float("inf"), axes=()),
        functools.reduce(lambda tree, _: (tree,), range(200), 1),
        {f"layer_{i}": Range(i, (i,)) for i in range(300)},
    ],
)
def test_a_record_is_flat_json_that_makes_the_same_tree(tree: Any) -> None:
    """Of any depth, because what is nested too deep cannot be saved as custom metadata."""
    found = containers.of(tree)
    assert found is not None
    assert not found.loses()
    record = json.loads(json.dumps(containers.to_json(found)))
    made = containers.rebuild(plain(tree), containers.from_json(record))
    assert jax.tree.structure(made) == jax.tree.structure(tree)
    assert jax.tree.leaves(made) == jax.tree.leaves(tree)
    if isinstance(tree, dict) and len(tree) == 300:
        assert len(json.dumps(record)) < 30_000, "a class is recorded once"


@pytest.mark.parametrize("tree", [Range(1, (2,)), jax.tree_util.Partial(abs, {"a": (1,)}), {"a": Range(1, 2)}])
def test_what_is_in_its_containers_already_stays_as_it_is(tree: Any) -> None:
    """As a user's `reshard` may return it; also where no record holds all of it."""
    assert containers.rebuild(tree, containers.of(tree)) is tree  # type: ignore[arg-type]


def test_no_class_is_imported_by_a_name_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the program has imported is looked at; a module's own `__getattr__` is not asked."""
    record = containers.to_json(containers.of(Moving(1, 2)))  # pyright: ignore[reportArgumentType]
    lazy = types.ModuleType("lazy")
    monkeypatch.setitem(vars(lazy), "__getattr__", lambda name: pytest.fail("asked"))
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    for module, name in (("this", "Moving"), ("lazy", "Moving"), ("os", "path"), ("subprocess", "Popen")):
        record["types"][0][:2] = [module, name]
        with pytest.raises(errors.InvalidArgumentError, match=r"no class of this name|cannot be made"):
            containers.rebuild({"mean": 1, "count": 2, "nothing": ()}, containers.from_json(record))
    assert "this" not in sys.modules


def test_a_class_whose_fields_were_changed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what it has, and what was saved."""
    record = containers.to_json(containers.of(Moving(1, 2)))  # pyright: ignore[reportArgumentType]

    class Changed(NamedTuple):
        count: Any
        mean: Any
        nothing: Any = ()

    Changed.__qualname__ = "Moving"
    monkeypatch.setattr(sys.modules[__name__], "Moving", Changed)
    with pytest.raises(
        errors.InvalidArgumentError, match="has 'count', 'mean', 'nothing' here, and was saved with 'mean'"
    ):
        containers.rebuild({"mean": 1, "count": 2, "nothing": ()}, containers.from_json(record))


@pytest.mark.parametrize(
    "record",
    [
        None,
        3,
        {},
        {"types": [], "nodes": []},
        {"types": [[1]], "nodes": [[0, -1, 0]]},
        {"types": [["builtins", "tuple", [], None, False, ""]], "nodes": [[0, -1, 0], [0, 1, 0]]},
        {"types": [["builtins", "tuple", [], None, False, ""]], "nodes": [[0, -1, 0], [0, 0, None]]},
        {"types": [["builtins", "tuple", [], None, False, ""]], "nodes": [[0, -1, 0], [0, 0, "0"]]},
        {"types": [["builtins", "tuple", [["s", 0]], {"set": [1]}, False, ""]], "nodes": [[0, -1, 0]]},
        {"types": [["builtins", "tuple", [], None, False, ""]], "nodes": [[5, -1, 0]]},
    ],
)
def test_a_record_of_another_form_is_refused(record: Any) -> None:
    """With the one error that callers catch."""
    with pytest.raises(errors.InvalidArgumentError):
        containers.from_json(record)
