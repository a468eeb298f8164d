"""`Settings`: all that can be said about checkpoints without code, checked as a whole, and what it makes."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp
from absl import logging

from epochckpt._settings import fields
from epochckpt._settings import kinds as kinds
from epochckpt.errors import InvalidArgumentError, say
from epochckpt.jobs import Job, JobRunner
from epochckpt.jobs.resume import AUTO
from epochckpt.manager import CheckpointManager, metadata_handlers
from epochckpt.manager.evaluator import follow
from epochckpt.options import StorageOptions

NO_DIRECTORY = "directory is not given: where are the epochs?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(fields.Fields):
    """All settings of checkpoints that need no code; flags and config files end up here.

    A value may be given as it is or as a text, as on a command line (`"8GB"`, `"10min"`). Each setting decides one
    thing and bears the name that this has in `orbax.checkpoint.CheckpointManagerOptions`, `StorageOptions`,
    `CheckpointManager` or `JobRunner`, unless docs/configure.md says otherwise. Settings that contradict each other are
    refused.

    Raises:
        InvalidArgumentError: names the setting, what was expected and what was found.
    """

    @classmethod
    def from_mapping(cls, mapping: Any) -> Settings:
        """Settings from a mapping: of a JSON or TOML file, or an `ml_collections.ConfigDict`.

        Args:
            mapping: values by name. None, as of a placeholder that nobody has filled in, means the default.

        Raises:
            InvalidArgumentError: an unknown name (offers near ones), or see `Settings`.
        """
        values = dict(_values(mapping))
        fields.check_names(values)
        return cls(**{name: value for name, value in values.items() if value is not None})

    def options(self) -> ocp.CheckpointManagerOptions:
        """Orbax's options: what is saved and kept, and how it is named."""
        interval = self.keep_time_interval_secs
        return ocp.CheckpointManagerOptions(
            # Orbax turns these two off by itself where only reading is done, with a warning each
            save_interval_steps=0 if self.read_only else self.save_interval_steps,
            create=self.create and not self.read_only,
            max_to_keep=self.max_to_keep,
            keep_time_interval=None if interval is None else datetime.timedelta(seconds=interval),
            keep_period=self.keep_period,
            best_fn=None if self.best_metric is None else Metric(self.best_metric),
            best_mode=self.best_mode,
            keep_checkpoints_without_metrics=self.keep_checkpoints_without_metrics,
            step_prefix=self.step_prefix,
            step_format_fixed_length=self.step_format_fixed_length,
            save_on_steps=self.save_on_steps or None,
            todelete_subdir=self.todelete_subdir,
            read_only=self.read_only,
            enable_async_checkpointing=self.enable_async_checkpointing,
        )

    def storage(self) -> StorageOptions:
        """How bytes get to storage, and timeouts."""
        return StorageOptions(**{f.name: getattr(self, f.name) for f in dataclasses.fields(StorageOptions)})

    def handler(self) -> metadata_handlers.AbstractMetadataHandler | None:
        """A new metadata handler, or None."""
        if self.metadata_handler is None:
            return None
        kind, path = kinds.split_handler(self.metadata_handler)
        if kind == "sqlite":
            return metadata_handlers.SqliteMetadataHandler(path)
        return metadata_handlers.JsonMetadataHandler(path or None)

    def manager(self, **overrides: Any) -> CheckpointManager:
        """Opens the directory; in a job of several processes all must do so.

        Args:
            overrides: arguments of `CheckpointManager`, in place of those that the settings make or beside them.

        Raises:
            InvalidArgumentError: there is no directory. To train without saving, leave this and the runner's manager
                out: `epochckpt.JobRunner(job)`.
        """
        arguments: dict[str, Any] = {"directory": self.directory, "node": self.node, **overrides}
        if arguments["directory"] is None:
            raise InvalidArgumentError(NO_DIRECTORY)
        for name, make in (("options", self.options), ("storage", self.storage), ("metadata_handler", self.handler)):
            if name not in overrides:
                arguments[name] = make()
        return CheckpointManager(**arguments)

    def runner(self, job: Job, manager: Any = None, **overrides: Any) -> JobRunner:
        """A runner of a job.

        Args:
            job: what to run.
            manager: the checkpoint manager, if it is not to be `self.manager()`, which is closed when the program ends.
            overrides: arguments of `JobRunner`, in place of those that the settings make or beside them.

        Raises:
            InvalidArgumentError: see `manager` and `JobRunner`; or everything is to be only read.
        """
        if self.read_only:
            raise InvalidArgumentError("read_only: a runner saves; open the directory with manager(), or follow() it")
        epoch = None if isinstance(self.resume, str) else self.resume
        arguments: dict[str, Any] = {
            "resume_from_epoch": epoch,
            "resume": AUTO if epoch is not None else self.resume,
            "include": self.include or None,
            "exclude": self.exclude or None,
            "deadline_secs": self.preemption_deadline_secs,
            "max_consecutive_save_failures": self.max_consecutive_save_failures,
            "raise_if_not_saved": self.raise_if_not_saved,
            "unsaved_blobs": self.unsaved_blobs,
            "exchange_timeout_secs": self.exchange_timeout_secs,
            "progress": self.progress,
        }
        if manager is None:
            manager = self.manager()
        elif getattr(manager, "metadata_handler", None) is None and "metadata_handler" not in overrides:
            arguments["metadata_handler"] = self.handler()  # nobody tells it otherwise
        return JobRunner(job, manager, **(arguments | overrides))

    def follow(self, **overrides: Any) -> Iterator[int]:
        """Yields each newly committed epoch of the directory, for an evaluator.

        Args:
            overrides: arguments of `epochckpt.follow`, in place of those that the settings make or beside them.

        Raises:
            InvalidArgumentError: there is no directory.
        """
        arguments: dict[str, Any] = {
            "directory": self.directory,
            "interval_secs": self.follow_interval_secs,
            "timeout_secs": self.follow_timeout_secs,
            "options": self.options(),
        }
        arguments |= overrides
        if arguments["directory"] is None:
            raise InvalidArgumentError(NO_DIRECTORY)
        return follow(**arguments)


@dataclasses.dataclass(frozen=True)
class Metric:
    """Ranks epochs by one of their metrics, as `CheckpointManagerOptions.best_fn`.

    Attributes:
        name: of the metric. An epoch that lacks it, or where it is no number, counts as one without metrics.
    """

    name: str

    def __call__(self, metrics: Any) -> Any:
        """The value, or None."""
        value = metrics.get(self.name) if isinstance(metrics, Mapping) else None
        if isinstance(value, int | float):
            return value
        _warn_once(self.name, tuple(sorted(map(str, metrics))) if isinstance(metrics, Mapping) else ())
        return None


@functools.lru_cache(maxsize=100)
def _warn_once(name: str, found: tuple[str, ...]) -> None:
    what = f"are {', '.join(found)}" if found else "is none"
    logging.warning("best_metric %r is no number in the metrics of an epoch; there %s", name, what)


def _values(mapping: Any) -> Iterator[tuple[str, Any]]:
    # one by one, and not items(): some values of a ConfigDict, which is no Mapping, raise
    if not callable(getattr(mapping, "keys", None)):
        raise InvalidArgumentError(f"settings come from a mapping, got {type(mapping).__name__}")
    for name in list(mapping.keys()):
        try:
            yield name, mapping[name]
        except Exception as error:  # the mapping's own: a required placeholder that nobody has filled in
            raise InvalidArgumentError(f"{name}: has no value ({say(error)})") from error
