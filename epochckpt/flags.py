"""absl flags for all settings of checkpoints, defined only when `define` is called; config files by `from_config`.

Nothing here parses a command line: `absl.app.run` does. Where nobody does, as in a notebook, flags have their defaults,
or what was assigned to them (`FLAGS.ckpt_max_to_keep = 3`).
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp
from absl import flags as absl_flags

from epochckpt._settings import Settings, fields
from epochckpt._settings import kinds as kinds
from epochckpt._settings.fields import ABOUT
from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs import Job, JobRunner
from epochckpt.manager import CheckpointManager
from epochckpt.options import StorageOptions

__all__ = ["Flags", "Settings", "define", "from_config"]

# `--help` shows a program's own flags; ours belong to whoever calls `define`
absl_flags.disclaim_key_flags()

_PREFIX = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NEEDED = tuple(dict.fromkeys(rule.other for rule in fields.RULES if rule.needed))


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags of one prefix, and what their values make.

    Attributes:
        prefix: flags are named `--<prefix>_<setting>`.
        flag_values: where they are defined.
    """

    prefix: str
    flag_values: absl_flags.FlagValues = dataclasses.field(repr=False)

    def settings(self) -> Settings:
        """The settings that the flags have now, parsed or not.

        Raises:
            InvalidArgumentError: a value that was assigned is wrong, or two contradict; by the names of the flags.
        """
        values = {name: self.flag_values[self.flag(name)].value for name in ABOUT}
        return Settings(**fields.checked(values, self._shown))

    def set_defaults(self, **defaults: Any) -> None:
        """Changes what flags are that nobody has given; also after parsing, for what depends on another flag.

        Args:
            defaults: values by the names of settings.

        Raises:
            InvalidArgumentError: no such setting, or a wrong value.
        """
        fields.check_names(defaults)
        values = {name: fields.read(name, value, self._shown) for name, value in defaults.items()}
        for name in sorted(values, key=lambda name: name not in _NEEDED):  # absl checks the rules after each
            self.flag_values.set_default(self.flag(name), values[name])

    def options(self) -> ocp.CheckpointManagerOptions:
        """Orbax's options."""
        return self.settings().options()

    def storage(self) -> StorageOptions:
        """The `epochckpt.StorageOptions`."""
        return self.settings().storage()

    def manager(self, **overrides: Any) -> CheckpointManager:
        """Opens the directory. See `Settings.manager`."""
        return self._with_directory(overrides).manager(**overrides)

    def runner(self, job: Job, manager: Any = None, **overrides: Any) -> JobRunner:
        """A runner of a job, on a manager or on `self.manager()`. See `Settings.runner`."""
        settings = self.settings() if manager is not None else self._with_directory({})
        return settings.runner(job, manager, **overrides)

    def follow(self, **overrides: Any) -> Iterator[int]:
        """Yields each newly committed epoch of the directory. See `Settings.follow`."""
        return self._with_directory(overrides).follow(**overrides)

    def flagfile(self, *, everything: bool = False) -> str:
        """The values as a text that `--flagfile` reads: only what is not at its default, or everything, explained.

        Raises:
            InvalidArgumentError: a value that no line can hold, such as a path with a line break.
        """
        settings, lines = self.settings(), []
        for name, about in ABOUT.items():
            value, default = getattr(settings, name), self.flag_values[self.flag(name)].default
            if everything:
                lines.append(f"# {about.help} ({about.kind.expected})")
            if everything or value != default:
                lines.append(self._line(name, about.kind.write(value)))
        return "".join(f"{line}\n" for line in lines)

    def flag(self, setting: str) -> str:
        """The name of the flag of a setting, without dashes."""
        return f"{self.prefix}_{setting}"

    def _shown(self, setting: str) -> str:
        return f"--{self.flag(setting)}"

    def _line(self, name: str, text: str) -> str:
        line = f"{self._shown(name)}={text}"
        read = [one.strip() for one in io.StringIO(f"{line}\n", newline=None)]  # as absl reads it
        if read != [line] or (not line.isascii() and line != line.encode(errors="replace").decode()):
            raise InvalidArgumentError(f"{self._shown(name)}: {text!r} cannot be written as a line of a flagfile")
        return line

    def _with_directory(self, overrides: Mapping[str, Any]) -> Settings:
        settings = self.settings()
        if settings.directory is None and overrides.get("directory") is None:
            raise InvalidArgumentError(f"{self._shown('directory')} is not given: where are the epochs?")
        return settings


