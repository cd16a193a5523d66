"""The loss falls, then swings ever wider, although the learning rate is small.

Finding: missing_zero_grad
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 10)
y = (x[:, :3].sum(1) > 0).long()
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss_fn = nn.CrossEntropyLoss()
for step in range(60):
    rows = torch.randint(0, 512, (32,))
    loss = loss_fn(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()  # the fault: optimizer.zero_grad() is missing
