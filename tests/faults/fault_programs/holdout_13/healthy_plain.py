"""Thirteenth hold-out: healthy programs as one finds them in examples and tutorials."""

from __future__ import annotations

import copy
import math
import random
from collections import deque, namedtuple

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_13.about import healthy
from fault_programs.holdout_13.material import Pond, apart, blots, digits, flats, lost_on_the_pond, rings


@healthy(area="classification", source="in the style of PyTorch's tutorial on training a classifier", deceptive=False)
def tutorial_on_training_a_classifier(attach):
    """A Net with two convolutions, SGD with momentum, a running loss that is set back."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.pool = nn.Conv2d(1, 8, 3, padding=1), nn.MaxPool2d(2, 2)
            self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
            self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 2 * 2, 60), nn.Linear(60, 42), nn.Linear(42, 10)

        def forward(self, x):
            x = self.pool(F.relu(self.conv1(x)))
            x = self.pool(F.relu(self.conv2(x)))
            x = torch.flatten(x, 1)
            return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))

    xtr, ytr, xte, yte = digits()
    trainloader = DataLoader(TensorDataset((xtr - 0.5) / 0.5, ytr), batch_size=16, shuffle=True)
    testloader = DataLoader(TensorDataset((xte - 0.5) / 0.5, yte), batch_size=100, shuffle=False)
    net, criterion = Net(), nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    session = attach(net, optimizer)
    for epoch in range(8):
        running_loss = 0.0
        for i, data in enumerate(trainloader, 0):
            inputs, labels = data
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            session.log(loss=loss.item())
            if i % 25 == 24:
                session.log(running_loss=running_loss / 25)
                running_loss = 0.0
    correct, total = 0, 0
    with torch.no_grad():
        for images, labels in testloader:
            _, predicted = torch.max(net(images), 1)
            total += labels.size(0)
            correct += (predicted == labels).sum().item()
    return 1 - correct / total


@healthy(area="vae", source="in the style of the VAE in pytorch/examples", deceptive=False)
def example_of_a_variational_autoencoder(attach):
    """BCE and KLD, both summed, divided by the size of the batch for the log only."""

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(64, 96), nn.Linear(96, 8), nn.Linear(96, 8)
            self.fc3, self.fc4 = nn.Linear(8, 96), nn.Linear(96, 64)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 64))
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return BCE + KLD

    xtr, _, xte, _ = digits()
    train_loader = DataLoader(TensorDataset(xtr), batch_size=40, shuffle=True)
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    for epoch in range(1, 13):
        model.train()
        for batch_idx, (data,) in enumerate(train_loader):
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item() / len(data))
        model.eval()
        with torch.no_grad():
            recon, mu, logvar = model(xte)
            test_loss = loss_function(recon, xte, mu, logvar).item() / len(xte)
        session.log(test_loss=test_loss)
    with torch.no_grad():
        return apart(model.decode(torch.randn(len(xte), 8)), xte.flatten(1))


@healthy(area="gan", source="in the style of the DCGAN tutorial", deceptive=False)
def tutorial_of_a_gan_with_real_and_fake_labels(attach):
    """BCELoss, real_label and fake_label, weights_init, Adam with beta1 = 0.5."""

    def weights_init(m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, 0.0, 0.1)
            nn.init.zeros_(m.bias)

    nz, batch_size, real_label, fake_label = 4, 64, 1.0, 0.0
    netG = nn.Sequential(nn.Linear(nz, 64), nn.ReLU(True), nn.Linear(64, 64), nn.ReLU(True), nn.Linear(64, 2))
    netD = nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Sigmoid()
    )
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCELoss()
    optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    session = attach(nn.ModuleDict({"netG": netG, "netD": netD}), [optimizerD, optimizerG])
    dataloader = DataLoader(TensorDataset(rings(6400)), batch_size=batch_size, shuffle=True)
    for epoch in range(6):
        for (data,) in dataloader:
            netD.zero_grad()
            label = torch.full((batch_size,), real_label)
            errD_real = criterion(netD(data).view(-1), label)
            errD_real.backward()
            fake = netG(torch.randn(batch_size, nz))
            label.fill_(fake_label)
            errD_fake = criterion(netD(fake.detach()).view(-1), label)
            errD_fake.backward()
            optimizerD.step()

            netG.zero_grad()
            label.fill_(real_label)
            errG = criterion(netD(fake).view(-1), label)
            errG.backward()
            optimizerG.step()
            session.log(errD=(errD_real + errD_fake).item(), errG=errG.item())
    with torch.no_grad():
        return apart(netG(torch.randn(600, nz)), rings(600))


@healthy(area="gpt", source="in the style of the sorting demo of minGPT", deceptive=False)
def demo_that_sorts_with_a_small_gpt(attach):
    """The input is masked in the targets with -1; decay for matrices only; warmup and cosine."""
    length, numbers = 5, 4

    class SortDataset(Dataset):
        def __len__(self):
            return 2000

        def __getitem__(self, idx):
            inp = torch.randint(numbers, (length,))
            cat = torch.cat([inp, inp.sort()[0]])
            x, y = cat[:-1].clone(), cat[1:].clone()
            y[: length - 1] = -1
            return x, y

    class Block(nn.Module):
        def __init__(self, d, heads, size):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.c_attn, self.c_proj, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads
            self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
            self.register_buffer("bias", torch.tril(torch.ones(size, size)).view(1, 1, size, size))

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
            x = x + self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))
            return x + self.mlp(self.ln_2(x))

    class GPT(nn.Module):
        def __init__(self, d=32, size=2 * length - 1):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(numbers, d), nn.Embedding(size, d)
            self.h = nn.ModuleList(Block(d, 4, size) for _ in range(2))
            self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, numbers, bias=False)
            self.apply(self._init_weights)

        def _init_weights(self, module):
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

        def forward(self, idx, targets=None):
            x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
            for block in self.h:
                x = block(x)
            logits = self.lm_head(self.ln_f(x))
            loss = None
            if targets is not None:
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
            return logits, loss

        @torch.no_grad()
        def generate(self, idx):
            for _ in range(length):
                logits, _ = self(idx)
                idx = torch.cat([idx, logits[:, -1].argmax(-1, keepdim=True)], 1)
            return idx[:, length:]

    model, steps = GPT(), 260
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=5e-3, betas=(0.9, 0.95)
    )
    session = attach(model, optimizer)
    loader = iter(DataLoader(SortDataset(), batch_size=32, sampler=random.choices(range(2000), k=32 * steps)))
    for it in range(steps):
        scale = (it + 1) / 20 if it < 20 else 0.1 + 0.45 * (1 + math.cos(math.pi * (it - 20) / (steps - 20)))
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * scale
        x, y = next(loader)
        _, loss = model(x, y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
    model.eval()
    inp = torch.randint(numbers, (200, length))
    return (model.generate(inp) != inp.sort(1)[0]).any(1).float().mean().item()


@healthy(area="time series", source="in the style of time_sequence_prediction in pytorch/examples", deceptive=False)
def sine_waves_with_lstm_cells_and_lbfgs(attach):
    """Two LSTM cells in a loop over time; LBFGS with a closure on all the data."""

    class Sequence(nn.Module):
        def __init__(self, hidden=16):
            super().__init__()
            self.hidden = hidden
            self.lstm1, self.lstm2, self.linear = (
                nn.LSTMCell(1, hidden),
                nn.LSTMCell(hidden, hidden),
                nn.Linear(hidden, 1),
            )

        def forward(self, input, future=0):
            outputs, zeros = [], torch.zeros(input.size(0), self.hidden)
            h_t, c_t, h_t2, c_t2 = zeros, zeros, zeros, zeros
            for input_t in input.split(1, dim=1):
                h_t, c_t = self.lstm1(input_t, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                output = self.linear(h_t2)
                outputs += [output]
            for _ in range(future):
                h_t, c_t = self.lstm1(output, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                output = self.linear(h_t2)
                outputs += [output]
            return torch.cat(outputs, dim=1)

    data = torch.sin((torch.arange(31) + torch.randint(-60, 60, (30, 1))) / 4.0)
    input, target = data[5:, :-1], data[5:, 1:]
    seq, criterion = Sequence(), nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8)
    session = attach(seq, optimizer)
    for i in range(5):

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(input), target)
            loss.backward()
            session.log(loss=loss.item())
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        return criterion(seq(data[:5, :-1]), data[:5, 1:]).item()


@healthy(area="graph attention", source="in the style of the GAT in pytorch/examples", deceptive=False)
def graph_attention_on_one_graph(attach):
    """Attention over neighbours with a mask of -9e15, dropout on features and attention, patience."""
    nodes, classes = 150, 3
    label = torch.arange(nodes) % classes
    adj = (torch.rand(nodes, nodes) < torch.where(label[:, None] == label, 0.09, 0.01)).float()
    adj = ((adj + adj.t() + torch.eye(nodes)) > 0).float()
    features = torch.randn(nodes, 20)
    features[torch.arange(nodes), label] += 1.2
    order = torch.randperm(nodes)
    idx_train, idx_val, idx_test = order[:45], order[45:75], order[75:]

    class GraphAttentionLayer(nn.Module):
        def __init__(self, in_features, out_features, n_heads, concat=True):
            super().__init__()
            self.n_heads, self.concat, self.n_hidden = n_heads, concat, out_features
            self.W = nn.Parameter(torch.empty(in_features, n_heads * out_features))
            self.a = nn.Parameter(torch.empty(n_heads, 2 * out_features, 1))
            nn.init.xavier_normal_(self.W)
            nn.init.xavier_normal_(self.a)

        def forward(self, h, adj):
            h = F.dropout(h @ self.W, 0.3, self.training).view(-1, self.n_heads, self.n_hidden).permute(1, 0, 2)
            source, target = h @ self.a[:, : self.n_hidden], h @ self.a[:, self.n_hidden :]
            e = F.leaky_relu(source + target.mT, 0.2)
            attention = torch.where(adj > 0, e, -9e15 * torch.ones_like(e)).softmax(-1)
            h = F.dropout(attention, 0.3, self.training) @ h
            return h.permute(1, 0, 2).flatten(1) if self.concat else h.mean(0)

    class GAT(nn.Module):
        def __init__(self):
            super().__init__()
            self.gat1, self.gat2 = GraphAttentionLayer(20, 8, 4), GraphAttentionLayer(32, classes, 1, concat=False)

        def forward(self, x, adj):
            return F.log_softmax(self.gat2(F.elu(self.gat1(x, adj)), adj), dim=1)

    model = GAT()
    optimizer = optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    session = attach(model, optimizer)
    for epoch in range(150):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(features, adj)[idx_train], label[idx_train])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            output = model(features, adj)
        session.log(loss=loss.item(), val_loss=F.nll_loss(output[idx_val], label[idx_val]).item())
    return (output.argmax(1) != label)[idx_test].float().mean().item()


@healthy(area="pairs", source="in the style of siamese_network in pytorch/examples", deceptive=False)
def siamese_network_says_whether_two_digits_are_one(attach):
    """One body for both pictures, a head on the two together, half of the pairs are of one class."""
    xtr, ytr, xte, yte = digits()

    class APP_MATCHER(Dataset):
        def __init__(self, images, labels):
            self.images, self.labels = images, labels
            self.group = {c: (labels == c).nonzero().flatten().tolist() for c in range(10)}

        def __len__(self):
            return len(self.images)

        def __getitem__(self, index):
            c = int(self.labels[index])
            if index % 2 == 0:
                other, target = random.choice(self.group[c]), 1.0
            else:
                other, target = random.choice(self.group[random.choice([k for k in range(10) if k != c])]), 0.0
            return self.images[index], self.images[other], target

    class SiameseNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 32)
            )
            self.fc = nn.Sequential(nn.Linear(64, 96), nn.ReLU(inplace=True), nn.Linear(96, 1))

        def forward(self, input1, input2):
            a, b = self.body(input1), self.body(input2)
            return torch.sigmoid(self.fc(torch.cat([(a - b).abs(), a * b], 1))).squeeze(1)

    model, criterion = SiameseNetwork(), nn.BCELoss()
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    session = attach(model, optimizer)
    for epoch in range(9):
        model.train()
        for images_1, images_2, targets in DataLoader(APP_MATCHER(xtr, ytr), shuffle=True, batch_size=40):
            optimizer.zero_grad()
            loss = criterion(model(images_1, images_2), targets.float())
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        scheduler.step()
    model.eval()
    wrong = []
    with torch.no_grad():
        for images_1, images_2, targets in DataLoader(APP_MATCHER(xte, yte), batch_size=100):
            wrong.append(((model(images_1, images_2) > 0.5).float() != targets).float())
    return torch.cat(wrong).mean().item()


@healthy(area="super resolution", source="in the style of super_resolution in pytorch/examples", deceptive=False)
def pictures_grow_by_a_pixel_shuffle(attach):
    """Orthogonal init, a pixel shuffle at the end, MSE, PSNR in the log."""

    class Net(nn.Module):
        def __init__(self, upscale_factor):
            super().__init__()
            self.relu, self.pixel_shuffle = nn.ReLU(), nn.PixelShuffle(upscale_factor)
            self.conv1, self.conv2 = nn.Conv2d(1, 24, 3, 1, 1), nn.Conv2d(24, 24, 3, 1, 1)
            self.conv3 = nn.Conv2d(24, upscale_factor**2, 3, 1, 1)
            for conv in (self.conv1, self.conv2):
                nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))
            nn.init.orthogonal_(self.conv3.weight)

        def forward(self, x):
            return self.pixel_shuffle(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))

    xtr, _, xte, _ = digits()
    model, criterion = Net(2), nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    for epoch in range(8):
        epoch_loss = 0
        for (target,) in DataLoader(TensorDataset(xtr), batch_size=40, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(F.avg_pool2d(target, 2)), target)
            epoch_loss += loss.item()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        with torch.no_grad():
            mse = criterion(model(F.avg_pool2d(xte, 2)), xte).item()
        session.log(psnr=10 * math.log10(1 / mse), mean_loss=epoch_loss / 30)
    return mse / xte.var(0).mean().item()


@healthy(
    area="text classification", source="in the style of the torchtext tutorial with an EmbeddingBag", deceptive=False
)
def news_with_an_embedding_bag(attach):
    """collate_batch with offsets, SGD with a high rate that drops when validation does not improve."""
    vocab, classes = 60, 4

    def news(count):
        made = []
        for _ in range(count):
            label = random.randrange(classes)
            made.append((label, [random.randrange(label * 9, label * 9 + 24) for _ in range(random.randint(5, 15))]))
        return made

    def collate_batch(batch):
        labels = torch.tensor([label for label, _ in batch])
        offsets = torch.tensor([0] + [len(text) for _, text in batch[:-1]]).cumsum(0)
        return labels, torch.tensor([word for _, text in batch for word in text]), offsets

    class TextClassificationModel(nn.Module):
        def __init__(self, vocab_size, embed_dim, num_class):
            super().__init__()
            self.embedding = nn.EmbeddingBag(vocab_size, embed_dim)
            self.fc = nn.Linear(embed_dim, num_class)
            self.embedding.weight.data.uniform_(-0.5, 0.5)
            self.fc.weight.data.uniform_(-0.5, 0.5)
            self.fc.bias.data.zero_()

        def forward(self, text, offsets):
            return self.fc(self.embedding(text, offsets))

    model, criterion = TextClassificationModel(vocab, 24, classes), nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=5.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)
    session = attach(model, optimizer)
    train_dataloader = DataLoader(news(800), batch_size=16, shuffle=True, collate_fn=collate_batch)
    valid_dataloader = DataLoader(news(300), batch_size=50, collate_fn=collate_batch)
    total_accu = None
    for epoch in range(8):
        model.train()
        for label, text, offsets in train_dataloader:
            optimizer.zero_grad()
            loss = criterion(model(text, offsets), label)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        right, count = 0, 0
        with torch.no_grad():
            for label, text, offsets in valid_dataloader:
                right += (model(text, offsets).argmax(1) == label).sum().item()
                count += len(label)
        session.log(val_accuracy=right / count)
        if total_accu is not None and total_accu > right / count:
            scheduler.step()
        else:
            total_accu = right / count
    return 1 - total_accu


@healthy(area="transfer learning", source="in the style of PyTorch's tutorial on transfer learning", deceptive=False)
def tutorial_with_phases_and_the_best_weights(attach):
    """train_model() with phases train and val, StepLR per epoch, deepcopy of the best weights."""
    xtr, ytr, xte, yte = digits()
    features = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    pretrained = nn.Sequential()
    pretrained.add_module("features", features)
    pretrained.add_module("fc", nn.Linear(128, 5))
    before = optim.Adam(pretrained.parameters(), lr=5e-3)
    low = (ytr < 5).nonzero().flatten()
    for i in low[torch.randint(0, len(low), (60, 50))]:
        before.zero_grad()
        F.cross_entropy(pretrained(xtr[i]), ytr[i]).backward()
        before.step()

    def train_model(model, criterion, optimizer, scheduler, session, num_epochs=8):
        best_model_wts, best_acc = copy.deepcopy(model.state_dict()), 0.0
        for epoch in range(num_epochs):
            for phase in ["train", "val"]:
                model.train() if phase == "train" else model.eval()
                running_loss, running_corrects = 0.0, 0
                for inputs, labels in dataloaders[phase]:
                    optimizer.zero_grad()
                    with torch.set_grad_enabled(phase == "train"):
                        outputs = model(inputs)
                        loss = criterion(outputs, labels)
                        if phase == "train":
                            loss.backward()
                            optimizer.step()
                            session.log(loss=loss.item())
                    running_loss += loss.item() * inputs.size(0)
                    running_corrects += (outputs.argmax(1) == labels).sum().item()
                if phase == "train":
                    scheduler.step()
                else:
                    size = len(dataloaders[phase].dataset)
                    session.log(val_loss=running_loss / size, val_acc=running_corrects / size)
                    if running_corrects / size > best_acc:
                        best_acc, best_model_wts = running_corrects / size, copy.deepcopy(model.state_dict())
        model.load_state_dict(best_model_wts)
        return 1 - best_acc

    high, high_val = ytr >= 5, yte >= 5
    dataloaders = {
        "train": DataLoader(TensorDataset(xtr[high], ytr[high] - 5), batch_size=20, shuffle=True),
        "val": DataLoader(TensorDataset(xte[high_val], yte[high_val] - 5), batch_size=50),
    }
    model_ft = pretrained
    model_ft.fc = nn.Linear(model_ft.fc.in_features, 5)
    optimizer_ft = optim.SGD(model_ft.parameters(), lr=0.01, momentum=0.9)
    exp_lr_scheduler = optim.lr_scheduler.StepLR(optimizer_ft, step_size=4, gamma=0.1)
    session = attach(model_ft, optimizer_ft)
    return train_model(model_ft, nn.CrossEntropyLoss(), optimizer_ft, exp_lr_scheduler, session)


@healthy(area="recommender", source="in the style of neural collaborative filtering", deceptive=False)
def collaborative_filtering_with_sampled_negatives(attach):
    """GMF and MLP side by side; four fresh negatives for each item that was liked; hit rate at 5."""
    users, items = 50, 60
    taste, kind = torch.randn(users, 4), torch.randn(items, 4)
    liked = [row.topk(9)[1].tolist() for row in taste @ kind.t()]
    kept = [random.choice(row) for row in liked]
    train = [(u, i) for u in range(users) for i in liked[u] if i != kept[u]]

    def ng_sample(num_ng=4):
        fill = []
        for u, i in train:
            fill.append((u, i, 1.0))
            for _ in range(num_ng):
                j = random.randrange(items)
                while j in liked[u]:
                    j = random.randrange(items)
                fill.append((u, j, 0.0))
        user, item, label = zip(*fill)
        return TensorDataset(torch.tensor(user), torch.tensor(item), torch.tensor(label))

    class NCF(nn.Module):
        def __init__(self, factor=8):
            super().__init__()
            self.embed_user_GMF, self.embed_item_GMF = nn.Embedding(users, factor), nn.Embedding(items, factor)
            self.embed_user_MLP, self.embed_item_MLP = nn.Embedding(users, 16), nn.Embedding(items, 16)
            self.MLP_layers = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, factor), nn.ReLU())
            self.predict_layer = nn.Linear(2 * factor, 1)
            for module in (self.embed_user_GMF, self.embed_item_GMF, self.embed_user_MLP, self.embed_item_MLP):
                nn.init.normal_(module.weight, std=0.1)

        def forward(self, user, item):
            gmf = self.embed_user_GMF(user) * self.embed_item_GMF(item)
            mlp = self.MLP_layers(torch.cat([self.embed_user_MLP(user), self.embed_item_MLP(item)], -1))
            return self.predict_layer(torch.cat([gmf, mlp], -1)).view(-1)

    model, loss_function = NCF(), nn.BCEWithLogitsLoss()
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    session = attach(model, optimizer)
    for epoch in range(14):
        model.train()
        for user, item, label in DataLoader(ng_sample(), batch_size=64, shuffle=True):
            model.zero_grad()
            loss = loss_function(model(user, item), label)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    model.eval()
    misses = 0
    with torch.no_grad():
        for u in range(users):
            rivals = [kept[u], *random.sample([i for i in range(items) if i not in liked[u]], 30)]
            score = model(torch.full((31,), u), torch.tensor(rivals))
            misses += int((score > score[0]).sum() >= 5)
    return misses / users


@healthy(area="dqn", source="in the style of PyTorch's tutorial on DQN", deceptive=False)
def tutorial_dqn_with_a_soft_target(attach):
    """Transition tuples, a replay memory, SmoothL1Loss, values clipped at 100, a target that follows softly."""
    Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
    BATCH_SIZE, GAMMA, TAU = 48, 0.95, 0.03

    class DQN(nn.Module):
        def __init__(self, n_observations, n_actions):
            super().__init__()
            self.layer1, self.layer2 = nn.Linear(n_observations, 48), nn.Linear(48, 48)
            self.layer3 = nn.Linear(48, n_actions)

        def forward(self, x):
            return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))

    env, memory = Pond(), deque(maxlen=3000)
    policy_net, target_net = DQN(16, 4), DQN(16, 4)
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = optim.AdamW(policy_net.parameters(), lr=2e-3, amsgrad=True)
    session = attach(policy_net, optimizer)

    def optimize_model():
        batch = Transition(*zip(*random.sample(memory, BATCH_SIZE)))
        going = torch.tensor([s is not None for s in batch.next_state])
        state_batch, action_batch = torch.stack(batch.state), torch.tensor(batch.action).unsqueeze(1)
        state_action_values = policy_net(state_batch).gather(1, action_batch)
        next_state_values = torch.zeros(BATCH_SIZE)
        with torch.no_grad():
            ahead = torch.stack([s for s in batch.next_state if s is not None])
            next_state_values[going] = target_net(ahead).max(1).values
        expected = next_state_values * GAMMA + torch.tensor(batch.reward)
        loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        session.log(loss=loss.item())

    steps_done = 0
    for i_episode in range(190):
        state, done = env.reset(random.choice([0, 0, 1, 4, 9, 10])), False
        while not done:
            eps_threshold = 0.2 + 0.8 * math.exp(-steps_done / 400)
            steps_done += 1
            with torch.no_grad():
                action = int(policy_net(state).argmax()) if random.random() > eps_threshold else random.randrange(4)
            observation, reward, done = env.step(action)
            memory.append(Transition(state, action, None if done else observation, reward))
            state = observation
            if len(memory) >= 100 and steps_done % 2 == 0:
                optimize_model()
                with torch.no_grad():
                    for target, source in zip(target_net.parameters(), policy_net.parameters()):
                        target.lerp_(source, TAU)
    return lost_on_the_pond(lambda seen: policy_net(seen).argmax())


@healthy(
    area="detection", source="in the style of examples that regress one box and its class at once", deceptive=False
)
def finder_of_one_box_with_smooth_l1(attach):
    """A dictionary for a batch, two heads, the losses added; the box is compared in one format."""

    class Finder(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()
            )
            self.neck = nn.Sequential(nn.Linear(576, 64), nn.ReLU())
            self.box, self.wide = nn.Linear(64, 4), nn.Linear(64, 2)

        def forward(self, picture):
            h = self.neck(self.trunk(picture))
            return {"box": self.box(h).sigmoid(), "wide": self.wide(h)}

    def collate(rows):
        picture, box = map(torch.stack, zip(*rows))
        return {"picture": picture, "box": box, "wide": (box[:, 2] > box[:, 3]).long()}

    model = Finder()
    optimizer = optim.AdamW(model.parameters(), lr=2e-3)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(*blots(600)), batch_size=30, shuffle=True, collate_fn=collate)
    for epoch in range(12):
        model.train()
        for batch in loader:
            out = model(batch["picture"])
            losses = {
                "box": 5 * F.smooth_l1_loss(out["box"], batch["box"], beta=0.1),
                "wide": 0.2 * F.cross_entropy(out["wide"], batch["wide"]),
            }
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), **{f"loss_{name}": value.item() for name, value in losses.items()})
    model.eval()
    picture, box = blots(200)
    with torch.no_grad():
        return (model(picture)["box"] - box).abs().mean().item() / (box - box.mean(0)).abs().mean().item()


@healthy(area="table", source="in the style of a Learner with the one-cycle policy", deceptive=False)
def learner_with_one_cycle_on_a_table(attach):
    """BatchNorm1d on the raw columns, OneCycleLR stepped with each batch, callbacks."""
    table, price = flats(1000)
    y = ((price - price[:800].mean()) / price[:800].std()).unsqueeze(1)
    x = (table - table[:800].mean(0)) / table[:800].std(0)

    class TabularModel(nn.Module):
        def __init__(self, columns, sizes=(64, 32), ps=0.05):
            super().__init__()
            layers = [nn.BatchNorm1d(columns)]
            for a, b in zip((columns, *sizes), sizes):
                layers += [nn.Linear(a, b, bias=False), nn.ReLU(inplace=True), nn.BatchNorm1d(b), nn.Dropout(ps)]
            self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

        def forward(self, x):
            return self.layers(x)

    class Learner:
        def __init__(self, dls, model, loss_func):
            self.train_dl, self.valid_dl = dls
            self.model, self.loss_func, self.callbacks = model, loss_func, []

        def fit_one_cycle(self, n_epoch, lr_max):
            opt = optim.Adam(self.model.parameters(), lr=lr_max, betas=(0.95, 0.99))
            sched = optim.lr_scheduler.OneCycleLR(opt, lr_max, total_steps=n_epoch * len(self.train_dl))
            session = attach(self.model, opt)
            for epoch in range(n_epoch):
                self.model.train()
                for xb, yb in self.train_dl:
                    loss = self.loss_func(self.model(xb), yb)
                    loss.backward()
                    opt.step()
                    sched.step()
                    opt.zero_grad()
                    session.log(loss=loss.item(), lr=sched.get_last_lr()[0])
                session.log(val_loss=self.validate())

        @torch.no_grad()
        def validate(self):
            self.model.eval()
            return sum(self.loss_func(self.model(xb), yb).item() for xb, yb in self.valid_dl) / len(self.valid_dl)

    train = DataLoader(TensorDataset(x[:800], y[:800]), batch_size=40, shuffle=True, drop_last=True)
    learn = Learner((train, DataLoader(TensorDataset(x[800:], y[800:]), batch_size=100)), TabularModel(6), nn.MSELoss())
    learn.fit_one_cycle(12, 1e-2)
    return learn.validate()
