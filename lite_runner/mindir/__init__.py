"""Exported MindIR graphs: manifest, inputs, networks, writing and inspection."""
