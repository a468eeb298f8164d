"""`Settings`: all options of checkpoints that need no code, from flags, config files or a program.

The fields of `Settings` are the table of settings: the default, the kind of value, the one option that the setting
decides, and its help. Kinds check values, `RULES` refuse contradictions, and what the settings make checks the rest.
"""

import dataclasses
import datetime
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import orbax.checkpoint as ocp
from absl import flags as absl_flags

from epochckpt import _text, _units
from epochckpt._metrics import flat
from epochckpt.errors import InvalidArgumentError, say
from epochckpt.jobs import Job, JobRunner
from epochckpt.manager import CheckpointManager
from epochckpt.manager.evaluator import follow
from epochckpt.metadata import AbstractMetadataHandler, JsonMetadataHandler, SqliteMetadataHandler
from epochckpt.options import SNAPSHOTS, BucketSettings, StorageOptions
from epochckpt.storage import path_text, with_settings

NONE = "none"  # the text that stands for no value; for texts that is the empty one
MAX_SECS = 1e9  # 30 years; locks and timedeltas overflow somewhere above
MAX_INT = 2**63 - 1  # what files and other languages hold
_STORAGE = StorageOptions()
OPTIONS, STORAGE = "CheckpointManagerOptions", "StorageOptions"
MANAGER, RUNNER, FOLLOW = "CheckpointManager", "JobRunner", "follow"

Parse = Callable[[Any], Any]


class Kind(absl_flags.ArgumentParser[Any], absl_flags.ArgumentSerializer[Any]):
    """What a setting may be; reads and writes its values, also as absl's parser of its flag."""

    # `parse` raises for what is not of this kind; `none` is the text that stands for None (None: a value must be there)
    # Of what is `private` no error tells what was found.
    def __init__(
        self,
        expected: str,
        parse: Parse,
        write: Callable[[Any], str] = str,
        none: str | None = None,
        private: bool = False,
    ):
        self.expected = self.syntactic_help = expected if none is None else f"{expected}, or {none or 'nothing'}"
        self.may_be_none = none is not None
        self._read, self._write, self._none, self._private = parse, write, none, private

    def parse(self, argument: Any) -> Any:
        """The value that a text, or an object of a program, stands for; InvalidArgumentError if it stands for none."""
        empty = argument is None or (isinstance(argument, str) and argument.strip().lower() in ("", self._none))
        if empty and self.may_be_none:
            return None
        try:
            return self._read(argument)
        except (TypeError, ValueError, OverflowError) as error:
            why = f": {error}" if str(error) else ""
            found = f"{'something else' if self._private else _text.shown(repr(argument))}{why}"
            raise InvalidArgumentError(f"expected {self.expected}, found {found}") from None

    def serialize(self, value: Any) -> str:
        """The text that `parse` reads as this value."""
        return str(self._none) if value is None else self._write(value)

    def flag_type(self) -> str:  # absl calls it, for --helpxml
        return self.expected


def _number(of_text: Callable[[str], Any], of_object: Parse, least: float, most: float = MAX_INT) -> Parse:
    def parse(value: Any) -> Any:
        if isinstance(value, bool):
            raise TypeError("a bool is no number")
        number = of_text(value) if isinstance(value, str) else of_object(value)
        if not least <= number <= most:
            raise ValueError(f"it is not from {least} to {most}")
        return number

    return parse


def _text_like(pattern: str) -> Parse:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.DOTALL):
            raise ValueError
        return value

    return parse


def _list_of(parse: Parse) -> Parse:
    def parse_all(value: Any) -> tuple[Any, ...]:
        if isinstance(value, bytes | Mapping):
            raise TypeError("it is no list")
        return tuple(map(parse, absl_flags.ListParser().parse(value) if isinstance(value, str) else value))

    return parse_all


def _integer(least: int = 0, none: str | None = None) -> Kind:
    return Kind(f"an integer of at least {least}", _number(int, operator.index, least), none=none)


def _nbytes(least: int = 1, most: int = MAX_INT, none: str | None = None) -> Kind:
    parse = _number(_units.parse_nbytes, operator.index, least, most)
    return Kind("bytes, such as 4096, 8GB or 512MiB", parse, _units.exact_nbytes, none)


