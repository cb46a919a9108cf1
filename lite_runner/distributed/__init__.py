"""A job of several processes that somebody else starts: which of them this one is, and joining."""
