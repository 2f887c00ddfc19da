"""Used by every floor: errors, logging, definitions of configuration keys."""
