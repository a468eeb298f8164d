"""Do the tests test? Makes mutants, small changes of our code, and sees whether a test fails: `nox -s mutants`.

cosmic-ray makes the mutants and runs the tests; what is here chooses. A mutant is on disk while it is tested, in a copy
of the checkout, so that the processes that tests start run it, too. The whole of the tests takes minutes, and a
package has thousands of mutants. So each module gives a sample, always the same, and each mutant is tested by

1. the tests that run its line: the package's own quick ones, then one case of each other, the fastest first, as long
   as they take `LIMIT` seconds together; which these are is seen once, from the default level under coverage.py;
2. the tests of `IN_PROCESSES`, whose processes coverage.py does not see.

Results are kept in the folder `--work` until the package changes. `--again "-m 'not long' tests/saving tests/faults"`
gives the survivors to more tests, or to new ones.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import hashlib
import os
import pathlib
import queue
import random
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterable, Iterator

import attrs
import coverage
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkItem, WorkResult

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ["format", "directory", "agreement", "saving"]
IN_PROCESSES = ["tests/agreement", "tests/multiprocess", "tests/saving/test_pod.py", "tests/tiers/test_standing.py"]
LIMIT = 60.0
"""Seconds that the tests of one mutant's line may take together, as they were timed under coverage.py."""
QUICK = 0.5
"""Seconds below which a test of the mutant's own package is run before those of others."""
TIMEOUT = 300.0
"""Seconds after which a mutant counts as killed: it made a test wait without end."""
JOBS = 4
"""Mutants that are tested at a time. Many tests wait more than they compute."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


_FOR_CHECKERS = frozenset({"overload", "abstractmethod", "frozen", "kw_only"})
"""Decorators, and arguments of decorators."""


def digest(*folders: str) -> str:
    """Of the code in some folders of the checkout: what was found out about it holds as long as this is the same."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def copy_to(folder: pathlib.Path) -> pathlib.Path:
    """Copies the files of the checkout that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True)
    shutil.rmtree(folder, ignore_errors=True)
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


class Tests:
    """Which tests run a line, and how long each takes.

    Args:
        work: The folder with what was seen, and if there is nothing yet, the one to write it to.
    """

    def __init__(self, work: pathlib.Path) -> None:
        seen = digest("epochckpt", "tests")  # of another code the lines would be others, and tests may be gone
        lines = work / f"coverage-{seen}"
        times = work / f"times-{seen}.xml"
        if not times.exists():
            self._see(lines=lines, times=times, checkout=copy_to(work / "seen"))
        self._data = coverage.CoverageData(basename=str(lines))
        self._data.read()
        self._seconds: dict[str, float] = {}
        for case in xml.etree.ElementTree.parse(times).iter("testcase"):
            if len(case):  # it failed, or was skipped
                continue
            file = case.attrib["classname"].replace(".", "/") + ".py"
            self._seconds[f"{file}::{case.attrib['name']}"] = float(case.attrib["time"])

    def _see(self, *, lines: pathlib.Path, times: pathlib.Path, checkout: pathlib.Path) -> None:
        settings = checkout / "coverage.ini"
        settings.write_text("[run]\nrelative_files = true\n")
        command = [*PYTEST, "-n", "3", "--dist=loadfile", "--cov=epochckpt", "--cov-context=test", "--cov-report="]
        command += [f"--cov-config={settings}", f"--junitxml={times.with_suffix('.new')}"]
        subprocess.run(command, cwd=checkout, env={**os.environ, "COVERAGE_FILE": str(lines)}, check=False)
        times.with_suffix(".new").rename(times)

    def of(self, mutation: MutationSpec) -> list[str]:
        """The tests that run the mutant's lines, or if none does, the tests that run its function."""
        ran = self._data.contexts_by_lineno(str(mutation.module_path))
        lines = range(mutation.start_pos[0], mutation.end_pos[0] + 1)
        contexts = {context for line in lines for context in ran.get(line, ()) if context}
        if not contexts:
            body = function_around(mutation)
            contexts = {context for line in body for context in ran.get(line, ()) if context}
        names = {context.partition("|")[0] for context in contexts} & self._seconds.keys()
        # Of the cases of one test function the fastest first, and the others after all functions.
        own = f"tests/{mutation.module_path.parts[1]}/"
        cases: collections.Counter[str] = collections.Counter()
        order: list[tuple[int, float, str]] = []
        for name in sorted(names, key=self._seconds.__getitem__):
            function = name.partition("[")[0]
            is_own = name.startswith(own) and self._seconds[name] < QUICK
            order.append((-1 if is_own else cases[function], self._seconds[name], name))
            cases[function] += 1
        chosen: list[str] = []
        left = LIMIT
        for _, seconds, name in sorted(order):
            left -= seconds
            if left < 0:
                break
            chosen.append(name)
        return chosen


