"""Stock Orbax reads what we wrote, in a process where epochckpt cannot be imported."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import flax.serialization
import jax
import orbax.checkpoint as ocp

from tests.support import stock_states

assert "epochckpt" not in sys.modules
sys.modules["epochckpt"] = None  # type: ignore[assignment]  # an import of it now fails


def read(directory: str, epoch: int, state: str) -> dict[str, list[str]]:
    """What differs, by reader; an empty list is a success."""
    with contextlib.suppress(ImportError):
        import epochckpt  # noqa: F401

        raise AssertionError("epochckpt can be imported here")
    expected = stock_states.STATES[state]()
    found: dict[str, list[str]] = {}
    for name, reader in READERS.items():
        if name.startswith("v1") and state != "linen" and not stock_states.V1_HAS_KEYS:
            continue
        if name in BY_OTHER_NAMES and not os.path.exists(f"{directory}/{epoch}/state"):
            continue  # an export has the name of v0 alone, as a step that stock Orbax's v0 wrote
        if reader is _evaluator and jax.process_count() > 1:
            continue  # each process would make and remove the same `_SNAPSHOTS/5`, in each other's way
        for reshard in (False, True):
            target = stock_states.abstract(expected, reshard)
            key = f"{name}, resharded" if reshard else name
            try:
                found[key] = stock_states.differences(reader(directory, epoch, target), expected)
            except Exception as error:
                found[key] = [f"{type(error).__name__}: {error}"]
    return found


def _manager(directory: str, epoch: int, target: Any) -> Any:
    with ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.latest_step() == epoch
        return manager.restore(epoch, args=ocp.args.StandardRestore(target))


def _composite(directory: str, epoch: int, target: Any) -> Any:
    with ocp.CheckpointManager(directory, item_names=("default",)) as manager:
        args = ocp.args.Composite(default=ocp.args.StandardRestore(target))
        return manager.restore(epoch, args=args)["default"]


def _pytree_args(target: Any) -> Any:
    return ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))


def _evaluator(directory: str, epoch: int, target: Any) -> Any:
    steps = ocp.checkpoint_utils.checkpoints_iterator(directory, timeout=1)
    assert next(steps) == epoch
    return _manager(directory, epoch, target)


def _trainer(directory: str, epoch: int, target: Any) -> Any:
    with ocp.v1.training.Checkpointer(directory) as checkpointer:
        assert checkpointer.latest.step == epoch
        return checkpointer.load(epoch, target)


READERS: dict[str, Callable[[str, int, Any], Any]] = {
    "v0 CheckpointManager": _manager,
    "v0 CheckpointManager with items": _composite,
    "v0 checkpoints_iterator": _evaluator,
    "v0 StandardCheckpointer": lambda d, e, t: ocp.StandardCheckpointer().restore(f"{d}/{e}/default", t),
    "v0 PyTreeCheckpointer": lambda d, e, t: ocp.PyTreeCheckpointer().restore(f"{d}/{e}/default", args=_pytree_args(t)),
    "v1 load_checkpointables": lambda d, e, t: ocp.v1.load_checkpointables(f"{d}/{e}", {"default": t})["default"],
}
BY_OTHER_NAMES = ("v1 Checkpointer", "v1 load_pytree")  # they look for `state` and for `pytree`
if hasattr(ocp.v1, "load"):  # not in older ones
    READERS["v1 load"] = lambda d, e, t: ocp.v1.load(f"{d}/{e}", t)
    READERS["v1 Checkpointer"] = _trainer
else:
    READERS["v1 load_pytree"] = lambda d, e, t: ocp.v1.load_pytree(f"{d}/{e}", t)


def without_target(directory: str, epoch: int) -> dict[str, Any]:
    """What stock Orbax finds where it is told nothing: shardings, keys, values, metadata, metrics, JSON."""
    with ocp.CheckpointManager(directory) as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(), config=ocp.args.JsonRestore())
        got = manager.restore(epoch, args=args)
        expected = stock_states.plain()
        shardings = jax.tree.map(lambda x: x.sharding if isinstance(x, jax.Array) else None, got.state)
        wanted = jax.tree.map(lambda x: x.sharding if isinstance(x, jax.Array) else None, expected)
        meta = manager.item_metadata(epoch)
        assert meta is not None
        return {
            "differences": stock_states.differences(got.state, expected),
            "shardings": shardings == wanted,
            "config": got.config,
            "shape": list(meta["state"]["params"]["both"].shape),
            "metrics": manager.metrics(epoch),
            "custom": manager.metadata(epoch).custom_metadata,
        }


def no_arguments(directory: str, epoch: int) -> dict[str, Any]:
    """`restore(step)` with nothing else, as in Orbax's guides, and what it knows then."""
    with ocp.CheckpointManager(directory) as manager:
        got = manager.restore(epoch)
        steps, metadata = manager.all_steps(), manager.metadata(epoch)
    state = got if isinstance(got, dict) else got["state"]
    found = {"differences": stock_states.differences(state, stock_states.plain()), "steps": list(steps)}
    if not isinstance(got, dict):
        found |= {"config": got["config"], "custom": metadata.custom_metadata}
    if hasattr(ocp.v1, "load"):
        name = "default" if isinstance(got, dict) else "state"
        again = ocp.v1.load_checkpointables(f"{directory}/{epoch}")[name]
        found["v1"] = stock_states.differences(again, stock_states.plain())
    return found


