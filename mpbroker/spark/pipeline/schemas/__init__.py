"""Types of columns, and schemas of values: written down, in a registry, or inferred."""
