"""What `fedpareto new` writes: a task of each kind, which is copied as it stands here, and its data and other files."""
