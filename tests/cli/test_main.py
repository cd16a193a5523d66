import pytest

from sonde.cli.main import app

VERBS = [command.name or command.callback.__name__ for command in app.registered_commands]
SILENT = {
    "top",
    "view",
    "mcp",
    "report",
    "import-pages",
    "run",
}  # they draw, serve, write or run: nothing to tell a program


def test_help_names_every_verb_with_examples(sonde):
    result = sonde("--help")
    assert result.exit_code == 0
    for verb in VERBS:
        assert f"  {verb} " in result.stdout
    for part in ("examples", "exit codes", "sonde show runs/first"):
        assert part in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_no_verb_at_all_gives_the_help(sonde):
    result = sonde()
    assert result.exit_code == 2
    assert "examples" in result.output
    assert "error" not in result.output


def test_no_example_is_broken_over_lines(sonde):
    for verb in VERBS:
        told = sonde(verb, "-h").stdout.partition("\nexamples\n")[2]
        commands = [line.split("  # ")[0] for line in examples(verb)]
        for command in commands:
            assert any(line.strip().startswith(command) for line in told.splitlines()), command


def examples(verb):
    command = next(each for each in app.registered_commands if (each.name or each.callback.__name__) == verb)
    return command.epilog.strip().splitlines()


def test_verbs_are_listed_on_a_line_each(sonde):
    lines = sonde("--help").stdout.splitlines()
    listed = [
        line.split()[0] for line in lines if line.startswith("  ") and line.split()[:1] and line.split()[0] in VERBS
    ]
    assert sorted(set(listed)) == sorted(VERBS)
    assert all(line.rstrip().endswith(".") for line in lines if line.split()[:1] and line.split()[0] in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(sonde, verb):
    result = sonde(verb, "-h")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"usage sonde {verb} ")
    assert "examples" in result.stdout
    assert "--json" in result.stdout or verb in SILENT
    assert "  [OPTIONS]" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_version_is_printed(sonde):
    from sonde.version import VERSION

    assert sonde("--version").stdout == f"sonde {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shw"], "error: There is no command 'shw' (nearest: show). Run: sonde --help"),
        (["show", "--sit", "x"], "error: There is no option --sit (nearest: --site"),
        (["show"], "error: Missing argument 'RUN'. Run: sonde show --help"),
        (["first.py"], "error: There is no command 'first.py'. Commands: runs, show, diagnose,"),
        (["show", "x", "--last", "0"], "error: Invalid value for '--last': 0 "),
        (["view", ".", "--port", "abc"], "error: Invalid value for '--port': 'abc' is not a"),
        (["export", "x", "--to", "xls", "--out", "y"], "error: Invalid value for '--to': 'xls' is not one of"),
        (["--loud"], "error: There is no option --loud"),
    ],
)
def test_wrong_use_gets_one_line_with_the_cure(sonde, arguments, message):
    result = sonde(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_a_choice_that_does_not_exist_names_the_nearest(sonde):
    result = sonde("export", "x", "--out", "y", "--to=parqet")
    assert "(nearest: parquet). Run: sonde export --help" in result.stderr


def test_a_run_in_place_of_a_verb_leads_to_show(sonde, first):
    assert f"this is a run. Run: sonde show {first}" in sonde(first).stderr.replace("\n", "")


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
