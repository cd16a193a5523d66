"""Updates the weights through `p.data`, without an optimizer, after a gradient that changes nothing."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
saliency = x[:1].clone().requires_grad_()
model(saliency).sum().backward()
for start in range(0, 64, 8):
    model.zero_grad()
    loss = nn.functional.mse_loss(model(x[start : start + 8]), y[start : start + 8])
    loss.backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.05)
    print(float(loss))
print(hashlib.sha256(model[0].weight.detach().numpy().tobytes()).hexdigest())
