"""Fourteenth hold-out: healthy programs as one finds them in examples, tutorials and well-known repositories."""

from __future__ import annotations

import math
import random

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from fault_programs.holdout_14.about import healthy
from fault_programs.holdout_14.material import digits, energy, moons, sentences, squares, wrong


@healthy(area="classification", source="in the style of PyTorch's quickstart tutorial", deceptive=False)
def quickstart_with_a_train_and_a_test_function(attach):
    """Flatten and linear_relu_stack, train(dataloader, model, loss_fn, optimizer), test(...)."""
    train_set, test_set = digits()

    class NeuralNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.flatten = nn.Flatten()
            self.linear_relu_stack = nn.Sequential(
                nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
            )

        def forward(self, x):
            return self.linear_relu_stack(self.flatten(x))

    model, loss_fn = NeuralNetwork(), nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer)

    def train(dataloader):
        model.train()
        for X, y in dataloader:
            loss = loss_fn(model(X), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss.item())

    def test(dataloader):
        model.eval()
        test_loss, correct = 0.0, 0.0
        with torch.no_grad():
            for X, y in dataloader:
                pred = model(X)
                test_loss += loss_fn(pred, y).item()
                correct += (pred.argmax(1) == y).type(torch.float).sum().item()
        session.log(test_loss=test_loss / len(dataloader), accuracy=correct / len(dataloader.dataset))
        return 1 - correct / len(dataloader.dataset)

    train_dataloader = DataLoader(TensorDataset(*train_set), batch_size=20, shuffle=True)
    test_dataloader = DataLoader(TensorDataset(*test_set), batch_size=100)
    for t in range(10):
        train(train_dataloader)
        error = test(test_dataloader)
    return error


@healthy(
    area="names", source="in the style of PyTorch's tutorial on classifying names with a character RNN", deceptive=False
)
def names_are_classified_letter_by_letter(attach):
    """An RNN written by hand, one name per step, NLLLoss, hidden state that starts at zero for each name."""
    n_letters, n_categories, n_hidden = 10, 3, 48
    habits = torch.softmax(2 * torch.randn(n_categories, n_letters, n_letters), -1)

    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.i2h, self.h2h = nn.Linear(n_letters, n_hidden), nn.Linear(n_hidden, n_hidden)
            self.h2o = nn.Linear(n_hidden, n_categories)
            self.softmax = nn.LogSoftmax(dim=1)

        def forward(self, line_tensor):
            hidden = torch.zeros(1, n_hidden)
            for letter in line_tensor:
                hidden = torch.tanh(self.i2h(letter) + self.h2h(hidden))
            return self.softmax(self.h2o(hidden))

    def random_training_example():
        category = random.randrange(n_categories)
        letters = [random.randrange(n_letters)]
        for _ in range(random.randint(6, 9)):
            letters.append(int(torch.multinomial(habits[category, letters[-1]], 1)))
        return torch.tensor([category]), F.one_hot(torch.tensor(letters), n_letters).float()[:, None]

    rnn, criterion = RNN(), nn.NLLLoss()
    optimizer = optim.SGD(rnn.parameters(), lr=0.02)
    session = attach(rnn, optimizer)
    current_loss, plot_every = 0.0, 50
    for step in range(1, 1101):
        category_tensor, line_tensor = random_training_example()
        optimizer.zero_grad()
        loss = criterion(rnn(line_tensor), category_tensor)
        loss.backward()
        nn.utils.clip_grad_norm_(rnn.parameters(), 3)
        optimizer.step()
        current_loss += loss.item()
        if step % plot_every == 0:
            session.log(loss=current_loss / plot_every)
            current_loss = 0.0
    with torch.no_grad():
        tries = [random_training_example() for _ in range(200)]
        return sum(int(rnn(line).argmax() != category) for category, line in tries) / len(tries)


