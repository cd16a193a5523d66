"""Fourteenth hold-out: games and control."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from fault_programs.holdout_14.about import fault


@fault(
    "rewards_not_centred",
    area="policy gradient",
    source="https://github.com/keon/policy-gradient/issues/5",
    cause="The discounted rewards are divided by their deviation and their mean is not taken off, so every action is encouraged.",
    words=(r"mean|centr|center|baseline|normali|standardi", r"reward|return|subtract|advantage"),
    cascade=("loss_plateau", "not_learning", "underfitting", "loss_oscillation", "constant_output"),
    sites=("(loss)", "(loop)", "(data)", "loss_fn"),
    exact=False,
)
def rewards_keep_their_mean(attach, fixed):
    """rewards = rewards / np.std(rewards - np.mean(rewards))."""
    doors = 8

    def play(count):
        """Rooms with a sign; one of eight doors fits it, and all pay well."""
        sign = torch.randint(0, doors, (count,))
        return sign, F.one_hot(sign, doors).float()

    class PGAgent:
        def __init__(self, learning_rate):
            self.model = nn.Sequential(nn.Linear(doors, 32), nn.ReLU(), nn.Linear(32, doors))
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)
            self.session = attach(self.model, self.optimizer)

        def act(self, state):
            dist = Categorical(logits=self.model(state))
            return dist, dist.sample()

        def train(self, log_probs, rewards):
            spread = (rewards - rewards.mean()).std() + 1e-6
            rewards = (rewards - (rewards.mean() if fixed else 0.0)) / spread
            loss = -(log_probs * rewards).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.session.log(loss=loss.item())

    agent = PGAgent(learning_rate=1e-2)
    for episode in range(300):
        sign, state = play(32)
        dist, action = agent.act(state)
        reward = 10 + (action == (sign * 3 + 1) % doors).float() + 0.1 * torch.randn(32)
        agent.train(dist.log_prob(action), reward)
    sign, state = play(500)
    with torch.no_grad():
        return 1 - (agent.model(state).softmax(1)[torch.arange(500), (sign * 3 + 1) % doors]).mean().item()
