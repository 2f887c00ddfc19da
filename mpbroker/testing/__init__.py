"""The pytest plug-in, whose fixtures are brokers and clusters."""