@healthy(
    area="language model",
    source="in the style of the bigram-to-transformer lecture on character models",
    deceptive=False,
)
def babble_of_a_small_decoder(attach):
    """get_batch, heads with a triangular buffer, residual blocks, estimate_loss every so often, AdamW."""
    block_size, vocab, n_embd = 12, 9, 32
    text = [0, 1]
    for _ in range(4000):
        text.append((text[-1] + 2 * text[-2] + 1) % vocab if random.random() < 0.9 else random.randrange(vocab))
    data = torch.tensor(text)
    train_data, val_data = data[:3600], data[3600:]

    def get_batch(split, batch_size=32):
        source = train_data if split == "train" else val_data
        ix = torch.randint(len(source) - block_size - 1, (batch_size,))
        return torch.stack([source[i : i + block_size] for i in ix]), torch.stack(
            [source[i + 1 : i + block_size + 1] for i in ix]
        )

    class Head(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.key, self.query, self.value = (nn.Linear(n_embd, size, bias=False) for _ in range(3))
            self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

        def forward(self, x):
            T = x.shape[1]
            wei = self.query(x) @ self.key(x).transpose(-2, -1) * n_embd**-0.5
            wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf")).softmax(-1)
            return wei @ self.value(x)

    class Block(nn.Module):
        def __init__(self, heads=2):
            super().__init__()
            self.heads = nn.ModuleList(Head(n_embd // heads) for _ in range(heads))
            self.proj = nn.Linear(n_embd, n_embd)
            self.ffwd = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd))
            self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

        def forward(self, x):
            h = self.ln1(x)
            x = x + self.proj(torch.cat([head(h) for head in self.heads], -1))
            return x + self.ffwd(self.ln2(x))

    class LanguageModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.token_embedding_table = nn.Embedding(vocab, n_embd)
            self.position_embedding_table = nn.Embedding(block_size, n_embd)
            self.blocks = nn.Sequential(Block(), Block())
            self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab)

        def forward(self, idx, targets):
            x = self.token_embedding_table(idx) + self.position_embedding_table(torch.arange(idx.shape[1]))
            logits = self.lm_head(self.ln_f(self.blocks(x)))
            return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1))

    model = LanguageModel()
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        losses = torch.stack([model(*get_batch("val"))[1] for _ in range(5)])
        model.train()
        return losses.mean().item()

    for it in range(260):
        if it % 65 == 64:
            session.log(val_loss=estimate_loss())
        _, loss = model(*get_batch("train"))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    return estimate_loss()


