"""Stop conditions: what each says, that compositions show every epoch to every operand, and that states survive."""

from __future__ import annotations

import json
import logging
import math
import operator
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

import epochckpt as ec
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import checksums
from epochckpt.jobs import stop, stop_states, stop_text
from epochckpt.storage import open_store


def at(epoch: int = 1, elapsed: float = 0.0, total: float = 0.0, preempted: bool = False, **metrics: Any) -> Any:
    return stop.Context(
        epoch=epoch,
        metrics=metrics,
        workspace={},
        elapsed_secs=elapsed,
        total_secs=total,
        preempted=preempted,
    )


def shown_all(condition: stop.Condition, values: list[Any]) -> list[bool]:
    return [condition(at(epoch, x=value)) for epoch, value in enumerate(values, start=1)]


def through_json(value: Any) -> Any:
    """What comes back from a strict JSON file, and from a record of ours."""
    assert checksums.unpack_json(checksums.pack_json(value, "states")) == value
    return json.loads(json.dumps(value, allow_nan=False))


# -- each condition ----------------------------------------------------------------------------------------------------


def test_max_epochs_counts_epochs_of_all_runs() -> None:
    """True from epoch n on, also when the run starts beyond it."""
    assert [stop.max_epochs(3)(at(epoch)) for epoch in (1, 2, 3, 4)] == [False, False, True, True]
    assert stop.max_epochs(3).holds(at(7))


def test_a_condition_is_called_by_what_it_is_now() -> None:
    """`n` may be changed, and a subclass may set it by itself."""

    class Twice(stop.max_epochs):
        def __init__(self, n: int):
            self.n = 2 * n

    changed = stop.max_epochs(3)
    changed.n = 5
    assert (repr(changed), repr(Twice(2))) == ("max_epochs(5)", "max_epochs(4)")


def test_every_real_number_of_numpy_counts_and_a_key_is_none() -> None:
    """Also the wide float, which Python's float does not know; a key of jax is refused by name."""
    assert stop.target("x", np.longdouble(1.5))(at(x=np.longdouble(2)))
    with pytest.raises(InvalidArgumentError, match=r"metric 'x' is .*expected a real number"):
        stop.target("x", 1.0)(at(x=jax.random.key(0)))


def test_max_time_counts_this_run_or_all() -> None:
    """`total=True` is the whole job's time."""
    ctx = at(elapsed=5, total=50)
    assert stop.max_time(5)(ctx)
    assert not stop.max_time(5.1)(ctx)
    assert stop.max_time(50, total=True)(ctx)
    assert not stop.max_time(51, total=True)(ctx)


@pytest.mark.parametrize(
    ("mode", "expected"), [("max", [False, True, True, False]), ("min", [True, True, False, False])]
)
def test_target_is_reached_at_the_value(mode: Any, expected: list[bool]) -> None:
    """NaN reaches nothing."""
    assert shown_all(stop.target("x", 0.5, mode), [0.25, 0.5, 0.75, math.nan]) == expected


def test_metric_above_is_true_beyond_its_limit() -> None:
    """At the limit it is not, and NaN is beyond nothing."""
    values = [9.0, 10.0, math.nextafter(10.0, math.inf), math.inf, math.nan, -math.inf]
    assert shown_all(stop.metric_above("x", 10), values) == [False, False, True, True, False, False]
    assert repr(stop.metric_above("loss", np.float32(10))) == "metric_above('loss', 10.0)"


@pytest.mark.parametrize("sign", [1, -1])
def test_no_improvement_waits_for_its_patience(sign: int) -> None:
    """Improvements of exactly min_delta are none; NaN never improves; an improvement starts the count again."""
    condition = stop.no_improvement("x", patience=2, min_delta=0.5, mode="max" if sign == 1 else "min")
    values = [1.0, 1.5, 1.75, math.nan, 2.25, 2.25, math.inf, math.inf, math.inf]
    expected = [False, False, False, False, True, True, False, False, True]
    assert shown_all(condition, [sign * v for v in values]) == expected


