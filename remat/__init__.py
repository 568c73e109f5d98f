"""The face of remat; filled in by its own files."""
