"""The checks of this repository, each by its name: `nox --list`. CONTRIBUTING.md says which to run when."""

import pathlib

import nox

PYTHONS = ["3.11", "3.12", "3.13"]
"""The versions of Python that epochckpt supports. One that is not installed is skipped, with a word."""

ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}
PYTEST = ("python", "-m", "pytest")
IN_PARALLEL = ("-n", "3", "--dist=loadfile")
BALANCED = ("-n", "4", "--dist=worksteal")  # for tests that take seconds each, or wait
QUICK = (
    "tests/format",
    "tests/directory",
    "tests/saving/test_save.py",
    "tests/tiers/test_standing.py",
    "tests/repo/test_house.py",
    "tests/repo/test_packages.py",
    "tests/repo/test_docs.py::test_what_is_made_of_the_code_is_as_the_code_says",
)

nox.options.sessions = ["quick"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False


def install(session: nox.Session, *what: str) -> None:
    """Installs into the session's environment; `nox --no-venv` takes the one that it was started in as it is."""
    if session.venv_backend != "none":
        session.install(*what)


def style(session: nox.Session) -> None:
    """Ruff, its formatter, and the contracts of imports: a few seconds."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-logo")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, contracts of imports, and pyright."""
    install(session, "-e", ".[test,examples]")
    style(session)
    session.run("pyright")


@nox.session
def quick(session: nox.Session) -> None:
    """What to run before each commit, in a minute: style, imports, and the tests of formats, directories and rules."""
    install(session, "-e", ".[test,examples]")
    style(session)
    session.run(*PYTEST, *IN_PARALLEL, "-q", *QUICK, env=ENVIRONMENT)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The tests that README names; arguments after `--` go to pytest."""
    install(session, "-e", ".[test,examples]")
    session.run(*PYTEST, *IN_PARALLEL, *session.posargs, env=ENVIRONMENT)


@nox.session
def slow(session: nox.Session) -> None:
    """The tests of the slow level, see tests/README.md."""
    install(session, "-e", ".[test,examples]")
    session.run(*PYTEST, *BALANCED, "-m", "slow and not long", *session.posargs, env=ENVIRONMENT)


@nox.session
def long(session: nox.Session) -> None:
    """The tests of the long level: hours."""
    install(session, "-e", ".[test,examples]")
    # Some of these tests may take longer than faulthandler allows any other.
    session.run(*PYTEST, *BALANCED, "-m", "long", "-o", "faulthandler_timeout=4000", *session.posargs, env=ENVIRONMENT)


@nox.session
def mutants(session: nox.Session) -> None:
    """Do the tests notice a change of the code? A sample for each module, see tests/mutants.py: two hours."""
    install(session, "-e", ".[test,examples]", "cosmic-ray>=8.7", "pytest-cov>=7")
    session.run("python", "-m", "tests.mutants", *session.posargs, env=ENVIRONMENT)


@nox.session
def oldest(session: nox.Session) -> None:
    """What depends on jax and Orbax most, with the oldest supported versions of both."""
    install(session, "-c", "tests/oldest.txt", "-e", ".[test,examples]")
    # Old flax and new jax, or the other way round, warn about each other.
    session.run(*PYTEST, "-o", "filterwarnings=default", *session.posargs, "@tests/oldest_tests.txt", env=ENVIRONMENT)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a site, built strictly."""
    install(session, "-e", ".[test,examples,docs]")
    session.run(*PYTEST, "tests/repo/test_site.py", env=ENVIRONMENT)  # those of the pages are among `tests`


@nox.session
def notebooks(session: nox.Session) -> None:
    """The notebooks run from top to bottom."""
    install(session, "-e", ".[test,examples,notebooks]")
    session.run(*PYTEST, "tests/examples/test_notebooks.py", env=ENVIRONMENT)
    found = sorted(str(path) for path in pathlib.Path("notebooks").glob("*.ipynb"))
    # The suite's own options (deselection, warnings as errors) are not meant for a notebook's kernel.
    session.run(*PYTEST, "-c", "/dev/null", "--rootdir=.", "--nbmake", "--nbmake-timeout=300", *found, env=ENVIRONMENT)
