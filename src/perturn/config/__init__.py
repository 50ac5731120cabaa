"""The sections of a recipe, one dataclass each, and the parser that reads them from YAML and `key=value` overrides."""
