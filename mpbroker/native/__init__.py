"""The compiled modules, where they were built; each has a twin in Python."""
