"""The command that delivers alerts, and runs until it is stopped."""
