"""Flags: defined only when asked for, parsed by absl alone, and printed back as a flagfile that means the same."""

from __future__ import annotations

import copy
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from absl import flags as absl_flags
from hypothesis import given
from hypothesis import strategies as st

import epochckpt as ec
from epochckpt._settings import RULES, SETTINGS
from epochckpt.errors import InvalidArgumentError
from epochckpt.flags import Flags, Settings, define
from epochckpt.options import BUCKET_SETTINGS

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def parsed(*arguments: str, **defaults: Any) -> Flags:
    """What a program that was started with these arguments has."""
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_string("flagfile", "", "As absl defines it.", flag_values=values)
    found = define("ckpt", values, **defaults)
    assert values(["program", *arguments]) == ["program"]
    return found


def program(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of its own, as a user would."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


IMPORTING = """
import sys
import tempfile
from absl import flags
import jax, orbax.checkpoint
before = set(flags.FLAGS)
import epochckpt, epochckpt.flags
after = set(flags.FLAGS)
epochckpt.flags.define()
assert "ml_collections" not in sys.modules
assert not flags.FLAGS.is_parsed()
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
print(sorted(after - before), len(set(flags.FLAGS) - after), {n[:5] for n in set(flags.FLAGS) - after})
"""


@pytest.mark.slow
def test_importing_defines_no_flag() -> None:
    """`define` does, and only its own; neither parses, imports ml_collections or starts a backend."""
    done = program(IMPORTING)
    assert done.stdout.strip() == f"[] {len(SETTINGS)} {{'ckpt_'}}", done.stderr


MAIN = """
import json
from absl import app, flags
import epochckpt as ec
TRAIN, EVAL = ec.flags.define(max_to_keep=3), ec.flags.define("eval", read_only=True)
def main(argv):
    TRAIN.set_defaults(directory="/tmp/from_main")
    print(json.dumps([TRAIN.settings().directory, TRAIN.settings().max_to_keep, EVAL.settings().io_threads]))
    print(TRAIN.flagfile(), end="")
app.run(main)
"""


@pytest.mark.slow
def test_a_program_takes_its_flags_from_the_command_line(tmp_path: pathlib.Path) -> None:
    """Two prefixes side by side, a flagfile, what comes later wins, defaults of the program, its `--help`."""
    (tmp_path / "a.flags").write_text(
        "# why\n--ckpt_max_to_keep=7\n--ckpt_save_timeout_secs=2min\n--eval_io_threads=9\n"
    )
    done = program(MAIN, f"--flagfile={tmp_path}/a.flags", "--ckpt_max_to_keep=8", "--nockpt_verify")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert json.loads(first) == ["/tmp/from_main", 8, 9]
    assert rest == ["--ckpt_max_to_keep=8", "--ckpt_save_timeout_secs=120", "--ckpt_verify=false"]
    assert "ckpt_" not in program(MAIN, "--help").stdout  # that has the program's own flags
    shown = program(MAIN, "--helpfull").stdout
    assert all(f"{prefix}_{name}:" in shown for prefix in ("ckpt", "eval") for name in SETTINGS)
    assert re.search(r"ckpt_max_to_keep: .*\n.*\n\s+\(default: '3'\)\s+\(an integer of at least 1, or\s+none\)", shown)


def test_the_help_in_xml_says_what_each_value_may_be() -> None:
    """As `--help` does."""
    text = io.StringIO()
    parsed().flag_values.write_help_in_xml_format(text)
    assert "<type>seconds, such as 90, 10min or 1.5h, of at least 0.001</type>" in text.getvalue()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--ckpt_host_memory_limit_bytes=8XB"],
            ["--ckpt_host_memory_limit_bytes", "bytes", "'8XB'", "the units"],
        ),
        (["--ckpt_resume=-1"], ["--ckpt_resume", "the number of an epoch", "'-1'"]),
        (["--ckpt_max_to_kep=3"], ["'ckpt_max_to_kep'", "ckpt_max_to_keep"]),
        (["--ckpt_keep_period=5", "--ckpt_max_to_keep=none"], ["--ckpt_keep_period=5 needs --ckpt_max_to_keep"]),
        (["--ckpt_read_only"], ["--ckpt_max_to_keep=3 contradicts --ckpt_read_only=true"]),
    ],
)
def test_a_wrong_command_line_ends_the_program_before_it_begins(arguments: list[str], said: list[str]) -> None:
    """With absl's own error: a line with the flag, what was expected and what was found; no traceback."""
    with pytest.raises(absl_flags.Error) as caught:
        parsed(*arguments, max_to_keep=3)
    assert all(words in str(caught.value) for words in said)


