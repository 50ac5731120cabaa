"""Studies: methods x seeds x environments from one file, each cell an ordinary run, what cells share made once."""
