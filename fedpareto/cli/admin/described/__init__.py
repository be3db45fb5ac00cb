"""The command that shows what a run has told of the members' data."""
