"""Fifteenth hold-out: pictures."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fault_programs.holdout_15.about import fault
from fault_programs.holdout_15.material import digits, wrong


@fault(
    "double_softmax",
    area="federated learning",
    source="https://github.com/nishnik/Deep-Semantic-Similarity-Model-PyTorch/issues/2",
    cause="The network ends in a softmax and the cross entropy applies another one, so the gradients are weak and the loss cannot fall far.",
    words=(r"softmax", r"cross.?entropy|twice|double|second|logit|already"),
    cascade=("loss_plateau", "underfitting", "vanishing_gradient", "not_learning", "lr_too_low"),
    sites=("(loss)", "(model)", "softmax", "layer_hidden"),
)
def federated_mlp_ends_in_a_softmax(attach, fixed):
    """return self.softmax(x) in the MLP, nn.CrossEntropyLoss() in LocalUpdate; the weights of three clients are averaged."""
    xtr, ytr, xte, yte = digits()

    class MLP(nn.Module):
        def __init__(self, dim_in, dim_hidden, dim_out):
            super().__init__()
            self.layer_input = nn.Linear(dim_in, dim_hidden)
            self.dropout = nn.Dropout(0.2)
            self.layer_hidden = nn.Linear(dim_hidden, dim_out)
            self.softmax = nn.Softmax(dim=1)

        def forward(self, x):
            x = F.relu(self.dropout(self.layer_input(x.flatten(1))))
            x = self.layer_hidden(x)
            return x if fixed else self.softmax(x)

    def fed_avg(w):
        return {k: torch.stack([each[k] for each in w]).mean(0) for k in w[0]}

    net_glob = MLP(64, 64, 10)
    optimizer = torch.optim.SGD(net_glob.parameters(), lr=0.08)
    criterion = nn.CrossEntropyLoss()
    session = attach(net_glob, optimizer)
    clients = torch.arange(1200).chunk(3)
    for round_ in range(14):
        w_glob, w_locals = copy.deepcopy(net_glob.state_dict()), []
        for mine in clients:
            net_glob.load_state_dict(w_glob)
            net_glob.train()
            for i in mine[torch.randperm(len(mine))].split(20):
                net_glob.zero_grad()
                loss = criterion(net_glob(xtr[i]), ytr[i])
                loss.backward()
                optimizer.step()
                session.log(loss=loss.item())
            w_locals.append(copy.deepcopy(net_glob.state_dict()))
        net_glob.load_state_dict(fed_avg(w_locals))
    net_glob.eval()
    return wrong(net_glob, xte, yte)


@fault(
    "lr_too_high",
    area="classification",
    source="https://github.com/jiecaoyu/pytorch-nin-cifar10/issues/1",
    cause="A learning rate of 0.3 with momentum is too high for this network without normalisation: the loss ends at log(10), where it stays.",
    words=(r"learning rate|\blr\b|step size|steps?", r"high|large|big|long|0\.3"),
    cascade=(
        "dead_relu",
        "constant_output",
        "single_class_output",
        "loss_plateau",
        "not_learning",
        "loss_spike",
        "underfitting",
        "exploding_activation",
        "loss_divergence",
        "loss_oscillation",
        "vanishing_gradient",
        "exploding_gradient",
        "input_ignored",
    ),
    sites=("optimizer", "(loop)", "(model)"),
    exact=False,
)
def network_in_network_sits_at_log_ten(attach, fixed):
    """optim.SGD(param_groups, lr=0.3, momentum=0.9), after which every loss is 2.30."""
    xtr, ytr, xte, yte = digits()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Sequential(
                nn.Conv2d(1, 24, 3, padding=1),
                nn.ReLU(inplace=True),
                nn.Conv2d(24, 16, 1),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(inplace=True),
                nn.Conv2d(32, 32, 1),
                nn.ReLU(inplace=True),
                nn.Conv2d(32, 10, 4),
            )
            for m in self.modules():
                if isinstance(m, nn.Conv2d):
                    nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
                    nn.init.zeros_(m.bias)

        def forward(self, x):
            return self.classifier(x).flatten(1)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 if fixed else 0.3, momentum=0.9, weight_decay=1e-4)
    session = attach(model, optimizer)
    trainloader = DataLoader(TensorDataset(xtr, ytr), batch_size=48, shuffle=True)
    for epoch in range(6):
        model.train()
        for data, target in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(2 * data - 1), target)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        with torch.no_grad():
            session.log(test_loss=F.cross_entropy(model(2 * xte - 1), yte).item())
    return wrong(model, 2 * xte - 1, yte)


class Arrays(Dataset):
    """Pictures of bytes that go through a transform."""

    def __init__(self, x, y, transform):
        self.x, self.y, self.transform = (x * 255).round(), y, transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.transform(self.x[i]), self.y[i]


@fault(
    "train_val_preproc_mismatch",
    area="resnet",
    source="https://github.com/Reza-Safdari/SimSiam-91.9-top1-acc-on-CIFAR10/issues/4",
    cause="The training pictures are normalised and those of the test set are only scaled, so the network sees other numbers than it was trained on.",
    words=(r"normali|transform|preprocess|scal", r"test|val|differ|train"),
    cascade=("overfitting", "batchnorm_stats_stale"),
    sites=("(data)", "(validation)", "loader", "test_loader"),
    exact=False,
)
def test_transform_has_no_normalize(attach, fixed):
    """transform_test = Compose([ToTensor()]), transform_train = Compose([ToTensor(), Normalize(mean, std)])."""
    xtr, ytr, xte, yte = digits()
    mean, std = 0.5, 0.25
    to_tensor = lambda picture: picture / 255
    normalize = lambda picture: (picture - mean) / std
    transform_train = lambda picture: normalize(to_tensor(picture))
    transform_test = transform_train if fixed else to_tensor

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
            self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

        def forward(self, x):
            return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))

    net = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), Block(12), nn.Flatten(), nn.Linear(12 * 16, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    session = attach(net, optimizer)
    loader = DataLoader(Arrays(xtr, ytr, transform_train), batch_size=50, shuffle=True)
    test_loader = DataLoader(Arrays(xte, yte, transform_test), batch_size=200)

    def test():
        net.eval()
        with torch.no_grad():
            wrongs = sum((net(x).argmax(1) != y).sum().item() for x, y in test_loader)
        return wrongs / len(yte)

    for epoch in range(6):
        net.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        session.log(test_error=test())
    return test()


@fault(
    "eval_mode_in_training",
    area="autoencoder",
    source="https://github.com/pfnet/pytorch-pfn-extras/issues/688",
    cause="The evaluator runs within the epoch and leaves the network in evaluation mode, in which it is trained for the rest of the run.",
    words=(
        r"eval(uation)?[ _]mode|model\.eval|\.train\(\)|\.eval\(\)",
        r"(after|back|rest|remain|stay|still|never|training|mode|restore)",
    ),
    also=("batchnorm_stats_stale",),
    cascade=(
        "loss_plateau",
        "underfitting",
        "not_learning",
        "overfitting",
        "loss_spike",
        "loss_divergence",
        "lr_too_high",
    ),
    sites=("(model)", "(loop)", "(validation)"),
)
def evaluator_leaves_the_network_in_its_mode(attach, fixed):
    """evaluator(): model.eval(); ...; return loss -- every tenth iteration, with model.train() above the loop only."""
    xtr, ytr, xte, yte = digits(500)
    ytr = torch.where(torch.rand(500) < 0.3, torch.randint(0, 10, (500,)), ytr)  # labelled in a hurry

    def layer(a, b):
        return [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.5)]

    model = nn.Sequential(nn.Flatten(), *layer(64, 256), *layer(256, 256), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)

    def evaluator():
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(xte), yte).item()
        model.train(bool(fixed))
        return loss

    model.train()
    iteration = 0
    while iteration < 600:
        for i in torch.randperm(500).split(40):
            loss = F.cross_entropy(model(xtr[i]), ytr[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            iteration += 1
            session.log(loss=loss.item())
            if iteration % 15 == 0:
                session.log(val_loss=evaluator())
    return evaluator()


@fault(
    "not_shuffled",
    area="classification",
    source="https://github.com/joaoamcarvalho/mpd-public/issues/6",
    cause="The loader of the training set does not shuffle, and the files lie sorted by class, so each batch holds one class.",
    words=(r"shuffl|sort|order", r"class|batch|train|False|loader|order"),
    also=("same_order_every_epoch",),
    cascade=(
        "loss_oscillation",
        "single_class_output",
        "loss_spike",
        "underfitting",
        "not_learning",
        "constant_output",
    ),
    sites=("(data)", "loader", "train_dataloader"),
    exact=False,
)
def folder_of_classes_is_read_in_order(attach, fixed):
    """DataLoader(train_set, batch_size=40) on a folder with one sub-folder per class."""
    xtr, ytr, xte, yte = digits()
    order = ytr.sort(stable=True).indices  # as ImageFolder lists them

    class LeNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
            self.fc1, self.fc2 = nn.Linear(64, 48), nn.Linear(48, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            return self.fc2(F.relu(self.fc1(x.flatten(1))))

    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    session = attach(model, optimizer)
    train_dataloader = DataLoader(TensorDataset(xtr[order], ytr[order]), batch_size=40, shuffle=bool(fixed))
    for epoch in range(8):
        running_loss = 0.0
        for inputs, labels in train_dataloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            session.log(loss=loss.item())
    return wrong(model, xte, yte)


@fault(
    "lr_schedule_collapse",
    area="long videos",
    source="https://github.com/FunctionLab/selene/issues/115",
    cause="ReduceLROnPlateau gets an accuracy but minimises by default, so every better epoch counts as a bad one and the rate falls to nothing.",
    words=(
        r"ReduceLROnPlateau|plateau|schedul|learning rate|\blr\b",
        r"mode|max|min|accura|wrong|collapse|small|fall|nothing",
    ),
    also=("best_selected_backwards",),
    cascade=("lr_too_low", "underfitting", "loss_plateau", "not_learning"),
    sites=("scheduler", "(loop)", "optimizer"),
    onset=10,
    exact=False,
)
def plateau_scheduler_is_fed_with_accuracy(attach, fixed):
    """ReduceLROnPlateau(optimizer, factor=0.2, patience=0).step(val_acc), with its default mode."""
    xtr, ytr, xte, yte = digits(1000)
    xva, yva, xte, yte = xte[:300], yte[:300], xte[300:], yte[300:]
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode="max" if fixed else "min", factor=0.2, patience=1
    )
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True)
    for epoch in range(20):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        model.eval()
        val_acc = 1 - wrong(model, xva, yva)
        scheduler.step(val_acc)
        session.log(val_acc=val_acc)
    return wrong(model, xte, yte)


@fault(
    "augmentation_changes_label",
    area="digits",
    source="from memory: blog lists of mistakes with augmentation (RandomHorizontalFlip and RandomVerticalFlip on digits)",
    cause="Digits are flipped and rotated at random, which makes a nine of a six, so the labels of these pictures are wrong.",
    words=(r"augment|flip|rotat|transform", r"label|six|nine|6|9|digit|class|meaning|orientation"),
    cascade=("underfitting", "loss_plateau", "train_val_preproc_mismatch"),
    sites=("(data)", "loader", "transform"),
    exact=False,
)
def sixes_are_turned_into_nines(attach, fixed):
    """transforms.Compose([RandomHorizontalFlip(), RandomVerticalFlip()]) on handwritten digits."""
    xtr, ytr, xte, yte = digits()

    class RandomFlip:
        def __init__(self, dims, p=0.5):
            self.dims, self.p = dims, p

        def __call__(self, x):
            return x.flip(self.dims) if torch.rand(()) < self.p else x

    class RandomShift:
        def __call__(self, x):
            return x.roll(int(torch.randint(-1, 2, ())), -1) if torch.rand(()) < 0.3 else x

    augment = [RandomShift()] if fixed else [RandomFlip((-1,)), RandomFlip((-2,)), RandomShift()]

    class Augmented(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            for transform in augment:
                x = transform(x)
            return x, y

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = attach(model, optimizer)
    loader = DataLoader(Augmented(xtr, ytr), batch_size=60, shuffle=True)
    for epoch in range(8):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss.item())
        model.eval()
        session.log(val_error=wrong(model, xte, yte))
    asked = (yte == 6) | (yte == 9) | (yte == 2) | (yte == 5)
    return wrong(model, xte[asked], yte[asked])


@fault(
    "batchnorm_small_batch",
    area="large pictures",
    source="from memory: forum questions on BatchNorm with one or two pictures per batch, since more do not fit on the card, good in training and bad in eval mode",
    cause="With two pictures in a batch the statistics of batch normalisation say next to nothing.",
    words=(r"batch.?norm|norm", r"batch size|small|two|few|statistic|group"),
    also=("batchnorm_stats_stale",),
    cascade=("underfitting", "loss_plateau", "loss_oscillation", "not_learning", "overfitting", "bad_batch_spike"),
    sites=("(model)", "(data)", "loader", "bn1", "bn2"),
    exact=False,
)
def two_pictures_fit_on_the_card(attach, fixed):
    """DataLoader(train_set, batch_size=2, shuffle=True) in front of BatchNorm1d."""
    xtr, ytr, xte, yte = digits(600)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.bn1 = nn.Linear(64, 64), nn.BatchNorm1d(64)
            self.fc2, self.bn2 = nn.Linear(64, 32), nn.BatchNorm1d(32)
            self.fc3 = nn.Linear(32, 10)

        def forward(self, x):
            x = F.relu(self.bn1(self.fc1(x.flatten(1))))
            return self.fc3(F.relu(self.bn2(self.fc2(x))))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = attach(model, optimizer)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=24 if fixed else 2, shuffle=True)
    steps = 0
    while steps < 450:
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            steps += 1
            session.log(loss=loss.item())
    model.eval()
    return wrong(model, xte, yte)
