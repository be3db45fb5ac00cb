"""The run specification: its sections, names, units and bounds."""
