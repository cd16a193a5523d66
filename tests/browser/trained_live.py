"""A training that goes on as far as it is told to: each line on standard input is a number of steps."""

from __future__ import annotations

import sys

import torch

import sonde


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, run=sys.argv[1]) as session:
        for line in sys.stdin:
            for _ in range(int(line)):
                x = torch.randn(16, 8)
                loss = torch.nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss)
            session.flush()
            print(f"at {line.strip()}", flush=True)


if __name__ == "__main__":
    main()
