"""The metadata log and its image: topics, configs, ACLs, quotas, SCRAM users."""
