"""Count how much each client uses, and throttle clients above their quotas."""