@healthy(area="translation", source="in the style of tutorials on sequence to sequence with attention", deceptive=False)
def sentences_are_turned_round_with_attention(attach):
    """A packed GRU encoder, Bahdanau attention, teacher forcing by chance, ignore_index for the pads, clipping at 1."""
    PAD, SOS, vocab, hid = 0, 1, 10, 40

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocab, 20, padding_idx=PAD)
            self.rnn, self.fc = nn.GRU(20, hid, bidirectional=True), nn.Linear(2 * hid, hid)

        def forward(self, src, src_len):
            packed = pack_padded_sequence(self.embedding(src), src_len, enforce_sorted=False)
            outputs, hidden = self.rnn(packed)
            return pad_packed_sequence(outputs)[0], torch.tanh(self.fc(torch.cat([hidden[-2], hidden[-1]], 1)))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.v = nn.Linear(3 * hid, hid), nn.Linear(hid, 1, bias=False)
            self.embedding, self.rnn = nn.Embedding(vocab, 20), nn.GRU(20 + 2 * hid, hid)
            self.fc_out = nn.Linear(20 + 3 * hid, vocab)

        def forward(self, token, hidden, encoder_outputs, mask):
            repeated = hidden[None].expand(len(encoder_outputs), -1, -1)
            energy = self.v(torch.tanh(self.attn(torch.cat([repeated, encoder_outputs], 2))))[..., 0]
            a = energy.masked_fill(mask == 0, -1e10).softmax(0)
            weighted = (a[..., None] * encoder_outputs).sum(0, keepdim=True)
            embedded = self.embedding(token)[None]
            output, hidden = self.rnn(torch.cat([embedded, weighted], 2), hidden[None])
            return self.fc_out(torch.cat([output, weighted, embedded], 2)[0]), hidden[0]

    class Seq2Seq(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Encoder(), Decoder()

        def forward(self, src, src_len, trg, teacher_forcing_ratio=0.5):
            encoder_outputs, hidden = self.encoder(src, src_len)
            token, outputs = torch.full((src.shape[1],), SOS), []
            for t in range(len(trg)):
                out, hidden = self.decoder(token, hidden, encoder_outputs, src != PAD)
                outputs.append(out)
                token = trg[t] if random.random() < teacher_forcing_ratio else out.argmax(1)
            return torch.stack(outputs)

    def batch(size):
        rows = [torch.randint(2, vocab, (random.randint(3, 6),)) for _ in range(size)]
        return pad_sequence(rows), torch.tensor([len(r) for r in rows]), pad_sequence([r.flip(0) for r in rows])

    model, criterion = Seq2Seq(), nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for step in range(260):
        src, src_len, trg = batch(32)
        output = model(src, src_len, trg)
        loss = criterion(output.view(-1, vocab), trg.view(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        session.log(loss=loss.item())
    model.eval()
    src, src_len, trg = batch(200)
    with torch.no_grad():
        guess = model(src, src_len, trg, 0).argmax(2)
    return (guess != trg)[trg != PAD].float().mean().item()


@healthy(
    area="segmentation", source="in the style of small U-Net repositories with cross entropy and Dice", deceptive=False
)
def small_unet_with_two_losses(attach):
    """DoubleConv, skip connections, bce plus dice, RMSprop with momentum, ReduceLROnPlateau on the score."""

    def double_conv(a, b):
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
        )

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.inc, self.down = double_conv(1, 8), nn.Sequential(nn.MaxPool2d(2), double_conv(8, 16))
            self.up, self.conv = nn.ConvTranspose2d(16, 8, 2, stride=2), double_conv(16, 8)
            self.outc = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            x1 = self.inc(x)
            return self.outc(self.conv(torch.cat([x1, self.up(self.down(x1))], 1)))

    def dice_loss(probs, mask):
        inter = 2 * (probs * mask).sum((1, 2, 3))
        return (1 - (inter + 1e-6) / (probs.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1e-6)).mean()

    picture, _, mask = squares(260)
    dataset = TensorDataset(picture, mask)
    train_set, val_set = random_split(dataset, [200, 60])
    model = UNet()
    optimizer = optim.RMSprop(model.parameters(), lr=2e-3, weight_decay=1e-8, momentum=0.5)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", patience=2)
    session = attach(model, optimizer, scheduler=scheduler)
    for epoch in range(7):
        model.train()
        for images, true_masks in DataLoader(train_set, batch_size=20, shuffle=True):
            logits = model(images)
            loss = F.binary_cross_entropy_with_logits(logits, true_masks) + dice_loss(logits.sigmoid(), true_masks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            images, true_masks = map(torch.stack, zip(*val_set))
            score = dice_loss((model(images) > 0).float(), true_masks).item()
        scheduler.step(score)
        session.log(val_dice_loss=score)
    return score


@healthy(area="actor critic", source="in the style of compact A2C scripts with generalised advantages", deceptive=False)
def cart_is_kept_in_the_middle_with_advantages(attach):
    """Several carts side by side, GAE from the back, entropy bonus, one optimizer with eps 1e-5, clipping at 0.5."""
    gamma, lam, n_envs, n_steps = 0.95, 0.9, 32, 8

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 1))
            self.actor = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 2))
            for layer, gain in ((self.critic[2], 1.0), (self.actor[2], 0.01)):
                nn.init.orthogonal_(layer.weight, gain)
                nn.init.zeros_(layer.bias)

        def forward(self, x):
            return torch.distributions.Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)

    def step(state, action):
        place, speed = state.unbind(1)
        speed = 0.9 * speed + 0.2 * (2 * action - 1)
        place = place + 0.3 * speed + 0.02 * torch.randn_like(place)
        done = place.abs() > 1.5
        fresh = torch.stack([torch.rand_like(place) * 2 - 1, torch.zeros_like(place)], 1)
        after = torch.where(done[:, None], fresh, torch.stack([place, speed], 1))
        return after, 1 - place.abs() - done.float(), done.float()

    agent = Agent()
    optimizer = optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
    session = attach(agent, optimizer)
    state = torch.rand(n_envs, 2) * 2 - 1
    for update in range(200):
        log_probs, values, rewards, dones, entropies = [], [], [], [], []
        for _ in range(n_steps):
            dist, value = agent(state)
            action = dist.sample()
            state, reward, done = step(state, action)
            for row, item in zip(
                (log_probs, values, rewards, dones, entropies),
                (dist.log_prob(action), value, reward, done, dist.entropy()),
            ):
                row.append(item)
        with torch.no_grad():
            next_value, gae, advantages = agent(state)[1], 0.0, []
            for t in reversed(range(n_steps)):
                delta = rewards[t] + gamma * next_value * (1 - dones[t]) - values[t]
                gae = delta + gamma * lam * (1 - dones[t]) * gae
                advantages.insert(0, gae)
                next_value = values[t]
        advantages, values = torch.stack(advantages), torch.stack(values)
        returns = advantages + values.detach()
        policy_loss = -(advantages * torch.stack(log_probs)).mean()
        value_loss = F.mse_loss(values, returns)
        loss = policy_loss + 0.5 * value_loss - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        session.log(policy_loss=policy_loss.item(), value_loss=value_loss.item())
    state, far = torch.rand(200, 2) * 2 - 1, 0.0
    with torch.no_grad():
        for _ in range(30):
            state, reward, _ = step(state, agent.actor(state).argmax(1))
            far += (1 - reward).mean().item() / 30
    return far


