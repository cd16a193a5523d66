"""Three trainings one after the other, each with the model inside the closure of a step."""

import torch

torch.manual_seed(0)
x = torch.randn(64, 5)
y = x @ torch.randn(5, 1)


def train():
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        print(optimizer.step(closure).item())


for _ in range(3):
    train()
