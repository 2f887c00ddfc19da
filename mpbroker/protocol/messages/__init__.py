"""The messages of each API, as tables of fields; one module for each API."""
