"""New names for leaves: the one language in which restores, exports, imports, jobs and commands rename.

A rename is a function from name to name, or a mapping: the name of a leaf, or its beginning up to a `/`, to what takes
its place. `*` in the old name stands for any part of a key, and the `*` in the new name becomes that. If several fit a
leaf, the one with the most keys counts, and of equal ones the one with the fewest `*`. `""` is the beginning of all.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence

from epochckpt import _text
from epochckpt.errors import InvalidArgumentError, UnknownNameError

Rename = Mapping[str, str] | Callable[[str], str]


def check(rename: Rename | None) -> Rename | None:
    """Returns a rename that a caller gave, None for an empty one; refuses what is none."""
    if isinstance(rename, Mapping):
        if not all(isinstance(text, str) for pair in rename.items() for text in pair):
            raise InvalidArgumentError(f"rename must map names to names, got {str(rename)[:200]}")
        for old, new in rename.items():
            if old.count("*") != new.count("*"):
                problem = "expected as many * in the new name as in the old one"
                raise InvalidArgumentError(f"rename has {old!r} for {new!r}; {problem}")
    elif not (rename is None or callable(rename)):
        raise InvalidArgumentError(f"rename must be a mapping or a function, got a {type(rename).__name__}")
    return rename or None


def new_names(where: str, rename: Rename, names: Sequence[str]) -> list[str]:
    """The new name of each leaf; errors begin with `where`.

    UnknownNameError: an entry matches no leaf for which it counts. InvalidArgumentError: two leaves would get one name,
    or a function gives something that is no name.
    """
    if callable(rename):
        call = rename
    else:
        entries = _Entries(rename)
        entries.check_used(where, names)
        call = entries.new_name
    owner = dict[str, str]()
    for name in names:
        new = call(name)
        if not isinstance(new, str):
            raise InvalidArgumentError(f"{where}: rename({name!r}) is a {type(new).__name__}; expected the new name")
        new = new.strip("/")
        if new in owner:
            raise InvalidArgumentError(f"{where}: {owner[new]!r} and {name!r} would both be called {new!r}")
        owner[new] = name
    return list(owner)


def lenient(rename: Rename) -> Callable[[str], str]:
    """A rename as a function, to which an entry that matches no leaf means nothing.

    A program that renames at every start needs it: it saves the new names, so the old names are gone at the next start.
    """
    return rename if callable(rename) else _Entries(rename).new_name


class _Entries:
    """The entries of a mapping."""

    def __init__(self, rename: Mapping[str, str]):
        self._plain: dict[str, str] = {}
        self._patterns: dict[int, list[tuple[re.Pattern[str], str, str]]] = {}  # by the number of keys
        self._used = set[str]()
        for old, new in sorted(rename.items(), key=lambda pair: pair[0].count("*")):
            clean = _text.readable(old.strip("/"))
            if "*" in clean:
                pattern = re.compile("([^/]*)".join(map(re.escape, clean.split("*"))))
                self._patterns.setdefault(clean.count("/") + 1, []).append((pattern, clean, new.strip("/")))
            else:
                self._plain[clean] = new.strip("/")

    def check_used(self, where: str, names: Sequence[str]) -> None:
        """Raises UnknownNameError or InvalidArgumentError for an entry that is used for none of `names`."""
        for name in names:
            self.new_name(name)
        olds = [*self._plain, *(old for some in self._patterns.values() for _, old, _ in some)]
        for old in olds:
            if old in self._used:
                continue
            if any(name == old or name.startswith(f"{old}/") for name in names):
                problem = f"rename has {old!r}, and entries with more keys count for each leaf that it fits"
                raise InvalidArgumentError(f"{where}: {problem}")
            raise UnknownNameError(f"{where}: rename: {_text.no_match(old, names)}")

    def new_name(self, name: str) -> str:
        """The new name of a leaf."""
        keys = name.split("/")
        for depth in range(len(keys), -1, -1):
            beginning = "/".join(keys[:depth])
            if (new := self._new_beginning(beginning, depth)) is not None:
                return "/".join(filter(None, (new, *keys[depth:])))
        return name

    def _new_beginning(self, beginning: str, depth: int) -> str | None:
        if beginning in self._plain:
            self._used.add(beginning)
            return self._plain[beginning]
        for pattern, old, new in self._patterns.get(depth, ()):
            if match := pattern.fullmatch(beginning):
                self._used.add(old)
                return "".join(itertools.chain(*itertools.zip_longest(new.split("*"), match.groups(), fillvalue="")))
        return None
