"""Ninth hold-out: agents and graphs."""

from __future__ import annotations

import copy
import random
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from fault_programs.holdout_9.about import fault
from fault_programs.holdout_9.matter import Corridor, friends


def q_net(cells=8, width=48):
    return nn.Sequential(nn.Linear(cells, width), nn.ReLU(), nn.Linear(width, 2))


def strolls(steps=1500, cells=8):
    """Transitions of a walker that draws its steps by lot."""
    env = Corridor(cells)
    state = env.reset().copy()
    memory = []
    for _ in range(steps):
        action = random.randint(0, 1)
        after, reward, done, late = env.step(action)
        memory.append((state, action, reward, after.copy(), float(done)))
        state = env.reset().copy() if done or late else after.copy()
    return memory


def batch_of(memory, size=48):
    state, action, reward, after, done = zip(*random.sample(memory, size), strict=True)
    return (
        torch.tensor(np.stack(state)), torch.tensor(action), torch.tensor(reward, dtype=torch.float32),
        torch.tensor(np.stack(after)), torch.tensor(done),
    )  # fmt: skip


@fault(
    "wrong_formula",
    area="rl",
    source="https://github.com/ikostrikov/pytorch-ddpg-naf/issues/16",
    cause="The mask is added to the next value instead of multiplied with it, so values of terminal states count and nothing is discounted.",
    words=(r"mask|terminal|done", r"plus|add|\+|multipl|gamma|discount"),
    also=("terminal_bootstrapped",),
    cascade=(
        "loss_divergence",
        "not_learning",
        "exploding_activation",
        "loss_oscillation",
        "target_scale",
        "exploding_gradient",
    ),
    sites=("(loss)", "(loop)"),
)
def adds_the_mask_to_the_value(attach, fixed):
    """expected = reward + gamma * mask + next_state_values."""
    memory = strolls()

    class Agent:
        def __init__(self, gamma=0.9, tau=0.05):
            self.model = q_net()
            self.target_model = copy.deepcopy(self.model)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
            self.gamma, self.tau = gamma, tau

        def update_parameters(self, batch):
            state_batch, action_batch, reward_batch, next_state_batch, done = batch
            mask_batch = 1 - done
            with torch.no_grad():
                next_state_values = self.target_model(next_state_batch).max(1).values
            later = mask_batch * next_state_values if fixed else mask_batch + next_state_values
            expected_state_action_values = reward_batch + self.gamma * later
            state_action_values = self.model(state_batch).gather(1, action_batch[:, None]).squeeze(1)
            loss = F.mse_loss(state_action_values, expected_state_action_values)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1)
            self.optimizer.step()
            with torch.no_grad():
                for target, source in zip(self.target_model.parameters(), self.model.parameters(), strict=True):
                    target.mul_(1 - self.tau).add_(self.tau * source)
            return loss

    agent = Agent()
    session = attach({"model": agent.model, "target_model": agent.target_model}, agent.optimizer)
    for _ in range(700):
        session.log(value_loss=agent.update_parameters(batch_of(memory)))
    with torch.no_grad():
        true = 0.9 ** torch.arange(6, -1, -1).float()
        return float((agent.model(torch.eye(8)[:7]).max(1)[0] - true).abs().mean())


@fault(
    "wrong_returns",
    area="rl",
    source="https://github.com/hunkim/ReinforcementZeroToAll/issues/1",
    cause="Rewards are discounted but not summed up from behind, so a step is never paid for what comes after it.",
    words=(r"return|discount|reward", r"sum|cumulat|future|later"),
    also=("wrong_formula",),
    cascade=("not_learning", "loss_plateau", "underfitting", "constant_output"),
    sites=("(loss)", "(loop)", "(data)"),
)
def discounts_without_summing_up(attach, fixed):
    """np.array([val * gamma ** i for i, val in enumerate(r)])."""

    def discount_rewards(r, gamma=0.99):
        """Takes 1d float array of rewards and computes discounted reward"""
        d_rewards = np.zeros(len(r))
        for i in range(len(r)):
            later = r[i:] if fixed else r[i : i + 1]
            d_rewards[i] = sum(val * gamma ** (i + k) for k, val in enumerate(later))
        return d_rewards - 0.4

    class CueThenWait:
        """A cue is shown, the first action must answer it, and the reward comes when the walk is over."""

        def reset(self):
            self.cue, self.time = random.randrange(3), 0
            return self.look()

        def look(self):
            seen = torch.zeros(8)
            seen[3 + self.time] = 1.0
            if self.time == 0:
                seen[self.cue] = 1.0
            return seen

        def step(self, action):
            if self.time == 0:
                self.right = action == self.cue
            self.time += 1
            done = self.time == 5
            return (None if done else self.look()), float(done and self.right), done

    policy = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, optimizer)
    env = CueThenWait()
    for episode in range(400):
        state, done, log_probs, rewards = env.reset(), False, [], []
        while not done:
            dist = torch.distributions.Categorical(logits=policy(state))
            action = dist.sample()
            log_probs.append(dist.log_prob(action))
            state, reward, done = env.step(int(action))
            rewards.append(reward)
        advantage = torch.tensor(discount_rewards(rewards), dtype=torch.float32)
        loss = -(torch.stack(log_probs) * advantage).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(episode=episode, loss=loss, reward=sum(rewards))
    cues = torch.zeros(3, 8)
    cues[:, 3] = 1.0
    cues[torch.arange(3), torch.arange(3)] = 1.0
    with torch.no_grad():
        return 1 - float(torch.softmax(policy(cues), 1).diagonal().mean())


