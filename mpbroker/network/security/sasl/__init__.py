"""Authenticate clients by SASL, in state machines that see tokens and no socket.

authenticator    Kafka's requests around the tokens, and their order
plain, scram, oauthbearer    one mechanism each: token in, token out
jaas             the users of a sasl.jaas.config
"""
