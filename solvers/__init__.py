"""A problem in, a schedule out: pure Python and NumPy, no torch."""
