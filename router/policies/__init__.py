"""Routing policies: pure rankings of workers for one request."""
