"""Settings: each decides one thing, wrong values are named, and what is written reads back equal."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import config_dict

import epochckpt as ec
from epochckpt._kinds import MAX_INT, MAX_SECS
from epochckpt._settings import RULES, SETTINGS, Rule, Setting
from epochckpt.errors import InvalidArgumentError
from epochckpt.flags import Settings, from_config
from epochckpt.options import BUCKET_SETTINGS
from epochckpt.orbax import options as checks


def sample(row: Setting) -> Any:
    """A value that is not the default."""
    return next(value for value in row.kind.examples if value != row.default)


SAMPLES = {name: sample(row) for name, row in SETTINGS.items()}
BESIDE = {name: list(row.needs) for name, row in SETTINGS.items()}  # what a setting needs beside it
# What only code can say: objects, functions, and settings of things that are no run's business.
BY_CODE = {
    "CheckpointManagerOptions": {
        "step_name_format",
        "single_host_load_and_broadcast",
        "async_options",
        "should_save_fn",
        "file_options",
        "save_root_metadata",
        "save_decision_policy",
        "preservation_policy",
        "prevent_write_metrics",
        "enable_should_save_is_saving_in_progress_check",
        "multiprocessing_options",
    },
    "StorageOptions": set(),
    "CheckpointManager": {
        "checkpointers",
        "metadata",
        "item_names",
        "item_handlers",
        "logger",
        "handler_registry",
        "options",
        "storage",
    },
    "Job": set(),
    "JobRunner": {"job", "checkpoint_manager", "upload_task_group_builder", "metadata_handler", "resume_from_epoch"},
    "follow": {"after", "options", "stop", "directory"},
}


def beside(name: str) -> dict[str, Any]:
    return {other: SAMPLES[other] for other in BESIDE[name]}


def made(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What settings make, thing by thing: every option, and every argument of what is called."""
    out: dict[str, Any] = {}

    def record(owner: str) -> Any:
        return lambda *args, **kwargs: out.update({f"{owner}.{k}": v for k, v in kwargs.items()})

    with monkeypatch.context() as patch:
        for owner in ("CheckpointManager", "JobRunner", "follow"):
            patch.setattr(f"epochckpt._settings.{owner}", record(owner))
        settings.manager(directory=settings.directory or "none")
        job = ec.Job()
        if not settings.read_only:
            settings.runner(job, object(), metadata_handler=None)
        out["Job.stop_when"] = repr(job.stop_conditions)
        settings.follow(directory="none")
    handler = out["CheckpointManager.metadata_handler"]
    out["CheckpointManager.metadata_handler"] = handler and type(handler)
    for owner, value in (("CheckpointManagerOptions", settings.options()), ("StorageOptions", settings.storage())):
        out |= {f"{owner}.{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    for name in ("CheckpointManager.options", "CheckpointManager.storage", "follow.options"):
        del out[name]
    return out


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_examples_are_values_of_their_kind(name: str) -> None:
    """Each stands for itself, so that a sample of it tests what is set."""
    kind = SETTINGS[name].kind
    assert [kind.parse(value) for value in kind.examples] == list(kind.examples)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_each_setting_decides_the_one_thing_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all options and arguments that are made, that one changes and no other."""
    without = made(Settings(**beside(name)), monkeypatch)
    found = made(Settings(**{name: SAMPLES[name]}, **beside(name)), monkeypatch)
    changed = {key for key in found if without.get(key) != found[key]}
    also = {
        # asked to resume from an epoch, the runner is told its number
        "resume": ({"JobRunner.resume"}, {"JobRunner.resume_from_epoch"}),
        # Orbax's own consequences of reading only
        "read_only": (
            set(),
            {"CheckpointManagerOptions.create", "CheckpointManagerOptions.save_interval_steps"},
        ),
    }
    minus, plus = also.get(name, (set(), set()))
    assert changed == {f"{SETTINGS[name].owner}.{SETTINGS[name].option}"} - minus | plus


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        ("CheckpointManagerOptions", {name.partition(".")[0] for name in checks.HONOURED}),
        ("StorageOptions", {field.name for field in dataclasses.fields(ec.StorageOptions)}),
        ("CheckpointManager", set(inspect.signature(ec.CheckpointManager).parameters)),
        ("Job", {"stop_when"}),
        ("JobRunner", set(inspect.signature(ec.JobRunner).parameters)),
        ("follow", set(inspect.signature(ec.follow).parameters)),
    ],
)
def test_whatever_there_is_can_be_set_or_is_left_to_code(owner: str, names: set[str]) -> None:
    """A new option cannot be forgotten here."""
    sets = [row.option for row in SETTINGS.values() if row.owner == owner]
    assert len(sets) == len(set(sets))
    assert set(sets) | BY_CODE[owner] == names
    assert not set(sets) & BY_CODE[owner]


def test_defaults_are_those_of_what_they_set() -> None:
    """Settings without a word change nothing."""
    assert Settings().storage() == ec.StorageOptions()
    assert Settings().options() == ocp.CheckpointManagerOptions()
    assert Settings().handler() is None
    parameters = inspect.signature(ec.JobRunner).parameters
    for name, row in SETTINGS.items():
        if row.owner == "JobRunner" and name not in ("include", "exclude"):
            assert row.default == parameters[row.option].default


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_what_is_written_reads_back_equal(name: str) -> None:
    """Of every setting: the sample, the default, and through JSON."""
    kind = SETTINGS[name].kind
    for value in (SAMPLES[name], SETTINGS[name].default):
        assert kind.parse(kind.serialize(value)) == value
    settings = Settings(**{name: SAMPLES[name]}, **beside(name))
    assert from_config(json.loads(json.dumps(dataclasses.asdict(settings)))) == settings


@given(st.integers(1, MAX_INT))
def test_any_number_of_bytes_is_written_exactly(value: int) -> None:
    kind = SETTINGS["host_memory_limit_bytes"].kind
    assert kind.parse(kind.serialize(value)) == value


@given(st.floats(0, MAX_SECS))
def test_any_duration_is_written_exactly(value: float) -> None:
    kind = SETTINGS["follow_timeout_secs"].kind
    assert kind.parse(kind.serialize(value)) == value


@pytest.mark.slow
@given(st.lists(st.text(min_size=1).filter(lambda t: t == t.strip() and not set(t) & set("\r\n\0"))))
def test_any_list_of_texts_is_written_exactly(value: list[str]) -> None:
    """With commas and quotes in them, too."""
    kind = SETTINGS["include"].kind
    assert kind.parse(kind.serialize(tuple(value))) == tuple(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5KiB", 1536),
        ("0.5TB", 5 * 10**11),
        ("4096", 4096),
        ("1e9", 10**9),
        ("7B", 7),
        (np.int64(9), 9),
    ],
)
def test_bytes_with_units(text: Any, expected: int) -> None:
    assert Settings(host_memory_limit_bytes=text).host_memory_limit_bytes == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("250ms", 0.25), ("10min", 600), ("1.5h", 5400), ("2d", 172800), (3, 3), (np.float32(0.5), 0.5)],
)
def test_durations_with_units(text: Any, expected: float) -> None:
    found = Settings(save_timeout_secs=text).save_timeout_secs
    assert found == expected
    assert type(found) is float


@pytest.mark.parametrize("none", ["none", "None", "", None])
def test_none_is_a_value_of_what_may_be_none(none: Any) -> None:
    assert Settings(max_to_keep=none) == Settings()


WRONG: list[tuple[str, Any, str]] = [
    ("max_to_keep", 0, "an integer of at least 1, or none, found 0"),
    ("max_to_keep", 2.5, "found 2.5"),
    ("max_to_keep", True, "found True"),
    ("max_to_keep", "three", "found 'three'"),
    ("max_to_keep", 10**30, "or none"),
    ("save_interval_steps", None, "an integer of at least 0, found None"),
    ("save_interval_steps", "-1", "found '-1'"),
    ("host_memory_limit_bytes", "8XB", "one of the units B, KB, MB, GB, TB, PB, KiB"),
    ("host_memory_limit_bytes", "8G", "one of the units B, KB"),
    ("host_memory_limit_bytes", "GB", "found 'GB'"),
    ("host_memory_limit_bytes", "8GB or so", "found"),
    ("host_memory_limit_bytes", "0.1B", "found"),
    ("host_memory_limit_bytes", "9e99TB", "found"),
    ("host_memory_limit_bytes", -5, "found -5"),
    ("block_bytes", "1GB", "found '1GB': it is not from 4096 to 268435456"),
    ("save_timeout_secs", "10m", "one of the units s, ms, min, h, d, w"),
    ("save_timeout_secs", "soon", "found 'soon'"),
    ("save_timeout_secs", 0, "of at least 0.001, found 0"),
    ("save_timeout_secs", math.nan, "found nan"),
    ("save_timeout_secs", math.inf, "found inf"),
    ("save_timeout_secs", "1e99", "found"),
    ("keep_time_interval_secs", 0.5, "of at least 1"),
    ("verify", "maybe", "true or false, found 'maybe'"),
    ("verify", 2, "true or false, found 2"),
    ("best_mode", "largest", "max or min, found 'largest': value should be one of <max|min>"),
    ("resume", -1, "auto, never, must, or the number of an epoch, found -1"),
    ("resume", "always", "found 'always'"),
    ("resume", 1.0, "found 1.0"),
    ("save_on_steps", (1, -2), "found (1, -2)"),
    ("save_on_steps", "1;2", "found '1;2'"),
    ("save_on_steps", {"a": 1}, "found"),
    ("include", ("a", 3), "found ('a', 3)"),
    ("include", 'a,"b', "found"),
    ("include", "a,,b", "found 'a,,b'"),
    ("step_prefix", "../x", "letters, digits"),
    ("directory", 7, "a path or URL, or nothing, found 7"),
    ("directory", "a\0b", "found"),
    ("directory", pathlib.Path("gs://bucket/run"), "was a URL before pathlib.Path removed a slash"),
    ("metadata_handler", "postgres:x", "json, json:FILE or sqlite:FILE"),
    ("metadata_handler", "sqlite", "sqlite:FILE"),
    ("metadata_handler", "json: x", "json:FILE"),
    ("metadata_handler", "sqlite: x", "sqlite:FILE"),
    ("directory", b"x" * 1000, "…"),
    ("stop_when", "max_epoch(3)", "there is no condition 'max_epoch'; near: 'max_epochs'"),
    ("stop_when", "max_epochs", "expected conditions joined by | and &, such as max_epochs(100) | nan('loss')"),
    ("stop_when", "max_epochs(3) + preempted", "expected conditions joined by | and &"),
    ("stop_when", "max_epochs(0)", "max_epochs(n) must be a whole number, at least 1, got 0"),
    ("stop_when", "nan(loss)", "loss is no value; write a text in quotes"),
    ("stop_when", "nan(*['loss'])", "is no value"),
    ("stop_when", "nan()", "missing 1 required positional argument: 'metric'"),
    ("stop_when", "preempted(3)", "expected conditions joined by | and &"),
    ("stop_when", "__import__('os')", "there is no condition '__import__'"),
    ("stop_when", "max_epochs(", "found 'max_epochs('"),
    ("stop_when", "(" * 1000, "nested parentheses"),
    ("stop_when", 3, "found 3"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_a_wrong_value_is_named(name: str, value: Any, said: str) -> None:
    """The setting, what was expected, what was found, and a unit that is not known; in one line."""
    with pytest.raises(InvalidArgumentError) as caught:
        Settings(**{name: value})
    assert str(caught.value).startswith(f"{name}: expected ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_unknown_names_come_with_near_ones() -> None:
    """All of them at once, and what there is."""
    with pytest.raises(InvalidArgumentError) as caught:
        from_config({"max_to_kep": 3, "verfy": True, "zzz": 1, "io_threads": 2})
    assert "'max_to_kep' (near: 'max_to_keep'" in str(caught.value)
    assert "'verfy' (near: 'verify'" in str(caught.value)
    assert "'zzz' (there are: 'directory', 'read_only'" in str(caught.value)


@pytest.mark.parametrize("what", [None, 3, "max_to_keep=3", ["max_to_keep"]])
def test_settings_come_from_a_mapping(what: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="settings come from a mapping, got "):
        from_config(what)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.other}")
def test_contradictions_are_refused_by_both_names(rule: Rule) -> None:
    """And what was missing makes it right."""
    without = {name: value for name, value in beside(rule.name).items() if name != rule.other}
    values = {rule.name: SAMPLES[rule.name], **(without if rule.needed else {rule.other: SAMPLES[rule.other]})}
    with pytest.raises(InvalidArgumentError) as caught:
        Settings(**values)
    assert f"{rule.name}={SETTINGS[rule.name].kind.serialize(SAMPLES[rule.name])} " in str(caught.value)
    if rule.needed:
        assert f"needs {rule.other}: " in str(caught.value)
    else:
        assert f"contradicts {rule.other}=true: " in str(caught.value)
    Settings(**{rule.name: SAMPLES[rule.name], **beside(rule.name)})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().max_to_keep = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Settings("/tmp/run")  # type: ignore[misc]


def saved(directory: Any, settings: Settings, metrics: Mapping[int, Any]) -> list[int]:
    """Epochs with metrics are saved one after the other; which are left."""
    with settings.manager(directory=directory) as manager:
        for epoch, found in metrics.items():
            manager.save(epoch, args=ocp.args.StandardSave({"a": jnp.full(3, epoch)}), metrics=found)
            manager.wait_until_finished()
        return list(manager.all_steps())


METRICS = {0: None, 1: {"acc": 0.5}, 2: {"acc": 0.9}, 3: {"loss": 1.0}, 4: {"acc": 0.1}, 5: {"acc": 0.2}}


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        (Settings(), [0, 1, 2, 3, 4, 5]),
        (Settings(max_to_keep=2), [4, 5]),
        (Settings(max_to_keep=1, keep_period=2), [0, 2, 4, 5]),
        (Settings(max_to_keep=1, best_metric="acc"), [0, 2, 3, 5]),
        (Settings(max_to_keep=1, best_metric="acc", keep_checkpoints_without_metrics=False), [2, 5]),
        (Settings(max_to_keep=1, best_metric="acc", best_mode="min"), [0, 3, 4, 5]),
        (Settings(save_interval_steps=3), [0, 3]),
        (Settings(save_interval_steps=0, save_on_steps=(2, 5)), [0, 2, 5]),
    ],
)
def test_the_rules_about_epochs_do_what_they_say(tmp_path: pathlib.Path, settings: Settings, left: list[int]) -> None:
    """Real epochs; one without metrics, and one that lacks the metric that counts."""
    assert saved(tmp_path, settings, METRICS) == left


def test_a_metric_that_no_epoch_has_is_said_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the names that there are; ranking goes on without it."""
    metrics = {epoch: {"accuracy": 1.0, "loss": epoch} for epoch in range(3)}
    assert saved(tmp_path, Settings(max_to_keep=1, best_metric="acuracy"), metrics) == [0, 1, 2]
    (said,) = [record.getMessage() for record in caplog.records if "acuracy" in record.getMessage()]
    assert "'accuracy', 'loss'" in said


NESTED = {
    0: {"eval": {"acc": 0.9}},
    1: {"eval/acc": 0.5},
    2: {"eval/acc": 0.7, "eval": {"acc": 1.0}},  # the key of this very name counts, wherever it stands
    3: {"eval": {"acc": 1.0}, "eval/acc": 0.6},
    4: {"eval": {"acc": 0.1}},
}


def test_a_metric_in_a_mapping_is_found_by_its_name(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """As `outer/inner`, by the options of a manager as by a view; a key of this very name counts before it."""
    settings = Settings(max_to_keep=3, best_metric="eval/acc", keep_checkpoints_without_metrics=False)
    assert saved(tmp_path / "a", settings, NESTED) == [0, 2, 3, 4]
    assert not [record for record in caplog.records if "best_fn" in record.getMessage()]
    seen = ec.inspect(tmp_path / "a", metric="eval/acc").overview()
    assert seen.history["eval/acc"] == ((0, 0.9), (1, 0.5), (2, 0.7), (3, 0.6), (4, 0.1))
    assert saved(tmp_path / "b", Settings(max_to_keep=1, best_metric="eval/f1"), {0: NESTED[0], 1: NESTED[1]}) == [0, 1]
    (said,) = [record.getMessage() for record in caplog.records if "eval/f1" in record.getMessage()]
    assert "finds no 'eval/f1' for checkpoint" in said
    assert "whose metrics are: 'eval/acc'" in said


@pytest.mark.parametrize("values", [{"node": "a/b"}, {"todelete_subdir": "a/b"}], ids=repr)
def test_a_name_that_is_no_folder_is_refused_by_the_manager(tmp_path: pathlib.Path, values: dict[str, Any]) -> None:
    """Before anything is written."""
    with pytest.raises(InvalidArgumentError, match="'a/b'"):
        Settings(directory=tmp_path / "run", **values).manager()


def counting_job(epochs: int) -> ec.Job:
    job = ec.Job()

    @job.init
    def init(ws: ec.Workspace) -> None:
        ws["w"] = jnp.zeros(2)

    @job.epoch
    def train(ws: ec.Workspace) -> dict[str, float]:
        ws["w"] += 1
        return {"acc": 1.0}

    job.stop_when(ec.stop.max_epochs(epochs))
    return job


def test_a_runner_resumes_as_the_settings_say(tmp_path: pathlib.Path) -> None:
    """auto goes on, a number goes back, never and must are refused where they do not fit."""
    base = {"directory": tmp_path / "run", "metadata_handler": f"json:{tmp_path}/last.json", "progress": False}
    with pytest.raises(ec.errors.EpochNotFoundError), Settings(**base, resume="must").manager() as manager:
        Settings(**base, resume="must").runner(counting_job(2), manager).train(ec.LocalSession())
    runner = Settings(**base).runner(counting_job(3))  # makes its own manager
    assert runner.train(ec.LocalSession()) == 3
    runner.checkpoint_manager.close()
    assert json.loads((tmp_path / "last.json").read_text())["epoch"] == 3
    with Settings(**base, resume=1).manager() as manager:
        runner = Settings(**base, resume=1).runner(counting_job(2), manager)
        assert runner.train(ec.LocalSession()) == 2
        assert runner.result.resumed_from == 1
        assert list(manager.all_steps()) == [0, 1, 2]
    with pytest.raises(InvalidArgumentError, match="never"), Settings(**base).manager() as manager:
        Settings(**base, resume="never").runner(counting_job(2), manager).train(ec.LocalSession())


def test_a_run_ends_as_the_settings_say_or_as_the_job_does(tmp_path: pathlib.Path) -> None:
    """The condition of `stop_when` joins those of the job, once for all runners of it."""
    settings = Settings(directory=tmp_path, stop_when='max_epochs(2) | metric_above("acc", 1)', progress=False)
    job = counting_job(3)
    with settings.manager() as manager:
        runners = [settings.runner(job, manager) for _ in range(2)]
        assert list(map(repr, job.stop_conditions)) == ["max_epochs(3)", "(max_epochs(2) | metric_above('acc', 1.0))"]
        assert runners[1].train(ec.LocalSession()) == 2
        assert runners[1].result.stop_reason == "max_epochs(2)"
    longer = dataclasses.replace(settings, stop_when="max_epochs(4)")
    assert longer.runner(counting_job(9)).train(ec.LocalSession()) == 4
    with pytest.raises(InvalidArgumentError, match=r"counts epochs"):
        Settings(directory=tmp_path, stop_when="max_steps(9)").runner(counting_job(3))


def test_the_handler_is_told_by_the_runner_if_not_by_the_manager(tmp_path: pathlib.Path) -> None:
    """A manager that was made without one, also stock Orbax's."""
    settings = Settings(metadata_handler=f"sqlite:{tmp_path}/runs.sqlite", progress=False)
    with ocp.CheckpointManager(tmp_path / "run", options=settings.options()) as manager:
        assert settings.runner(counting_job(2), manager).train(ec.LocalSession()) == 2
    epochs = ec.metadata.SqliteMetadataHandler(tmp_path / "runs.sqlite").epochs()
    assert [row.epoch for row in epochs if row.outcome == "written"] == [0, 1, 2]


def test_without_a_directory_nothing_is_made(tmp_path: pathlib.Path) -> None:
    """Rather than a run that is not saved; and a runner for what is only read is refused."""
    for make in (Settings().manager, Settings().follow, lambda: Settings().runner(ec.Job())):
        with pytest.raises(InvalidArgumentError, match="directory is not given"):
            make()
    with pytest.raises(InvalidArgumentError, match="read_only: a runner saves"):
        Settings(directory=tmp_path, read_only=True).runner(ec.Job())


def test_overrides_go_before_settings(tmp_path: pathlib.Path) -> None:
    """Arguments of the manager and of the runner, by their names there."""
    settings = Settings(directory=tmp_path / "a", max_to_keep=1, resume="must", metadata_handler=f"json:{tmp_path}/x")
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with settings.manager(options=options, directory=tmp_path / "c", metadata_handler=None) as manager:
        assert manager.directory.name == "c"
        assert manager.metadata_handler is None
        runner = settings.runner(counting_job(4), manager, resume="auto", progress=False)
        runner.train(ec.LocalSession())
        assert list(manager.all_steps()) == [3, 4]
    assert not (tmp_path / "a").exists()


def test_an_evaluator_follows(tmp_path: pathlib.Path) -> None:
    """In the names that the settings give to epochs, until there was nothing new for so long."""
    names: dict[str, Any] = {"directory": tmp_path, "step_prefix": "epoch", "step_format_fixed_length": 4}
    assert saved(tmp_path, Settings(**names), {0: None, 7: None}) == [0, 7]
    assert (tmp_path / "epoch_0007").is_dir()
    settings = Settings(**names, read_only=True, follow_interval_secs=0.01, follow_timeout_secs=0)
    assert list(settings.follow()) == [0, 7]
    assert list(settings.follow(after=0)) == [7]
    with settings.manager() as manager:
        assert manager.restore(7)["a"].tolist() == [7, 7, 7]
        assert not manager.save(8, args=ocp.args.StandardSave({}))


def config(**values: Any) -> config_dict.ConfigDict:
    return config_dict.ConfigDict(values)


def test_a_config_dict_with_all_its_tricks_gives_settings() -> None:
    """References, placeholders that are filled or not, locked and frozen ones, lists, texts with units."""
    whole = config(every=10, checkpoint=config(save_on_steps=[3, 1], host_memory_limit_bytes="8GB", max_to_keep=3))
    part = whole.checkpoint
    part.keep_period = whole.get_ref("every") * 2
    part.io_threads = config_dict.placeholder(int)
    part.save_timeout_secs = config_dict.placeholder(float)
    part.resume = config_dict.required_placeholder(str)
    expected = Settings(
        save_on_steps=(1, 3),
        host_memory_limit_bytes=8 * 10**9,
        max_to_keep=3,
        keep_period=20,
        save_timeout_secs=30.0,
        resume="must",
    )
    with pytest.raises(InvalidArgumentError, match="resume: has no value"):
        from_config(part)
    part.resume, part.save_timeout_secs = "must", 30.0
    assert from_config(part) == expected
    whole.lock()
    assert from_config(whole.checkpoint) == expected
    assert from_config(config_dict.FrozenConfigDict(whole).checkpoint) == expected
    with whole.unlocked():
        whole.every = 50
    assert from_config(whole.checkpoint).keep_period == 100
    with pytest.raises(InvalidArgumentError, match=r"'keep_periods' \(near: 'keep_period'"):
        from_config(config(keep_periods=3))
    with pytest.raises(InvalidArgumentError, match="max_to_keep: expected an integer"):
        from_config(config(max_to_keep=config(n=3)))
    with pytest.raises(InvalidArgumentError, match="save_on_steps: expected epochs"):
        from_config(config(save_on_steps=config(n=3)))


@pytest.mark.parametrize("kind", [dict, config_dict.ConfigDict, config_dict.FrozenConfigDict])
def test_none_in_a_config_is_none(kind: Any) -> None:
    """Where a setting may be none, as an empty placeholder is; of the others both mean the default."""
    values = {"max_blocked_secs": None, "max_consecutive_save_failures": None, "io_threads": None}
    settings = from_config(kind(values))
    assert (settings.max_blocked_secs, settings.max_consecutive_save_failures) == (None, None)
    assert settings.io_threads == Settings().io_threads
    with pytest.raises(InvalidArgumentError, match=r"'max_blocked_sec' \(near: 'max_blocked_secs'"):
        from_config(kind({"max_blocked_sec": None}))


def test_settings_as_a_mapping_make_a_config(tmp_path: pathlib.Path) -> None:
    """`dataclasses.asdict` and back, by way of a ConfigDict."""
    settings = Settings(directory=tmp_path, max_to_keep=3, include=("a",), save_on_steps=(1, 2))
    assert settings.directory == str(tmp_path)
    assert from_config(config(**dataclasses.asdict(settings))) == settings


def test_help_is_a_line_with_what_is_expected() -> None:
    """Each says what it is for, ends as a sentence, and holds no line break; those of buckets, too."""
    for row in (*SETTINGS.values(), *BUCKET_SETTINGS.values()):
        assert row.help.endswith(".")
        assert "\n" not in row.help + row.kind.expected
