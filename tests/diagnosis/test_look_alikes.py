"""Healthy programs that look ill to a careless rule: none may raise a warning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sonde

STEPS = 16


def batch(size=32):
    x = torch.randn(size, 12)
    return x, x[:, :4].argmax(1)


def mlp():
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))


def pair():
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))
    critic = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    return generator, critic


def game_with_two_backward_passes(watch):
    generator, critic = pair()
    first, second = (torch.optim.Adam(each.parameters(), 2e-3) for each in (generator, critic))
    watch({"generator": generator, "critic": critic}, [first, second])
    for _ in range(STEPS):
        second.zero_grad()
        F.binary_cross_entropy_with_logits(critic(torch.randn(16, 12) + 2), torch.ones(16, 1)).backward()
        made = generator(torch.randn(16, 4))
        F.binary_cross_entropy_with_logits(critic(made.detach()), torch.zeros(16, 1)).backward()
        second.step()
        first.zero_grad()
        F.binary_cross_entropy_with_logits(critic(made), torch.ones(16, 1)).backward()
        first.step()


def slow_game(watch):
    """Small nets move by the rate for a while, all elements alike, and the critic's answers stay between 0 and 1."""
    torch.manual_seed(6)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    first, second = (torch.optim.Adam(each.parameters(), 2e-4) for each in (generator, critic))
    watch({"g": generator, "d": critic}, [first, second])
    for _ in range(40):
        made = generator(torch.randn(64, 8))
        true, false = torch.ones(64, 1), torch.zeros(64, 1)
        loss = F.binary_cross_entropy_with_logits(critic(torch.randn(64, 2) * 0.5 + 1), true)
        loss = loss + F.binary_cross_entropy_with_logits(critic(made.detach()), false)
        second.zero_grad()
        loss.backward()
        second.step()
        first.zero_grad()
        F.binary_cross_entropy_with_logits(critic(made), true).backward()
        first.step()


def game_of_which_one_optimizer_is_handed_in(watch):
    generator, critic = pair()
    first, second = (torch.optim.SGD(each.parameters(), 1e-2) for each in (generator, critic))
    watch({"generator": generator, "critic": critic}, first)
    for _ in range(STEPS):
        made = generator(torch.randn(16, 4))
        second.zero_grad()
        (F.softplus(critic(made.detach())).mean() + F.softplus(-critic(torch.randn(16, 12) + 2)).mean()).backward()
        second.step()
        first.zero_grad()
        F.softplus(-critic(made)).mean().backward()
        first.step()


