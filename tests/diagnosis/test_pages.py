"""Every kind of finding has a page that says what it means, how it is told, how to fix it, and shows a program."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from sonde.diagnosis.nonfinite import KINDS
from sonde.diagnosis.rules import RULES

FOLDER = Path(__file__).parents[2] / "docs" / "findings"
sys.path.insert(0, str(FOLDER.parent))

from make_findings_index import everything, pages  # noqa: E402 - found by the line above

PAGES = pages()


def test_every_rule_has_a_page():
    missing = ({rule.kind for rule in RULES} | KINDS) - {page.stem for page in PAGES}
    assert not missing, f"write docs/findings/KIND.md for {sorted(missing)}"


def test_the_index_the_thresholds_and_the_fixes_are_those_of_the_rules():
    stale = [path.name for path, text in everything().items() if path.read_text() != text]
    assert not stale, "run: python docs/make_findings_index.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_all_its_parts(page):
    text = page.read_text()
    assert page.stem in {rule.kind for rule in RULES} | KINDS
    assert text.startswith(f"# {page.stem}\n")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == ["What it means", "How it is detected", "How to fix it", "A program that has it"]
    code = text.split("```python\n")[1].split("```")[0]
    ast.parse(code)
    assert all(len(line) <= 120 for line in text.splitlines())
