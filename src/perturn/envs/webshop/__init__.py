"""WebShop's text environment on a catalogue of yours."""
