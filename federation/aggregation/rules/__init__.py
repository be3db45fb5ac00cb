"""The rules and the algorithms for objectives: one file for each family."""
