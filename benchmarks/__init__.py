"""Scripts whose printed figures are the only ones that README and docs may state."""
