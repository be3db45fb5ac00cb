"""A search for what private sums of statistics show of one member and of one sample, with the code of real members."""
