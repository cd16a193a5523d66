"""Write what docs/findings takes from the rules: the index, the page of thresholds, and two parts of every page.

A page's first sentence and its section "How to fix it" are the rule's; the rest is written by hand. Run this after a
rule was changed: python docs/make_findings_index.py
"""

from __future__ import annotations

import inspect
import re
import string
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType

from sonde.diagnosis.reliability import confidence_of
from sonde.diagnosis.rule import Rule, Threshold
from sonde.diagnosis.rules import RULES
from sonde.sensors.catalogue import SENSORS

FOLDER = Path(__file__).parent / "findings"
NOT_PAGES = ("README.md", "thresholds.md", "sensors.md")
INDEX = """# Findings

What `sonde diagnose`, `session.findings` and `run.findings` can say, by kind. Every finding names the cause, where and
since when, the numbers it rests on, a fix, and a test that would refute it. What a run has not measured is not judged.

*Exact* findings rest on a relation that holds or does not, such as a weight without a gradient; the others compare
statistics with [thresholds](thresholds.md). What is measured for them, and what that costs, is on the page of
[sensors](sensors.md). *Confidence* is how often a warning of that kind named the right cause in
the benchmark of faulty programs (`benchmarks/rule_table.py`), for few programs drawn towards one half. It is empty for
kinds that the benchmark does not have, and for those that are only worth a note.
"""
THRESHOLDS = """# Thresholds

Every number that a rule compares with, and where it comes from. Exact relations need none. Where a threshold is a
matter of judgement, it is relative to the run's own history or to other layers.
"""
SENSOR_PAGE = """# Sensors

What is measured for the rules beyond the statistics of tensors, when, and what a look costs. A sensor is attached only
if a rule or a view wants one of its signals, and only in a session that diagnoses. `benchmarks/vitals.py` measures the
time of each. Its schedule counts what its description says: steps, passes or calls.
"""


def index() -> str:
    """Return the index: a table of kinds for each theme, then the kinds that no rule finds."""
    parts = [INDEX]
    for theme, rules in _themes():
        rows = [
            f"| [{rule.kind}]({rule.kind}.md) | {_cell(rule.summary)} | {rule.severity} "
            f"| {'yes' if rule.exact else ''} | {_percent(confidence_of(rule.kind, rule.severity))} |"
            for rule in rules
        ]
        head = "| kind | in a sentence | severity | exact | confidence |\n|---|---|---|---|--:|"
        parts.append("\n".join([f"## {theme.capitalize()}", "", _about(theme), "", head, *rows, ""]))
    others = [page for page in pages() if page.stem not in {rule.kind for rule in RULES}]
    rows = [f"| [{page.stem}]({page.name}) | {_cell(_sentence(page))} |" for page in others]
    found = "Found by repeating the step in which a number became non-finite, not by a rule."
    parts.append("\n".join(["## Others", "", found, "", "| kind | in a sentence |\n|---|---|", *rows, ""]))
    return "\n".join(parts)


def thresholds() -> str:
    """Return the page of thresholds: for each theme the numbers of its rules."""
    parts = [THRESHOLDS]
    for theme, rules in _themes():
        rows = [
            f"| [{rule.kind}]({rule.kind}.md) | `{name}` | {_number(value)} | {_cell(value.source)} |"
            for rule in rules
            for name, value in thresholds_of(rule).items()
        ]
        if rows:
            head = "| kind | threshold | value | why |\n|---|---|--:|---|"
            parts.append("\n".join([f"## {theme.capitalize()}", "", head, *rows, ""]))
    return "\n".join(parts)


def sensors() -> str:
    """Return the page of sensors: for each theme what its sensors produce, when and at which cost."""
    parts = [SENSOR_PAGE]
    for theme in sorted({kind.__module__.rpartition(".")[2] for kind in SENSORS}):
        rows = [
            f"| {_cell(_summary(kind))} | {', '.join(f'`{each}`' for each in kind.produces)} "
            f"| `{_cell(kind.when.text)}` | {_cell(kind.cost)} |"
            for kind in SENSORS
            if kind.__module__.endswith(f".{theme}")
        ]
        head = "| sensor | produces | when | a look costs |\n|---|---|---|---|"
        parts.append("\n".join([f"## {theme.capitalize()}", "", head, *rows, ""]))
    return "\n".join(parts)


