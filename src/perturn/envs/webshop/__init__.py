"""Environment `webshop`: WebShop's text environment, on the user's copy of its catalogue."""
