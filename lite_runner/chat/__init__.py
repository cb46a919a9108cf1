"""run_mode=chat: a conversation in the terminal."""
