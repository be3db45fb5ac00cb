"""Backups of a federation: database and blobs in a directory, made while the coordinator serves, and restored from."""
