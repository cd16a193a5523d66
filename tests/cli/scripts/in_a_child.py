"""A training in a spawned process; the first process does not even import torch."""

import multiprocessing


def train():
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).pow(2).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=train)
    child.start()
    child.join()
