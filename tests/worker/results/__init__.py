"""What a member accepts of a coordinator that tells it of a run's model."""
