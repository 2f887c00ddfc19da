"""The exporter: a process that shows what the others have counted.

It serves Prometheus, a status page and health checks over HTTP, and writes the request
log. It reads shared memory and logs, takes no lock that a request needs, and may hang
or die without anybody noticing but those who look at it.
"""
