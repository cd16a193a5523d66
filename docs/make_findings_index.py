"""Write docs/findings/README.md: one line for each kind of finding, taken from the pages beside it.

Run it after a page was added: python docs/make_findings_index.py
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "findings"
HEAD = """# Findings

What `sonde diagnose`, `session.findings` and `run.findings` can say, by kind. Every finding names the cause, where and
since when, the numbers it rests on, a fix, and a test that would refute it. What a run has not measured is not judged.

| kind | in a sentence |
|---|---|
"""


def index() -> str:
    """Return the page: the second paragraph of each page says what it is about."""
    rows = []
    for page in sorted(FOLDER.glob("*.md")):
        if page.name != "README.md":
            sentence = page.read_text().split("\n\n")[1].replace("\n", " ").replace("|", "\\|")
            rows.append(f"| [{page.stem}]({page.name}) | {sentence} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(index())