def test_no_improvement_counts_epochs_that_are_worst_from_the_start() -> None:
    """A run that diverges at once is ended as well."""
    for worst in (math.nan, math.inf):
        assert shown_all(stop.no_improvement("x", 2, mode="min"), [worst] * 2) == [False, True]


def test_nan_is_nan_and_no_infinity() -> None:
    """Of every kind of number."""
    kinds: list[Any] = [math.nan, np.float32("nan"), jnp.array(jnp.nan, jnp.bfloat16), math.inf, 0, True]
    assert shown_all(stop.nan("x"), kinds) == [True, True, True, False, False, False]


def test_preempted_is_a_condition_with_and_without_parentheses() -> None:
    """Both are the same object."""
    assert ec.stop.preempted() is ec.stop.preempted
    for condition in (stop.preempted, stop.preempted(), stop.preempted | stop.max_epochs(9)):
        assert condition(at(preempted=True)) is True
        assert condition(at()) is False
        assert condition.holds(at(preempted=True))


def test_file_exists_looks_each_time(tmp_path: pathlib.Path) -> None:
    """A path of any kind."""
    path = tmp_path / "stop"
    conditions = [stop.file_exists(path), stop.file_exists(str(path)), stop.file_exists(epath.Path(path))]
    assert not any(c(at()) for c in conditions)
    path.mkdir()
    assert all(c(at()) and c.holds(at()) for c in conditions)


def test_file_exists_looks_into_object_stores(caplog: pytest.LogCaptureFixture) -> None:
    """A look that fails is logged and no reason to stop."""
    condition = stop.file_exists("memory://stop-tests/stop") | stop.file_exists("memory://stop-tests/a/halt")
    assert not condition(at())
    open_store("memory://stop-tests").create("a/halt", b"")
    assert condition(at())
    away = stop.file_exists(epath.Path("gs://bucket/stop?endpoint=http://127.0.0.1:1&anonymous=true&retries=0"))
    assert not away(at(3))
    assert "condition file_exists('gs://bucket/stop'), epoch 3: cannot look: gs://bucket/stop" in caplog.text


METRICS = [0.5, np.float32(0.5), np.array(0.5), jnp.array(0.5), jnp.array(0.5, jnp.bfloat16), ml_dtypes.bfloat16(0.5)]


@pytest.mark.parametrize("value", [*METRICS, 1, True, np.int8(1), np.bool_(True), jnp.array(1)])
def test_a_metric_is_a_number_of_any_kind(value: Any) -> None:
    """Python's, NumPy's, jax's, and arrays of one without dimensions."""
    assert stop.target("x", float(value))(at(x=value)) is True


@pytest.mark.parametrize(
    "value", ["0.5", None, 1j, np.ones(1), jnp.ones(1), [0.5], np.complex64(1), np.array("1"), 10**400]
)
def test_a_metric_that_is_no_number_is_an_error(value: Any) -> None:
    """Which says of which condition, epoch and metric."""
    with pytest.raises(InvalidArgumentError, match=r"nan\('x'\), epoch 7: metric 'x' is .*expected a real number"):
        stop.nan("x")(at(7, x=value))


def test_a_metric_in_a_mapping_is_found_by_its_name() -> None:
    """As `outer/inner`; a key of this very name counts before it. An error names those that there are."""
    nested, flat = {"eval": {"acc": 0.9}}, {"eval/acc": 0.4}
    for metrics, reached in ((nested, True), (flat, False), ({**flat, **nested}, False), ({**nested, **flat}, False)):
        assert stop.target("eval/acc", 0.5)(at(**metrics)) is reached
        assert stop.target("eval/acc", 0.5).holds(at(**metrics)) is reached
        assert not stop.nan("eval/acc")(at(**metrics))
        assert not stop.no_improvement("eval/acc", 1)(at(**metrics))
    with pytest.raises(InvalidArgumentError, match=r"no metric 'eval/f1' among those of the epoch \('eval/acc'\)"):
        stop.target("eval/f1", 0.5)(at(**nested))


