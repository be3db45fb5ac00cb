"""The reasons of refusals, declines and ended assignments, and the command that explains one."""