def closures(watch):
    model = nn.Linear(5, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    session = watch(model, optimizer)
    x = torch.randn(64, 5)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(64, 1)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(10):
        session.log(loss=optimizer.step(closure))


def looks_ahead_before_each_step(watch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    session = watch(model, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        session.log(loss=loss)


def policy_gradient(watch):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    session = watch(model, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        log_p = F.log_softmax(model(x), 1)
        action = torch.distributions.Categorical(logits=log_p).sample()
        loss = -(log_p.gather(1, action[:, None]).squeeze(1) * ((action == y).float() - 0.25)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)


class Encoder(nn.Module):
    """Copies of a block, a fixed encoding, and a small layer that this task does not use."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.places = nn.Parameter(torch.randn(1, 8, 16) * 0.02, requires_grad=False)
        self.head, self.pooler = nn.Linear(16, 20), nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x) + self.places))


def encoder_with_evaluation(watch):
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    session = watch(model, optimizer)
    for step in range(STEPS):
        model.train()
        x = torch.randint(0, 20, (16, 8))
        loss = F.cross_entropy(model(x).flatten(0, 1), ((x + 1) % 20).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        if step % 6 == 5:
            model.eval()
            with torch.no_grad():
                model(x), model(x)


def accumulates_and_evaluates_with_gradients(watch):
    model = nn.Sequential(
        nn.Linear(12, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    session = watch(model, optimizer)
    for _ in range(STEPS // 2):
        model.train()
        optimizer.zero_grad()
        for _ in range(4):
            x, y = batch()
            loss = F.cross_entropy(model(x), y)
            (loss / 4).backward()
        optimizer.step()
        session.log(loss=loss)
        model.eval()
        F.cross_entropy(model(x), y)


def one_backward_pass_per_loss(watch):
    model = nn.ModuleDict({"body": mlp(), "head": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    session = watch(model, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        z = model["body"](x)
        first = F.cross_entropy(z, y)
        first.backward(retain_graph=True)
        second = F.mse_loss(model["head"](z), x[:, :1])
        second.backward()
        optimizer.step()
        session.log(loss=first.detach() + second.detach())


def tasks_in_turns(watch):
    model = nn.ModuleDict({"body": nn.Linear(12, 32), "heads": nn.ModuleList([nn.Linear(32, 4), nn.Linear(32, 1)])})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        x, y = batch()
        h = F.relu(model["body"](x))
        second = step % 15 == 14
        loss = F.mse_loss(model["heads"][1](h), 9 * x[:, :1]) if second else F.cross_entropy(model["heads"][0](h), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clears_gradients_behind_autograd(watch):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    session = watch(model, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(12, 32), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return F.log_softmax(self.policy(hidden), 1), self.value(hidden).squeeze(1)


def several_epochs_on_each_rollout(watch):
    """Batches repeat without a loader, and a policy term makes the total negative though its loss is not."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    session = watch(model, optimizer)
    for _ in range(8):
        x, y = batch(64)
        with torch.no_grad():
            log_p, value = model(x)
            action = torch.distributions.Categorical(logits=log_p).sample()
            reward = (action == y).float()
            advantage = reward - value
            old = log_p.gather(1, action[:, None]).squeeze(1)
        for _ in range(4):
            log_p, value = model(x)
            ratio = (log_p.gather(1, action[:, None]).squeeze(1) - old).exp()
            entropy = -(log_p.exp() * log_p).sum(1).mean()
            loss = -(ratio * advantage).mean() + 0.05 * F.mse_loss(value, reward) - 0.1 * entropy
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)


def generator_called_twice_with_the_same_noise(watch):
    generator, critic = pair()
    first, second = (torch.optim.Adam(each.parameters(), 2e-3) for each in (generator, critic))
    watch({"generator": generator, "critic": critic}, [first, second])
    for _ in range(STEPS):
        noise = torch.randn(16, 4)
        second.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(generator(noise).detach()), torch.zeros(16, 1))
        (loss + F.binary_cross_entropy_with_logits(critic(torch.randn(16, 12) + 2), torch.ones(16, 1))).backward()
        second.step()
        first.zero_grad()
        F.binary_cross_entropy_with_logits(critic(generator(noise)), torch.ones(16, 1)).backward()
        first.step()


def several_steps_on_each_batch_of_a_loader_with_workers(watch):
    x, y = batch(256)
    loader = DataLoader(TensorDataset(x, y), 32, shuffle=True, num_workers=2)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    session = watch(model, optimizer, loader=loader)
    for x, y in loader:
        for _ in range(3):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)


def inputs_with_equal_statistics(make):
    def program(watch):
        x, y = make(320)
        loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        session = watch(model, optimizer, loader=loader)
        for x, y in (each for _ in range(3) for each in loader):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)

    return program


def one_hot_inputs(size):
    states = torch.randint(0, 8, (size,))
    return F.one_hot(states, 8).float(), (states + 1) % 8


def permutations(size):
    orders = torch.rand(size, 8).argsort(1)
    return orders.float() / 8, orders.argmax(1)


