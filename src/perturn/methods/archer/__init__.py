"""ArCHer: critics Q and V of turns, and the credit that uses them."""
