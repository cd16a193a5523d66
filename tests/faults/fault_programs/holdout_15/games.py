"""Fifteenth hold-out: games and control."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_15.about import fault
from fault_programs.holdout_15.material import Tightrope, falls_short


@fault(
    "loss_sign_flipped",
    area="ddpg",
    source="https://github.com/KanishJebaMathewM/Truxify/pull/11885",
    cause="The actor's loss is the mean value of its actions without a minus, so the actor looks for the worst action.",
    words=(r"sign|minus|negat|maximi|minimi|worst|ascent|descent", r"actor|policy|q.?value|loss"),
    cascade=(
        "saturated_activation",
        "not_learning",
        "constant_output",
        "vanishing_gradient",
        "loss_divergence",
        "target_scale",
    ),
    sites=("actor", "(loss)", "(loop)"),
    exact=False,
)
def actor_looks_for_the_worst_price(attach, fixed):
    """actor_loss = q_values.mean()."""

    def market(state, price):
        want = 0.5 * state[:, :1] - 0.3 * state[:, 1:2] * state[:, 2:3]
        return 1 - (price - want).square() + 0.05 * torch.randn(len(state), 1)

    actor = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())
    critic = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    session = attach(nn.ModuleDict({"actor": actor, "critic": critic}), [actor_optimizer, critic_optimizer])
    memory = []
    for step in range(500):
        state = torch.rand(16, 3) * 2 - 1
        with torch.no_grad():
            price = (actor(state) + 0.3 * torch.randn(16, 1)).clamp(-1, 1)
        memory = [*memory[-60:], (state, price, market(state, price))]
        picked = random.choices(memory, k=4)
        states, prices, rewards = (torch.cat(part) for part in zip(*picked))
        critic_loss = F.mse_loss(critic(torch.cat([states, prices], 1)), rewards)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        q_values = critic(torch.cat([states, actor(states)], 1))
        actor_loss = -q_values.mean() if fixed else q_values.mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        session.log(critic_loss=critic_loss.item(), actor_loss=actor_loss.item())
    state = torch.rand(500, 3) * 2 - 1
    with torch.no_grad():
        return 1 - market(state, actor(state)).mean().item()


@fault(
    "aux_loss_dominates",
    area="sac",
    source="https://github.com/sweetice/Deep-reinforcement-learning-with-pytorch/issues/36",
    cause="The policy loss takes the log-probability without the temperature alpha, so the entropy outweighs the small rewards.",
    words=(
        r"alpha|temperature|entropy|log.?prob",
        r"missing|without|factor|multipl|scale|outweigh|dominat|ignored|unused",
    ),
    also=("setting_without_effect",),
    cascade=("not_learning", "loss_plateau", "underfitting", "input_ignored"),
    sites=("policy", "(loss)", "actor", "(loop)", "policy_net"),
    exact=False,
)
def policy_loss_has_no_temperature(attach, fixed):
    """pi_loss = (log_prob - q).mean(), while the targets use alpha * log_prob."""

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.mu_head, self.log_std_head = nn.Linear(1, 48), nn.Linear(48, 1), nn.Linear(48, 1)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            return self.mu_head(x), self.log_std_head(x).clamp(-4, 1)

        def sample(self, x):
            mu, log_std = self(x)
            dist = torch.distributions.Normal(mu, log_std.exp())
            z = dist.rsample()
            action = torch.tanh(z)
            return action, dist.log_prob(z) - torch.log(1 - action.square() + 1e-6)

    def step(s, a):
        s2 = (s + 0.4 * a + 0.05 * torch.randn_like(s)).clamp(-2, 2)
        return s2, 0.3 * (1 - s2.square())

    alpha, gamma = 0.02, 0.8
    policy_net = Actor()
    q_net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    q_target = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    q_target.load_state_dict(q_net.state_dict())
    policy_optimizer = torch.optim.Adam(policy_net.parameters(), lr=3e-3)
    q_optimizer = torch.optim.Adam(q_net.parameters(), lr=3e-3)
    session = attach(nn.ModuleDict({"policy_net": policy_net, "q_net": q_net}), [policy_optimizer, q_optimizer])
    s = torch.rand(32, 1) * 4 - 2
    buffer = []
    for t in range(500):
        with torch.no_grad():
            a, _ = policy_net.sample(s)
        s2, r = step(s, a)
        buffer = [*buffer[-80:], (s, a, r, s2)]
        s = torch.rand(32, 1) * 4 - 2 if t % 10 == 9 else s2
        bs, ba, br, bs2 = (torch.cat(part) for part in zip(*random.choices(buffer, k=2)))
        with torch.no_grad():
            a2, log_prob2 = policy_net.sample(bs2)
            target = br + gamma * (q_target(torch.cat([bs2, a2], 1)) - alpha * log_prob2)
        q_loss = F.mse_loss(q_net(torch.cat([bs, ba], 1)), target)
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()

        a_new, log_prob = policy_net.sample(bs)
        q = q_net(torch.cat([bs, a_new], 1))
        pi_loss = ((alpha if fixed else 1.0) * log_prob - q).mean()
        policy_optimizer.zero_grad()
        pi_loss.backward()
        policy_optimizer.step()
        with torch.no_grad():
            for p, q_p in zip(q_target.parameters(), q_net.parameters()):
                p.lerp_(q_p, 0.02)
        session.log(q_loss=q_loss.item(), pi_loss=pi_loss.item())
    s, total = torch.rand(400, 1) * 4 - 2, 0.0
    with torch.no_grad():
        for _ in range(10):
            s, r = step(s, policy_net.sample(s)[0])
            total += r.mean().item()
    return 0.3 - total / 10


@fault(
    "data_overwritten",
    area="dqn",
    source="from memory: questions on an environment of one's own that changes its state in place and returns it, so that the memory holds one state many times",
    cause="The environment returns its own array and changes it later, so all states in the replay memory are one and the same array.",
    words=(
        r"copy|clone|in.?place|same (array|tensor|object)|refer|alias|share|overwrit",
        r"state|memory|buffer|replay|array|observ",
    ),
    also=("best_state_shares_memory", "input_ignored"),
    cascade=(
        "not_learning",
        "constant_output",
        "loss_plateau",
        "underfitting",
        "same_batch_every_step",
        "constant_feature",
    ),
    sites=("(data)", "(loop)", "buffer", "memory"),
)
def replay_memory_holds_one_state(attach, fixed):
    """return self.state, reward, done -- and self.state += ... with the next step."""

    class GridWorld:
        def __init__(self):
            self.state = np.zeros(4, dtype=np.float32)

        def _obs(self):
            return self.state.copy() if fixed else self.state

        def reset(self):
            self.state[:] = np.random.uniform(-1, 1, 4)
            self.left = 12
            return self._obs()

        def step(self, action):
            self.state[:2] += np.array([(0.3, 0), (-0.3, 0), (0, 0.3), (0, -0.3)][action], dtype=np.float32)
            self.left -= 1
            gap = float(np.abs(self.state[:2] - self.state[2:]).sum())
            return self._obs(), 1.0 if gap < 0.4 else -0.2 * gap, gap < 0.4 or self.left == 0

    def network():
        return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    q_net, target_net = network(), network()
    target_net.load_state_dict(q_net.state_dict())
    optimizer = torch.optim.Adam(q_net.parameters(), lr=2e-3)
    session = attach(q_net, optimizer)
    env, memory, steps = GridWorld(), [], 0

    def act(state, eps):
        if random.random() < eps:
            return random.randrange(4)
        with torch.no_grad():
            return int(q_net(torch.from_numpy(np.array(state))).argmax())

    for episode in range(180):
        state, done = env.reset(), False
        while not done:
            action = act(state, max(0.15, 1 - episode / 90))
            next_state, reward, done = env.step(action)
            memory.append((state, action, reward, next_state, float(done)))
            memory, state, steps = memory[-1500:], next_state, steps + 1
            if len(memory) >= 64 and steps % 2 == 0:
                s, a, r, s2, d = zip(*random.sample(memory, 48))
                s, s2 = torch.from_numpy(np.stack(s)), torch.from_numpy(np.stack(s2))
                r, d = torch.tensor(r), torch.tensor(d)
                with torch.no_grad():
                    target = r + 0.9 * (1 - d) * target_net(s2).max(1)[0]
                q = q_net(s).gather(1, torch.tensor(a)[:, None]).squeeze(1)
                loss = F.smooth_l1_loss(q, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss.item())
            if steps % 60 == 0:
                target_net.load_state_dict(q_net.state_dict())
    missed = 0
    for _ in range(60):
        state, done, reward = env.reset(), False, 0.0
        while not done:
            state, reward, done = env.step(act(state, 0.0))
        missed += reward < 1
    return missed / 60


@fault(
    "clip_takes_the_larger_side",
    area="ppo",
    source="https://github.com/jvmncs/safe-grid-agents/pull/28",
    cause="The minus stands before each term within the minimum, so the larger and not the smaller surrogate is taken and nothing holds the policy back.",
    words=(r"min|max|clip|surrogate|ratio|sign|minus|negat",),
    also=("setting_without_effect", "loss_sign_flipped"),
    cascade=("loss_divergence", "loss_oscillation", "not_learning", "exploding_gradient", "loss_spike"),
    sites=("(loss)", "(loop)", "policy", "(model)"),
    exact=False,
)
def minimum_is_taken_of_negated_surrogates(attach, fixed):
    """policy_loss = torch.min(-ratio * adv, -clipped * adv).mean()."""

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
            self.pi, self.v = nn.Linear(48, 3), nn.Linear(48, 1)

        def forward(self, x):
            h = self.body(x)
            return self.pi(h), self.v(h).squeeze(-1)

    policy, env = Policy(), Tightrope()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    session = attach(policy, optimizer)
    choose = torch.max if fixed else torch.min
    for update in range(18):
        states, actions, returns, logps = [], [], [], []
        for _ in range(8):
            seen, over, rewards = env.reset(), False, []
            while not over:
                with torch.no_grad():
                    dist = torch.distributions.Categorical(logits=policy(seen)[0])
                action = dist.sample()
                states.append(seen)
                actions.append(action)
                logps.append(dist.log_prob(action))
                seen, reward, over = env.step(int(action))
                rewards.append(reward)
            total, back = 0.0, []
            for reward in reversed(rewards):
                total = reward + 0.95 * total
                back.insert(0, total)
            returns += back
        states, actions, old = torch.stack(states), torch.stack(actions), torch.stack(logps)
        returns = torch.tensor(returns) / 10
        with torch.no_grad():
            advantage = returns - policy(states)[1]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(10):
            for i in torch.randperm(len(states)).split(64):
                logits, value = policy(states[i])
                dist = torch.distributions.Categorical(logits=logits)
                adv = advantage[i]
                ratio = (dist.log_prob(actions[i]) - old[i]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                policy_loss = choose(-ratio * adv, -clipped * adv).mean()
                loss = policy_loss + 0.5 * F.mse_loss(value, returns[i]) - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
                session.log(loss=loss.item(), policy_loss=policy_loss.item())
    return falls_short(lambda s: policy(s)[0].argmax())
