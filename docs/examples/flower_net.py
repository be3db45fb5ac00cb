"""A network, its data and its loop, for the Flower apps of the examples."""

import torch
from sklearn.datasets import load_digits
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.hidden(x))))


def load_data(partition_id, num_partitions):
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    x, y = x[partition_id::num_partitions], y[partition_id::num_partitions]
    cut = len(x) * 4 // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def train(net, data, epochs, lr, batch_size):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(data[0])).split(batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(data[0][batch]), data[1][batch])
            loss.backward()
            optimizer.step()
    return loss.item()


@torch.no_grad()
def test(net, data):
    net.eval()
    logits = net(data[0])
    return nn.functional.cross_entropy(logits, data[1]).item(), (logits.argmax(1) == data[1]).float().mean().item()
