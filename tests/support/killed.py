"""A job that is killed and started again, in processes."""

import json
import pathlib
import signal
from typing import Any

from tests.support import killjob
from tests.support.processes import start_processes

RUN_SECS = 150.0


class KilledJob:
    """A job that is started over and over on one directory.

    Args:
        folder: for the directory and, beside it, the outside log.
        unprotected: a name in `killjob.UNPROTECTED`, for a negative control.
    """

    def __init__(self, folder: pathlib.Path, unprotected: str = ""):
        self.directory, self.outside = folder / "epochs", folder / "outside"
        self.outside.mkdir()
        self._unprotected = unprotected
        self._runs = 0

    def run(self, processes: int = 1, **plan: Any) -> list[int]:
        """One run; returns how its processes ended."""
        self._runs += 1
        fields = {"directory": str(self.directory), "outside": str(self.outside), "run": self._runs}
        args = json.dumps({**fields, **plan, "unprotected": self._unprotected})
        program = ["-m", "tests.support.worker", "tests.support.killjob:run", args]
        with start_processes(program, processes, devices_per_process=2) as job:
            outcomes = job.wait(RUN_SECS, after_failure_secs=40.0)
            if job.timed_out or any(o.returncode not in (0, -signal.SIGKILL) for o in outcomes):
                print(*(o.stdout for o in outcomes), sep="\n----\n")
        assert not job.timed_out, f"run {self._runs} was late: {plan}"
        return [outcome.returncode for outcome in outcomes]

    def kill(self, plan: dict[str, Any]) -> str:
        """One run that is killed; prints and returns where."""
        ended = self.run(**plan)
        hits = [e for e in self.events("kill") if e["run"] == self._runs]
        if not hits and self.events("violation"):
            return ""  # it never came so far; the caller looks at the violations
        assert ended == [-signal.SIGKILL] * len(ended), f"run {self._runs} ended with {ended}, planned {plan}"
        (hit,) = hits
        victim = f"process {hit['process']} of {len(ended)}"
        print(f"kill {self._runs:3} ({plan['kind']}, {victim}) {hit['place']}: {hit['moment']}")
        return hit["place"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the outside log says."""
        return [e for e in killjob.read_log(self.outside) if e["event"] == kind]

    def violations(self) -> list[str]:
        """What starts found wrong."""
        return [f"run {e['run']}, process {e['process']}: {e['what']}" for e in self.events("violation")]
