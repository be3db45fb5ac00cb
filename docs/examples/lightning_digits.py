"""A LightningModule and its LightningDataModule, as they are, and the task that brings them into a federation."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from fedpareto import DataSource
from fedpareto.adapters.lightning import LightningTask

# ---- what you have: a module and its data


class Classifier(lightning.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.layers(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Images(lightning.LightningDataModule):
    def __init__(self, directory=None, batch_size=32):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        if self.hparams.directory is None:
            images, labels = load_digits(return_X_y=True)
            images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
        else:
            images, labels = torch.load(self.hparams.directory / "digits.pt", weights_only=True)
        generator = torch.Generator().manual_seed(0)
        whole = TensorDataset(images, labels)
        self.train, self.val, self.test = random_split(whole, [0.8, 0.1, 0.1], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=500)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=500)


# ---- what you add: a task


class Digits(LightningTask):
    def model(self):
        return Classifier()

    def data(self, source: DataSource):
        return Images(source.directory)