@pytest.mark.slow
def test_what_app_run_says_of_a_contradiction() -> None:
    """The same through `app.run`, in a process."""
    done = program(MAIN, "--ckpt_read_only")
    assert done.returncode == 1
    assert "FATAL Flags parsing error" in done.stderr
    assert "--ckpt_max_to_keep=3 contradicts --ckpt_read_only=true: where everything is only read" in done.stderr
    assert "Traceback" not in done.stderr


def test_unparsed_flags_have_their_defaults_and_what_was_assigned() -> None:
    """As in a notebook: nothing is parsed, in whatever order values are assigned; wrong ones are named."""
    values = absl_flags.FlagValues()
    found = define("ckpt", values, max_to_keep=3)
    assert found.settings() == Settings(max_to_keep=3)
    assert found.options().max_to_keep == 3
    values["ckpt_best_mode"].value = "min"
    with pytest.raises(InvalidArgumentError, match="--ckpt_best_mode=min needs --ckpt_best_metric"):
        found.settings()
    values.ckpt_best_mode = "min"  # before what it needs
    values.ckpt_best_metric = "loss"
    values.ckpt_host_memory_limit_bytes = "8GB"
    assert found.settings().best_mode == "min"
    assert found.storage().host_memory_limit_bytes == 8 * 10**9
    values.ckpt_io_threads = "many"
    with pytest.raises(
        InvalidArgumentError, match=r"--ckpt_io_threads: expected an integer of at least 1, found 'many'"
    ):
        found.settings()
    assert not values.is_parsed()
    assert repr(found) == "Flags(prefix='ckpt')"


def test_a_second_definition_is_the_same_or_refused() -> None:
    """A notebook's cell runs again; other defaults, or a name that is taken, say so and define nothing."""
    values = absl_flags.FlagValues()
    first = define("ckpt", values, max_to_keep=3)
    assert define("ckpt", values, max_to_keep=3) == first == define("ckpt", values)
    assert hash(first) == hash(define("ckpt", values))
    assert define("eval", values) != first != define("ckpt", absl_flags.FlagValues())
    with pytest.raises(InvalidArgumentError, match="with the default 3 and not 5; set_defaults"):
        define("ckpt", values, max_to_keep=5)
    absl_flags.DEFINE_string("other_verify", "", "Somebody else's.", flag_values=values)
    before = set(values)
    with pytest.raises(InvalidArgumentError, match=r"--other_verify is defined already, by .*; choose another prefix"):
        define("other", values)
    for prefix in ("", "a-b", "1a", "a b", None):
        with pytest.raises(InvalidArgumentError, match="expected a prefix of letters"):
            define(prefix, values)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"max_to_kep.*near: 'max_to_keep'"):
        define("new", values, max_to_kep=3)
    with pytest.raises(InvalidArgumentError, match="keep_period=3 needs max_to_keep"):
        define("new", values, keep_period=3)
    assert set(values) == before


