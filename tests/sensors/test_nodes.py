"""What an autograd node says about how a tensor was made."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sonde.hooks.autograd_graph import maker_of

X = torch.randn(4, 3, requires_grad=True)
W = torch.randn(5, 3)


@pytest.mark.parametrize(
    ("tensor", "maker"),
    [
        (F.linear(X, W, torch.zeros(5)), "addmm"),
        (torch.sigmoid(X), "sigmoid"),
        (torch.sigmoid(X).unsqueeze(1).view(-1).bfloat16().float(), "sigmoid"),
        (X.softmax(1).t(), "softmax"),
        (F.log_softmax(X, 1), "logsoftmax"),
        (F.relu(X)[0], "relu"),
        (X, ""),
        (X.detach(), ""),
    ],
)
def test_the_operation_that_made_a_tensor_is_seen_through_views(tensor, maker):
    assert maker_of(tensor) == maker