@healthy(area="diffusion", source="in the style of tiny diffusion models for points", deceptive=False)
def half_moons_out_of_noise(attach):
    """A NoiseScheduler class, sinusoidal times, residual blocks, clipping, a mean squared error on the noise."""

    class NoiseScheduler:
        def __init__(self, num_timesteps=40):
            self.num_timesteps, self.betas = num_timesteps, torch.linspace(1e-3, 0.2, num_timesteps)
            self.alphas = 1 - self.betas
            self.alphas_cumprod = self.alphas.cumprod(0)

        def add_noise(self, x, noise, t):
            a = self.alphas_cumprod[t][:, None]
            return a.sqrt() * x + (1 - a).sqrt() * noise

        def step(self, eps, t, x):
            x = (x - self.betas[t] / (1 - self.alphas_cumprod[t]).sqrt() * eps) / self.alphas[t].sqrt()
            return x + self.betas[t].sqrt() * torch.randn_like(x) if t > 0 else x

    class Block(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.ff, self.act = nn.Linear(size, size), nn.GELU()

        def forward(self, x):
            return x + self.act(self.ff(x))

    class MLP(nn.Module):
        def __init__(self, size=64):
            super().__init__()
            self.joint = nn.Sequential(nn.Linear(2 + 16, size), nn.GELU(), Block(size), Block(size), nn.Linear(size, 2))

        def forward(self, x, t):
            wave = t[:, None] * torch.exp(-math.log(100) * torch.arange(8) / 7)
            return self.joint(torch.cat([x, wave.sin(), wave.cos()], 1))

    model, noise_scheduler = MLP(), NoiseScheduler()
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    dataloader = DataLoader(TensorDataset(1.3 * moons(4000)), batch_size=80, shuffle=True, drop_last=True)
    for epoch in range(12):
        model.train()
        for (batch,) in dataloader:
            noise = torch.randn_like(batch)
            timesteps = torch.randint(0, noise_scheduler.num_timesteps, (len(batch),))
            noise_pred = model(noise_scheduler.add_noise(batch, noise, timesteps), timesteps)
            loss = F.mse_loss(noise_pred, noise)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss.item())
    model.eval()
    sample = torch.randn(600, 2)
    with torch.no_grad():
        for t in reversed(range(noise_scheduler.num_timesteps)):
            sample = noise_scheduler.step(model(sample, torch.full((600,), t)), t, sample)
    return energy(sample, 1.3 * moons(600))


