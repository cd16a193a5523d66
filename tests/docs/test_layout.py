"""docs/layout.md is the map of the source as it is on disk."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import sonde

SOURCE = Path(sonde.__file__).parent
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "layout.md").read_text()


def listed(heading):
    """Return the names in the first column of a section's table."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| \S", section, flags=re.MULTILINE)


def test_every_package_has_one_line_and_every_line_a_package():
    on_disk = [f"{init.parent.relative_to(SOURCE)}/" for init in SOURCE.rglob("__init__.py") if init.parent != SOURCE]
    on_page = [*listed("Plain"), *listed("Recording"), *listed("Interfaces")]
    assert sorted(on_page) == sorted(on_disk)


def test_every_module_at_the_root_has_one_line_and_every_line_a_module():
    assert sorted(listed("Single modules")) == sorted(path.stem for path in SOURCE.glob("*.py"))


def test_the_plain_floor_is_held_to_need_no_torch():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    held = next(each["source_modules"] for each in contracts if each["name"] == "Reading needs no torch")
    plain = {f"sonde.{name.partition('/')[0]}" for name in listed("Plain")}
    assert plain
    assert plain <= set(held)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/how-to-extend.md", "docs/layout.md"])
def test_files_that_are_named_exist(page):
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|js|md|txt))`", (ROOT / page).read_text())
    missing = [name for name in named if not any((place / name).exists() for place in (SOURCE, ROOT))]
    assert named
    assert not missing


def test_every_decision_is_in_the_index_under_its_title():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    for page in folder.glob("0*.md"):
        number, _, title = page.read_text().partition("\n")[0].removeprefix("# ").partition(". ")
        assert f"| {number} | [{title}]({page.name}) |" in index