def test_defaults_that_depend_on_other_flags() -> None:
    """`set_defaults` gives way to what was given, in any order of what needs each other."""
    found = parsed("--ckpt_directory=/given", "--ckpt_io_threads=2")
    found.set_defaults(
        directory="/late", io_threads=7, keep_period=5, max_to_keep="3", best_mode="min", best_metric="x"
    )
    settings = found.settings()
    assert (settings.directory, settings.io_threads) == ("/given", 2)
    assert (settings.keep_period, settings.max_to_keep, settings.best_mode) == (5, 3, "min")
    with pytest.raises(InvalidArgumentError, match="no such setting: 'dirctory'"):
        found.set_defaults(dirctory="/x")
    with pytest.raises(InvalidArgumentError, match="--ckpt_verify: expected true or false, found 'maybe'"):
        found.set_defaults(verify="maybe")
    assert found.settings() == settings


def test_defaults_do_not_contradict_what_is_not_known_yet() -> None:
    """Before parsing nothing is given yet; afterwards what was given stays, so that a default cannot contradict it."""
    found = define("ckpt", values := absl_flags.FlagValues())
    with pytest.raises(InvalidArgumentError, match="--ckpt_keep_period: expected"):
        found.set_defaults(keep_period="often")
    found.set_defaults(keep_period=5)
    values(["program", "--ckpt_max_to_keep=3"])
    found.set_defaults(max_to_keep=None)
    assert (found.settings().keep_period, found.settings().max_to_keep) == (5, 3)
    found = parsed()
    with pytest.raises(InvalidArgumentError, match="--ckpt_keep_period=5 needs --ckpt_max_to_keep"):
        found.set_defaults(keep_period=5)
    assert found.settings().keep_period is None


def test_without_a_directory_the_flag_is_named() -> None:
    """By what would need it; a manager that is given needs none."""
    found = parsed()
    for make in (found.manager, found.follow, lambda: found.runner(ec.Job())):
        with pytest.raises(InvalidArgumentError, match="--ckpt_directory is not given"):
            make()


def test_flags_make_manager_runner_and_follower(tmp_path: pathlib.Path) -> None:
    """A short run by flags alone, seen by an evaluator's flags in the same program."""
    values = absl_flags.FlagValues()
    train, evaluate = define("ckpt", values), define("eval", values)
    names = [f"--{prefix}_step_prefix=epoch" for prefix in ("ckpt", "eval")]
    where = [f"--{prefix}_directory={tmp_path}/run" for prefix in ("ckpt", "eval")]
    values(["x", *names, *where, "--ckpt_max_to_keep=2", "--eval_read_only", "--eval_follow_timeout_secs=0"])
    job = ec.Job()
    job.init(lambda ws: ws.update(w=0))
    job.epoch(lambda ws: ws.update(w=ws["w"] + 1))
    job.stop_when(ec.stop.max_epochs(4))
    with train.manager() as manager:
        assert train.runner(job, manager, progress=False).train(ec.LocalSession()) == 4
    assert list(evaluate.follow()) == [3, 4]
    with evaluate.manager() as manager:
        assert manager.latest_step() == 4
    with pytest.raises(InvalidArgumentError, match="read_only"):
        evaluate.runner(job)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)
BYTES = st.integers(1, 2**60)
SECS = st.floats(1, 1e9)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "a path or URL, or nothing": st.none() | TEXT,
    "a text, or nothing": st.none() | TEXT,
    "true or false": st.booleans(),
    "true or false, or none": st.none() | st.booleans(),
    "letters, digits, '.', '_' and '-', a letter or digit first, or nothing": st.none()
    | st.sampled_from(["a", "none"]),
    "texts with commas between them": st.lists(TEXT.filter(lambda text: text == text.strip()), max_size=3),
}


BUCKET = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from(option.kind.examples) for name, option in BUCKET_SETTINGS.items()},
        "profile": st.text(st.characters(exclude_categories=["C"]), min_size=1),
        "first_retry_secs": st.floats(1e-4, 1),  # no longer than the longest one
        "longest_retry_secs": st.floats(1, 3600),
    },
)


