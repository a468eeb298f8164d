"""What errors and warnings of the commonest mistakes say: what helps against this one, in words that a search finds."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt import errors

Save, Restore, PyTree = ocp.args.StandardSave, ocp.args.StandardRestore, ocp.args.PyTreeRestore
TREE = {"layers": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}, "step": 7}


@pytest.fixture
def manager(tmp_path: pathlib.Path) -> Any:
    """Epoch 0 of a small tree."""
    with ec.CheckpointManager(tmp_path / "run") as opened:
        opened.save(0, args=Save(TREE))
        opened.wait_until_finished()
        yield opened


@pytest.mark.parametrize(
    ("changed", "says", "not_says"),
    [
        ({"layers": {"kernel": np.ones((4, 3)), "bias": np.ones(3)}}, ["strict=False"], ["partial_restore"]),
        ({"new": np.ones(1)}, ["partial_restore=True", "rename="], ["strict=False"]),
        ({"step": "seven"}, ["the target what was saved"], ["partial_restore", "strict=False"]),
        ({"step": np.ones(1)}, ["strict=False"], ["partial_restore"]),
        ({"layers": {"kernel": np.ones((2, 3)), "bias": np.ones(3, bool) | True}, "step": True}, [], ["strict=False"]),
    ],
)
def test_a_mismatch_says_what_helps_against_it(
    manager: ec.CheckpointManager, changed: dict[str, Any], says: list[str], not_says: list[str]
) -> None:
    """Another shape, other names and another type have remedies of their own; one leaf is not `leaves`."""
    with pytest.raises(errors.MismatchError) as caught:
        manager.restore(0, args=Restore({**TREE, **changed}))
    text = str(caught.value)
    assert "(1 leaf)" in text
    assert all(part in text for part in says), text
    assert not any(part in text for part in not_says), text


def test_leaves_that_a_partial_restore_does_not_find_are_logged_by_name(
    manager: ec.CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    """With names that are near: one may be misspelt. Leaves without a value, and those that are found, are not."""
    target = {"layers": {"kernal": np.zeros((2, 3)), "bias": np.zeros(3), "gone": None}, "zzz": {"0": 5}}
    got = manager.restore(0, args=PyTree(target, partial_restore=True))
    assert got["layers"]["bias"].tolist() == [1, 1, 1]
    (said,) = [record.getMessage() for record in caplog.records if "left as given" in record.getMessage()]
    assert "checkpoint 0, item default: 2 leaves of the target" in said
    assert "'layers/kernal' (near: 'layers/kernel'" in said
    assert "'zzz/0'" in said
    assert "bias" not in said.replace("(near: 'layers/kernel', 'layers/bias')", "")
    assert "gone" not in said
    caplog.clear()
    manager.restore(0, args=PyTree({"step": 0}, partial_restore=True))
    assert not [record for record in caplog.records if "left as given" in record.getMessage()]


CASES: list[tuple[str, type[Exception], Callable[[ec.CheckpointManager], Any]]] = [
    ("Checkpoint at .*/run/5 not found", FileNotFoundError, lambda m: m.restore(5)),
    ("Checkpoint for step 0 already exists", ValueError, lambda m: m.save(0, args=Save(TREE), force=True)),
    (
        "User-provided restore item and on-disk value metadata tree structures do not match",
        ValueError,
        lambda m: m.restore(0, args=Restore({"other": np.ones(1)})),
    ),
    (
        "Requested shape.* is not compatible with the stored shape",
        ValueError,
        lambda m: m.restore(0, args=Restore({**TREE, "layers": {"kernel": np.ones((9, 3)), "bias": np.ones(3)}})),
    ),
    (
        'Item "other" was not found in the checkpoint',
        KeyError,
        lambda m: ec.CheckpointManager(m.directory, item_names=("state",)).restore(
            0, args=ocp.args.Composite(other=Restore())
        ),
    ),
    (
        "No steps found in .*/none",
        FileNotFoundError,
        lambda m: ec.CheckpointManager(m.directory / "none").restore(None),
    ),
    (
        "No steps found in .*/none",
        FileNotFoundError,
        lambda m: ec.CheckpointManager(
            m.directory / "none", options=ocp.CheckpointManagerOptions(create=False)
        ).restore(None),
    ),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_commonest_errors_have_the_words_of_orbax_in_them(manager: ec.CheckpointManager, number: int) -> None:
    """A search for what Orbax says finds ours, which is also of the built-in type that Orbax raises."""
    words, kind, call = CASES[number]
    with pytest.raises(kind, match=words) as caught:
        call(manager)
    assert isinstance(caught.value, errors.EpochCheckpointError)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_a_save_inside_of_a_transformed_function_says_so(manager: ec.CheckpointManager, transform: Any) -> None:
    """A tracer is refused by the leaf's name, also where an array of its kind was saved before; so is a traced step."""
    value = 1.0 if transform is jax.grad else jnp.ones(3)

    def save(x: Any) -> Any:
        manager.save(1, args=Save({"n": 3, "params": {"0": x}}))
        return x

    with pytest.raises(errors.InvalidArgumentError, match=r"leaf 'params/0' .*tracer.*jit"):
        transform(save)(value)

    def save_step(x: Any) -> Any:
        manager.save(x, args=Save(TREE))
        return x

    with pytest.raises(errors.InvalidArgumentError, match=r"step\) is a tracer.*jit"):
        transform(save_step)(value)
    assert manager.save(1, args=Save({"n": 3, "params": {"0": jnp.ones(3)}}))
    manager.wait_until_finished()
    with pytest.raises(errors.InvalidArgumentError, match="tracer"):
        jax.jit(lambda x: manager.save(2, args=Save({"n": 3, "params": {"0": x}})) or x)(value)
    assert manager.all_steps() == [0, 1]


def test_a_best_fn_may_be_any_callable(tmp_path: pathlib.Path) -> None:
    """A dataclass can be referenced weakly and has no hash; retention goes on beside an epoch that it cannot rank."""

    @dataclasses.dataclass
    class By:
        name: str

        def __call__(self, metrics: Any) -> float:
            return metrics[self.name]

    options = ocp.CheckpointManagerOptions(best_fn=By("acc"), max_to_keep=1, keep_checkpoints_without_metrics=False)
    with ec.CheckpointManager(tmp_path, options=options) as manager:
        for epoch, metrics in enumerate([{"loss": 1.0}, {"acc": 1.0}, {"acc": 2.0}]):
            manager.save(epoch, args=Save(TREE), metrics=metrics)
            manager.wait_until_finished()
        assert manager.best_step() == 2
        assert manager.all_steps() == [2]


@pytest.mark.parametrize("by", [lambda m: m["acc"], lambda m: m.get("acc"), lambda m: m["name"]])
def test_a_best_fn_that_finds_no_metric_is_told_once(
    tmp_path: pathlib.Path, by: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Each manager's own: with the metrics that there are, and what it means; not once per epoch, nor call."""
    for run in range(2):
        caplog.clear()
        options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: by(metrics), max_to_keep=2)
        with ec.CheckpointManager(tmp_path / str(run), options=options) as manager:
            for epoch in range(4):
                manager.save(epoch, args=Save(TREE), metrics={"accuracy": 0.5, "name": "x"})
                manager.wait_until_finished()
                assert manager.best_step() is None
            assert manager.all_steps() == [0, 1, 2, 3]
        (said,) = [text for record in caplog.records if "best_fn" in (text := record.getMessage())]
        assert "checkpoint 0" in said
        assert "'accuracy', 'name'" in said
        assert "kept" in said
