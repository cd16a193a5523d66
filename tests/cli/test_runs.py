from tests.analysis.made_run import Recipe, write_run


def test_the_runs_of_a_folder_are_listed(sonde, folder):
    result = sonde("runs", folder)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["run", "status", "step", "loss", "findings", "started", "model"]
    assert {line.split()[0] for line in lines[1:]} == {"first", "well"}
    assert all("finished" in line and "TinyTransformer" in line for line in lines[1:])


def test_runs_as_json(sonde, folder, strict):
    answer = strict(sonde("runs", folder, "--json").stdout)
    steps = {run["path"].rpartition("/")[2]: run["last_step"] for run in answer["runs"]}
    assert steps == {"first": 60, "well": 25}


def test_a_damaged_run_is_listed_as_such(sonde, tmp_path, strict):
    write_run(tmp_path / "one", Recipe(steps=3, layers=1, nan_at=None))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "run.json").write_text("{")
    result = sonde("runs", tmp_path)
    assert result.exit_code == 0
    assert "damaged" in result.stdout
    assert len(strict(sonde("runs", tmp_path, "--json").stdout)["runs"]) == 2


def test_no_runs_are_no_error_but_no_folder_is(sonde, tmp_path, strict):
    assert "No runs in" in sonde("runs", tmp_path).stdout
    assert strict(sonde("runs", tmp_path, "--json").stdout)["runs"] == []
    assert sonde("runs", tmp_path / "nowhere").exit_code == 2
