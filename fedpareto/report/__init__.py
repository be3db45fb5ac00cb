"""A run as one HTML page: read over the admin connection, drawn by hand, without anything from elsewhere."""