EXAMPLES = [stop.of_example(name) for name in stop.CONDITIONS]
NEED_A_METRIC = [condition for condition in EXAMPLES if isinstance(condition, stop.OfMetric)]


@pytest.mark.parametrize("condition", NEED_A_METRIC, ids=repr)
def test_a_missing_metric_names_what_there_is(condition: stop.Condition) -> None:
    """The condition, the epoch, and the metrics of the epoch."""
    with pytest.raises(InvalidArgumentError) as caught:
        condition(at(4, loss=1, accuracy=2))
    assert repr(condition) in str(caught.value)
    assert "epoch 4: there is no metric 'x' among those of the epoch ('accuracy', 'loss')" in str(caught.value)
    with pytest.raises(InvalidArgumentError, match=r"\(none\)"):
        (condition | stop.max_epochs(1))(at(4))


@pytest.mark.parametrize("condition", NEED_A_METRIC, ids=repr)
def test_a_finished_run_that_lacks_a_metric_trains_on(
    condition: stop.Condition, caplog: pytest.LogCaptureFixture
) -> None:
    """`holds` answers False, with a warning where it looks at the metric."""
    assert condition.holds(at(4, loss=1)) is False
    assert ("there is no metric 'x'" in caplog.text) is not isinstance(condition, stop.no_improvement)


BAD: list[tuple[Callable[[], Any], str]] = [
    *((lambda v=v: stop.max_epochs(v), r"max_epochs\(n\)") for v in (0, -1, 1.0, "3", None, True, np.bool_(True))),
    *(
        (lambda v=v: stop.max_time(v), r"max_time\(secs\)")
        for v in (0, -1, math.nan, math.inf, "soon", "-1h", None, True)
    ),
    (lambda: stop.max_time(1, total=1), r"max_time\(total\)"),  # type: ignore[arg-type]
    *((lambda v=v: stop.target("x", v), r"target\(value\)") for v in (math.nan, math.inf, "1", None, True, np.ones(1))),
    *((lambda v=v: stop.metric_above("x", v), r"metric_above\(limit\)") for v in (math.nan, math.inf, "1", None)),
    *(
        (lambda c=c, v=v: type(c)(v, *c.example[1:]), rf"{type(c).__name__}\(metric\)")
        for c in NEED_A_METRIC
        for v in ("", None, 3, b"x")
    ),
    *((lambda v=v: stop.target("x", 1, v), r"target\(mode\)") for v in ("MAX", None, np.ones(2), 1)),
    *((lambda v=v: stop.no_improvement("x", v), r"\(patience\)") for v in (0, 1.5, None, True, "2")),
    *((lambda v=v: stop.no_improvement("x", 1, v), r"\(min_delta\)") for v in (-0.1, math.nan, math.inf, "0", None)),
    (lambda: stop.no_improvement("x", 1, mode="best"), r"\(mode\)"),  # type: ignore[arg-type]
    *((lambda v=v: stop.file_exists(v), r"file_exists\(path\)") for v in ("", None, 3, b"x", "a\0b")),
    (lambda: stop.file_exists("memory://x"), "names no store"),
    (lambda: stop.file_exists("gs://b/x?token=1"), "is a secret"),
    (lambda: stop.file_exists(pathlib.Path("gs://bucket/stop")), "was a URL"),
    *((lambda v=v: stop.as_condition(v), "is no stop condition") for v in (None, True, 3, "max_epochs", [], stop.nan)),
    *((lambda v=v: stop.preempted | v, "is no stop condition") for v in (None, True, stop.max_epochs)),
    *((lambda v=v: v & stop.preempted, "is no stop condition") for v in (None, True, stop.max_epochs)),
    (lambda: stop.max_epochs(1) or stop.preempted, "compose conditions with"),
    (lambda: stop.max_epochs(1) and stop.preempted, "compose conditions with"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_parameters_are_refused_at_construction(number: int) -> None:
    """By the name of the condition and the parameter."""
    make, expected = BAD[number]
    with pytest.raises(InvalidArgumentError, match=expected):
        make()


def test_reprs_are_the_same_however_a_parameter_is_written() -> None:
    """They are keys of saved states."""
    for spelled in (3, np.int64(3), jnp.array(3)):
        assert repr(stop.max_epochs(spelled)) == "max_epochs(3)"  # type: ignore[arg-type]
    for spelled in (60, 60.0, np.float32(60), jnp.array(60), "60", "1min"):
        assert repr(stop.max_time(spelled)) == "max_time(60.0, total=False)"  # type: ignore[arg-type]
    assert repr(stop.target("acc", 1)) == "target('acc', 1.0, mode='max')"
    assert repr(stop.no_improvement("loss", 3)) == "no_improvement('loss', patience=3, min_delta=0.0, mode='max')"
    assert repr(stop.file_exists(pathlib.Path("/a/b"))) == "file_exists('/a/b')"
    both = stop.nan("x") | stop.preempted & stop.max_epochs(2)
    assert repr(both) == "(nan('x') | (preempted & max_epochs(2)))"


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bool, np.bool_, np.array, jnp.array])
def test_a_bool_of_any_kind_is_an_answer(kind: Callable[[bool], Any]) -> None:
    """Python's, NumPy's, and arrays of one without dimensions."""
    for value in (True, False):
        assert stop.checked("c", kind(value), at()) is value
        assert stop.as_condition(lambda ctx, value=value: kind(value))(at()) is value


