"""A script that records itself."""

import torch

import sonde

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with sonde.watch(model, optimizer, run="runs/mine"):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).pow(2).mean().backward()
        optimizer.step()
