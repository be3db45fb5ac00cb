"""What people see in a browser: the operators' console, the report of a run, and the pages that both are made of."""
