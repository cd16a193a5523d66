"""Sixth hold-out: losses and targets."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_6.about import fault
from fault_programs.holdout_6.materials import Walk, apart, batches, cells, digits, moons, wrong


class CellDataset(Dataset):
    """Pictures and masks of a folder."""

    def __init__(self, read_mask):
        self.images, self.masks = cells()
        self.read_mask = read_mask

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        img = torch.from_numpy(self.images[i])[None]
        mask = self.read_mask(self.masks[i])
        return {"image": img, "mask": torch.from_numpy(mask).float()[None]}


class SmallUNet(nn.Module):
    """One level down, one up."""

    def __init__(self, n_channels=1, n_classes=1, base=12):
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(n_channels, base, 3, padding=1), nn.BatchNorm2d(base), nn.ReLU(inplace=True))
        self.down = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(base, 2 * base, 3, padding=1), nn.BatchNorm2d(2 * base), nn.ReLU(inplace=True)
        )
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.outc = nn.Conv2d(3 * base, n_classes, 3, padding=1)

    def forward(self, x):
        x1 = self.inc(x)
        return self.outc(torch.cat([x1, self.up(self.down(x1))], dim=1))


@fault(
    "label_out_of_range",
    area="segmentation",
    source="https://github.com/milesial/Pytorch-UNet/issues/78",
    cause="The masks are read as 0 and 255 and given to a binary cross-entropy, which needs targets from 0 to 1.",
    words=(
        r"255",
        r"target.*(outside|beyond|range|not in).*(0|\[0|one)",
        r"mask.*(range|scale)",
        r"binary cross.?entropy.*(range|0 and 1)",
    ),
    also=("target_scale", "output_range_mismatch"),
    cascade=("loss_divergence", "exploding_gradient", "exploding_activation", "large_initial_loss"),
    sites=("(loss)", "(data)", "loader", "criterion"),
)
def masks_read_as_png(attach, fixed):
    """Masks of 0 and 255."""
    dataset = CellDataset(lambda m: m / 255 if fixed else m)
    train, val = torch.utils.data.random_split(dataset, [200, 60])
    net = SmallUNet()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, weight_decay=1e-8)
    criterion = nn.BCEWithLogitsLoss()
    session = attach(net, optimizer)
    for epoch in range(12):
        net.train()
        epoch_loss = 0.0
        for batch in DataLoader(train, batch_size=20, shuffle=True):
            masks_pred = net(batch["image"])
            loss = criterion(masks_pred, batch["mask"])
            epoch_loss += loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        session.log(train_loss=epoch_loss / 10)
    net.eval()
    batch = next(iter(DataLoader(val, batch_size=60)))
    with torch.no_grad():
        pred, true = (net(batch["image"]).sigmoid() > 0.5).float(), (batch["mask"] > 0.5).float()
    return 1 - float(2 * (pred * true).sum() / (pred.sum() + true.sum() + 1e-6))


class PixelVAE(nn.Module):
    """As in many tutorials."""

    def __init__(self, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU())
        self.fc_mu = nn.Linear(96, latent)
        self.fc_var = nn.Linear(96, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x):
        h = self.encoder(x)
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        z = mu + torch.exp(log_var / 2) * torch.randn_like(mu)
        return self.decoder(z), mu, log_var


@fault(
    "label_out_of_range",
    area="vae",
    source="https://github.com/Lightning-Universe/lightning-bolts/issues/177",
    cause="Pictures normalised to -1..1 are the targets of a binary cross-entropy, which needs 0..1.",
    words=(r"target.*(negative|outside|below|range)", r"-1", r"cross.?entropy.*(0 and 1|0\.\.1|range)"),
    also=("output_range_mismatch", "target_scale"),
    cascade=("loss_divergence", "saturated_activation", "exploding_gradient", "exploding_activation"),
    sites=("(loss)", "(data)", "decoder"),
)
def vae_of_normalised_pictures(attach, fixed):
    """Normalize((0.5,), (0.5,)) and then BCE."""
    xtr, _, xte, _ = digits()
    transform = (lambda img: img) if fixed else (lambda img: (img - 0.5) / 0.5)
    vae = PixelVAE()
    opt = torch.optim.Adam(vae.parameters(), lr=1e-3)
    session = attach(vae, opt)
    for step, (img,) in enumerate(batches(xtr, size=64, epochs=25)):
        img = transform(img)
        x_hat, mu, log_var = vae(img)
        recon = F.binary_cross_entropy_with_logits(x_hat, img.flatten(1), reduction="none").sum(1)
        kl = (-0.5 * (1 + log_var - mu**2 - log_var.exp())).sum(1)
        elbo = (kl + recon).mean()
        opt.zero_grad()
        elbo.backward()
        opt.step()
        if step % 10 == 0:
            session.log(elbo=elbo, kl=kl.mean(), recon_loss=recon.mean())
    with torch.no_grad():
        return float(F.mse_loss(vae(transform(xte))[0].sigmoid(), xte.flatten(1)))


class WordGRU(nn.Module):
    """A small language model."""

    def __init__(self, vocab, width=48):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, vocab)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.wte(input_ids))[0])


def countdowns(count, eos, pad, longest=9):
    """Return answers such as 5 4 3 2 1 <eos> <pad> ..., and their labels with padding masked by the collator."""
    rows = []
    for _ in range(count):
        n = int(torch.randint(3, longest + 1, ()))
        row = [*range(n, 0, -1), eos]
        rows.append(row + [pad] * (longest + 3 - len(row)))
    input_ids = torch.tensor(rows)
    labels = input_ids.clone()
    labels[labels == pad] = -100
    return input_ids, labels


@fault(
    "end_of_text_masked",
    area="language",
    source="https://github.com/huggingface/trl/issues/976",
    cause="The padding token is the end-of-text token, so the collator masks the end of every answer and it is never learned.",
    words=(
        r"end.?of.?(text|sequence|sentence)",
        r"\beos\b",
        r"pad.*(token|label).*(same|equal|masked)",
        r"never (a )?target",
    ),
    also=(),
    cascade=("unused_parameters", "padding_dominates"),
    sites=("(data)", "(loss)", "collator"),
)
def pad_token_is_the_eos_token(attach, fixed):
    """tokenizer.pad_token = tokenizer.eos_token."""
    eos_token_id = 10
    pad_token_id = 11 if fixed else eos_token_id
    input_ids, labels = countdowns(600, eos_token_id, pad_token_id)
    model = WordGRU(12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    session = attach(model, optimizer)
    for ids, target in batches(input_ids, labels, size=50, epochs=10):
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 12), target[:, 1:].reshape(-1), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
    ran_on = 0
    for n in range(3, 10):
        ids = torch.tensor([[n]])
        with torch.no_grad():
            for _ in range(12):
                ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
        ran_on += ids[0, n].item() != eos_token_id
    return ran_on / 7


class SiameseNetwork(nn.Module):
    """Two pictures, one encoder."""

    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(12 * 16, 48), nn.ReLU(), nn.Linear(48, 8))

    def forward_once(self, x):
        return self.fc(self.cnn(x))

    def forward(self, a, b):
        return self.forward_once(a), self.forward_once(b)


class ContrastiveLoss(nn.Module):
    """Hadsell, Chopra and LeCun: 0 for similar pairs, 1 for dissimilar ones."""

    def __init__(self, margin=2.0):
        super().__init__()
        self.margin = margin

    def forward(self, output1, output2, label):
        distance = F.pairwise_distance(output1, output2)
        return torch.mean((1 - label) * distance.pow(2) + label * torch.clamp(self.margin - distance, min=0.0).pow(2))


@fault(
    "pair_label_inverted",
    area="contrastive",
    source="https://github.com/keras-team/keras/issues/16935",
    cause="Similar pairs are marked 1 where the contrastive loss expects 0, so like pictures are pushed apart and unlike ones together.",
    words=(r"(pair|label).*(invert|flip|swap|opposite|reversed)", r"similar.*(apart|pushed)", r"sign"),
    also=("loss_sign_flipped",),
    cascade=("loss_plateau", "not_learning", "underfitting"),
    sites=("(loss)", "criterion", "(data)"),
)
def marks_similar_pairs_with_one(attach, fixed):
    """The loss means 0 = similar; the loader gives 1."""
    xtr, ytr, xte, yte = digits()
    net = SiameseNetwork()
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    session = attach(net, optimizer)
    for step in range(350):
        i = torch.randint(0, len(xtr), (64,))
        same = torch.rand(64) < 0.5
        j = torch.stack(
            [
                (k := torch.nonzero((ytr == ytr[n]) == s).flatten())[torch.randint(0, len(k), ())]
                for n, s in zip(i, same)
            ]
        )
        label = (~same if fixed else same).float()
        output1, output2 = net(xtr[i], xtr[j])
        loss_contrastive = criterion(output1, output2, label)
        optimizer.zero_grad()
        loss_contrastive.backward()
        optimizer.step()
        session.log(loss=loss_contrastive)
    with torch.no_grad():
        distance = torch.cdist(net.forward_once(xte), net.forward_once(xtr))
    return float((ytr[distance.argmin(1)] != yte).float().mean())


class GaussianActor(nn.Module):
    """A mean and a deviation for each state."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 32), nn.Tanh())
        self.mean_head = nn.Linear(32, 1)
        self.log_std = nn.Parameter(torch.full((1,), -0.5))

    def forward(self, state):
        return Normal(self.mean_head(self.body(state)), self.log_std.exp())


