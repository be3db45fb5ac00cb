"""A run's results at a member's site: the coordinator's signed answer, what it is compared with, and the model."""
