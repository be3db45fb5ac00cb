"""Storage: SQL tables with their migrations, and content-addressed blobs."""