def _secs(least: float = 0.001, none: str | None = None) -> Kind:
    parse = _number(_units.parse_secs, float, least, MAX_SECS)
    expected = f"seconds, such as 90, 10min or 1.5h, of at least {least}"
    return Kind(expected, parse, lambda value: repr(value).removesuffix(".0"), none)


def _bool(none: str | None = None) -> Kind:
    return Kind("true or false", absl_flags.BooleanParser().parse, lambda value: "true" if value else "false", none)


def _choice(*words: str) -> Kind:
    return Kind(" or ".join(words), absl_flags.EnumParser(words).parse)


_EPOCH = _number(int, operator.index, 0)
_PATH = Kind("a path or URL", path_text, none="")
_TEXT = Kind("a text", _text_like(r"[^\0]+"), none="")
_NAME = _text_like("[A-Za-z0-9][A-Za-z0-9._-]*")
_PREFIX = Kind("letters, digits, '.', '_' and '-', a letter or digit first", _NAME, none="")
_CSV = absl_flags.CsvListSerializer(",").serialize
_TEXTS = Kind("texts with commas between them", _list_of(_text_like(r"\S|\S.*\S")), _CSV)
_EPOCHS = Kind(
    "epochs (integers of at least 0) with commas between them",
    lambda value: tuple(sorted(set(_list_of(_EPOCH)(value)))),
    lambda value: ",".join(map(str, value)),
)
_RESUME = Kind(
    "auto, never, must, or the number of an epoch",
    lambda value: value if value in ("auto", "never", "must") else _EPOCH(value),
)
_STORE = Kind(
    "settings of a bucket, such as endpoint=http://host:9000&region=eu-west-1",
    lambda value: BucketSettings.of(value, "settings") or None,
    lambda value: BucketSettings.of(value, "settings").query(),
    none="",
    private=True,  # somebody may have put a secret there
)
_HANDLER = Kind("json, json:FILE or sqlite:FILE", _text_like(r"json(:\S(.*\S)?)?|sqlite:\S(.*\S)?"), none=NONE)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row of the table of settings."""

    kind: Kind
    owner: str  # the class or function that has the option which it decides, such as `JobRunner`
    option: str = ""  # its name there
    default: Any = None
    help: str = ""


def _of(default: Any, kind: Kind, owner: str, option: str = "") -> Any:
    return dataclasses.field(default=default, metadata={"setting": Setting(kind, owner, option)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of checkpoints that need no code; flags and config files end up here.

    A value may be given as it is or as a text, as on a command line (`"8GB"`, `"10min"`). Each setting decides one
    option of `orbax.checkpoint.CheckpointManagerOptions`, `StorageOptions`, `CheckpointManager`, `JobRunner` or
    `follow`; docs/configure.md lists which. Settings that contradict each other are refused.

    Attributes:
        directory: Where the epochs are: a path, or gs://… or s3://….
        read_only: Never write, wait for no other process. For evaluators.
        create: Create the directory if it is missing; else that is an error.
        node: Name of this process's node, and of its folder in an epoch. Empty: process_0, process_1 and so on.
        step_prefix: What an epoch's folder is named before _ and the number. Empty: the number alone.
        step_format_fixed_length: Digits of the number in an epoch's folder name, filled up with zeros.
        save_interval_steps: Save the epochs (Orbax's steps) that this number divides. 0: only save_on_steps. The first,
            and the last of a run, are saved in any case.
        save_on_steps: Save these epochs, too: numbers with commas between them.
        enable_async_checkpointing: Save in the background, while training goes on; else save() waits, and raises what
            went wrong.
        max_to_keep: Keep so many epochs: the latest, or with best_metric the best. The latest is always kept. None:
            all.
        keep_period: Beyond max_to_keep, keep the epochs that this number divides.
        keep_time_interval_secs: Beyond max_to_keep, keep one epoch for every so many seconds.
        best_metric: Name of the metric that ranks epochs: the best ones are kept, instead of the latest. One in an
            inner mapping is named outer/inner. NaN is worst.
        best_mode: Whether a high or a low best_metric is good.
        keep_checkpoints_without_metrics: Keep every epoch that lacks best_metric, beyond max_to_keep; else delete all
            of them but the latest.
        todelete_subdir: Move deleted epochs to this folder in the directory, instead of removing them.
        max_blocked_secs: How long save() may hold training while storage is behind; then the new save fails. None:
            until older saves have ended.
        save_timeout_secs: A save fails if a node has not reported after so many seconds.
        open_timeout_secs: How long opening, deleting and rolling back wait for other processes.
        restore_timeout_secs: How long restoring the latest epoch waits for other processes.
        restore_memory_limit_bytes: Host memory that a restore may need beyond its result: it then reads so much at a
            time. None: all at once.
        host_memory_limit_bytes: Host memory per process for copies of what is being saved: save() waits for room. None:
            half the machine's.
        snapshot: Where arrays on GPUs and TPUs are copied to before save() returns: device, pinned_host or host. auto:
            device where its memory allows, else pinned_host.
        io_threads: Threads per process that read or write files.
        part_bytes: Continue a data file in another one past this size; on object stores also cut larger arrays by rows.
            None: never on file systems, 64MiB on object stores.
        broadcast_restore: The processes of a job read once, together, what several of them need. None: if Orbax's
            single_host_load_and_broadcast asks for it.
        block_bytes: Unit of writing, checksums and verified reading.
        replica_split_bytes: Replicated arrays above this size are written by several processes.
        direct_io: Write large files past the page cache; false keeps the newest epoch in it. File systems only.
        orbax_view: Also write the index through which stock Orbax reads epochs; file systems and gs://.
        verify: Check the blocks of arrays that are read against their checksums; other files always are.
        mirror: Another directory, as a rule a bucket, that committed epochs are copied to in the background.
        mirror_every: Copy every n-th committed epoch, and the newest at the end.
        mirror_keep: Keep so many epochs in the mirror, the newest ones. None: all.
        mirror_backlog: So many epochs may wait for the mirror; if there are more, the oldest is not mirrored.
        local_disks: The directory is on a disk of each process's own; needs a mirror.
        store: How a bucket is reached: name=value with & between them, as in a URL's query, which comes first. Names:
            endpoint, account, region, profile, requester_pays, anonymous, retries, first_retry_secs,
            longest_retry_secs, concurrency.
        metadata_handler: Records what becomes of a run. json: a file in the directory; json:FILE; sqlite:FILE, of many
            runs.
        resume: auto: after the latest epoch, or from scratch. never: from scratch, refused if there are epochs. must:
            refused if there are none. A number: go back to this epoch; later ones are quarantined.
        include: Checkpoint only blobs that match one of these patterns. Empty: all.
        exclude: Do not checkpoint blobs that match one of these patterns.
        unsaved_blobs: What to do after the first epoch about blobs that stay from epoch to epoch and are not
            checkpointed.
        preemption_deadline_secs: How long after a preemption notice an epoch may go on whose tasks ask
            ws.should_stop(); then it is dropped, or saved as it is if it is resumable. None: until its end.
        max_consecutive_save_failures: End the run when more saves than this in a row have failed. None: never.
        raise_if_not_saved: End with an error if the last epoch could not be saved.
        save_every_secs: Save the first epoch that ends so long after the last save began. None: as the policies say.
        exchange_timeout_secs: How long the processes of a run wait for one that gives no sign of life.
        progress: Show a progress bar. None: where output is a terminal or a notebook, and else a line per epoch.
        follow_interval_secs: How often an evaluator looks for new epochs.
        follow_timeout_secs: An evaluator ends when there was no new epoch for so long. None: never.

    Raises:
        InvalidArgumentError: names the setting, what was expected and what was found.
    """

    # Where
    directory: str | None = _of(None, _PATH, MANAGER)
    read_only: bool = _of(False, _bool(), OPTIONS)
    create: bool = _of(True, _bool(), OPTIONS)
    node: str | None = _of(None, _TEXT, MANAGER)
    step_prefix: str | None = _of(None, _PREFIX, OPTIONS)
    step_format_fixed_length: int | None = _of(None, _integer(1, NONE), OPTIONS)

    # What is saved, and when
    save_interval_steps: int = _of(1, _integer(), OPTIONS)
    save_on_steps: tuple[int, ...] = _of((), _EPOCHS, OPTIONS)
    enable_async_checkpointing: bool = _of(True, _bool(), OPTIONS)

    # What is kept
    max_to_keep: int | None = _of(None, _integer(1, NONE), OPTIONS)
    keep_period: int | None = _of(None, _integer(1, NONE), OPTIONS)
    keep_time_interval_secs: float | None = _of(None, _secs(1, NONE), OPTIONS, "keep_time_interval")
    best_metric: str | None = _of(None, _TEXT, OPTIONS, "best_fn")
    best_mode: Literal["max", "min"] = _of("max", _choice("max", "min"), OPTIONS)
    keep_checkpoints_without_metrics: bool = _of(True, _bool(), OPTIONS)
    todelete_subdir: str | None = _of(None, _TEXT, OPTIONS)

    # Waiting, memory and bytes
    max_blocked_secs: float | None = _of(_STORAGE.max_blocked_secs, _secs(none=NONE), STORAGE)
    save_timeout_secs: float = _of(_STORAGE.save_timeout_secs, _secs(), STORAGE)
    open_timeout_secs: float = _of(_STORAGE.open_timeout_secs, _secs(), STORAGE)
    restore_timeout_secs: float = _of(_STORAGE.restore_timeout_secs, _secs(), STORAGE)
    restore_memory_limit_bytes: int | None = _of(_STORAGE.restore_memory_limit_bytes, _nbytes(none=NONE), STORAGE)
    host_memory_limit_bytes: int | None = _of(_STORAGE.host_memory_limit_bytes, _nbytes(none=NONE), STORAGE)
    snapshot: Literal["auto", "device", "pinned_host", "host"] = _of("auto", _choice(*SNAPSHOTS), STORAGE)
    io_threads: int = _of(_STORAGE.io_threads, _integer(1), STORAGE)
    part_bytes: int | None = _of(_STORAGE.part_bytes, _nbytes(none=NONE), STORAGE)
    broadcast_restore: bool | None = _of(_STORAGE.broadcast_restore, _bool(NONE), STORAGE)
    block_bytes: int = _of(_STORAGE.block_bytes, _nbytes(4096, 256 * 2**20), STORAGE)
    replica_split_bytes: int = _of(_STORAGE.replica_split_bytes, _nbytes(), STORAGE)
    direct_io: bool = _of(_STORAGE.direct_io, _bool(), STORAGE)
    orbax_view: bool = _of(_STORAGE.orbax_view, _bool(), STORAGE)
    verify: bool = _of(_STORAGE.verify, _bool(), STORAGE)
    mirror: str | None = _of(None, _PATH, STORAGE)
    mirror_every: int = _of(_STORAGE.mirror_every, _integer(1), STORAGE)
    mirror_keep: int | None = _of(_STORAGE.mirror_keep, _integer(1, NONE), STORAGE)
    mirror_backlog: int = _of(_STORAGE.mirror_backlog, _integer(1), STORAGE)
    local_disks: bool = _of(_STORAGE.local_disks, _bool(), STORAGE)
    store: Mapping[str, Any] | None = _of(None, _STORE, STORAGE)

    # The run
    metadata_handler: str | None = _of(None, _HANDLER, MANAGER)
    resume: Literal["auto", "never", "must"] | int = _of("auto", _RESUME, RUNNER)
    include: tuple[str, ...] = _of((), _TEXTS, RUNNER)
    exclude: tuple[str, ...] = _of((), _TEXTS, RUNNER)
    unsaved_blobs: Literal["warn", "error", "ignore"] = _of("warn", _choice("warn", "error", "ignore"), RUNNER)
    preemption_deadline_secs: float | None = _of(None, _secs(0, NONE), RUNNER, "deadline_secs")
    max_consecutive_save_failures: int | None = _of(5, _integer(none=NONE), RUNNER)
    raise_if_not_saved: bool = _of(True, _bool(), RUNNER)
    save_every_secs: float | None = _of(None, _secs(none=NONE), RUNNER)
    exchange_timeout_secs: float = _of(600.0, _secs(), RUNNER)
    progress: bool | None = _of(None, _bool(NONE), RUNNER)

    # Following
    follow_interval_secs: float = _of(1.0, _secs(), FOLLOW, "interval_secs")
    follow_timeout_secs: float | None = _of(None, _secs(0, NONE), FOLLOW, "timeout_secs")

    def __post_init__(self) -> None:
        for name, value in checked({name: getattr(self, name) for name in SETTINGS}).items():
            object.__setattr__(self, name, value)

    def _options_of(self, owner: str) -> dict[str, Any]:
        return {row.option: getattr(self, name) for name, row in SETTINGS.items() if row.owner == owner}

    def options(self) -> ocp.CheckpointManagerOptions:
        """Orbax's options: what is saved and kept, and how it is named."""
        options = self._options_of(OPTIONS)
        if self.keep_time_interval_secs is not None:
            options["keep_time_interval"] = datetime.timedelta(seconds=self.keep_time_interval_secs)
        options["best_fn"] = None if self.best_metric is None else _by_metric(self.best_metric)
        options["save_on_steps"] = self.save_on_steps or None
        if self.read_only:  # Orbax turns these two off by itself, with a warning each
            options |= {"save_interval_steps": 0, "create": False}
        return ocp.CheckpointManagerOptions(**options)

    def storage(self) -> StorageOptions:
        """How bytes get to storage, and timeouts."""
        return StorageOptions(**self._options_of(STORAGE))

    def handler(self) -> AbstractMetadataHandler | None:
        """A new metadata handler, or None."""
        kind, _, path = (self.metadata_handler or "").partition(":")
        if kind == "sqlite":
            return SqliteMetadataHandler(path)
        return JsonMetadataHandler(with_settings(path, self.store) if path else None) if kind else None

    def manager(self, **overrides: Any) -> CheckpointManager:
        """Opens the directory; in a job of several processes all must do so.

        `overrides` are arguments of `CheckpointManager`, and take precedence over the settings.

        Raises:
            InvalidArgumentError: there is no directory. To train without saving, use `epochckpt.JobRunner(job)`.
        """
        arguments = _with_directory(self._options_of(MANAGER) | overrides)
        for name, make in (("options", self.options), ("storage", self.storage), ("metadata_handler", self.handler)):
            if name not in overrides:
                arguments[name] = make()
        return CheckpointManager(**arguments)

    def runner(self, job: Job, manager: Any = None, **overrides: Any) -> JobRunner:
        """A runner of a job, on the given manager or on `self.manager()`, which is closed when the program ends.

        `overrides` are arguments of `JobRunner`, and take precedence over the settings.

        Raises:
            InvalidArgumentError: see `manager` and `JobRunner`; or everything is to be only read.
        """
        if self.read_only:
            raise InvalidArgumentError("read_only: a runner saves; open the directory with manager(), or follow() it")
        arguments = self._options_of(RUNNER)
        arguments |= {"include": self.include or None, "exclude": self.exclude or None}
        if isinstance(self.resume, int):
            arguments |= {"resume": "auto", "resume_from_epoch": self.resume}
        if manager is None:
            manager = self.manager()
        elif getattr(manager, "metadata_handler", None) is None and "metadata_handler" not in overrides:
            arguments["metadata_handler"] = self.handler()
        return JobRunner(job, manager, **(arguments | overrides))

    def follow(self, **overrides: Any) -> Iterator[int]:
        """Yields each newly committed epoch of the directory, for an evaluator; refused without a directory.

        `overrides` are arguments of `epochckpt.follow`, and take precedence over the settings.
        """
        own = {"directory": self.directory, "options": self.options()}
        arguments = _with_directory(self._options_of(FOLLOW) | own | overrides)
        arguments["directory"] = with_settings(arguments["directory"], self.store)
        return follow(**arguments)


