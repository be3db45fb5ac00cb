"""The course of a run: rounds, phases, replies, steps. Its whole state is in the database and the blob store."""
