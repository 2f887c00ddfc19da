"""Resources that have configs, and where the value of each config comes from."""
