"""Several ranks on this machine: started with msrun, watched, and ended together."""
