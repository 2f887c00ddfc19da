"""After a death: repair of shared memory; silent processes; poisonous requests."""
