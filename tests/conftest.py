"""Fixtures for all tests. The leak fixture runs around every one of them."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import runpy
import signal
import sys
import threading

import pytest
from tests.waiting import kill_marked, let_forks_die_with_this_process

# Programs that tests start; looking for doctests in them would run them.
collect_ignore_glob = ["cli/scripts/*", "*/scripts/*"]
os.environ.setdefault("COLUMNS", "80")
# What is recorded must not depend on how fast the machine is; the tests of the budget set their own.
os.environ.setdefault("SONDE_BUDGET", "none")
# Sessions in tests start no processes of their own; the tests of experiments ask for them.
os.environ.setdefault("SONDE_EXAMINE", "0")
# Torch's threads wait for each other by spinning, and on a busy machine they spin away the time of the one that works:
# tests took twenty times as long. Set before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A shell's background commands ignore Ctrl-C, and so do their children; tests of Ctrl-C need what a terminal gives.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


_reported: set[threading.Thread] = set()


# Every process that tests start inherits this mark, by which those that are left are found at the end.
MARK = "SONDE_TESTS_OF"
let_forks_die_with_this_process()


@pytest.fixture(autouse=True)
def _no_running_loop(request):
    """Let tests run loops of their own: Playwright leaves its loop running in a worker that has opened a browser."""
    loop = None if "browser" in request.fixturenames else asyncio._get_running_loop()
    if loop is not None:
        asyncio._set_running_loop(None)
    yield
    if loop is not None:
        asyncio._set_running_loop(loop)


def _sonde_threads() -> list[str]:
    found = [each for each in threading.enumerate() if each.name.startswith("sonde") and each not in _reported]
    for thread in found:  # one that has done its work may need a moment to end
        thread.join(10)
    left = [thread for thread in found if thread.is_alive()]
    _reported.update(left)  # or every later test would wait for it too, and fail
    return [thread.name for thread in left]


def _sessions_left() -> int:
    """Close the sessions that a test left open, so that its fault is not reported by every later test."""
    module = sys.modules.get("sonde.session")
    left = list(module._live) if module else []
    for session in left:
        session.close()
    return len(left)


def _check_nothing_left() -> None:
    assert not _sessions_left(), "a session was left open"
    left = _sonde_threads()
    assert not left, f"threads are left: {left}"
    if "torch" in sys.modules:  # read-side tests run without torch
        import torch

        from sonde.testing import assert_no_taps

        assert_no_taps()
        assert not torch.is_anomaly_enabled()
        assert torch.is_grad_enabled()


@pytest.fixture(autouse=True)
def _no_leaks():
    """Fail if a hook, a thread or a global is left before or after any test."""
    _check_nothing_left()
    yield
    _check_nothing_left()


@pytest.fixture(scope="session")
def run_two_ranks():
    """Run programs in two connected ranks each."""
    from tests.two_ranks import two_ranks

    with two_ranks() as run:
        yield run


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Name a failed test at once: a run that is cut off never comes to its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)", file=sys.__stdout__, flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Fail where a test module imports what Sonde lacks: the collector of doctests skips it, and none of it would run.

    A package that is not installed is a reason to skip.
    """
    report = yield
    if report.skipped and "unable to import module" in str(report.longrepr) and collector.path.name.startswith("test_"):
        try:
            runpy.run_path(str(collector.path))
        except ImportError as error:
            if (error.name or "").partition(".")[0] in ("sonde", "tests"):
                report.outcome, report.longrepr = "failed", f"{collector.path}: {error}"
    return report


def pytest_configure(config):
    """Let fixed examples be fixed, and half as many as `make fuzz` draws.

    Hypothesis mixes numbers and words of our own sources into what it draws, so that a change anywhere, or another
    choice of tests, gave every property test other examples. New ones are what `make fuzz` is for.
    """
    if not hasattr(config, "workerinput"):  # not in a worker of pytest-xdist, which inherits it
        os.environ[MARK] = str(os.getpid())
    # Sonde is a plugin of pytest, which rewrites the assertions of all of a plugin's modules: seconds for each worker.
    rewriting = getattr(config.pluginmanager, "rewrite_hook", None)
    if hasattr(rewriting, "_must_rewrite"):
        rewriting._must_rewrite.discard("sonde")
    if config.getoption("--hypothesis-profile", None) == "ci":
        from hypothesis import settings
        from hypothesis.internal.conjecture import providers

        settings.register_profile("ci", settings.get_profile("ci"), max_examples=50)
        settings.load_profile("ci")

        if hasattr(providers, "_get_local_constants"):
            providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Begin every test with the same random numbers, whatever ran before it. Another seed shows what passes by luck."""
    seed = int(os.environ.get("SONDE_TEST_SEED", "0"))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if torch := sys.modules.get("torch"):
        # Without a device, `torch.manual_seed` keeps the stack of every call for the day when one is used.
        seeded = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
        seeded(seed)


def pytest_unconfigure(config):
    """Kill what tests have left running: it would hold the output of the suite, and whoever reads that waits for it."""
    if not hasattr(config, "workerinput"):
        kill_marked(MARK, os.environ[MARK])


def pytest_collection_finish():
    """Spare the garbage collector what was imported: it would walk through all of torch each time a test calls it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Run browser tests last: Playwright keeps an event loop running in this thread as long as its browser is open."""
    items.sort(key=lambda item: "browser" in item.path.parts)
