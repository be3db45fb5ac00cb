"""The `fedpareto` command: one module per group of commands. Heavy modules are imported inside the commands."""
