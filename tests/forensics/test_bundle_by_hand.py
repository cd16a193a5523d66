"""A bundle asked for at the wrong moment is refused, and does not hang."""

from __future__ import annotations

import pytest
import torch

import sonde
from sonde.errors import OptionError
from sonde.testing import tiny_mlp


def test_within_a_backward_pass_a_bundle_is_refused(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = []
    with sonde.watch(model, optimizer, run=tmp_path / "run") as session:
        out = model(torch.randn(4, 8))

        def save(gradient):
            with pytest.raises(OptionError, match="within a backward pass") as caught:
                session.save_bundle("too early")
            refused.append(caught.value)

        out.register_hook(save)
        out.sum().backward()
        assert session.save_bundle("now").is_dir()
        optimizer.step()
    assert len(refused) == 1
