"""`Settings`: all options of checkpoints that need no code, from flags, config files or a program.

The fields of `Settings` are the table of settings: a field has the default, the kind of value, the one option that the
setting decides, its help, and the settings that it needs. Storage options take it from `StorageOptions`. Flags, config
files, `RULES`, the tables in docs/configure.md and the samples of tests are made of these fields.
"""

import dataclasses
import datetime
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

import orbax.checkpoint as ocp
from absl import flags as absl_flags

from epochckpt import _text
from epochckpt._kinds import NONE, Kind, boolean, choice, epoch_number, integer, list_of, matching, secs
from epochckpt._metrics import flat
from epochckpt.errors import InvalidArgumentError, say
from epochckpt.jobs import Job, JobRunner, stop, stop_text
from epochckpt.manager import CheckpointManager
from epochckpt.manager.evaluator import follow
from epochckpt.metadata import AbstractMetadataHandler, JsonMetadataHandler, SqliteMetadataHandler
from epochckpt.options import STORAGE_OPTIONS, StorageOptions
from epochckpt.storage import path_text, with_settings

OPTIONS, STORAGE = "CheckpointManagerOptions", "StorageOptions"
MANAGER, RUNNER, FOLLOW, JOB = "CheckpointManager", "JobRunner", "follow", "Job"
_ROW = "setting"  # the key of a field's metadata
_EVERY_EPOCH = "without it every epoch is kept"
_NO_RANK = "without it no epoch is ranked"

_PATH = Kind("a path or URL", path_text, ("/runs/1", "gs://bucket/run"), none="")
_TEXT = Kind("a text", matching(r"[^\0]+"), ("accuracy",), none="")
_PREFIX = Kind(
    "letters, digits, '.', '_' and '-', a letter or digit first",
    matching("[A-Za-z0-9][A-Za-z0-9._-]*"),
    ("epoch", "none"),
    none="",
)
_TEXTS = Kind(
    "texts with commas between them",
    list_of(matching(r"\S|\S.*\S")),
    (("a", "b*"), ("c,d", '"e"')),
    write=absl_flags.CsvListSerializer(",").serialize,
)
_EPOCHS = Kind(
    "epochs (integers of at least 0) with commas between them",
    lambda value: tuple(sorted(set(list_of(epoch_number)(value)))),
    ((1, 7),),
    write=lambda value: ",".join(map(str, value)),
)
_RESUME = Kind(
    "auto, never, must, or the number of an epoch",
    lambda value: value if value in ("auto", "never", "must") else epoch_number(value),
    (12, "must"),
)