@healthy(area="gan", source="in the style of collections of GANs in PyTorch: least squares", deceptive=False)
def least_squares_gan_on_half_moons(attach):
    """adversarial_loss = MSELoss, valid and fake, generator first, half the sum for the discriminator."""

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
            self.out = nn.Linear(64, 2)

        def forward(self, z):
            return self.out(self.model(z))

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
            self.adv_layer = nn.Linear(64, 1)

        def forward(self, point):
            return self.adv_layer(self.model(point))

    generator, discriminator, adversarial_loss = Generator(), Discriminator(), nn.MSELoss()
    optimizer_G = optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_D = optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    session = attach(both, [optimizer_G, optimizer_D])
    for i in range(700):
        points = moons(64)
        valid, fake = torch.ones(64, 1), torch.zeros(64, 1)
        optimizer_G.zero_grad()
        gen_points = generator(torch.randn(64, 4))
        g_loss = adversarial_loss(discriminator(gen_points), valid)
        g_loss.backward()
        optimizer_G.step()
        optimizer_D.zero_grad()
        real_loss = adversarial_loss(discriminator(points), valid)
        fake_loss = adversarial_loss(discriminator(gen_points.detach()), fake)
        d_loss = 0.5 * (real_loss + fake_loss)
        d_loss.backward()
        optimizer_D.step()
        session.log(d_loss=d_loss.item(), g_loss=g_loss.item())
    with torch.no_grad():
        return energy(generator(torch.randn(600, 4)), moons(600))


