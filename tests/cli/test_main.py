import pytest

VERBS = ["runs", "show", "tail", "export", "verify", "train", "eval", "import-pages"]


def test_help_names_every_verb_with_examples(sonde):
    result = sonde("--help")
    assert result.exit_code == 0
    for verb in VERBS:
        assert f"  {verb} " in result.stdout
    for part in ("examples", "exit codes", "sonde show runs/first"):
        assert part in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_no_verb_at_all_gives_the_help(sonde):
    assert "examples" in sonde().output


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(sonde, verb):
    result = sonde(verb, "-h")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"usage sonde {verb} ")
    assert "examples" in result.stdout
    assert "--json" in result.stdout or verb == "import-pages", "it writes; there is nothing to tell"
    assert "  [OPTIONS]" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_version_is_told(sonde):
    from sonde.version import VERSION

    assert sonde("--version").stdout == f"sonde {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shw"], "error: There is no verb 'shw' (nearest: show). Run: sonde --help"),
        (["show", "--sit", "x"], "error: There is no option --sit (nearest: --site"),
        (["show"], "error: Missing argument 'RUN'. Run: sonde show --help"),
        (["show", "x", "--last", "0"], "error: Invalid value for '--last'"),
        (["export", "x", "--to", "xls", "--out", "y"], "error: Invalid value for '--to'"),
        (["--loud"], "error: There is no option --loud"),
    ],
)
def test_wrong_use_gets_one_line_with_the_cure(sonde, arguments, message):
    result = sonde(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", [["show"], ["tail"], ["verify"], ["export", "--to", "csv", "--out", "x.csv"]])
def test_a_missing_run_is_an_error_that_leads_on(sonde, folder, tmp_path, verb):
    verb, *options = verb
    near = sonde(verb, folder / "frist", *options)
    assert near.exit_code == 2
    assert f"Nearest: {folder / 'first'}" in near.stderr
    assert near.stdout == ""
    above = sonde(verb, folder, *options)
    assert above.exit_code == 2
    assert "It holds runs: first, well" in above.stderr
    foreign = sonde(verb, tmp_path, *options)
    assert foreign.exit_code == 2
    assert "has no run.json" in foreign.stderr
    nowhere = sonde(verb, tmp_path / "a" / "b", *options)
    assert "There is no folder" in nowhere.stderr


def test_a_foreign_file_is_not_a_run(sonde, tmp_path):
    (tmp_path / "run.json").write_text('{"name": "something else"}')
    result = sonde("show", tmp_path)
    assert result.exit_code == 2
    assert "was not written by Sonde" in result.stderr
    assert "Traceback" not in result.stderr
    (tmp_path / "run.json").write_text("not json at all")
    assert sonde("show", tmp_path).exit_code == 2


def test_control_signs_of_a_strangers_name_do_not_reach_the_terminal(sonde, tmp_path):
    result = sonde("show", tmp_path / "evil\x1b[31m")
    assert "\x1b" not in result.stderr
