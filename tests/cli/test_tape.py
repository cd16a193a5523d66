"""`sonde tape`: the listing of a taped step."""

import json

import pytest
import torch
from torch import nn

import sonde as library


@pytest.fixture(scope="module")
def taped(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "taped"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), nn.Linear(4, 3), nn.Softmax(-1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with library.watch(model, optimizer, run=path):
        for _ in range(3):
            x, y = torch.randn(16, 8), torch.randint(3, (16,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return path


def test_a_tape_is_listed_from_the_batch_to_the_optimizer_within_80_columns(sonde, taped):
    done = sonde("tape", taped, "--width", 80)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 80
    titles = [line.split("  ")[0] if not line.startswith(" ") else line.strip().split("  ")[0] for line in lines]
    wanted = ["step 3", "(model) Sequential", "0 Sequential", "0.0 Linear", "2 Softmax", "cross_entropy: _log_softmax"]
    places = [next(at for at, title in enumerate(titles) if title.startswith(each)) for each in wanted]
    assert places == sorted(places)
    assert any("backward from" in line and "4 gradients" in line and "test_tape.py" in line for line in lines)
    assert any("optimizer AdamW" in line and "lr 0.001, 4 parameters" in line for line in lines)
    assert any("clip gradients to the norm 1.0" in line for line in lines)
    assert not any("addmm" in line for line in lines), "what torch's own modules do is folded"


def test_operations_are_shown_if_asked_for(sonde, taped):
    done = sonde("tape", taped, "--step", 2, "--ops", "--width", 100)
    assert "step 2" in done.output
    assert "addmm(0.0.bias" in done.output
    assert "_softmax_backward_data" in done.output
    assert "addcdiv_(0.0.weight" in done.output


def test_the_whole_tape_is_printed_as_json(sonde, taped, strict):
    plain = strict(sonde("tape", taped, "--json").output)
    assert plain["step"] == 3
    assert {op["name"] for op in plain["ops"]} >= {"aten.addmm.default", "aten._softmax.default"}
    assert not plain.get("folder")
    json.dumps(plain, allow_nan=False)


def test_a_run_or_a_step_without_a_tape_is_an_error_that_leads_on(sonde, taped, first):
    done = sonde("tape", taped, "--step", 9)
    assert done.exit_code == 2
    assert "there are tapes of 2, 3" in done.output
    assert "has no tapes" in sonde("tape", first).output
