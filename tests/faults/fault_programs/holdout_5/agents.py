"""Fifth hold-out: agents that learn from rewards."""

from __future__ import annotations

import copy
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from fault_programs.holdout_5.about import fault
from fault_programs.holdout_5.materials import Corridor


def true_values(gamma=0.95):
    """Return the best values of both moves in each inner place of the corridor."""
    v = torch.zeros(7)
    for _ in range(200):
        q = torch.zeros(7, 2)
        for s in range(1, 6):
            for a in (0, 1):
                n = s + (1 if a else -1)
                r = 1.0 if n == 6 else -1.0 if n == 0 else -0.05
                q[s, a] = r + (0 if n in (0, 6) else gamma * v[n])
        v = q.max(1).values
    return q[1:6]


def play_randomly(steps=1500, seed=0):
    """Return transitions of a random walk: state, action, reward, next state, done."""
    walk, env = random.Random(seed), Corridor()
    state, rows = env.reset(), []
    for _ in range(steps):
        action = walk.randrange(2)
        after, reward, _ = env.step(action)
        over = env.at in (0, 6)
        rows.append((state, action, reward, after, over))
        state = env.reset() if over or env.time >= 30 else after
    return rows


def stack(rows):
    s, a, r, n, d = zip(*rows, strict=True)
    return torch.stack(s), torch.tensor(a), torch.tensor(r), torch.stack(n), torch.tensor(d, dtype=torch.float32)


class QNet(nn.Module):
    def __init__(self, last=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 32), nn.ReLU())
        self.q = nn.Linear(32, 2)
        self.last = last

    def forward(self, s):
        out = self.q(self.body(s))
        return self.last(out) if self.last is not None else out


def value_error(net):
    with torch.no_grad():
        return float((net(torch.eye(7)[1:6]) - true_values()).abs().mean())


