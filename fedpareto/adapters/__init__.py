"""Clients that exist already as tasks of a federation: a LightningModule, a Trainer of Hugging Face, a Flower app."""
