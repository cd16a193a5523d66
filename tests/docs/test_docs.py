"""The code in README and guides runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = (
    "README.md",
    "docs/debug-session.md",
    "docs/quick-start.md",
    "docs/write-your-own-debugger.md",
    "docs/figures.md",
    "docs/reports.md",
    "docs/pytorch-debugging.md",
    "docs/my-loss-became-nan.md",
    "docs/first-bad-operation.md",
    "docs/my-run-is-slow.md",
    "docs/my-run-leaks.md",
    "docs/samples.md",
)
PAGES = [ROOT / guide for guide in GUIDES if (ROOT / guide).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    if not page.exists():
        pytest.fail(f"{page} is missing")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
