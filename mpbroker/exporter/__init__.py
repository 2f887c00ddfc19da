"""The exporter: a process that serves the broker's figures as metrics and pages.

It serves metrics for Prometheus, a status page and health checks over HTTP, and writes
the request log. It reads shared memory and logs and takes no lock that a request needs.
If it hangs or dies, only the readers of its pages notice.
"""
