import json

from tests.analysis.made_run import Recipe, write_run

from sonde.debug.pause import PAUSED


def test_a_paused_run_goes_on(sonde, tmp_path, strict):
    write_run(tmp_path / "run", Recipe(steps=5, layers=1, nan_at=None, dies_at=None))
    pause = tmp_path / "run" / PAUSED
    pause.write_text(json.dumps({"pid": 1, "step": 7, "reason": "a hook fired on fc", "since": 0.0}))
    result = sonde("resume", tmp_path / "run")
    assert result.exit_code == 0
    assert "continues at step 7" in result.stdout
    assert not pause.exists()
    assert strict(sonde("resume", tmp_path / "run", "--json").stdout)["was_paused"] is False


def test_no_run_is_wrong_use(sonde, tmp_path):
    assert sonde("resume", tmp_path / "none").exit_code == 2
