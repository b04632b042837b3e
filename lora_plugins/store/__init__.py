"""The store: verified, immutable adapter directories on this host, named by the digest of their bytes."""
