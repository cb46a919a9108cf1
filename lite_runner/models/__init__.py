"""The networks, one file an architecture, and what they share."""
