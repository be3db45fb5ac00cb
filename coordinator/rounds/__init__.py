"""The life of a run: rounds, phases, replies, steps; what the database knows is all that counts."""
