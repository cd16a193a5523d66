"""The loss falls below zero and goes on falling; accuracy is worse than chance.

Finding: loss_sign_flipped
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 10)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(60):
    rows = torch.randint(0, 512, (32,))
    chances = model(x[rows]).log_softmax(1)
    loss = chances.gather(1, y[rows, None]).mean()  # the fault: the minus sign is missing
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
