"""What an island trains: the task, its data, model and inner optimizer."""
