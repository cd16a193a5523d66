"""Every page has its place in the navigation of the site; `make docs` builds it strictly."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = (ROOT / "mkdocs.yml").read_text()
MADE = {"costs.md", "changelog.md", "contributing.md"}  # by docs/site_hooks.py, from pages outside docs/


def test_every_page_is_in_the_navigation_and_exists():
    listed = re.findall(r"([\w/-]+\.md)$", SITE.partition("\nnav:\n")[2], flags=re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not re.fullmatch(r"findings/(?!README).*|decisions/0.*", page)}
    assert set(listed) - MADE == pages


def test_the_site_loads_nothing_from_elsewhere():
    assert "font: false" in SITE
    assert "- offline" in SITE
    # Without a file of this name the plugin `offline` adds a script of another server, and search would need a network.
    (shim,) = re.findall(r"polyfills: \[(.*iframe-worker.*)\]", SITE)
    assert (ROOT / "docs" / shim).is_file()
