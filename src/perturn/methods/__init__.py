"""Credits, quantities, explorers and row makers of single papers, found through entry points of our own package."""
