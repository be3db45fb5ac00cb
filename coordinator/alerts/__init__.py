"""What an operator should look at: facts that follow from the record, and their rows with a beginning and an end."""
