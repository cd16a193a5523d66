"""A GAN at module level, the discriminator first."""

import torch
from torch import nn

torch.manual_seed(0)
netG = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
netD = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizerD = torch.optim.Adam(netD.parameters(), 2e-4)
optimizerG = torch.optim.Adam(netG.parameters(), 2e-4)
criterion = nn.BCEWithLogitsLoss()
for _ in range(10):
    real = torch.randn(64, 2) + 2
    optimizerD.zero_grad()
    fake = netG(torch.randn(64, 8))
    loss = criterion(netD(real), torch.ones(64, 1)) + criterion(netD(fake.detach()), torch.zeros(64, 1))
    loss.backward()
    optimizerD.step()
    optimizerG.zero_grad()
    criterion(netD(fake), torch.ones(64, 1)).backward()
    optimizerG.step()
print(sum(each.double().sum() for net in (netG, netD) for each in net.parameters()).item())
