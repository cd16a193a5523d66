"""The loss is nan from one step to the next.

Finding: nan_forward
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.rand(512, 10)
y = x.sum(1, keepdim=True)


class Scaler(nn.Module):
    def forward(self, x):
        return torch.log(x)  # the fault: x is a weighted sum, which can be negative


model = nn.Sequential(nn.Linear(10, 16), Scaler(), nn.Linear(16, 1))
nn.init.constant_(model[0].bias, 4.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss_fn = nn.MSELoss()
for step in range(60):
    rows = torch.randint(0, 512, (32,))
    loss = loss_fn(model(x[rows] * (1 + 2 * step)), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
