"""Takes requests, finds the worker that will start each one soonest, and carries the answer back."""
