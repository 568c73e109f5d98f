"""torch.fx graph in, torch.fx graph out."""
