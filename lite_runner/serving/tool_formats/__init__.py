"""How families of models write the calls of tools: read as they come, and as a grammar."""
