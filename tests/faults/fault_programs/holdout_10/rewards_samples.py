"""Tenth hold-out: learning from rewards, and making samples."""

from __future__ import annotations

import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

from fault_programs.holdout_10.about import fault
from fault_programs.holdout_10.material import Rail, digits, missed


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


@fault(
    "penalty_over_wrong_dim",
    area="gan",
    source="https://github.com/Zeleni9/pytorch-wgan/issues/40",
    cause="The norm of the gradient is taken over the single channel instead of all pixels, so each pixel is pulled to a slope of 1 and the critic gets far too steep.",
    words=(r"gradient.penalty|penalty|norm", r"dim|channel|pixel|element|axis"),
    cascade=("loss_divergence", "loss_oscillation", "exploding_activation"),
    sites=("(loss)", "D", "(loop)"),
)
def penalty_of_each_pixel(attach, fixed):
    """gradients.norm(2, dim=1) of a tensor in the order batch, channel, height, width."""
    real_images, _, held_out, _ = digits()
    D = nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(12, 24, 3, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(96, 1),
    )
    G = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8)))
    d_optimizer = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
    g_optimizer = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    session = attach(nn.ModuleDict({"G": G, "D": D}), d_optimizer)

    def slopes(real, fake):
        eta = torch.rand(len(real), 1, 1, 1)
        mixed = (eta * real + (1 - eta) * fake).requires_grad_()
        return torch.autograd.grad(D(mixed).sum(), mixed, create_graph=True)[0]

    for g_iter in range(90):
        for d_iter in range(3):
            real = real_images[torch.randint(len(real_images), (48,))]
            fake = G(torch.randn(48, 8)).detach()
            gradients = slopes(real, fake)
            gradients = gradients.flatten(1) if fixed else gradients
            grad_penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean() * 10
            d_loss = D(fake).mean() - D(real).mean() + grad_penalty
            d_optimizer.zero_grad()
            d_loss.backward()
            d_optimizer.step()
        g_loss = -D(G(torch.randn(48, 8))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        session.log(d_loss=d_loss.item(), g_loss=g_loss.item(), gp=grad_penalty.item())
    steep = slopes(held_out[:300], G(torch.randn(300, 8)).detach()).flatten(1).norm(dim=1)
    return float((steep - 1).abs().mean().detach())


@fault(
    "noise_drawn_twice",
    area="diffusion",
    source="from memory: forum questions on a hand-written DDPM whose loss stays at 1.0 because q_sample draws its own noise",
    cause="q_sample draws noise of its own, and the loss compares the answer with other noise, which the sample does not hold.",
    words=(r"noise", r"twice|other|own|different|unrelated|drawn|again|not the same|belong"),
    also=("label_shuffle_mismatch",),
    cascade=("not_learning", "loss_plateau", "constant_output", "underfitting"),
    sites=("(loss)", "(data)", "(loop)", "(model)"),
    exact=False,
)
def noise_of_the_target_is_not_that_of_the_sample(attach, fixed):
    """self.q_sample(x_start, t) without noise=noise."""
    steps = 100
    xtr, _, xte, _ = digits()
    xtr, xte = xtr.flatten(1) * 2 - 1, xte.flatten(1) * 2 - 1

    class GaussianDiffusion(nn.Module):
        def __init__(self):
            super().__init__()
            bars = torch.cumprod(1 - torch.linspace(1e-3, 0.06, steps), 0)
            self.register_buffer("root", bars.sqrt())
            self.register_buffer("rest", (1 - bars).sqrt())
            self.time = nn.Embedding(steps, 32)
            self.net = mlp(64 + 32, 128, 128, 64, act=nn.SiLU)

        def denoise(self, x, t):
            return self.net(torch.cat([x, self.time(t)], 1))

        def q_sample(self, x_start, t, noise=None):
            noise = torch.randn_like(x_start) if noise is None else noise
            return self.root[t, None] * x_start + self.rest[t, None] * noise

        def forward(self, x_start):
            t = torch.randint(0, steps, (len(x_start),))
            noise = torch.randn_like(x_start)
            x_noisy = self.q_sample(x_start, t, noise=noise if fixed else None)
            return F.mse_loss(self.denoise(x_noisy, t), noise)

    diffusion = GaussianDiffusion()
    opt = torch.optim.Adam(diffusion.parameters(), lr=2e-3)
    session = attach(diffusion, opt)
    for step in range(350):
        loss = diffusion(xtr[torch.randint(len(xtr), (64,))])
        opt.zero_grad()
        loss.backward()
        opt.step()
        session.log(loss=loss.item())
    with torch.no_grad():
        t = torch.randint(0, steps, (len(xte),))
        noise = torch.randn_like(xte)
        return float(F.mse_loss(diffusion.denoise(diffusion.q_sample(xte, t, noise), t), noise))


class Slices:
    """Slices of a scan come in any order; the right key says on which side the landmark is."""

    def reset(self):
        self.left = 10
        self.seen = torch.randn(4)
        return self.seen

    @staticmethod
    def right(seen):
        return 0 if seen[0] + seen[1] < -0.5 else 2 if seen[0] + seen[1] > 0.5 else 1

    def step(self, action):
        reward = 1.0 - abs(action - self.right(self.seen))
        self.left -= 1
        self.seen = torch.randn(4)
        return self.seen, reward, self.left == 0


@fault(
    "reward_of_the_step_before",
    area="dqn",
    source="https://github.com/gml16/rl-medical/pull/6",
    cause="A state is put into the replay buffer with the reward of the step before, so rewards do not belong to their actions.",
    words=(r"reward", r"previous|before|shift|belong|wrong|late|off by|mismatch"),
    also=("label_shuffle_mismatch",),
    cascade=("not_learning", "loss_plateau", "underfitting", "constant_output"),
    sites=("(data)", "(loop)", "loader"),
    exact=False,
)
def states_are_stored_with_the_reward_before(attach, fixed):
    """append((state, action, reward)) before the reward has come."""

    class ReplayMemory:
        def __init__(self, max_size=3000):
            self.items, self.max_size = [], max_size

        def append(self, exp):
            self.items.append(exp)
            del self.items[: -self.max_size]

        def sample(self, size):
            state, action, reward, after, over = zip(*random.sample(self.items, size))
            return (
                torch.stack(state),
                torch.tensor(action),
                torch.tensor(reward),
                torch.stack(after),
                torch.tensor(over),
            )

    env, buffer = Slices(), ReplayMemory()
    dqn = mlp(4, 48, 48, 3)
    target = mlp(4, 48, 48, 3).requires_grad_(False)
    target.load_state_dict(dqn.state_dict())
    optimizer = torch.optim.Adam(dqn.parameters(), lr=2e-3)
    session = attach(dqn, optimizer)
    gamma, epsilon = 0.3, 1.0
    for episode in range(60):
        obs, is_over, last_reward = env.reset(), False, 0.0
        while not is_over:
            with torch.no_grad():
                act = random.randrange(3) if random.random() < epsilon else int(dqn(obs).argmax())
            obs_, reward, is_over = env.step(act)
            buffer.append((obs, act, reward if fixed else last_reward, obs_, float(is_over)))
            obs, last_reward = obs_, reward
            if len(buffer.items) > 64:
                state, action, r, after, over = buffer.sample(48)
                goal = r + gamma * (1 - over) * target(after).max(1).values
                loss = F.smooth_l1_loss(dqn(state).gather(1, action[:, None])[:, 0], goal)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log(loss=loss.item())
        epsilon = max(0.1, epsilon * 0.96)
        if episode % 3 == 0:
            target.load_state_dict(dqn.state_dict())
    tests = torch.randn(500, 4)
    with torch.no_grad():
        said = dqn(tests).argmax(1).tolist()
    return sum(a != env.right(s) for a, s in zip(said, tests)) / 500


@fault(
    "return_of_the_whole_episode",
    area="policy gradient",
    source="https://github.com/huggingface/deep-rl-class/pull/95",
    cause="Each action is weighed with the return from the start of the episode instead of the return from its own step on, so it is praised for rewards that came before it.",
    words=(r"return|reward|g_0|credit", r"start|whole|same|every|all|own step|before|timestep|per.?step"),
    cascade=("not_learning", "loss_oscillation", "loss_plateau", "underfitting"),
    sites=("(loss)", "(loop)"),
    exact=False,
)
def every_action_gets_the_return_of_the_start(attach, fixed):
    """R = sum of gamma**k * r_k, one for all log-probabilities."""
    env, max_t, gamma = Rail(steps=40), 40, 0.5

    class Policy(nn.Module):
        def __init__(self, s_size=2, a_size=3, h_size=32):
            super().__init__()
            self.fc1 = nn.Linear(s_size, h_size)
            self.fc2 = nn.Linear(h_size, a_size)

        def forward(self, x):
            return F.softmax(self.fc2(F.relu(self.fc1(x))), dim=-1)

        def act(self, state):
            m = Categorical(self(state))
            action = m.sample()
            return int(action), m.log_prob(action)

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    session = attach(policy, optimizer)
    scores = deque(maxlen=100)
    for i_episode in range(130):
        saved_log_probs, rewards = [], []
        state = env.reset()
        for t in range(max_t):
            action, log_prob = policy.act(state)
            saved_log_probs.append(log_prob)
            state, reward, done = env.step(action)
            rewards.append(reward + 0.5)
            if done:
                break
        scores.append(sum(rewards))
        returns = deque()
        for r in rewards[::-1]:
            returns.appendleft(r + gamma * returns[0] if returns else r)
        policy_loss = []
        for log_prob, disc_return in zip(saved_log_probs, returns):
            policy_loss.append(-log_prob * (disc_return if fixed else returns[0]))
        loss = torch.stack(policy_loss).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item(), score=sum(scores) / len(scores))
    return missed(lambda seen: policy(seen).argmax())


