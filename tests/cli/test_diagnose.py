from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.analysis.made_run import Recipe, write_run

import sonde as library
from sonde.diagnosis import Diagnosis
from sonde.records import Evidence, Finding
from sonde.views.terminal import Look, make_console
from sonde.views.terminal.findings import finding_lines, in_words, render_diagnosis

FINDING = Finding(
    kind="double_softmax",
    severity="warning",
    confidence=0.98,
    step=12,
    last_step=90,
    sites=("4", "loss_fn"),
    evidence=(Evidence(name="difference from 1", value=1e-7, threshold=1e-3, relation="<="),),
    cause="Cross entropy is given probabilities.",
    fix="Remove the softmax.",
    refute="If rows do not sum to 1, it is wrong.",
    explains=("loss_plateau",),
)


@pytest.fixture(scope="module")
def ill(tmp_path_factory):
    """A run whose gradients are never cleared."""
    path = tmp_path_factory.mktemp("diagnose") / "ill"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with library.watch(model, optimizer, run=path) as session:
        for _ in range(12):
            x = torch.randn(16, 8)
            loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return path


def test_a_critical_finding_is_printed_with_its_fix_and_exits_with_two(sonde, ill):
    result = sonde("diagnose", ill)
    assert result.exit_code == 2
    assert "CRITICAL  missing_zero_grad" in result.stdout
    assert "Call optimizer.zero_grad() once per step" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_the_same_for_programs(sonde, ill, strict):
    result = sonde("diagnose", ill, "--json")
    answer = strict(result.stdout)
    assert result.exit_code == 2
    assert (answer["severity"], answer["findings"][0]["kind"]) == ("critical", "missing_zero_grad")
    assert answer["findings"][0]["evidence"][0]["relation"] == ">="
    assert answer["rules_asked"] > 40


def test_a_run_with_nothing_wrong_exits_with_zero_and_says_what_was_asked(sonde, tmp_path):
    write_run(tmp_path / "well", Recipe(steps=25, layers=1, dies_at=None, nan_at=None))
    result = sonde("diagnose", tmp_path / "well")
    assert result.exit_code == 0, result.stdout
    assert "rules found nothing wrong in" in result.stdout
    assert "the rest had nothing to judge (see --all)." in result.stdout
    assert "vital." not in sonde("diagnose", tmp_path / "well", "--all").stdout, "keys are not words"
    assert "so nothing is known about" in sonde("diagnose", tmp_path / "well", "--all").stdout


@pytest.mark.parametrize("arguments", [["no-such-run"], ["--no-such-option"], []])
def test_wrong_use_is_distinguished_from_findings(sonde, arguments):
    assert sonde("diagnose", *arguments).exit_code == 3


def test_other_verbs_keep_their_code_for_wrong_use(sonde):
    assert sonde("show", "no-such-run").exit_code == 2


def test_the_summary_begins_with_the_verdict_and_the_findings(sonde, ill):
    lines = sonde("show", ill).stdout.splitlines()
    assert lines[2].startswith("Missing zero grad since step 2")
    assert any(line.startswith("● missing_zero_grad: Gradients are not cleared between steps") for line in lines)
    wide = sonde("show", ill, "--width", "140").stdout.splitlines()
    assert any(line.startswith("● missing_zero_grad (optimizer and 1 more), since step 2: Gradients") for line in wide)
    assert any("sonde diagnose" in line for line in lines)


def draw(diagnosis, *, everything=False, width=80):
    console = make_console(width=width)
    with console.capture() as captured:
        for part in render_diagnosis(diagnosis, Look(width), everything=everything):
            console.print(part)
    return captured.get()


def test_a_card_has_all_that_a_finding_says():
    text = draw(Diagnosis((FINDING,), {}, {}, 90, 5))
    for word in ("1 finding in 90 steps", "WARNING  double_softmax  since step 12 · 98% sure", "4, loss_fn",
                 "difference from 1: 1.00e-7 (≤ 0.001)", "Remove the softmax.", "explains", "loss_plateau",
                 "5 of 5 rules gave a verdict"):  # fmt: skip
        assert word in text


def test_notes_are_one_line_unless_asked_for():
    note = replace(FINDING, severity="info")
    assert "Remove the softmax." not in draw(Diagnosis((note,), {}, {}, 90, 5))
    assert "Remove the softmax." in draw(Diagnosis((note,), {}, {}, 90, 5), everything=True)


def test_a_source_line_is_shown_where_the_operation_was_found():
    origin = {"origin": {"line": {"file": "/home/me/model.py", "line": 41, "text": "y = x.log()"}}}
    text = draw(Diagnosis((replace(FINDING, data=origin),), {}, {}, 90, 5))
    assert "model.py:41" in text


def test_words_of_a_stranger_cannot_move_the_cursor_or_open_markup():
    evil = replace(FINDING, cause="\x1b[2J[bold]boo", kind="a\nb", sites=("\x07x",))
    text = draw(Diagnosis((evil,), {}, {}, 90, 5))
    assert "\x1b" not in text
    assert "[bold]boo" in text


def test_a_broken_rule_is_named():
    assert "the rule lr_too_high failed" in draw(Diagnosis((), {}, {"lr_too_high": "Traceback"}, 90, 5))


