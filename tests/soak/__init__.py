"""Several coordinators on one PostgreSQL with their workers, all real processes, and what befalls them."""