@fault(
    "broadcast_loss",
    area="actor-critic",
    source="https://github.com/PacktPublishing/Deep-Reinforcement-Learning-Hands-On/pull/75",
    cause="The values have a second axis of size 1 and the returns have not, so their difference is a square and each action gets the advantages of all states.",
    words=(r"broadcast|shape|squeeze|square|\(n, ?1\)|all pairs", r"advantage|value|return"),
    cascade=("not_learning", "loss_oscillation", "loss_plateau", "underfitting"),
    sites=("(loss)", "(loop)", "policy", "value"),
)
def advantage_is_a_square(attach, fixed):
    """vals_ref_v - value_v.detach() with shapes (B,) and (B, 1)."""

    class A2C(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy = mlp(3, 32, 3)
            self.value = mlp(3, 32, 1)

        def forward(self, x):
            return self.policy(x), self.value(x)

    def spin(states, actions):
        want = torch.bucketize(states[:, 0], torch.tensor([-0.4, 0.4]))
        return 8 * states[:, 1] - (actions - want).abs()

    net = A2C()
    optimizer = torch.optim.Adam(net.parameters(), lr=6e-3)
    session = attach(net, optimizer)
    for batch in range(260):
        states_v = torch.rand(48, 3) * 2 - 1
        logits_v, value_v = net(states_v)
        actions_t = Categorical(logits=logits_v.detach()).sample()
        vals_ref_v = spin(states_v, actions_t).float()
        loss_value_v = F.mse_loss(value_v.squeeze(-1), vals_ref_v)
        log_prob_v = F.log_softmax(logits_v, dim=1)
        adv_v = vals_ref_v - (value_v.squeeze(-1) if fixed else value_v).detach()
        log_prob_actions_v = adv_v * log_prob_v[range(48), actions_t]
        loss_policy_v = -log_prob_actions_v.mean()
        entropy_loss_v = 0.01 * (F.softmax(logits_v, dim=1) * log_prob_v).sum(dim=1).mean()
        optimizer.zero_grad()
        (loss_policy_v + entropy_loss_v + loss_value_v).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        session.log(loss_policy=loss_policy_v.item(), loss_value=loss_value_v.item())
    states = torch.rand(1000, 3) * 2 - 1
    with torch.no_grad():
        chosen = net(states)[0].argmax(1)
    return float((chosen - torch.bucketize(states[:, 0], torch.tensor([-0.4, 0.4]))).abs().float().mean())
