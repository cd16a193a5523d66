"""The loop of the README, which forgets zero_grad()."""

import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    x = torch.randn(32, 20)
    loss = F.cross_entropy(model(x), x[:, :5].argmax(1))
    loss.backward()
    optimizer.step()
print([each.sum().item() for each in model.parameters()])
