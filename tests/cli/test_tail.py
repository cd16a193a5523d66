import pytest
from tests.analysis.made_run import START, Recipe, write_run

from sonde.cli import tail as verb
from sonde.records import Event, Finding
from sonde.store import open_run

FINDING = Finding(kind="lr_too_high", severity="warning", confidence=0.9, step=30, last_step=30, cause="Too high.")
QUIET = Recipe(steps=20, layers=1, dies_at=None, nan_at=None)


@pytest.fixture
def live(tmp_path):
    """A run that is being written, and the rest of its blocks."""
    writer = write_run(tmp_path / "live", QUIET, close=False)
    rest = list(Recipe(steps=40, layers=1, dies_at=None, nan_at=None).blocks())[20:]
    yield tmp_path / "live", writer, rest
    writer.close()


def test_a_finished_run_is_reported_and_tail_ends(sonde, first):
    result = sonde("tail", first)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("step 60  loss 0.")
    assert "lr 1.00e-3" in lines[0]
    assert lines[-1] == "finished after 60 steps"


@pytest.mark.parametrize("state", ["failed"])
def test_a_run_that_failed_ends_with_1(sonde, tmp_path, state):
    write_run(tmp_path / "run", QUIET, state=state)
    assert sonde("tail", tmp_path / "run").exit_code == 1


def test_a_live_run_is_followed_to_its_end(sonde, live, monkeypatch, strict):
    path, writer, rest = live

    def train_instead_of_sleeping(seconds):
        assert seconds == 0.5
        if not rest:
            writer.take_event(Event(event_type="note", message="the end is near", timestamp=START))
            writer.close()
            return
        for _ in range(5):
            writer.take_block(rest.pop(0))
        writer.flush()

    monkeypatch.setattr(verb.time, "sleep", train_instead_of_sleeping)
    result = sonde("tail", path, "--interval", 0.5, "--json")
    assert result.exit_code == 0
    news = [strict(line) for line in result.stdout.splitlines()]
    assert [each["step"] for each in news[:-2]] == [20, 25, 30, 35, 40]
    assert [each["new_steps"] for each in news[1:-2]] == [5] * 4
    assert [each["message"] for each in news[-2]["events"]] == ["the end is near"]
    assert news[-1] == {"status": "finished", "steps": 40}


def test_what_was_written_just_before_the_end_is_still_reported(live):
    path, writer, rest = live
    run = open_run(path)
    looks = verb.follow(run, 1.0, sleep=lambda seconds: None)
    next(looks)
    writer.take_block(rest[0])
    writer.close()
    assert len(list(looks)) == 1
    assert run.steps[-1] == 21


def test_interrupting_stops_following_and_is_not_an_error(sonde, live, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(verb.time, "sleep", interrupt)
    result = sonde("tail", live[0])
    assert result.exit_code == 0
    assert "Traceback" not in result.output


def test_once_does_not_wait(sonde, live, monkeypatch):
    monkeypatch.setattr(verb.time, "sleep", lambda seconds: pytest.fail("it waited"))
    result = sonde("tail", live[0], "--once")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "live after 20 steps"


def test_values_of_choice_stand_in_the_line(sonde, first):
    line = sonde("tail", first, "--once", "--site", "head.weight:gradient", "--stat", "norm").stdout.splitlines()[0]
    assert "head.weight:gradient 0." in line
    many = sonde("tail", first, "--once", "--site", "*:gradient").stdout.splitlines()[0]
    assert "and 10 more" in many
    assert sonde("tail", first, "--site", "nothing").exit_code == 2


def test_a_run_without_steps_has_nothing_to_report_yet(sonde, tmp_path):
    write_run(tmp_path / "empty", Recipe(steps=0, nan_at=None))
    assert sonde("tail", tmp_path / "empty").stdout.splitlines()[-1] == "finished after 0 steps"


def test_what_the_doctor_finds_while_it_trains_is_reported_once(sonde, live, monkeypatch, strict):
    path, writer, rest = live

    def train_instead_of_sleeping(seconds):
        if len(rest) == 10:
            writer.take_finding(FINDING)
        if not rest:
            writer.close()
            return
        for _ in range(5):
            writer.take_block(rest.pop(0))
        writer.flush()

    monkeypatch.setattr(verb.time, "sleep", train_instead_of_sleeping)
    news = [strict(line) for line in sonde("tail", path, "--json").stdout.splitlines()]
    assert [each.get("findings") for each in news] == [[], [], [], ["lr_too_high"], [], None]
    again = sonde("tail", path, "--once").stdout.splitlines()
    assert again[1].startswith("● lr_too_high: Too high.")
    assert again[2].endswith(f"1 finding: sonde diagnose {path}")
