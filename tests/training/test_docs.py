"""The code in the guide runs as it stands, and the guide names every key."""

from __future__ import annotations

import re
from pathlib import Path

from sonde.training.config import EVALUATOR_KEYS, TRAINER_KEYS

GUIDE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def test_the_blocks_of_the_guide_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.S):
        exec(compile(block, "training.md", "exec"), names)
    assert len(names["scores"]) == 5
    assert len(names["worst"]) == 3
    margin = names["Margin"]()({"outputs": names["x"][:4, :3]})["margin"]
    assert margin.shape == (4,)


def test_every_key_is_in_the_guide():
    for key in (*TRAINER_KEYS, *EVALUATOR_KEYS):
        assert f"`{key}`" in GUIDE, key
