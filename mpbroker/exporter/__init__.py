"""The exporter: a process that shows what the other processes have counted.

It serves metrics for Prometheus, a status page and health checks over HTTP, and writes
the request log. It reads shared memory and logs and takes no lock that a request needs.
If it hangs or dies, only the readers of its pages notice.
"""
