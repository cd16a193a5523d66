"""A plugin of pytest: a test that trains fails with the finding.

    def test_it_learns(sonde):
        with sonde.watch(model, optimizer):
            train(model, optimizer)

Every pytest of an environment loads this module, so it imports neither torch nor the rest of Sonde until a test asks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from sonde.forensics.checkup import Checkup
    from sonde.records import Finding
    from sonde.session import Session

_MARKER: Final = (
    "sonde(allow=(), severity='warning'): findings that do not fail the test, and how severe one must be to fail it."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--sonde-checkup`."""
    parser.getgroup("sonde").addoption(
        "--sonde-checkup",
        action="store_true",
        help="Check up on every model that a test watches with its loss_fn and loader, before it trains.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `sonde`."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def sonde(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestWatcher]:
    """Watch models in this test, which fails if something is wrong with their training."""
    marker = request.node.get_closest_marker("sonde")
    options = {} if marker is None else marker.kwargs
    watcher = TestWatcher(tmp_path / "sonde", with_checkup=request.config.getoption("sonde_checkup"), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SONDE_EXAMINE", "0")  # repeating taped steps takes up to a minute
        yield watcher
        watcher.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail the test itself, not its teardown."""
    result = yield  # what the test raises is reported as it is
    watcher = getattr(item, "funcargs", {}).get("sonde")
    if isinstance(watcher, TestWatcher):
        watcher.check()
    return result


class TestWatcher:
    """What the fixture `sonde` hands to a test."""

    __test__ = False

    def __init__(
        self, folder: Path, *, with_checkup: bool = False, allow: str | Iterable[str] = (), severity: str = "warning"
    ) -> None:
        from sonde.errors import OptionError
        from sonde.records import SEVERITIES

        if severity not in SEVERITIES:
            raise OptionError(f"severity={severity!r}: choose from {', '.join(SEVERITIES)}.")
        self._folder, self._with_checkup = folder, with_checkup
        self._allowed = frozenset([allow] if isinstance(allow, str) else allow)
        self._least = SEVERITIES.index(severity)
        self._sessions: list[Session] = []
        self._checkups: list[Checkup] = []

    def watch(self, model: Any, optimizer: Any = None, **options: Any) -> Session:
        """Record a model as `sonde.watch` does, into a temporary folder; takes the same options."""
        import sonde

        if self._with_checkup and options.get("loss_fn") is not None and options.get("loader") is not None:
            self.checkup(model, options["loss_fn"], options["loader"], optimizer)
        # All that a test finds has to be the same on a busy machine.
        given: dict[str, Any] = {"budget": None, "run": self._folder / "run-*", **options}
        session = sonde.watch(model, optimizer, **given)
        self._sessions.append(session)
        return session

    def checkup(self, model: Any, loss_fn: Any, loader: Any, optimizer: Any = None) -> Checkup:
        """Probe a model as `sonde.checkup` does; the test fails with what it finds."""
        import sonde

        self._checkups.append(sonde.checkup(model, loss_fn, loader, optimizer, quiet=True))
        return self._checkups[-1]

    @property
    def findings(self) -> list[Finding]:
        """What was found so far and fails the test; complete once the sessions are closed."""
        from sonde.records import SEVERITIES

        found = [finding for checkup in self._checkups for finding in checkup.findings]
        found += [finding for session in self._sessions for finding in session.findings]
        return [
            each for each in found
            if each.kind not in self._allowed and SEVERITIES.index(each.severity) >= self._least
        ]  # fmt: skip

    def close(self) -> None:
        """Close the sessions that the test left open."""
        for session in self._sessions:
            session.close()

    def check(self) -> None:
        """Fail the test if something was found."""
        self.close()
        found = self.findings
        if not found:
            return
        from sonde.views.ci import lines_of

        cards = ["\n  ".join((f"{each.severity} {each.kind}", *lines_of(each))) for each in found]
        more = [f"Run: sonde diagnose {session.path}" for session in self._sessions if session.findings]
        pytest.fail("\n".join(["Sonde found something wrong:", *cards, *more]), pytrace=False)
