"""The state of a run after setup and after each epoch: it goes on, or it has ended for one of five causes."""

import abc
import dataclasses
from collections.abc import Mapping

PREEMPTED = "preempted"


@dataclasses.dataclass(frozen=True)
class Running:
    """The run trains another epoch."""


class Ended(abc.ABC):
    """The run trains no other epoch. Each subclass is a cause."""

    preempted = False
    """Whether the preemption notice had come by then."""

    finished = False
    """Whether a stop condition ended the training: started again, the run does not go on while that holds."""

    @property
    @abc.abstractmethod
    def reason(self) -> str:
        """The cause, for `RunResult.stop_reason`."""


@dataclasses.dataclass(frozen=True)
class Preempted(Ended):
    """The run is preempted, and is to be started again."""

    preempted = True

    @property
    def reason(self) -> str:
        return PREEMPTED


@dataclasses.dataclass(frozen=True)
class Finished(Ended):
    """Stop conditions were true after the last epoch."""

    finished = True

    why: Mapping[str, str]  # the reason of each of them, by the condition's `repr`
    preempted: bool

    @property
    def reason(self) -> str:
        return "; ".join([*([PREEMPTED] if self.preempted else []), *self.why.values()])


@dataclasses.dataclass(frozen=True)
class AlreadyFinished(Ended):
    """An earlier run had finished the training, so that this run trains nothing."""

    finished = True

    preempted: bool

    @property
    def reason(self) -> str:
        return "was finished already"


@dataclasses.dataclass(frozen=True)
class FencedOff(Ended):
    """A newer run saves to the directory: whatever this one would train could not be saved."""

    why: str

    @property
    def reason(self) -> str:
        return f"fenced off: {self.why}"


@dataclasses.dataclass(frozen=True)
class TooManyFailures(Ended):
    """More saves in a row have failed than the user allows."""

    why: str

    @property
    def reason(self) -> str:
        return "too many saves have failed"


RunState = Running | Ended
