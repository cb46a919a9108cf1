"""Several ranks: rank tables, msrun started, watched and ended, or joined."""
