"""The kind "residual": what the client's sketch of the round lost, against what all sketches add up to."""
