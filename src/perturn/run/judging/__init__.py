"""The judge of a recipe: its engine, its rewards for episodes, and its agreement with labels."""
