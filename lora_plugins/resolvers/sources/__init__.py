"""Places that adapters come from."""
