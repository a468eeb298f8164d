"""What was restored into a target is planned in the background; its first save finds the plan, or makes it."""

import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.arrays import plan as plan_lib

State = dict[str, Any]


def state_of(value: float = 1.0) -> State:
    keys = jax.random.split(jax.random.key(3), 2)
    return {"params": {"w": jnp.full((4, 3), value), "b": np.full(5, value)}, "none": None, "keys": keys, "step": 7}


def abstract(state: State) -> State:
    arrays = {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=state["params"]["w"].sharding)}
    return {**state, "params": {**state["params"], **arrays}}


class Planned:
    """Counts the plans that are made, and the threads that make them; each waits until it `may_go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.by: list[int] = []
        self.began, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.error: Exception | None = None
        make = plan_lib.plan_item

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.by.append(threading.get_ident())
            self.began.set()
            self.may_go_on.wait()
            if self.error is not None and self.by[-1] != threading.main_thread().ident:
                raise self.error
            return make(*args, **kwargs)

        monkeypatch.setattr(plan_lib, "plan_item", counted)


@pytest.fixture
def planned(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state_of()))
    return Planned(monkeypatch)


def check_saved(folder: pathlib.Path, epoch: int, state: State) -> None:
    with ec.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(read_only=True)) as reader:
        found = reader.restore(epoch, args=ocp.args.StandardRestore(abstract(state)))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        typed = isinstance(old, jax.Array) and jnp.issubdtype(old.dtype, jax.dtypes.prng_key)
        assert np.array_equal(*map(jax.random.key_data, (new, old))) if typed else np.array_equal(new, old)


@pytest.mark.parametrize("many", [False, True])
def test_the_first_save_of_a_restored_tree_finds_its_plan(tmp_path: pathlib.Path, planned: Planned, many: bool) -> None:
    """It was made once, in the background, from an abstract target; also for an item of several."""
    item = "state" if many else "default"

    def args(kind: Any, tree: State) -> Any:
        return ocp.args.Composite(**{item: kind(tree)}) if many else kind(tree)

    with ec.CheckpointManager(tmp_path / "named" if many else tmp_path) as manager:
        if many:
            manager.save(0, args=args(ocp.args.StandardSave, state_of()))
            manager.wait_until_finished()
            manager.close()
            manager = ec.CheckpointManager(tmp_path / "named")
        planned.by.clear()
        restored = manager.restore(None, args=args(ocp.args.StandardRestore, abstract(state_of())))
        state = restored[item] if many else restored
        ((_, future),) = manager.components.saves.planner._ahead
        future.result()
        state = {**state, "params": jax.tree.map(lambda x: x * 2, state["params"])}
        manager.save(1, args=args(ocp.args.StandardSave, state))
        manager.restore(0, args=args(ocp.args.StandardRestore, abstract(state_of())))  # nothing is planned again
        manager.close()
    (by,) = planned.by
    assert by != threading.get_ident()
    if not many:
        check_saved(tmp_path, 1, {**state_of(), "params": state_of(2.0)["params"]})


def test_another_tree_is_planned_by_its_save(tmp_path: pathlib.Path, planned: Planned) -> None:
    """One that has another shape, or lacks a leaf, does not take the plan of the restored one."""
    with ec.CheckpointManager(tmp_path) as manager:
        state = manager.restore(0, args=ocp.args.StandardRestore(abstract(state_of())))
        larger = {**state, "params": {**state["params"], "b": np.arange(6.0)}}
        manager.save(1, args=ocp.args.StandardSave(larger))
    assert planned.by.count(threading.get_ident()) == 1
    check_saved(tmp_path, 1, larger)


def test_a_save_makes_the_plan_that_failed_in_the_background(tmp_path: pathlib.Path, planned: Planned) -> None:
    planned.error = RuntimeError("no plan")
    with ec.CheckpointManager(tmp_path) as manager:
        state = manager.restore(0, args=ocp.args.StandardRestore(abstract(state_of())))
        manager.save(1, args=ocp.args.StandardSave(state))
    assert planned.by[-1] == threading.get_ident()
    check_saved(tmp_path, 1, state)


def test_a_save_waits_for_a_plan_under_way(tmp_path: pathlib.Path, planned: Planned) -> None:
    with ec.CheckpointManager(tmp_path) as manager:
        planned.may_go_on.clear()
        state = manager.restore(0, args=ocp.args.StandardRestore(abstract(state_of())))
        planned.began.wait()
        key, future = manager.components.saves.planner._ahead.pop()

        class Watched:  # the plan is made once the save asks for it
            def __getattr__(self, name: str) -> Any:
                planned.may_go_on.set()
                return getattr(future, name)

        manager.components.saves.planner._ahead.append((key, Watched()))  # type: ignore[arg-type]
        manager.save(1, args=ocp.args.StandardSave(state))
    assert threading.get_ident() not in planned.by[:1]
    check_saved(tmp_path, 1, state)


def test_a_manager_closes_while_it_plans(tmp_path: pathlib.Path, planned: Planned) -> None:
    planned.may_go_on.clear()
    with ec.CheckpointManager(tmp_path) as manager:
        manager.restore(0, args=ocp.args.StandardRestore(abstract(state_of())))
        planned.began.wait()
        ((_, future),) = manager.components.saves.planner._ahead
    assert not future.done()
    planned.may_go_on.set()
    future.result()


def test_a_plan_holds_no_array(tmp_path: pathlib.Path, planned: Planned) -> None:
    """While it is made, and after that, what was restored belongs to the caller alone: it may be deleted."""
    planned.may_go_on.clear()
    with ec.CheckpointManager(tmp_path) as manager:
        state = manager.restore(0, args=ocp.args.StandardRestore(abstract(state_of())))
        planned.began.wait()
        ((_, future),) = manager.components.saves.planner._ahead
        state["params"]["w"].delete()
        planned.may_go_on.set()
        assert future.result().nbytes == 4 * 3 * 4 + 5 * 8 + 2 * 2 * 4
        with pytest.raises(ec.errors.InvalidArgumentError, match=r"params/w.*deleted or donated"):
            manager.save(1, args=ocp.args.StandardSave(state))


@jax.tree_util.register_pytree_with_keys_class
class ByContent:
    """A node that orders its children by what they are, and does not mind what it is made of."""

    def __init__(self, **children: Any):
        self.children = children

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[str, ...]]:
        names = sorted(self.children, reverse=not all(hasattr(c, "shape") for c in self.children.values()))
        return [(jax.tree_util.GetAttrKey(name), self.children[name]) for name in names], tuple(names)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: Any) -> "ByContent":
        return cls(**dict(zip(names, children, strict=True)))


def test_leaves_have_the_names_that_their_node_gives_them(tmp_path: pathlib.Path) -> None:
    """A plan made ahead has the names of the tree itself, not those of one with other leaves."""
    first = ByContent(a=np.zeros(3), b=np.ones(3))
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(first))
    with ec.CheckpointManager(tmp_path) as manager:
        state = manager.restore(0, args=ocp.args.StandardRestore(first))
        manager.components.saves.planner._ahead[0][1].result()
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        found = manager.restore(1, args=ocp.args.StandardRestore(first)).children
    assert (found["a"].tolist(), found["b"].tolist()) == ([0] * 3, [1] * 3)


@pytest.mark.parametrize("restored", [False, True])
def test_keys_that_compare_equal_are_two_trees(tmp_path: pathlib.Path, restored: bool) -> None:
    """`1 == True`: a tree does not take the names of one that was saved, or restored, before."""
    trees = [{1: np.zeros(2), 2: np.ones(2)}, {True: np.zeros(2), 2: np.ones(2)}]
    manager = ec.CheckpointManager(tmp_path)
    manager.save(0, args=ocp.args.StandardSave(trees[0]))
    if restored:
        manager.close()
        manager = ec.CheckpointManager(tmp_path)
        manager.restore(0, args=ocp.args.StandardRestore(trees[0]))
    with manager:
        manager.save(1, args=ocp.args.StandardSave(trees[1]))
        manager.wait_until_finished()
        assert [*map(type, manager.restore(1, args=ocp.args.StandardRestore()))] == [bool, int]


@pytest.mark.parametrize("how", ["read only", "no target"])
def test_nothing_is_planned_that_will_not_be_saved(tmp_path: pathlib.Path, planned: Planned, how: str) -> None:
    options = ocp.CheckpointManagerOptions(read_only=how == "read only")
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        target = None if how == "no target" else abstract(state_of())
        manager.restore(0, args=ocp.args.StandardRestore(target))
        assert not manager.components.saves.planner._ahead
    assert not planned.by