def page_of(rule: Rule, text: str) -> str:
    """Return the page of a rule with what is generated in it made anew."""
    sections = (section.partition("\n") for section in text.split("\n## ")[1:])
    parts = {title: content.strip() for title, _, content in sections}
    parts["How to fix it"] = "\n\n".join(map(_wrap, _fix(rule)))
    rest = "\n\n".join(f"## {title}\n\n{content}" for title, content in parts.items())
    return f"# {rule.kind}\n\n{_wrap(rule.summary)}\n\n{rest}\n"


def pages() -> list[Path]:
    """Return the pages of all kinds."""
    return sorted(page for page in FOLDER.glob("*.md") if page.name not in NOT_PAGES)


def everything() -> dict[Path, str]:
    """Return the text of all files that are generated, whole or in part."""
    known = {page.stem: page for page in pages()}
    made = {known[rule.kind]: page_of(rule, known[rule.kind].read_text()) for rule in RULES if rule.kind in known}
    return made | {
        FOLDER / "README.md": index(),
        FOLDER / "thresholds.md": thresholds(),
        FOLDER / "sensors.md": sensors(),
    }


def thresholds_of(rule: Rule) -> dict[str, Threshold]:
    """Return the thresholds that a rule uses, itself and through the functions of `sonde.diagnosis` that it calls."""
    found: dict[str, Threshold] = {}
    for name, value in _globals_of(rule.find, set()):
        if isinstance(value, Threshold):
            found.setdefault(name, value)
    return found


def _globals_of(function: FunctionType, seen: set[FunctionType]) -> Iterator[tuple[str, object]]:
    if function in seen:
        return
    seen.add(function)
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        yield name, value
        if inspect.isfunction(value) and value.__module__.startswith("sonde.diagnosis.rules"):
            yield from _globals_of(value, seen)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _themes() -> Iterator[tuple[str, list[Rule]]]:
    for theme in sorted({rule.theme for rule in RULES}):
        yield theme, [rule for rule in RULES if rule.theme == theme]


def _about(theme: str) -> str:
    return (import_module(f"sonde.diagnosis.rules.{theme}").__doc__ or "").partition("\n")[0]


def _summary(kind: type) -> str:
    return f"**{kind.__name__}** " + (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


def _fix(rule: Rule) -> Iterator[str]:
    yield _prose(rule.fix)
    yield f"*To prove it wrong:* {_prose(rule.refute)}"
    if rule.explains:
        links = ", ".join(f"[{kind}]({kind}.md)" for kind in sorted(rule.explains - {rule.kind}))
        yield f"Findings that follow from it and are listed under it: {links}."


def _prose(template: str) -> str:
    """Return a template as Markdown: `{names}` in italics, and what looks like code as code.

    >>> _prose("Call {the_optimizer}.step() after loss.backward(), with lr={rate:g}.")
    'Call *the optimizer*`.step()` after `loss.backward()`, with lr=*rate*.'
    """
    parts = []
    for text, name, _, _ in string.Formatter().parse(template):
        parts.append(_CODE.sub(r"`\g<0>`", text))
        if name is not None:
            parts.append(f"*{name.replace('_', ' ')}*")
    return "".join(parts)


_CODE = re.compile(
    r"""(?<![\w`.])(?:
        \.?[A-Za-z_][\w.]*\((?:[^()]|\([^()]*\))*\)(?:\.\w+(?:\([^()]*\))?)*  # a call, and calls of its result
        |[A-Za-z_][\w.]*=(?:-?[\w.]*\w|'[^']*')  # an argument
        |[A-Za-z]\w*(?:\.[a-z_]\w+)+|\w*_\w*  # a dotted or an underscored name
    )""",
    re.VERBOSE,
)


def _sentence(page: Path) -> str:
    return page.read_text().split("\n\n")[1].replace("\n", " ")


def _wrap(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _number(value: float) -> str:
    return f"{float(value):.4g}"


if __name__ == "__main__":
    for path, content in everything().items():
        path.write_text(content)