NO_ANSWERS = [None, 1, 0, "yes", "", [], 0.0, np.int8(1), np.array([True]), jnp.ones((), int), jnp.zeros(2, bool), at]


@pytest.mark.parametrize("answer", NO_ANSWERS, ids=lambda answer: "function" if answer is at else repr(answer))
def test_another_answer_is_an_error_that_names_condition_and_epoch(answer: Any) -> None:
    """Wherever it is given: alone, below `|` and `&`, by a function or by a condition of the user's own."""

    class Own(stop.Condition):
        def holds(self, ctx: stop.Context) -> Any:
            return answer

    def forgetful(ctx: stop.Context) -> Any:
        return answer

    name = r"\S*forgetful, epoch 5: answered "
    for condition in (stop.as_condition(forgetful), forgetful | stop.preempted, stop.preempted & forgetful):
        for look in (condition, condition.holds):
            with pytest.raises(InvalidArgumentError, match=f"{name}.*{type(answer).__name__}.*expected a bool"):
                look(at(5))
    for condition in (Own() | stop.preempted, stop.preempted & Own()):
        with pytest.raises(InvalidArgumentError, match="Own, epoch 6: answered"):
            condition(at(6))
        with pytest.raises(InvalidArgumentError, match="Own, epoch 6: answered"):
            stop.why(condition | stop.max_epochs(6), at(6))


def test_a_long_answer_is_cut_short() -> None:
    """An error is to be read."""
    with pytest.raises(InvalidArgumentError) as caught:
        stop.checked(stop.preempted, "x" * 10_000, at())
    assert len(str(caught.value)) < 500


# -- composition -------------------------------------------------------------------------------------------------------


class Script:
    """A callable that answers as written, and remembers the epochs that it was shown."""

    def __init__(self, answers: list[bool]):
        self.answers, self.seen = answers, []

    def __call__(self, ctx: stop.Context) -> bool:
        self.seen.append(ctx.epoch)
        return self.answers[ctx.epoch - 1]

    def get_state(self) -> Any:
        return self.seen

    def set_state(self, state: Any) -> None:
        self.seen = list(state)


EPOCHS = 6
ANSWERS = st.lists(st.booleans(), min_size=EPOCHS, max_size=EPOCHS)
SHAPES: Any = st.recursive(
    ANSWERS, lambda inner: st.tuples(st.sampled_from("|&"), inner, inner), max_leaves=8
)  # answers, or (sign, left, right)


def build(shape: Any, leaves: list[Script]) -> Any:
    if isinstance(shape, list):
        leaves.append(Script(shape))
        return leaves[-1]
    left, right = build(shape[1], leaves), build(shape[2], leaves)
    sign = operator.or_ if shape[0] == "|" else operator.and_
    return sign(left, right) if isinstance(left, stop.Condition) else sign(left, stop.as_condition(right))