def subset(directory: str, epoch: int) -> list[str]:
    """Stock Orbax's partial restore of one subtree."""
    expected = {"list": stock_states.plain()["list"]}
    target = stock_states.abstract(expected)
    args = ocp.args.PyTreeRestore(
        target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        return stock_states.differences(checkpointer.restore(f"{directory}/{epoch}/state", args=args), expected)


def exported(directories: dict[str, str], epoch: int) -> dict[str, dict[str, list[str]]]:
    """What differs in exports of several states, by state and reader; one more reader is given no argument at all."""
    out = {}
    for state, directory in directories.items():
        out[state] = read(directory, epoch, state)
        with ocp.CheckpointManager(directory) as manager:
            got = manager.restore(epoch)
        expected = stock_states.STATES[state]()
        if state != "plain":  # without a target, custom nodes are dicts and lists
            got = jax.tree.leaves(got)
            expected = jax.tree.leaves(expected)
            got, expected = (dict(enumerate(sorted(map(_bits, leaves)))) for leaves in (got, expected))
        else:
            v1 = ocp.v1.load_checkpointables(f"{directory}/{epoch}")["default"]
            out[state]["v1 without arguments"] = stock_states.differences(v1, expected)
        out[state]["without arguments"] = stock_states.differences(got, expected)
    return out


def _bits(leaf: Any) -> tuple[str, str]:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return str(jax.numpy.asarray(leaf).dtype), str(jax.device_get(leaf).tolist() if hasattr(leaf, "shape") else leaf)


def everything(directory: str, epoch: int) -> dict[str, Any]:
    """Items, metrics and metadata of an epoch and its directory, found without being told anything."""
    with ocp.CheckpointManager(directory) as manager:
        got = manager.restore(epoch)
        return {
            "items": sorted(got.keys()),
            "differences": stock_states.differences(got["state"], stock_states.plain()),
            "config": got["config"],
            "metrics": manager.metrics(epoch),
            "custom": manager.metadata(epoch).custom_metadata,
            "root": manager.metadata().custom_metadata,
        }


def flax_states(directories: dict[str, str], epoch: int) -> dict[str, list[str]]:
    """What differs in epochs that were imported from flax's files, restored without a target, by directory."""
    found = {}
    for state, directory in directories.items():
        with ocp.CheckpointManager(directory) as manager:
            got = manager.restore(epoch, args=ocp.args.StandardRestore())
        expected = stock_states.STATES[state]()
        back = flax.serialization.from_state_dict(expected, got)
        found[state] = stock_states.differences(*(jax.tree.map(jax.numpy.asarray, tree) for tree in (back, expected)))
    return found
