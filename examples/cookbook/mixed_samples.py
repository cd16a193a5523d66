"""An image classifier stays at chance, although shapes fit and gradients flow.

Finding: batch_axis_mixed
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(256, 3, 8, 8)
y = (x.mean((1, 2, 3)) > 0).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(512, 2)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        x = x.transpose(0, 1).reshape(-1, 512)  # the fault: transpose(0, 1) puts channels before samples
        return self.head(x)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss()
for step in range(40):
    rows = torch.randint(0, 256, (16,))
    loss = loss_fn(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
