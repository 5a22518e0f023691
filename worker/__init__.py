"""One engine, its pool of KV blocks, and the host that serves it to routers."""
