"""The network hardly does better than a linear model, however many layers it has.

Finding: params_not_in_optimizer
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 10)
y = (x[:, 0] * x[:, 1] > 0).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(10, 32)
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


model = Net()
optimizer = torch.optim.Adam([*model.stem.parameters(), *model.head.parameters()], lr=0.01)  # the fault: no blocks
loss_fn = nn.CrossEntropyLoss()
for step in range(60):
    rows = torch.randint(0, 512, (32,))
    loss = loss_fn(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
