"""`sonde view`: what it refuses before it serves anything. Tests in a browser start it for real."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="the viewer needs the view extra: pip install 'sonde[view]'")


def test_a_folder_that_is_not_there_is_named(sonde, tmp_path):
    result = sonde("view", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "There is no folder" in result.stderr


def test_other_machines_get_access_only_with_two_options(sonde, tmp_path):
    result = sonde("view", tmp_path, "--host", "0.0.0.0", "--no-browser")
    assert result.exit_code == 2
    assert "--allow-others" in result.stderr


def test_a_token_that_can_be_guessed_is_refused(sonde, tmp_path):
    result = sonde("view", tmp_path, "--read-only-token", "1234", "--no-browser")
    assert result.exit_code == 2
    assert "guessed" in result.stderr
