"""The sections of a recipe, one dataclass each, and how YAML and key=value become them."""
