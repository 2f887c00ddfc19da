"""Describe and change configs of topics, brokers, groups and subscriptions."""
