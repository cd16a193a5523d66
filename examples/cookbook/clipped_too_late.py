"""Gradients are clipped to 0.1, and yet single steps are huge.

Finding: clip_after_step
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 10)
y = 20 * x[:, :3].sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loss_fn = nn.MSELoss()
for step in range(60):
    rows = torch.randint(0, 512, (32,))
    loss = loss_fn(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # the fault: after the step