def expected_of(shape: Any, epoch: int) -> bool:
    if isinstance(shape, list):
        return shape[epoch - 1]
    left, right = expected_of(shape[1], epoch), expected_of(shape[2], epoch)
    return left or right if shape[0] == "|" else left and right


@given(shape=SHAPES)
def test_compositions_say_any_and_all_and_show_every_epoch_to_every_operand(shape: Any) -> None:
    """However they are nested, whatever the operands answer."""
    leaves: list[Script] = []
    condition = stop.as_condition(build(shape, leaves))
    for epoch in range(1, EPOCHS + 1):
        assert condition(at(epoch)) is expected_of(shape, epoch)
    assert all(leaf.seen == list(range(1, EPOCHS + 1)) for leaf in leaves)


def test_plain_callables_compose_on_either_side() -> None:
    """`|` and `&` take a function left and right."""
    yes, no = (lambda ctx: True), (lambda ctx: False)
    cond = stop.max_epochs(2)
    assert [(yes & cond)(at(e)) for e in (1, 2)] == [(cond & yes)(at(e)) for e in (1, 2)] == [False, True]
    assert [(no | cond)(at(e)) for e in (1, 2)] == [(cond | no)(at(e)) for e in (1, 2)] == [False, True]


# -- as text -----------------------------------------------------------------------------------------------------------


def test_every_condition_is_registered_with_an_example() -> None:
    """What `ec.stop` exports beside the interface, in `CONDITIONS`; a flag and the docs have them from there."""
    assert {*stop.CONDITIONS} == {*ec.stop.__all__} - {"Condition", "Context", "as_condition"}
    for name, condition in stop.CONDITIONS.items():
        assert condition is getattr(ec.stop, name)
        assert (condition.__doc__ or "").startswith("True ")


@given(st.deferred(lambda: MAKERS))
def test_the_repr_of_conditions_describes_them(make: Any) -> None:
    """Whatever is composed, the text that names it in records and results makes it again."""
    condition = make()
    assert repr(stop_text.parsed(repr(condition))) == repr(condition)


def test_a_text_of_conditions_is_read_as_python_reads_it() -> None:
    """`&` binds closer than `|`; arguments may be named; `preempted` takes parentheses, too."""
    found = stop_text.parsed(" max_epochs(n=100) | nan('loss') & preempted() | max_time('2h', total=True)\n")
    expected = stop.max_epochs(100) | stop.nan("loss") & stop.preempted | stop.max_time(7200, total=True)
    assert repr(found) == repr(expected)
    with pytest.raises(InvalidArgumentError, match="it is no stop condition: there is no condition 'max_epoch'; near"):
        stop_text.parsed("preempted | max_epoch(3)")
    assert repr(stop_text.parsed("max_epochs(3)\n| preempted")) == repr(stop.max_epochs(3) | stop.preempted)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("max_epochs(n=1, n=2)", "n is given twice"), ("max_epochs(**{})", r"\*\* stands before a value")],
)
def test_arguments_of_a_condition_are_given_once_each(text: str, problem: str) -> None:
    """The last one of two does not win silently."""
    with pytest.raises(InvalidArgumentError, match=f"it is no stop condition: {problem}"):
        stop_text.parsed(text)


# -- states ------------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0]), st.floats(width=32))
PATIENT = st.builds(
    lambda patience, delta, mode: lambda: stop.no_improvement("x", patience, delta, mode),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["max", "min"]),
)
EXAMPLE = st.sampled_from([lambda name=name: stop.of_example(name) for name in stop.CONDITIONS])
MAKERS = st.recursive(
    st.one_of(PATIENT, EXAMPLE),
    lambda inner: st.builds(
        lambda sign, a, b: lambda: sign(a(), b()), st.sampled_from([operator.or_, operator.and_]), inner, inner
    ),
    max_leaves=5,
)


