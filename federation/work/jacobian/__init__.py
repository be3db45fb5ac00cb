"""The kind "jacobian": a sketch of the gradients of the client's objectives at the base model."""