def test_short_lines_fit_and_count_the_rest():
    console = make_console(width=50)
    with console.capture() as captured:
        console.print(finding_lines([FINDING] * 7, Look(50)))
    lines = captured.get().splitlines()
    assert len(lines) == 6
    assert all(len(line) <= 50 for line in lines)
    assert lines[-1].strip() == "and 2 findings more"


def test_a_share_is_shown_in_percent_and_the_fix_before_the_evidence():
    evidence = (
        Evidence(name="share of dead units", value=0.79625, threshold=0.2, relation=">="),
        Evidence(name="the same at the start", value=0.125),
        Evidence(name="steps in a row", value=64.0),
    )
    text = draw(Diagnosis((replace(FINDING, evidence=evidence),), {}, {}, 90, 5))
    assert "share of dead units: 79.6% (≥ 20%)" in text
    assert "the same at the start: 12.5%" in text
    assert "steps in a row: 64" in text
    assert text.index("Remove the softmax.") < text.index("share of dead units")


def test_what_was_lacking_is_described_in_words():
    assert in_words("module:vital.attention_entropy") == "attention weights"
    assert in_words("(loop):vital.root and loss_fn:output") == "what backward() was called on and a loss function"
    assert in_words("loss_fn:vital.not_known_here") == "not known here of loss_fn"


def record(path, failing_at, error):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with library.watch(model, optimizer, run=path):
        for step in range(6):
            if step == failing_at:
                raise error
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_training_that_raised_is_not_called_sound(sonde, tmp_path, strict):
    with pytest.raises(RuntimeError, match="no such shape"):
        record(tmp_path / "broken", 4, RuntimeError("no such shape"))
    result = sonde("diagnose", tmp_path / "broken")
    assert result.exit_code == 1
    first = " ".join(result.stdout.split()).partition(")")[0]
    assert first.startswith(
        "broken · failed ✗ step 4: The training raised RuntimeError: no such shape (test_diagnose.py:"
    )
    assert "rules found nothing else wrong in" in result.stdout
    answer = strict(sonde("diagnose", tmp_path / "broken", "--json").stdout)
    assert answer["ending"]["step"] == 4
    assert (answer["ending"]["exception"], answer["ending"]["message"]) == ("RuntimeError", "no such shape")
    shown = sonde("show", tmp_path / "broken").stdout
    assert shown.count("no such shape") == 1, "said first, and once"
    events = strict(sonde("show", tmp_path / "broken", "--json").stdout)["events"]
    assert [event["event_type"] for event in events] == ["exception"]


def test_an_interrupted_training_is_called_so_and_is_not_a_failure(sonde, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "stopped", 3, KeyboardInterrupt())
    result = sonde("diagnose", tmp_path / "stopped")
    assert result.exit_code == 0
    assert "stopped · interrupted" in result.stdout
    assert "· step 3: The training was interrupted." in result.stdout


def test_every_verb_that_names_a_status_says_interrupted(sonde, tmp_path, strict):
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "stopped", 3, KeyboardInterrupt())
    (listed,) = strict(sonde("runs", tmp_path, "--json").stdout)["runs"]
    assert listed["status"] == "interrupted"
    assert "interrupted" in sonde("runs", tmp_path).stdout
    shown = sonde("show", tmp_path / "stopped").stdout
    assert "stopped · interrupted · 3 steps" in shown
    assert shown.lower().count("interrupted") == 2, "as its status and as how it ended, not among the events once more"
    followed = sonde("tail", tmp_path / "stopped")
    assert "interrupted after 3 steps" in followed.stdout
    assert followed.exit_code == 1, "whoever waits for the training to finish must not go on"


def test_a_run_from_before_there_was_a_word_for_it_is_read_as_it_is(sonde, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "old", 3, KeyboardInterrupt())
    for file, new, old in (("events.jsonl", "interrupted", "exception"),
                           ("telemetry/r00000/writer.json", "interrupted", "failed")):  # fmt: skip
        path = tmp_path / "old" / file
        assert path.read_text().count(f'"{new}"') == 1
        path.write_text(path.read_text().replace(f'"{new}"', f'"{old}"'))
    result = sonde("diagnose", tmp_path / "old")
    assert result.exit_code == 0
    assert "old · failed" in result.stdout
    assert "· step 3: The training was interrupted." in result.stdout


def test_a_run_without_steps_is_not_called_sound(sonde, tmp_path):
    library.watch(torch.nn.Linear(4, 2), run=tmp_path / "empty").close()
    result = sonde("diagnose", tmp_path / "empty")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["empty · finished", "No steps were recorded, so there is nothing to judge."]


def test_a_run_of_which_a_part_cannot_be_read_is_not_called_sound(sonde, tmp_path, strict):
    record(tmp_path / "cut", None, None)
    (segment,) = (tmp_path / "cut" / "telemetry" / "r00000").glob("seg-*")
    segment.write_bytes(segment.read_bytes()[:-50])
    result = sonde("diagnose", tmp_path / "cut")
    assert result.exit_code == 1
    assert f"1 part of it could not be read, and is not judged: sonde verify {tmp_path / 'cut'}" in result.stdout
    assert len(strict(sonde("diagnose", tmp_path / "cut", "--json").stdout)["problems"]) == 1