@fault(
    "data_overwritten",
    area="rl",
    source="https://github.com/Farama-Foundation/SuperSuit/pull/116",
    cause="The environment returns its own buffer, and the memory keeps that instead of a copy, so all stored states are the latest one.",
    words=(r"copy|reference|same (array|object|buffer)|in.?place|alias", r"state|memory|replay|buffer|observ"),
    also=("same_batch_every_step", "best_state_shares_memory"),
    cascade=("not_learning", "loss_plateau", "constant_feature", "constant_output", "underfitting", "loss_oscillation"),
    sites=("(data)", "(loop)", "loader"),
)
def remembers_the_buffer_of_the_environment(attach, fixed):
    """memory.append((state, action, reward, next_state, done)) of an array that changes in place."""
    env = Corridor(8)
    memory = deque(maxlen=2000)
    net, target = q_net(), q_net()
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach({"net": net, "target": target}, optimizer)
    state = env.reset()
    observed = (lambda array: array.copy()) if fixed else (lambda array: array)
    state = observed(state)
    for step in range(1200):
        with torch.no_grad():
            greedy = int(net(torch.tensor(state))[None].argmax())
        action = random.randint(0, 1) if random.random() < 0.5 else greedy
        next_state, reward, done, late = env.step(action)
        next_state = observed(next_state)
        memory.append((state, action, reward, next_state, float(done)))
        state = observed(env.reset()) if done or late else next_state
        if step < 100 or step % 2:
            continue
        s, a, r, s2, d = batch_of(memory, 32)
        with torch.no_grad():
            y = r + 0.9 * (1 - d) * target(s2).max(1)[0]
        loss = F.smooth_l1_loss(net(s).gather(1, a[:, None])[:, 0], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            target.load_state_dict(net.state_dict())
        session.log(td_loss=loss)
    with torch.no_grad():
        true = 0.9 ** torch.arange(6, -1, -1).float()
        return float((net(torch.eye(8)[:7]).max(1)[0] - true).abs().mean())


@fault(
    "target_not_detached",
    area="rl",
    source="https://github.com/astariul/encode-attend-navigate-pytorch/issues/2",
    cause="The critic's value is not detached in the policy loss, so the policy loss pushes the critic off its target.",
    words=(r"critic|value|baseline", r"detach|gradient|backprop|policy loss"),
    also=("term_without_gradient", "aux_loss_dominates"),
    cascade=("loss_divergence", "not_learning", "loss_oscillation", "underfitting", "loss_plateau"),
    sites=("(loss)", "(loop)", "critic"),
)
def policy_loss_trains_the_critic(attach, fixed):
    """act_loss = -mean((reward - predicted) * log_prob) with predicted still in the graph."""

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
            self.critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    made = torch.Generator().manual_seed(951)
    pay = torch.rand(6, 4, generator=made)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for step in range(500):
        place = torch.randint(0, 6, (64,))
        x = F.one_hot(place, 6).float()
        dist = torch.distributions.Categorical(logits=model.actor(x))
        action = dist.sample()
        reward = pay[place, action] + 0.1 * torch.randn(64)
        predictions = model.critic(x)[:, 0]
        advantage = reward - (predictions.detach() if fixed else predictions)
        act_loss = -(advantage * dist.log_prob(action)).mean() - 0.2 * dist.entropy().mean()
        cri_loss = F.mse_loss(predictions, reward)
        loss = act_loss + cri_loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        session.log(step=step, reward=reward.mean(), critic=cri_loss, actor=act_loss)
    with torch.no_grad():
        x = torch.eye(6)
        expected = (torch.softmax(model.actor(x), 1) * pay).sum(1)
        return float((model.critic(x)[:, 0] - expected).abs().mean())


@fault(
    "data_leakage",
    area="graphs",
    source="https://github.com/awslabs/realtime-fraud-detection-with-gnn-on-dgl/pull/728",
    cause="The loss is taken over all nodes, those of the test set among them, so the reported accuracy is that of learned labels.",
    words=(r"test|mask|label", r"leak|train|loss|all nodes"),
    also=("mask_not_applied",),
    cascade=("overfitting",),
    sites=("(loss)", "(loop)", "(validation)", "(data)"),
)
def test_labels_in_the_loss(attach, fixed):
    """loss over every labelled node instead of labels[train_mask]."""
    x, adjacency, labels = friends(width=160)
    place = torch.randperm(240, generator=torch.Generator().manual_seed(952))
    train_mask, test_mask, unseen = (torch.zeros(240, dtype=torch.bool) for _ in range(3))
    train_mask[place[:80]], test_mask[place[80:160]], unseen[place[160:]] = True, True, True

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Linear(160, 32), nn.Linear(32, 4)

        def forward(self, adj, x):
            return adj @ self.conv2(F.dropout(F.relu(adj @ self.conv1(x)), 0.2, self.training))

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)
    in_loss = train_mask if fixed else train_mask | test_mask
    for epoch in range(120):
        model.train()
        pred = model(adjacency, x)
        loss = F.cross_entropy(pred[in_loss], labels[in_loss])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(adjacency, x).argmax(1) == labels).float()
        session.log(epoch=epoch, loss=loss, train_acc=right[train_mask].mean(), test_acc=right[test_mask].mean())
    return float(right[test_mask].mean() - right[unseen].mean())


