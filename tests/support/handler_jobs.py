"""Handlers of other people, and what processes of a job do with them; runs under `tests.support.worker`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import epochckpt as ec


class Reader:
    """A data iterator with a position: the kind of thing that Grain's handler saves."""

    def __init__(self, position: int = 0):
        self.position = position

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class ReaderHandler:
    """Saves a Reader per process, in a file that names process and count. Like Grain's, it has no base class."""

    def save(self, directory: epath.Path, item: Any = None, args: Any = None) -> None:
        state = (args.item if args else item).get_state()
        path = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        path.write_text(json.dumps(state))

    def restore(self, directory: epath.Path, item: Any = None, args: Any = None) -> Any:
        path = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
        if not path.exists():
            raise ValueError(f"{path.name} does not exist: was it saved by another number of processes?")
        reader = args.item if args else item
        reader.set_state(json.loads(path.read_text()))
        return reader

    def finalize(self, directory: epath.Path) -> None: ...

    def close(self) -> None: ...

    @classmethod
    def typestr(cls) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"


@ocp.args.register_with_handler(ReaderHandler, for_save=True)  # type: ignore[arg-type]
@dataclasses.dataclass
class ReaderSave(ocp.args.CheckpointArgs):
    item: Any


@ocp.args.register_with_handler(ReaderHandler, for_restore=True)  # type: ignore[arg-type]
@dataclasses.dataclass
class ReaderRestore(ocp.args.CheckpointArgs):
    item: Any


class OneNameHandler(ReaderHandler):
    """Writes the same file on every process: they would overwrite each other."""

    def save(self, directory: epath.Path, item: Any = None, args: Any = None) -> None:
        (directory / "state").write_text("mine")


@ocp.args.register_with_handler(OneNameHandler, for_save=True)  # type: ignore[arg-type]
@dataclasses.dataclass
class OneNameSave(ocp.args.CheckpointArgs):
    item: Any = None


@ocp.args.register_with_handler(OneNameHandler, for_restore=True)  # type: ignore[arg-type]
@dataclasses.dataclass
class OneNameRestore(ocp.args.CheckpointArgs):
    item: Any = None


def state() -> dict[str, Any]:
    """A sharded array, so that the job is a real one."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    values = np.arange(24.0, dtype=np.float32)
    return {"w": jax.make_array_from_callback((24,), NamedSharding(mesh, PartitionSpec("x")), lambda i: values[i])}


def own_value() -> dict[str, Any]:
    """A value that only this process has, of a structure of its own."""
    me = jax.process_index()
    local = jax.device_put(np.full(3 + me, me, np.float32), jax.local_devices()[0])
    return {
        "seed": 100 + me,
        "local": local,
        "queue": [np.arange(me + 1), f"text {me}"],
        "key": {"a": me} if me else {},
    }


def save_all(directory: str) -> dict[str, Any]:
    """Saves arrays, an iterator per process, JSON and node-local values; then a save that must fail."""
    me = jax.process_index()
    with ec.CheckpointManager(directory) as manager:
        args = {
            "state": ocp.args.StandardSave(state()),
            "iter": ReaderSave(Reader(10 + me)),
            "config": ocp.args.JsonSave({"lr": 0.1}),
            "own": ec.args.NodeSave(own_value()),
        }
        manager.save(3, args=ocp.args.Composite(**args))
        manager.wait_until_finished()
        manager.save(4, args=ocp.args.Composite(state=args["state"], clash=OneNameSave()))
        try:
            manager.wait_until_finished()
            clash = "committed"
        except ec.errors.SaveError as error:
            clash = str(error)
        return {"steps": list(manager.all_steps()), "clash": clash, "ok": manager.verify(3).ok}


def restore_all(directory: str, same_count: bool) -> dict[str, Any]:
    """Restores what each process saved; on another count what is refused, and what `reshard` makes of it."""
    reader = Reader()
    found: dict[str, Any] = {}
    with ec.CheckpointManager(directory) as manager:
        args: dict[str, Any] = {"config": None, "state": ocp.args.StandardRestore(state())}
        if same_count:
            args |= {"iter": ReaderRestore(reader), "own": ec.args.NodeRestore(own_value())}
        else:
            for name, arg in (("iter", ReaderRestore(reader)), ("own", ec.args.NodeRestore())):
                try:
                    manager.restore(3, args=ocp.args.Composite(**{name: arg}))
                except ValueError as error:
                    found[f"{name} refused"] = str(error)
            args["own"] = ec.args.NodeRestore(reshard=lambda old, n, m: [[[o["seed"] for o in old], n, m]] * m)
        got = manager.restore(3, args=ocp.args.Composite(**args))
    own = got["own"]
    if same_count:
        expected = own_value()
        same = jax.tree.map(lambda a, b: bool(np.all(a == b)), own, expected)
        own = all(jax.tree.leaves(same)) and jax.tree.structure(own) == jax.tree.structure(expected)
    shards = all(np.array_equal(s.data, np.arange(24.0)[s.index]) for s in got["state"]["w"].addressable_shards)
    return found | {"config": got["config"], "own": own, "reader": reader.position, "state": shards}
