"""The global directory: which worker holds which KV block now."""
