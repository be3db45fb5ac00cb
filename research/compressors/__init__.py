"""How well compressed Jacobians estimate the Gram matrix of the objectives, and the weights that follow from it."""
