"""ArCHer: critics of an utterance level, and the credit that reads them."""
