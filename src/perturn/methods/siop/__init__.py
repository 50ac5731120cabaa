"""SIOP: clusters of final answers, and the credit that reads their likelihood."""
