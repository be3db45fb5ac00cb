"""The content of `fedpareto demo`: ten hospitals, two of which have another scanner."""
