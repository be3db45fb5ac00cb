"""Clients that exist already as tasks of a federation: a LightningModule, a Hugging Face Trainer, a Flower app."""
