"""What a model is: its classes, its tree, its structure from a config, and every class installed."""
