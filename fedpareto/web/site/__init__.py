"""The member's console: what a worker's files say, for a browser on its machine, and the owner's decisions."""
