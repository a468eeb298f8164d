"""Which settings do not go together. They are refused, by both names; nothing is rewritten.

All settings: what each may be, what it is for, which one thing it decides; and checks of them together.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from epochckpt._settings import kinds as kinds
from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs.first_epoch import ERROR, IGNORE, WARN
from epochckpt.jobs.resume import AUTO, MUST, NEVER
from epochckpt.options import StorageOptions

T = TypeVar("T")

OPTIONS, STORAGE = "CheckpointManagerOptions", "StorageOptions"
MANAGER, RUNNER, FOLLOW = "CheckpointManager", "JobRunner", "follow"


@dataclasses.dataclass(frozen=True)
class About:
    """What is known of a setting.

    Attributes:
        kind: what it may be.
        sets: the one thing that it decides: a class or function and its field or argument, such as `JobRunner.resume`.
        help: what it is for, with units.
    """

    kind: kinds.Kind[Any]
    sets: str
    help: str


def _is(default: T, kind: kinds.Kind[Any], sets: str, help: str) -> T:
    return dataclasses.field(default=default, metadata={"about": About(kind, sets, help)})


def _of_storage(name: str, kind: kinds.Kind[T], help: str) -> T:
    return _is(getattr(StorageOptions(), name), kind, f"{STORAGE}.{name}", help)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """The settings as plain values; see `epochckpt.flags.Settings`."""

    directory: str | None = _is(
        None, kinds.maybe(kinds.PATH, ""), f"{MANAGER}.directory", "Where the epochs are: a path, or gs://… or s3://…."
    )
    read_only: bool = _is(
        False, kinds.BOOLEAN, f"{OPTIONS}.read_only", "Never write, wait for no other process. For evaluators."
    )
    create: bool = _is(
        True, kinds.BOOLEAN, f"{OPTIONS}.create", "Create the directory if it is missing; else that is an error."
    )
    node: str | None = _is(
        None,
        kinds.maybe(kinds.NODE_NAME, ""),
        f"{MANAGER}.node",
        "Name of this process's node, and of its folder in an epoch. Empty: process_<index>.",
    )
    step_prefix: str | None = _is(
        None,
        kinds.maybe(kinds.FOLDER_NAME, ""),
        f"{OPTIONS}.step_prefix",
        "Epochs are folders named <prefix>_<epoch>. Empty: <epoch>.",
    )
    step_format_fixed_length: int | None = _is(
        None,
        kinds.maybe(kinds.integer(1)),
        f"{OPTIONS}.step_format_fixed_length",
        "Digits of the number in an epoch's folder name, filled up with zeros.",
    )

    save_interval_steps: int = _is(
        1,
        kinds.integer(),
        f"{OPTIONS}.save_interval_steps",
        "Save the epochs (Orbax's steps) that this number divides. 0: only save_on_steps. The first, and the last of a "
        "run, are saved in any case.",
    )
    save_on_steps: tuple[int, ...] = _is(
        (), kinds.EPOCHS, f"{OPTIONS}.save_on_steps", "Save these epochs, too: numbers with commas between them."
    )
    enable_async_checkpointing: bool = _is(
        True,
        kinds.BOOLEAN,
        f"{OPTIONS}.enable_async_checkpointing",
        "Save in the background, while training goes on; else save() waits, and raises what went wrong.",
    )

    max_to_keep: int | None = _is(
        None,
        kinds.maybe(kinds.integer(1)),
        f"{OPTIONS}.max_to_keep",
        "Keep so many epochs: the latest, or with best_metric the best. The latest is always kept. None: all.",
    )
    keep_period: int | None = _is(
        None,
        kinds.maybe(kinds.integer(1)),
        f"{OPTIONS}.keep_period",
        "Beyond max_to_keep, keep the epochs that this number divides.",
    )
    keep_time_interval_secs: float | None = _is(
        None,
        kinds.maybe(kinds.seconds(1)),
        f"{OPTIONS}.keep_time_interval",
        "Beyond max_to_keep, keep one epoch for every so many seconds.",
    )
    best_metric: str | None = _is(
        None,
        kinds.maybe(kinds.TEXT, ""),
        f"{OPTIONS}.best_fn",
        "Name of the metric that ranks epochs: the best ones are kept, instead of the latest. NaN is worst.",
    )
    best_mode: str = _is(
        "max", kinds.choice("max", "min"), f"{OPTIONS}.best_mode", "Whether a high or a low best_metric is good."
    )
    keep_checkpoints_without_metrics: bool = _is(
        True,
        kinds.BOOLEAN,
        f"{OPTIONS}.keep_checkpoints_without_metrics",
        "Keep every epoch that lacks best_metric, beyond max_to_keep; else delete all of them but the latest.",
    )
    todelete_subdir: str | None = _is(
        None,
        kinds.maybe(kinds.FREE_FOLDER, ""),
        f"{OPTIONS}.todelete_subdir",
        "Move deleted epochs to this folder in the directory, instead of removing them.",
    )

    save_timeout_secs: float = _of_storage(
        "save_timeout_secs", kinds.seconds(), "A save fails if a node has not reported after so many seconds."
    )
    open_timeout_secs: float = _of_storage(
        "open_timeout_secs", kinds.seconds(), "How long opening, deleting and rolling back wait for other processes."
    )
    restore_timeout_secs: float = _of_storage(
        "restore_timeout_secs", kinds.seconds(), "How long restoring the latest epoch waits for other processes."
    )
    host_memory_limit_bytes: int | None = _of_storage(
        "host_memory_limit_bytes",
        kinds.maybe(kinds.number_of_bytes()),
        "Host memory per process for copies of what is being saved: save() waits for room. None: half the machine's.",
    )
    io_threads: int = _of_storage("io_threads", kinds.integer(1), "Threads per process that read or write files.")
    part_bytes: int | None = _of_storage(
        "part_bytes",
        kinds.maybe(kinds.number_of_bytes()),
        "Continue a data file in another one past this size. None: never on file systems, 256MiB on object stores.",
    )
    block_bytes: int = _of_storage(
        "block_bytes",
        kinds.number_of_bytes(4096, 256 * 2**20),
        "Unit of writing, checksums and verified reading.",
    )
    replica_split_bytes: int = _of_storage(
        "replica_split_bytes",
        kinds.number_of_bytes(),
        "Replicated arrays above this size are written by several processes.",
    )
    orbax_view: bool = _of_storage(
        "orbax_view",
        kinds.BOOLEAN,
        "Also write the index through which stock Orbax reads epochs; file systems only.",
    )
    verify: bool = _of_storage("verify", kinds.BOOLEAN, "Check every block that is read against its checksum.")

    metadata_handler: str | None = _is(
        None,
        kinds.maybe(kinds.HANDLER),
        f"{MANAGER}.metadata_handler",
        "Records what becomes of a run. json: a file in the directory; json:FILE; sqlite:FILE, of many runs.",
    )

    resume: str | int = _is(
        AUTO,
        kinds.word_or_epoch(AUTO, NEVER, MUST),
        f"{RUNNER}.resume",
        "auto: after the latest epoch, or from scratch. never: from scratch, refused if there are epochs. must: "
        "refused if there are none. A number: go back to this epoch; later ones are quarantined.",
    )
    include: tuple[str, ...] = _is(
        (),
        kinds.TEXTS,
        f"{RUNNER}.include",
        "Checkpoint only blobs that match one of these patterns. Empty: all.",
    )
    exclude: tuple[str, ...] = _is(
        (), kinds.TEXTS, f"{RUNNER}.exclude", "Do not checkpoint blobs that match one of these patterns."
    )
    unsaved_blobs: str = _is(
        WARN,
        kinds.choice(WARN, ERROR, IGNORE),
        f"{RUNNER}.unsaved_blobs",
        "What to do after the first epoch about blobs that stay from epoch to epoch and are not checkpointed.",
    )
    preemption_deadline_secs: float | None = _is(
        None,
        kinds.maybe(kinds.seconds(0)),
        f"{RUNNER}.deadline_secs",
        "How long after a preemption notice an epoch may go on whose tasks ask ws.should_stop(); then it is dropped, "
        "or saved as it is if it is resumable. None: until its end.",
    )
    max_consecutive_save_failures: int | None = _is(
        5,
        kinds.maybe(kinds.integer()),
        f"{RUNNER}.max_consecutive_save_failures",
        "End the run when more saves than this in a row have failed. None: never.",
    )
    raise_if_not_saved: bool = _is(
        True, kinds.BOOLEAN, f"{RUNNER}.raise_if_not_saved", "End with an error if the last epoch could not be saved."
    )
    exchange_timeout_secs: float = _is(
        600.0,
        kinds.seconds(),
        f"{RUNNER}.exchange_timeout_secs",
        "How long the processes of a run wait for each other between epochs.",
    )
    progress: bool | None = _is(
        None,
        kinds.maybe(kinds.BOOLEAN),
        f"{RUNNER}.progress",
        "Show a progress bar. None: where output is a terminal or a notebook.",
    )

    follow_interval_secs: float = _is(
        1.0, kinds.seconds(), f"{FOLLOW}.interval_secs", "How often an evaluator looks for new epochs."
    )
    follow_timeout_secs: float | None = _is(
        None,
        kinds.maybe(kinds.seconds(0)),
        f"{FOLLOW}.timeout_secs",
        "An evaluator ends when there was no new epoch for so long. None: never.",
    )

    def __post_init__(self) -> None:
        for name, value in checked({name: getattr(self, name) for name in ABOUT}, str).items():
            object.__setattr__(self, name, value)


ABOUT: Mapping[str, About] = {field.name: field.metadata["about"] for field in dataclasses.fields(Fields)}
"""All settings, by name."""

DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in dataclasses.fields(Fields)}


def checked(values: Mapping[str, object], shown: Callable[[str], str]) -> dict[str, Any]:
    """Values of all settings, read and checked together.

    Args:
        values: of every setting.
        shown: how a setting is called where it was given.

    Raises:
        InvalidArgumentError: see `epochckpt.flags.Settings`.
    """
    out = {name: read(name, value, shown) for name, value in values.items()}
    changed = {name: ABOUT[name].kind.write(value) for name, value in out.items() if value != DEFAULTS[name]}
    for rule in RULES:
        problem = rule.problem(changed, shown)
        if problem:
            raise InvalidArgumentError(problem)
    return out


def read(name: str, value: object, shown: Callable[[str], str]) -> Any:
    """One value, read and checked by itself."""
    try:
        return ABOUT[name].kind.read(value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{shown(name)}: {error}") from None


def check_names(names: Iterable[object]) -> None:
    """Refuses names that no setting has, and offers near ones."""
    unknown = [name for name in names if name not in ABOUT]
    if unknown:
        near = {name: " or ".join(difflib.get_close_matches(str(name), ABOUT, n=2, cutoff=0.5)) for name in unknown}
        listed = [f"{name!r}" + (f" (did you mean {like}?)" if like else "") for name, like in near.items()]
        raise InvalidArgumentError(f"no such setting: {', '.join(listed)}; there are {', '.join(ABOUT)}")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Two settings of which one rules the other out, or is of no use without it.

    Attributes:
        name: the one that is refused, if it is not at its default.
        other: which must not be at its default, or must be.
        needed: whether `other` is needed, or in the way.
        why: the reason, for a person.
    """

    name: str
    other: str
    needed: bool
    why: str

    def problem(self, changed: Mapping[str, str], shown: Callable[[str], str]) -> str | None:
        """What is wrong, if anything is.

        Args:
            changed: the settings that are not at their defaults, as texts.
            shown: how a setting is called where it was given, such as `--ckpt_directory`.
        """
        if self.name not in changed or (self.other in changed) is self.needed:
            return None
        one = f"{shown(self.name)}={changed[self.name]}"
        if self.needed:
            return f"{one} needs {shown(self.other)}: {self.why}"
        return f"{one} contradicts {shown(self.other)}={changed[self.other]}: {self.why}"


