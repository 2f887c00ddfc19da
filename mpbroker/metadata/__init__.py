"""The metadata log (as in KRaft), and the state it gives: topics, configs, ACLs..."""