@fault(
    "terminal_bootstrapped",
    area="rl",
    source="https://github.com/cyoon1729/deep-Q-networks/pull/5",
    cause="The target bootstraps from the next state even when the episode is over: the done mask is missing.",
    words=(r"\bdone\b.*mask", r"terminal", r"end of (the|an) episode", r"bootstrap"),
    cascade=("loss_divergence", "loss_plateau", "loss_oscillation", "not_learning"),
    sites=("(loss)", "(loop)", "(data)"),
)
def bootstraps_past_the_end(attach, fixed):
    """No (1 - done)."""
    memory = play_randomly()
    policy_net = QNet()
    target_net = copy.deepcopy(policy_net)
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=3e-3)
    session = attach(policy_net, optimizer)
    for step in range(600):
        state, action, reward, next_state, done = stack(random.sample(memory, 32))
        curr_q = policy_net(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(next_state).max(1).values
            expected = reward + 0.95 * next_q * ((1 - done) if fixed else 1)
        loss = F.smooth_l1_loss(curr_q, expected)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        if step % 20 == 0:
            target_net.load_state_dict(policy_net.state_dict())
    return value_error(policy_net)


@fault(
    "ema_not_updated",
    area="rl",
    source="https://github.com/AgileRL/AgileRL/pull/464",
    cause="The soft update of the target network changes nothing, so targets stay those of the random start.",
    words=(r"target.?net", r"(ema|copy|average).*(not|never).*updat", r"never (updated|changes)"),
    cascade=("loss_plateau", "underfitting"),
    sites=("(loop)", "target", "(model)", "target_net"),
)
def target_network_stands_still(attach, fixed):
    """The update assigns to a local name."""
    memory = play_randomly(seed=1)
    net = QNet()
    target = QNet()
    target.load_state_dict(net.state_dict())

    def soft_update(online, slow, tau=0.05):
        for p, t in zip(online.parameters(), slow.parameters(), strict=True):
            mixed = tau * p.data + (1.0 - tau) * t.data
            if fixed:
                t.data.copy_(mixed)
            t = mixed

    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach({"online": net, "target": target}, opt)
    for _ in range(600):
        s, a, r, n, d = stack(random.sample(memory, 32))
        y = r + 0.95 * (1 - d) * target(n).max(1)[0].detach()
        q = net(s)[torch.arange(32), a]
        loss = F.mse_loss(q, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        soft_update(net, target)
        session.log(td=loss)
    return value_error(net)


@fault(
    "output_range_mismatch",
    area="rl",
    source="from memory: stackoverflow.com, 'DQN outputs zeros' (ReLU after the last layer of a Q network)",
    cause="The Q network ends with a ReLU and cannot represent negative values.",
    words=(r"relu.*(output|last|end|target)", r"(output|range).*(negative|cannot reach|below zero)"),
    also=("relu_before_logits",),
    cascade=("dead_relu", "constant_output", "not_learning", "loss_plateau", "vanishing_gradient"),
    sites=("last", "q", "(model)", "(loss)", "loss_fn"),
)
def rectified_q_values(attach, fixed):
    """forward() returns relu(fc(x))."""
    memory = deque(play_randomly(seed=2), maxlen=5000)
    q_net = QNet(last=None if fixed else nn.ReLU())
    lagged = copy.deepcopy(q_net).requires_grad_(False)
    opt = torch.optim.Adam(q_net.parameters(), lr=3e-3)
    session = attach(q_net, opt)
    for step in range(600):
        s, a, r, n, d = stack(random.sample(memory, 32))
        with torch.no_grad():
            goal = r + 0.95 * (1 - d) * lagged(n).amax(1)
        loss = F.mse_loss(q_net(s).gather(1, a[:, None])[:, 0], goal)
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss)
        if step % 25 == 24:
            lagged.load_state_dict(q_net.state_dict())
    return value_error(q_net)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(7, 32)
        self.action_head = nn.Linear(32, 2)
        self.value_head = nn.Linear(32, 1)

    def forward(self, x):
        x = torch.tanh(self.affine(x))
        return Categorical(logits=self.action_head(x)), self.value_head(x)


def episode(model, env, limit=30):
    state, rows = env.reset(), []
    for _ in range(limit):
        with torch.no_grad():
            dist, _ = model(state)
        action = dist.sample()
        after, reward, over = env.step(int(action))
        rows.append((state, int(action), reward, float(dist.log_prob(action))))
        state = after
        if over:
            break
    return rows


def returns_of(rewards, gamma=0.95):
    out, total = [], 0.0
    for r in reversed(rewards):
        total = r + gamma * total
        out.insert(0, total)
    return out


def regret(model, tries=40):
    env = Corridor()
    gained = [sum(r for _, _, r, _ in episode(model, env)) for _ in range(tries)]
    return 0.9 - sum(gained) / tries


@fault(
    "broadcast_loss",
    area="rl",
    source="https://github.com/RITCHIEHuang/DeepRL_Algorithms/issues/13",
    cause="Advantages (batch, 1) times ratios (batch,) broadcast to (batch, batch).",
    words=(r"broadcast", r"shapes?.*(differ|expand|mismatch)"),
    cascade=("not_learning", "constant_output", "loss_plateau", "underfitting"),
    sites=("(loss)", "(loop)", "(function)"),
)
def surrogate_of_all_pairs(attach, fixed):
    """ratio * advantages of different shapes."""
    env, model = Corridor(), ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _ in range(35):
        rows, rets = [], []
        for _ in range(5):
            played = episode(model, env)
            rows += played
            rets += returns_of([r for _, _, r, _ in played])
        states = torch.stack([s for s, *_ in rows])
        actions = torch.tensor([a for _, a, *_ in rows])
        old = torch.tensor([p for *_, p in rows])
        rets = torch.tensor(rets).unsqueeze(1)
        with torch.no_grad():
            advantages = rets - model(states)[1]
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(4):
            dist, value = model(states)
            ratio = torch.exp(dist.log_prob(actions) - old)
            adv = advantages.reshape(-1) if fixed else advantages
            surr1, surr2 = ratio * adv, ratio.clamp(0.8, 1.2) * adv
            loss = -torch.min(surr1, surr2).mean() + 0.5 * F.mse_loss(value, rets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    return regret(model)


@fault(
    "loss_sign_flipped",
    area="rl",
    source="https://github.com/google-deepmind/open_spiel/issues/962",
    cause="The entropy bonus has the wrong sign, so the policy is pushed to commit before it knows anything.",
    words=(r"entropy (bonus|term|regular)", r"\bsign\b"),
    cascade=("constant_output", "not_learning", "attention_entropy_collapse", "loss_plateau", "saturated_activation"),
    sites=("(loss)", "(loop)"),
)
def punishes_entropy(attach, fixed):
    """+ beta * entropy in a loss."""
    env, model = Corridor(), ActorCritic()
    with torch.no_grad():
        model.action_head.bias.copy_(torch.tensor([0.8, -0.8]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    beta = 0.6
    for _ in range(60):
        rows = [episode(model, env) for _ in range(4)]
        states = torch.stack([s for ep in rows for s, *_ in ep])
        actions = torch.tensor([a for ep in rows for _, a, *_ in ep])
        rets = torch.tensor([g for ep in rows for g in returns_of([r for _, _, r, _ in ep])])
        dist, value = model(states)
        advantage = rets - value.squeeze(1)
        policy_loss = -(dist.log_prob(actions) * advantage.detach()).mean()
        entropy = dist.entropy().mean()
        total = policy_loss + 0.5 * advantage.pow(2).mean() + (-beta if fixed else beta) * entropy
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        session.log(policy_loss=policy_loss, entropy=entropy)
        beta *= 0.95
    return regret(model)


@fault(
    "returns_forward",
    area="rl",
    source="from memory: REINFORCE homework posts, discounted returns accumulated from the first reward instead of the last",
    cause="Returns are accumulated forwards, so an action is credited with the rewards before it.",
    words=(r"discount", r"(return|reward)s?.*(order|forward|revers|past)"),
    cascade=("not_learning", "loss_plateau", "loss_oscillation", "loss_sign_flipped"),
    sites=("(loop)", "(data)", "(loss)"),
)
def credits_the_past(attach, fixed):
    """`[::-1]` was forgotten."""

    class Signals:
        """Eight signals in a row; each wants one of two answers and pays at once."""

        def reset(self):
            self.t = 0
            return self.show()

        def show(self):
            self.sign = random.randrange(4)
            return torch.eye(4)[self.sign]

        def step(self, action):
            reward = 1.0 if action == self.sign % 2 else -1.0
            self.t += 1
            return self.show(), reward, self.t == 8

    env, policy = Signals(), nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, optimizer)
    seen = []
    for _ in range(200):
        state, done, log_probs, rewards = env.reset(), False, [], []
        while not done:
            m = Categorical(logits=policy(state))
            action = m.sample()
            log_probs.append(m.log_prob(action))
            state, reward, done = env.step(action.item())
            rewards.append(reward)
        R, returns = 0.0, []
        for r in rewards[::-1] if fixed else rewards:
            R = r + 0.6 * R
            returns.insert(0, R)
        loss = -(torch.stack(log_probs) * torch.tensor(returns)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(sum(rewards) / 8)
        session.log(loss=loss, episode_return=sum(rewards))
    return 1 - sum(seen[-30:]) / 30


@fault(
    "target_not_detached",
    area="rl",
    source="https://github.com/philtabor/Deep-Q-Learning-Paper-To-Code/issues/16",
    cause="Gradients flow through the TD target, which should be a constant.",
    words=(r"target.*(detach|gradient|constant)", r"detach"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("(loss)", "(loop)", "(model)"),
)
def gradients_through_the_td_target(attach, fixed):
    """The same network on both sides, without no_grad."""
    memory = play_randomly(seed=3)
    agent = QNet()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.05)
    session = attach(agent, optimizer)
    for _ in range(400):
        s, a, r, n, d = stack(random.sample(memory, 32))
        q_pred = agent(s)[torch.arange(32), a]
        q_next = agent(n).max(dim=1)[0]
        q_target = r + 0.95 * (1 - d) * (q_next.detach() if fixed else q_next)
        loss = F.mse_loss(q_target, q_pred)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return value_error(agent)
