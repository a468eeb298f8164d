"""Each option that is honoured shows in what happens; dropped, something else happens."""

import dataclasses
import datetime
import os
import pathlib
import stat
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_managers import FixedIntervalPolicy, LatestN, preservation_policy

import epochckpt as ec
from epochckpt.agreement import CollectiveCalls, coordination
from epochckpt.manager.readers import shared_reads
from epochckpt.orbax import options as checks
from epochckpt.saving import opening
from epochckpt.storage import Store
from epochckpt.testing import Faults, StoreCall
from epochckpt.tiers import layout_of
from tests.support.in_memory import InMemory, Service
from tests.support.orbax_options import fields_of, option

WAIT_SECS = 30.0
LOSSES = (5.0, 1.0, 3.0, 4.0, 2.0)
Options = ocp.CheckpointManagerOptions
Look = Callable[[pathlib.Path, Any], Any]


def args() -> Any:
    return ocp.args.StandardSave({"a": jnp.ones(3)})


def run(directory: pathlib.Path, options: Any) -> list[int]:
    """Five epochs, each committed before the next; which are left."""
    with ec.CheckpointManager(directory, options=options) as manager:
        for epoch, loss in enumerate(LOSSES):
            manager.save(epoch, args=args(), metrics=None if epoch == 2 else {"loss": loss})
            manager.wait_until_finished()
        return list(manager.all_steps())


def best(directory: pathlib.Path, options: Any) -> int | None:
    run(directory, options)
    with ec.CheckpointManager(directory, options=options) as manager:
        return manager.best_step()


def folder(directory: pathlib.Path, options: Any) -> list[str]:
    """The name of an epoch's folder."""
    with ec.CheckpointManager(directory, options=options) as manager:
        manager.save(7, args=args())
    return sorted(name for name in os.listdir(directory) if "7" in name)


def shares(directory: pathlib.Path, options: Any) -> bool:
    """Whether two processes would share what they read."""
    del directory
    job = coordination.Coordinator()
    job.ids = (0, 1)
    calls = CollectiveCalls(job, "", str)
    return shared_reads(job, calls, ec.StorageOptions(), options.single_host_load_and_broadcast) is not None


def opens(directory: pathlib.Path, options: Any) -> bool:
    """Whether opening a directory that is not there makes it."""
    with ec.CheckpointManager(directory / "new", options=options):
        return (directory / "new").exists()


def deleted(directory: pathlib.Path, options: Any) -> list[str]:
    """Where a deleted epoch went."""
    with ec.CheckpointManager(directory, options=options) as manager:
        manager.save(7, args=args())
        manager.wait_until_finished()
        manager.delete(7)
        manager.wait_until_finished()
    return sorted(str(p.relative_to(directory)) for p in directory.glob("*/7"))


def saves(directory: pathlib.Path, options: Any) -> bool:
    ec.CheckpointManager(directory).close()
    with ec.CheckpointManager(directory, options=options) as manager:
        return manager.save(0, args=args())


def held(directory: pathlib.Path, options: Any) -> tuple[bool, list[bool]]:
    """While a commit is held up: whether save() returned before it was let go, and whether the next was begun."""
    gate = threading.Event()
    order: list[bool] = []

    def wait(_: StoreCall) -> None:
        order.append(gate.wait(1.0 if options.enable_async_checkpointing is False else WAIT_SECS))

    with Faults().everywhere() as faults, ec.CheckpointManager(directory, options=options) as manager:
        faults.before(Store.rename, wait, where=lambda call: call.target in ("0", "1"))
        begun = [manager.save(0, args=args()), manager.save(1, args=args())]
        gate.set()
        manager.wait_until_finished()
    return order[0], begun


def told(directory: pathlib.Path, options: Any) -> int:
    """How often the callback of `async_options` was called."""
    CALLS.clear()
    run(directory, options)
    return len(CALLS)


CALLS: list[None] = []


def modes(directory: pathlib.Path, options: Any) -> set[int]:
    """Permission bits of every folder."""
    before = os.umask(0o022)
    try:
        with ec.CheckpointManager(directory / "run", options=options) as manager:
            manager.save(7, args=ocp.args.Composite(a=args(), b=ocp.args.JsonSave({})))
    finally:
        os.umask(before)
    return {stat.S_IMODE(os.stat(folder).st_mode) for folder, _, _ in os.walk(directory / "run")}


def root_metadata(directory: pathlib.Path, options: Any) -> dict[str, Any]:
    with ec.CheckpointManager(directory, options=options, metadata={"v": 1}) as manager:
        return dict(manager.metadata().custom_metadata or {})


def metrics(directory: pathlib.Path, options: Any) -> Any:
    run(directory, options)
    with ec.CheckpointManager(directory, options=options) as manager:
        return manager.metrics(4)


def refusal(directory: pathlib.Path, options: Any) -> str:
    try:
        ec.CheckpointManager(directory, options=options).close()
    except ec.errors.InvalidArgumentError as error:
        return str(error).split(":")[0]
    return "opened"


def bound(directory: pathlib.Path, options: Any) -> float:
    return checks.storage_options(options, None).save_timeout_secs


class Told(InMemory):
    """A process of two, which hears nothing of the other one."""

    def __init__(self) -> None:
        super().__init__(Service(), 1, 2)
        self.unheard = ("",)
        self.keys: list[str] = []

    def put(self, key: str, value: Any, again: bool = False) -> None:
        self.keys.append(key)
        super().put(key, value, again)


