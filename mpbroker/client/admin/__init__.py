"""The client that manages topics, configs, groups, ACLs, quotas and users."""