_BEYOND = "without it every epoch is kept"
_RANKED = "without it no epoch is ranked"
_NOT_READ_ONLY = {
    "save_interval_steps": "nothing is saved",
    "save_on_steps": "nothing is saved",
    "max_to_keep": "nothing is deleted",
    "keep_period": "nothing is deleted",
    "keep_time_interval_secs": "nothing is deleted",
    "keep_checkpoints_without_metrics": "nothing is deleted",
    "todelete_subdir": "nothing is deleted",
    "enable_async_checkpointing": "nothing is saved",
    "host_memory_limit_bytes": "nothing is saved",
    "metadata_handler": "nothing is reported",
    "resume": "nothing is trained",
    "include": "nothing is saved",
    "exclude": "nothing is saved",
    "unsaved_blobs": "nothing is saved",
    "preemption_deadline_secs": "nothing is trained",
    "max_consecutive_save_failures": "nothing is saved",
    "raise_if_not_saved": "nothing is saved",
}

RULES = (
    *(Rule(name, "read_only", False, f"{why} where everything is only read") for name, why in _NOT_READ_ONLY.items()),
    Rule("keep_period", "max_to_keep", True, _BEYOND),
    Rule("keep_time_interval_secs", "max_to_keep", True, _BEYOND),
    Rule("best_mode", "best_metric", True, _RANKED),
    Rule("keep_checkpoints_without_metrics", "best_metric", True, _RANKED),
    Rule("keep_checkpoints_without_metrics", "max_to_keep", True, _BEYOND),
)
"""All of them. What others need comes as `other`."""
