"""Commands for research: simulations, experiments, and single aggregations."""
