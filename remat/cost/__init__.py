"""What ops cost: seconds, FLOPs and workspaces, on a device that is here or only described."""
