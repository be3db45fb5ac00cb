"""The kind "search": losses on the training split along a direction, for a line search."""
