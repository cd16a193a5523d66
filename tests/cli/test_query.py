import json

import pytest


@pytest.fixture
def scored(folder, tmp_path):
    """A run with scores of six samples in two epochs."""
    (tmp_path / "run.json").write_bytes((folder / "well" / "run.json").read_bytes())
    for epoch in range(2):
        (tmp_path / f"epoch_{epoch}").mkdir()
        content = {
            "aggregated": {"loss": 1.0},
            "per_datapoint": {"loss": [0.1, 0.2, 3.0 - epoch, "nan", 0.5, 0.6], "accuracy": [1, 1, 0, 0, 1, 1]},
            "ids": [0, 1, 2, 3, 4, "last"],
            "directions": {"loss": -1, "accuracy": 1},
        }
        (tmp_path / f"epoch_{epoch}" / "validation_scores.json").write_text(json.dumps(content))
    return tmp_path


def test_samples_are_listed_worst_first(sonde, scored):
    result = sonde("query", scored, "accuracy == 0 or loss > 0.4")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["epoch", "idx", "loss", "accuracy"]
    assert [line[1] for line in lines[1:5]] == ["3", "2", "last", "4"]
    assert lines[-1] == ["4", "samples"]


def test_json_is_strict_and_whole(sonde, scored, strict):
    found = strict(sonde("query", scored, "rank(loss) <= 2 and epoch >= 0", "--json", "--limit", "1").stdout)
    assert found["count"] == 4
    assert [(each["epoch"], each["idx"]) for each in found["samples"]] == [(0, 3), (0, 2), (1, 3), (1, 2)]
    assert found["samples"][0]["scores"] == {"loss": None, "accuracy": 0.0}


def test_an_epoch_can_be_named_and_nothing_found_is_reported(sonde, scored):
    assert "2 " in sonde("query", scored, "loss == 3", "--epoch", "0").stdout
    assert sonde("query", scored, "loss == 3").stdout == "No sample is like that.\n"


def test_errors_name_the_column_and_the_nearest(sonde, scored):
    result = sonde("query", scored, "acuracy == 0")
    assert result.exit_code != 0
    assert "no column acuracy (nearest: accuracy)" in result.stderr


def test_a_run_without_scores_says_where_they_come_from(sonde, first):
    result = sonde("query", first, "loss > 1")
    assert result.exit_code != 0
    assert "sonde train" in result.stderr


def test_scores_are_enough_where_nothing_was_recorded(sonde, scored):
    (scored / "run.json").unlink()
    assert sonde("query", scored, "rank(loss) == 1").exit_code == 0
    assert "There is no run at" in sonde("query", scored / "epoch_0", "loss > 1").stderr
