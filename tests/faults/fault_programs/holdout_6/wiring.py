"""Sixth hold-out: data and the wiring of models."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from fault_programs.holdout_6.about import fault
from fault_programs.holdout_6.materials import batches, digits, moons, wrong


class ClassifierModule(nn.Module):
    """Branches of growing dilation, summed, as in DeepLab."""

    def __init__(self, early, dilations=(1, 2, 4, 8), width=12):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        self.conv1d_list = nn.ModuleList([nn.Conv1d(width, 1, 3, padding=d, dilation=d) for d in dilations])
        self.early = early

    def forward(self, x):
        x = self.stem(x)
        out = self.conv1d_list[0](x)
        for i in range(len(self.conv1d_list) - 1):
            out = out + self.conv1d_list[i + 1](x)
            if self.early:
                return out
        return out


@fault(
    "unused_parameters",
    area="segmentation",
    source="https://github.com/speedinghzl/Pytorch-Deeplab/issues/4",
    cause="`return out` stands inside the loop over the branches, so all but two of them are never used.",
    words=(r"(never|not|un).?used", r"no gradient", r"return.*loop"),
    also=("frozen_by_mistake",),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("conv1d_list", "conv1d_list.2", "conv1d_list.3", "(model)"),
)
def returns_within_the_loop(attach, fixed):
    """The return is indented once too often."""
    model = ClassifierModule(early=not fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session = attach(model, optimizer)
    for _i_iter in range(300):
        x = torch.randn(16, 1, 48)
        y = torch.roll(x, 8, 2) + 0.5 * torch.roll(x, -4, 2) - 0.3 * x
        loss = F.mse_loss(model(x)[..., 8:-8], y[..., 8:-8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    with torch.no_grad():
        return float(F.mse_loss(model(x)[..., 8:-8], y[..., 8:-8]))


class MultiHeadAttention(nn.Module):
    """Heads over fields, as in AutoInt."""

    def __init__(self, dim, num_heads, split):
        super().__init__()
        self.W_q, self.W_k, self.W_v = (nn.Linear(dim, dim) for _ in range(3))
        self.num_heads, self.head_dim, self.split = num_heads, dim // num_heads, split

    def forward(self, x):
        b, t, d = x.shape
        query, key, value = (
            self.split(w(x), b, t, self.num_heads, self.head_dim) for w in (self.W_q, self.W_k, self.W_v)
        )
        score = torch.matmul(query, key.transpose(-1, -2)) / self.head_dim**0.5
        out = torch.matmul(score.softmax(-1), value)
        return x + out.transpose(1, 2).reshape(b, t, d)


def split_heads(x, b, t, heads, dim):
    return x.view(b, t, heads, dim).transpose(1, 2)


def split_directly(x, b, t, heads, dim):
    return x.view(b, heads, t, dim)


class FieldNet(nn.Module):
    """Embeds fields of a key and a value, attends, and answers for each field."""

    def __init__(self, split, dim=32):
        super().__init__()
        self.key, self.value = nn.Embedding(8, dim), nn.Embedding(4, dim)
        self.attention = MultiHeadAttention(dim, 4, split)
        self.out = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, key, value):
        return self.out(self.attention(self.key(key) + self.value(value)))


@fault(
    "heads_scrambled",
    area="recommendation",
    source="https://github.com/reczoo/FuxiCTR/issues/30",
    cause="Heads are split by view alone, without the transpose, so a head holds pieces of several fields instead of a part of each.",
    words=(r"transpose|permute", r"view|reshape", r"head.*(mix|scrambl|split)"),
    also=(),
    cascade=("underfitting", "loss_plateau", "not_learning", "overfitting", "batch_axis_mixed"),
    sites=("attention", "(model)"),
)
def splits_heads_by_view(attach, fixed):
    """view(batch, heads, length, dim) on (batch, length, heads * dim)."""
    model = FieldNet(split_heads if fixed else split_directly)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)

    def draw(n):
        key = torch.rand(n, 8).argsort(1)
        value = torch.randint(0, 4, (n, 8))
        following = value.gather(1, key.argsort(1)).roll(-1, 1)
        return key, value, following.gather(1, key)

    for _step in range(400):
        key, value, answer = draw(48)
        loss = F.cross_entropy(model(key, value).flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    key, value, answer = draw(300)
    with torch.no_grad():
        return float((model(key, value).argmax(-1) != answer).float().mean())


class TokenMixer(nn.Module):
    """Tokens of a picture through nn.MultiheadAttention, which wants (length, batch, width)."""

    def __init__(self, turn, width=24):
        super().__init__()
        self.patch = nn.Linear(8, width)
        self.place = nn.Parameter(0.2 * torch.randn(8, width))
        self.mhsa = nn.MultiheadAttention(width, 4)
        self.head = nn.Linear(width, 10)
        self.turn = turn

    def forward(self, x):
        y = self.patch(x.squeeze(1)) + self.place
        b, t, c = y.shape
        y = self.turn(y, t, b, c)
        out, _ = self.mhsa(y, y, y)
        y = self.turn(out, b, t, c)
        return self.head(F.relu(y).mean(1))


@fault(
    "batch_axis_mixed",
    area="vision",
    source="https://github.com/rish-16/tokenlearner-pytorch/issues/1",
    cause="view(length, batch, width) is used in place of transpose, so tokens of different pictures are mixed.",
    words=(r"transpose|permute", r"view|reshape", r"(samples?|pictures?).*(mix|depend|influence)", r"batch"),
    also=(),
    cascade=("underfitting", "loss_plateau", "not_learning", "overfitting"),
    sites=("mhsa", "(model)"),
)
def views_tokens_into_sequences(attach, fixed):
    """y.view(8, 512, 3) where y.transpose(0, 1) was needed."""
    xtr, ytr, xte, yte = digits()
    model = TokenMixer((lambda y, *_: y.transpose(0, 1)) if fixed else (lambda y, *shape: y.reshape(*shape)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for x, y in batches(xtr, ytr, size=40, epochs=9):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    order = torch.randperm(len(xte))
    return wrong(model, xte[order], yte[order])


def backbone(width=24):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
    )


class Finetuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = backbone()
        self.classifier = nn.Linear(32, 10)

    def forward(self, x):
        return self.classifier(self.features(x))


@fault(
    "checkpoint_not_loaded",
    area="fine-tuning",
    source="https://github.com/pytorch/examples/issues/1029",
    cause="The keys of the checkpoint begin with `model.`, and strict=False hides that not one of them was loaded.",
    words=(r"checkpoint|pretrained", r"strict", r"(not|nothing|none).*load", r"key"),
    also=("resume_incomplete",),
    cascade=("underfitting", "overfitting", "not_learning", "loss_plateau"),
    sites=("features", "(model)"),
)
def loads_nothing_from_the_checkpoint(attach, fixed):
    """load_state_dict(..., strict=False) of a Lightning checkpoint."""
    xtr, ytr, xte, yte = digits()
    pretrained = Finetuned()
    opt = torch.optim.Adam(pretrained.parameters(), lr=4e-3)
    for x, y in batches(xtr[:1200], ytr[:1200], size=50, epochs=7):
        opt.zero_grad()
        F.cross_entropy(pretrained(x), y).backward()
        opt.step()
    state_dict = {"model." + k: v.clone() for k, v in pretrained.state_dict().items() if k.startswith("features")}

    model = Finetuned()
    model.load_state_dict(
        {k.removeprefix("model."): v for k, v in state_dict.items()} if fixed else state_dict, strict=False
    )
    for p in model.features.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(model.classifier.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for x, y in batches(xtr[1200:], ytr[1200:], size=20, epochs=40):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return wrong(model, xte, yte)


class RamDataset(Dataset):
    """All pictures in memory; the transform of old times."""

    def __init__(self, x, y, normalize):
        self.x, self.y, self.normalize = x, y, normalize

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.normalize(torch.from_numpy(self.x[i])), int(self.y[i])


def normalize_in_place(t):
    return t.sub_(4.9).div_(6.0)


def normalize(t):
    return t.sub(4.9).div(6.0)


@fault(
    "double_normalised",
    area="vision",
    source="https://github.com/pytorch/vision/issues/680",
    cause="The transform normalises in place on memory shared with the data set, so each epoch normalises what is normalised already.",
    words=(
        r"in.?place",
        r"normali[sz].*(again|twice|already|each epoch|more)",
        r"(data|input).*(drift|change|shrink).*epoch",
    ),
    also=("train_val_preproc_mismatch",),
    cascade=(
        "loss_plateau",
        "not_learning",
        "overfitting",
        "constant_feature",
        "loss_divergence",
        "vanishing_gradient",
    ),
    sites=("(data)", "loader"),
    onset=30,
)
def data_set_becomes_ever_more_normal(attach, fixed):
    """from_numpy shares memory, and Normalize works in place."""
    xtr, ytr, xte, yte = digits()
    images = (xtr * 16).squeeze(1).numpy().astype(np.float32).copy()
    train = RamDataset(images, ytr.numpy(), normalize if fixed else normalize_in_place)
    loader = DataLoader(train, batch_size=50, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    session = attach(model, optimizer)
    test = normalize(xte.squeeze(1) * 16)
    for epoch in range(8):
        model.train()
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        model.eval()
        with torch.no_grad():
            session.log(val_loss=F.cross_entropy(model(test), yte))
    return wrong(model, test, yte)


class Reader(nn.Module):
    """An LSTM cell in a loop."""

    def __init__(self, carry, hidden=24):
        super().__init__()
        self.cell = nn.LSTMCell(4, hidden)
        self.out = nn.Linear(hidden, 1)
        self.hidden, self.carry = hidden, carry

    def forward(self, seq):
        b = seq.size(1)
        h0, c0 = torch.zeros(b, self.hidden), torch.zeros(b, self.hidden)
        state = (h0, c0)
        for x_t in seq:
            h, c = self.cell(x_t, state)
            if self.carry:
                state = (h, c)
        return self.out(h)


@fault(
    "recurrence_cut",
    area="robotics",
    source="https://github.com/HiroIshida/mohou/pull/107",
    cause="The state that the cell returns is not passed to the next step: every step starts from zeros, so nothing is remembered.",
    words=(
        r"(hidden )?state.*(not|never).*(pass|carr|propagat|kept)",
        r"weight_hh",
        r"(every|each) step.*(zero|initial)",
        r"recurren",
    ),
    also=("unused_parameters",),
    cascade=("underfitting", "loss_plateau", "not_learning", "constant_output"),
    sites=("cell", "(model)"),
)
def cell_starts_anew_at_each_step(attach, fixed):
    """h, c = self.cell(x, (h0, c0)) in the loop."""
    model = Reader(carry=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = attach(model, optimizer)

    def draw(n):
        seq = torch.randn(7, n, 4)
        return seq, (seq[2, :, 0] + seq[4, :, 1] + 0.3 * seq[6, :, 2])[:, None]

    for _it in range(300):
        seq, target = draw(64)
        loss = F.mse_loss(model(seq), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    seq, target = draw(500)
    with torch.no_grad():
        return float(F.mse_loss(model(seq), target))


class Folder(Dataset):
    """A folder per class, as os.listdir gives them."""

    def __init__(self, x, y, names, listing):
        self.x, self.classes = x, listing
        self.labels = [self.classes.index(names[int(k)]) for k in y]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.labels[i]


@fault(
    "train_val_preproc_mismatch",
    area="vision",
    source="https://github.com/uzh-rpg/rpg_event_representation_learning/issues/2",
    cause="Classes are numbered in the order os.listdir gives the folders, which differs between the training and the validation folder.",
    words=(
        r"label.*(mapping|order|differ|different)",
        r"class.*(order|number|index).*(differ|train)",
        r"validation.*label",
    ),
    also=("label_shuffle_mismatch",),
    cascade=("overfitting", "loss_divergence"),
    sites=("(data)", "loader", "(validation)"),
)
def numbers_classes_by_listdir(attach, fixed):
    """self.classes = listdir(root), unsorted."""
    xtr, ytr, xte, yte = digits()
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    as_listed = (sorted, sorted) if fixed else (lambda n: n[3:] + n[:3], lambda n: n[::-1])
    train = Folder(xtr, ytr, names, as_listed[0](names))
    valid = Folder(xte, yte, names, as_listed[1](names))
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for _epoch in range(6):
        model.train()
        for events, labels in DataLoader(train, batch_size=32, shuffle=True):
            loss = F.cross_entropy(model(events), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(train_loss=loss)
        model.eval()
        right = total = 0.0
        with torch.no_grad():
            for events, labels in DataLoader(valid, batch_size=100):
                out = model(events)
                right += float((out.argmax(1) == labels).sum())
                total += float(F.cross_entropy(out, labels))
        session.log(val_loss=total / 4, val_accuracy=right / 400)
    return 1 - right / 400


class CheckpointedNet(nn.Module):
    """Saves memory in the encoder."""

    def __init__(self, prepare):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 6), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 10))
        self.prepare = prepare

    def forward(self, x):
        h = checkpoint(self.encoder, self.prepare(x), use_reentrant=True)
        return self.decoder(h)


@fault(
    "graph_break_detach",
    area="vision",
    source="https://github.com/pytorch/pytorch/issues/7617",
    cause="The checkpointed encoder gets an input that needs no gradient, so reentrant checkpointing returns a result without a graph.",
    words=(r"checkpoint", r"(no|without|lost|never).*(gradient|graph)", r"requires_grad", r"detach|cut"),
    also=("frozen_by_mistake", "unused_parameters"),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("encoder", "encoder.1", "encoder.3", "(model)"),
)
def checkpoints_the_first_block(attach, fixed):
    """None of the inputs have requires_grad=True."""
    xtr, ytr, xte, yte = digits()
    model = CheckpointedNet((lambda x: x.requires_grad_()) if fixed else (lambda x: x))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    for x, y in batches(xtr, ytr, size=50, epochs=9):
        loss = F.cross_entropy(model(x.clone()), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return wrong(model, xte.clone(), yte)


@fault(
    "graph_break_detach",
    area="gan",
    source="https://github.com/igul222/improved_wgan_training/issues/18",
    cause="The gradient penalty takes torch.autograd.grad without create_graph, so the penalty has no gradient and the critic is not held.",
    words=(r"create_graph", r"penalty", r"(no|without|lost).*(gradient|graph)", r"second.?order"),
    also=("unused_parameters",),
    cascade=("loss_divergence", "exploding_activation", "exploding_gradient", "lr_too_high"),
    sites=("critic", "(loss)"),
)
def penalty_that_is_only_a_number(attach, fixed):
    """retain_graph=True where create_graph=True is meant."""
    data = moons()
    netG = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    netD = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.9))
    session = attach(nn.ModuleDict({"critic": netD, "generator": netG}), [optD, optG])
    slope = torch.zeros(())
    for step in range(450):
        real = data[torch.randint(0, len(data), (64,))]
        fake = netG(torch.randn(64, 2)).detach()
        mix = torch.rand(64, 1)
        inter = (mix * real + (1 - mix) * fake).requires_grad_(True)
        grads = torch.autograd.grad(netD(inter).sum(), inter, create_graph=fixed, retain_graph=True)[0]
        slope = grads.norm(2, dim=1)
        gradient_penalty = 10 * ((slope - 1) ** 2).mean()
        D_cost = netD(fake).mean() - netD(real).mean() + gradient_penalty
        optD.zero_grad()
        D_cost.backward()
        optD.step()
        if step % 3 == 2:
            G_cost = -netD(netG(torch.randn(64, 2))).mean()
            optG.zero_grad()
            G_cost.backward()
            optG.step()
            session.log(D_cost=D_cost, G_cost=G_cost)
    return float((slope - 1).abs().mean())


class RecordingProbe:
    """Keeps what layers put out."""

    def __init__(self, net, layers, keep):
        self.found, self.keep = [], keep
        for name in layers:
            net.get_submodule(name).register_forward_hook(self.hook)

    def hook(self, module, inputs, output):
        self.found.append(self.keep(output))

    def clear(self):
        found, self.found = self.found, []
        return found


@fault(
    "graph_break_detach",
    area="generative",
    source="https://github.com/myscience/open-genie/issues/6",
    cause="The probe detaches the features it records, so the perceptual loss gives the model no gradient.",
    words=(r"detach", r"(no|without|lost|never).*gradient", r"percept|feature"),
    also=(),
    cascade=("underfitting", "loss_plateau", "not_learning"),
    sites=("(loss)", "(model)", "model"),
)
def perceptual_loss_of_detached_features(attach, fixed):
    """Hooks that store output.detach()."""
    xtr, ytr, xte, _ = digits()
    judge = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))
    opt = torch.optim.Adam(judge.parameters(), lr=3e-3)
    for x, y in batches(xtr, ytr, size=64, epochs=5):
        opt.zero_grad()
        F.cross_entropy(judge(x), y).backward()
        opt.step()
    judge.requires_grad_(False)
    probe = RecordingProbe(judge, ["2", "4"], (lambda o: o) if fixed else (lambda o: o.detach()))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 64), nn.Unflatten(1, (1, 8, 8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    def perceptual(rec, inp):
        judge(inp), judge(rec)
        a1, a2, b1, b2 = probe.clear()
        return F.mse_loss(b1, a1) + F.mse_loss(b2, a2)

    for (x,) in batches(xtr, size=64, epochs=12):
        rec = model(x)
        rec_loss = F.l1_loss(rec.mean(dim=(2, 3)), x.mean(dim=(2, 3)))
        loss = 0.1 * rec_loss + perceptual(rec, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(rec_loss=rec_loss, loss=loss)
    with torch.no_grad():
        return float(perceptual(model(xte), xte))


class SampleList(Dataset):
    """Keeps two lists, of pictures and of labels."""

    def __init__(self, x, y, length):
        self.data_index = [list(x), list(y)]
        self.length = length

    def __len__(self):
        return self.length(self.data_index)

    def __getitem__(self, idx):
        return self.data_index[0][idx], self.data_index[1][idx]


@fault(
    "sampler_draws_few",
    area="vision",
    source="https://github.com/xavysp/DexiNed/issues/98",
    cause="__len__ returns the length of the pair of lists, 2, so the loader sees only the first two pictures.",
    words=(r"(few|two|only|same).*(sample|picture|row|item)", r"__len__|length", r"same (batch|samples)"),
    also=("same_batch_every_step",),
    cascade=("not_learning", "overfitting"),
    sites=("(data)", "loader"),
)
def length_of_a_pair_of_lists(attach, fixed):
    """len(self.data_index) where len(self.data_index[0]) was meant."""
    xtr, ytr, xte, yte = digits()
    dataset = SampleList(xtr, ytr, (lambda index: len(index[0])) if fixed else len)
    loader = DataLoader(dataset, batch_size=40, shuffle=True)
    model = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    step = 0
    while step < 150:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            step += 1
    return wrong(model, xte, yte)


@fault(
    "integer_wraparound",
    area="recognition",
    source="https://github.com/facebookresearch/detectron2/pull/5386",
    cause="Class numbers up to 399 are stored as uint8, so 256 becomes 0 and classes are merged.",
    words=(r"uint8|\bbyte", r"wrap", r"overflow", r"25[56]"),
    also=("label_shuffle_mismatch",),
    cascade=("underfitting", "loss_plateau"),
    sites=("(data)", "loader"),
)
def more_classes_than_a_byte_holds(attach, fixed):
    """labels.astype(np.uint8)."""
    made = np.random.RandomState(11)
    centre = made.randn(400, 24).astype(np.float32)
    category = made.randint(0, 400, 4000)
    feature = centre[category] + 0.35 * made.randn(4000, 24).astype(np.float32)
    gt = category.astype(np.int64 if fixed else np.uint8)
    x, y = torch.from_numpy(feature), torch.from_numpy(gt).long()
    head = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 400))
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    session = attach(head, optimizer)
    for xb, yb in batches(x[:3600], y[:3600], size=100, epochs=10):
        loss = F.cross_entropy(head(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
    return wrong(head, x[3600:], torch.from_numpy(category[3600:]))


@fault(
    "aliased_buffer",
    area="rl",
    source="https://github.com/Itomigna2/Muesli-lunarlander/issues/1",
    cause="One list is appended to the replay buffer again and again and cleared in between, so all stored episodes are the latest one.",
    words=(r"(same|latest|one) (list|episode|object)", r"alias|reference|copy", r"replay", r"same (batch|sample)"),
    also=("same_batch_every_step", "sampler_draws_few"),
    cascade=("loss_oscillation", "loss_spike", "not_learning", "overfitting"),
    sites=("(data)", "buffer"),
)
def replay_of_the_latest_episode_only(attach, fixed):
    """episode.clear() after replay.append(episode)."""
    net = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    session = attach(net, optimizer)

    def value(s):
        return torch.sin(2 * s[..., :1]) * s[..., 1:2] + s[..., 2:3]

    replay, episode = [], []
    for _episode in range(120):
        level = torch.randn(6)
        for _t in range(20):
            s = level + 0.2 * torch.randn(6)
            episode.append((s, value(s) + 0.1 * torch.randn(1)))
        replay.append(episode)
        for _update in range(4):
            rows = [replay[k][j] for k, j in zip(torch.randint(0, len(replay), (48,)), torch.randint(0, 20, (48,)))]
            s, v = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
            loss = F.mse_loss(net(s), v)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(value_loss=loss)
        if fixed:
            episode = []
        else:
            episode.clear()
    s = torch.randn(600, 6)
    with torch.no_grad():
        return float(F.mse_loss(net(s), value(s)))