class Cosines(nn.Module):
    """Cosines times 30 minus a margin start far above guessing, however small the weights are."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
        self.centres = nn.Parameter(torch.randn(4, 16))

    def forward(self, x, y):
        cosines = F.linear(F.normalize(self.body(x)), F.normalize(self.centres))
        return 30 * (cosines - 0.35 * F.one_hot(y, 4))


def margin_loss(watch):
    model = Cosines()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    session = watch(model, optimizer)
    for _ in range(4 * STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x, y), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.scale = mlp(), mlp(), nn.Parameter(torch.tensor(4.6))

    def forward(self, x, z):
        return self.scale.exp() * F.normalize(self.left(x)) @ F.normalize(self.right(z)).T


def contrastive_loss(watch):
    model = TwoTowers()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    session = watch(model, optimizer)
    for _ in range(4 * STEPS):
        x, _ = batch()
        loss = F.cross_entropy(model(x, x + 0.1 * torch.randn_like(x)), torch.arange(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)


def loads_a_checkpoint_after_watching(watch):
    def make():
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100)

    def step(model, optimizer, scheduler):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    before = make()
    for _ in range(3):
        step(*before)
    now = make()
    session = watch(*now[:2], scheduler=now[2])
    for each, saved in zip(now, before, strict=True):
        each.load_state_dict(saved.state_dict())
    for _ in range(STEPS):
        session.log(loss=step(*now))


def gradients_that_fall_by_many_orders(watch):
    model = nn.Linear(5, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    watch(model, optimizer)
    x = torch.randn(64, 5)
    y = 100 * x.sum(1, keepdim=True)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(40):
        optimizer.step(closure)


class TagsWords(nn.Module):
    """A tagger that reads one sentence at a time, as PyTorch's tutorial writes it."""

    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.tag = nn.Embedding(20, 16), nn.LSTM(16, 16), nn.Linear(16, 3)

    def forward(self, sentence):
        states, _ = self.lstm(self.embed(sentence).view(len(sentence), 1, -1))
        return self.tag(states.view(len(sentence), -1))


def one_sentence_at_a_time(watch):
    model = TagsWords()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    session = watch(model, optimizer)
    for step in range(120):
        words = torch.randint(0, 20, (5 + step % 4,))
        loss = F.cross_entropy(model(words), words % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)


