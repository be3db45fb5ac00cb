"""Files of others, read so that nothing in them runs and a bad one takes little memory, and files of an owner alone."""
