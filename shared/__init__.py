"""What router and worker have in common. Imports nothing of either."""

__version__ = "0.1.0"
