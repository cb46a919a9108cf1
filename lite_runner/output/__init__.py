"""What a run leaves behind: its folder, results and printed text."""
