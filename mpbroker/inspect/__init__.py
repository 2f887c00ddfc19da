"""Read a broker from outside: shared memory, records of deaths, control protocol."""
