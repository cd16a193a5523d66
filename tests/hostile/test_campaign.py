"""A few rounds of the mutation campaign, and what it has to notice; `make fuzz` runs all of it."""

from __future__ import annotations

import random
import shutil

import pytest
from tests.hostile.campaign import damage, read_damaged
from tests.hostile.made import write_everything
from tests.hostile.reading import QUESTIONS, TOKEN, Place, ask, ways_to_read
from tests.hostile.values import unnoticed, values_of

from sonde.core import files
from sonde.store import layout, verify
from sonde.views.site.ask import Asker
from sonde.views.web import make_app

pytest.importorskip("starlette", reason="the viewer needs the view extra: pip install 'sonde[view]'")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return write_everything(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture
def work(template, tmp_path):
    for name in ("run", "twin"):
        shutil.copytree(template, tmp_path / "work" / name)
    return tmp_path / "work"


def test_the_viewer_answers_every_question_about_a_whole_run(work):
    with Asker(make_app([work], token=TOKEN), TOKEN) as asker:
        wrong = {each: answer.body for each in QUESTIONS if (answer := ask(asker, each, Place(work))).status != 200}
    assert wrong == {}


def test_a_damaged_file_ends_in_one_clear_line_however_the_run_is_read(template, work):
    known, chance = values_of(template), random.Random(19)
    for _ in range(8):
        shutil.rmtree(work / "run")
        shutil.copytree(template, work / "run")
        target = chance.choice(sorted(path for path in (work / "run").rglob("*") if path.is_file()))
        name, before = target.relative_to(work / "run").as_posix(), target.read_bytes()
        is_resealed = damage(target, chance)
        assert read_damaged(work, name, chance.sample(ways_to_read(name), 2)) == []
        if not is_resealed:
            assert unnoticed(work / "run", name, before, known, is_finished=True) == []


def test_verify_notices_every_file_that_is_removed_or_emptied(template, work):
    known = values_of(template)
    for path in sorted(path for path in template.rglob("*") if path.is_file()):
        name, content = path.relative_to(template).as_posix(), path.read_bytes()
        target = work / "run" / name
        for now in (None, b""):
            target.unlink() if now is None else target.write_bytes(now)
            assert unnoticed(work / "run", name, content, known, is_finished=True) == []
            target.write_bytes(content)


def test_verify_notices_what_was_added_to_a_file_that_never_changes(template, work):
    for part in ("tapes/step_2/tensors.safetensors", "bundles/step-000006/tensors.safetensors", "traces/one.json"):
        with (work / "run" / part).open("ab") as file:
            file.write(b"more")
    found = [problem.file.relative_to(work / "run").parts[0] for problem in verify(work / "run").problems]
    assert sorted(set(found)) == ["bundles", "tapes", "traces"]


def test_the_campaign_notices_wrong_values_and_missed_damage(template, work):
    segment = next((work / "run" / "telemetry").rglob("seg-*.safetensors"))
    before = segment.read_bytes()
    other = values_of(work / "run")
    key = next(iter(other.rows))
    known = type(other)({**other.rows, key: b"other"}, {**other.captures, repr("7"): "other"})
    name = segment.relative_to(work / "run").as_posix()
    found = unnoticed(work / "run", name, before + b"x", known, is_finished=True)
    assert [each.how for each in found] == ["values", "captures", "verify"]
    events = work / "run" / layout.EVENTS
    grown = events.read_bytes() + files.dumps({}) + b"\n"
    events.write_bytes(grown)
    assert unnoticed(work / "run", layout.EVENTS, grown, other, is_finished=True) == []