@fault(
    "sample_not_detached",
    area="rl",
    source="https://github.com/pytorch/pytorch/issues/10943",
    cause="Actions come from rsample, so the gradient also flows through the sample and cancels: the mean gets no gradient from log_prob.",
    words=(r"rsample", r"(sample|action).*(detach|gradient)", r"cancel"),
    also=("target_not_detached",),
    cascade=("not_learning", "loss_plateau", "vanishing_gradient", "unused_parameters"),
    sites=("mean_head", "body", "(loss)"),
)
def policy_gradient_through_rsample(attach, fixed):
    """rsample in place of sample."""
    actor = GaussianActor()
    optimizer = torch.optim.Adam(actor.parameters(), lr=5e-3)
    session = attach(actor, optimizer)
    for _episode in range(700):
        state = torch.randn(64, 3)
        pi = actor(state)
        action = pi.sample() if fixed else pi.rsample()
        best = (state[:, :1] - 0.5 * state[:, 1:2]).clamp(-2, 2)
        reward = -(action - best).pow(2).detach()
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        loss = -(pi.log_prob(action) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, reward=reward.mean())
    with torch.no_grad():
        state = torch.randn(500, 3)
        best = (state[:, :1] - 0.5 * state[:, 1:2]).clamp(-2, 2)
        return float((actor(state).mean - best).pow(2).mean())


