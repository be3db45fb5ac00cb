"""Blobs as objects in a bucket of S3, Google Cloud Storage or Azure; needs the extra `objects`."""
