"""Studies: methods x seeds x environments from one file. Each cell is an ordinary run, and shared stages run once."""
