"""The record of a run: what was signed in each round, and whether it belongs together."""
