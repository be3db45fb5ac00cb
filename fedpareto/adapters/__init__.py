"""Clients that exist already as tasks of a federation: a LightningModule, a Flower app."""
