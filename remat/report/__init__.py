"""Plans for people: text now; other formats stand beside it, one a file."""
