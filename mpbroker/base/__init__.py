"""Modules that all other packages use: errors, logging, definitions of settings."""