@given(makers=st.lists(MAKERS, min_size=1, max_size=3), values=st.lists(NUMBERS, max_size=10), data=st.data())
def test_a_run_cut_anywhere_goes_on_as_if_it_had_not_been(makers: Any, values: list[float], data: Any) -> None:
    """n epochs straight, or k, a round trip of the states through JSON into fresh objects, and n - k: the same."""
    straight = [make() for make in makers]
    whole = [[c(at(e, x=v)) for c in straight] for e, v in enumerate(values, start=1)]
    cut = data.draw(st.integers(0, len(values)))
    first, second = ([make() for make in makers] for _ in range(2))
    parts = [[c(at(e, x=v)) for c in first] for e, v in enumerate(values[:cut], start=1)]
    stop_states.load_states(second, through_json(stop_states.save_states(first)))
    assert [c.holds(at(cut, x=0.0)) for c in second] == [c.holds(at(cut, x=0.0)) for c in first]
    parts += [[c(at(e, x=v)) for c in second] for e, v in enumerate(values[cut:], start=cut + 1)]
    assert parts == whole
    assert through_json(stop_states.save_states(second)) == stop_states.save_states(straight)
    assert stop_states.save_states(pickle.loads(pickle.dumps(straight))) == stop_states.save_states(straight)


@given(maker=MAKERS, values=st.lists(NUMBERS, max_size=5))
def test_holds_changes_nothing(maker: Any, values: list[float]) -> None:
    """However often it is asked; after an epoch it answers as the look at that epoch did."""
    condition = maker()
    for epoch, value in enumerate(values, start=1):
        answer, state = condition(at(epoch, x=value)), stop_states.save_states([condition])
        assert condition.holds(at(epoch, x=value)) is condition.holds(at(epoch, x=value)) is answer
        assert stop_states.save_states([condition]) == state


def test_states_are_kept_by_repr_and_equal_ones_are_numbered() -> None:
    """Those without state are left out."""
    conditions = [stop.as_condition(Script([True] * 9)) for _ in range(3)]
    for number, condition in enumerate(conditions):
        for epoch in range(1, number + 2):
            condition(at(epoch))
    saved = stop_states.save_states([stop.preempted, *conditions])
    assert saved == {"Script": [1], "Script#2": [1, 2], "Script#3": [1, 2, 3]}
    again = [stop.as_condition(Script([])) for _ in range(2)]
    stop_states.load_states(again, saved)
    assert [c.get_state() for c in again] == [[1], [1, 2]]


def test_states_survive_a_changed_composition(caplog: pytest.LogCaptureFixture) -> None:
    """A longer run, another condition more or less: what is still there goes on, what is new starts fresh."""
    patient = stop.no_improvement("x", 2)
    before = [stop.max_epochs(3) | patient, stop.no_improvement("y", 1)]
    for condition in before:
        condition(at(1, x=math.inf, y=1))
    fresh, same = stop.no_improvement("x", 5), stop.no_improvement("x", 2)
    with caplog.at_level(logging.INFO, "absl"):
        stop_states.load_states(
            [fresh, (same & stop.nan("x")) | stop.max_epochs(9)], through_json(stop_states.save_states(before))
        )
    assert same.get_state() == patient.get_state() == {"best": "inf", "count": 0}
    assert fresh.get_state() == {"best": "-inf", "count": 0}
    assert "no_improvement('y', patience=1, min_delta=0.0, mode='max') is dropped" in caplog.text


def test_absent_state_starts_fresh_also_in_used_objects() -> None:
    """Going back to an epoch from before a condition counted anything."""
    condition = stop.no_improvement("x", 1) | stop.no_improvement("y", 1)
    for saved in (None, {}):
        condition(at(1, x=1, y=1))
        stop_states.load_states([condition], saved)
        assert list(stop_states.save_states([condition]).values()) == [{"best": "-inf", "count": 0}] * 2


BAD_STATES = [0, "x", [], [1], {}, {"best": 1}, {"best": None, "count": 0}, {"best": "nan", "count": 0}, True]
BAD_STATES += [{"best": 1.0, "count": c} for c in (-1, 1.5, None, True, "1")] + [{"best": math.nan, "count": 1}]


