"""Modules that every floor uses: errors, logging, definitions of configuration keys."""
