"""Tasks: data, model and inner optimizer of an island."""
