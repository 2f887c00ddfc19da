"""Administration by a client: topics, configs, groups, ACLs, quotas, users."""