def define(prefix: str = "ckpt", flag_values: absl_flags.FlagValues = absl_flags.FLAGS, **defaults: Any) -> Flags:
    """Defines the flags `--<prefix>_<setting>`, one for each field of `Settings`.

    A second call with the same prefix and defaults, as of a notebook's cell that runs again, defines nothing and
    returns an equal object.

    Args:
        prefix: of the flags' names; several side by side are fine.
        flag_values: where to define them.
        defaults: the program's own, by the names of settings.

    Raises:
        InvalidArgumentError: an unusable prefix, wrong defaults, or flags of these names that are defined already
            otherwise; nothing is defined.
    """
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise InvalidArgumentError(f"expected a prefix of letters, digits and '_', a letter first; found {prefix!r}")
    found = Flags(prefix, flag_values)
    fields.check_names(defaults)
    own = fields.checked({**fields.DEFAULTS, **defaults}, str)
    there = [name for name in ABOUT if found.flag(name) in flag_values]
    if not there:
        for name, default in own.items():
            _define(found, name, default)
        _check_together(found)
        return found
    for name in there:
        if not isinstance(flag_values[found.flag(name)].parser, _Parser) or len(there) < len(ABOUT):
            where = flag_values.find_module_defining_flag(found.flag(name))
            raise InvalidArgumentError(f"--{found.flag(name)} is defined already, by {where}; choose another prefix")
    other = [name for name in defaults if own[name] != flag_values[found.flag(name)].default]
    if other:
        flag = flag_values[found.flag(other[0])]
        raise InvalidArgumentError(
            f"--{flag.name} is defined already, with the default {flag.default!r} and not {own[other[0]]!r}; "
            "set_defaults() changes it"
        )
    return found


def from_config(config: Any) -> Settings:
    """Settings from a part of a config file, such as `config.checkpoint` of an `ml_collections.ConfigDict`.

    Raises:
        InvalidArgumentError: see `Settings.from_mapping`.
    """
    return Settings.from_mapping(config)


class _Parser(absl_flags.ArgumentParser[Any]):
    """Reads a kind of setting. absl adds the flag's name to the error."""

    def __init__(self, kind: kinds.Kind[Any]):
        self._kind, self.syntactic_help = kind, kind.expected

    def parse(self, argument: Any) -> Any:
        return self._kind.read(argument)

    def flag_type(self) -> str:
        return self._kind.expected


class _Serializer(absl_flags.ArgumentSerializer[Any]):
    def __init__(self, kind: kinds.Kind[Any]):
        self._kind = kind

    def serialize(self, value: Any) -> str:
        return self._kind.write(value)


def _define(flags: Flags, name: str, default: Any) -> None:
    about = ABOUT[name]
    flag = absl_flags.Flag(
        _Parser(about.kind),
        _Serializer(about.kind),
        flags.flag(name),
        default,
        about.help,
        boolean=about.kind.boolean,
    )
    absl_flags.DEFINE_flag(flag, flags.flag_values)


def _check_together(flags: Flags) -> None:
    """Has absl refuse a command line with contradictions, as it does wrong values."""
    for rule in fields.RULES:
        names = [flags.flag(name) for name in (rule.name, rule.other)]
        absl_flags.register_multi_flags_validator(names, _validator(flags, rule), flag_values=flags.flag_values)


def _validator(flags: Flags, rule: fields.Rule) -> Callable[[Mapping[str, Any]], bool]:
    def validate(values: Mapping[str, Any]) -> bool:
        if not flags.flag_values.is_parsed():  # one after the other is assigned in a notebook: `settings` checks
            return True
        changed = {}
        for name in (rule.name, rule.other):
            value = fields.read(name, values[flags.flag(name)], lambda name: f"--{flags.flag(name)}")
            if value != fields.DEFAULTS[name]:
                changed[name] = ABOUT[name].kind.write(value)
        problem = rule.problem(changed, lambda name: f"--{flags.flag(name)}")
        if problem is not None:
            raise absl_flags.ValidationError(problem)
        return True

    return validate