@fault(
    "credit_averaged",
    area="rl",
    source="https://github.com/Farama-Foundation/Gymnasium/issues/1336",
    cause="The log-probabilities of an episode are averaged before they are multiplied by the returns, so every action gets the same credit.",
    words=(r"mean.*log.?prob", r"log.?prob.*(mean|averag|before)", r"credit", r"same (return|weight)"),
    also=("wrong_loss_reduction",),
    cascade=("not_learning", "loss_plateau", "loss_oscillation"),
    sites=("(loss)",),
)
def averages_log_probs_of_the_episode(attach, fixed):
    """-(mean of log_probs) * returns, where each log_prob belongs to its return."""
    policy_network = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(policy_network.parameters(), lr=4e-3)
    session = attach(policy_network, optimizer)
    rule = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
    gamma = 0.3
    for _episode in range(600):
        states = torch.randn(40, 6)
        dist = Categorical(logits=policy_network(states))
        actions = dist.sample()
        rewards = ((states @ rule).argmax(1) == actions).float().tolist()
        probs = list(dist.log_prob(actions))
        running_g, gs = 0.0, []
        for r in rewards[::-1]:
            running_g = r + gamma * running_g
            gs.insert(0, running_g)
        deltas = torch.tensor(gs)
        deltas = (deltas - deltas.mean()) / (deltas.std() + 1e-6) + deltas.mean() * 0.1
        log_probs = torch.stack(probs)
        log_prob = log_probs if fixed else log_probs.mean()
        loss = -torch.sum(log_prob * deltas)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss, reward=sum(rewards))
    states = torch.randn(1000, 6)
    return wrong(policy_network, states, (states @ rule).argmax(1))


