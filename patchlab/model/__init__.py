"""What a model is: its tree, what differs between two, its skeleton, and every known class."""