def strategy(name: str) -> st.SearchStrategy[Any]:
    kind = SETTINGS[name].kind
    expected = kind.expected
    found = BUCKET if name == "store" else VALUES.get(expected)
    if found is None and name == "block_bytes":
        found = st.integers(4096, 2**28)
    elif found is None and expected.startswith("bytes"):
        found = BYTES
    elif found is None and expected.startswith("seconds"):
        found = SECS
    elif found is None and expected.startswith("an integer"):
        found = st.integers(1, 2**62)
    elif found is None and expected.startswith("epochs"):
        found = st.lists(st.integers(0, 2**62), max_size=4)
    elif found is None:
        found = st.sampled_from(kind.examples)
    return st.none() | found if expected.endswith("or none") else found


NEEDED = {rule.name: rule.other for rule in RULES if rule.needed}


@pytest.mark.slow
@given(values=st.fixed_dictionaries({}, optional={n: strategy(n) for n in SETTINGS if n != "read_only"}))
def test_a_flagfile_means_the_same_settings(values: dict[str, Any]) -> None:
    """Any values of any settings, printed and read by absl as it reads a file; or refused, if no line can hold one."""
    if NEEDED.keys() & values.keys():
        values = {**values, "max_to_keep": 3, "best_metric": "loss", "mirror": "gs://bucket/run"}
    settings, made = Settings(**values), parsed()
    for name in values:
        made.flag_values[f"ckpt_{name}"].value = getattr(settings, name)
    kept = [getattr(settings, name) for name in values]  # of blanks alone nothing
    texts = [v for value in kept for v in (value if isinstance(value, list | tuple) else [value])]
    if any(isinstance(v, str) and (v != v.strip() or not v.isprintable()) for v in texts):
        with pytest.raises(InvalidArgumentError, match="cannot be written as a line"):
            made.flagfile()
        return
    text = made.flagfile()
    lines = text.splitlines()
    assert len(lines) == sum(getattr(settings, name) != SETTINGS[name].default for name in values)
    assert read_by_absl(text).settings() == settings


def read_by_absl(text: str) -> Flags:
    """A new program that is given a flagfile with this text."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", suffix=".flags") as file:
        file.write(text)
        file.flush()
        return parsed(f"--flagfile={file.name}")


def test_defaults_of_the_program_are_not_printed_and_their_absence_is() -> None:
    """`--ckpt_max_to_keep=none` where the program would keep three."""
    assert parsed(max_to_keep=3).flagfile() == ""
    text = parsed("--ckpt_max_to_keep=none", max_to_keep=3).flagfile()
    assert text == "--ckpt_max_to_keep=none\n"


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a ", "a\u2003", "\udcff"])
def test_a_value_that_no_line_can_hold_is_refused(value: str) -> None:
    found = parsed()
    found.flag_values["ckpt_directory"].value = value
    with pytest.raises(InvalidArgumentError, match=r"--ckpt_directory: .* cannot be written"):
        found.flagfile()


def test_absl_prints_them_itself() -> None:
    """`FLAGS.flags_into_string`, which programs log, reads back as the same settings, too."""
    found = parsed("--ckpt_include=a,b c", "--ckpt_part_bytes=1GiB", "--ckpt_resume=3", "--nockpt_create")
    found.flag_values.ckpt_max_to_keep = 4
    text = found.flag_values.flags_into_string()
    assert read_by_absl(text.replace("--flagfile=", "")).settings() == found.settings()


def test_flags_can_be_copied() -> None:
    """As programs do that try flags in a loop: a copy has the values, and checks its own."""
    values = absl_flags.FlagValues()
    define("ckpt", values, max_to_keep=3)
    copied = copy.deepcopy(values)
    assert copied(["program", "--ckpt_max_to_keep=4"]) == ["program"]
    assert copied.ckpt_max_to_keep == 4
    assert values["ckpt_max_to_keep"].value == 3
