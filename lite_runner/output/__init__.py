"""The run folder, results and printed text."""
