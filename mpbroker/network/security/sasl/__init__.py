"""SASL, the server's side: state machines that see tokens and never a socket.

authenticator    Kafka's requests around the tokens: which may come when
plain, scram, oauthbearer    one mechanism each: token in, token out
jaas             the users of a sasl.jaas.config
"""
