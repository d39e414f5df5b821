"""
The tests in environments of their own: `nox -s lowest` with the lowest supported version of each dependency, `nox -s tests`
with the versions of constraints.txt, `nox -s layer` without the training plugin. What follows `--` goes to pytest.
"""

import nox

nox.options.sessions = ["tests", "lowest", "layer"]
nox.options.reuse_existing_virtualenvs = True
THREADS = {"OMP_NUM_THREADS": "1"}


def _install(session: nox.Session, constraints: str, *targets: str) -> None:
    # torch by itself first, as in the Makefile: the cheapest build that satisfies the constraint
    session.install("-c", constraints, "torch")
    session.install("-c", constraints, "-e", *targets)


@nox.session
def tests(session: nox.Session) -> None:
    """The tests with the pinned versions."""
    _install(session, "constraints.txt", ".[titan]", "--group", "test")
    session.run("python", "-m", "pytest", *session.posargs, env=THREADS)


@nox.session
def lowest(session: nox.Session) -> None:
    """The tests with the lowest versions that pyproject.toml allows."""
    _install(session, "constraints-lowest.txt", ".[titan]", "--group", "test")
    session.run("python", "-m", "pytest", *session.posargs, env=THREADS)


@nox.session
def layer(session: nox.Session) -> None:
    """The layer and the model without the packages of the training plugin."""
    _install(session, "constraints.txt", ".")
    session.install("-c", "constraints.txt", "pytest", "hypothesis", "accelerate")
    session.run("python", "-m", "pytest", *(session.posargs or [
        "tests/test_install.py", "tests/layers/test_harmonic_layer.py", "tests/models/test_harmonic_persistence.py",
    ]), env=THREADS)
