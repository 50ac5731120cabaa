"""SIOP: clusters of final answers, and the credit that uses their likelihood."""
