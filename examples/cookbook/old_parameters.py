"""A new head is trained on a pretrained body, and the head never changes.

Finding: stale_params_in_optimizer
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 10)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 7))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # the fault: made before the head is replaced
model[2] = nn.Linear(32, 4)
loss_fn = nn.CrossEntropyLoss()
for step in range(60):
    rows = torch.randint(0, 512, (32,))
    loss = loss_fn(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
