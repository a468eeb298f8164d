"""Which leaves of a target that does not fit are most likely leaves of the epoch under other names."""

import collections
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from epochckpt import _renaming, _text
from epochckpt.errors import InvalidArgumentError, Mismatch, SuggestedRename

Leaves = frozenset[tuple[str, str]]
"""What lies below a part of a tree: names from there on, each with a shape and type as text."""

_Keys = tuple[str, ...]
_Shared = tuple[_Keys, _Keys, tuple[str, ...] | None]
"""First keys, last keys, and all numbers or None."""

_MOST = 20_000  # rows; of more nothing is suggested
_MOST_KEYS = 1_000_000  # of parts that are alike below; of more none is suggested
_MOST_MATCHES = 1_000_000  # of a pattern with a name; above that renames are not folded
_NUMBER = re.compile(r"\d+")


def suggested(rows: Sequence[Mismatch], epoch: Sequence[str], target: Sequence[str]) -> list[SuggestedRename]:
    """Renames by which leaves that only the epoch has become those that only the target has.

    `epoch` and `target` are the names of all leaves. Two parts of the trees are paired if they have the same keys below
    them, with leaves of the same shapes and types, and nothing else. Where several could be meant, on either side, none
    is: a wrong rename would restore wrong values without an error. A part with `*` in its name has none, as a rename
    would read that as a pattern.
    """
    old_of, new_of = (dict(zip(names, _text.public(names), strict=True)) for names in (epoch, target))
    olds = {old_of[row.leaf]: row for row in rows if row.problem == "unexpected" and row.leaf in old_of}
    news = {new_of[row.leaf]: row for row in rows if row.problem == "missing" and row.leaf in new_of}
    if not olds or not news or len(rows) > _MOST:
        return []
    old_alike = _alike({name: row.found for name, row in olds.items()}, old_of.values())
    new_alike = _alike({name: row.expected for name, row in news.items()}, new_of.values())
    found = dict[str, str]()  # from parts of the epoch to parts of the target
    ends_of = dict[str, list[str]]()  # the lower ends of a found part
    taken = set[str]()  # leaves of the epoch
    given = set[str]()  # leaves of the target
    for leaves in sorted(old_alike.keys() & new_alike.keys(), key=_small_last):
        ends = sorted(end for end, _ in leaves)
        old_parts = [old for old in old_alike[leaves] if taken.isdisjoint(_below(old, end) for end in ends)]
        new_parts = [new for new in new_alike[leaves] if given.isdisjoint(_below(new, end) for end in ends)]
        for old, new in _pairs(old_parts, new_parts, single=ends == [""]).items():
            found[old] = new
            ends_of[old] = ends
            taken.update(_below(old, end) for end in ends)
            given.update(_below(new, end) for end in ends)

    def leaves_of(some: Sequence[str]) -> tuple[str, ...]:
        of_epoch = [olds[_below(old, end)].leaf for old in some for end in ends_of[old]]
        return (*of_epoch, *(news[_below(found[old], end)].leaf for old in some for end in ends_of[old]))

    folded = _folded(found, list(old_of.values()))
    return [SuggestedRename(old, new, leaves_of(some)) for (old, new), some in folded.items()]


def _small_last(leaves: Leaves) -> tuple[int, int, list[tuple[str, str]]]:
    """A key for sorting: of parts with the same leaves the one that is nearest to the root is first."""
    return -len(leaves), -sum(_depth(end) for end, _ in leaves), sorted(leaves)


def _below(part: str, end: str) -> str:
    return "/".join(filter(None, (part, end)))


def _depth(part: str) -> int:
    return part.count("/") + bool(part)


def _alike(forms: Mapping[str, str], names: Iterable[str]) -> dict[Leaves, list[str]]:
    """The parts of a tree all of whose leaves are among `forms`, by what is below them; a leaf is a part, too."""
    counts = collections.Counter(_beginning(name, depth) for name in names for depth in range(_depth(name) + 1))
    below = collections.defaultdict[str, list[tuple[str, str]]](list)
    for name, form in forms.items():
        keys = name.split("/")
        for depth in range(len(keys) + 1):
            below["/".join(keys[:depth])].append(("/".join(keys[depth:]), form))
    alike = collections.defaultdict[Leaves, list[str]](list)
    for part, leaves in below.items():
        if len(leaves) == counts[part]:
            alike[frozenset(leaves)].append(part)
    return alike


def _beginning(name: str, depth: int) -> str:
    return "/".join(name.split("/")[:depth])