@functools.cache  # equal settings make equal options
def _by_metric(name: str) -> Callable[[Any], Any]:
    return lambda metrics: flat(metrics)[name]


def _with_directory(arguments: dict[str, Any]) -> dict[str, Any]:
    if arguments["directory"] is None:
        raise InvalidArgumentError("directory is not given: where are the epochs?")
    return arguments


def _table() -> dict[str, Setting]:
    helps = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", Settings.__doc__ or "", re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in helps}
    table = {}
    for field in dataclasses.fields(Settings):
        row, name = field.metadata["setting"], field.name
        text = texts.get(name, "")  # `python -OO` has no docstrings
        table[name] = dataclasses.replace(row, option=row.option or name, default=field.default, help=text)
    return table


SETTINGS: Mapping[str, Setting] = _table()
"""All settings, by name."""

_WRITES = (
    *("save_interval_steps", "save_on_steps", "enable_async_checkpointing", "host_memory_limit_bytes"),
    *("max_to_keep", "keep_period", "keep_time_interval_secs", "keep_checkpoints_without_metrics", "todelete_subdir"),
    *("metadata_handler", "resume", "include", "exclude", "unsaved_blobs", "preemption_deadline_secs"),
    *("max_consecutive_save_failures", "raise_if_not_saved", "save_every_secs"),
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Two settings of which the first, where it is not at its default, needs the second, or excludes it."""

    name: str
    other: str
    needed: bool
    why: str

    def check(self, values: Mapping[str, Any], prefix: str = "") -> None:
        """Refuses values, by setting, that break the rule; `prefix` stands before the names in the error."""
        changed = {
            name: f"{prefix}{name}={SETTINGS[name].kind.serialize(values[name])}"
            for name in (self.name, self.other)
            if values.get(name, SETTINGS[name].default) != SETTINGS[name].default
        }
        if self.name in changed and self.needed is not (self.other in changed):
            other = f"needs {prefix}{self.other}" if self.needed else f"contradicts {changed[self.other]}"
            raise InvalidArgumentError(f"{changed[self.name]} {other}: {self.why}")


RULES = (
    *(Rule(name, "read_only", False, "where everything is only read, nothing is saved or deleted") for name in _WRITES),
    Rule("keep_period", "max_to_keep", True, "without it every epoch is kept"),
    Rule("keep_time_interval_secs", "max_to_keep", True, "without it every epoch is kept"),
    Rule("local_disks", "mirror", True, "no disk has the whole of an epoch, so a host that is replaced needs a mirror"),
    Rule("best_mode", "best_metric", True, "without it no epoch is ranked"),
    Rule("keep_checkpoints_without_metrics", "best_metric", True, "without it no epoch is ranked"),
    Rule("keep_checkpoints_without_metrics", "max_to_keep", True, "without it every epoch is kept"),
)


def checked(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of some settings, read and checked by themselves and together; absent ones are at their defaults.

    An error names an unknown name (with near ones), a wrong value, or a contradiction; `prefix` stands before names.
    """
    found = read(values, prefix)
    for rule in RULES:
        rule.check(found, prefix)
    return found


def read(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of some settings, each checked by itself; see `checked`."""
    unknown = [f"{str(name)!r} ({_text.near(str(name), SETTINGS)})" for name in values if name not in SETTINGS]
    if unknown:
        raise InvalidArgumentError(f"no such setting: {', '.join(unknown)}")
    found = {}
    for name, value in values.items():
        try:
            found[name] = SETTINGS[name].kind.parse(value)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{prefix}{name}: {error}") from None
    return found


def from_config(config: Any) -> Settings:
    """Settings from values by name: a part of a JSON or TOML file, or of an `ml_collections.ConfigDict`.

    A setting that takes None gets it (`max_blocked_secs`: no limit); for every other setting None means the default. An
    empty placeholder counts as None.

    Raises:
        InvalidArgumentError: an unknown name (with near ones), or see `Settings`.
    """
    if not callable(getattr(config, "keys", None)):
        raise InvalidArgumentError(f"settings come from a mapping, got {type(config).__name__}")
    never_none = {name for name, row in SETTINGS.items() if not row.kind.may_be_none}
    values = {}
    for name in list(config.keys()):
        try:  # a required placeholder of a ConfigDict, which is no Mapping, raises an error of its own
            values[name] = config[name]
        except Exception as error:
            raise InvalidArgumentError(f"{name}: has no value ({say(error)})") from error
    given = {name: value for name, value in values.items() if value is not None or name not in never_none}
    return Settings(**checked(given))
