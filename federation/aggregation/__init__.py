"""Aggregation: from the updates of a round to one direction, through their Gram matrix."""
