"""The pytest side of `require`, `leaks` and `deep`; tests/conftest.py loads it.

Fixtures: ``seed`` is the seed of a random test; the environment variable PLAIT_SEED repeats a run. ``cycles`` numbers
the cycles of a long test, which can be resumed. Option: ``--suite`` selects deep tests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import leaks
from tests.support.deep import Cycles, DeepState, derive, fingerprint
from tests.support.require import everything_required

#: The seed of ordinary runs, which are the same every time. Each deep run chooses a new seed.
ORDINARY_SEED = 1

_STATE = pytest.StashKey[DeepState]()
_BEFORE = pytest.StashKey[leaks.Traces]()
_TOKEN = pytest.StashKey[str]()
_LEAKED = pytest.StashKey[list[str]]()
_LEAKED_BY_WORKERS = pytest.StashKey[list[str]]()
_CHOSEN = pytest.StashKey[list[str]]()
_CALL_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", default=None, metavar="NAME", help='deep tests of that suite, or "all"')
    parser.addini("ending_seconds", "how long a process that is ending after the last test may take", default="5")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # There are no deadlines, so that a slow machine does not fail a test. Without a seed, examples are always the same.
    settings.register_profile(
        "plait",
        deadline=None,
        derandomize="PLAIT_SEED" not in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("plait")
    if config.getoption("--hypothesis-seed", None) is None and "PLAIT_SEED" in os.environ:
        config.option.hypothesis_seed = os.environ["PLAIT_SEED"]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that runs the tests in the background ignores SIGINT. Programs that tests start would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--suite") is not None:
        named = os.environ.get("PLAIT_SEED")
        config.stash[_STATE] = DeepState(
            config.rootpath / ".plait" / "deep.json",
            fingerprint(config.rootpath),
            int(named) if named else None,
        )


def pytest_report_header(config: pytest.Config) -> str:
    state = config.stash.get(_STATE, None)
    return f"plait: PLAIT_SEED={_run_seed(config)}" + (f", {len(state.passed)} tests done before" if state else "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    state = config.stash.get(_STATE, None)
    if state is None:
        items[:] = _arranged(items)
        return
    suite = str(config.getoption("--suite"))
    suites = {item.nodeid: _suite_of(item) for item in items}
    known = sorted({name for name in suites.values() if name})
    if suite != "all" and suite not in known:
        raise pytest.UsageError(f"SUITE={suite} has no tests: it is one of {', '.join(['all', *known])}")
    chosen = [item for item in items if suites[item.nodeid] and suite in ("all", suites[item.nodeid])]
    if all(item.nodeid in state.passed for item in chosen):
        state.forget(item.nodeid for item in chosen)
    config.stash[_CHOSEN] = [item.nodeid for item in chosen]
    waiting = [item for item in chosen if item.nodeid not in state.passed]
    config.hook.pytest_deselected(items=[item for item in items if item not in waiting])
    items[:] = waiting


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test, different for each test; PLAIT_SEED repeats a run."""
    return derive(_run_seed(request.config), request.node.nodeid)


@pytest.fixture
def cycles(request: pytest.FixtureRequest) -> Cycles:
    """``for number in cycles(50): ...``; resumes where an interrupted deep run stopped."""
    return Cycles(request.node.nodeid, request.config.stash.get(_STATE, None))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and everything_required():
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"PLAIT_REQUIRE=all forbids skipping: {reason}"
    state = item.config.stash.get(_STATE, None)
    if state is not None:
        if report.failed:
            report.sections.append(("again with", f"PLAIT_SEED={state.seed} make test-deep SUITE={_suite_of(item)}"))
        elif report.when == "call":
            item.stash[_CALL_PASSED] = report.passed
        elif report.when == "teardown" and item.stash.get(_CALL_PASSED, False):
            state.finish(item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.outcome == "skipped" and everything_required():
        report.outcome = "failed"
        report.longrepr = f"PLAIT_REQUIRE=all forbids skipping {collector.nodeid}: {report.longrepr}"
    return report


def pytest_sessionstart(session: pytest.Session) -> None:
    token = leaks.mark_run()
    session.config.stash[_TOKEN] = token
    session.config.stash[_BEFORE] = leaks.observe(token)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    stash = session.config.stash
    state = stash.get(_STATE, None)
    if state is not None and exitstatus == pytest.ExitCode.OK and state.passed.issuperset(stash[_CHOSEN]):
        state.forget(stash[_CHOSEN])
    if _BEFORE not in stash:
        return
    after = leaks.settle(stash[_TOKEN], stash[_BEFORE], float(session.config.getini("ending_seconds")))
    stash[_LEAKED] = after.beyond(stash[_BEFORE])
    if stash[_LEAKED]:
        leaks.end_processes(stash[_BEFORE], after)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if hasattr(session.config, "workeroutput"):
        # This is a worker of pytest-xdist, so the controller reports the leaks.
        session.config.workeroutput["leaked"] = stash[_LEAKED]
    elif stash.get(_LEAKED_BY_WORKERS, []):
        stash[_LEAKED] += stash[_LEAKED_BY_WORKERS]
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended."""
    node.config.stash.setdefault(_LEAKED_BY_WORKERS, []).extend(getattr(node, "workeroutput", {}).get("leaked", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    leaked = config.stash.get(_LEAKED, [])
    if leaked:
        terminalreporter.section("left behind by the tests", red=True, bold=True)
        for line in leaked:
            terminalreporter.line(line, red=True)


def _run_seed(config: pytest.Config) -> int:
    state = config.stash.get(_STATE, None)
    return state.seed if state else int(os.environ.get("PLAIT_SEED", ORDINARY_SEED))


def _arranged(items: list[pytest.Item]) -> list[pytest.Item]:
    """Sort long tests first, so that no worker ends long after the others.

    Each worker gets an equal part of the list. A worker that is done takes tests from the ends of the other parts.
    Tests that use the session's Spark are at the beginning of the last part, so that one worker runs all of them.
    Otherwise each worker would start its own Spark.
    """
    spark = [item for item in items if "spark" in getattr(item, "fixturenames", ())]
    others = sorted((item for item in items if "spark" not in getattr(item, "fixturenames", ())), key=_is_short)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    at = len(items) * (workers - 1) // workers + workers
    return [*others[:at], *spark, *others[at:]]


def _is_short(item: pytest.Item) -> bool:
    return item.get_closest_marker("timeout") is None


def _suite_of(item: pytest.Item) -> str | None:
    marker = item.get_closest_marker("deep")
    if marker is None:
        return None
    if len(marker.args) != 1 or not isinstance(marker.args[0], str):
        raise pytest.UsageError(f'{item.nodeid}: name a suite, as in @pytest.mark.deep("crash")')
    return marker.args[0]