@fault(
    "index_for_value",
    area="rl",
    source="https://github.com/AI4Finance-Foundation/ElegantRL/pull/488",
    cause="The bootstrap target uses argmax, the number of the best action, in place of max, its value.",
    words=(r"argmax", r"index", r"action.*(number|id).*value", r"integer"),
    also=(),
    cascade=("target_scale", "loss_plateau", "loss_oscillation", "not_learning", "terminal_bootstrapped"),
    sites=("(loss)", "target"),
)
def bootstraps_from_argmax(attach, fixed):
    """argmax(dim=1) where max(dim=1)[0] was meant."""
    env = Walk()
    act = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    cri_target = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    cri_target.load_state_dict(act.state_dict())
    optimizer = torch.optim.Adam(act.parameters(), lr=3e-3)
    session = attach(act, optimizer)
    memory, state = [], env.reset()
    for step in range(1500):
        explore = torch.rand(()) < max(0.15, 1 - step / 600)
        action = int(torch.randint(0, 2, ())) if explore else int(act(state).argmax())
        following, reward, done = env.step(action)
        memory.append((state, action, reward, following, float(done)))
        state = env.reset() if done else following
        if len(memory) < 100 or step % 2:
            continue
        pick = [memory[k] for k in torch.randint(max(0, len(memory) - 1000), len(memory), (48,))]
        s, a, r, s2, d = zip(*pick)
        s, s2 = torch.stack(s), torch.stack(s2)
        with torch.no_grad():
            next_q = cri_target(s2)
            next_q = next_q.max(dim=1)[0] if fixed else next_q.argmax(dim=1)
            q_label = torch.tensor(r) + 0.95 * (1 - torch.tensor(d)) * next_q
        q_value = act(s).gather(1, torch.tensor(a)[:, None]).squeeze(1)
        obj_critic = F.smooth_l1_loss(q_value, q_label)
        optimizer.zero_grad()
        obj_critic.backward()
        optimizer.step()
        session.log(obj_critic=obj_critic)
        with torch.no_grad():
            for t, p in zip(cri_target.parameters(), act.parameters()):
                t.mul_(0.95).add_(p, alpha=0.05)
    with torch.no_grad():
        truth = torch.tensor([0.95 ** (7 - n - 1) - 0.02 * sum(0.95**k for k in range(7 - n - 1)) for n in range(1, 7)])
        return float((act(torch.eye(8)[1:7]).max(1)[0] - truth).abs().mean())


@fault(
    "loss_sign_flipped",
    area="gan",
    source="https://github.com/ptran1203/pytorch-animeGAN/issues/17",
    cause="The generator's loss compares the discriminator's verdict on its pictures with the label of fakes, so it learns to be found out.",
    words=(r"fake.*label|label.*fake", r"generator.*(wrong|fake|zeros)", r"sign|wrong direction|invert"),
    also=("pair_label_inverted",),
    cascade=("loss_plateau", "vanishing_gradient", "saturated_activation", "not_learning", "constant_output"),
    sites=("(loss)", "generator"),
)
def generator_wants_to_be_found_out(attach, fixed):
    """zeros_like where ones_like belongs."""
    data = moons()
    generator = nn.Sequential(
        nn.Linear(4, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 2)
    )
    discriminator = nn.Sequential(
        nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)
    )
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    session = attach(both, [opt_g, opt_d])
    adversarial = F.binary_cross_entropy_with_logits
    for (real,) in batches(data, size=100, epochs=45):
        fake = generator(torch.randn(100, 4))
        real_pred, fake_pred = discriminator(real), discriminator(fake.detach())
        loss_d = adversarial(real_pred, torch.ones_like(real_pred)) + adversarial(
            fake_pred, torch.zeros_like(fake_pred)
        )
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        pred = discriminator(fake)
        loss_g = adversarial(pred, torch.ones_like(pred) if fixed else torch.zeros_like(pred))
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        session.log(loss_d=loss_d, loss_g=loss_g)
    with torch.no_grad():
        return apart(generator(torch.randn(500, 4)), data[:500])


