"""Restores array items: matches the target (`targets`), and reads what `assembly` asks for and makes values of.

The items of several epochs' readers, such as those of several nodes, are read at the same time (`restore_trees`).
"""

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from absl import logging

from epochckpt import _collector, _progress, _text, _units
from epochckpt._text import readable, shown
from epochckpt.arrays import mismatches
from epochckpt.arrays.assembly import PACK_BYTES, Assembly
from epochckpt.arrays.broadcast import Sharing
from epochckpt.arrays.reader import ArraySource, EpochReader, ReaderReads, Reads, read_together
from epochckpt.arrays.renames import Sources
from epochckpt.arrays.shardings import Shardings
from epochckpt.arrays.targets import LeafRequest, Matcher, RestoredAs, RestoredLeaf, as_saved, describe_leaf
from epochckpt.errors import InvalidArgumentError, MismatchError, UnknownNameError
from epochckpt.format import ArrayItem, Leaf
from epochckpt.format import tree as tree_lib

T = TypeVar("T")

_NAMED = 5


@dataclasses.dataclass(frozen=True)
class TreeRequest:
    """What to restore of an array item."""

    target: Any = None  # pytree of expected leaves; None for the tree as it was saved
    restore_args: Any = None  # pytree of `ocp.RestoreArgs` like the target, or in its place
    partial: bool = False  # see `Matcher`
    needs_values: bool = False  # the same
    fallback_sharding: Any = None  # for arrays whose saved sharding does not exist here
    layouts: bool = False  # arrays get the device-local layout of the target's leaves
    resize: bool = False  # arrays of another shape are cut, or padded with zeros, to the target's shape
    sources: Sources | None = None  # gives the recorded leaf for each leaf of the target; None: the one of its name
    sharing: Sharing | None = None  # where the processes of the job share what they read
    memory_limit_bytes: int | None = None  # see `StorageOptions.restore_memory_limit_bytes`
    pack_bytes: int = PACK_BYTES  # of small leaves that are read together


def restore_tree(reader: ArraySource, name: str, request: TreeRequest, shardings: Shardings | None = None) -> Any:
    """Restores one array item; `shardings` are the saved ones, if the epoch's record lacks them."""
    return _read_alone(reader, _restoring(reader, name, request, shardings))


def restore_trees(readers: Sequence[EpochReader], name: str, requests: Sequence[TreeRequest]) -> list[Any]:
    """Restores the array item of each reader; all are read at the same time, but where memory is bounded."""
    if any(request.memory_limit_bytes is not None for request in requests):
        return [restore_tree(reader, name, request) for reader, request in zip(readers, requests, strict=True)]
    pairs = enumerate(zip(readers, requests, strict=True))
    restoring = {number: _restoring(reader, name, request) for number, (reader, request) in pairs}
    trees: list[Any] = [None] * len(readers)
    while restoring:
        asked = []
        for number, steps in [*restoring.items()]:
            try:
                asked.append(ReaderReads(readers[number], next(steps)))
            except StopIteration as end:
                trees[number] = end.value
                del restoring[number]
        if asked:
            read_together(asked)
    return trees


def _read_alone(reader: ArraySource, steps: Generator[Reads, None, T]) -> T:
    """Reads what each step asks for; returns the result of the last one."""
    while True:
        try:
            reads = next(steps)
        except StopIteration as end:
            return end.value
        reader.read(reads.requests, reads.packs)
        del reads  # it holds buffers, which the next step lets go of


def _restoring(
    reader: ArraySource, name: str, request: TreeRequest, shardings: Shardings | None = None
) -> Generator[Reads, None, Any]:
    """Restores a tree in steps, so that several trees can be read at the same time (`restore_trees`).

    Each step allocates buffers and yields what is to be read into them. The caller reads it, and only then asks for the
    next step, which builds the leaves of these buffers. There are several steps where memory is bounded. The generator
    returns the tree.
    """
    assembly = Assembly(
        reader=reader,
        name=name,
        sharing=request.sharing,
        memory_limit_bytes=request.memory_limit_bytes,
        pack_bytes=request.pack_bytes,
    )
    item = assembly.item
    shardings = shardings or Shardings(item, request.fallback_sharding, jax.sharding.get_mesh())
    if request.target is None and request.restore_args is None:
        leaves = yield from assembly.run([as_saved(i, leaf, shardings) for i, leaf in enumerate(item.leaves)])
        where = f"{reader.folder}/epoch.json"
        return tree_lib.nest([(leaf.path, value) for leaf, value in zip(item.leaves, leaves, strict=True)], where)

    with _collector.paused():
        requests, treedef = _match(name, item, reader.record.epoch, request, shardings)
    leaves = yield from assembly.run(requests)
    tree = tree_lib.unflatten(treedef, leaves)
    return jax.tree.map(_laid_out, tree, request.target) if request.layouts else tree