def keys(directory: pathlib.Path, options: Any) -> str:
    """Where a process of a job tells that it opens a directory."""
    told = Told()
    kind = layout_of(ec.StorageOptions(), options).kind
    with pytest.raises(ec.errors.CoordinationTimeoutError):
        opening.open_directory(directory, options, ec.StorageOptions(), None, told, kind=kind)
    return "/".join(told.keys[0].split("/")[:3])


def loss(found: Mapping[str, Any]) -> float:
    return found["loss"]


@dataclasses.dataclass
class Case:
    """An option at work.

    Attributes:
        value: of the option.
        look: what shows it.
        expected: what is seen with it.
        beside: other options that it needs.
    """

    value: Any
    look: Look
    expected: Any
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)


RANKED = {"best_fn": loss, "max_to_keep": 1}
CASES: dict[str, Case] = {
    "save_interval_steps": Case(2, run, [0, 2, 4]),
    "max_to_keep": Case(2, run, [3, 4]),
    "keep_time_interval": Case(datetime.timedelta(microseconds=1), run, [0, 1, 2, 3, 4], {"max_to_keep": 1}),
    "keep_period": Case(2, run, [0, 2, 4], {"max_to_keep": 1}),
    "best_fn": Case(loss, run, [0, 2, 4], {"max_to_keep": 1}),
    "best_mode": Case("min", best, 1, {"best_fn": loss}),
    "keep_checkpoints_without_metrics": Case(False, run, [0, 4], RANKED),
    "step_prefix": Case("epoch", folder, ["epoch_7"]),
    "step_format_fixed_length": Case(5, folder, ["00007"]),
    "step_name_format": Case(ocp.path.step.standard_name_format(step_prefix="at"), folder, ["at_7"]),
    "create": Case(False, opens, False),
    "save_on_steps": Case([1, 3], run, [0, 1, 3], {"save_interval_steps": 100}),
    "todelete_subdir": Case("bin", deleted, ["bin/7"]),
    "read_only": Case(True, saves, False),
    "enable_async_checkpointing": Case(False, held, (False, [True, True])),
    "async_options.timeout_secs": Case(7, bound, 7),
    "async_options.post_finalization_callback": Case(lambda: CALLS.append(None), told, 5),
    "should_save_fn": Case(lambda step, last: step % 3 == 1, run, [1, 4]),
    "file_options.path_permission_mode": Case(0o750, modes, {0o750}),
    "save_root_metadata": Case(False, root_metadata, {}),
    "save_decision_policy": Case(FixedIntervalPolicy(3), run, [0, 3]),
    "preservation_policy": Case(LatestN(2), run, [3, 4]),
    "prevent_write_metrics": Case(True, metrics, None),
    "enable_should_save_is_saving_in_progress_check": Case(
        False,
        held,
        (True, [True, True]),
        {"save_decision_policy": ocp.checkpoint_managers.ContinuousCheckpointingPolicy()},
    ),
    "multiprocessing_options.primary_host": Case(1, refusal, "multiprocessing_options"),
    "multiprocessing_options.active_processes": Case({0, 1}, refusal, "multiprocessing_options"),
    "single_host_load_and_broadcast": Case(True, shares, True),
    "multiprocessing_options.barrier_sync_key_prefix": Case("mine", keys, "epochckpt/open/mine"),
}
POLICIES: dict[str, tuple[Callable[[Any], Any], list[int]]] = {  # of LOSSES, and what is left
    "PreserveAll": (lambda kind: kind(), [0, 1, 2, 3, 4]),
    "LatestN": (lambda kind: kind(2), [3, 4]),
    "LatestDuration": (lambda kind: kind(datetime.timedelta(days=1)), [0, 1, 2, 3, 4]),
    "EveryNSeconds": (lambda kind: kind(10_000), [0, 4]),
    "EveryNSteps": (lambda kind: kind(2), [0, 2, 4]),
    "EveryNStepsClosest": (lambda kind: kind(3), [0, 3, 4]),
    "CustomSteps": (lambda kind: kind([1, 3]), [1, 3, 4]),
    "BestN": (lambda kind: kind(get_metric_fn=loss, n=1), [0, 2, 4]),
    "AnyPreservationPolicy": (lambda kind: kind([LatestN(1)]), [4]),
}


def test_every_honoured_option_has_a_case() -> None:
    """Nothing is called honoured that is not looked at here."""
    assert CASES.keys() == checks.HONOURED


def test_every_preservation_policy_of_the_installed_orbax_is_asked(tmp_path: pathlib.Path) -> None:
    """One of a newer Orbax needs a case here; older ones lack some."""
    base = preservation_policy.PreservationPolicy
    known = {n: k for n, k in vars(preservation_policy).items() if isinstance(k, type) and base in k.__mro__[1:]}
    assert known.keys() <= POLICIES.keys()
    for name, kind in known.items():
        make, left = POLICIES[name]
        assert run(tmp_path / name, Options(preservation_policy=make(kind))) == left, name
    if "LatestDuration" in known:
        options = Options(preservation_policy=known["LatestDuration"](datetime.timedelta(0)))
        assert run(tmp_path / "none", options) == [4], "the newest is never deleted"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(checks.HONOURED & fields_of(Options)))
def test_the_option_does_what_it_says_and_dropping_it_is_seen(tmp_path: pathlib.Path, name: str) -> None:
    """With it what is expected, without it something else."""
    case = CASES[name]
    assert case.look(tmp_path / "with", Options(**option(name, case.value), **case.beside)) == case.expected
    assert case.look(tmp_path / "without", Options(**case.beside)) != case.expected
