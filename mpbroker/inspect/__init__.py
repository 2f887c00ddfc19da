"""Read a broker from outside: its shared memory, its dead, its control protocol."""