def teacher_in_training_mode(watch):
    def make():
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    both = nn.ModuleDict({"student": make(), "teacher": make()})
    both["teacher"].load_state_dict(both["student"].state_dict())
    optimizer = torch.optim.Adam(both["student"].parameters(), 1e-2)
    session = watch({"student": both["student"], "teacher": both["teacher"]}, optimizer)
    for _ in range(120):
        x = torch.randn(32, 8)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        logits = both["student"](x)
        with torch.no_grad():
            wanted = both["teacher"](x + 0.1 * torch.randn_like(x)).softmax(-1)
        loss = F.cross_entropy(logits, y) + F.mse_loss(logits.softmax(-1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(both["teacher"].parameters(), both["student"].parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        session.log(loss=loss)


def temperature_with_an_optimizer_of_its_own(watch):
    """Nobody handed in the optimizer of the temperature, and it steps after the round is over."""
    policy = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
    log_alpha = torch.zeros((), requires_grad=True)
    first, second = torch.optim.Adam(policy.parameters(), 1e-3), torch.optim.Adam([log_alpha], 1e-3)
    watch(policy, first)
    for step in range(STEPS):
        x, _ = batch()
        mean, spread = policy(x).chunk(2, -1)
        chosen = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
        action = chosen.rsample()
        log_prob = chosen.log_prob(action)
        first.zero_grad()
        ((action - x[:, :1]).square() + log_alpha.exp() * log_prob).mean().backward()
        first.step()
        if step > STEPS // 2:
            second.zero_grad()
            (-(log_alpha.exp() * (log_prob + 1).detach()).mean()).backward()
            second.step()


def target_network_with_gradients(watch):
    """A gradient also flows into the target network, which no optimizer holds."""
    values, target = mlp(), mlp()
    target.load_state_dict(values.state_dict())
    optimizer = torch.optim.Adam(values.parameters(), 1e-3)
    watch(values, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        wanted = torch.rand(32, 1) + 0.9 * target(batch()[0]).max(1, keepdim=True)[0] * (torch.rand(32, 1) > 0.1)
        loss = F.smooth_l1_loss(values(x).gather(1, y[:, None]), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def values_that_grow_with_what_is_learnt(watch):
    """The targets grow as the values do, and the loss with them; the target is the first argument."""
    values = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    target = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(values.parameters(), 1e-2)
    watch(values, optimizer)
    for step in range(150):
        if step % 10 == 0:
            target.load_state_dict(values.state_dict())
        x, _ = batch()
        with torch.no_grad():
            wanted = torch.rand(32) * 2 + 0.99 * target(x + 0.1 * torch.randn_like(x)).flatten()
        optimizer.zero_grad()
        F.mse_loss(wanted, values(x).squeeze()).backward()
        optimizer.step()


def bounded_mean_of_a_policy(watch):
    """Actions are drawn around a mean between -2 and 2, and so lie beyond that range too."""
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watch(model, optimizer)
    for _ in range(STEPS):
        x, _ = batch()
        with torch.no_grad():
            action = torch.distributions.Normal(2 * model(x), 2.0).sample()
        log_prob = torch.distributions.Normal(2 * model(x), 2.0).log_prob(action)
        loss = -(log_prob * (action - x[:, :1]).abs().neg()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def terms_of_other_shapes_are_added_and_averaged(watch):
    """A column plus a row makes all pairs, whose mean is the sum of both means."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watch(model, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        out = model(x)
        column = -out.log_softmax(1).gather(1, y[:, None])
        row = out.square().sum(1) * 1e-3
        optimizer.zero_grad()
        (column + row).mean().backward()
        optimizer.step()


def one_sequence_with_labels_for_its_steps(watch):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.RNN(12, 32), nn.Linear(32, 4)

        def forward(self, x):
            return self.out(self.cell(x.transpose(0, 1))[0]).transpose(0, 1).squeeze(0)

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watch(model, optimizer)
    x, y = batch(5)
    x, y = x[None], y[None]
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y.squeeze(0)).backward()
        optimizer.step()


def learns_to_learn(watch):
    """The gradients of the inner step are asked for, and stay in no parameter."""
    model = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watch(model, optimizer)
    for _ in range(STEPS):
        losses = []
        for _ in range(3):
            height, x = torch.rand(()) + 0.5, torch.rand(2, 10, 1) * 4
            weights = dict(model.named_parameters())
            inner = F.mse_loss(torch.func.functional_call(model, weights, x[0]), height * x[0].sin())
            slopes = torch.autograd.grad(inner, weights.values(), create_graph=True)
            moved = {name: each - 0.01 * slope for (name, each), slope in zip(weights.items(), slopes, strict=True)}
            losses.append(F.mse_loss(torch.func.functional_call(model, moved, x[1]), height * x[1].sin()))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()


def samples_from_its_own_energy(watch):
    """Gradients of a sum over samples, for the samples, are no part of what is minimised."""
    energy = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(energy.parameters(), 1e-3)
    watch(energy, optimizer)
    for _ in range(STEPS):
        drawn = torch.randn(64, 2)
        for _ in range(3):
            drawn.requires_grad_()
            slope = torch.autograd.grad(energy(drawn).sum(), drawn)[0]
            drawn = (drawn - 0.1 * slope + 0.05 * torch.randn_like(drawn)).detach()
        low, high = energy(F.normalize(torch.randn(64, 2))), energy(drawn)
        optimizer.zero_grad()
        ((low - high).mean() + 0.1 * (low.square() + high.square()).mean()).backward()
        optimizer.step()


def tries_long_steps_on_the_whole_data(watch):
    """The loss of the first step is that of several tries, some of which are too long."""
    torch.manual_seed(1)
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=3.0, max_iter=5)
    watch(model, optimizer)
    x, y = batch(256)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


def codes_that_follow_the_outputs(watch):
    """The distance of outputs to their codes is small at first, and grows with what is learnt."""
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(12, 4), nn.Linear(4, 12)
    codes = torch.randn(16, 4) * 0.01
    with torch.no_grad():
        encoder.weight.mul_(0.01)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 3e-2)
    watch(nn.ModuleDict({"encoder": encoder, "decoder": decoder}), optimizer)
    for _ in range(80):
        x, _ = batch(64)
        made = encoder(x)
        nearest = torch.cdist(made.detach(), codes).argmin(1)
        chosen = codes[nearest]
        fit = F.mse_loss(decoder(made + (chosen - made).detach()), x) * 1e-3
        optimizer.zero_grad()
        (fit + F.mse_loss(made, chosen) - 1e-2 * made.std()).backward()
        optimizer.step()
        codes.index_add_(0, nearest, 0.05 * (made.detach() - chosen))


def codebook_of_an_average_in_the_optimizer(watch):
    """All parameters are handed to the optimizer; those of the codebook follow the outputs without a gradient."""

    class Quantizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder, self.codes = nn.Linear(12, 8), nn.Linear(8, 12), nn.Embedding(32, 8)

        def forward(self, x):
            made = self.encoder(x)
            nearest = torch.cdist(made, self.codes.weight).argmin(1)
            chosen = self.codes(nearest).detach()
            hits = F.one_hot(nearest, 32).float().detach()
            means = hits.T @ made.detach() / hits.sum(0).clamp(min=1)[:, None]
            follows = torch.where(hits.sum(0)[:, None] > 0, means, self.codes.weight.data)
            self.codes.weight.data = 0.9 * self.codes.weight.data + 0.1 * follows
            return self.decoder(made + (chosen - made).detach()), 0.25 * F.mse_loss(made, chosen)

    model = Quantizer()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    watch(model, optimizer)
    for _ in range(60):
        x, _ = batch(64)
        out, commitment = model(x)
        optimizer.zero_grad()
        (F.mse_loss(out, x) + commitment).backward()
        optimizer.step()


def blocks_that_leave_a_rest_to_the_next(watch):
    """The last block has no next one: nothing uses the rest that it computes."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.rest, self.out = nn.Linear(12, 32), nn.Linear(32, 12), nn.Linear(32, 4)

        def forward(self, x):
            made = self.body(x).relu()
            return x - self.rest(made), self.out(made)

    blocks = nn.ModuleList(Block() for _ in range(2))
    optimizer = torch.optim.Adam(blocks.parameters(), 1e-3)
    watch(blocks, optimizer)
    for _ in range(STEPS):
        x, y = batch()
        total = 0
        for block in blocks:
            x, part = block(x)
            total = total + part
        optimizer.zero_grad()
        F.cross_entropy(total, y).backward()
        optimizer.step()


def stops_within_the_first_epoch(watch):
    """The scheduler is stepped once an epoch, and recording begins and ends within the first."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    session = None
    for step, (x, y) in enumerate(DataLoader(TensorDataset(*batch(64 * 50)), batch_size=64)):
        session = session or watch(model, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 40:
            return
    scheduler.step()


PROGRAMS = [
    one_sentence_at_a_time,
    teacher_in_training_mode,
    game_with_two_backward_passes,
    slow_game,
    game_of_which_one_optimizer_is_handed_in,
    closures,
    looks_ahead_before_each_step,
    policy_gradient,
    encoder_with_evaluation,
    accumulates_and_evaluates_with_gradients,
    one_backward_pass_per_loss,
    tasks_in_turns,
    clears_gradients_behind_autograd,
    several_epochs_on_each_rollout,
    generator_called_twice_with_the_same_noise,
    several_steps_on_each_batch_of_a_loader_with_workers,
    pytest.param(inputs_with_equal_statistics(one_hot_inputs), id="one_hot_inputs"),
    pytest.param(inputs_with_equal_statistics(permutations), id="permutations"),
    margin_loss,
    contrastive_loss,
    loads_a_checkpoint_after_watching,
    gradients_that_fall_by_many_orders,
    temperature_with_an_optimizer_of_its_own,
    target_network_with_gradients,
    values_that_grow_with_what_is_learnt,
    bounded_mean_of_a_policy,
    terms_of_other_shapes_are_added_and_averaged,
    one_sequence_with_labels_for_its_steps,
    learns_to_learn,
    samples_from_its_own_energy,
    tries_long_steps_on_the_whole_data,
    codes_that_follow_the_outputs,
    codebook_of_an_average_in_the_optimizer,
    blocks_that_leave_a_rest_to_the_next,
    stops_within_the_first_epoch,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_healthy_program_raises_no_warning(program, tmp_path):
    torch.manual_seed(0)
    sessions = []

    def watch(model, optimizer, **helpers):
        sessions.append(sonde.watch(model, optimizer, run=tmp_path / "run", **helpers))
        return sessions[0]

    program(watch)
    sessions[0].close()
    told = [*sessions[0].findings, *sonde.diagnose(tmp_path / "run").findings]
    assert [(finding.kind, finding.cause) for finding in told if finding.severity != "info"] == []
    recorded = {site.key for site in sonde.open_run(tmp_path / "run").sites}
    cited = {evidence.series.rpartition(" ")[0] for finding in told for evidence in finding.evidence if evidence.series}
    assert cited <= recorded
