"""Adapters to other libraries. Each file runs as a script in the library's interpreter, so none imports Perturn."""