def _match(
    name: str, item: ArrayItem, epoch: int, request: TreeRequest, shardings: Shardings
) -> tuple[list[LeafRequest], Any]:
    """Matches every leaf of the target, before anything is read; all differences are reported together."""
    pairs, treedef = tree_lib.flatten(request.target if request.target is not None else request.restore_args)
    names = [tree_lib.leaf_name(path) for path, _ in pairs]
    given = {} if request.target is None else _restore_args(name, request.restore_args, names, treedef)
    sources = None if request.sources is None else request.sources(item.leaves, [path for path, _ in pairs])
    matcher = Matcher(
        item=item,
        shardings=shardings,
        resize=request.resize,
        partial=request.partial,
        needs_values=request.needs_values,
    )
    requests = matcher.match(names, [target for _, target in pairs], given, sources)
    if matcher.rows:
        renames = mismatches.suggested(matcher.rows, [leaf.name for leaf in item.leaves], names)
        raise MismatchError(name, epoch, matcher.rows, renames)
    _progress.note("missing", len(matcher.absent))
    if matcher.absent and sources is None:
        _log_absent(f"checkpoint {epoch}, item {name}", matcher.absent, item.public_names)
    for each in requests:
        if isinstance(each, RestoredLeaf) and each.new_shape is not None:
            leaf = item.leaves[each.leaf]
            message = "checkpoint %d, item %s: leaf %s, %s, is cut or padded with zeros to %s, as strict=False asks"
            logging.warning(message, epoch, name, leaf.name, describe_leaf(leaf), list(each.new_shape))
    return requests, treedef


def _laid_out(leaf: Any, target: Any) -> Any:
    """An array in the device-local layout of its target, if that names one."""
    layout = getattr(target, "format", None)
    named = isinstance(leaf, jax.Array) and getattr(layout, "layout", None) is not None
    return jax.device_put(leaf, layout) if named else leaf


def _log_absent(where: str, absent: Sequence[str], known: Sequence[str]) -> None:
    """Logs the leaves that a partial restore leaves as they are: a name may be misspelt."""
    names = []
    for name in map(readable, absent[:_NAMED]):
        close = ", ".join(repr(shown(near)) for near in _text.near_names(name, known)[:3])
        names.append(f"{shown(name)!r}" + (f" (near: {close})" if close else ""))
    names += [f"… {len(absent) - _NAMED} more"] if len(absent) > _NAMED else []
    what = _units.several(len(absent), "leaf", "leaves")
    logging.warning("%s: %s of the target not in it, left as given: %s", where, what, ", ".join(names))


def _restore_args(item: str, tree: Any, names: Sequence[str], treedef: Any) -> dict[str, ocp.RestoreArgs]:
    """The `ocp.RestoreArgs` of each leaf by name: None, or an empty container, stands for the defaults.

    The target has this structure, and leaves with these names; that of the arguments is the same, as a rule.
    """
    if tree is None:
        return {}
    listed, found_treedef = tree_lib.flatten_leaves(tree)
    if found_treedef != treedef:
        names = [tree_lib.leaf_name(path) for path, _ in tree_lib.flatten(tree)[0]]
    found = {}
    for where, args in zip(names, listed, strict=True):
        if not isinstance(args, ocp.RestoreArgs):
            if tree_lib.leaf_kind(args) not in tree_lib.EMPTY_KINDS:
                problem = f"restore_args has a {type(args).__name__} at {where!r}; expected ocp.RestoreArgs"
                raise InvalidArgumentError(f"item {item!r}: {problem}")
            args = ocp.RestoreArgs()
        found[where] = args
    return found


def read_leaves(reader: ArraySource, name: str, patterns: str | Sequence[str]) -> dict[str, Any]:
    """Leaves whose names match any of the shell patterns, as NumPy arrays and Python values, by name."""
    names = Assembly(reader, name).item.public_names
    chosen: set[int] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        numbers = _text.matching(names, pattern)
        if names and not numbers:
            raise UnknownNameError(f"checkpoint {reader.record.epoch}, item {name!r}: {_text.no_match(pattern, names)}")
        chosen.update(numbers)
    values = read_values(reader, name, sorted(chosen))
    return dict(zip((names[i] for i in sorted(chosen)), values, strict=True))


def read_values(reader: ArraySource, name: str, numbers: Sequence[int]) -> list[Any]:
    """The leaves with these numbers, as NumPy arrays and Python values; typed keys as their data."""
    assembly = Assembly(reader, name)
    requests = [RestoredLeaf(number, _as_on_host(assembly.item.leaves[number])) for number in numbers]
    return _read_alone(reader, assembly.run(requests))


def _as_on_host(leaf: Leaf) -> RestoredAs:
    is_value = leaf.dtype is None or leaf.kind in ("longstr", "longbytes")
    return RestoredAs.PYTHON if is_value else RestoredAs.NUMPY
