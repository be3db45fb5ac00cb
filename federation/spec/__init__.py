"""The run specification: sections, options, schedules, metrics of tasks, shared parameters, noise and its cost."""
