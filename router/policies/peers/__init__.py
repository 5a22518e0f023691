"""Published routing rules of other projects, re-implemented from their documentation and source, to compare with.

Each stands where its project would put it, early in a request's life, and sees what ours sees: exact matches from the
directory (promises of the router's own recent sends included) where some of the projects guess, and loads that count
own sends at once where some scrape them. Both can only help a peer.
"""
