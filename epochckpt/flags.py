"""absl flags for all settings of checkpoints, defined only when `define` is called; config files by `from_config`.

Nothing here parses a command line: `absl.app.run` does. In a notebook, which has no command line, flags have their
defaults, or what was assigned to them (`FLAGS.ckpt_max_to_keep = 3`).
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp
from absl import flags as absl_flags

from epochckpt._kinds import Kind
from epochckpt._settings import RULES, SETTINGS, Rule, Settings, checked, from_config, read
from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs import Job, JobRunner
from epochckpt.manager import CheckpointManager
from epochckpt.options import StorageOptions

__all__ = ["Flags", "Settings", "define", "from_config"]


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags `--<prefix>_<setting>`, defined in `flag_values`, and what their values make."""

    prefix: str
    flag_values: absl_flags.FlagValues = dataclasses.field(repr=False)

    def settings(self) -> Settings:
        """The settings that the flags have now, parsed or not.

        Raises:
            InvalidArgumentError: a value that was assigned is wrong, or two contradict; by the names of the flags.
        """
        return Settings(**checked(self._values(), f"--{self.prefix}_"))

    def set_defaults(self, **defaults: Any) -> None:
        """Sets defaults, by the names of settings; after parsing, only those of flags that were not given.

        Raises:
            InvalidArgumentError: no such setting, or a wrong value; after parsing also a contradiction.
        """
        values = read(defaults, f"--{self.prefix}_")
        if self.flag_values.is_parsed():  # before, a default that contradicts one of these may still change
            free = {n: v for n, v in values.items() if self.flag_values[self.name(n)].using_default_value}
            checked(self._values() | free, f"--{self.prefix}_")
        needed = {rule.other for rule in RULES if rule.needed}
        for name in sorted(values, key=lambda name: name not in needed):  # absl validates after each
            self.flag_values.set_default(self.name(name), values[name])

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

    def flagfile(self) -> str:
        """The values that are not at their defaults, as a text that `--flagfile` reads.

        Raises:
            InvalidArgumentError: a value that no line of a file can hold, such as a path with a line break.
        """
        lines = []
        for name, value in dataclasses.asdict(self.settings()).items():
            text = SETTINGS[name].kind.serialize(value)
            flag = self.name(name)
            if not text.isprintable() or text != text.strip():
                raise InvalidArgumentError(f"--{flag}: {text!r} cannot be written as a line of a flagfile")
            if value != self.flag_values[flag].default:
                lines.append(f"--{flag}={text}\n")
        return "".join(lines)

    def name(self, setting: str) -> str:
        """The name of the flag of a setting, without dashes."""
        return f"{self.prefix}_{setting}"

    def _values(self) -> dict[str, Any]:
        return {name: self.flag_values[self.name(name)].value for name in SETTINGS}

    def _with_directory(self, overrides: Mapping[str, Any]) -> Settings:
        settings = self.settings()
        if settings.directory is None and overrides.get("directory") is None:
            raise InvalidArgumentError(f"--{self.prefix}_directory is not given: where are the epochs?")
        return settings


def define(prefix: str = "ckpt", flag_values: absl_flags.FlagValues = absl_flags.FLAGS, **defaults: Any) -> Flags:
    """Defines the flags `--<prefix>_<setting>`, one for each field of `Settings`.

    `defaults` are the program's own, by the names of settings. A second call with the same prefix and defaults, as of a
    notebook's cell that runs again, defines nothing and returns an equal object. Prefixes may stand side by side. A
    program's `--help` shows its own flags, `--helpfull` these, too.

    Examples:
        >>> from absl import flags
        >>> program = flags.FlagValues()  # a program leaves this out, and has absl.flags.FLAGS
        >>> checkpoints = ec.flags.define("ckpt", program, max_to_keep=3)
        >>> _ = program(["train.py", "--ckpt_directory=/runs/1", "--ckpt_save_timeout_secs=15min"])
        >>> checkpoints.options().max_to_keep, checkpoints.storage().save_timeout_secs
        (3, 900.0)

    Raises:
        InvalidArgumentError: an unusable prefix, wrong defaults, or flags of these names that are defined already
            otherwise; nothing is defined.
    """
    if not isinstance(prefix, str) or not re.fullmatch("[A-Za-z][A-Za-z0-9_]*", prefix):
        raise InvalidArgumentError(f"expected a prefix of letters, digits and '_', a letter first; found {prefix!r}")
    flags = Flags(prefix, flag_values)
    own = checked(defaults)
    present = {name: flag_values[flags.name(name)] for name in SETTINGS if flags.name(name) in flag_values}
    for name, flag in present.items():
        if not isinstance(flag.parser, Kind) or len(present) < len(SETTINGS):
            where = flag_values.find_module_defining_flag(flag.name)
            raise InvalidArgumentError(f"--{flag.name} is defined already, by {where}; choose another prefix")
        if own.get(name, flag.default) != flag.default:
            raise InvalidArgumentError(
                f"--{flag.name} is defined already, with the default {flag.default!r} and not {own[name]!r}; "
                "set_defaults() changes it"
            )
    if present:
        return flags
    for name, row in SETTINGS.items():
        kind = row.kind
        is_bool = row.kind.expected.startswith("true or false")
        flag = absl_flags.Flag(kind, kind, flags.name(name), own.get(name, row.default), row.help, boolean=is_bool)
        absl_flags.DEFINE_flag(flag, flag_values)
    for rule in RULES:
        names = [flags.name(rule.name), flags.name(rule.other)]
        absl_flags.register_multi_flags_validator(names, _validator(flags, rule), flag_values=flag_values)
    return flags


def _validator(flags: Flags, rule: Rule) -> Callable[[Mapping[str, Any]], bool]:
    """Has absl refuse a command line with contradictions, as it does wrong values."""

    def validate(values: Mapping[str, Any]) -> bool:  # no partial: a copy of the flags would copy its arguments
        if flags.flag_values.is_parsed():  # in a notebook one after the other is assigned: `settings` checks
            parsed = {name: SETTINGS[name].kind.parse(values[flags.name(name)]) for name in (rule.name, rule.other)}
            try:
                rule.check(parsed, f"--{flags.prefix}_")
            except InvalidArgumentError as error:
                raise absl_flags.ValidationError(str(error)) from None
        return True

    return validate
