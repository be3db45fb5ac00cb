"""The kind "evaluate": losses and accuracies of the base model on the client's own splits."""
