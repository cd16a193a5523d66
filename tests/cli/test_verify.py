from tests.analysis.made_run import Recipe, write_run

SMALL = Recipe(steps=5, layers=1, nan_at=None, dies_at=None)


def test_a_whole_run_is_reported_as_whole(sonde, first, strict):
    result = sonde("verify", first)
    assert result.exit_code == 0
    assert "every checksum is right" in result.stdout
    answer = strict(sonde("verify", first, "--json").stdout)
    assert answer["ok"] is True
    assert answer["blocks"] == 60


def test_damage_is_named_and_ends_with_1(sonde, tmp_path, strict):
    write_run(tmp_path / "run", SMALL)
    [segment] = (tmp_path / "run" / "telemetry").rglob("seg-*")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 0xFF
    segment.write_bytes(content)
    result = sonde("verify", tmp_path / "run")
    assert result.exit_code == 1
    assert segment.name in result.stdout.replace("\n", "")
    answer = strict(sonde("verify", tmp_path / "run", "--json").stdout)
    assert answer["ok"] is False
    assert answer["problems"][0]["file"] == str(segment)


def test_a_damaged_run_can_still_be_looked_at_or_says_why_not(sonde, tmp_path):
    write_run(tmp_path / "run", SMALL)
    [segment] = (tmp_path / "run" / "telemetry").rglob("seg-*")
    segment.write_bytes(segment.read_bytes()[:100])
    result = sonde("show", tmp_path / "run")
    assert result.exit_code in (0, 2)
    assert "Traceback" not in result.output
    if result.exit_code == 0:
        assert "could not be read" in result.stdout


def test_a_torn_tail_is_named_and_is_not_damage(sonde, tmp_path, strict):
    writer = write_run(tmp_path / "run", SMALL, close=False)
    [journal] = (tmp_path / "run" / "telemetry").rglob("journal-*")
    with journal.open("ab") as file:
        file.write(journal.read_bytes()[-40:])
    result = sonde("verify", tmp_path / "run")
    writer.close()
    assert result.exit_code == 0
    assert "torn tail" in result.stdout
