"""The command as a shell starts it: what is imported, how it ends, what it does with pipes and encodings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.analysis.made_run import Recipe, write_run
from tests.waiting import PATIENCE_S


def start(*arguments):
    """Start the command in a process of its own, with pipes to both of its outputs."""
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-m", "sonde", *map(str, arguments)]
    return subprocess.Popen(
        command, env={"PYTHONPATH": source, "LC_ALL": "C.UTF-8"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_no_verb_imports_what_it_does_not_need(process, first):
    code = f"""
import sys
sys.argv = ["sonde", "show", {first!r}]
from sonde.cli.main import run
try:
    run()
except SystemExit as end:
    assert not end.code, end.code
heavy = {{"torch", "pandas", "pyarrow", "sklearn", "scipy", "matplotlib"}} & set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
    result = process("-c", code)
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.decode().startswith("first · finished")


def test_help_does_not_even_import_numpy(process):
    code = (
        "import sys; sys.argv = ['sonde', '--version']\n"
        "from sonde.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit:\n    pass\n"
        "sys.exit('numpy' in sys.modules)"
    )
    assert process("-c", code).returncode == 0


def test_the_module_is_the_command(process, first):
    result = process("-m", "sonde", "verify", first)
    assert (result.returncode, result.stderr) == (0, b"")
    failed = process("-m", "sonde", "show", "nowhere")
    assert failed.returncode == 2
    assert failed.stdout == b""
    assert failed.stderr.startswith(b"error: There is no run at nowhere.")
    assert b"\x1b" not in failed.stderr


@pytest.mark.parametrize("options", [[], ["--site", "head.weight:gradient"], ["--step", "45"]])
def test_an_ascii_terminal_gets_ascii(process, first, options):
    result = process("-m", "sonde", "show", first, *options, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.isascii()
    assert result.stderr == b""


def test_colours_come_when_forced_and_never_with_no_color(process, first):
    assert (
        b"\x1b[" in process("-m", "sonde", "show", first, FORCE_COLOR="1", NO_COLOR=None, TERM="xterm-256color").stdout
    )
    plain = process("-m", "sonde", "show", first, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color").stdout
    # Bold and dim are no colours.
    assert b"\x1b[3" not in plain
    assert b"38;" not in plain


@pytest.mark.parametrize("verb", [["show", "{run}"], ["show", "{run}", "--json"], ["tail", "{run}", "--json"]])
def test_a_reader_that_leaves_is_not_an_error(first, verb):
    started = start(*(part.format(run=first) for part in verb))
    started.stdout.close()
    error = started.stderr.read()
    started.stderr.close()
    assert started.wait(timeout=PATIENCE_S) == 0
    assert error == b""


def test_another_process_follows_a_run_as_it_is_written(tmp_path):
    recipe = Recipe(steps=30, layers=1, dies_at=None, nan_at=None)
    writer = write_run(tmp_path / "live", Recipe(steps=10, layers=1, dies_at=None, nan_at=None), close=False)
    follower = start("tail", tmp_path / "live", "--json", "--interval", "0.05")
    seen = [json.loads(follower.stdout.readline())]
    for block in list(recipe.blocks())[10:]:
        writer.take_block(block)
    writer.flush()
    seen.append(json.loads(follower.stdout.readline()))
    writer.close()
    rest, error = follower.communicate(timeout=PATIENCE_S)
    seen += [json.loads(line) for line in rest.splitlines()]
    assert error == b""
    assert follower.returncode == 0
    assert seen[0]["step"] == 10
    assert sum(each.get("new_steps", 0) for each in seen) == 21
    assert seen[-1] == {"status": "finished", "steps": 30}


def test_what_goes_to_programs_is_utf8_whatever_the_locale(process, tmp_path):
    write_run(tmp_path / "größe")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = process("-m", "sonde", "show", tmp_path / "größe", "--json", **ascii_only)
    assert told.returncode == 0, told.stderr.decode()
    assert json.loads(told.stdout.decode("utf-8"))["run"]["path"] == str(tmp_path / "größe")
    report = process("-m", "sonde", "report", tmp_path / "größe", "--format", "md", "--out", "-", **ascii_only)
    assert report.returncode == 0, report.stderr.decode()
    assert "\N{MULTIPLICATION SIGN}" in report.stdout.decode("utf-8"), "a sign that ASCII has not"
