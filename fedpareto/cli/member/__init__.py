"""`fedpareto worker ...`: the commands of a member."""
