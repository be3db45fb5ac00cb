"""Backups: making and restoring them, the signed statement of a restore, and copies of the keys."""
