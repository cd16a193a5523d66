"""The model overfits as if dropout were not there.

Finding: eval_mode_in_training
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 10)
y = (x[:, :3].sum(1) > 0).long()
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(4):
    for batch in range(16):
        rows = torch.randint(0, 384, (32,))
        loss = loss_fn(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()  # the fault: model.train() never follows
    with torch.no_grad():
        right = (model(x[384:]).argmax(1) == y[384:]).float().mean()
