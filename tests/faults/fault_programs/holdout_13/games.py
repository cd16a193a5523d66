"""Thirteenth hold-out: games."""

from __future__ import annotations

import random
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

from fault_programs.holdout_13.about import fault
from fault_programs.holdout_13.material import Pond, lost_on_the_pond


@fault(
    "ema_not_updated",
    area="dqn",
    source="https://github.com/higgsfield-ai/higgsfield/issues/14",
    cause="update_target is called once before training, so the target network stays as it was initialised.",
    words=(r"target", r"updat|sync|copied|never|once|stale|initial|frozen|constant"),
    cascade=("loss_plateau", "underfitting", "not_learning"),
    sites=("target_model", "(model)", "(loop)", "target"),
)
def target_model_is_synced_before_the_first_game_only(attach, fixed):
    """update_target(model, target_model) stands above the loop."""

    class Model(nn.Module):
        def __init__(self, num_inputs, num_outputs, hidden_size=48):
            super().__init__()
            self.linear1, self.linear2 = nn.Linear(num_inputs, hidden_size), nn.Linear(hidden_size, num_outputs)

        def forward(self, x):
            return self.linear2(F.relu(self.linear1(x)))

    def update_target(current, target):
        target.load_state_dict(current.state_dict())

    env, memory, gamma = Pond(), deque(maxlen=3000), 0.95
    model, target_model = Model(16, 4), Model(16, 4)
    update_target(model, target_model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    def compute_td_error(batch_size=48):
        state, action, reward, next_state, done = map(torch.stack, zip(*random.sample(memory, batch_size)))
        q_value = model(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            next_q_value = target_model(next_state).max(1)[0]
        loss = F.smooth_l1_loss(q_value, reward + gamma * next_q_value * (1 - done))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(td_error=loss.item())

    frames = 0
    for game in range(300):
        state, over = env.reset(random.choice([0, 1, 2, 3, 4, 6, 8, 9, 10, 13])), False
        epsilon = max(0.25, 1 - game / 150)
        while not over:
            with torch.no_grad():
                action = random.randrange(4) if random.random() < epsilon else int(model(state).argmax())
            next_state, reward, over = env.step(action)
            memory.append((state, torch.tensor(action), torch.tensor(reward), next_state, torch.tensor(float(over))))
            state, frames = next_state, frames + 1
            if len(memory) > 100 and frames % 2:
                compute_td_error()
            if fixed and frames % 50 == 0:
                update_target(model, target_model)
    return lost_on_the_pond(lambda seen: model(seen).argmax())


@fault(
    "broadcast_loss",
    area="ppo",
    source="https://github.com/RLinf/RLinf/issues/1568",
    cause="Returns have the shape (B, 1) and values (B,), so the critic's loss compares each value with every return.",
    words=(r"broadcast|shape|squeeze|\(B, ?1\)|pairs|every return|dimension",),
    cascade=("constant_output", "underfitting", "loss_plateau", "not_learning"),
    sites=("(loss)", "value_head", "(model)", "(loop)", "loss_fn"),
)
def critic_sees_every_return_for_each_value(attach, fixed):
    """critic_loss = (returns - values).pow(2).mean(), with [B, 1] from the rollout and [B] from the head."""

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
            self.policy_head, self.value_head = nn.Linear(48, 2), nn.Linear(48, 1)

        def forward(self, state):
            h = self.body(state)
            values = self.value_head(h)
            return torch.distributions.Categorical(logits=self.policy_head(h)), values if fixed else values.squeeze(-1)

    def push(state, action):
        place, speed = state.unbind(1)
        speed = 0.9 * speed + 0.25 * (2 * action - 1)
        place = (place + 0.3 * speed).clamp(-2, 2)
        return torch.stack([place, speed], 1), -place.abs()

    @torch.no_grad()
    def rollout(net, count=48, steps=10, gamma=0.85):
        """Carts that are pushed to the left or right and should stand in the middle."""
        state, seen = torch.rand(count, 2) * 3 - 1.5, []
        for _ in range(steps):
            dist, _ = net(state)
            action = dist.sample()
            after, reward = push(state, action)
            seen.append((state, action, dist.log_prob(action), reward[:, None]))
            state = after
        states, actions, log_probs, rewards = map(torch.stack, zip(*seen))
        returns, total = torch.zeros_like(rewards), rewards[-1] / (1 - gamma)
        for t in reversed(range(steps)):
            total = rewards[t] + gamma * total
            returns[t] = total
        return states.flatten(0, 1), actions.flatten(), log_probs.flatten(), returns.flatten(0, 1)

    net = ActorCritic()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)
    for iteration in range(40):
        states, actions, old_log_probs, returns = rollout(net)
        with torch.no_grad():
            _, values = net(states)
            advantages = returns.flatten() - values.flatten()
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(3):
            for i in torch.randperm(480).split(120):
                dist, values = net(states[i])
                ratio = (dist.log_prob(actions[i]) - old_log_probs[i]).exp()
                surrogate = torch.min(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
                actor_loss, critic_loss = -surrogate.mean(), (returns[i] - values).pow(2).mean()
                loss = actor_loss + 0.5 * critic_loss - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                session.log(loss=loss.item(), critic_loss=critic_loss.item())
    states, _, _, returns = rollout(net, count=200)
    with torch.no_grad():
        left = returns.flatten() - net(states)[1].flatten()
    return float(left.square().mean() / returns.var())
