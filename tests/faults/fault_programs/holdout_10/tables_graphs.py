"""Tenth hold-out: tables, graphs, sentences in pairs, and what people bought."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from fault_programs.holdout_10.about import fault


@fault(
    "batch_axis_mixed",
    area="tabular",
    source="https://github.com/IBM/TabFormer/pull/14",
    cause="The transformer expects the sequence first but gets the batch first, so the rows of a batch attend to each other instead of the fields of a row.",
    words=(r"batch_first|batch (axis|dim)|across (the )?batch|samples|rows", r"mix|attend|batch_first|wrong|other"),
    cascade=("underfitting", "loss_plateau", "overfitting", "not_learning"),
    sites=("encoder", "(model)"),
)
def rows_attend_to_each_other(attach, fixed):
    """nn.TransformerEncoderLayer with a tensor in the order batch, field, width."""
    fields, values = 6, 8

    class TabTransformer(nn.Module):
        def __init__(self, d=16):
            super().__init__()
            self.embed = nn.Embedding(fields * values, d)
            layer = nn.TransformerEncoderLayer(d, 2, 32, dropout=0.0, batch_first=fixed)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(d * fields, 2)

        def forward(self, row):
            h = self.encoder(self.embed(row + values * torch.arange(fields)))
            return self.head(h.flatten(1))

    rows = torch.randint(0, values, (1600, fields))
    fraud = ((rows[:, 0] % 2 == rows[:, 3] % 2) ^ (rows[:, 1] > 5)).long()
    model = TabTransformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    session = attach(model, optimizer)
    for epoch in range(8):
        for x, y in DataLoader(TensorDataset(rows[:1200], fraud[:1200]), batch_size=60, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        with torch.no_grad():
            session.log(val_loss=F.cross_entropy(model(rows[1200:]), fraud[1200:]).item())
    with torch.no_grad():
        return float((model(rows[1200:]).argmax(1) != fraud[1200:]).float().mean())


@fault(
    "data_leakage",
    area="graph",
    source="https://github.com/awslabs/realtime-fraud-detection-with-gnn-on-dgl/pull/728",
    cause="The loss is taken over all labelled nodes, those of the test too, so the test score says nothing of new nodes.",
    words=(r"test|validation|held.?out", r"leak|train(ed|ing)? on|seen|mask|loss"),
    also=("mask_not_applied",),
    cascade=("overfitting",),
    sites=("(loss)", "(data)", "(validation)", "(loop)"),
)
def test_nodes_are_in_the_loss(attach, fixed):
    """loss(pred, labels) without the mask of the training nodes."""
    n, classes = 240, 3
    labels = torch.randint(0, classes, (n,))
    meet = torch.rand(n, n) < torch.where(labels[:, None] == labels[None], 0.03, 0.015)
    adj = (meet | meet.T | torch.eye(n, dtype=torch.bool)).float()
    norm = adj / adj.sum(1, keepdim=True)
    feat = torch.randn(n, 80) + 0.25 * F.one_hot(labels, classes).float().repeat_interleave(27, 1)[:, :80]
    role = torch.randperm(n)
    train_mask, test_mask, later = (torch.zeros(n, dtype=torch.bool) for _ in range(3))
    train_mask[role[:80]], test_mask[role[80:160]], later[role[160:]] = True, True, True

    class GraphSAGE(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.near = nn.Linear(80, 48), nn.Linear(80, 48)
            self.out = nn.Linear(48, classes)

        def forward(self, x):
            return self.out(F.relu(self.own(x) + norm @ self.near(x)))

    model = GraphSAGE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    session = attach(model, optimizer)
    known = train_mask | test_mask
    for epoch in range(120):
        pred = model(feat)
        chosen = train_mask if fixed else known
        loss = F.cross_entropy(pred[chosen], labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            session.log(loss=loss.item(), test_loss=F.cross_entropy(pred[test_mask], labels[test_mask]).item())
    with torch.no_grad():
        wrong = (model(feat).argmax(1) != labels).float()
    return float(wrong[later].mean() - wrong[test_mask].mean())


@fault(
    "params_not_in_optimizer",
    area="natural language inference",
    source="https://github.com/pytorch/pytorch/issues/715",
    cause="The hidden layers are in a plain list, so they are no part of the module, and the optimizer never gets their weights.",
    words=(r"list|ModuleList|regist|optimi[sz]er", r"(not|never|no|without|missing|plain)"),
    cascade=("underfitting", "loss_plateau"),
    sites=("hids", "(model)", "optimizer"),
)
def hidden_layers_in_a_plain_list(attach, fixed):
    """self.hids = [] and append."""

    class SNLINet(nn.Module):
        def __init__(self, n_words=40, n_hid=20, n_layers=4):
            super().__init__()
            self.emb = nn.EmbeddingBag(n_words, 10)
            self.emb.weight.requires_grad_(False)
            self.hids = nn.ModuleList() if fixed else []
            for li in range(n_layers):
                self.hids.append(nn.Linear(20 if li == 0 else n_hid, n_hid))
            self.classifier = nn.Linear(n_hid, 3)

        def forward(self, premise, hypothesis):
            h = torch.cat([self.emb(premise), self.emb(hypothesis)], 1)
            for layer in self.hids:
                h = torch.tanh(layer(h))
            return self.classifier(h)

    net = SNLINet()
    premise = torch.randint(0, 40, (1500, 4))
    hypothesis = torch.randint(0, 40, (1500, 2))
    with torch.no_grad():
        near = F.cosine_similarity(net.emb(premise), net.emb(hypothesis))
    label = torch.bucketize(near, near.quantile(torch.tensor([1 / 3, 2 / 3])))
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=4e-3)
    session = attach(net, optimizer)
    for epoch in range(25):
        for p, h, y in DataLoader(
            TensorDataset(premise[:1200], hypothesis[:1200], label[:1200]), batch_size=48, shuffle=True
        ):
            loss = F.cross_entropy(net(p, h), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
    with torch.no_grad():
        return float((net(premise[1200:], hypothesis[1200:]).argmax(1) != label[1200:]).float().mean())


@fault(
    "same_slice_twice",
    area="recommendation",
    source="https://github.com/kaist-dmlab/TRAP/pull/1",
    cause="The logarithm of the variance is cut from the same columns as the mean, so the noise depends on the mean and half of the encoder is unused.",
    words=(r"logvar|varian|slice|column|half|index", r"same|mean|\bmu\b|unused"),
    also=("unused_parameters",),
    cascade=("loss_plateau", "underfitting", "aux_loss_dominates"),
    sites=("(model)", "encoder"),
)
def reads_the_variance_where_the_mean_is(attach, fixed):
    """mu_q = h[:, :d] and logvar_q = h[:, :d]."""
    made = torch.Generator().manual_seed(4)
    tastes = torch.randn(3, 60, generator=made) * 1.2
    users = torch.randn(700, 3, generator=made) @ tastes
    bought = torch.stack(
        [torch.bincount(torch.multinomial(u.softmax(0), 60, True, generator=made), minlength=60) for u in users]
    )
    bought = bought.float()

    class MultiVAE(nn.Module):
        def __init__(self, items=60, d=4):
            super().__init__()
            self.d = d
            self.encoder = nn.Sequential(nn.Linear(items, 48), nn.Tanh(), nn.Linear(48, 2 * d))
            self.decoder = nn.Sequential(nn.Linear(d, 48), nn.Tanh(), nn.Linear(48, items))

        def forward(self, x):
            h = self.encoder(F.normalize(x))
            mu_q = h[:, : self.d]
            logvar_q = h[:, self.d :] if fixed else h[:, : self.d]
            z = mu_q + torch.exp(0.5 * logvar_q) * torch.randn_like(mu_q)
            kl = 0.5 * (mu_q.pow(2) + logvar_q.exp() - 1 - logvar_q).sum(1).mean()
            return self.decoder(z), kl

    model = MultiVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    session = attach(model, optimizer)
    order = np.arange(600)
    for epoch in range(40):
        np.random.shuffle(order)
        for st in range(0, 600, 50):
            x = bought[order[st : st + 50]]
            logits, kl = model(x)
            neg_ll = -(F.log_softmax(logits, 1) * x).sum(1).mean()
            loss = neg_ll + kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), neg_ll=neg_ll.item(), kl=kl.item())
    with torch.no_grad():
        x = bought[600:].repeat(8, 1)
        logits, kl = model(x)
        best = -(users[600:].log_softmax(1) * bought[600:]).sum(1).mean()
        return float(kl - (F.log_softmax(logits, 1) * x).sum(1).mean() - best)
