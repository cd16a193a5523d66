"""Twelfth hold-out: games."""

from __future__ import annotations

import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_12.about import fault
from fault_programs.holdout_12.material import Corridor


@fault(
    "terminal_bootstrapped",
    area="dqn",
    source="https://github.com/cyoon1729/deep-Q-networks/issues/3",
    cause="compute_loss reads dones but does not use them, so the value of a state after the end is added to the target.",
    words=(r"done|terminal|end of|mask", r"target|bootstrap|next|value|ignored|unused|not used"),
    cascade=("loss_divergence", "exploding_activation", "target_scale", "not_learning", "underfitting"),
    sites=("(loss)", "(loop)", "model", "(model)"),
    exact=False,
)
def dqn_agent_does_not_use_its_dones(attach, fixed):
    """expected_Q = rewards + gamma * max_next_Q, for ends of games too."""

    class DQNAgent:
        def __init__(self, gamma=0.97):
            self.model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2))
            self.target_model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2))
            self.target_model.load_state_dict(self.model.state_dict())
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
            self.buffer, self.gamma = deque(maxlen=2000), gamma
            self.session = attach(self.model, self.optimizer)

        def get_action(self, state, eps):
            if random.random() < eps:
                return random.randrange(2)
            with torch.no_grad():
                return int(self.model(state).argmax())

        def compute_loss(self, batch):
            states, actions, rewards, next_states, dones = (torch.stack(part) for part in zip(*batch))
            curr_Q = self.model(states).gather(1, actions.long().unsqueeze(1)).squeeze(1)
            with torch.no_grad():
                max_next_Q = self.target_model(next_states).max(1)[0]
            go_on = 1 - dones if fixed else 1
            return F.mse_loss(curr_Q, rewards + self.gamma * max_next_Q * go_on)

        def update(self, size=32):
            loss = self.compute_loss(random.sample(self.buffer, size))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.session.log(loss=loss.item())

    env, agent, steps = Corridor(), DQNAgent(), 0
    for episode in range(110):
        state, done = env.reset(), False
        while not done:
            action = agent.get_action(state, max(0.2, 1 - episode / 60))
            next_state, reward, done = env.step(action)
            agent.buffer.append(
                (state, torch.tensor(action), torch.tensor(reward), next_state, torch.tensor(float(done)))
            )
            state, steps = next_state, steps + 1
            if len(agent.buffer) > 64 and steps % 2 == 0:
                agent.update()
            if steps % 40 == 0:
                agent.target_model.load_state_dict(agent.model.state_dict())
    with torch.no_grad():
        q = agent.model(torch.eye(9)[1:8]).max(1)[0]
    truth = torch.tensor([0.97**k - 0.02 * sum(0.97**i for i in range(k)) for k in range(6, -1, -1)])
    return float((q - truth).abs().mean())


@fault(
    "returns_in_reverse_order",
    area="policy gradient",
    source="from memory: posts on REINFORCE that append to the list of returns while they go backwards through the rewards",
    cause="The returns are computed from the last reward to the first and appended, so they belong to the actions in reverse order.",
    words=(r"return|reward", r"revers|order|append|insert|backward|align|belong|mismatch|flip"),
    also=("label_shuffle_mismatch",),
    cascade=("not_learning", "loss_oscillation", "underfitting", "constant_output", "loss_plateau"),
    sites=("(loop)", "(loss)", "(data)", "(model)", "policy"),
    exact=False,
)
def finish_episode_appends_its_returns(attach, fixed):
    """R = r + gamma * R; returns.append(R) in a loop over reversed rewards."""

    class Dial:
        """Five lamps come one after the other; each wants an action of its own, and errors cost more and more."""

        def reset(self):
            self.t = 0
            self.lamp = random.randrange(4)
            return self._seen()

        def _seen(self):
            return torch.cat([F.one_hot(torch.tensor(self.lamp), 4).float(), torch.tensor([self.t / 6])])

        def step(self, action):
            reward = (1.0 if action == self.lamp else 0.0) * (1 + self.t % 3)
            self.t += 1
            self.lamp = random.randrange(4)
            return self._seen(), reward, self.t == 6

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.affine1, self.affine2 = nn.Linear(5, 32), nn.Linear(32, 4)
            self.saved_log_probs, self.rewards = [], []

        def forward(self, x):
            return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=-1)

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, optimizer)

    def select_action(state):
        m = torch.distributions.Categorical(policy(state))
        action = m.sample()
        policy.saved_log_probs.append(m.log_prob(action))
        return action.item()

    def finish_episode():
        R, returns, step = 0.0, [], 0
        for r in policy.rewards[::-1]:
            R = 0.0 if step % 6 == 0 else R
            R, step = r + 0.2 * R, step + 1
            returns.insert(0 if fixed else len(returns), R)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        loss = -(torch.stack(policy.saved_log_probs) * returns).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item(), reward=sum(policy.rewards) / 5)
        del policy.rewards[:], policy.saved_log_probs[:]

    env = Dial()
    for i_batch in range(130):
        for _ in range(5):
            state, done = env.reset(), False
            while not done:
                state, reward, done = env.step(select_action(state))
                policy.rewards.append(reward)
        finish_episode()
    with torch.no_grad():
        lamps = torch.eye(4).repeat(6, 1)
        times = (torch.arange(6) / 6).repeat_interleave(4)[:, None]
        chance = policy(torch.cat([lamps, times], 1))
    return 1 - float(chance[torch.arange(24), torch.arange(24) % 4].mean())
