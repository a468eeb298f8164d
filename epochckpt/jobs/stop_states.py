"""The states of stop conditions, as the notes of an epoch keep them.

The state of a condition is a JSON value, saved under the condition's `repr`. A condition whose `repr` has changed
starts fresh; so does one whose state cannot be used, with a warning: no state keeps a run from resuming.
"""

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt.errors import say
from epochckpt.format import checksums
from epochckpt.jobs.stop import Condition, parts
from epochckpt.jobs.stop_values import shown

_JSON = "$json"


def save_states(conditions: Sequence[Condition]) -> dict[str, Any]:
    """The states of the conditions that have one, as JSON, by their `repr`; of equal ones the second is `…#2`.

    The parts of a composition are kept one by one, so that `max_epochs(10) | c` may become `c | max_epochs(20)`.
    """
    saved: dict[str, Any] = {}
    for key, condition in _keyed(conditions).items():
        try:
            state = condition.get_state()
        except Exception as error:
            error.add_note(f"in the state of stop condition {key}")
            raise
        state = checksums.pack_json(state, f"the state of stop condition {key}")
        # NaN and infinities in a user's state are not JSON, and their packed form may not be packed once more
        text = json.dumps(state, allow_nan=False)
        if state is not None:
            saved[key] = {_JSON: text} if "$" in text else state
    return saved


def load_states(conditions: Sequence[Condition], saved: Any) -> None:
    """Gives conditions the states that `save_states` returned, as far as they are still the same; never raises."""
    if saved is not None and not isinstance(saved, Mapping):
        logging.warning("states of stop conditions are %s; expected a mapping: all start fresh", shown(saved))
        saved = None
    states = dict(saved or {})
    for key, condition in _keyed(conditions).items():
        state = states.pop(key, None)
        try:
            packed = isinstance(state, dict) and state.keys() == {_JSON}
            condition.set_state(checksums.unpack_json(json.loads(state[_JSON])) if packed else state)
        except Exception as error:  # a user's own code, or a state of another version of it
            logging.warning("stop condition %r starts fresh: its state is %s: %s", condition, shown(state), say(error))
            with contextlib.suppress(Exception):  # half of the state may be set
                condition.set_state(None)
    for key in states:
        logging.info("the state of stop condition %s is dropped: there is no such condition any more", key)


def _keyed(conditions: Sequence[Condition]) -> dict[str, Condition]:
    keyed: dict[str, Condition] = {}
    for condition in parts(conditions):
        names = itertools.chain([repr(condition)], (f"{condition!r}#{n}" for n in itertools.count(2)))
        keyed[next(name for name in names if name not in keyed)] = condition
    return keyed
