"""MindIR that others can run: what is written, and the manifest that says what it is."""
