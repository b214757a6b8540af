"""What we write: exact transforms, rounding, the quantise pipeline and the packed checkpoint."""
