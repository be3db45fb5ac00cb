"""A run as one HTML page: read over the admin connection, with charts as SVG, and without external files."""
