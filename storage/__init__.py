"""Where facts are kept: SQL tables with their migrations, and content-addressed blobs."""
