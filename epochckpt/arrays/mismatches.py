"""Which leaves of a target that does not fit are most likely leaves of the epoch under other names."""

import collections
import re
from collections.abc import Iterable, Mapping, Sequence

from epochckpt import _renaming, _text
from epochckpt.errors import InvalidArgumentError, Mismatch, SuggestedRename

Leaves = frozenset[tuple[str, str]]
"""What lies below a part of a tree: names from there on, each with a shape and type as text."""

_MOST = 20_000  # rows; of more nothing is suggested
_NUMBER = re.compile(r"\d+")


def suggested(rows: Sequence[Mismatch], epoch: Sequence[str], target: Sequence[str]) -> list[SuggestedRename]:
    """Renames by which leaves that only the epoch has become those that only the target has.

    `epoch` and `target` are the names of all leaves. Two parts of the trees are paired if they have the same keys below
    them, with leaves of the same shapes and types, and nothing else. Where several could be meant, none is.
    """
    old_of, new_of = (dict(zip(names, _text.public(names), strict=True)) for names in (epoch, target))
    olds = {old_of[row.leaf]: row for row in rows if row.problem == "unexpected" and row.leaf in old_of}
    news = {new_of[row.leaf]: row for row in rows if row.problem == "missing" and row.leaf in new_of}
    if not olds or not news or len(rows) > _MOST:
        return []
    parts = _parts({name: row.found for name, row in olds.items()}, old_of.values())
    alike = collections.defaultdict[Leaves, list[str]](list)
    for part, leaves in _parts({name: row.expected for name, row in news.items()}, new_of.values()).items():
        alike[leaves].append(part)
    found = dict[str, str]()  # from parts of the epoch to parts of the target
    taken = set[str]()  # leaves of the epoch
    given = set[str]()  # leaves of the target
    for part in sorted(parts, key=lambda part: (-len(parts[part]), _depth(part), part)):  # large parts first
        leaves = parts[part]
        free = [new for new in alike[leaves] if given.isdisjoint(_below(new, end) for end, _ in leaves)]
        if not taken.isdisjoint(_below(part, end) for end, _ in leaves):
            continue
        if (new := _nearest(part, free, leaves)) is not None:
            found[part] = new
            taken.update(_below(part, end) for end, _ in leaves)
            given.update(_below(new, end) for end, _ in leaves)

    def rows_of(old: str) -> tuple[str, ...]:
        ends = [end for end, _ in parts[old]]
        return tuple([olds[_below(old, e)].leaf for e in ends] + [news[_below(found[old], e)].leaf for e in ends])

    return [
        SuggestedRename(old, new, tuple(leaf for one in some for leaf in rows_of(one)))
        for (old, new), some in _folded(found, list(old_of.values())).items()
    ]


def _below(part: str, end: str) -> str:
    return "/".join(filter(None, (part, end)))


def _depth(part: str) -> int:
    return part.count("/") + bool(part)


def _parts(forms: Mapping[str, str], names: Iterable[str]) -> dict[str, Leaves]:
    """The parts of a tree all of whose leaves are among `forms`; a leaf is a part, too."""
    counts = collections.Counter(_beginning(name, depth) for name in names for depth in range(_depth(name) + 1))
    below = collections.defaultdict[str, list[tuple[str, str]]](list)
    for name, form in forms.items():
        keys = name.split("/")
        for depth in range(len(keys) + 1):
            below["/".join(keys[:depth])].append(("/".join(keys[depth:]), form))
    return {part: frozenset(leaves) for part, leaves in below.items() if len(leaves) == counts[part]}


def _beginning(name: str, depth: int) -> str:
    return "/".join(name.split("/")[:depth])


def _nearest(part: str, free: Sequence[str], leaves: Leaves) -> str | None:
    """The one of the free parts whose name is most like that of `part`; None if that is not clear."""

    def likeness(new: str) -> tuple[int, bool]:
        old_keys, new_keys = part.split("/"), new.split("/")
        first, last = _equal(old_keys, new_keys), _equal(old_keys[::-1], new_keys[::-1])
        return first + last, _NUMBER.findall(part) == _NUMBER.findall(new)

    ((end, _), *more) = leaves
    if not more and not end:  # of a single leaf its neighbours or its last key must tell
        free = [new for new in free if likeness(new)[0] or _depth(part) == _depth(new) == 1]
    ranked = sorted(free, key=likeness, reverse=True)
    unclear = len(ranked) > 1 and likeness(ranked[0]) == likeness(ranked[1])
    return None if unclear or not ranked else ranked[0]


def _equal(ones: Sequence[str], others: Sequence[str]) -> int:
    return next((n for n, (a, b) in enumerate(zip(ones, others, strict=False)) if a != b), min(len(ones), len(others)))


def _folded(found: Mapping[str, str], names: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """The renames, and the parts that each renames. Those that differ in numbers alone become one with `*`."""
    groups = collections.defaultdict[tuple[str, ...], list[str]](list)
    for old, new in found.items():
        same = _NUMBER.findall(old) == _NUMBER.findall(new)
        groups[(_NUMBER.sub("*", old), _NUMBER.sub("*", new)) if same else (old, new, "")].append(old)
    folded = dict[tuple[str, str], list[str]]()
    for some in groups.values():
        varies = [len(set(column)) > 1 for column in zip(*(_NUMBER.findall(old) for old in some), strict=True)]
        pairs = [(_starred(old, varies), _starred(found[old], varies)) for old in some]
        folded.setdefault(pairs[0], []).extend(some)
    try:
        explicit = _renaming.new_names("explicit", found, names) if found else []
        if folded and _renaming.new_names("folded", dict(folded.keys()), names) == explicit:
            return folded
    except InvalidArgumentError:  # names with * in them, say
        pass
    return {(old, new): [old] for old, new in found.items()}


def _starred(name: str, varies: Sequence[bool]) -> str:
    each = iter(varies)
    return _NUMBER.sub(lambda match: "*" if next(each, False) else match[0], name)
