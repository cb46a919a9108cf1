"""Exported graphs: their manifest, inputs and networks, writing MindIR and reading it back."""
