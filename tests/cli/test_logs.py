import json

from tests.analysis.made_run import Recipe, write_run


def test_logs_print_what_was_kept_or_how_to_keep_it(sonde, tmp_path, strict):
    write_run(tmp_path / "run", Recipe(steps=2, layers=1))
    assert "logs=True" in sonde("logs", tmp_path / "run").stdout
    folder = tmp_path / "run" / "logs"
    folder.mkdir()
    lines = [json.dumps({"text": f"line {number}", "stream": "out", "time": 1.0, "step": number}) for number in (1, 2)]
    (folder / "output.jsonl").write_text("\n".join(lines) + '\n{"text": "torn')
    (folder / "code.json").write_text(json.dumps({"files": [{"path": "train.py", "text": "print()"}]}))
    assert sonde("logs", tmp_path / "run").stdout == "line 1\nline 2\n"
    assert sonde("logs", tmp_path / "run", "--tail", 1).stdout == "line 2\n"
    assert sonde("logs", tmp_path / "run", "--code").stdout == "# train.py\nprint()\n"
    answer = strict(sonde("logs", tmp_path / "run", "--json").stdout)
    assert [line["step"] for line in answer["output"]["lines"]] == [1, 2]
