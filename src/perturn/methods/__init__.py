"""What single papers add: credits, quantities, explorers and row makers, found through entry points of our own."""