def function_around(mutation: MutationSpec) -> range:
    """The lines of the body of the innermost function that the mutant lies in; none outside functions."""
    module = ast.parse((ROOT / mutation.module_path).read_text())
    innermost = range(0)
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef):
            continue
        first = min(one.lineno for one in (node, *node.decorator_list))
        if first <= mutation.start_pos[0] <= (node.end_lineno or 0):
            innermost = range(node.body[0].lineno, (node.end_lineno or 0) + 1)  # walk() gives the outer ones first
    return innermost


def idle_parts(module: pathlib.Path) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where what only a type checker reads begins and ends, as pairs of line and column.

    Beside annotations that is what forbids code that nobody writes while pyright is content: that a dataclass is frozen
    or takes keywords only, and that a method is abstract.
    """
    for node in ast.walk(ast.parse(module.read_text())):
        found: list[ast.stmt | ast.expr | None] = []
        if isinstance(node, ast.AnnAssign | ast.arg):
            found = [node.annotation]
        elif isinstance(node, ast.FunctionDef):
            found = [node.returns]
            found += [one for one in node.decorator_list if ast.unparse(one).rpartition(".")[2] in _FOR_CHECKERS]
        elif isinstance(node, ast.ClassDef):
            calls = [one for one in node.decorator_list if isinstance(one, ast.Call)]
            found = [given.value for call in calls for given in call.keywords if given.arg in _FOR_CHECKERS]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found = [node]
        for one in found:
            if one is not None:  # a decorator begins with the @ before its expression
                yield (one.lineno, one.col_offset - 1), (one.end_lineno or 0, one.end_col_offset or 0)


def sample(items: Iterable[WorkItem], *, part: float, least: int, seed: int) -> list[WorkItem]:
    """Chooses places that a mutant can change, and of the mutants of each place one.

    Args:
        items: All mutants.
        part: The part of each module's places, from 0 to 1.
        least: How many of each module, if it has so many.
        seed: Of the choice.
    """
    places: dict[pathlib.Path, dict[tuple[int, int], list[WorkItem]]] = collections.defaultdict(dict)
    for item in items:
        mutation = item.mutations[0]
        places[mutation.module_path].setdefault(mutation.start_pos, []).append(item)
    chosen: list[WorkItem] = []
    for module, mutants in sorted(places.items()):
        chance = random.Random(f"{seed} {module}")
        idle = list(idle_parts(ROOT / module))
        able = sorted(start for start in mutants if not any(begin <= start < end for begin, end in idle))
        size = min(len(able), max(least, round(part * len(able))))
        chosen += [chance.choice(mutants[start]) for start in sorted(chance.sample(able, size))]
    return chosen


def session(package: str, *, work: pathlib.Path, part: float, least: int, seed: int) -> pathlib.Path:
    """Makes the database of a package's mutants, unless there is one of the package as it is now."""
    modules = sorted((ROOT / "epochckpt" / package).rglob("*.py"))
    file = work / f"{package}-{part}-{least}-{seed}-{digest(f'epochckpt/{package}')}.sqlite"
    if not file.exists():
        new = file.with_suffix(".new")
        with use_db(new, mode=WorkDB.Mode.create) as made:
            init([module.relative_to(ROOT) for module in modules], made, {})
            chosen = sample(made.work_items, part=part, least=least, seed=seed)
            made.clear()
            made.add_work_items(chosen)
        new.rename(file)
    return file


def pytest_in(checkout: pathlib.Path, *arguments: str) -> str:
    """A shell's command that runs tests in a copy of the checkout, up to the first that fails."""
    command = ["env", "-C", str(checkout), f"PYTHONPATH={checkout}", *PYTEST, "-x", *arguments]
    return shlex.join(command)


class ByCoverage:
    """Tests a mutant by the tests that run its line, then by those in processes."""

    def __init__(self, tests: Tests):
        self._tests = tests

    def check(self, checkout: pathlib.Path) -> None:
        """Raises an error if a test fails without any mutant: then all mutants would seem to be killed."""
        subprocess.run(pytest_in(checkout, *IN_PROCESSES), shell=True, check=True)

    def test(self, mutation: MutationSpec, checkout: pathlib.Path) -> WorkResult:
        # What no test runs, such as a line of a class, is run by the import: the package's own tests are for that.
        names = self._tests.of(mutation) or [f"tests/{mutation.module_path.parts[1]}"]
        chosen = checkout / "chosen.txt"
        chosen.write_text("\n".join(names))
        commands = [pytest_in(checkout, f"@{chosen}"), pytest_in(checkout, *IN_PROCESSES)]
        return mutate(mutation, checkout, " && ".join(commands))


