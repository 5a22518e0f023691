"""One authenticated connection for each router-worker pair."""