@fault(
    "batch_axis_mixed",
    area="graphs",
    source="from memory: questions on graph classification where mean(0) stands for global_mean_pool(x, batch)",
    cause="The read-out averages the nodes of all graphs of the batch, so every graph gets the same answer.",
    words=(r"pool|mean|read.?out", r"batch|all graphs|each graph|same"),
    cascade=("constant_output", "loss_plateau", "not_learning", "underfitting"),
    sites=("(model)", "lin"),
)
def pools_over_all_graphs(attach, fixed):
    """x.mean(dim=0) over the nodes of the whole batch."""
    made = torch.Generator().manual_seed(953)
    graphs = []
    for _ in range(300):
        size = int(torch.randint(6, 12, (), generator=made))
        label = int(torch.rand((), generator=made) < 0.5)
        edges = (torch.rand(size, size, generator=made) < (0.25 if label else 0.5)).triu(1)
        graphs.append(((edges | edges.T).float() + torch.eye(size), label))

    def collate(batch):
        adj = torch.block_diag(*[a for a, _ in batch])
        index = torch.cat([torch.full((len(a),), i) for i, (a, _) in enumerate(batch)])
        return adj, adj.sum(1, keepdim=True) / 10, index, torch.tensor([label for _, label in batch])

    class GraphNet(nn.Module):
        def __init__(self, hidden=24):
            super().__init__()
            self.conv1, self.conv2, self.lin = nn.Linear(1, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 2)

        def forward(self, x, adj, batch):
            x = F.relu(self.conv1(adj @ x))
            x = F.relu(self.conv2(adj @ x / 3))
            count = int(batch.max()) + 1
            size = torch.bincount(batch, minlength=count)[:, None]
            pooled = torch.zeros(count, x.shape[1]).index_add(0, batch, x) / size
            return self.lin(pooled if fixed else x.mean(dim=0, keepdim=True).expand(count, -1))

    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for _epoch in range(15):
        order = torch.randperm(240).tolist()
        for start in range(0, 240, 20):
            adj, x, batch, y = collate([graphs[i] for i in order[start : start + 20]])
            loss = F.cross_entropy(model(x, adj, batch), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    adj, x, batch, y = collate(graphs[240:])
    with torch.no_grad():
        return float((model(x, adj, batch).argmax(1) != y).float().mean())


@fault(
    "wrong_returns",
    area="rl",
    source="https://github.com/PacktPublishing/Tensorflow-2-Reinforcement-Learning-Cookbook/issues/27",
    cause="The list of returns is reversed inside the loop, after each step, so returns end up at other steps than their own.",
    words=(r"revers|order|indent", r"return|reward|discount"),
    also=("label_shuffle_mismatch",),
    cascade=("not_learning", "loss_plateau", "underfitting", "loss_oscillation"),
    sites=("(loss)", "(loop)", "(data)"),
)
def reverses_inside_the_loop(attach, fixed):
    """discounted_rewards.reverse() one indentation too deep."""

    class Agent:
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4))
            self.opt = torch.optim.Adam(self.model.parameters(), lr=8e-3)
            self.gamma = 0.3

        def act(self, prob_state):
            return torch.distributions.Categorical(logits=self.model(prob_state)).sample()

        def learn(self, states, rewards, actions):
            sum_reward, discnt_rewards = 0, []
            for i, r in enumerate(rewards[::-1]):
                sum_reward = r + self.gamma * sum_reward
                discnt_rewards.append(sum_reward)
                if not fixed or i == len(rewards) - 1:
                    discnt_rewards.reverse()
            paid = torch.tensor(discnt_rewards)
            dist = torch.distributions.Categorical(logits=self.model(torch.stack(states)))
            loss = -(dist.log_prob(torch.stack(actions)) * (paid - paid.mean())).sum()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            return loss

    agent = Agent()
    session = attach(agent.model, agent.opt)
    for episode in range(250):
        states, actions, rewards = [], [], []
        for _ in range(10):
            place = random.randrange(4)
            states.append(F.one_hot(torch.tensor(place), 4).float())
            with torch.no_grad():
                actions.append(agent.act(states[-1]))
            rewards.append(1.0 if int(actions[-1]) == (place + 1) % 4 else 0.0)
        session.log(episode=episode, reward=sum(rewards), loss=agent.learn(states, rewards, actions))
    with torch.no_grad():
        chance = torch.softmax(agent.model(torch.eye(4)), 1)
    return 1 - float(chance[torch.arange(4), (torch.arange(4) + 1) % 4].mean())
