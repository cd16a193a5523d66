"""Training works, but is slow, and the loss never falls below about 0.7.

Finding: double_softmax
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 10)
y = x[:, :4].argmax(1)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4), nn.Softmax(dim=1))  # the fault: Softmax
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss()
for step in range(60):
    rows = torch.randint(0, 512, (32,))
    loss = loss_fn(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