@pytest.mark.parametrize("state", BAD_STATES, ids=repr)
def test_unusable_state_starts_fresh_with_a_warning(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Never an error, at no level."""
    condition = stop.no_improvement("x", 2)
    condition(at(1, x=5))
    both = condition | stop.preempted
    stop_states.load_states([both], {repr(condition): state})
    assert condition.get_state() == {"best": "-inf", "count": 0}
    assert "starts fresh" in caplog.text
    stop_states.load_states([both], {repr(condition): {"$json": state}})
    stop_states.load_states([both], state)


def test_half_of_a_composition_may_be_unusable(caplog: pytest.LogCaptureFixture) -> None:
    """The other half goes on."""
    left, right = stop.no_improvement("x", 2), stop.no_improvement("y", 2)
    stop_states.load_states([left | right], {repr(left): {"best": 3, "count": 1}, repr(right): "junk"})
    assert [left.get_state(), right.get_state()] == [{"best": 3.0, "count": 1}, {"best": "-inf", "count": 0}]
    assert "no_improvement('y'" in caplog.text


class Stateful(stop.Condition):
    """A user's own, with any state."""

    def __init__(self, state: Any = None):
        self.state = state

    def holds(self, ctx: stop.Context) -> bool:
        return False

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        if state == "poison":
            self.state = "half"
            raise RuntimeError("the user's own")
        self.state = state


@pytest.mark.parametrize(
    "state", [1, "x", [1.5, None], {"a": [-math.inf, math.inf]}, {"$json": "1"}, {"$x": {"$y": 1}}, "$", np.float32(2)]
)
def test_a_users_state_comes_back_whatever_it_holds(state: Any) -> None:
    """Infinities, names like our own marks, NumPy's numbers."""
    fresh = Stateful()
    stop_states.load_states(
        [fresh | stop.preempted], through_json(stop_states.save_states([Stateful(state) | stop.preempted]))
    )
    assert fresh.state == state


def test_nan_in_a_users_state_comes_back() -> None:
    """NaN is not equal to itself, hence apart."""
    fresh = Stateful()
    stop_states.load_states([fresh], through_json(stop_states.save_states([Stateful([math.nan])])))
    assert math.isnan(fresh.state[0])


def test_a_state_that_is_no_json_names_the_condition() -> None:
    """When it is saved."""
    with pytest.raises(InvalidArgumentError, match=r"the state of stop condition Stateful holds a object"):
        stop_states.save_states([Stateful(object())])


def test_a_users_set_state_that_fails_keeps_no_run_from_resuming(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the condition told to start fresh."""
    condition = Stateful("old")
    stop_states.load_states([condition], {"Stateful": "poison"})
    assert condition.state is None
    assert "Stateful starts fresh" in caplog.text
    assert "RuntimeError: the user's own" in caplog.text


def test_a_callable_keeps_state_only_with_both_methods() -> None:
    """And is never given None."""

    class Half:
        def __call__(self, ctx: stop.Context) -> bool:
            return False

        def get_state(self) -> Any:
            return 1

    assert stop.as_condition(Half()).get_state() is None
    script = Script([])
    stop_states.load_states([stop.as_condition(script)], None)
    stop.as_condition(script).set_state(None)
    assert script.seen == []
    assert repr(stop.as_condition(test_a_long_answer_is_cut_short)) == "test_a_long_answer_is_cut_short"
    assert stop.as_condition(stop.preempted) is stop.preempted


def test_a_condition_whose_repr_is_empty_ends_a_run(tmp_path: pathlib.Path) -> None:
    """And the run is finished when it is started again."""

    class Unnamed(ec.stop.Condition):
        def __repr__(self) -> str:
            return ""

        def holds(self, ctx: ec.stop.Context) -> bool:
            return ctx.epoch >= 2

    for reason in ("", "was finished already"):
        job = ec.Job(stop_conditions=[Unnamed(), ec.stop.max_epochs(5)])
        job.init(lambda ws: ws.update(sum=0))
        result = ec.run(job, tmp_path)
        assert (result.epoch, result.finished, result.stop_reason) == (2, True, reason)
