"""What a coordinator shows at `/metrics`: numbers of its machine and the federation, which a thread keeps in memory."""
