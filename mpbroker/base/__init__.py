"""What every floor may use: errors, logging, definitions of configuration keys."""
