"""Trains three steps, and continues from the checkpoint of the last time if there is one."""

from pathlib import Path

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpoint = Path("checkpoint.pt")
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
for _ in range(3):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    (model(x) - x[:, :1]).square().mean().backward()
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