def _stop_condition(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("it is no text; in code, call job.stop_when(condition)")
    stop_text.parsed(value)
    return value


_STOP = Kind(
    "stop conditions joined by | and &, such as max_epochs(100) | nan('loss')",
    _stop_condition,
    ("max_epochs(100) | nan('loss')", *(repr(stop.of_example(name)) for name in stop.CONDITIONS)),
    none="",
)
_HANDLER = Kind(
    "json, json:FILE or sqlite:FILE",
    matching(r"json(:\S(.*\S)?)?|sqlite:\S(.*\S)?"),
    ("sqlite:/tmp/runs.sqlite", "json", "json:/a b"),
    none=NONE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A row of the table of settings.

    Attributes:
        kind: the values that it may have.
        owner: the class or function with the option that the setting decides, such as `JobRunner`.
        option: the name of that option.
        help: what it is for.
        needs: the settings without which it says nothing, each with the reason.
        writes: whether it says nothing where everything is only read.
        default: that of the field.
    """

    kind: Kind
    owner: str
    option: str
    help: str
    needs: Mapping[str, str]
    writes: bool
    default: Any = None


def _of(
    kind: Kind,
    owner: str,
    *,
    help: str,
    option: str = "",
    needs: Mapping[str, str] | None = None,
    writes: bool = False,
) -> dict[str, Setting]:
    """The metadata of a setting. `option` is the name of the decided option, if it differs from the setting's name."""
    row = Setting(kind=kind, owner=owner, option=option, help=help, needs=needs or {}, writes=writes)
    return {_ROW: row}


def _storage(
    name: str, *, kind: Kind | None = None, needs: Mapping[str, str] | None = None, writes: bool = False
) -> Any:
    """A field of `Settings` for the storage option of this name, where default, kind and help stand."""
    option = STORAGE_OPTIONS[name]
    default = option.kind.parse(getattr(StorageOptions(), name))
    row = _of(kind or option.kind, STORAGE, help=option.help, needs=needs, writes=writes)
    return field(default=default, metadata=row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of checkpoints that need no code; flags and config files end up here.

    A value may be given as it is or as a text, as on a command line (`"8GB"`, `"10min"`). Each setting decides one
    option of `orbax.checkpoint.CheckpointManagerOptions`, `StorageOptions`, `CheckpointManager`, `JobRunner` or
    `follow`; docs/configure.md lists them all. Contradictory settings are refused.

    Raises:
        InvalidArgumentError: names the setting, the expected values and the given one.
    """

    # Where
    directory: str | None = field(
        default=None, metadata=_of(_PATH, MANAGER, help="Where the epochs are: a path, or gs://… or s3://….")
    )
    read_only: bool = field(
        default=False, metadata=_of(boolean(), OPTIONS, help="Never write, wait for no other process. For evaluators.")
    )
    create: bool = field(
        default=True,
        metadata=_of(boolean(), OPTIONS, help="Create the directory if it is missing; else that is an error."),
    )
    node: str | None = field(
        default=None,
        metadata=_of(
            _TEXT,
            MANAGER,
            help="Name of this process's node, and of its folder in an epoch. Empty: process_0, process_1 and so on.",
        ),
    )
    step_prefix: str | None = field(
        default=None,
        metadata=_of(
            _PREFIX, OPTIONS, help="What an epoch's folder is named before _ and the number. Empty: the number alone."
        ),
    )
    step_format_fixed_length: int | None = field(
        default=None,
        metadata=_of(
            integer(1, none=NONE), OPTIONS, help="Digits of the number in an epoch's folder name, filled up with zeros."
        ),
    )

    # What is saved, and when
    save_interval_steps: int = field(
        default=1,
        metadata=_of(
            integer(),
            OPTIONS,
            help="Save the epochs (Orbax's steps) that this number divides. 0: only save_on_steps. The first, and the "
            "last of a run, are saved in any case.",
            writes=True,
        ),
    )
    save_on_steps: tuple[int, ...] = field(
        default=(),
        metadata=_of(_EPOCHS, OPTIONS, help="Save these epochs, too: numbers with commas between them.", writes=True),
    )
    enable_async_checkpointing: bool = field(
        default=True,
        metadata=_of(
            boolean(),
            OPTIONS,
            help="Save in the background, while training goes on; else save() waits, and raises what went wrong.",
            writes=True,
        ),
    )

    # What is kept
    max_to_keep: int | None = field(
        default=None,
        metadata=_of(
            integer(1, none=NONE),
            OPTIONS,
            help="Keep so many epochs: the latest, or with best_metric the best. The latest is always kept. None: all.",
            writes=True,
        ),
    )
    keep_period: int | None = field(
        default=None,
        metadata=_of(
            integer(1, none=NONE),
            OPTIONS,
            help="Beyond max_to_keep, keep the epochs that this number divides.",
            needs={"max_to_keep": _EVERY_EPOCH},
            writes=True,
        ),
    )
    keep_time_interval_secs: float | None = field(
        default=None,
        metadata=_of(
            secs(1, none=NONE),
            OPTIONS,
            help="Beyond max_to_keep, keep one epoch for every so many seconds.",
            option="keep_time_interval",
            needs={"max_to_keep": _EVERY_EPOCH},
            writes=True,
        ),
    )
    best_metric: str | None = field(
        default=None,
        metadata=_of(
            _TEXT,
            OPTIONS,
            help="Name of the metric that ranks epochs: the best ones are kept, instead of the latest. One in an inner "
            "mapping is named outer/inner. NaN is worst.",
            option="best_fn",
        ),
    )
    best_mode: Literal["max", "min"] = field(
        default="max",
        metadata=_of(
            choice("max", "min"),
            OPTIONS,
            help="Whether a high or a low best_metric is good.",
            needs={"best_metric": _NO_RANK},
        ),
    )
    keep_checkpoints_without_metrics: bool = field(
        default=True,
        metadata=_of(
            boolean(),
            OPTIONS,
            help="Keep every epoch that lacks best_metric, beyond max_to_keep; else delete all of them but the latest.",
            needs={"best_metric": _NO_RANK, "max_to_keep": _EVERY_EPOCH},
            writes=True,
        ),
    )
    todelete_subdir: str | None = field(
        default=None,
        metadata=_of(
            _TEXT,
            OPTIONS,
            help="Move deleted epochs to this folder in the directory, instead of removing them.",
            writes=True,
        ),
    )

    # Waiting, memory and bytes
    max_blocked_secs: float | None = _storage("max_blocked_secs")
    save_timeout_secs: float = _storage("save_timeout_secs")
    open_timeout_secs: float = _storage("open_timeout_secs")
    restore_timeout_secs: float = _storage("restore_timeout_secs")
    restore_memory_limit_bytes: int | None = _storage("restore_memory_limit_bytes")
    host_memory_limit_bytes: int | None = _storage("host_memory_limit_bytes", writes=True)
    snapshot: Literal["auto", "device", "pinned_host", "host"] = _storage("snapshot")
    io_threads: int = _storage("io_threads")
    part_bytes: int | None = _storage("part_bytes")
    broadcast_restore: bool | None = _storage("broadcast_restore")
    block_bytes: int = _storage("block_bytes")
    replica_split_bytes: int = _storage("replica_split_bytes")
    page_cache: bool = _storage("page_cache")
    orbax_view: bool = _storage("orbax_view")
    verify: bool = _storage("verify")
    mirror: str | None = _storage("mirror", kind=_PATH)
    mirror_every: int = _storage("mirror_every")
    mirror_keep: int | None = _storage("mirror_keep")
    mirror_backlog: int = _storage("mirror_backlog")
    local_disks: bool = _storage(
        "local_disks", needs={"mirror": "no disk has the whole of an epoch, so a host that is replaced needs a mirror"}
    )
    store: Mapping[str, Any] | None = _storage("store")

    # The run
    metadata_handler: str | None = field(
        default=None,
        metadata=_of(
            _HANDLER,
            MANAGER,
            help="Records what becomes of a run. json: a file in the directory; json:FILE; sqlite:FILE, of many runs.",
            writes=True,
        ),
    )
    resume: Literal["auto", "never", "must"] | int = field(
        default="auto",
        metadata=_of(
            _RESUME,
            RUNNER,
            help="auto: after the latest epoch, or from scratch. never: from scratch, refused if there are epochs. "
            "must: refused if there are none. A number: go back to this epoch; later ones are quarantined.",
            writes=True,
        ),
    )
    stop_when: str | None = field(
        default=None,
        metadata=_of(
            _STOP,
            JOB,
            help="End the run when this is true, too: conditions of ec.stop joined by | and &, such as "
            "max_epochs(100) | nan('loss').",
            writes=True,
        ),
    )
    include: tuple[str, ...] = field(
        default=(),
        metadata=_of(
            _TEXTS, RUNNER, help="Checkpoint only blobs that match one of these patterns. Empty: all.", writes=True
        ),
    )
    exclude: tuple[str, ...] = field(
        default=(),
        metadata=_of(_TEXTS, RUNNER, help="Do not checkpoint blobs that match one of these patterns.", writes=True),
    )
    unsaved_blobs: Literal["warn", "error", "ignore"] = field(
        default="warn",
        metadata=_of(
            choice("warn", "error", "ignore"),
            RUNNER,
            help="What to do after the first epoch about blobs that stay from epoch to epoch and are not checkpointed.",
            writes=True,
        ),
    )
    preemption_deadline_secs: float | None = field(
        default=None,
        metadata=_of(
            secs(0, none=NONE),
            RUNNER,
            help="How long after a preemption notice an epoch may go on whose tasks ask ws.should_stop(); then it is "
            "dropped, or saved as it is if it is resumable. None: until its end.",
            option="deadline_secs",
            writes=True,
        ),
    )
    max_consecutive_save_failures: int | None = field(
        default=5,
        metadata=_of(
            integer(none=NONE),
            RUNNER,
            help="End the run when more saves than this in a row have failed. None: never.",
            writes=True,
        ),
    )
    raise_if_not_saved: bool = field(
        default=True,
        metadata=_of(boolean(), RUNNER, help="End with an error if the last epoch could not be saved.", writes=True),
    )
    save_every_secs: float | None = field(
        default=None,
        metadata=_of(
            secs(none=NONE),
            RUNNER,
            help="Save the first epoch that ends so long after the last save began. None: as the policies say.",
            writes=True,
        ),
    )
    exchange_timeout_secs: float = field(
        default=600.0,
        metadata=_of(secs(), RUNNER, help="How long the processes of a run wait for one that gives no sign of life."),
    )
    progress: bool | None = field(
        default=None,
        metadata=_of(
            boolean(none=NONE),
            RUNNER,
            help="Show a progress bar. None: where output is a terminal or a notebook, and else a line per epoch.",
        ),
    )

    # Following
    follow_interval_secs: float = field(
        default=1.0,
        metadata=_of(secs(), FOLLOW, help="How often an evaluator looks for new epochs.", option="interval_secs"),
    )
    follow_timeout_secs: float | None = field(
        default=None,
        metadata=_of(
            secs(0, none=NONE),
            FOLLOW,
            help="An evaluator ends when there was no new epoch for so long. None: never.",
            option="timeout_secs",
        ),
    )

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

        `overrides` are arguments of `JobRunner`, and take precedence over the settings. The condition of `stop_when` is
        added to the job's own conditions.

        Raises:
            InvalidArgumentError: see `manager` and `JobRunner`; or everything is to be only read.
        """
        if self.read_only:
            raise InvalidArgumentError("read_only: a runner saves; open the directory with manager(), or follow() it")
        if self.stop_when is not None:
            condition = stop_text.parsed(self.stop_when)
            if repr(condition) not in map(repr, job.stop_conditions):  # a second runner of the job adds none
                job.stop_when(condition)
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
    table = {}
    for each in dataclasses.fields(Settings):
        row = each.metadata[_ROW]
        table[each.name] = dataclasses.replace(row, option=row.option or each.name, default=each.default)
    return table


SETTINGS: Mapping[str, Setting] = _table()
"""All settings, by name."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule for two settings: if `name` is not at its default, `other` is `needed`, or else excluded."""

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


def _rules() -> Iterator[Rule]:
    for name, row in SETTINGS.items():
        if row.writes:
            yield Rule(name, "read_only", False, "where everything is only read, nothing is saved or deleted")
    for name, row in SETTINGS.items():
        for other, why in row.needs.items():
            yield Rule(name, other, True, why)


RULES = tuple(_rules())
"""What the settings exclude and need."""


def checked(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of some settings, read and checked by themselves and together; absent ones are at their defaults.

    An error names an unknown name (with near ones), a wrong value, or a contradiction; `prefix` stands before names.
    """
    settings = read(values, prefix)
    for rule in RULES:
        rule.check(settings, prefix)
    return settings


def read(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of some settings, each checked by itself; see `checked`."""
    unknown = [f"{str(name)!r} ({_text.near(str(name), SETTINGS)})" for name in values if name not in SETTINGS]
    if unknown:
        raise InvalidArgumentError(f"no such setting: {', '.join(unknown)}")
    settings = {}
    for name, value in values.items():
        try:
            settings[name] = SETTINGS[name].kind.parse(value)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{prefix}{name}: {error}") from None
    return settings


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
