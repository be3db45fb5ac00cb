"""Tables and lines on a terminal."""
