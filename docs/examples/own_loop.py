"""A PyTorch network with BatchNorm and a training loop of one's own, as a task and a trainer of a federation.

The data are the handwritten digits that scikit-learn brings.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedpareto import DataSource, Pool, Task, Trainer

# ---- what you have: a network and a loop


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.out = nn.Linear(16 * 4 * 4, 10)

    def forward(self, images):
        maps = torch.relu(self.norm(self.convolution(images)))
        return self.out(nn.functional.max_pool2d(maps, 2).flatten(1))


def train_epoch(network, loader, optimizer, device):
    network.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()


@torch.no_grad()
def test(network, loader, device):
    network.eval()
    loss = correct = count = 0
    for x, y in loader:
        outputs, labels = network(x.to(device)), y.to(device)
        loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(1) == labels).sum().item()
        count += len(labels)
    return {"loss": loss / count, "accuracy": correct / count}


# ---- what you add: a trainer and a task


class OwnLoop(Trainer):
    abilities = frozenset({"repeatable"})

    def prepare(self):
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self.device = "cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu"
        self.network = self.task.model().to(self.device)

    def train(self, model, plan):
        self.load_module(self.network, model)  # parameters and buffers
        torch.manual_seed(plan.seed)  # of dropout
        data = TensorDataset(self.data.train.x, self.data.train.y)
        # The minibatches of all epochs. BatchNorm needs several samples in each of them: even=True.
        loader = DataLoader(data, batch_sampler=plan.minibatches(even=True))
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=plan.sgd.learning_rate)
        train_epoch(self.network, loader, optimizer, self.device)
        return self.module_vector(self.network)  # parameters and buffers

    def evaluate(self, model, plan):
        self.load_module(self.network, model)
        data = getattr(self.data, plan.split)
        return test(self.network, DataLoader(TensorDataset(data.x, data.y), batch_size=500), self.device)


class Digits(Task):
    trainer = OwnLoop

    def model(self):
        return Network()

    def pool(self, source: DataSource) -> Pool:
        images, labels = load_digits(return_X_y=True)
        return Pool(torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels))
