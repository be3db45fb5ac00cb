"""The kind "train": local SGD on the client's own training split, and the update that it gives."""
