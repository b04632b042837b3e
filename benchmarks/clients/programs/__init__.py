"""What pages of libraries say to type, for a server at argv[1] and the adapters after it; run by their own Python."""