def _pairs(olds: Sequence[str], news: Sequence[str], *, single: bool) -> dict[str, str]:
    """Pairs in which each part is most like the other. No other part may be as much like one of them.

    Parts whose names differ in numbers alone are paired only if all of them are, and the numbers agree. Of a `single`
    leaf a neighbour or the last key must tell, too.
    """
    if sum((_depth(part) + 1) ** 2 for part in (*olds, *news)) > _MOST_KEYS:
        return {}
    back = _nearest(news, olds)
    groups = collections.defaultdict[tuple[str, str], dict[str, str]](dict)
    for old, new in _nearest(olds, news).items():
        clear = back.get(new) == old and "*" not in old + new
        if clear and not (single and _unlike(old.split("/"), new.split("/"))):
            groups[_NUMBER.sub("0", old), _NUMBER.sub("0", new)][old] = new
    old_numbers = _numbers(olds)
    new_numbers = _numbers(news)
    found = dict[str, str]()
    for (old_form, new_form), some in groups.items():
        old_ones = old_numbers[old_form]
        new_ones = new_numbers[new_form]
        if len(_NUMBER.findall(old_form)) != len(_NUMBER.findall(new_form)):  # Dense has become Dense_0
            old_ones = _varying(old_ones)
            new_ones = _varying(new_ones)
        if len(some) == len(old_ones) == len(new_ones) and all(old_ones[o] == new_ones[n] for o, n in some.items()):
            found.update(some)
    return found


def _unlike(old: Sequence[str], new: Sequence[str]) -> bool:
    return old[0] != new[0] and old[-1] != new[-1] and not len(old) == len(new) == 1


def _numbers(parts: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """The numbers in each name, by the name with 0 for each."""
    numbers = collections.defaultdict[str, dict[str, list[str]]](dict)
    for part in parts:
        numbers[_NUMBER.sub("0", part)][part] = _NUMBER.findall(part)
    return numbers


def _varying(numbers: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Those that are not the same in all names."""
    columns = [column for column in zip(*numbers.values(), strict=True) if len(set(column)) > 1]
    return {part: [column[i] for column in columns] for i, part in enumerate(numbers)}


def _nearest(parts: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """For each part, the most similar other: the one with the most first and last keys in common.

    Among equally similar ones, the one with the same numbers counts; a part for which several remain is left out.
    """
    ends = _ends(parts) & _ends(others)
    sharing = collections.defaultdict[_Shared, list[str]](list)
    for other in others:
        for shared in itertools.chain.from_iterable(_likenesses(other, ends)):
            if len(sharing[shared]) < 2:  # two make it unclear already
                sharing[shared].append(other)
    nearest = dict[str, str]()
    for part in parts:
        ranked = ({other for one in some for other in sharing.get(one, ())} for some in _likenesses(part, ends))
        if len(most := next(filter(None, ranked), ())) == 1:
            (nearest[part],) = most
    return nearest


def _ends(parts: Iterable[str]) -> set[tuple[bool, _Keys]]:
    """The first keys of all parts, and the last keys."""
    names = [tuple(part.split("/")) for part in parts]
    firsts = {(True, keys[:n]) for keys in names for n in range(len(keys) + 1)}
    return firsts | {(False, keys[n:]) for keys in names for n in range(len(keys) + 1)}


def _likenesses(part: str, ends: set[tuple[bool, _Keys]]) -> Iterator[list[_Shared]]:
    """What a part may share with another, most first; of one list each is as much as the others."""
    keys = tuple(part.split("/"))
    numbers = tuple(_NUMBER.findall(part))
    firsts = [keys[:n] for n in range(len(keys) + 1) if (True, keys[:n]) in ends]
    lasts = [keys[n:] for n in range(len(keys), -1, -1) if (False, keys[n:]) in ends]
    for total in range(len(firsts) + len(lasts) - 2, -1, -1):
        lengths = range(max(0, total - len(lasts) + 1), min(total, len(firsts) - 1) + 1)
        yield [(firsts[n], lasts[total - n], numbers) for n in lengths]
        yield [(firsts[n], lasts[total - n], None) for n in lengths]


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
    if sum("*" in old for old, _ in folded) * len(names) > _MOST_MATCHES:
        return {(old, new): [old] for old, new in found.items()}
    try:
        explicit = _renaming.new_names("explicit", found, names) if found else []
        if folded and _renaming.new_names("folded", dict(folded.keys()), names) == explicit:
            return folded
    except InvalidArgumentError:  # the patterns clash
        pass
    return {(old, new): [old] for old, new in found.items()}


def _starred(name: str, varies: Sequence[bool]) -> str:
    each = iter(varies)
    return _NUMBER.sub(lambda match: "*" if next(each, False) else match[0], name)
