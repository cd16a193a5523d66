"""Deep Q-learning: the network acts without gradients before it learns, and a copy of it is never trained."""

import copy
import random

import torch
from torch import nn


class Agent:
    def __init__(self):
        self.policy = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.target = copy.deepcopy(self.policy)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), 1e-3)
        self.memory = []

    @torch.no_grad()
    def act(self, state):
        return int(self.policy(state).argmax()) if random.random() > 0.3 else random.randrange(2)

    def learn(self):
        sample = random.sample(self.memory, 32)
        states, actions, rewards, nexts = (torch.stack(each) for each in zip(*sample, strict=True))
        values = self.policy(states).gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            targets = rewards + 0.9 * self.target(nexts).max(1)[0]
        self.optimizer.zero_grad()
        nn.functional.smooth_l1_loss(values, targets).backward()
        self.optimizer.step()


def main():
    torch.manual_seed(0)
    random.seed(0)
    agent = Agent()
    state = torch.randn(4)
    for time in range(60):
        action, following = agent.act(state), torch.randn(4) * 0.1 + state * 0.9
        agent.memory.append((state, torch.tensor(action), -following.abs().sum(), following))
        state = following
        if len(agent.memory) > 40:
            agent.learn()
        if time % 20 == 0:
            agent.target.load_state_dict(agent.policy.state_dict())
    print(sum(each.double().sum() for each in agent.policy.parameters()).item())


if __name__ == "__main__":
    main()
