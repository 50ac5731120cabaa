"""Credits, quantities, explorers and row makers from single papers, registered as entry points of Perturn."""
