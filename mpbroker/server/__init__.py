"""What a request means: dispatch, execution, waiting, answers."""
