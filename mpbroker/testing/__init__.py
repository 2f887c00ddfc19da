"""The pytest plug-in: brokers as fixtures."""
