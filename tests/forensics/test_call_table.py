"""The table of a forward pass has a line for every call of a leaf, whatever goes in and comes out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from sonde.forensics import call_table
from sonde.forensics.call_table import listen_to_calls
from sonde.testing import assert_no_taps


@dataclass
class Answer:
    logits: torch.Tensor
    note: str = "hi"


class Wordy(nn.Module):
    def forward(self, x, *, scale=None):
        return Answer(x if scale is None else x * scale)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.wordy = nn.Embedding(7, 4), nn.LSTM(4, 3, batch_first=True), Wordy()
        self.shared = nn.ReLU()

    def forward(self, tokens):
        x, _ = self.rnn(self.shared(self.embed(tokens)))
        return self.wordy(self.shared(x), scale=torch.tensor(2.0))


def test_every_call_has_its_line():
    torch.manual_seed(0)
    model, tokens = Net(), torch.randint(7, (2, 5))
    with listen_to_calls(model) as table:
        out = model(tokens)
    assert [(call.name, call.kind, call.call) for call in table.calls] == [
        ("embed", "Embedding", 0),
        ("shared", "ReLU", 0),
        ("rnn", "LSTM", 0),
        ("shared", "ReLU", 1),
        ("wordy", "Wordy", 0),
    ]
    embed, _, rnn, _, wordy = table.calls
    assert (embed.inputs[0].dtype, embed.inputs[0].shape) == ("int64", (2, 5))
    assert embed.inputs[0].reading.max == float(tokens.max())
    assert [seen.part for seen in rnn.outputs] == ["[0]", "[1][0]", "[1][1]"]
    assert [seen.part for seen in wordy.inputs] == ["[0]", "[1]"]
    assert wordy.outputs[0].part == ".logits"
    assert wordy.outputs[0].reading.mean == pytest.approx(out.logits.mean().item(), rel=1e-6)
    assert all(call.time_ms > 0 for call in table.calls)
    assert embed.output_bytes == 2 * 5 * 4 * 4
    assert embed.cuda_bytes is None
    assert_no_taps(model)


def test_hooks_go_and_numbers_stay_if_forward_raises():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2))
    with pytest.raises(RuntimeError), listen_to_calls(model) as table:
        model(torch.ones(1, 3))
    assert [call.name for call in table.calls] == ["0", "1"]
    assert table.calls[0].outputs[0].reading is not None
    assert table.calls[1].time_ms is None
    assert_no_taps(model)


def test_inputs_are_read_before_a_module_writes_over_them():
    model = nn.Sequential(nn.ReLU(inplace=True))
    with torch.no_grad(), listen_to_calls(model) as table:
        model(torch.tensor([-3.0, 1.0]))
    assert table.calls[0].inputs[0].reading.min == -3.0
    assert table.calls[0].outputs[0].reading.min == 0.0


def test_the_table_is_bounded(monkeypatch):
    monkeypatch.setattr(call_table, "MAX_CALLS", 3)
    model = nn.Sequential(nn.ReLU())
    with listen_to_calls(model) as table:
        for _ in range(5):
            model(torch.ones(1))
    assert (len(table.calls), table.left_out) == (3, 2)
