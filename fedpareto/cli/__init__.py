"""The `fedpareto` command: one module per group of commands. What is heavy is imported inside the commands."""