class GradReverse(torch.autograd.Function):
    """Pass on, and turn the gradient round."""

    @staticmethod
    def forward(ctx, x, constant):
        ctx.constant = constant
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.neg() * ctx.constant, None


@fault(
    "loss_sign_flipped",
    area="domain adaptation",
    source="https://github.com/CuthbertCai/pytorch_DANN/issues/10",
    cause="The constant of the gradient reversal is negative although the layer negates already: two minus signs, no reversal.",
    words=(r"revers", r"sign", r"negat.*(twice|already)", r"double minus"),
    also=(),
    cascade=("aux_loss_dominates",),
    sites=("(loss)", "domain_classifier", "extractor"),
)
def reverses_the_gradient_twice(attach, fixed):
    """gamma = -10 and neg() in the layer."""
    made = torch.Generator().manual_seed(9)
    mix = torch.randn(12, 12, generator=made)

    def draw(n, target):
        y = torch.randint(0, 3, (n,))
        signal = F.one_hot(y, 3).float().repeat(1, 2) * 2 + 0.6 * torch.randn(n, 6)
        style = torch.randn(n, 6) + (2.0 if target else -2.0)
        return torch.cat([signal, style], 1) @ mix / 4, y

    extractor = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
    class_classifier = nn.Linear(8, 3)
    domain_classifier = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    net = nn.ModuleDict(
        {"extractor": extractor, "class_classifier": class_classifier, "domain_classifier": domain_classifier}
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    session = attach(net, optimizer)
    gamma, steps, found = 10 if fixed else -10, 600, []
    for step in range(steps):
        constant = 2.0 / (1.0 + np.exp(-gamma * step / steps)) - 1
        (xs, ys), (xt, _) = draw(64, False), draw(64, True)
        features = extractor(torch.cat([xs, xt]))
        class_loss = F.cross_entropy(class_classifier(features[:64]), ys)
        domain = torch.cat([torch.zeros(64), torch.ones(64)]).long()
        verdict = domain_classifier(GradReverse.apply(features, constant))
        domain_loss = F.cross_entropy(verdict, domain)
        found.append(float((verdict.argmax(1) == domain).float().mean()))
        loss = class_loss + domain_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(class_loss=class_loss, domain_loss=domain_loss)
    return sum(found[-150:]) / 150 - 0.5


class Crosscoder(nn.Module):
    """An autoencoder with a classifier beside it."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.decode = nn.Linear(48, 64)
        self.probe = nn.Linear(48, 10)

    def forward(self, x):
        h = self.encode(x)
        return self.decode(h), self.probe(h)


@fault(
    "unused_parameters",
    area="multi-task",
    source="https://github.com/oclivegriffin/crosscode/pull/3",
    cause="The helper adds both terms but returns the reconstruction only, so the auxiliary loss never reaches backward.",
    words=(r"(aux|probe|second).*(no|never|without).*gradient", r"(never|not).*(backward|trained|used)", r"returned"),
    also=("graph_break_detach", "frozen_by_mistake"),
    cascade=("not_learning", "loss_plateau"),
    sites=("probe", "(loss)"),
)
def returns_one_of_two_losses(attach, fixed):
    """loss is logged, reconstruction_loss is returned."""
    xtr, ytr, xte, yte = digits()
    model = Crosscoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)

    def calculate_loss_and_log(x, y):
        recon, logits = model(x)
        reconstruction_loss = F.mse_loss(recon, x)
        aux_loss = F.cross_entropy(logits, y)
        loss = reconstruction_loss + 0.1 * aux_loss
        session.log(loss=loss, reconstruction_loss=reconstruction_loss, aux_loss=aux_loss)
        return loss if fixed else reconstruction_loss

    for x, y in batches(xtr.flatten(1), ytr, size=50, epochs=12):
        optimizer.zero_grad()
        calculate_loss_and_log(x, y).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(xte.flatten(1))[1].argmax(1) != yte).float().mean())


@fault(
    "label_shuffle_mismatch",
    area="vision",
    source="https://github.com/xudonmao/VMT/issues/1",
    cause="Mixup shuffles pictures and labels by two different permutations, so the mixed label belongs to another picture.",
    words=(r"permut|shuffl", r"label.*(other|different|mismatch)", r"pair"),
    also=(),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("(data)", "(loss)"),
)
def mixup_with_two_shuffles(attach, fixed):
    """Two calls of randperm."""
    xtr, ytr, xte, yte = digits()
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    session = attach(net, optimizer)
    train_loader = DataLoader(
        TensorDataset(xtr, F.one_hot(ytr, 10).float()), batch_size=64, shuffle=True, drop_last=True
    )
    for _epoch in range(9):
        for x, y in train_loader:
            lam = np.random.beta(1.0, 1.0)
            index = torch.randperm(len(x))
            mixed_x = lam * x + (1 - lam) * x[index]
            mixed_y = lam * y + (1 - lam) * y[index if fixed else torch.randperm(len(y))]
            loss = -(mixed_y * F.log_softmax(net(mixed_x), 1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    with torch.no_grad():
        return float(F.cross_entropy(net(xte), yte))


@fault(
    "nan_in_loss",
    area="rl",
    source="https://github.com/ray-project/ray/issues/846",
    cause="Advantages are divided by their standard deviation, which is zero when all rewards of a batch are equal: 0/0.",
    words=(r"nan", r"standard deviation|std", r"zero.*(divi|deviation)", r"divi.*zero"),
    also=("nan_in_data", "nan_backward"),
    cascade=("nan_in_weights", "nan_forward", "nan_in_optimizer", "loss_divergence"),
    sites=("(loss)", "(data)"),
    onset=2,
)
def advantage_over_a_deviation_of_zero(attach, fixed):
    """(adv - mean) / std, and a batch without any reward."""
    policy = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    session = attach(policy, optimizer)
    eps = 1e-8 if fixed else 0.0
    goal = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
    for _iteration in range(500):
        obs = torch.randn(12, 5)
        dist = Categorical(logits=policy(obs))
        actions = dist.sample()
        rewards = ((obs @ goal).argmax(1) == actions).float()
        advantages = (rewards - rewards.mean()) / (rewards.std() + eps)
        loss = -(dist.log_prob(actions) * advantages).mean()
        session.log(policy_loss=loss, mean_reward=rewards.mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not all(bool(p.isfinite().all()) for p in policy.parameters()):
            break
    obs = torch.randn(1000, 5)
    return wrong(policy, obs, (obs @ goal).argmax(1))


class AudioEncoder(nn.Module):
    """A spectrogram to a point."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        return self.net(x.flatten(1))


@fault(
    "batch_axis_mixed",
    area="contrastive",
    source="https://github.com/alireza-nasiri/SoundCLR/issues/4",
    cause="F.normalize is called with dim=0, so embeddings are normalised over the batch instead of each to length one.",
    words=(r"normali[sz].*(batch|dim)", r"dim=0", r"batch.*(axis|dimension)"),
    also=("wrong_dim_softmax",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("(loss)", "(model)"),
)
def normalises_embeddings_over_the_batch(attach, fixed):
    """F.normalize(y_rep, dim=0)."""
    xtr, ytr, xte, yte = digits()
    model = AudioEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    for x, y in batches(xtr, ytr, size=200, epochs=12):
        y_rep = F.normalize(model(x), dim=1 if fixed else 0)
        logits = y_rep @ y_rep.T / 0.5
        itself = torch.eye(len(x), dtype=torch.bool)
        log_prob = logits - torch.logsumexp(logits.masked_fill(itself, -1e9), 1, keepdim=True)
        positive = (y[:, None] == y[None, :]) & ~itself
        loss = -(log_prob * positive).sum(1).div(positive.sum(1).clamp(min=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        a, b = F.normalize(model(xtr), dim=1), F.normalize(model(xte), dim=1)
        centre = F.normalize(torch.stack([a[ytr == c].mean(0) for c in range(10)]), dim=1)
        return float(((b @ centre.T / 0.1).softmax(1).gather(1, yte[:, None])).neg().add(1).mean())
