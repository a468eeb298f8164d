"""The nodes of a job. Each process hosts one node; in a job of one process, it may host several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from epochckpt.errors import InvalidArgumentError
from epochckpt.format import paths


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The nodes of a job, as one of its processes sees them. With several processes, process i hosts node i."""

    names: tuple[str, ...] = ("process_0",)  # by node number
    process: int = 0  # number of this process
    processes: int = 1
    given: bool = False  # a process passed its names to the manager's constructor (`node=`)
    ids: tuple[int, ...] = ()  # JAX process index by process number; empty if the two are equal

    def __len__(self) -> int:
        return len(self.names)

    @property
    def hosted(self) -> range:
        """Numbers of the nodes that this process hosts. The first one writes the arrays of the process."""
        return range(len(self.names)) if self.processes == 1 else range(self.process, self.process + 1)

    @property
    def hosted_names(self) -> list[str]:
        """Names of the nodes that this process hosts."""
        return [self.names[number] for number in self.hosted]

    @functools.cached_property
    def folders(self) -> frozenset[str]:
        """Names of the folders of all nodes."""
        return frozenset(map(paths.folder_name, self.names))

    @property
    def rows(self) -> list[tuple[str, int]]:
        """(name, JAX process index) by node number."""
        one = self.processes == 1
        return [(name, self.id_of(0 if one else number)) for number, name in enumerate(self.names)]

    @property
    def writers(self) -> dict[int, int]:
        """The number of each process's first node, by JAX process index."""
        return {self.id_of(process): process for process in range(self.processes)}

    def id_of(self, process: int) -> int:
        """The JAX process index of a process."""
        return self.ids[process] if self.ids else process

    def renamed(self, names: Sequence[str]) -> Nodes:
        """The same processes with these nodes; InvalidArgumentError for names that do not fit them."""
        checked = check_names(names)
        if checked == self.names:
            return self
        if self.given:
            raise InvalidArgumentError(
                f"a manager with other nodes: this one was opened (node=) with {', '.join(self.names)}; asked for were "
                f"{', '.join(checked)}. Construct it without node=, or with these names"
            )
        if self.processes not in (1, len(checked)):
            raise InvalidArgumentError(
                f"{len(checked)} nodes ({', '.join(checked)}) in a job of {self.processes} processes: expected one "
                "node per process, in their order, or a single process that hosts all of them"
            )
        return dataclasses.replace(self, names=checked)


def check_names(names: str | Sequence[str]) -> tuple[str, ...]:
    """One or several names of nodes as a tuple; InvalidArgumentError for none, an unusable or a repeated one."""
    listed = (names,) if isinstance(names, str) else tuple(names)
    if not listed:
        raise InvalidArgumentError("no node names; expected at least one")
    seen: set[str] = set()
    for name in listed:
        if paths.check_node_name(name) in seen:
            raise InvalidArgumentError(f"two nodes have the name {name!r} (of {list(listed)}); names must be unique")
        seen.add(name)
    return listed
