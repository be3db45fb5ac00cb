"""The kind "statistics": counts and sums of columns of the client's data. It takes no model."""
