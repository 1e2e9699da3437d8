"""torch.library custom ops, their gradients, and the order in which stages run."""
