"""One module an API: its messages as tables of fields."""
