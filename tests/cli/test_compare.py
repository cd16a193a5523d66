import pytest
from tests.analysis.swept_runs import write_sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("sweep"))


def test_any_number_of_runs_are_compared_with_groups_and_layers(sonde, sweep):
    result = sonde("compare", sweep, "--by", "lr", "--metric", "val_acc", "--width", 140)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["run", "status", "findings"]
    assert sum(line.startswith("lr0.") for line in lines) == 6
    assert any(line.startswith("failed") and "ValueError" in line for line in lines)
    assert any(line.startswith("lr=0.01 ") and "0.908" in line and "±" in line for line in lines)
    assert "head:output" in result.stdout.partition("Layers that differ")[2]


def test_two_runs_say_where_they_diverge(sonde, sweep, strict):
    result = sonde("compare", sweep / "lr0.001-seed0", sweep / "lr0.001-seed1")
    assert "They diverge at step 1, first in" in result.stdout
    answer = strict(sonde("compare", sweep / "lr0.001-seed0", sweep / "lr0.001-seed1", "--json").stdout)
    assert answer["differing"] == ["seed"]
    assert [run["name"] for run in answer["runs"]] == ["lr0.001-seed0", "lr0.001-seed1"]
    assert answer["diverge"]["step"] == 1


def test_a_setting_or_metric_that_no_run_has_and_a_single_run_are_refused(sonde, sweep):
    assert "lr, seed" in sonde("compare", sweep, "--by", "depth").stderr
    assert "val_acc" in sonde("compare", sweep, "--metric", "recall").stderr
    assert "two runs or more" in sonde("compare", sweep / "nan").stderr


def test_a_note_and_tags_appear_in_the_list(sonde, sweep, strict):
    assert sonde("note", sweep / "nan", "NaN in the last step", "--tag", "broken").exit_code == 0
    assert "#broken" in sonde("runs", sweep, "--width", 140).stdout
    listed = strict(sonde("runs", sweep, "--json").stdout)["runs"]
    noted = next(run for run in listed if run["path"].endswith("nan"))
    assert (noted["tags"], noted["note"]) == (["broken"], "NaN in the last step")
    assert noted["findings"][0]["kind"] == "loss_not_finite"
    assert "no tags" in sonde("note", sweep / "nan", "--remove", "broken").stdout
