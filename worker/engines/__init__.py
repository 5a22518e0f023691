"""Engines that compute tokens, all behind one protocol."""
