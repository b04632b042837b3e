"""Sources of adapters: directories, object stores, the Hub, and pushes."""