class ByArguments:
    """Tests a mutant by pytest with arguments that the user gives."""

    def __init__(self, arguments: str):
        self._arguments = shlex.split(arguments)

    def check(self, checkout: pathlib.Path) -> None:
        """See `ByCoverage.check`."""
        subprocess.run(pytest_in(checkout, *self._arguments), shell=True, check=True)

    def test(self, mutation: MutationSpec, checkout: pathlib.Path) -> WorkResult:
        return mutate(mutation, checkout, pytest_in(checkout, *self._arguments))


def mutate(mutation: MutationSpec, checkout: pathlib.Path, script: str) -> WorkResult:
    """Runs a script while a mutant is in a copy of the checkout."""
    here = attrs.evolve(mutation, module_path=checkout / mutation.module_path)
    return mutate_and_test([here], shlex.join(["bash", "-c", script]), TIMEOUT)


def run(file: pathlib.Path, items: list[WorkItem], tester: ByCoverage | ByArguments, *, work: pathlib.Path) -> None:
    """Tests mutants, `JOBS` at a time, and writes the results to the database."""
    copies: queue.Queue[pathlib.Path] = queue.Queue()
    for number in range(JOBS):
        copies.put(copy_to(work / f"copy{number}"))
    tester.check(copy_to(work / "unchanged"))

    def one(item: WorkItem) -> tuple[WorkItem, WorkResult]:
        checkout = copies.get()
        try:
            return item, tester.test(item.mutations[0], checkout)
        finally:
            copies.put(checkout)

    with use_db(file, mode=WorkDB.Mode.open) as mutants, concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        for future in concurrent.futures.as_completed([pool.submit(one, item) for item in items]):
            item, result = future.result()
            mutants.set_result(item.job_id, result)
            mutation = item.mutations[0]
            where = f"{mutation.module_path}:{mutation.start_pos[0]}"
            print(result.test_outcome, where, mutation.operator_name, flush=True)


def report(file: pathlib.Path, *, lived: pathlib.Path) -> None:
    """Prints a line per module, and writes the differences that no test has seen."""
    counts: dict[pathlib.Path, collections.Counter[TestOutcome | None]] = collections.defaultdict(collections.Counter)
    with use_db(file, mode=WorkDB.Mode.open) as mutants, lived.open("w") as out:
        results = dict(mutants.results)
        for item in sorted(mutants.work_items, key=lambda item: (str(item.mutations[0].module_path), item.job_id)):
            if item.job_id in results:
                result = results[item.job_id]
                counts[item.mutations[0].module_path][result.test_outcome] += 1
                if result.test_outcome == TestOutcome.SURVIVED:
                    out.write(f"{result.diff}\n")
    print("\n| module | mutants | killed | |\n| --- | --- | --- | --- |")
    total = sum(counts.values(), start=collections.Counter())
    if not total:
        sys.exit(f"{file}: no mutant has been tested; survivors are tested --again after a run without it")
    for name, count in [*((str(module), count) for module, count in counts.items()), ("all", total)]:
        killed = count.total() - count[TestOutcome.SURVIVED]
        print(f"| {name} | {count.total()} | {killed} | {killed / count.total():.0%} |")


def survivors(file: pathlib.Path) -> list[WorkItem]:
    """The mutants of a database that no test has killed."""
    with use_db(file, mode=WorkDB.Mode.open) as mutants:
        results = dict(mutants.results)
        lived = {job for job, result in results.items() if result.test_outcome == TestOutcome.SURVIVED}
        return [item for item in mutants.work_items if item.job_id in lived]


def untested(file: pathlib.Path) -> list[WorkItem]:
    """The mutants of a database that have no result yet, in an order of chance."""
    with use_db(file, mode=WorkDB.Mode.open) as mutants:
        return list(mutants.pending_work_items)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tests mutants of packages.")
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="directories below epochckpt/")
    parser.add_argument("--part", type=float, default=0.1, help="part of a module's places that gets a mutant, 0 to 1")
    parser.add_argument("--least", type=int, default=5, help="mutants of each module, if it has so many places")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--again", help="test the survivors once more, by pytest with these arguments")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "build" / "mutants", help="folder of the results")
    arguments = parser.parse_args()
    work: pathlib.Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tester = ByCoverage(Tests(work)) if arguments.again is None else ByArguments(arguments.again)
    for package in arguments.packages:
        file = session(package, work=work, part=arguments.part, least=arguments.least, seed=arguments.seed)
        run(file, untested(file) if arguments.again is None else survivors(file), tester, work=work)
        report(file, lived=work / f"{package}.diff")


if __name__ == "__main__":
    main()
