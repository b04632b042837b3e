"""Adapters in object stores: S3, and every fsspec file system."""
