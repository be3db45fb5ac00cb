"""Statistics of the members' data: columns, sums that add up exactly, the members' rules, and what is shown."""
