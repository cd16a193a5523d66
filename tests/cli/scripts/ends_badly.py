"""Five steps, then an exception inside the model, or a signal, or an exit code."""

import os
import signal
import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(5):
    loss = model(torch.ones(3, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if sys.argv[1] == "raise":
    model(torch.ones(3, 5))
elif sys.argv[1] == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
sys.exit(int(sys.argv[1]))