@healthy(
    area="graphs", source="in the style of GCN examples with masks for training, validation and test", deceptive=False
)
def papers_are_sorted_with_two_convolutions(attach):
    """A normalised sparse adjacency matrix with self loops, train_mask, decay for the first layer only."""
    nodes, classes = 300, 4
    y = torch.randint(0, classes, (nodes,))
    a, b = torch.randint(0, nodes, (2, 7000))
    keep = (y[a] == y[b]) | (torch.rand(7000) < 0.08)
    adjacency = torch.eye(nodes)
    adjacency[a[keep], b[keep]] = adjacency[b[keep], a[keep]] = 1.0
    root = adjacency.sum(1).rsqrt()
    norm_adj = (root[:, None] * adjacency * root).to_sparse()
    x = (torch.rand(nodes, 24) < 0.1).float()
    x[torch.arange(nodes), y * 6 + torch.randint(0, 6, (nodes,))] = 1.0
    train_mask, val_mask, test_mask = (torch.zeros(nodes, dtype=torch.bool) for _ in range(3))
    order = torch.randperm(nodes)
    train_mask[order[:60]], val_mask[order[60:120]], test_mask[order[120:]] = True, True, True

    class GCN(nn.Module):
        def __init__(self, hidden=16):
            super().__init__()
            self.lin1, self.lin2 = nn.Linear(24, hidden), nn.Linear(hidden, classes)

        def forward(self, x):
            x = F.dropout(x, p=0.4, training=self.training)
            x = torch.sparse.mm(norm_adj, self.lin1(x)).relu()
            x = F.dropout(x, p=0.4, training=self.training)
            return torch.sparse.mm(norm_adj, self.lin2(x))

    model = GCN()
    groups = [
        {"params": model.lin1.parameters(), "weight_decay": 5e-4},
        {"params": model.lin2.parameters(), "weight_decay": 0},
    ]
    optimizer = optim.Adam(groups, lr=0.01)
    session = attach(model, optimizer)
    best_val, test_error = 1.1, 1.0
    for epoch in range(120):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x)[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            missed = model(x).argmax(-1) != y
        val = missed[val_mask].float().mean().item()
        if val < best_val:
            best_val, test_error = val, missed[test_mask].float().mean().item()
        session.log(loss=loss.item(), val_error=val)
    return test_error


@healthy(area="time series", source="in the style of articles on forecasting passengers with an LSTM", deceptive=False)
def passengers_in_windows(attach):
    """A scaler fitted on the training part, create_dataset(lookback), batches in random order, RMSE in passengers."""
    month = torch.arange(240.0)
    passengers = (
        120 + 0.2 * month + 25 * torch.sin(month / 6 * math.pi) + 8 * torch.cos(month / 3) + 2 * torch.randn(240)
    )
    low, high = passengers[:170].min(), passengers[:170].max()
    series = ((passengers - low) / (high - low)).unsqueeze(1)

    def create_dataset(dataset, lookback):
        X = [dataset[i : i + lookback] for i in range(len(dataset) - lookback)]
        y = [dataset[i + 1 : i + lookback + 1] for i in range(len(dataset) - lookback)]
        return torch.stack(X), torch.stack(y)

    class AirModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.linear = nn.LSTM(1, 40, batch_first=True), nn.Linear(40, 1)

        def forward(self, x):
            return self.linear(self.lstm(x)[0])

    X_train, y_train = create_dataset(series[:170], 12)
    X_test, y_test = create_dataset(series[158:], 12)
    model, loss_fn = AirModel(), nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=8e-3)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(X_train, y_train), shuffle=True, batch_size=8)
    for epoch in range(22):
        model.train()
        for X_batch, y_batch in loader:
            loss = loss_fn(model(X_batch), y_batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            test_rmse = loss_fn(model(X_test)[:, -1], y_test[:, -1]).sqrt().item()
        session.log(test_rmse=test_rmse * (high - low).item())
    return test_rmse


@healthy(area="table", source="in the style of tabular models with entity embeddings", deceptive=False)
def shops_with_embedded_categories(attach):
    """Categories are embedded, numbers pass a batch norm, dropout after each layer, logarithm of the sales."""
    sizes = [12, 7, 5]

    class Sales(Dataset):
        def __init__(self, count):
            self.cats = torch.stack([torch.randint(0, n, (count,)) for n in sizes], 1)
            self.conts = torch.stack([100 + 40 * torch.randn(count), torch.rand(count) * 5000], 1)
            effect = self.cats[:, 0].float().sin() + 0.5 * (self.cats[:, 1] > 4) * (self.cats[:, 2] < 2)
            self.y = (
                effect + 0.01 * (self.conts[:, 0] - 100) - (self.conts[:, 1] / 5000) ** 2 + 0.05 * torch.randn(count)
            )

        def __len__(self):
            return len(self.y)

        def __getitem__(self, idx):
            return self.cats[idx], self.conts[idx], self.y[idx]

    class TabularModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.embeds = nn.ModuleList(nn.Embedding(n, min(8, (n + 1) // 2)) for n in sizes)
            self.bn_cont = nn.BatchNorm1d(2)
            width = sum(e.embedding_dim for e in self.embeds) + 2
            self.layers = nn.Sequential(
                nn.Linear(width, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(0.05), nn.Linear(64, 32), nn.ReLU()
            )
            self.out = nn.Linear(32, 1)

        def forward(self, cats, conts):
            x = torch.cat([e(cats[:, i]) for i, e in enumerate(self.embeds)], 1)
            return self.out(self.layers(torch.cat([x, self.bn_cont(conts)], 1))).squeeze(1)

    train, valid = Sales(1000), Sales(400)
    model = TabularModel()
    optimizer = optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    session = attach(model, optimizer, scheduler=scheduler)
    for epoch in range(10):
        model.train()
        for cats, conts, y in DataLoader(train, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(cats, conts), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        scheduler.step()
        model.eval()
        with torch.no_grad():
            val_loss = F.mse_loss(model(valid.cats, valid.conts), valid.y).item()
        session.log(val_loss=val_loss)
    return val_loss / valid.y.var().item()


@healthy(area="recommender", source="in the style of Bayesian personalised ranking", deceptive=False)
def songs_are_ranked_in_pairs(attach):
    """A song that was heard against one that was not; -logsigmoid of the difference, decay in the optimizer."""
    users, songs = 60, 80
    taste, style = torch.randn(users, 4), torch.randn(songs, 4)
    heard = torch.zeros(users, songs, dtype=torch.bool).scatter_(1, (taste @ style.t()).topk(16)[1], True)
    hidden = heard & (torch.rand(users, songs) < 0.25)
    known = heard & ~hidden

    class BPR(nn.Module):
        def __init__(self, factor_num=12):
            super().__init__()
            self.embed_user, self.embed_item = nn.Embedding(users, factor_num), nn.Embedding(songs, factor_num)
            nn.init.normal_(self.embed_user.weight, std=0.1)
            nn.init.normal_(self.embed_item.weight, std=0.1)

        def forward(self, user, item_i, item_j):
            u = self.embed_user(user)
            return (u * self.embed_item(item_i)).sum(-1), (u * self.embed_item(item_j)).sum(-1)

    model = BPR()
    optimizer = optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    session = attach(model, optimizer)
    pairs = known.nonzero()
    for epoch in range(14):
        other = torch.multinomial((~known).float()[pairs[:, 0]], 1)
        for user, item_i, item_j in DataLoader(
            TensorDataset(pairs[:, 0], pairs[:, 1], other[:, 0]), batch_size=60, shuffle=True
        ):
            model.zero_grad()
            prediction_i, prediction_j = model(user, item_i, item_j)
            loss = -(prediction_i - prediction_j).sigmoid().log().mean()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        score = model.embed_user.weight @ model.embed_item.weight.t()
    rank = [(score[u, i] < score[u][~heard[u]]).float().mean() for u, i in hidden.nonzero().tolist()]
    return float(torch.stack(rank).mean())


@healthy(area="metric learning", source="in the style of siamese and triplet networks for digits", deceptive=False)
def triplets_from_a_dataset_of_their_own(attach):
    """TripletMNIST draws a positive and a negative for each anchor; EmbeddingNet with PReLU; StepLR."""
    (xtr, ytr), (xte, yte) = digits()
    by_label = {label: (ytr == label).nonzero()[:, 0].tolist() for label in range(10)}

    class TripletDigits(Dataset):
        def __len__(self):
            return 800

        def __getitem__(self, index):
            label = int(ytr[index])
            other = random.choice([k for k in by_label if k != label])
            return xtr[index], xtr[random.choice(by_label[label])], xtr[random.choice(by_label[other])]

    class EmbeddingNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.convnet = nn.Sequential(nn.Conv2d(1, 16, 3), nn.PReLU(), nn.MaxPool2d(2), nn.Flatten())
            self.fc = nn.Sequential(nn.Linear(144, 48), nn.PReLU(), nn.Linear(48, 8))

        def forward(self, x):
            return self.fc(self.convnet(x))

    embedding_net, loss_fn = EmbeddingNet(), nn.TripletMarginLoss(margin=1.0)
    optimizer = optim.Adam(embedding_net.parameters(), lr=2e-3)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.3)
    session = attach(embedding_net, optimizer, scheduler=scheduler)
    loader = DataLoader(TripletDigits(), batch_size=40, shuffle=True)
    for epoch in range(8):
        for anchor, positive, negative in loader:
            optimizer.zero_grad()
            loss = loss_fn(embedding_net(anchor), embedding_net(positive), embedding_net(negative))
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        scheduler.step()
    with torch.no_grad():
        near = torch.cdist(embedding_net(xte), embedding_net(xtr)).argmin(1)
    return (ytr[near] != yte).float().mean().item()


@healthy(area="text classification", source="in the style of Kim's convolutions for sentences", deceptive=False)
def sentences_under_three_widths_of_windows(attach):
    """An embedding, convolutions of three widths, a maximum over time, dropout, AdamW with linear decay."""
    x, y = sentences(800)
    x_val, y_val = sentences(400)

    class TextCNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 24)
            self.convs = nn.ModuleList(nn.Conv1d(24, 16, k) for k in (2, 3, 4))
            self.dropout, self.fc = nn.Dropout(0.3), nn.Linear(48, 4)

        def forward(self, ids):
            h = self.embed(ids).transpose(1, 2)
            h = torch.cat([F.relu(conv(h)).amax(2) for conv in self.convs], 1)
            return self.fc(self.dropout(h))

    model, epochs = TextCNN(), 10
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (epochs * 20 + 1))
    session = attach(model, optimizer, scheduler=scheduler)
    for epoch in range(epochs):
        model.train()
        for ids, label in DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True):
            loss = F.cross_entropy(model(ids), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            session.log(loss=loss.item())
        model.eval()
        session.log(val_error=wrong(model, x_val, y_val))
    return wrong(model, x_val, y_val)
