"""A regression predicts the mean for every sample; nothing warns.

Finding: broadcast_loss
"""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

warnings.simplefilter("ignore")  # as many programs do: torch would warn of the shapes
torch.manual_seed(0)
x = torch.randn(512, 10)
y = x[:, :3].sum(1)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(60):
    rows = torch.randint(0, 512, (32,))
    loss = F.mse_loss(model(x[rows]), y[rows])  # the fault: [32, 1] against [32]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
